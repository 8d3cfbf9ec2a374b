"""TMA in the emulator: boxes, swizzles, and the faults that must be found."""

import numpy as np
import pytest

from tests.sm100 import EmulationError, TensorMap
from tests.sm100 import tensor_map as maps
from tests.sm100.small_kernels import BARRIER, aligned, run, swizzled_rows, wait


def box_of(tensor: np.ndarray, at: tuple[int, ...], box: tuple[int, ...]) -> np.ndarray:
    """The box at coordinates `at` (innermost first) with zeros where the tensor ends: by its definition, one by one."""
    out = np.zeros(box[::-1], tensor.dtype)
    for index in np.ndindex(*box[::-1]):
        where = tuple(i + start for i, start in zip(index, at[::-1], strict=True))
        if all(0 <= i < extent for i, extent in zip(where, tensor.shape, strict=True)):
            out[index] = tensor[where]
    return out


def copy_in(rank: int, at: tuple[int, ...], num_bytes: int, expected: int | None = None) -> str:
    """One box to shared offset 1024, thread 0 issues it, and its wait."""
    coordinates = ", ".join(map(str, at))
    return f"""{BARRIER}
        @%p15 bra ISSUED;
        mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], {num_bytes if expected is None else expected};
        cp.async.bulk.tensor.{rank}d.shared::cta.global.tile.mbarrier::complete_tx::bytes
            [%r1+1024], [%q1, {{{coordinates}}}], [%r1];
        ISSUED:
        {wait(0)}"""


def dump(num_bytes: int) -> str:
    """Shared bytes from offset 1024 on to the first buffer, 16 bytes a thread and turn."""
    return f"""
        mov.u32 %r10, %r0;
    DUMP: shl.b32 %r11, %r10, 4; setp.ge.u32 %p5, %r11, {num_bytes}; @%p5 bra DUMPED;
        add.u32 %r12, %r11, %r1; ld.shared.v4.b32 {{%r13, %r14, %r15, %r16}}, [%r12+1024];
        cvt.u64.u32 %q10, %r11; add.u64 %q10, %q10, %q0; st.global.v4.b32 [%q10], {{%r13, %r14, %r15, %r16}};
        add.u32 %r10, %r10, 32; bra DUMP;
    DUMPED:"""


@pytest.mark.parametrize("swizzle", (32, 64, 128))
def test_tma_swizzles(swizzle):
    tensor = aligned(np.random.default_rng(swizzle).integers(0, 256, (24, 2 * swizzle), dtype=np.uint8))
    tensor_map = TensorMap(tensor.ctypes.data, "u8", (2 * swizzle, 24), (2 * swizzle,), (swizzle, 16), swizzle)
    out = aligned(np.zeros((16, swizzle), np.uint8))
    memory = [out]
    body = copy_in(2, (swizzle, 4), out.nbytes) + dump(out.nbytes)
    run_with_tensor(body, tensor, memory, tensor_map)
    assert (out == swizzled_rows(tensor[4:20, swizzle:], swizzle)).all()


def run_with_tensor(body: str, tensor: np.ndarray, buffers: list[np.ndarray], tensor_map: TensorMap, **options):
    """%q0 is the output, %q1 the map; the tensor is registered behind them."""
    return run(body.replace("%q1,", "%q2,"), buffers[0], tensor, maps=(tensor_map,), **options)


@pytest.mark.parametrize(
    "dtype, name, shape, box, at",
    (
        (np.uint8, "u8", (64,), (32,), (48,)),  # a tail
        (np.uint16, "u16", (64, 5), (64, 2), (0, 3)),  # scales
        (np.uint16, "u16", (64, 5), (64, 4), (0, 3)),  # the last rows are out
        (np.uint8, "u8", (48, 7), (32, 4), (-16, -2)),  # before the start
        (np.uint8, "u8", (48, 7), (32, 4), (48, 0)),  # all out
        (np.uint8, "u8", (32, 5, 4), (16, 3, 2), (16, 3, 2)),
        (np.uint32, "u32", (8, 3, 3, 2), (4, 2, 2, 1), (4, 1, 1, 1)),
        (np.uint8, "u8", (16, 3, 2, 2, 3), (16, 2, 2, 1, 2), (0, 1, 0, 1, 1)),
    ),
)
def test_tma_boxes(dtype, name, shape, box, at):
    rng = np.random.default_rng(7)
    tensor = aligned(rng.integers(1, 255, shape[::-1]).astype(dtype))
    strides = tuple(tensor.strides[::-1][1:])
    tensor_map = TensorMap(tensor.ctypes.data, name, shape, strides, box)
    assert tensor_map.encode() == TensorMap(tensor.ctypes.data, name, shape, strides, box).encode()
    expected = box_of(tensor, at, box)
    out = aligned(np.ones(expected.shape, dtype))
    run_with_tensor(copy_in(len(shape), at, out.nbytes) + dump(out.nbytes), tensor, [out], tensor_map)
    assert (out == expected).all()


def test_tma_boxes_of_four_bit_values():
    """Extents and coordinates count values, two a byte."""
    tensor = aligned(np.random.default_rng(8).integers(0, 256, (4, 96), dtype=np.uint8))
    tensor_map = TensorMap(tensor.ctypes.data, "16u4_align8b", (192, 4), (96,), (128, 4))
    out = aligned(np.ones((4, 64), np.uint8))
    run_with_tensor(copy_in(2, (128, 1), out.nbytes) + dump(out.nbytes), tensor, [out], tensor_map)
    expected = np.zeros((4, 64), np.uint8)
    expected[:3, :32] = tensor[1:, 64:]
    assert (out == expected).all()


