"""The grouped products on block-scaled operands beside those in BF16, on the rows of one rank.

    python -m benchmarks.scaled_gemms --shapes deepseek-v3 qwen3-30b --tokens 8192 --commit abc1234
    python -m benchmarks.scaled_gemms --tokens 16 64 128 --products w13 w2 --formats mxfp8_e4m3 nvfp4   decode
    python -m benchmarks.scaled_gemms --smoke                                                          on the CPU

The rank is the fullest of --ranks. Every result is compared with the BF16 product of the data before quantising, then
timed as a replayed CUDA graph; `tests/kernels_triton` hold it against the oracle. Weights of "mxfp8_e4m3" have square
blocks, as in training, those of "mxfp8_e4m3-along-k" and of NVFP4 blocks along K, as in inference. Bytes, and with them
the share of the roof, are counted as if operands were BF16.
"""

import functools
import sys
from types import SimpleNamespace

import torch
from torch import Tensor

from dist_moe import BlockScaledConfig, Config, formats, registry, testing
from dist_moe.quantized import Bundle, Quantized
from dist_moe.reference_formats import dequantize_columns, expand_rows
from dist_moe.shapes import align
from dist_moe.testing import Tolerance

from . import launch
from .bench_op import replayed
from .checks import require
from .gemms import BACKWARD, FORWARD, ExpertGemms
from .launch import Job, Miss
from .record import Rows, parse, parser
from .roofs import Roofs, backward_work, forward_work, measure_roofs
from .shapes import Shape, Traffic, config_of, load_of
from .timing import Method, measure

FORMATS = ("mxfp8_e4m3", "mxfp8_e4m3-along-k", "nvfp4")
BARS = {"mxfp8_e4m3": 20.0, "nvfp4": 12.0}  # dB of the worst row against BF16, of few columns too
OPS = ("quantize_rows", "quantize_columns", "quantize_weights", *(op for op in registry.FORMAT_OPS if "gemm" in op))


class ScaledGemms:
    """The same products as `gemms`, of operands quantised to one format."""

    def __init__(self, gemms: ExpertGemms, name: str, ops: SimpleNamespace):
        self._gemms, self._ops, self._square = gemms, ops, name == "mxfp8_e4m3"
        self.format = formats.by_name(name.removesuffix("-along-k"))
        starts = gemms.row_start_P.tolist()
        counts = [end - start for start, end in zip(starts, starts[1:], strict=False)]
        padded = torch.tensor([0, *(align(n, formats.ROW_ALIGNMENT) for n in counts)]).cumsum(0)
        device = gemms.row_start_P.device
        self._place = torch.cat([torch.arange(n) + p for n, p in zip(counts, padded.tolist(), strict=False)]).to(device)
        self._rows_end = max(int(padded[-1]), formats.ROW_ALIGNMENT)
        self._experts = {
            "row_start_P": padded.int().to(device),
            "num_rows_L": torch.tensor(counts, dtype=torch.int32, device=device),
        }

    def supports(self, product: str) -> bool:
        return product in FORWARD or self._square

    def _bundle(self, quantize: str, rows_RC: Tensor) -> Bundle:
        padded = rows_RC.new_zeros(self._rows_end, rows_RC.shape[1])
        padded[self._place] = rows_RC[: len(self._place)]
        zero = self._gemms.zero_1
        if quantize == "quantize_rows" and self._ops.expands_rows:
            found = self._ops.quantize_rows(padded, format=self.format)
            outer = () if found.outer_inv_R is None else (found.outer_inv_R, zero)
            return Bundle(expand_rows(found, self.format), zero, None, None, *outer)
        found: Quantized = getattr(self._ops, quantize)(padded, format=self.format, blocked=True, **self._experts)
        if quantize == "quantize_columns" and self._ops.expands_columns:
            return Bundle(dequantize_columns(found, format=self.format, blocked=True).to(rows_RC.dtype), zero)
        outer = () if found.outer_inv_R is None else (found.outer_inv_R, zero)
        return Bundle(found.values, zero, found.scales.flatten(), zero, *outer)

    def prepare(self, product: str):
        """(run, result, out): what is timed, what it wrote without the rows of padding, and where."""
        op, a, b, out = self._gemms._table()[product]
        op, b, out = op.replace("grouped_gemm", "grouped_gemm_scaled"), b(), out()
        options = {"format": self.format, "stop_1": self._gemms.zero_1, **self._experts}
        if op.endswith("wgrad"):
            out = torch.empty_like(out)
            operands = [self._bundle("quantize_columns", rows) for rows in (a, b)]
            run = functools.partial(self._ops.grouped_gemm_scaled_wgrad, *operands, out_LNK=out, **options)
            return functools.partial(run, accumulate=False), lambda: out, out
        w = self._ops.quantize_weights(b, format=self.format, square=self._square)
        out = out.new_empty(self._rows_end, out.shape[1])
        options["rows_per_expert"] = self._gemms.rows_per_expert
        operands = [self._bundle("quantize_rows", a), w.values]
        if op.endswith("dgrad"):
            operands += [w.transposed_scales, out, self._gemms.zero_1]
        else:
            operands += [w.scales, out, self._gemms.zero_1]
            options |= {"w_outer_inv_L": w.outer_inv_G, "square": self._square}
        return functools.partial(getattr(self._ops, op), *operands, **options), lambda: out[self._place], out


