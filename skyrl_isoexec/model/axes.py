"""A mesh axis: the only way the model talks to other ranks.

A host implements one method, `exchange`, that moves bytes; every sum is arithmetic of ours, in a fixed order. Forward
results must not depend on the size of the axis. Gradients need no such equality, but are deterministic.

Backward rules assume that whatever follows a gather is computed identically on every rank of the axis: then each rank
already holds the whole gradient of the gathered tensor, and its own part of it is the gradient of what it sent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch


class Axis(ABC):
    """Ranks 0 .. size-1 that hold parts of the same tensors."""

    rank: int
    size: int

    @abstractmethod
    def exchange(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks' x, stacked in rank order: shape [size, *x.shape], same dtype, no autograd. Collective."""

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, fp32, by a balanced tree with the lower rank left, rounded once to x.dtype. No autograd.

        Backward of `copy_in`. A host may override it with another deterministic sum, since no forward value uses it.
        """
        parts = list(self.exchange(x).float().unbind(0))
        while len(parts) > 1:
            pairs = [parts[i] + parts[i + 1] for i in range(0, len(parts) - 1, 2)]
            parts = pairs + parts[len(pairs) * 2 :]
        return parts[0].to(x.dtype)

    def max(self, x: torch.Tensor) -> torch.Tensor:
        """Elementwise maximum over ranks; exact, carries no gradient."""
        return x.detach() if self.size == 1 else self.exchange(x.detach()).amax(0)

    def stack_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[size, *x.shape] in rank order. Backward: this rank's slice of the gradient."""
        if self.size == 1:
            return x.unsqueeze(0)
        return _StackGather.apply(x, self) if _tracked(x) else self.exchange(x)

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """All ranks' x concatenated along dim. Backward: this rank's slice of the gradient."""
        if self.size == 1:
            return x
        return torch.cat(self.stack_gather(x).unbind(0), dim=dim)

    def copy_in(self, x: torch.Tensor) -> torch.Tensor:
        """x itself, entering a region where each rank computes another part. Backward: sum of the ranks' gradients."""
        return _CopyIn.apply(x, self) if self.size > 1 and _tracked(x) else x


class SingleAxis(Axis):
    """An axis of one rank: every operation is the identity."""

    rank = 0
    size = 1

    def exchange(self, x: torch.Tensor) -> torch.Tensor:
        """[1, *x.shape]."""
        return x.unsqueeze(0)


def _tracked(x: torch.Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


class _StackGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis):
        ctx.rank = axis.rank
        return axis.exchange(x)

    @staticmethod
    def backward(ctx, grad):
        return grad[ctx.rank], None


class _CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis):
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.axis.sum(grad.contiguous()), None
