"""The command line: python -m dist_moe demo | plan | explain | doctor | check | bench, also installed as dist-moe."""

import contextlib
import enum
import importlib.util
import inspect
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from . import check as self_test
from . import registry
from .config import BlockScaledConfig, BlockScaledFormat, Config, VmmConfig
from .demo import Options, run_demo
from .doctor import describe, examine
from .models import MODELS, find
from .plan_report import GIB, Report, Skew, bars, largest_that_fits, print_report

PIPE_WIDTH = 150  # of a table that no terminal shows, so that no line of it breaks

app = typer.Typer(
    help="Routed experts of a mixture-of-experts layer across GPUs, in Triton.",
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class Device(enum.StrEnum):
    cpu = "cpu"
    cuda = "cuda"


class Backend(enum.StrEnum):
    triton = "triton"
    reference = "reference"


@contextlib.contextmanager
def _one_line_errors() -> Iterator[None]:
    """What the arguments are to blame for: one line and exit code 2."""
    try:
        yield
    except (ValueError, TypeError, RuntimeError, OSError) as error:  # NotImplementedError is a RuntimeError
        print(f"dist-moe: error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None


DeviceOption = Annotated[Device | None, typer.Option(help="Default: the GPU if there is one.")]
BackendOption = Annotated[Backend | None, typer.Option(help="Default: the best that runs on the device.")]


class Precision(enum.StrEnum):
    bf16 = "bf16"
    mxfp8 = "mxfp8"
    nvfp4 = "nvfp4"


class TrainingPrecision(enum.StrEnum):
    bf16 = "bf16"
    mxfp8 = "mxfp8"


class Pipeline(enum.StrEnum):
    staged = "staged"
    mega = "mega"


FORMATS = {Precision.mxfp8: BlockScaledFormat.MXFP8_E4M3, Precision.nvfp4: BlockScaledFormat.NVFP4}
MODEL_NAMES = ", ".join(model.name for model in MODELS)


@dataclass(frozen=True)
class Sizes:
    """The options that make a Config, and the number of ranks."""

    model: Annotated[str | None, typer.Option(help=f"The experts of {MODEL_NAMES}.")] = None
    tokens: Annotated[int | None, typer.Option(help="The most tokens a rank passes in one call.")] = None
    hidden: Annotated[int | None, typer.Option(help="Hidden size, a multiple of 32.")] = None
    intermediate: Annotated[int | None, typer.Option(help="Intermediate size of an expert, a multiple of 32.")] = None
    top_k: Annotated[int | None, typer.Option(help="Experts of a token.")] = None
    experts: Annotated[int | None, typer.Option(help="Experts over all ranks.")] = None
    layers: Annotated[int, typer.Option(help="MoE layers that share one activation slot.")] = 1
    ep_size: Annotated[int, typer.Option(help="Ranks that share the experts.")] = 1
    device_factor: Annotated[float, typer.Option(help="Received rows that scratch holds / balanced rows.")] = 1.0
    vmm_total_factor: Annotated[
        float | None, typer.Option(help="The same of device and host scratch together. Default: none on the host.")
    ] = None
    slot_factor: Annotated[
        float | None, typer.Option(help="Size of a slot: 0 recomputes all, 1 saves all under balanced routing.")
    ] = None
    slot_bytes: Annotated[int | None, typer.Option(help="Size of a slot in bytes, instead of --slot-factor.")] = None
    slots: Annotated[int, typer.Option(help="Independent activation slots.")] = 1
    precision: Annotated[Precision, typer.Option(help="Of the GEMMs; nvfp4 needs --inference.")] = Precision.bf16
    pipeline: Annotated[Pipeline | None, typer.Option(help="Of mxfp8 and nvfp4; default: staged.")] = None
    inference: Annotated[bool, typer.Option("--inference", help="No backward, so no slots.")] = False

    def config(self, tokens: int | None = None) -> Config:
        """The Config, with these tokens instead of --tokens if given."""
        shape = {
            "tokens": self.tokens if tokens is None else tokens,
            "hidden": self.hidden,
            "intermediate": self.intermediate,
            "top-k": self.top_k,
            "experts": self.experts,
        }
        if self.model is not None:
            model = find(self.model)
            sizes = {"hidden": model.D, "intermediate": model.F, "top-k": model.K, "experts": model.E}
            shape |= {name: size for name, size in sizes.items() if shape[name] is None}
        if missing := [f"--{name}" for name, value in shape.items() if value is None]:
            raise ValueError(f"missing {', '.join(missing)}; --model gives all but --tokens")
        if self.pipeline is not None and self.precision is Precision.bf16:
            raise ValueError("--pipeline is for --precision mxfp8 and nvfp4")
        block_scaled = None
        if self.precision is not Precision.bf16:
            block_scaled = BlockScaledConfig(FORMATS[self.precision], pipeline=self.pipeline or Pipeline.staged)
        return Config(
            *shape.values(),
            max_moe_layers_per_activation_slot=self.layers,
            device_scratch_capacity_factor=self.device_factor,
            activation_slot_capacity_factor=self.slot_factor,
            activation_slot_bytes=self.slot_bytes,
            num_activation_slots=self.slots,
            vmm=None if self.vmm_total_factor is None else VmmConfig(self.vmm_total_factor),
            block_scaled=block_scaled,
            inference=self.inference,
        )


def takes_sizes(command: Callable[..., None]) -> Callable[..., None]:
    """command(sizes, ...) as a command whose options are the fields of Sizes, then its own."""
    shared = inspect.signature(Sizes).parameters.values()
    _, *own = inspect.signature(command).parameters.values()

    def run(**options) -> None:
        sizes = Sizes(**{p.name: options.pop(p.name) for p in shared})
        command(sizes, **options)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    options = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*shared, *own)]
    run.__signature__ = inspect.Signature(options)
    return run


