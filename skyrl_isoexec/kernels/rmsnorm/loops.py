"""RMSNorm as compiled loops (numba): what `cpu.py` calls, the bits of `reference.py`.

An address that is 0 stands for what is not there or not wanted. The backward adds rows in ascending order for the
weight, the same 16 lanes within a row, and rounds once at the end.
"""

import numpy as np

from skyrl_isoexec.kernels.numeric.cpu import (
    NUM_LANES,
    ONE,
    ZERO,
    compiled,
    exp,
    f32,
    inlined,
    lane_tree,
    read,
    rounded,
    write,
)


@inlined
def _inverse(x, bf16, first, width, eps, lanes):
    """1 / sqrt(mean of squares + eps) of the row that starts at element `first`."""
    for lane in range(NUM_LANES):
        lanes[lane] = ZERO
    for start in range(0, width, NUM_LANES):
        for lane in range(min(NUM_LANES, width - start)):
            value = read(x, bf16, first + start + lane)
            lanes[lane] += value * value
    return ONE / np.sqrt(lane_tree(lanes) / np.float32(width) + np.float32(eps))


@inlined
def _normed(value, inv, bf16, centered):
    """What the weight multiplies: rounded before it, unless the weight is zero-centred."""
    n = value * inv
    return n if centered else rounded(n, bf16)


@inlined
def _factor(w, bf16, d, centered):
    value = read(w, bf16, d)
    return value + ONE if centered else value


@compiled
def forward(x, residual, w, bf16, num_rows, width, eps, centered, total, out, lanes_at):
    """`residual` is 0 for a plain norm; otherwise residual + x goes to `total` and is normalised."""
    lanes = f32(lanes_at)
    for t in range(num_rows):
        first = t * width
        if residual != 0:
            for d in range(first, first + width):
                write(total, bf16, d, read(residual, bf16, d) + read(x, bf16, d))
        source = total if residual != 0 else x
        inv = _inverse(source, bf16, first, width, eps, lanes)
        for d in range(width):
            n = _normed(read(source, bf16, first + d), inv, bf16, centered)
            write(out, bf16, first + d, n * _factor(w, bf16, d, centered))


@inlined
def _backward_rows(x, w, dy, dtotal, bf16, num_rows, width, eps, centered, dx, dw, sums_at, lanes_at):
    """`sums_at` holds a row of the weight's gradient, then one of the gradient for x; a loop reads few rows at a time,
    or the compiler would take it element by element."""
    lanes, sums, inner = f32(lanes_at), f32(sums_at), f32(sums_at + 4 * width)
    for d in range(width):
        sums[d] = ZERO
    for t in range(num_rows):
        first = t * width
        inv = _inverse(x, bf16, first, width, eps, lanes)
        for d in range(width):
            inner[d] = read(dy, bf16, first + d) * _factor(w, bf16, d, centered)
        for lane in range(NUM_LANES):
            lanes[lane] = ZERO
        for start in range(0, width, NUM_LANES):
            for lane in range(min(NUM_LANES, width - start)):
                lanes[lane] += inner[start + lane] * read(x, bf16, first + start + lane)
        along = lane_tree(lanes) * inv * inv * inv / np.float32(width)
        for d in range(width):
            sums[d] += read(dy, bf16, first + d) * _normed(read(x, bf16, first + d), inv, bf16, centered)
        for d in range(width):
            inner[d] = inner[d] * inv - read(x, bf16, first + d) * along
        if dtotal != 0:
            for d in range(width):
                inner[d] += read(dtotal, bf16, first + d)
        for d in range(width):
            write(dx, bf16, first + d, inner[d])
    if dw != 0:
        for d in range(width):
            write(dw, bf16, d, sums[d])


@compiled
def backward(x, w, dy, dtotal, bf16, num_rows, width, eps, centered, dx, dw, sums_at, lanes_at):
    """Gradients for what was normalised, plus `dtotal`, and for the weight."""
    if bf16:  # a constant in each call, so that each loop is compiled for one dtype
        _backward_rows(x, w, dy, dtotal, True, num_rows, width, eps, centered, dx, dw, sums_at, lanes_at)
    else:
        _backward_rows(x, w, dy, dtotal, False, num_rows, width, eps, centered, dx, dw, sums_at, lanes_at)


@inlined
def _gated_rows(x, z, w, bf16, num_rows, width, eps, out, lanes_at):
    lanes = f32(lanes_at)
    for t in range(num_rows):
        first = t * width
        inv = _inverse(x, bf16, first, width, eps, lanes)
        for d in range(width):
            y = rounded(rounded(read(x, bf16, first + d) * inv, bf16) * read(w, bf16, d), bf16)
            gate = read(z, bf16, first + d)
            write(out, bf16, first + d, y * (gate / (exp(-gate) + ONE)))


@compiled
def gated(x, z, w, bf16, num_rows, width, eps, out, lanes_at):
    """A norm times silu(z)."""
    if bf16:
        _gated_rows(x, z, w, True, num_rows, width, eps, out, lanes_at)
    else:
        _gated_rows(x, z, w, False, num_rows, width, eps, out, lanes_at)


@inlined
def _gated_backward_rows(x, z, w, dy, bf16, num_rows, width, eps, dx, dz, dw, sums_at, lanes_at):
    """`sums_at` holds a row of the weight's gradient, then one of the gradient of what the gate multiplies."""
    lanes, sums, inner = f32(lanes_at), f32(sums_at), f32(sums_at + 4 * width)
    for d in range(width):
        sums[d] = ZERO
    for t in range(num_rows):
        first = t * width
        inv = _inverse(x, bf16, first, width, eps, lanes)
        for d in range(width):
            n, weight = rounded(read(x, bf16, first + d) * inv, bf16), read(w, bf16, d)
            gate, grad = read(z, bf16, first + d), read(dy, bf16, first + d)
            sigmoid = ONE / (exp(-gate) + ONE)
            slope = sigmoid * (ONE + gate * (ONE - sigmoid))
            write(dz, bf16, first + d, grad * rounded(n * weight, bf16) * slope)
            grad = grad * (gate * sigmoid)
            sums[d] += grad * n
            inner[d] = grad * weight
        for lane in range(NUM_LANES):
            lanes[lane] = ZERO
        for start in range(0, width, NUM_LANES):
            for lane in range(min(NUM_LANES, width - start)):
                lanes[lane] += inner[start + lane] * read(x, bf16, first + start + lane)
        along = lane_tree(lanes) * inv * inv * inv / np.float32(width)
        for d in range(width):
            write(dx, bf16, first + d, inner[d] * inv - read(x, bf16, first + d) * along)
    if dw != 0:
        for d in range(width):
            write(dw, bf16, d, sums[d])


@compiled
def gated_backward(x, z, w, dy, bf16, num_rows, width, eps, dx, dz, dw, sums_at, lanes_at):
    """Gradients for x, for z and for the weight."""
    if bf16:
        _gated_backward_rows(x, z, w, dy, True, num_rows, width, eps, dx, dz, dw, sums_at, lanes_at)
    else:
        _gated_backward_rows(x, z, w, dy, False, num_rows, width, eps, dx, dz, dw, sums_at, lanes_at)
