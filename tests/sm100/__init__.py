"""Runs sm_100 kernels without the GPU: a functional emulator of their PTX, and what feeds it.

    memory = GlobalMemory()
    for name, buffer in buffers.items():
        memory.add(buffer, name)
    launch = capture(compiled, *arguments)           # compiled: of cute.compile, with --keep-ptx
    counts = emulate(compiled.__ptx__, launch, memory, seed=3)

Results are in the buffers afterwards; counts says how often each opcode ran. A kernel that does what PTX leaves
undefined ends in an EmulationError that names the instruction. verify asks a static verifier about the same launch.
"""

from tests.sm100.capture import Launcher, capture
from tests.sm100.errors import Deadlock, EmulationError, UnsupportedInstruction
from tests.sm100.machine import Launch, emulate
from tests.sm100.spaces import GlobalMemory
from tests.sm100.static_check import Verdict, verify
from tests.sm100.tensor_map import TensorMap

__all__ = [
    "Deadlock",
    "EmulationError",
    "GlobalMemory",
    "Launch",
    "Launcher",
    "TensorMap",
    "UnsupportedInstruction",
    "Verdict",
    "capture",
    "emulate",
    "verify",
]
