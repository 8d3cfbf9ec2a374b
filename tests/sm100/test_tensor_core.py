"""tcgen05 in the emulator: products in every layout, and the faults that must be found."""

from dataclasses import dataclass

import numpy as np
import pytest

from tests.sm100 import EmulationError, formats
from tests.sm100.asynchronous import MBarrier, TensorOrder
from tests.sm100.ptx import SHARED_BASE
from tests.sm100.small_kernels import BARRIER, aligned, run, swizzled_rows, wait

IMAGE_BYTES = 65536
IMAGE = 2048  # shared offset of the operands: behind the mbarrier and the word for the address of tensor memory


def product_kernel(num_columns: int, body: str) -> str:
    """Shared memory from buffer 1, then the body in one thread, its commit, and all 128 rows to buffer 0.

    The body finds tensor memory at %r20 and 64-bit words of buffer 2 in %q30, %q31, ...
    """
    loads = "".join(f"ld.global.u64 %q{30 + i}, [%q2+{8 * i}];" for i in range(6))
    return f"""{BARRIER}
        shr.u32 %r2, %r0, 5; setp.ne.u32 %p1, %r2, 0; @%p1 bra ALLOCATED;
        tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1+16], 512;
        tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
    ALLOCATED:
        shl.b32 %r3, %r0, 4;
    FILL:
        cvt.u64.u32 %q10, %r3; add.u64 %q10, %q10, %q1; add.u32 %r4, %r1, %r3;
        ld.global.v4.b32 {{%r5, %r6, %r7, %r8}}, [%q10];
        st.shared.v4.b32 [%r4+{IMAGE}], {{%r5, %r6, %r7, %r8}};
        add.u32 %r3, %r3, 2048; setp.lt.u32 %p2, %r3, {IMAGE_BYTES}; @%p2 bra FILL;
        fence.proxy.async.shared::cta;
        bar.sync 0;
        ld.shared.u32 %r20, [%r1+16];
        add.u32 %r21, %r20, 448; add.u32 %r22, %r20, 452; add.u32 %r23, %r20, 480; add.u32 %r24, %r20, 484;
        setp.eq.u32 %p6, %r0, %r0; not.pred %p7, %p6;
        @%p15 bra ISSUED;
        {loads} cvt.u32.u64 %r25, %q30;
        {body}
        tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r1];
    ISSUED:
        {wait(0)}
        tcgen05.fence::after_thread_sync;
        shl.b32 %r4, %r2, 21; add.u32 %r4, %r4, %r20; mul.lo.u32 %r3, %r0, {4 * num_columns};
        cvt.u64.u32 %q10, %r3; add.u64 %q10, %q10, %q0; mov.b32 %r3, 0;
    OUT:
        tcgen05.ld.sync.aligned.32x32b.x8.b32 {{%r30, %r31, %r32, %r33, %r34, %r35, %r36, %r37}}, [%r4];
        tcgen05.wait::ld.sync.aligned;
        st.global.v4.b32 [%q10], {{%r30, %r31, %r32, %r33}}; st.global.v4.b32 [%q10+16], {{%r34, %r35, %r36, %r37}};
        add.u32 %r3, %r3, 8; add.u32 %r4, %r4, 8; add.u64 %q10, %q10, 32;
        setp.lt.u32 %p2, %r3, {num_columns}; @%p2 bra OUT;
        bar.sync 0;
        @%p1 bra END;
        tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r20, 512;
    END:"""


def descriptor(offset: int, leading: int, stride: int, swizzle: int) -> int:
    code = {0: 0, 128: 2, 64: 4, 32: 6}[swizzle]
    start = SHARED_BASE + IMAGE + offset
    return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | 1 << 46 | code << 61


def place(image: np.ndarray, offset: int, operand: np.ndarray, mn_major: bool, swizzle: int) -> tuple[int, int]:
    """Puts bytes [rows, K] into shared memory in a canonical layout; returns leading and stride byte offsets.

    By the PTX ISA's pictures: blocks of 8 lines of `swizzle` bytes (16 without one), whose 16-byte pieces are
    exchanged. A line is part of a row of K, or, MN-major, of a column. The offsets tell where the next blocks are.
    """
    lines = operand.T if mn_major else operand
    width = swizzle or 16
    block = 8 * width
    groups, across = len(lines) // 8, lines.shape[1] // width
    for group in range(groups):
        for part in range(across):
            at = offset + (group * across + part) * block
            piece = lines[8 * group : 8 * group + 8, part * width : (part + 1) * width]
            image[at : at + block] = (swizzled_rows(piece, swizzle) if swizzle else piece).reshape(-1)
    along, between = block, across * block  # to the next part of a line, to the next 8 lines
    if mn_major:
        return (along, between) if swizzle else (between, along)
    return (16 if swizzle else along), between