@app.callback()
def _help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def demo(
    steps: Annotated[int, typer.Option(help="Training steps.")] = 240,
    seconds: Annotated[
        float | None, typer.Option(help="No training run begins a step after this time. Default: 60, with mxfp8 300.")
    ] = None,
    ranks: Annotated[int, typer.Option(help="Ranks, 1 to 4: processes on a CPU or on as many GPUs.")] = 2,
    device: DeviceOption = None,
    backend: BackendOption = None,
    precision: Annotated[
        TrainingPrecision, typer.Option(help="mxfp8: train in MXFP8 too, then serve in BF16, MXFP8 and NVFP4.")
    ] = TrainingPrecision.bf16,
    out: Annotated[Path, typer.Option(help="Where to save the picture.")] = Path("dist_moe_demo.png"),
    seed: Annotated[int, typer.Option(help="Equal seeds give equal losses.")] = 0,
    triton: Annotated[bool, typer.Option(help="On a CPU: end with steps on interpreted Triton kernels.")] = True,
    json: Annotated[bool, typer.Option("--json", help="One line of JSON on stdout, the rest on stderr.")] = False,
) -> None:
    """Train a small MoE language model on several ranks, beside the same model on one rank."""
    with _one_line_errors():
        options = Options(
            steps=steps,
            seconds=seconds,
            ranks=ranks,
            device=device,
            backend=backend,
            precision=precision,
            out=out,
            seed=seed,
            triton=triton,
            json=json,
        )
    raise typer.Exit(run_demo(options))


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print the findings as one line of JSON.")] = False):
    """Say what this machine has, what runs on it, and why the rest does not."""
    found = examine()
    print(json.dumps(found) if as_json else describe(found))


@app.command()
def check(
    device: DeviceOption = None,
    ranks: Annotated[int, typer.Option(help="The path runs on 1 to this many virtual ranks.", min=1)] = 2,
    backend: BackendOption = None,
    out: Annotated[Path | None, typer.Option("--json", help="Save everything, to send it to somebody.")] = None,
) -> None:
    """Compare every op with its oracle and the path with the dense layer, on this machine; exit code 1 if one fails."""
    with _one_line_errors():
        where = registry.default_device(device)
        if out is not None and not out.absolute().parent.is_dir():
            raise ValueError(f"the folder of --json {out} does not exist")
    started = time.perf_counter()
    with Console(stderr=True).status("starting") as status:
        rows = self_test.check(where, backend, ranks, status.update)
    answer = {"device": str(where), "backend": backend, "ranks": ranks, "passed": self_test.passed(rows)}
    answer |= {"seconds": round(time.perf_counter() - started, 1), "rows": [asdict(row) for row in rows]}
    found = examine()
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)
    console.print(self_test.table_of(rows))
    print(describe(found))
    ran = any(row.verdict != self_test.NOT_RUN for row in rows)
    verdict = "passed" if answer["passed"] else "FAILED" if ran else "nothing ran"
    print(f"check of {where}: {verdict} in {answer['seconds']} s")
    if out is not None:
        out.write_text(json.dumps(answer | {"machine": found}, indent=1) + "\n")
        print(f"saved: {out}")
    raise typer.Exit(0 if answer["passed"] else 1)


