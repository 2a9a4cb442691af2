"""The innermost loop of every linear (numba): a few rows times 16 columns, one fp32 accumulator per element.

An accumulator takes product after product in ascending k; product and sum round separately. Written as vector
instructions over the columns, because the vector axis must be the columns: an element is one lane, so its bits depend
on neither the number of rows, nor the tile that computed it, nor the columns beside it.
"""

from collections.abc import Callable

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from skyrl_isoexec.kernels.numeric.panels import PANEL

ROWS = 4
"""Rows of the larger tile: with 16 columns, eight AVX2 registers of accumulators."""

_F32, _I64 = ir.FloatType(), ir.IntType(64)
_VECTOR = ir.VectorType(_F32, PANEL)
_INTEGERS = ir.VectorType(ir.IntType(32), PANEL)
_UNDEFINED = ir.Constant(_VECTOR, ir.Undefined)


def _load_columns(builder: ir.IRBuilder, pointer: ir.Value, element: types.Type) -> ir.Value:
    """16 neighbouring columns as fp32."""
    if element == types.float32:
        return builder.load(builder.bitcast(pointer, _VECTOR.as_pointer()), align=4)
    halves = builder.load(builder.bitcast(pointer, ir.VectorType(ir.IntType(16), PANEL).as_pointer()), align=2)
    return builder.bitcast(builder.shl(builder.zext(halves, _INTEGERS), ir.Constant(_INTEGERS, [16] * PANEL)), _VECTOR)


def _splat(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """One number in all 16 lanes."""
    first = builder.insert_element(_UNDEFINED, value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, _UNDEFINED, ir.Constant(_INTEGERS, [0] * PANEL))


def _tile(num_rows: int, element: types.Type) -> Callable:
    @intrinsic
    def tile(typing_context, x, x_stride, panel, num_k, sums):
        """Add x[r, :num_k] times panel[:num_k, 16] to sums[r, 16], for each of the rows r; x and sums are fp32."""

        def codegen(context, builder, signature, arguments):
            x, x_stride, panel, num_k, sums = arguments
            rows = [builder.gep(x, [builder.mul(x_stride, ir.Constant(_I64, r))]) for r in range(num_rows)]
            places = [builder.gep(sums, [ir.Constant(_I64, r * PANEL)]) for r in range(num_rows)]
            places = [builder.bitcast(place, _VECTOR.as_pointer()) for place in places]
            totals = [cgutils.alloca_once_value(builder, builder.load(place, align=4)) for place in places]
            with cgutils.for_range(builder, num_k) as loop:
                start = builder.mul(loop.index, ir.Constant(_I64, PANEL))
                columns = _load_columns(builder, builder.gep(panel, [start]), element)
                for row, total in zip(rows, totals, strict=True):
                    factor = _splat(builder, builder.load(builder.gep(row, [loop.index])))
                    builder.store(builder.fadd(builder.load(total), builder.fmul(factor, columns)), total)
            for place, total in zip(places, totals, strict=True):
                builder.store(builder.load(total), place, align=4)
            return context.get_dummy_value()

        f32_pointer, integer = types.CPointer(types.float32), types.int64
        return types.void(f32_pointer, integer, types.CPointer(element), integer, f32_pointer), codegen

    return tile


rows_f32, rows_u16 = _tile(ROWS, types.float32), _tile(ROWS, types.uint16)
row_f32, row_u16 = _tile(1, types.float32), _tile(1, types.uint16)
