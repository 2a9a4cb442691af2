"""A row of weights times a matrix (numba): the one loop that a gated delta rule is made of.

An accumulator takes product after product in ascending order; product and sum round separately. Written as vector
instructions over the columns, so an element is one lane and its bits depend on neither the width nor its place in it.
"""

from collections.abc import Callable

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from skyrl_isoexec.kernels.numeric.cpu import ZERO, f32, inlined

LANES = 16
"""Columns of a vector: two AVX2 registers, one of AVX-512."""

_F32, _I64 = ir.FloatType(), ir.IntType(64)
_VECTOR, _ZEROS = ir.VectorType(_F32, LANES), ir.Constant(ir.VectorType(_F32, LANES), [0.0] * LANES)
_PLACES = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)


def _columns(num_vectors: int) -> Callable:
    @intrinsic
    def columns(typing_context, weights, count, matrix, stride, sums):
        """sums[:width] = the first `count` weights times rows of the matrix, `stride` apart."""

        def codegen(context, builder, signature, arguments):
            weights, count, matrix, stride, sums = arguments
            totals = [cgutils.alloca_once_value(builder, _ZEROS) for _ in range(num_vectors)]
            undefined = ir.Constant(_VECTOR, ir.Undefined)
            with cgutils.for_range(builder, count) as loop:
                weight = builder.load(builder.gep(weights, [loop.index]))
                first = builder.insert_element(undefined, weight, ir.Constant(ir.IntType(32), 0))
                weight = builder.shuffle_vector(first, undefined, _PLACES)
                row = builder.gep(matrix, [builder.mul(loop.index, stride)])
                for i, total in enumerate(totals):
                    place = builder.gep(row, [ir.Constant(_I64, i * LANES)])
                    value = builder.load(builder.bitcast(place, _VECTOR.as_pointer()), align=4)
                    builder.store(builder.fadd(builder.load(total), builder.fmul(weight, value)), total)
            for i, total in enumerate(totals):
                place = builder.gep(sums, [ir.Constant(_I64, i * LANES)])
                builder.store(builder.load(total), builder.bitcast(place, _VECTOR.as_pointer()), align=4)
            return context.get_dummy_value()

        pointer = types.CPointer(types.float32)
        return types.void(pointer, types.int64, pointer, types.int64, pointer), codegen

    return columns


_four, _one = _columns(4), _columns(1)


@inlined
def combine(weights, count, matrix, stride, width, out):
    """out[:width] = sum over s < count, ascending from +0, of weights[s] * matrix[s, :width]; all but sizes addresses.

    Rows of the matrix are `stride` numbers apart.
    """
    w, done = f32(weights), 0
    while done < width:
        rows, to = f32(matrix + 4 * done), f32(out + 4 * done)
        if done + 4 * LANES <= width:
            _four(w, count, rows, stride, to)
            done += 4 * LANES
        elif done + LANES <= width:
            _one(w, count, rows, stride, to)
            done += LANES
        else:
            total = ZERO
            for s in range(count):
                total = total + w[s] * rows[s * stride]
            to[0] = total
            done += 1