def place_scales(image: np.ndarray, offset: int, scales: np.ndarray) -> None:
    """Scale codes [rows, 4]: 512 bytes for 128 rows, row r at 16 (r % 32) + 4 (r / 32)."""
    for row, codes in enumerate(scales):
        at = offset + row // 128 * 512 + row % 32 * 16 + row % 128 // 32 * 4
        image[at : at + 4] = codes


@dataclass(frozen=True)
class Side:
    """One operand: its layout, element type, and which of the four scales of a row are its first."""

    mn_major: bool = False
    swizzle: int = 128
    type_code: int = 0
    scale_id: int = 0


A_OFFSET, B_OFFSET, A_SCALES, B_SCALES = 0, 24576, 61440, 62464  # in the image


class Product:
    """Random operands of one kind, their image in shared memory, and what their product is."""

    def __init__(self, kind="mxf8f6f4", num_scales=1, num_columns=64, a=Side(), b=Side(), ue4m3=False):
        self.kind, self.num_columns, self.num_scales, self.ue4m3 = kind, num_columns, num_scales, ue4m3
        self.is_f4 = kind != "mxf8f6f4"
        self.rng = np.random.default_rng(0)
        self.image = aligned(np.full(IMAGE_BYTES, 0xFF, np.uint8))
        a_numbers, a_descriptor = self._operand(a, 128, A_OFFSET, A_SCALES)
        b_numbers, b_descriptor = self._operand(b, num_columns, B_OFFSET, B_SCALES)
        self.exact = a_numbers @ b_numbers.T
        self.expected = self.exact.astype(np.float32)
        instruction = (
            a.type_code << 7 | b.type_code << 10 | a.mn_major << 15 | b.mn_major << 16 | num_columns // 8 << 17
        )
        instruction |= (not ue4m3) << 23 | 1 << 27 | a.scale_id << 29 | b.scale_id << 4
        scales = (descriptor(offset, 16, 128, 0) for offset in (A_SCALES, B_SCALES, B_SCALES + 512))
        self.words = np.array([instruction, a_descriptor, b_descriptor, *scales], np.uint64)

    def _operand(self, side: Side, rows: int, offset: int, scales_offset: int) -> tuple[np.ndarray, int]:
        """Puts one operand into the image; its numbers [rows, K], and its descriptor."""
        # K-major rows are as wide as the swizzle, and the instruction takes 32 bytes from their middle on.
        line = side.swizzle or 16
        width = 32 if side.mn_major else max(32, side.swizzle)
        at = width // 2 if width > 32 else 0
        num_rows = -(-rows // line) * line if side.mn_major else rows
        codes = self.rng.integers(0, 256 if self.is_f4 else 112, (num_rows, width), dtype=np.uint8)
        codes |= self.rng.integers(0, 2, codes.shape, dtype=np.uint8) << 7
        leading, stride = place(self.image, offset, codes, side.mn_major, side.swizzle)
        used = codes[:rows, at : at + 32]
        table = formats.E2M1 if self.is_f4 else (formats.E4M3, formats.E5M2)[side.type_code]
        values = table[formats.unpack_nibbles(used) if self.is_f4 else used]
        low, high, table = (0x30, 0x40, formats.UE4M3) if self.ue4m3 else (124, 130, formats.E8M0)
        scales = self.rng.integers(low, high, (rows, 4), dtype=np.uint8)
        place_scales(self.image, scales_offset, scales)
        factors = table[scales[:, side.scale_id : side.scale_id + self.num_scales]]
        numbers = values * np.repeat(factors, values.shape[1] // self.num_scales, axis=1)
        return numbers, descriptor(offset + at, leading, stride, side.swizzle)

    copies = """
        tcgen05.cp.cta_group::1.32x128b.warpx4 [%r21], %q33;
        tcgen05.cp.cta_group::1.32x128b.warpx4 [%r23], %q34;
        tcgen05.cp.cta_group::1.32x128b.warpx4 [%r24], %q35;"""

    def mma(self, spelling: str, accumulates: str = "%p7") -> str:
        return f"""
        tcgen05.mma.cta_group::1.kind::{self.kind}.block_scale.{spelling}
            [%r20], %q31, %q32, %r25, [%r21], [%r23], {accumulates};"""

    def run(self, body: str, edit=lambda text: text, seed: int = 0) -> np.ndarray:
        out = aligned(np.zeros((128, self.num_columns), np.float32))
        text = edit(product_kernel(self.num_columns, body))
        run(text, out, self.image, self.words, block=128, shared_bytes=IMAGE + IMAGE_BYTES, seed=seed)
        return out


@pytest.mark.parametrize("swizzle", (0, 32, 64, 128))
@pytest.mark.parametrize("mn_major", (False, True))
def test_products_in_every_layout(mn_major, swizzle):
    """As A, and as B beside another A; 64 columns of B are half a line of the widest MN-major layout."""
    side = Side(mn_major, swizzle)
    for product in (Product(a=side), Product(a=Side(swizzle=0), b=side)):
        got = product.run(product.copies + product.mma("scale_vec::1X.collector::a::discard"))
        assert (got == product.expected).all()


@pytest.mark.parametrize("num_columns", (8, 24, 136, 256))
def test_products_of_every_width(num_columns):
    product = Product(num_columns=num_columns, b=Side(swizzle=32))
    assert (product.run(product.copies + product.mma("block32")) == product.expected).all()


E4M3, E5M2, E2M1 = 0, 1, 1  # codes of element types


@pytest.mark.parametrize(
    "spelling, product",
    (
        ("block32", lambda: Product(a=Side(type_code=E5M2, scale_id=3), b=Side(type_code=E4M3, scale_id=1))),
        ("scale_vec::1X", lambda: Product(a=Side(type_code=E4M3, scale_id=2), b=Side(type_code=E5M2))),
        ("scale_vec::2X", lambda: Product("mxf4", 2, a=Side(type_code=E2M1), b=Side(type_code=E2M1, scale_id=2))),
        ("block32", lambda: Product("mxf4nvf4", 2, a=Side(type_code=E2M1, scale_id=2), b=Side(type_code=E2M1))),
        ("block16", lambda: Product("mxf4nvf4", 4, a=Side(type_code=E2M1), b=Side(type_code=E2M1), ue4m3=True)),
        ("scale_vec::4X", lambda: Product("mxf4nvf4", 4, a=Side(type_code=E2M1), b=Side(type_code=E2M1))),
    ),
)
def test_products_of_every_kind(spelling, product):
    product = product()
    assert (product.run(product.copies + product.mma(spelling)) == product.expected).all()


@pytest.mark.parametrize("seed", range(4))
def test_products_accumulate_in_order(seed):
    """Rounded to float32 once an instruction."""
    product = Product()
    body = product.copies + product.mma("block32") + product.mma("block32", "%p6") + product.mma("block32", "%p6")
    expected = np.zeros_like(product.expected)
    for _ in range(3):
        expected = (expected + product.exact).astype(np.float32)
    assert (product.run(body, seed=seed) == expected).all()


def test_missing_scales_are_poison():
    product = Product()
    assert np.isnan(product.run(product.mma("block32"))).all()


def test_what_is_added_to_poison_is_poison():
    product = Product()
    assert np.isnan(product.run(product.copies + product.mma("block32", "%p6"))).all()


COMMIT = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r1];"
DEALLOC = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r20, 512;"
AFTER = "tcgen05.fence::after_thread_sync;"
WAIT_LOAD = "tcgen05.wait::ld.sync.aligned;"
ANOTHER_ALLOC = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1+16], 32;"