def ops_of(job: Job, shape: Shape, name: str) -> SimpleNamespace:
    """What a Context of the format runs, and which operands it keeps expanded."""
    how = BlockScaledConfig(name.removesuffix("-along-k"))
    config = Config(8, shape.D, shape.F, shape.K, shape.E, 1, block_scaled=how, inference=name != "mxfp8_e4m3")
    call = registry.call_of(job.device, None, config)
    functions = {op: registry.function(registry.choose(op, call)[0]) for op in OPS}
    expands = registry.expands_operands(config, call)
    expands_rows, expands_columns = expands and config.inference, expands and not config.inference
    return SimpleNamespace(**functions, expands_rows=expands_rows, expands_columns=expands_columns)


def run_shape(job: Job, rows: Rows, roofs: Roofs, args, shape: Shape, routing: str, T: int) -> None:
    ids = testing.routing(routing, num_ranks=job.W, T=T, K=shape.K, E=shape.E)
    traffic = Traffic(shape, ids)
    rank = max(range(job.W), key=traffic.rows_W.__getitem__)
    gemms = ExpertGemms.of_rank(traffic, rank, job.device)
    call = registry.call_of(job.device, None, config_of(traffic), traffic.W)
    names = ("grouped_gemm", "grouped_gemm_dgrad", "grouped_gemm_wgrad")
    ops = SimpleNamespace(**{op: registry.function(registry.choose(op, call)[0]) for op in names})
    load = load_of(traffic, rank)
    works = forward_work(load) | backward_work(load)
    scaled = {name: ScaledGemms(gemms, name, ops_of(job, shape, name)) for name in args.formats}
    for product in args.products:
        about = rows.about(shape, traffic, routing, product)
        run_bf16 = functools.partial(gemms.run, ops, product)
        run_bf16()
        methods, worst = [Method("bf16", replayed(job, run_bf16))], {"bf16": None}
        runs = []  # a graph does not keep alive what it reads
        for name, gemm in scaled.items():
            if not gemm.supports(product):
                continue
            run, result, _ = gemm.prepare(product)
            run()
            runs.append(run)
            bar = Tolerance(BARS[gemm.format.name])
            try:
                worst[name] = require(f"{name} {product}", result(), gemms.result(product), bar)
            except Miss as miss:
                rows.miss(f"{shape.name} {routing} T={T} {product}: {miss}")
                continue
            methods.append(Method(name, replayed(job, run)))
        times = measure(job, methods, args.rounds)
        for name, found in times.items():
            speed = times["bf16"].us / found.us
            rows.say_row(rows.add(about, name, found, works[product], roofs, 1, worst_row_db=worst[name], speed=speed))
            rows.say(f"    {speed:.2f} of BF16's speed")


def main(argv: list[str] | None = None) -> int:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--ranks", type=int, default=2, help="ranks that share the experts")
    options.add_argument("--formats", nargs="+", choices=FORMATS, default=[*FORMATS])
    options.add_argument("--products", nargs="+", choices=FORWARD + BACKWARD, default=[*FORWARD, *BACKWARD])
    args = parse(options, argv)
    job = launch.start(virtual=args.ranks, cpu=args.smoke)
    rows = Rows(job, "scaled", args)
    roofs = measure_roofs(job, args.rounds)
    rows.say(f"roofs: {roofs}")
    rows.each(args, functools.partial(run_shape, job, rows, roofs, args))
    return 1 if rows.missed else 0


if __name__ == "__main__":
    sys.exit(main())
