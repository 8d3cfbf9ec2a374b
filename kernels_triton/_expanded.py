"""Codes of weights as 16-bit values in registers, as the tensor cores of sm_90 take them from there; in Gluon.

    e2m1 codes and e4m3 scales -> FP16. A code whose bits are put at the top of a half's mantissa and the end of its
        exponent is its value times 2^-14; that times the scale is exact: the least product is 2^-24. So the FP32 sum
        is multiplied by 2^14.
    e4m3 codes and E8M0 scales -> BF16. A code in the same place is its value times 2^-120, which times 2^120 and times
        the scale is exact, or rounded once where it is subnormal. Up to scale 2^7, and no weight that a model learns
        has more, both are one factor; a warp that sees a larger one multiplies twice. NaN counts as infinity.

The sum does not care for the order of the contraction, so it is that in which a thread finds whole words of codes that
share a scale: see `take`, `_halves_of_e2m1` and `_halves_of_e4m3`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from dist_moe.formats import EXPANDED_GROUP_BYTES

TILE = gl.constexpr(128)  # columns of the result, rows of weights, in a tile
SIDE_ROWS = gl.constexpr(64)  # of these, what four warps multiply
PART = gl.constexpr(64)  # values of the contraction that are converted and multiplied together
WORDS = gl.constexpr(EXPANDED_GROUP_BYTES // 4)  # of codes of a row in a step: 128 values of e4m3, 256 of e2m1

# Of a word its odd codes, or its even ones: signs at the top of every byte and magnitudes at bits 3 to 1. The upper
# byte of each 16 bits is then a half, and after a shift the lower byte.
PAIRS_OF_E2M1 = """
    lop3.b32 z, {signs}, {magnitudes}, 0x80808080, 0xe4;
    and.b32 h, z, 0x8e008e00;
    mul.rn.f16x2 {upper}, h, $10;
    shl.b32 z, z, 8;
    and.b32 h, z, 0x8e008e00;
    mul.rn.f16x2 {lower}, h, $10;
"""
# Of word w bytes 0 and 2, and bytes 1 and 3, at the end of the exponent and the top of the mantissa of a BF16.
PAIRS_OF_E4M3 = """
    shl.b32 y, {word}, 4;
    and.b32 y, y, 0x07f007f0;
    shl.b32 x, {word}, 8;
    lop3.b32 {lower}, x, 0x80008000, y, 0xea;
    shr.u32 y, {word}, 4;
    and.b32 y, y, 0x07f007f0;
    lop3.b32 {upper}, {word}, 0x80008000, y, 0xea;
"""
# Values are multiplied by 2^(120 + s) where every scale 2^s that the warp sees is at most 2^7, else by 2^120 and by
# 2^s; the code of 2^-127 is 0, as a BF16 it is subnormal.
FACTORS_OF_E4M3 = """
    add.u32 f0, {scale0}, 0x3c003c00;
    add.u32 f1, {scale1}, 0x3c003c00;
    max.u32 x, {scale0}, {scale1};
    setp.gt.u32 far, x, 0x43004300;
    vote.sync.any.pred far, far, 0xffffffff;
    @!far bra.uni NEAR;
    {boosted}
    max.u32 f0, {scale0}, 0x00400040;
    max.u32 f1, {scale1}, 0x00400040;
    NEAR:
