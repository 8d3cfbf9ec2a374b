"""Launch capture: runs the host code of a compiled CuTe DSL function on the CPU and keeps the launch it makes.

The exported object's undefined symbols are a handful of runtime functions; launcher_stub.c has them all. The host code
encodes the tensor maps itself, so the captured parameters hold them as the device would get them, with addresses of
host memory for device pointers.
"""

import ctypes
import functools
import re
import subprocess
import tempfile
from pathlib import Path

from tests.sm100 import ptx
from tests.sm100.machine import Launch

_STUB = Path(__file__).parent / "launcher_stub.c"


class _Config(ctypes.Structure):
    _fields_ = (("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared_bytes", ctypes.c_size_t))


@functools.cache
def _folder() -> tempfile.TemporaryDirectory:
    """Of this process; removed at its end."""
    return tempfile.TemporaryDirectory(prefix="sm100-launchers-")


@functools.cache
def _stub_object() -> Path:
    path = Path(_folder().name) / "launcher_stub.o"
    subprocess.run(["cc", "-c", "-fPIC", "-O1", "-Wall", "-Wextra", "-o", path, _STUB], check=True)
    return path


class Launcher:
    """The host function of one compiled kernel, linked against the stub."""

    _count = 0

    def __init__(self, compiled):
        """compiled: what cute.compile returned, with its PTX kept (--keep-ptx)."""
        Launcher._count += 1
        name = f"kernel{Launcher._count}"
        folder = Path(_folder().name)
        compiled.export_to_c(str(folder), name, function_prefix=name)
        library = folder / f"{name}.so"
        # -Bsymbolic: the DSL's own runtime has functions of the same names.
        command = ["cc", "-shared", "-Wl,-Bsymbolic", "-o", library, _stub_object(), folder / f"{name}.o"]
        subprocess.run(command, check=True)
        header = (folder / f"{name}.h").read_text()
        self.parameters = ptx.parse(compiled.__ptx__).parameters
        self._library = ctypes.CDLL(str(library))
        self._function = getattr(self._library, re.search(r"void (_mlir_\w*ciface_\w+)\(void \*\*", header)[1])
        arguments = re.search(r"_wrapper\(\w+ \*module,?\s*([^)]*)\)", header)[1]
        self.arguments = [tuple(re.match(r"(.*?)\s*(\w+)$", item.strip()).groups()) for item in arguments.split(",")]

    def __call__(self, *given) -> Launch:
        """The launch for these arguments: an int, a float, or a numpy or torch buffer for each argument of the host
        function, the stream left out; or ctypes objects for all, the stream included, laid out as the function wants.
        """
        objects = list(given)
        if not all(isinstance(value, (ctypes._SimpleCData, ctypes.Structure)) for value in objects):
            objects = self._converted(given)
        sizes = [parameter.num_bytes for parameter in self.parameters]
        (ctypes.c_int * 256).in_dll(self._library, "parameter_bytes")[: len(sizes)] = sizes
        ctypes.c_int.in_dll(self._library, "num_parameters").value = len(sizes)
        launches = ctypes.c_int.in_dll(self._library, "num_launches")
        before, result = launches.value, ctypes.c_int32(0)
        pointers = [ctypes.addressof(value) for value in (*objects, result)]
        self._function((ctypes.c_void_p * len(pointers))(*pointers), len(pointers))
        if result.value or launches.value != before + 1:
            raise RuntimeError(f"capture: error {result.value}, {launches.value - before} launches; one is wanted")
        config = _Config.in_dll(self._library, "last_launch")
        raw = bytes((ctypes.c_ubyte * sum(sizes)).in_dll(self._library, "last_parameters"))
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        parameters = tuple(raw[end - size : end] for size, end in zip(sizes, ends, strict=True))
        return Launch(tuple(config.grid), tuple(config.block), parameters, config.shared_bytes)

    def _converted(self, given: tuple) -> list:
        wanted = [(kind, name) for kind, name in self.arguments if "Stream" not in kind]
        if len(given) != len(wanted):
            raise TypeError(f"capture: arguments {', '.join(name for _, name in wanted)} wanted, got {len(given)}")
        values = iter(given)
        return [_scalar(kind, name, 0 if "Stream" in kind else next(values)) for kind, name in self.arguments]


_SCALARS = {"int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64, "float": ctypes.c_float, "double": ctypes.c_double}
_SCALARS |= {"uint32_t": ctypes.c_uint32, "uint64_t": ctypes.c_uint64, "bool": ctypes.c_bool}


def _scalar(kind: str, name: str, value):
    """The ctypes object of one argument."""
    if kind in _SCALARS:
        return _SCALARS[kind](value)
    if kind not in ("void *", "cudaStream_t"):
        raise TypeError(f"capture: {name} is a {kind}: pass ctypes objects for all arguments")
    if hasattr(value, "data_ptr"):
        value = value.data_ptr()
    elif hasattr(value, "__array_interface__"):
        value = value.__array_interface__["data"][0]
    return ctypes.c_void_p(value)


@functools.cache
def launcher(compiled) -> Launcher:
    """The launcher of a compiled function, made once."""
    return Launcher(compiled)


def capture(compiled, *arguments) -> Launch:
    """The launch that a compiled function makes with these arguments; see Launcher.__call__."""
    return launcher(compiled)(*arguments)
