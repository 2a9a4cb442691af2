"""Rows to their experts and back, in eager PyTorch: the definition of the order.

dispatch sorts slots by expert, stably, so by token within an expert.

out = ((w_0 y_0 + w_1 y_1) + w_2 y_2) + ... in fp32, a token's experts ascending, every product and every sum rounded:
a product and a sum, never a fused one. The first product starts the sum, so that -0 stays -0. Then the shared expert's
row is added, and the sum is rounded once to y's dtype.
"""

import torch
from torch import Tensor

from skyrl_isoexec.kernels.combine import spec
from skyrl_isoexec.kernels.numeric import narrow


def dispatch(experts_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """(int64 order [S], int32 starts [E + 1]): the slot of each row, and where each expert's rows begin.

    Refuses what `spec` refuses, and (ValueError) experts of a token that do not ascend strictly or that there are not.
    """
    spec.check_experts(experts_TK, num_experts)
    ascends_T = (experts_TK[:, 1:] > experts_TK[:, :-1]).all(1)
    bad_T = ~ascends_T | (experts_TK[:, 0] < 0) | (experts_TK[:, -1] >= num_experts)
    if bad_T.any():
        token = int(bad_T.nonzero()[0])
        spec.refuse_token(token, experts_TK[token].tolist(), num_experts)
    flat = experts_TK.flatten()
    counts = flat.long().bincount(minlength=num_experts)
    return flat.sort(stable=True).indices, torch.cat([torch.zeros(1), counts.cumsum(0)]).int()


def inverse(order_S: Tensor) -> Tensor:
    """int64 [S]: the row of each slot. ValueError for an order that is no permutation."""
    num_slots, seen = order_S.shape[0], set()
    for place, slot in enumerate(order_S.tolist()):
        if not 0 <= slot < num_slots or slot in seen:
            spec.refuse_order(place)
        seen.add(slot)
    return order_S.argsort()


def expand(x_TH: Tensor, order_S: Tensor) -> Tensor:
    """x_SH: each token's row for each of its experts, bit for bit, in the order of rows."""
    top_k = spec.check_expand(x_TH, order_S)
    inverse(order_S)
    return x_TH[order_S // top_k]


def combine(y_SH: Tensor, order_S: Tensor, weights_TK: Tensor, shared_TH: Tensor | None = None) -> Tensor:
    """out_TH in y's dtype. Refuses what `spec` refuses, and an order that is no permutation."""
    spec.check(y_SH, order_S, weights_TK, shared_TH)
    y_TKH = y_SH[inverse(order_S)].unflatten(0, weights_TK.shape).float()
    total = weights_TK[:, :1] * y_TKH[:, 0]
    for k in range(1, weights_TK.shape[1]):
        total = total + weights_TK[:, k : k + 1] * y_TKH[:, k]
    if shared_TH is not None:
        total = total + shared_TH.float()
    return narrow(total, y_SH.dtype)