def _skews(text: str | None) -> list[float]:
    try:
        return [float(word) for word in (text or "").replace(",", " ").split()]
    except ValueError:
        raise ValueError(f"--skews must be numbers with commas between them, got {text!r}") from None


def _gib_as_bytes(gib: float) -> int:
    if not (math.isfinite(gib) and gib > 0):
        raise ValueError(f"--fits must be finite and positive, got {gib:g}")
    return int(gib * GIB)


def _check_picture(png: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--png needs matplotlib; pip install 'dist-moe-triton[demo]'")
    if png.suffix != ".png":
        raise ValueError(f"--png wants the name of a file that ends in .png, got {png}")
    if not png.absolute().parent.is_dir():
        raise ValueError(f"the folder of --png {png} does not exist")


def _draw(png: Path, sizes: Sizes, report: Report, skews: list[Skew]) -> None:
    from .plan_picture import draw

    config = report.config
    shape = f"D {config.hidden_dim}, F {config.intermediate_dim}, E {config.num_experts}, K {config.top_k}"
    call = f"T {config.num_local_input_tokens}, {report.ep_size} rank(s), {sizes.precision}"
    draw(png, bars(report, skews), f"{sizes.model or 'dist_moe'}: {shape}\n{call}")


@app.command()
@takes_sizes
def plan(
    sizes: Sizes,
    fits: Annotated[
        float | None, typer.Option(help="Instead of --tokens: the most tokens a rank whose memory fits in these GiB.")
    ] = None,
    with_weights: Annotated[
        bool, typer.Option("--with-weights", help="Count the weights and weight gradients of --layers layers.")
    ] = False,
    skews: Annotated[
        str | None, typer.Option(help="Rows of the fullest rank over the mean, e.g. 1,1.5,2: what each asks for.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Whose form block-scaled operands have, e.g. sm_90. Default: codes and scales.")
    ] = None,
    png: Annotated[Path | None, typer.Option(help="Save stacked bars; with --skews also one that fits each.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as one line of JSON.")] = False,
) -> None:
    """Print what a Context would allocate, what fits, and what a skewed routing makes of it."""
    with _one_line_errors():
        if png is not None:
            _check_picture(png)
        report = Report(sizes.config(None if fits is None else 1), sizes.ep_size, with_weights, device)
        answer, headline = {}, None
        if fits is not None:
            if sizes.tokens is not None:
                raise ValueError("--fits finds the tokens; leave --tokens out")
            report, problem = largest_that_fits(report, _gib_as_bytes(fits))
            most = report.config.num_local_input_tokens
            headline = f"largest T that fits in {fits:g} GiB: {most:,}; {most + 1:,} does not: {problem}"
            answer["fits"] = {"gib": fits, "problem_of_one_token_more": problem}
        found_skews = [report.skew(skew) for skew in _skews(skews)]
        answer |= report.to_dict(found_skews)
        if png is not None:
            _draw(png, sizes, report, found_skews)
    if as_json:
        print(json.dumps(answer))
        return
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)
    if headline is not None:
        console.print(f"{headline}\n", soft_wrap=True, markup=False)
    print_report(console, report, found_skews)
    if png is not None:
        console.print(f"\npicture: {png}", markup=False, soft_wrap=True)


@app.command()
@takes_sizes
def explain(
    sizes: Sizes,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, or a GPU that need not be here: sm_90, sm_100. Default: as is here.")
    ] = None,
    backend: BackendOption = None,
) -> None:
    """Print the plan, and which backend would run every op and why."""
    with _one_line_errors():
        text = registry.explain(sizes.config(), sizes.ep_size, device=device, backend=backend)
    print(text)


@app.command(
    add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)  # the options, --help among them, are those of benchmarks/sweep.py
def bench(context: typer.Context) -> None:
    """Measure models x tokens x routings x precisions beside floor and peers, with tables and pictures; see --help."""
    from .benchmarks import sweep

    with _one_line_errors():
        code = sweep.main(context.args)
    raise typer.Exit(code)


def main() -> None:
    app(prog_name="dist-moe")
