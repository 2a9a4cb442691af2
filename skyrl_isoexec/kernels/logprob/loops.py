"""The compiled loops of the log-probabilities: one pass each for maximum, leaf sums, result and gradient.

Notable: exponentials go through a short buffer, where they vectorise; only the additions into the 16 lanes are ordered.
What must stay equal: the order stated in `reference.py`.

Shapes: T rows (tokens), V vocabulary or a slice of it, L leaves. A `divisors` address of 0 means temperature 1.
"""

import numpy as np

from skyrl_isoexec.kernels.logprob import series
from skyrl_isoexec.kernels.numeric.cpu import NUM_LANES, ONE, ZERO, compiled, exp, f32, i64, inlined, lane_tree

BUFFER = 512
"""Exponentials made before they are added; a multiple of the lanes; changes no bit."""
NEG_INF, NAN = np.float32(-np.inf), np.float32(np.nan)
LN2, SQRT2 = np.float64(series.LN2), np.float64(series.SQRT2)
C0, C1, C2, C3, C4, C5, C6, C7, C8 = (np.float64(c) for c in series.COEFFICIENTS)


@inlined
def _divisor(divisors, t):
    return f32(divisors)[t] if divisors else ONE


@inlined
def _log(total):
    """Logarithm of a positive normal fp32 number; see `reference.log`."""
    bits = np.float32(total).view(np.int32)
    exponent = np.float64((bits >> np.int32(23)) - np.int32(127))
    f = np.float64(np.int32((bits & np.int32(0x7FFFFF)) | np.int32(0x3F800000)).view(np.float32))
    if f > SQRT2:
        exponent, f = exponent + np.float64(1.0), f * np.float64(0.5)
    s = (f - np.float64(1.0)) / (f + np.float64(1.0))
    z = s * s
    p = C0 * z + C1
    p = p * z + C2
    p = p * z + C3
    p = p * z + C4
    p = p * z + C5
    p = p * z + C6
    p = p * z + C7
    p = p * z + C8
    return np.float32(exponent * LN2 + (s + s) * p)


@compiled
def row_max(logits, divisors, out, num_rows, size):
    """out [T] = maximum of each row over its temperature, -0 counted as +0, NaN where there is one."""
    lanes = np.empty(NUM_LANES, np.float32)
    for t in range(num_rows):
        row, divisor = f32(logits + 4 * t * size), _divisor(divisors, t)
        for l in range(NUM_LANES):
            lanes[l] = NEG_INF
        for start in range(0, size, NUM_LANES):
            for j in range(start, min(start + NUM_LANES, size)):
                x, best = row[j] / divisor, lanes[j - start]
                lanes[j - start] = x if x > best or x != x else best
        best = NEG_INF
        for l in range(NUM_LANES):
            best = lanes[l] if lanes[l] > best or lanes[l] != lanes[l] else best
        f32(out)[t] = best + ZERO


@compiled
def leaf_sums(logits, divisors, maxima, out, num_rows, size, num_leaves, is_weighted):
    """out [L, T] = each leaf's sum of e = exp(x - maximum), or of e (x - maximum) where `is_weighted`."""
    lanes, terms = np.empty(NUM_LANES, np.float32), np.empty(BUFFER, np.float32)
    width = size // num_leaves
    for t in range(num_rows):
        divisor, m = _divisor(divisors, t), f32(maxima)[t]
        for leaf in range(num_leaves):
            for l in range(NUM_LANES):
                lanes[l] = ZERO
            for start in range(0, width, BUFFER):
                row, count = f32(logits + 4 * (t * size + leaf * width + start)), min(BUFFER, width - start)
                if is_weighted:
                    for j in range(count):
                        shifted = row[j] / divisor - m
                        e = exp(shifted)
                        terms[j] = e if e == ZERO else e * shifted
                else:
                    for j in range(count):
                        terms[j] = exp(row[j] / divisor - m)
                for b in range(0, count, NUM_LANES):
                    for j in range(b, min(b + NUM_LANES, count)):
                        lanes[j - b] += terms[j]
            f32(out)[leaf * num_rows + t] = lane_tree(lanes)


@compiled
def finish(logits, divisors, maxima, totals, out, num_rows, size):
    """out [T, V] = (x - maximum) - log(total)."""
    for t in range(num_rows):
        divisor, m, total = _divisor(divisors, t), f32(maxima)[t], f32(totals)[t]
        row, result = f32(logits + 4 * t * size), f32(out + 4 * t * size)
        if total != total:
            for j in range(size):
                result[j] = NAN
            continue
        log_total = _log(total)
        for j in range(size):
            result[j] = (row[j] / divisor - m) - log_total


@compiled
def gradient(grads, logits, divisors, ids, maxima, totals, out, num_rows, size, first_id):
    """out [T, V] = grad ([id == chosen] - exp(x - maximum) / total) / temperature, for ids from `first_id`."""
    for t in range(num_rows):
        divisor, m, total, grad = _divisor(divisors, t), f32(maxima)[t], f32(totals)[t], f32(grads)[t]
        row, result, chosen = f32(logits + 4 * t * size), f32(out + 4 * t * size), i64(ids)[t] - first_id
        for j in range(size):
            p = exp(row[j] / divisor - m) / total
            result[j] = grad * (ZERO - p) / divisor
        if 0 <= chosen < size:
            p = exp(row[chosen] / divisor - m) / total
            result[chosen] = grad * (ONE - p) / divisor
