"""Gradients of causal attention on Hopper: PyTorch's flash backward, fed with our output and log-sum-exp.

Notable: no bit contract with the engine. It runs in its deterministic mode, where partial gradients of queries are
added in a fixed order instead of by atomics, so that a run repeats to the bit.

Shapes: T tokens, N query heads, K key-value heads, D head dimension.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from skyrl_isoexec.kernels.numeric.sm90 import needs_grad
from skyrl_isoexec.schedule import Schedule


def longest(cu_seqlens: Tensor) -> int:
    """Length of the longest sequence: read from the device once per tensor of bounds, not once per layer."""
    known = getattr(cu_seqlens, "longest_sequence", None)
    if known is None or known[0] != cu_seqlens._version:
        known = (cu_seqlens._version, int((cu_seqlens[1:] - cu_seqlens[:-1]).max()))
        cu_seqlens.longest_sequence = known
    return known[1]


class _Attention(torch.autograd.Function):
    """`forward(q, k, v, cu_seqlens, scale, schedule) -> (out [T, N, D], lse fp32 [N, T])`."""

    @staticmethod
    def forward(ctx, q_TND, k_TKD, v_TKD, cu_seqlens, scale, schedule, forward):  # noqa: D102
        out, lse = forward(q_TND, k_TKD, v_TKD, cu_seqlens, scale, schedule)
        ctx.save_for_backward(q_TND, k_TKD, v_TKD, out, lse)
        ctx.cu_seqlens, ctx.scale = cu_seqlens, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_TND):  # noqa: D102
        q, k, v, out, lse = ctx.saved_tensors
        bounds, length = ctx.cu_seqlens.to(torch.int32), longest(ctx.cu_seqlens)
        unused = torch.empty(2, dtype=torch.uint64, device=q.device)
        was, only_warns = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        fills = torch.utils.deterministic.fill_uninitialized_memory
        torch.utils.deterministic.fill_uninitialized_memory = False
        torch.use_deterministic_algorithms(True)
        try:
            grads = torch.ops.aten._flash_attention_backward(
                grad_TND.contiguous(), q.contiguous(), k.contiguous(), v.contiguous(), out, lse, bounds, bounds,
                length, length, 0.0, True, unused, unused, scale=ctx.scale,
            )  # fmt: skip
        finally:
            torch.use_deterministic_algorithms(was, warn_only=only_warns)
            torch.utils.deterministic.fill_uninitialized_memory = fills
        return *grads, None, None, None, None


def differentiable(
    forward: Callable[..., tuple[Tensor, Tensor]],
    q_TND: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    schedule: Schedule,
) -> Tensor:
    """Run `forward` and return its output; enters autograd only where a gradient is wanted."""
    if needs_grad(q_TND, k_TKD, v_TKD):
        return _Attention.apply(q_TND, k_TKD, v_TKD, cu_seqlens, scale, schedule, forward)
    return forward(q_TND, k_TKD, v_TKD, cu_seqlens, scale, schedule)[0]
