"""Small kernels in PTX for the tests of the emulator: a frame around a few instructions, and its launch."""

import numpy as np

from tests.sm100.machine import Launch, emulate
from tests.sm100.spaces import GlobalMemory
from tests.sm100.tensor_map import TensorMap

_FRAME = """
.version 9.0
.target sm_100a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry kernel({parameters})
{{
    .reg .pred %p<16>;
    .reg .b16 %h<64>;
    .reg .b32 %r<300>;
    .reg .b64 %q<64>;
    mov.u32 %r0, %tid.x;
    mov.u32 %r1, smem;
{prologue}
{body}
    ret;
}}
"""


def run(
    body: str,
    *buffers: np.ndarray,
    maps: tuple[TensorMap, ...] = (),
    grid: int = 1,
    block: int = 32,
    shared_bytes: int = 4096,
    seed: int = 0,
    max_steps: int = 1_000_000,
    **options,
):
    """Runs PTX with %r0 = thread, %r1 = dynamic shared memory, %q0, %q1, ... = the buffers, and then the tensor maps'
    generic addresses. Returns the counts of executed opcodes; results are in the buffers.
    """
    memory = GlobalMemory()
    raw = [np.uint64(memory.add(buffer, f"buffer {i}")).tobytes() for i, buffer in enumerate(buffers)]
    parameters = [f".param .u64 p{i}" for i in range(len(buffers))]
    prologue = [f"    ld.param.u64 %q{i}, [p{i}];" for i in range(len(buffers))]
    for i, tensor_map in enumerate(maps, start=len(buffers)):
        raw.append(tensor_map.encode())
        parameters.append(f".param .align 64 .b8 p{i}[128]")
        prologue += [f"    mov.b64 %q{i}, p{i};", f"    cvta.param.u64 %q{i}, %q{i};"]
    ptx = _FRAME.format(parameters=", ".join(parameters), prologue="\n".join(prologue), body=body)
    launch = Launch((grid, 1, 1), (block, 1, 1), tuple(raw), shared_bytes)
    return emulate(ptx, launch, memory, seed, max_steps=max_steps, **options)


def lanes(text: str, out: type, *inputs: np.ndarray) -> np.ndarray:
    """Runs instructions on 32 lanes: a, b, c name the inputs' registers, d the result's (of the type `out`)."""
    result = np.zeros(32, out)
    inputs = [np.ascontiguousarray(np.broadcast_to(values, 32)) for values in inputs]
    lines = [f".reg .b{8 * result.itemsize} d;"]
    for i, (name, values) in enumerate(zip("abc", inputs, strict=False)):
        size = values.itemsize
        lines.append(f".reg .b{8 * size} {name};")
        lines.append(f"mul.wide.u32 %q20, %r0, {size}; add.u64 %q20, %q20, %q{i + 1};")
        lines.append(f"ld.global.b{8 * size} {name}, [%q20];")
    lines.append(text)
    lines.append(f"mul.wide.u32 %q20, %r0, {result.itemsize}; add.u64 %q20, %q20, %q0;")
    lines.append(f"st.global.b{8 * result.itemsize} [%q20], d;")
    run("\n".join(lines), result, *inputs)
    return result


# mbarrier at shared offset 0 for one arrival, ready for the asynchronous engines; then a wait on its phase.
BARRIER = """
    setp.ne.u32 %p15, %r0, 0;
    @%p15 bra INITIALISED;
    mbarrier.init.shared::cta.b64 [%r1], 1;
    fence.mbarrier_init.release.cluster;
INITIALISED:
    bar.sync 0;
"""


def wait(parity: int = 0, offset: int = 0) -> str:
    """Wait until a phase of the mbarrier at a shared offset is complete."""
    return f"""
    {{
    .reg .pred done;
AGAIN:
    mbarrier.try_wait.parity.shared::cta.b64 done, [%r1+{offset}], {parity};
    @done bra DONE;
    bra AGAIN;
DONE:
    }}
"""


def aligned(values: np.ndarray) -> np.ndarray:
    """A copy at a multiple of 128 bytes."""
    raw = np.zeros(values.nbytes + 128, np.uint8)
    start = -raw.ctypes.data % 128
    copy = raw[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    copy[...] = values
    return copy


def swizzled_rows(rows: np.ndarray, swizzle: int) -> np.ndarray:
    """Rows of `swizzle` bytes with their 16-byte pieces exchanged: piece c of row r goes to c ^ (r * swizzle / 128)."""
    pieces = rows.reshape(len(rows), -1, 16)
    out = np.empty_like(pieces)
    for row in range(len(rows)):
        for piece in range(pieces.shape[1]):
            out[row, piece ^ row * swizzle // 128 % (swizzle // 16)] = pieces[row, piece]
    return out.reshape(rows.shape)
