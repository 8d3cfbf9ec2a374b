"""Launches of a kernel that was launched before, without Triton's search for what it compiled.

A call is some twenty short launches, so an eager one waits for the host. JITFunction.run binds and specialises the
arguments and compares every global of the kernel anew each time. Here the first launch with a key takes that way, and
later ones go to the kernel it returned: at most about half the host's time (Triton 3.6, on a CPU, kernels mocked).
"""

import functools
import math

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel


def launched(kernel):
    """Decorator above @triton.jit of a kernel that the host launches; an interpreted kernel stays as it is."""
    return Launched(kernel) if isinstance(kernel, triton.JITFunction) else kernel


# Name of the kernel and number of programs of every launch, where somebody has put a list.
log: list[tuple[str, int]] | None = None


class Launched:
    """A jit function `fn` whose launches fn[grid](*args, **kwargs) find their compiled kernel by a key of our own.

    The key tells apart at least what Triton specialises on, so it never gives a kernel that Triton would not: another
    key for the same kernel costs one launch the slow way. Slow is every first launch with a key, and every launch with
    an argument of a type that _key does not know. Not seen after a first launch: changed knobs and global constants,
    and hooks of the compilation; the hooks of a launch, which profilers use, run each time.
    Run-time arguments are positional and come first in the signature; constexprs and options are keywords.
    """

    has_compiled = False  # any of them

    def __init__(self, fn: triton.JITFunction):
        self.fn = fn
        self._constexprs = [param for param in fn.params if param.is_constexpr]
        self._num_args = len(fn.params) - len(self._constexprs)
        assert self._constexprs == fn.params[self._num_args :], f"{fn.__name__}: constexprs must come last"
        self._known: dict[tuple, tuple[CompiledKernel, tuple]] = {}  # key -> kernel, values of all constexprs

    def __getitem__(self, grid: tuple[int, ...]):
        return functools.partial(self._launch, (*grid, 1, 1)[:3])

    def _launch(self, grid, *args, **kwargs) -> CompiledKernel:
        if log is not None:
            log.append((self.fn.__name__, math.prod(grid)))
        key = _key(args, kwargs)
        compiled, constexprs = self._known.get(key, (None, ()))
        if compiled is not None:
            compiled[grid](*args, *constexprs)
            return compiled
        assert len(args) == self._num_args, f"{self.fn.__name__}: run-time arguments are positional, constexprs are not"
        Launched.has_compiled = True
        compiled = self.fn[grid](*args, launch_pdl=True, **kwargs)
        if key is not None and isinstance(compiled, CompiledKernel):
            self._known[key] = compiled, tuple(kwargs.get(param.name, param.default) for param in self._constexprs)
        return compiled


def _key(args: tuple, kwargs: dict) -> tuple | None:
    """Device, one item an argument, and the keywords; None for an argument that only Triton knows how to tell apart."""
    key = [torch.cuda.current_device()]
    for arg in args:
        kind = type(arg)
        if kind is Tensor:
            key.append((arg.dtype, arg.data_ptr() % 16 == 0))
        elif kind is int:
            if -(2**31) <= arg < 2**31:
                key.append(1 if arg == 1 else 16 if arg % 16 == 0 else 0)
            else:
                key.append(("i64" if arg < 2**63 else "u64", arg % 16 == 0))
        elif arg is None or kind is float or kind is bool:
            key.append(kind)
        elif hasattr(arg, "block_shape"):  # a TensorDescriptor; Gluon's has a layout too
            more = (getattr(arg, name, None) for name in ("layout", "round_f32_to_tf32"))  # of Gluon; of Triton 3.9
            key.append((arg.base.dtype, *arg.block_shape, arg.padding, *more))
        else:
            return None
    return (*key, *kwargs, *kwargs.values())
