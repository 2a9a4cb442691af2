"""The tensor-parallel axis of a Megatron process: bytes through its process group, sums through our tree."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from ...model.axes import Axis


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


def tensor_parallel_axis() -> Axis:
    """The axis over Megatron's tensor-parallel group, which must have been initialised."""
    return GroupAxis(parallel_state.get_tensor_model_parallel_group())
