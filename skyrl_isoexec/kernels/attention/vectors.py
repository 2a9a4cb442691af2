"""Sixteen elements at once from storage to fp32 (numba): what fills a tile of keys and values."""

from collections.abc import Callable

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

WIDTH = 16


def _copy(element: types.Type) -> Callable:
    @intrinsic
    def copy(typing_context, source, target):
        """target[:16] = the fp32 values of source[:16]."""

        def codegen(context, builder, signature, arguments):
            source, target = arguments
            numbers, integers = ir.VectorType(ir.FloatType(), WIDTH), ir.VectorType(ir.IntType(32), WIDTH)
            if element == types.float32:
                values = builder.load(builder.bitcast(source, numbers.as_pointer()), align=4)
            else:
                halves = ir.VectorType(ir.IntType(16), WIDTH)
                bits = builder.zext(builder.load(builder.bitcast(source, halves.as_pointer()), align=2), integers)
                values = builder.bitcast(builder.shl(bits, ir.Constant(integers, [16] * WIDTH)), numbers)
            builder.store(values, builder.bitcast(target, numbers.as_pointer()), align=4)
            return context.get_dummy_value()

        return types.void(types.CPointer(element), types.CPointer(types.float32)), codegen

    return copy


copy_f32, copy_u16 = _copy(types.float32), _copy(types.uint16)
