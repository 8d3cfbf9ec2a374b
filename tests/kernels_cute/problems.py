"""Small problems for the sm_100 products: operands inside larger, spoiled buffers, and what the oracle makes of them.

Exact operands are small integers under scales that are powers of two: every order of adding them up gives the same
FP32 sum, so that results have to be equal bit for bit. Scales are drawn one by one, and those of neighbouring experts
lie 2^20 apart, so that a scale from a wrong place shows.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dist_moe import reference_products
from dist_moe.formats import E8M0_BIAS, E8M0_NAN, PADDING_SCALE, Format, padded_scales
from dist_moe.kernels_cute import grouped_gemm
from dist_moe.quantized import Bundle, QuantizedWeights
from dist_moe.reference_formats import (
    decode,
    from_blocked,
    quantize_columns,
    quantize_rows,
    quantize_weights,
    scale_values,
    to_blocked,
    unpack_codes,
)
from dist_moe.reference_memory import put_rows
from dist_moe.shapes import Activation, align

ALIGNMENT = 128
BAD_VALUE, BAD_SCALE, BAD_OUT = 0x7F, 0xFF, 7.0  # NaN as a value and as a scale, where a format has one
EXPERT_EXPONENT = 20  # of the ratio of two experts' scales
TWO_LEVEL_EXPERT_EXPONENT = 9  # e4m3 scales reach no farther; their outer scales do
LOG2_E = 1.4426950408889634


def aligned(part: Tensor) -> Tensor:
    """A copy at an address that is a multiple of 128, as device memory is."""
    size = part.numel() * part.element_size()
    storage = torch.full((size + ALIGNMENT,), BAD_VALUE, dtype=torch.uint8)
    first = -storage.data_ptr() % ALIGNMENT
    place = storage[first : first + size].view(part.dtype).view(part.shape)
    place.view(torch.uint8).copy_(part.contiguous().view(torch.uint8))
    return place


def inside(part: Tensor, first: int, fill: int, after: int) -> Tensor:
    """A buffer of bad bytes with `part` from element `first` on and `after` more behind it."""
    row = math.prod(part.shape[1:]) * part.element_size()
    storage = torch.full(((first + len(part) + after) * row,), fill, dtype=torch.uint8)
    storage[first * row : (first + len(part)) * row] = part.contiguous().view(torch.uint8).flatten()
    return aligned(storage.view(part.dtype).view(-1, *part.shape[1:]))


def word(value: int) -> Tensor:
    return torch.tensor([value], dtype=torch.int64)


@dataclass
class Problem:
    """One product of one problem; `given` are the kernel's arguments by name, `out` what it writes."""

    op: str
    format: Format
    rows: tuple[int, ...]  # by expert
    N: int
    K: int
    exact: bool = True
    columns: tuple[int, int] | None = None
    out_dtype: torch.dtype = torch.bfloat16
    accumulate: bool = False
    activation: Activation = Activation()
    stores_h1: bool = False
    stopped: bool = False
    edges: bool = False  # rows of zeros, of NaN, of very small and very large values
    given: dict = field(default_factory=dict)

    def __post_init__(self):
        self.generator = torch.Generator().manual_seed(len(self.rows) * self.N + self.K + sum(self.rows))
        starts = torch.tensor([0, *(align(n, 128) for n in self.rows)]).cumsum(0)
        self.row_start_P, self.num_rows_L = starts.int(), torch.tensor(self.rows, dtype=torch.int32)
        self.R = int(starts[-1]) + 128  # more rows than are used
        self.real_R = torch.zeros(self.R, dtype=torch.bool)
        for start, n in zip(starts.tolist(), self.rows, strict=False):
            self.real_R[start : start + n] = True
        self.stop_1 = word(int(self.stopped))
        getattr(self, f"_make_{'rows' if self.op in ('forward', 'dgrad') else self.op}")()

    # ---- operands ---------------------------------------------------------------------------------------------------

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def _integers(self, *shape: int) -> Tensor:
        return torch.randint(-3, 4, shape, generator=self.generator).float()

    def _exponents(self, *shape: int) -> Tensor:
        return torch.randint(0, 4, shape, generator=self.generator)

    def _codes(self, exponents: Tensor) -> Tensor:
        """Scale codes (uint8) of powers of two; for SwiGLU such that sigmoids are neither 0 nor 1."""
        exponents = exponents - (5 if self.op == "swiglu" else 2)
        if self.format.two_level:
            exponents = exponents - 3
            return torch.exp2(exponents.float()).to(self.format.scale_dtype).view(torch.uint8)
        return (exponents + E8M0_BIAS).to(torch.uint8)

    def _expert_exponents(self, rows: int, cols: int) -> Tensor:
        """Of weights [L, rows, cols]; E8M0 scales of neighbouring experts lie 2^20 apart."""
        far = EXPERT_EXPONENT
        if self.op == "swiglu":
            far = -EXPERT_EXPONENT  # sigmoids stay near a half
        if self.format.two_level:
            far = TWO_LEVEL_EXPERT_EXPONENT
        L = len(self.rows)
        return self._exponents(L, rows, cols) + far * (torch.arange(L) % 2)[:, None, None]

    def _expert_of_block(self, B: int) -> Tensor:
        """The expert of every block of rows."""
        return torch.arange(len(self.rows)).repeat_interleave(self.row_start_P.diff() // B)

    def _values(self, v: Tensor) -> Tensor:
        """Small integers as values of the format: quantised with scales of 1."""
        if self.format.values_per_byte == 1:
            return v.to(self.format.value_dtype)
        code = torch.tensor([0, 2, 4, 5])[v.abs().long()] + 8 * (v < 0)  # e2m1 of 0, 1, 2, 3
        return (code[..., ::2] | code[..., 1::2] << 4).to(torch.uint8).view(self.format.value_dtype)

    def _rows_operand(self, C: int) -> Bundle:
        B = self.format.block
        if self.exact:
            values, codes = self._values(self._integers(self.R, C)), self._codes(self._exponents(self.R, C // B))
            outer = torch.exp2(self._integers(self.R)) * 1.1
            scales = to_blocked(codes[None]).view(self.format.scale_dtype)
        else:
            found = quantize_rows(self._random(self.R, C), format=self.format, blocked=True)
            values, scales, outer = found
        if self.edges:
            bytes_RC = values.view(torch.uint8)
            bytes_RC[0], bytes_RC[1, 5] = 0, self.format.nan_code
            row, codes = torch.arange(self.R)[:, None], from_blocked(scales.view(torch.uint8), *scales.shape)[0]
            codes = torch.where(row == 2, codes - 60, torch.where(row == 3, codes + 90, codes))
            codes = torch.where((row == 4) & (torch.arange(codes.shape[1]) == 1), E8M0_NAN, codes)
            scales = to_blocked(codes[None].to(torch.uint8)).view(scales.dtype).view(scales.shape)
        values.view(torch.uint8)[~self.real_R] = BAD_VALUE
        scales = torch.where(self._unreal(scales.shape), BAD_SCALE, scales.view(torch.uint8)).view(scales.dtype)
        bundle = self._placed(values, scales.flatten())
        if self.format.two_level:
            bundle = bundle._replace(outer_inv=inside(outer, 2, BAD_SCALE, 3), outer_inv_start_1=word(2))
        return bundle

    def _unreal(self, shape) -> Tensor:
        unreal = (~self.real_R)[None, :, None].expand(1, self.R, shape[1]).to(torch.uint8)
        return to_blocked(unreal).view(shape) == 1

    def _columns_operand(self, C: int) -> Bundle:
        end, B = int(self.row_start_P[-1]), self.format.block
        if self.exact:
            values = self._integers(end, C) * self.real_R[:end, None]
            natural = torch.full(padded_scales(C, end // B), PADDING_SCALE, dtype=torch.uint8)
            odd_B = self._expert_of_block(B) % 2
            natural[:C, : end // B] = self._codes(self._exponents(C, end // B) + EXPERT_EXPONENT * odd_B)
            values, scales = values.to(self.format.value_dtype), to_blocked(natural[None]).view(self.format.scale_dtype)
        else:
            tables = {"row_start_P": self.row_start_P, "num_rows_L": self.num_rows_L}
            found = quantize_columns(self._random(self.R, C), format=self.format, blocked=True, **tables)
            size = padded_scales(C, end // B)[0] * end // B
            values, scales = found.values[:end], found.scales.flatten()[:size].view(-1, end // B)
        values, scales = values.clone(), scales.clone()
        for start, count in zip(self.row_start_P.tolist(), self.rows, strict=False):
            first, last = (start + align(count, B), start + align(count, 128))  # behind the expert's last block
            values.view(torch.uint8)[first:last] = BAD_VALUE
            natural = from_blocked(scales.view(torch.uint8), *scales.shape)[0].clone()
            natural[:, first // B : last // B] = BAD_SCALE
            scales = to_blocked(natural[None]).view(scales.dtype).view(scales.shape)
        return self._placed(values, scales.flatten())

    def _placed(self, values: Tensor, scales: Tensor) -> Bundle:
        row, unit = 3, 1
        scales = inside(scales.view(-1, ALIGNMENT), unit, BAD_SCALE, 9).flatten()
        return Bundle(inside(values, row, BAD_VALUE, 5), word(row), scales, word(ALIGNMENT * unit))

    def _weights(self, N: int, K: int) -> QuantizedWeights:
        L, B, square = len(self.rows), self.format.block, self.format.values_per_byte == 1
        if not self.exact:
            found = quantize_weights(self._random(L, N, K), format=self.format, square=square)
        else:
            scales = [self._expert_exponents(N, K // B), self._expert_exponents(K, N // B)]
            scales = [to_blocked(self._codes(s)).view(self.format.scale_dtype) for s in scales]
            values = self._values(self._integers(L, N, K))
            far = EXPERT_EXPONENT - TWO_LEVEL_EXPERT_EXPONENT
            outer = torch.exp2(self._integers(L) + far * (torch.arange(L) % 2)) * 1.3
            found = QuantizedWeights(values, scales[0], scales[1] if square else None, None, outer)
        return QuantizedWeights(*(None if part is None else aligned(part) for part in found))

    def _buffer(self, width: int) -> Tensor:
        """A result's buffer, poisoned."""
        return aligned(torch.full((self.R + 8, width), BAD_OUT, dtype=torch.bfloat16))

    # ---- products: arguments, and the oracle on results of its own --------------------------------------------------

    def _make_rows(self):
        dgrad = self.op == "dgrad"
        w = self._weights(self.N, self.K)
        contraction, width = (self.N, self.K) if dgrad else (self.K, self.N)
        a, first = self._rows_operand(contraction), word(2)
        width = align(self.columns[1], 128) if self.columns else width
        self.outs = {"out": self._buffer(width)}
        scales = w.transposed_scales if dgrad else w.scales
        operands, tables, self.parts = (a, w.values, scales), (first, self.row_start_P, self.num_rows_L), (a, w)
        name = "grouped_gemm_scaled_dgrad" if dgrad else "grouped_gemm_scaled"
        options = {"format": self.format, "stop_1": self.stop_1}
        more = {} if dgrad else {"columns": self.columns}
        outer = w.outer_inv_G if self.format.two_level else None
        self.given = grouped_gemm.rows_arguments(
            name, *operands, self.outs["out"], *tables, **options, **more, w_outer_inv=outer
        )
        more |= {} if dgrad else {"w_outer_inv_L": outer}
        self.oracle = lambda outs: getattr(reference_products, name)(*operands, outs["out"], *tables, **options, **more)

    def _make_wgrad(self):
        dy, x = self._columns_operand(self.N), self._columns_operand(self.K)
        self.parts = dy, x
        out = self._integers(len(self.rows), self.N, self.K).to(self.out_dtype)
        self.outs = {"out": aligned(out)}
        tables, options = (self.row_start_P, self.num_rows_L), {"format": self.format, "stop_1": self.stop_1}
        self.given = grouped_gemm.wgrad_arguments(dy, x, *tables, self.outs["out"], **options)
        self.oracle = lambda outs: reference_products.grouped_gemm_scaled_wgrad(
            dy, x, *tables, outs["out"], accumulate=self.accumulate, **options
        )

    def _make_swiglu(self):
        F, K = self.N // 2, self.K
        w, a = self._weights(self.N, K), self._rows_operand(K)
        self.parts = a, w
        empty = torch.full((self.R, F), 0x55, dtype=torch.uint8).view(self.format.value_dtype)
        scales = torch.full(padded_scales(self.R, F // self.format.block), 0x55, dtype=torch.uint8)
        h2 = self.h2 = self._placed(empty, scales.flatten().view(self.format.scale_dtype))
        self.outs = {"h2_values": h2.values, "h2_scales": h2.scales}
        h1, first = None, word(2)
        if self.stores_h1:
            h1 = self.outs["out"] = self._buffer(self.N)
        tables, options = (self.row_start_P, self.num_rows_L), {"format": self.format, "stop_1": self.stop_1}
        self.given = grouped_gemm.swiglu_arguments(
            a, w.values, w.scales, h2, *tables, **options, activation=self.activation, h1_X2F=h1, h1_start_1=first
        )

        def oracle(outs):
            h1 = outs.get("out", self._buffer(self.N))
            reference_products.grouped_gemm_scaled(a, w.values, w.scales, h1, first, *tables, **options)
            if not self.stopped:
                rows = h1[2 : 2 + self.R].float()
                bundle = h2._replace(values=outs["h2_values"], scales=outs["h2_scales"])
                put_rows(bundle, self.act(rows), self.real_R, self.format)

        self.oracle = oracle

    def act(self, h1: Tensor) -> Tensor:
        """FP32 h2 of bf16 gate and up with exp as the kernel makes it: a power of 2."""
        gate, up = h1.chunk(2, dim=1)
        slope = gate
        if self.activation.clamped:
            limit = self.activation.limit
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) + 1
            slope = self.activation.alpha * gate
        return gate * (1.0 / (1.0 + torch.exp2(-slope * LOG2_E))) * up

    def sums(self) -> Tensor:
        """What `out` would hold without its last rounding, in FP64; NaN where nothing is written."""
        ends, columns = int(self.row_start_P[-1]), self.columns or (0, None)
        out = self.outs["out"]
        found = torch.full(out.shape, float("nan"), dtype=torch.float64)
        for e, (start, count) in enumerate(zip(self.row_start_P.tolist(), self.rows, strict=False)):
            rows = slice(start, start + count)
            if self.op == "wgrad":
                dy, x = (reference_products.columns_operand(part, rows, ends, self.format) for part in self.parts)
                found[e] = dy @ x.T + (out[e].double() if self.accumulate else 0)
                continue
            a, w = self.parts
            sums = reference_products.rows_operand(a, rows, self.format) @ self._weight(w, e).T
            if self.format.two_level:
                outer = a.outer_inv[int(a.outer_inv_start_1[0]) :][rows].double()
                sums = sums * outer[:, None] * w.outer_inv_G[e].double()
            sums = sums[:, columns[0] :][:, : columns[1]]
            found[2 + start : 2 + start + count, : sums.shape[1]] = sums
        return found

    def h2_rows(self, outs: dict[str, Tensor]) -> Tensor:
        """FP64 real rows of h2, multiplied out."""
        bundle = self.h2._replace(values=outs["h2_values"], scales=outs["h2_scales"])
        end = int(self.row_start_P[-1])
        return reference_products.rows_operand(bundle, slice(0, end), self.format)[self.real_R[:end]]

    def _weight(self, w: QuantizedWeights, e: int) -> Tensor:
        """FP64 [columns of the result, contraction] of one expert."""
        dgrad, block = self.op == "dgrad", self.format.block
        codes, scales = unpack_codes(w.values[e], self.format), w.transposed_scales if dgrad else w.scales
        codes = codes.T if dgrad else codes
        natural = from_blocked(scales.view(torch.uint8), len(codes), codes.shape[1] // block, len(self.rows))[e]
        return decode(codes, self.format).double() * scale_values(natural, self.format).double().repeat_interleave(
            block, dim=1
        )

    def expected(self) -> dict[str, Tensor]:
        """What the results' buffers hold in the end, made before anything ran."""
        outs = {name: out.clone() for name, out in self.outs.items()}
        self.oracle(outs)
        return outs

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Everything that the kernel may touch, by the name of its argument; what has two names once."""
        found = {value.data_ptr(): (name, value) for name, value in self.given.items() if isinstance(value, Tensor)}
        return dict(found.values())
