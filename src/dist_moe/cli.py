"""The command line: python -m dist_moe demo | plan | explain | doctor, also installed as dist-moe."""

import contextlib
import enum
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from . import registry
from .config import Config
from .demo import Options, run_demo
from .doctor import describe, examine
from .planner import plan_memory

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
    except (ValueError, TypeError, RuntimeError) as error:  # NotImplementedError is a RuntimeError
        print(f"dist-moe: error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None


DeviceOption = Annotated[Device | None, typer.Option(help="Default: the GPU if there is one.")]
BackendOption = Annotated[Backend | None, typer.Option(help="Default: the best that runs on the device.")]

# The fields of a Config that decide on its memory.
Tokens = Annotated[int, typer.Option(help="The most tokens a rank passes in one call.")]
Hidden = Annotated[int, typer.Option(help="Hidden size, a multiple of 32.")]
Intermediate = Annotated[int, typer.Option(help="Intermediate size of an expert, a multiple of 32.")]
TopK = Annotated[int, typer.Option(help="Experts of a token.")]
Experts = Annotated[int, typer.Option(help="Experts over all ranks.")]
Layers = Annotated[int, typer.Option(help="MoE layers that share one activation slot.")]
EpSize = Annotated[int, typer.Option(help="Ranks that share the experts.")]
DeviceFactor = Annotated[float, typer.Option(help="Received rows that scratch holds / balanced rows.")]
SlotFactor = Annotated[
    float | None, typer.Option(help="Size of a slot: 0 recomputes all, 1 saves all under balanced routing.")
]
SlotBytes = Annotated[int | None, typer.Option(help="Size of a slot in bytes, instead of --slot-factor.")]
Slots = Annotated[int, typer.Option(help="Independent activation slots.")]
Inference = Annotated[bool, typer.Option("--inference", help="No backward, so no slots.")]


def _config(
    tokens, hidden, intermediate, top_k, experts, layers, device_factor, slot_factor, slot_bytes, slots, inference
) -> Config:
    return Config(
        num_local_input_tokens=tokens,
        hidden_dim=hidden,
        intermediate_dim=intermediate,
        top_k=top_k,
        num_experts=experts,
        max_moe_layers_per_activation_slot=layers,
        device_scratch_capacity_factor=device_factor,
        activation_slot_capacity_factor=slot_factor,
        activation_slot_bytes=slot_bytes,
        num_activation_slots=slots,
        inference=inference,
    )


@app.callback()
def _help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def demo(
    steps: Annotated[int, typer.Option(help="Training steps.")] = 240,
    seconds: Annotated[float, typer.Option(help="No training run begins a step after this time.")] = 60.0,
    ranks: Annotated[int, typer.Option(help="Ranks, 1 to 4: processes on a CPU or on as many GPUs.")] = 2,
    device: DeviceOption = None,
    backend: BackendOption = None,
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
def plan(
    tokens: Tokens,
    hidden: Hidden,
    intermediate: Intermediate,
    top_k: TopK,
    experts: Experts,
    layers: Layers = 1,
    ep_size: EpSize = 1,
    device_factor: DeviceFactor = 1.0,
    slot_factor: SlotFactor = None,
    slot_bytes: SlotBytes = None,
    slots: Slots = 1,
    inference: Inference = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as one line of JSON.")] = False,
) -> None:
    """Print what a Context would allocate."""
    with _one_line_errors():
        config = _config(
            tokens,
            hidden,
            intermediate,
            top_k,
            experts,
            layers,
            device_factor,
            slot_factor,
            slot_bytes,
            slots,
            inference,
        )
        memory_plan = plan_memory(config, ep_size)
    print(json.dumps(memory_plan.to_dict()) if as_json else memory_plan.explain())


@app.command()
def explain(
    tokens: Tokens,
    hidden: Hidden,
    intermediate: Intermediate,
    top_k: TopK,
    experts: Experts,
    layers: Layers = 1,
    ep_size: EpSize = 1,
    device_factor: DeviceFactor = 1.0,
    slot_factor: SlotFactor = None,
    slot_bytes: SlotBytes = None,
    slots: Slots = 1,
    inference: Inference = False,
    device: DeviceOption = None,
    backend: BackendOption = None,
) -> None:
    """Print the plan, and which backend would run every op and why."""
    with _one_line_errors():
        config = _config(
            tokens,
            hidden,
            intermediate,
            top_k,
            experts,
            layers,
            device_factor,
            slot_factor,
            slot_bytes,
            slots,
            inference,
        )
        text = registry.explain(config, ep_size, device=device, backend=backend)
    print(text)


def main() -> None:
    app(prog_name="dist-moe")