# What to replace in the kernel, by what, and what is then said.
PRODUCT_FAULTS = {
    "no wait::ld": (WAIT_LOAD, "", "used before tcgen05.wait::ld"),
    "registers of a load overwritten": (WAIT_LOAD, "and.b32 %r33, %r3, 1;", "used before tcgen05.wait::ld"),
    "lanes of another warp": ("shl.b32 %r4, %r2, 21;", "mov.b32 %r4, 0;", "tcgen05.ld of lanes from 0 on"),
    "no dealloc": (DEALLOC, "", "without tcgen05.dealloc"),
    "too few columns": (", 512;", ", 256;", "not allocated"),
    "columns no power of two": (", 512;", ", 96;", "power of two"),
    "no fence between the proxies": ("fence.proxy.async.shared::cta;", "", r"without fence\.proxy\.async"),
    "no fence after the wait": (AFTER, "", "without fence::after_thread_sync"),
    "no commit": (COMMIT, "", "deadlock"),
    "alloc after the permit": (DEALLOC, ANOTHER_ALLOC, "after relinquish_alloc_permit"),
    "aligned instruction in one lane": (COMMIT, WAIT_LOAD, "deadlock"),
}


@pytest.mark.parametrize("fault", PRODUCT_FAULTS)
def test_tcgen05_faults(fault):
    old, new, message = PRODUCT_FAULTS[fault]
    product = Product()
    with pytest.raises(EmulationError, match=message):
        product.run(product.copies + product.mma("block32"), lambda text: text.replace(old, new))


