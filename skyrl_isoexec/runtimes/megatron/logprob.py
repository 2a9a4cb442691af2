"""Token log-probabilities of a vocabulary-parallel trainer: the sampler's function, its leaves spread over ranks.

Shapes: T rows, V vocabulary of this rank, L leaves of this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ...model.axes import Axis

if TYPE_CHECKING:
    from ...kernels.bundle import Kernels

TokenLogprobs = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class _TokenLogprobs(torch.autograd.Function):
    """The logprob kernel's own parts; only maxima, leaf sums and the chosen logits travel, and nothing in backward."""

    @staticmethod
    def forward(ctx, logits_TV, ids_T, kernels: Kernels, axis: Axis, local_leaves: int):
        max_T = axis.max(kernels.row_max(logits_TV))
        sums = axis.stack_gather(kernels.leaf_sums(logits_TV, max_T, local_leaves))  # [size, L, T]
        total_T = kernels.total(sums.flatten(0, 1))
        size = logits_TV.shape[1]
        owner_T = torch.div(ids_T, size, rounding_mode="floor")
        local_T = torch.where(owner_T == axis.rank, ids_T - axis.rank * size, 0)
        own = logits_TV.gather(1, local_T[:, None])[:, 0]
        chosen_T = axis.stack_gather(own)[owner_T, torch.arange(own.shape[0], device=own.device)]
        ctx.save_for_backward(logits_TV, ids_T, max_T, total_T)
        ctx.kernels, ctx.first_id = kernels, axis.rank * size
        return kernels.finish(chosen_T, max_T, total_T)

    @staticmethod
    def backward(ctx, grad_T):
        logits_TV, ids_T, max_T, total_T = ctx.saved_tensors
        grad_TV = ctx.kernels.grad_logits(grad_T, logits_TV, ids_T, max_T, total_T, first_id=ctx.first_id)
        return grad_TV, None, None, None, None


def token_logprobs(kernels: Kernels, axis: Axis, num_leaves: int) -> TokenLogprobs:
    """The function (logits [..., V] fp32, int64 ids [...]) -> fp32 [...] of a trainer; ids are of the whole vocabulary.

    The logits are already divided by the temperature. Bits equal `kernels.logprobs` on the gathered row. Collective.
    """

    def compute(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        rows_TV = logits.reshape(-1, logits.shape[-1])
        out_T = _TokenLogprobs.apply(rows_TV, ids.reshape(-1), kernels, axis, num_leaves // axis.size)
        return out_T.view(ids.shape)

    return compute
