"""Launch capture and the static verifier's input, on a launcher written in C: what the DSL exports, by hand."""

import ctypes
import re
import subprocess

import numpy as np
import pytest

from tests.sm100 import EmulationError, GlobalMemory, Launcher, TensorMap, emulate
from tests.sm100.static_check import kernel_input

PTX = """
.version 9.0
.target sm_100a
.address_size 64
.visible .entry kernel(
    .param .align 8 .b8 kernel_param_0[16],
    .param .u32 kernel_param_1,
    .param .align 64 .b8 kernel_param_2[128]
)
{
    .reg .b32 %r<3>;
    .reg .b64 %rd<3>;
    ld.param.b64 %rd1, [kernel_param_0];
    ld.param.v2.b32 {%r1, %r2}, [kernel_param_0+8];
    add.u32 %r1, %r1, %r2;
    ld.param.b32 %r2, [kernel_param_1];
    add.u32 %r1, %r1, %r2;
    st.global.u32 [%rd1], %r1;
    ret;
}
"""

SOURCE = """
#include <stddef.h>
typedef struct { unsigned grid[3], block[3]; size_t shared_bytes; void *stream, *attributes; unsigned num; } config_t;
int _cudaLaunchKernelEx(const config_t *, const void *, void **);
void _mlir_NAME_ciface_host(void **args, int num_args) {
    struct { void *out; int first, second; } one = {*(void **)args[0], *(int *)args[1], *(float *)args[2] * 2};
    int two = 7;
    static unsigned char map[128] = {MAP};
    void *parameters[] = {&one, &two, map};
    config_t config = {{3, 1, 1}, {64, 1, 1}, 4096, 0, 0, 0};
    *(int *)args[num_args - 1] = *(int *)args[1] < 0 ? 13 : _cudaLaunchKernelEx(&config, 0, parameters);
}
"""

HEADER = """
void _mlir_NAME_ciface_host(void **args, int32_t num_args);
static inline int32_t cute_dsl_NAME_wrapper(NAME_Kernel_Module_t *module, void *out, int32_t first, float half,
                                            cudaStream_t stream) {
"""


class Compiled:
    """Exports as the DSL's compiled functions do."""

    __ptx__ = PTX

    def __init__(self, tensor_map: TensorMap):
        self.map = ", ".join(map(str, tensor_map.encode()))

    def export_to_c(self, folder: str, name: str, function_prefix: str) -> None:
        source = SOURCE.replace("NAME", function_prefix).replace("MAP", self.map)
        subprocess.run(
            ["cc", "-x", "c", "-c", "-fPIC", "-o", f"{folder}/{name}.o", "-"], input=source.encode(), check=True
        )
        with open(f"{folder}/{name}.h", "w") as header:
            header.write(re.sub(r"\n\s+", " ", HEADER).replace("NAME", function_prefix))


@pytest.fixture
def tensor():
    return np.zeros((4, 32), np.uint8)


@pytest.fixture
def launcher(tensor):
    return Launcher(Compiled(TensorMap(tensor.ctypes.data, "u8", (32, 4), (32,), (32, 2))))


def test_a_captured_launch_runs(launcher):
    out = np.zeros(1, np.uint32)
    memory = GlobalMemory()
    memory.add(out, "out")
    launch = launcher(out, 30, 2.5)
    assert (launch.grid, launch.block, launch.shared_bytes) == ((3, 1, 1), (64, 1, 1), 4096)
    assert [len(raw) for raw in launch.parameters] == [16, 4, 128]
    counts = emulate(PTX, launch, memory)
    assert out[0] == 30 + 5 + 7 and counts["st.global.u32"] == 6
    objects = (ctypes.c_void_p(out.ctypes.data), ctypes.c_int32(30), ctypes.c_float(2.5), ctypes.c_void_p(0))
    assert launcher(*objects) == launch


def test_errors_of_the_host_code_are_seen(launcher):
    with pytest.raises(RuntimeError, match="error 13, 0 launches"):
        launcher(np.zeros(1, np.uint32), -1, 0.0)
    with pytest.raises(TypeError, match="out, first, half wanted, got 1"):
        launcher(3)


def test_the_verifier_gets_what_the_kernel_loads(launcher, tensor):
    out, memory = np.array([5, 6], np.int32), GlobalMemory()
    memory.add(out, "out")
    memory.add(tensor, "x")
    launch = launcher(out, 30, 2.5)
    found = kernel_input(PTX, launch, memory)
    assert found["launch"]["grid_dim"] == [3, 1, 1] and found["launch"]["dynamic_shared_bytes"] == 4096
    assert found["declarations"] == [
        {"parameter": 0, "offset": 0, "type": "pointer", "space": "global", "object": "out"}
    ]
    assert found["arguments"] == [
        {"parameter": 0, "offset": 8, "type": "u32", "value": 30},
        {"parameter": 0, "offset": 12, "type": "u32", "value": 5},
        {"parameter": 1, "offset": 0, "type": "u32", "value": 7},
    ]
    (described,) = found["tma_descriptors"]
    assert described["object"] == "x" and described["box_shape"] == [32, 2] and described["swizzle"] == "none"
    steered = kernel_input(PTX, launch, memory, ("out",))
    assert steered["shape_arrays"] == [{"parameter": 0, "offset": 0, "shapes": [[5], [6]]}]
    with pytest.raises(EmulationError, match="computed address"):
        kernel_input(PTX.replace("[kernel_param_1]", "[%rd1]"), launch, memory)