"""


def _e2m1_to_halves() -> str:
    text = "{ .reg .b32 x, y, z, h, o<8>;"
    for word, first in ((8, 0), (9, 4)):
        o = [f"o{first + i}" for i in range(4)]
        text += f"shr.u32 y, ${word}, 3;" + PAIRS_OF_E2M1.format(
            signs=f"${word}", magnitudes="y", upper=o[3], lower=o[1]
        )
        text += f"shl.b32 x, ${word}, 4; shl.b32 y, ${word}, 1;"
        text += PAIRS_OF_E2M1.format(signs="x", magnitudes="y", upper=o[2], lower=o[0])
    return text + "".join(f"mov.b32 ${i}, o{i};" for i in range(8)) + "}"


def _e4m3_to_halves() -> str:
    """Of four words of a row and four of another, whose scales are in the first and the fifth."""
    text = "{ .reg .b32 x, y, f0, f1, v<16>; .reg .pred far;"
    for i in range(8):
        text += PAIRS_OF_E4M3.format(word=f"${16 + i}", lower=f"v{2 * i}", upper=f"v{2 * i + 1}")
    boosted = "mov.b32 x, 0x7b807b80;" + "".join(f"mul.rn.bf16x2 v{i}, v{i}, x;" for i in range(16))  # 2^120 twice
    text += FACTORS_OF_E4M3.format(scale0="$24", scale1="$28", boosted=boosted)
    for i in range(16):  # result 2 c + upper of word 2 b + c of either row
        place = 4 * (i % 4) + i // 4
        text += f"mul.rn.bf16x2 ${place}, v{i}, f{i // 8};"
    return text + "}"


E2M1_TO_HALVES = gl.constexpr(_e2m1_to_halves())
E4M3_TO_HALVES = gl.constexpr(_e4m3_to_halves())
E4M3_REGISTERS = gl.constexpr(",".join(["=r"] * 16 + ["r"] * 16))
SCALES_TO_HALVES = gl.constexpr(
    """{
    .reg .b16 low, high;
    .reg .b32 a, b;
    mov.b32 {low, high}, $4;
    cvt.rn.f16x2.e4m3x2 a, low;
    cvt.rn.f16x2.e4m3x2 b, high;
    prmt.b32 $0, a, a, 0x1010;
    prmt.b32 $1, a, a, 0x3232;
    prmt.b32 $2, b, b, 0x1010;
    prmt.b32 $3, b, b, 0x3232;
    }"""
)


@gluon.jit
def _rows_of_side(words, SIDE: gl.constexpr):
    """[4 atoms, 4, 32] words of scales -> [64, atoms] of the rows of a side; word 4 (r % 32) + r // 32 has row r."""
    ATOMS: gl.constexpr = words.shape[0] // 4
    words = gl.permute(gl.reshape(words, [ATOMS, 4, 8, 2, 2]), (4, 1, 2, 0, 3))  # r bits: 5, 4 3, 2 1 0; atom; 6
    return gl.reshape(gl.split(words)[SIDE], [SIDE_ROWS, ATOMS])


@gluon.jit
def _scales_of_e2m1(words, SIDE: gl.constexpr, WORDS_LAYOUT: gl.constexpr):
    """An atom of four rows of 32 words for every 64 values -> by part [64, 4, 1], a word's scale twice in FP16."""
    words = _rows_of_side(words, SIDE)
    words = gl.expand_dims(gl.convert_layout(words, gl.SliceLayout(2, WORDS_LAYOUT)), 2)
    return gl.inline_asm_elementwise(
        SCALES_TO_HALVES, "=r,=r,=r,=r,r", [words], dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1
    )


@gluon.jit
def _scales_of_e4m3(words, SIDE: gl.constexpr, WORDS_LAYOUT: gl.constexpr):
    """The atom of a step -> [64, 4, 1] of the four scales of a row, twice in BF16."""
    words = gl.reshape(_rows_of_side(words, SIDE), [SIDE_ROWS])
    words = gl.convert_layout(words, gl.SliceLayout(1, gl.SliceLayout(2, WORDS_LAYOUT)))
    place = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, WORDS_LAYOUT)))
    codes = (gl.expand_dims(words, 1) >> gl.expand_dims(8 * place, 0)) & 0xFF
    return gl.expand_dims(codes * 0x00800080, 2)


@gluon.jit
def scales_of(words, SIDE: gl.constexpr, FP4: gl.constexpr, WORDS_LAYOUT: gl.constexpr):
    """By part of a step [64, 4, 1] of what its words are multiplied by; of e4m3 the same for both parts."""
    if FP4:
        return _scales_of_e2m1(words, SIDE, WORDS_LAYOUT)
    else:
        scales = _scales_of_e4m3(words, SIDE, WORDS_LAYOUT)
        return scales, scales