def test_tensor_maps_decode_as_encoded():
    one = TensorMap(0x7F1234567890, "u16", (64, 3, 2**20, 5, 7), (128, 2**36, 2**39 + 16, 48), (64, 1, 256, 5, 7), 128)
    assert maps.decode(one.encode()) == one
    raw = bytearray(one.encode())
    raw[10] ^= 1  # an unknown bit of word 2
    with pytest.raises(EmulationError, match="unknown bits"):
        maps.decode(bytes(raw))


@pytest.mark.parametrize("seed", range(3))
def test_tma_stores(seed):
    """A box from shared memory: parts outside of the tensor are left out; the wait makes the source free again."""
    tensor = aligned(np.zeros((5, 64), np.uint8))
    tensor_map = TensorMap(tensor.ctypes.data, "u8", (64, 5), (64,), (32, 4))
    out = np.zeros(1, np.uint32)
    body = """
        mul.lo.u32 %r3, %r0, 0x04040404; add.u32 %r3, %r3, 0x03020100; shl.b32 %r4, %r0, 2; add.u32 %r4, %r4, %r1;
        st.shared.u32 [%r4+1024], %r3;
        fence.proxy.async.shared::cta;
        bar.sync 0;
        setp.ne.u32 %p1, %r0, 0; @%p1 bra END;
        cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%q2, {48, 3}], [%r1+1024];
        cp.async.bulk.commit_group;
        cp.async.bulk.wait_group.read 0;
        st.shared.u32 [%r1+1024], 0xFFFFFFFF;
        cp.async.bulk.wait_group 0;
        END:"""
    run(body, out, tensor, maps=(tensor_map,), seed=seed)
    expected = np.zeros((5, 64), np.uint8)
    expected[3:, 48:] = np.arange(128, dtype=np.uint8).reshape(4, 32)[:2, :16]
    assert (tensor == expected).all()


def test_bulk_copies_of_bytes():
    source, out = aligned(np.arange(256, dtype=np.uint8)), aligned(np.zeros(256, np.uint8))
    run(
        f"""{BARRIER}
        @%p15 bra ISSUED;
        mbarrier.arrive.expect_tx.shared.b64 %q5, [%r1], 256;
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1+1024], [%q1], 256, [%r1];
        ISSUED: {wait(0)}
        @%p15 bra END;
        cp.async.bulk.global.shared::cta.bulk_group [%q0+16], [%r1+1024], 240;
        cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
        END:""",
        out,
        source,
    )
    assert (out[16:] == source[:240]).all() and not out[:16].any()


TMA_FAULTS = {
    "no fence of the mbarrier": (lambda s: s.replace("fence.mbarrier_init.release.cluster;", ""), "did not fence"),
    "too few bytes expected": (lambda s: s.replace("[%r1], 512;", "[%r1], 256;"), "deadlock"),
    "too many bytes expected": (lambda s: s.replace("[%r1], 512;", "[%r1], 528;"), "deadlock"),
    "another mbarrier": (lambda s: s.replace("[%r1];\n        ISSUED", "[%r1+8];\n        ISSUED"), "no mbarrier"),
    "an address between": (lambda s: s.replace("[%r1+1024], [%q", "[%r1+1040], [%q"), "not a multiple of 128"),
    "over the mbarrier": (lambda s: s.replace("[%r1+1024], [%q", "[%r1], [%q"), "holds an mbarrier"),
    "another rank": (lambda s: s.replace("2d", "3d").replace("{0, 0}", "{0, 0, 0}"), "tensor map of 2"),
}


@pytest.mark.parametrize("fault", TMA_FAULTS)
def test_tma_faults(fault):
    tensor = aligned(np.ones((16, 32), np.uint8))
    tensor_map = TensorMap(tensor.ctypes.data, "u8", (32, 16), (32,), (32, 16))
    out = aligned(np.zeros(512, np.uint8))
    edit, message = TMA_FAULTS[fault]
    with pytest.raises(EmulationError, match=message):
        run_with_tensor(edit(copy_in(2, (0, 0), 512)), tensor, [out], tensor_map)


def test_a_missing_wait_for_tma_is_seen():
    """Poison is read in some of the schedules."""
    tensor = aligned(np.ones((16, 32), np.uint8))
    tensor_map = TensorMap(tensor.ctypes.data, "u8", (32, 16), (32,), (32, 16))
    body = copy_in(2, (0, 0), 512).replace(wait(0), "bar.sync 0;") + dump(512) + wait(0)
    seen = []
    for seed in range(8):
        out = aligned(np.zeros(512, np.uint8))
        run_with_tensor(body, tensor, [out], tensor_map, seed=seed)
        seen.append(bool((out == 1).all()))
    assert not all(seen)


def test_stores_need_the_fence_between_the_proxies_and_their_wait():
    tensor = aligned(np.zeros((4, 32), np.uint8))
    tensor_map = TensorMap(tensor.ctypes.data, "u8", (32, 4), (32,), (32, 4))
    store = """setp.ne.u32 %p1, %r0, 0; @%p1 bra END;
        st.shared.u32 [%r1+1024], 0; {}
        cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%q1, {{0, 0}}], [%r1+1024]; {} END:"""
    with pytest.raises(EmulationError, match=r"without fence\.proxy\.async"):
        run_with_tensor(store.format("", ""), tensor, [np.zeros(1, np.uint32)], tensor_map)
    with pytest.raises(EmulationError, match="may still be read"):
        run_with_tensor(store.format("fence.proxy.async;", ""), tensor, [np.zeros(1, np.uint32)], tensor_map)
