"""The axes of a Megatron process: bytes through its process groups, sums through our tree."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from ...model.axes import Axis
from ...model.config import DecoderConfig


class GroupAxis(Axis):
    """An axis over a torch process group (gloo or NCCL)."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def exchange(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks' x, stacked in rank order: shape [size, *x.shape]. Collective."""
        stacked = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        dist.all_gather(list(stacked.unbind(0)), x.contiguous(), group=self.group)
        return stacked

    def deliver(self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        """Rows from all ranks, in rank order, of which each rank sends only those that are for another. Collective."""
        rows = x.new_empty((sum(received), *x.shape[1:]))
        dist.all_to_all_single(rows, x.contiguous(), list(received), list(sent), group=self.group)
        return rows


def tensor_parallel_axis() -> Axis:
    """The axis over Megatron's tensor-parallel group, which must have been initialised."""
    return GroupAxis(parallel_state.get_tensor_model_parallel_group())


def expert_parallel_axis(model: DecoderConfig) -> Axis | None:
    """The axis over Megatron's expert-parallel group: ranks with other tokens, and tensor ranks; None of a dense model.

    ValueError for several ranks and a dense model, and where single experts would be cut as well.
    """
    size, cut = (
        parallel_state.get_expert_model_parallel_world_size(),
        parallel_state.get_expert_tensor_parallel_world_size(),
    )
    if not model.has_experts:
        if size > 1:
            raise ValueError(f"expert_model_parallel_size = {size}, but every layer is dense; set it to 1")
        return None
    if cut > 1:
        raise ValueError(f"expert_tensor_parallel_size = {cut} would cut single experts; set it to 1")
    return GroupAxis(parallel_state.get_expert_model_parallel_group())
