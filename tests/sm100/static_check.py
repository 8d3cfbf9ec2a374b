"""The static verifier SentryWard on a captured launch: synchronisation, memory lifetimes and races, over all schedules.

It reads PTX and a JSON file with the launch: extents, scalars, pointers, tensor maps, and the values of small arrays of
integers that decide which way the kernel goes. That file's format is not documented; what is written here was found by
trial with version 0.1.1. It takes seconds to minutes, so cases must be small: one or two CTAs, few tiles, rings of two
stages. It takes a tcgen05.ld for complete at once: a missing wait::ld is for the emulator to find.
"""

import importlib.util
import json
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.sm100 import ptx as parser
from tests.sm100 import tensor_map as maps
from tests.sm100.errors import EmulationError
from tests.sm100.machine import Launch
from tests.sm100.ptx import Address, Symbol
from tests.sm100.spaces import GlobalMemory

_TENSOR_MAP_BYTES = 128
_LOAD = re.compile(r"ld\.param(?:\.v(\d))?\.[busf](\d+)")


@dataclass(frozen=True)
class Verdict:
    """What the verifier says: result is "race_free" when it found everything in order."""

    result: str
    seconds: float
    diagnostics: list

    @property
    def race_free(self) -> bool:
        return self.result == "race_free"

    def __str__(self) -> str:
        lines = [f"{item.get('code')} at {item.get('stage')}: {item.get('message', '')}" for item in self.diagnostics]
        return "\n  ".join([f"{self.result} after {self.seconds:.0f} s", *lines])


def missing() -> str | None:
    """Why verify cannot run here, in words; None when it can."""
    return None if importlib.util.find_spec("sentryward") else "sentryward is not installed"


def verify(
    ptx: str,
    launch: Launch,
    memory: GlobalMemory,
    steering: tuple[str, ...] = (),
    timeout_s: int = 300,
    memory_limit_mib: int | None = None,
) -> Verdict:
    """The verdict on a launch.

    Args: memory with the buffers that the launch was captured with.  steering: names of the buffers whose values decide
    the control flow or what is addressed; the verifier gets these values, in words of 32 bits, and of the others only
    that they exist. One that is left out shows as "control predicate is not static" or as an unresolved overlap.
    Raises: ModuleNotFoundError where missing() gives a reason.
    """
    import sentryward

    # Hints about reuse of operands, which it does not know.
    ptx = re.sub(r"\.collector::a::\w+", "", ptx)
    with tempfile.TemporaryDirectory() as folder:
        kernel_path, input_path = Path(folder, "kernel.ptx"), Path(folder, "input.json")
        kernel_path.write_text(ptx)
        input_path.write_text(json.dumps(kernel_input(ptx, launch, memory, steering), indent=1))
        report = sentryward.verify(
            kernel_path, input=input_path, timeout_seconds=timeout_s, memory_limit_mib=memory_limit_mib
        )
    return Verdict(report["result"], report.get("elapsed_seconds", 0.0), report.get("diagnostics", []))


def kernel_input(ptx: str, launch: Launch, memory: GlobalMemory, steering: tuple[str, ...] = ()) -> dict:
    """The launch as the verifier reads it."""
    kernel = parser.parse(ptx)
    found = {
        "schema": "spverify.kernel-input/v1",
        "launch": {
            "grid_dim": list(launch.grid),
            "block_dim": list(launch.block),
            "cluster_dim": [1, 1, 1],
            "dynamic_shared_bytes": launch.shared_bytes,
        },
        "arguments": [],
        "shape_arrays": [],
        "declarations": [],
        "tma_descriptors": [],
    }
    for index, raw in enumerate(launch.parameters):
        if len(raw) == _TENSOR_MAP_BYTES:
            found["tma_descriptors"].append(_tensor_map(index, maps.decode(raw), memory))
    for index, offset, num_bytes in sorted(_loaded(kernel)):
        place = {"parameter": index, "offset": offset}
        value = int.from_bytes(launch.parameters[index][offset : offset + num_bytes], "little")
        name = memory.name_at(value) if num_bytes == 8 else None
        if name is None:
            found["arguments"].append(place | {"type": f"u{8 * num_bytes}", "value": value})
        elif name in steering:
            data, start = memory.window(value, 4)
            found["shape_arrays"].append(place | {"shapes": [[int(word)] for word in data[start:].view(np.int32)]})
        else:
            found["declarations"].append(place | {"type": "pointer", "space": "global", "object": name})
    return found


def _loaded(kernel: parser.Kernel) -> set[tuple[int, int, int]]:
    """(parameter, offset, bytes) of every word of the parameters that the kernel loads."""
    indices = {parameter.name: index for index, parameter in enumerate(kernel.parameters)}
    words = set()
    for ins in kernel.instructions:
        match = _LOAD.fullmatch(ins.opcode)
        if match is None:
            continue
        address = ins.operands[1]
        if not isinstance(address, Address) or not isinstance(address.base, Symbol):
            raise EmulationError(f"verify: a parameter is loaded by a computed address: {ins.text}")
        num_bytes = int(match[2]) // 8
        for i in range(int(match[1] or 1)):
            words.add((indices[address.base.name], address.offset + i * num_bytes, num_bytes))
    return words


def _tensor_map(index: int, tensor_map: maps.TensorMap, memory: GlobalMemory) -> dict:
    return {
        "parameter": index,
        "offset": 0,
        "object": memory.name_at(tensor_map.address) or f"tensor{index}",
        "element_type": tensor_map.element_type,
        "rank": tensor_map.rank,
        "global_shape": list(tensor_map.shape),
        "global_strides_bytes": list(tensor_map.strides),
        "box_shape": list(tensor_map.box),
        "element_strides": [1] * tensor_map.rank,
        "swizzle": f"{tensor_map.swizzle}B" if tensor_map.swizzle else "none",
        "interleave": "none",
        "oob_fill": "zero",
        "base_byte_offset": 0,
    }
