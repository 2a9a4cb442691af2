"""What a gated delta rule makes of a token's projections, in eager PyTorch: the definition of the order.

Every product, sum and quotient rounds separately to fp32. What must stay equal: a row's bits depend on that row, on the
W - 1 rows before it in its sequence and on the parameters; those before the sequence's start are zeros.

Order, for one row:

1. Convolution: from +0, the products of the W taps with their rows, oldest row first; y / (exp(-y) + 1); rounded.
2. Norm of a query or key head: 1 / sqrt(sum of squares in 16 lanes + 1e-6), times the head; rounded.
3. g = -exp(a_log) * softplus(a + dt_bias) and beta = 1 / (exp(-b) + 1), not rounded.

As Hugging Face's Qwen3_5GatedDeltaNet (transformers 5.8.0), which rounds beta to the model's dtype as well.

Shapes: n rows, C channels, W taps, K key heads, V value heads, D their widths.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from skyrl_isoexec.kernels.numeric.gdn_heads import GdnHeads
from skyrl_isoexec.kernels.numeric.reference import exp, lane_sum, narrow, sqrt

NORM_EPS = 1e-6
ATANH = (1 / 15, 1 / 13, 1 / 11, 1 / 9, 1 / 7, 1 / 5, 1 / 3, 1.0)
"""Of z**14 down to z**0 in atanh(z) / z: for z up to 1/3 the rest is below 2e-9."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """fp32 rows of one rank's heads."""

    q_nKD: Tensor
    k_nKD: Tensor
    v_nVD: Tensor
    g_nV: Tensor
    """Logarithm of the decay, at most 0."""
    beta_nV: Tensor
    """Size of the step, 0 to 1."""


def softplus(x: Tensor) -> Tensor:
    """fp32 log(1 + exp(x)) = max(x, 0) + 2 atanh(y / (y + 2)), y = exp(-|x|)."""
    y = exp(-x.abs())
    z = y / (y + 2.0)
    s = z * z
    p = torch.full_like(x, ATANH[0])
    for coefficient in ATANH[1:]:
        p = p * s + coefficient
    return torch.where(x > 0, x, 0.0) + (z + z) * p


def sigmoid(x: Tensor) -> Tensor:
    """fp32 1 / (exp(-x) + 1)."""
    return 1.0 / (exp(-x) + 1.0)


def convolve(window_NC: Tensor, conv_CW: Tensor) -> Tensor:
    """fp32 [N - W + 1, C] before its rounding, of W - 1 earlier rows and the rows themselves."""
    taps = conv_CW.shape[1]
    count = window_NC.shape[0] - taps + 1
    total = torch.zeros(count, window_NC.shape[1], device=window_NC.device)
    for i in range(taps):
        total = total + window_NC[i : i + count] * conv_CW[:, i]
    return total / (exp(-total) + 1.0)


def normalise(x_nKD: Tensor, dtype: torch.dtype) -> Tensor:
    """Each head over its length, rounded to `dtype`, as fp32."""
    inverse = 1.0 / sqrt(lane_sum(x_nKD * x_nKD) + NORM_EPS)
    return narrow(x_nKD * inverse[..., None], dtype).float()


def prepare(
    window_NC: Tensor, a_nV: Tensor, b_nV: Tensor, conv_CW: Tensor, a_log_V: Tensor, dt_bias_V: Tensor, heads: GdnHeads
) -> Rows:
    """The rows after the first W - 1 of `window_NC`, which is fp32; the other operands have the model's dtype."""
    dtype = a_nV.dtype
    mixed = narrow(convolve(window_NC, conv_CW.float()), dtype).float()
    q, k, v = mixed.split(heads.widths, dim=1)
    q, k = (normalise(t.unflatten(1, (heads.num_key_heads, heads.key_width)), dtype) for t in (q, k))
    return Rows(
        q_nKD=q,
        k_nKD=k,
        v_nVD=v.unflatten(1, (heads.num_value_heads, heads.value_width)),
        g_nV=-exp(a_log_V.float()) * softplus(a_nV.float() + dt_bias_V.float()),
        beta_nV=sigmoid(b_nV.float()),
    )
