"""vLLM's tensor-parallel group as an axis of the model: it moves bytes, the sums stay ours."""

from __future__ import annotations

import torch
from vllm.distributed.parallel_state import GroupCoordinator, get_tp_group

from skyrl_isoexec.model.axes import Axis, SingleAxis


class EngineAxis(Axis):
    """The ranks of one group of vLLM."""

    def __init__(self, group: GroupCoordinator) -> None:
        self.group, self.rank, self.size = group, group.rank_in_group, group.world_size

    def exchange(self, x: torch.Tensor) -> torch.Tensor:
        """[size, *x.shape], by the group's all-gather."""
        return self.group.all_gather(x.contiguous(), dim=0).view(self.size, *x.shape)


def tensor_axis() -> Axis:
    """The axis of this worker's tensor-parallel group."""
    group = get_tp_group()
    return EngineAxis(group) if group.world_size > 1 else SingleAxis()