@gluon.jit
def _halves_of_e2m1(words, scales):
    """[R, 4, 2] words and [R, 4, 1] scales -> FP16 [R, 64].

    Word 2 a + c of row r, a, c < 4, 2, has codes d + 4 e, d, e < 4, 2. Column 32 c + 8 d + 2 a + e of the result is
    that code: what the tensor cores take from thread a of four. The assembly takes words c = 0, 1 together, and
    returns them as e = 0, 1.
    """
    p0, p1, p2, p3, q0, q1, q2, q3 = gl.inline_asm_elementwise(
        E2M1_TO_HALVES,
        "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r",
        [words, scales],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16),
        is_pure=False,
        pack=2,
    )
    p = gl.join(gl.join(p0, p1), gl.join(p2, p3))  # [R, a, e, d bit 0, d bit 1]
    q = gl.join(gl.join(q0, q1), gl.join(q2, q3))
    return gl.reshape(gl.permute(gl.join(p, q), (0, 5, 4, 3, 1, 2)), [words.shape[0], PART])


@gluon.jit
def _halves_of_e4m3(words, scales):
    """[R, 4, 4] words and [R, 4, 1] scales -> BF16 [R, 64].

    Word 4 a + 2 b + c of row r, a, b, c < 4, 2, 2, has codes d + 2 e, d, e < 2, 2. Column 32 b + 16 c + 8 d + 2 a + e
    of the result is that code. The assembly takes words c = 0, 1 together, and returns them as e = 0, 1.
    """
    R: gl.constexpr = words.shape[0]
    p0, p1, q0, q1 = gl.inline_asm_elementwise(
        E4M3_TO_HALVES,
        E4M3_REGISTERS,
        [words, scales],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=False,
        pack=8,
    )
    halves = gl.reshape(gl.join(gl.join(p0, p1), gl.join(q0, q1)), [R, 4, 2, 2, 2, 2])  # [R, a, b, e, d, c]
    return gl.reshape(gl.permute(halves, (0, 2, 5, 4, 1, 3)), [R, PART])


@gluon.jit
def halves_of(words, scales, FP4: gl.constexpr):
    """16-bit values [64, 64] of the words of a part and their scales."""
    if FP4:
        return _halves_of_e2m1(words, scales)
    else:
        return _halves_of_e4m3(words, scales)


@gluon.jit
def parts_of(words, FP4: gl.constexpr):
    """[R, 32] words of a step, thread a of four with 8 a to 8 a + 7 -> by part: four [R, 4, 2] or two [R, 4, 4]."""
    R: gl.constexpr = words.shape[0]
    if FP4:
        words = gl.permute(gl.reshape(words, [R, 4, 2, 2, 2]), (0, 1, 4, 3, 2))
        even, odd = gl.split(words)  # by the upper bit of the part
        p0, p1 = gl.split(even)
        p2, p3 = gl.split(odd)
        return p0, p1, p2, p3
    else:
        return gl.split(gl.permute(gl.reshape(words, [R, 4, 2, 4]), (0, 1, 3, 2)))


@gluon.jit
def take(step, num_steps, w_ring, w_scales, full, SIDE: gl.constexpr, FP4: gl.constexpr):
    """The codes of a step, eight words of two rows a thread, and the words of its scales, which _rows_of_side splits;
    behind the last step whatever is there."""
    CODES: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [SIDE_ROWS, WORDS],
    )
    SCALE_ROWS: gl.constexpr = 16 if FP4 else 4
    # Of e2m1, an atom of words for each of the four lanes of a row. All hold words of both sides.
    OF_LANES: gl.constexpr = [[4, 0], [8, 0]] if FP4 else [[0, 0], [0, 0]]
    SCALES: gl.constexpr = gl.DistributedLinearLayout(
        [[1, 0], [0, 2]], OF_LANES + [[0, 4], [0, 8], [0, 16]], [[2, 0], [0, 1]], [], [SCALE_ROWS, 32]
    )
    STAGES: gl.constexpr = w_ring.shape[0]
    stage = step % STAGES
    mbarrier.wait(full.index(stage), step // STAGES & 1, pred=step < num_steps)
    w_rows = w_ring.index(stage).reshape([TILE, WORDS]).slice(SIDE * SIDE_ROWS, SIDE_ROWS, 0)
    return w_rows.load(CODES), w_scales.index(stage).reshape([SCALE_ROWS, 32]).load(SCALES)
