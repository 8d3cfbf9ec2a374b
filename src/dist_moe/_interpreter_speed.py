"""What Triton's interpreter works out again for every value of a program, worked out once: half of a program's time.

Nothing here changes a result. Types are plain values, so that those of equal shapes can share what they hold.
"""

import functools

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as interpreter


def install() -> None:
    _types_of_tuples_on_demand()
    _share_block_types()
    _share_shapes_of_tensors()
    _operands_that_match_are_left_alone()
    _look_up_numpy_types()


def _types_of_tuples_on_demand() -> None:
    """Every shape is a tl.tuple, which spells its type out; nothing but compilation asks for it."""
    stock = tl.tuple.__init__

    def init(self, args, type=None):
        if type is None:
            self.values = list(args)
        else:
            stock(self, args, type)

    def type_of(self):
        try:
            return tl.core._type_for_tuple_values(self.values)
        except AttributeError as error:  # which would have Python ask for the type again, by __getattr__
            raise TypeError(f"a tuple of {self.values} has no type") from error

    on_demand = functools.cached_property(type_of)
    on_demand.__set_name__(tl.tuple, "type")
    tl.tuple.__init__, tl.tuple.type = init, on_demand


def _share_block_types() -> None:
    stock, known = tl.block_type.__init__, {}

    def init(self, element_ty, shape):
        key = (element_ty.name, *shape)
        if key not in known:
            stock(self, element_ty, shape)
            known[key] = vars(self).copy()
        vars(self).update(known[key], element_ty=element_ty)  # its name does not say all of a pointer

    tl.block_type.__init__ = init
    tl.block_type.to_ir = lambda self, builder: self  # as each scalar type is its own


def _share_shapes_of_tensors() -> None:
    stock, known = tl.tensor.__init__, {}

    def init(self, handle, type):
        key = tuple(type.shape) if type.is_block() else ()
        if key not in known:
            stock(self, handle, type)
            known[key] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known[key]

    tl.tensor.__init__ = init


def _operands_that_match_are_left_alone() -> None:
    """Equal shapes are one object, by what stands above; of these types the stock function promotes none to another."""
    semantic, stable = interpreter.TritonSemantic, (tl.int1, tl.int32, tl.int64, tl.float32)
    stock_check, stock_broadcast = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value

    def check(self, lhs, rhs, *args, **options):
        if isinstance(lhs, tl.tensor) and isinstance(rhs, tl.tensor) and lhs.shape is rhs.shape:
            if lhs.dtype is rhs.dtype and any(lhs.dtype is dtype for dtype in stable):
                return lhs, rhs
        return stock_check(self, lhs, rhs, *args, **options)

    def broadcast(self, lhs, rhs):
        return (lhs, rhs) if lhs.shape is rhs.shape else stock_broadcast(self, lhs, rhs)

    semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value = check, broadcast


def _look_up_numpy_types() -> None:
    """The stock function makes its table at every call."""
    stock = functools.cache(interpreter._get_np_dtype)
    of_pointers = np.dtype(np.uint64)

    def get_np_dtype(tt_dtype):
        scalar = tt_dtype.scalar
        return of_pointers if scalar.is_ptr() else stock(scalar)

    interpreter._get_np_dtype = get_np_dtype