@pytest.mark.parametrize(
    "word, change, message",
    (
        (0, 1 << 2, "reserved"),
        (0, 1 << 13, "negation"),
        (0, 5 << 7, "element types"),
        (0, 1 << 28, "M 384"),
        (0, 1 << 23, "ue4m3 need blocks of 16"),
        (1, 1 << 49, "base offset"),
        (1, 1 << 61, "descriptor"),
        (2, 1 << 13, "shared access out of bounds"),
    ),
)
def test_descriptors_that_are_refused(word, change, message):
    product = Product()
    product.words[word] ^= np.uint64(change)
    with pytest.raises(EmulationError, match=message):
        product.run(product.copies + product.mma("block32"))


def often_right(product: Product, body: str, edit=lambda text: text) -> list[bool]:
    return [bool((product.run(body, edit, seed) == product.expected).all()) for seed in range(6)]


def test_a_missing_wait_for_the_commit_is_seen():
    """Some schedules read what was there before. The wait comes at the end instead."""
    product, end = Product(), "bar.sync 0;\n        @%p1 bra END;"

    def edit(text):
        return text.replace(wait(0), "bar.sync 0;").replace(end, wait(0) + end)

    assert not all(often_right(product, product.copies + product.mma("block32"), edit))


def test_scales_that_are_copied_too_late_are_seen():
    product = Product()
    assert not any(often_right(product, product.mma("block32") + product.copies))


@pytest.mark.parametrize("fenced", [True, False])
def test_loads_that_are_signalled_need_a_fence_before(fenced):
    """By the order of a reader and of who writes over what it has read."""
    reader, writer, barrier = TensorOrder(), TensorOrder(), MBarrier(1, 0)
    reader.read()
    reader.owes_before = not fenced
    assert barrier.arrive(1, reader.signal)
    writer.waited(barrier)
    with pytest.raises(EmulationError, match="without fence::after_thread_sync"):
        writer.check()
    writer.owes_after = False
    if fenced:
        writer.check()
        return
    with pytest.raises(EmulationError, match="signalled without fence::before_thread_sync"):
        writer.check()


def test_moves_may_come_before_the_wait_for_a_load():
    """As the compiler has them: a pack before wait::ld, its value from the load."""
    product = Product(num_columns=8)
    moves = f"mov.b64 %q20, {{%r30, %r31}}; {WAIT_LOAD} mov.b32 %r30, 0; mov.b64 {{%r30, %r31}}, %q20;"
    got = product.run(product.copies + product.mma("block32"), lambda text: text.replace(WAIT_LOAD, moves))
    assert (got == product.expected).all()


def test_the_assembler_may_wait_for_loads():
    """By choice: for kernels that leave it to the assembler."""
    product, out = Product(num_columns=8), aligned(np.zeros((128, 8), np.float32))
    text = product_kernel(8, product.copies + product.mma("block32")).replace(WAIT_LOAD, "")
    options = {"block": 128, "shared_bytes": IMAGE + IMAGE_BYTES, "lenient": True}
    run(text, out, product.image, product.words, **options)
    assert (out == product.expected).all()
