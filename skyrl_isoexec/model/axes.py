"""A mesh axis: the only way the model talks to other ranks.

A host implements one method, `exchange`, that moves bytes, and may move fewer of them with `deliver`; every sum is
arithmetic of ours, in a fixed order. Forward results must not depend on the size of the axis. Gradients need no such
equality, but are deterministic.

Backward rules assume that whatever follows a gather is computed identically on every rank of the axis: then each rank
already holds the whole gradient of the gathered tensor, and its own part of it is the gradient of what it sent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

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

    def scatter_rows(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's rows of an x that every rank has: the next ceil(T / size), or what is left, perhaps none.

        Backward: the gradients of all ranks' rows, so whole on every rank.
        """
        if self.size == 1:
            return x
        return _ScatterRows.apply(x, self) if _tracked(x) else self._share(x)

    def gather_rows(self, x: torch.Tensor, num_rows: int) -> torch.Tensor:
        """The inverse of `scatter_rows` for T = num_rows. Backward: this rank's rows of the gradient."""
        if self.size == 1:
            return x
        return _GatherRows.apply(x, self, num_rows) if _tracked(x) else self._join(x, num_rows)

    def all_to_all(self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        """Rows from all ranks, in order of rank: `sent[r]` of x's rows go to rank r, `received[r]` come from it.

        Backward: the same, in the opposite direction.
        """
        if self.size == 1:
            return x
        return _AllToAll.apply(x, self, sent, received) if _tracked(x) else self.deliver(x, sent, received)

    def deliver(self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        """`all_to_all` without autograd. Collective. Here by `exchange` of all rows; a host moves those it must."""
        lengths = self.exchange(torch.tensor(sent, device=x.device)).tolist()
        filled = torch.cat([x, x.new_zeros(max(map(sum, lengths)) - len(x), *x.shape[1:])])
        begins = [sum(to[: self.rank]) for to in lengths]
        parts = zip(self.exchange(filled), begins, received, strict=True)
        return torch.cat([part[begin : begin + count] for part, begin, count in parts])

    def _share(self, x: torch.Tensor) -> torch.Tensor:
        size = -(-len(x) // self.size)
        return x[self.rank * size : (self.rank + 1) * size]

    def _join(self, x: torch.Tensor, num_rows: int) -> torch.Tensor:
        size = -(-num_rows // self.size)
        filled = torch.cat([x, x.new_zeros(size - len(x), *x.shape[1:])])
        return self.exchange(filled).flatten(0, 1)[:num_rows]


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


class _ScatterRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis):
        ctx.axis, ctx.num_rows = axis, len(x)
        return axis._share(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.axis._join(grad, ctx.num_rows), None


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis, num_rows):
        ctx.axis = axis
        return axis._join(x, num_rows)

    @staticmethod
    def backward(ctx, grad):
        return ctx.axis._share(grad), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis, sent, received):
        ctx.axis, ctx.sent, ctx.received = axis, sent, received
        return axis.deliver(x, sent, received)

    @staticmethod
    def backward(ctx, grad):
        return ctx.axis.deliver(grad.contiguous(), ctx.received, ctx.sent), None, None, None
