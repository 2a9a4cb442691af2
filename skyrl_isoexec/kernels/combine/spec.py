"""What moving rows to experts and back accepts: the checks every implementation runs first.

Shapes: T tokens, K experts of a token, E experts, S = T K rows, H width. A slot t K + k is the k-th expert of token t;
`order` names for each row, sorted by expert and then by token, its slot.
"""

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16)


def check_experts(experts_TK: Tensor, num_experts: int) -> None:
    """Refuse (ValueError, TypeError) what is not [T, K] int32 with a choice among so many experts."""
    if experts_TK.dim() != 2 or not 1 <= experts_TK.shape[1] <= num_experts:
        raise ValueError(
            f"dispatch: experts {tuple(experts_TK.shape)} are not [T, K] with K between 1 and num_experts = "
            f"{num_experts!r}"
        )
    if experts_TK.dtype != torch.int32:
        raise TypeError(f"dispatch: experts are {experts_TK.dtype}, not int32")


def refuse_token(token: int, experts: list[int], num_experts: int) -> None:
    """ValueError for experts of a token that do not ascend strictly, or that there are not."""
    raise ValueError(
        f"dispatch: experts {experts} of token {token} do not ascend, without a duplicate, within 0 .. "
        f"{num_experts - 1}; a router returns them so"
    )


def refuse_order(place: int) -> None:
    """ValueError for an order that is no permutation."""
    raise ValueError(f"combine: order at row {place} is no slot, or one that an earlier row has; take it from dispatch")


def check_order(order_S: Tensor, num_slots: int) -> None:
    """Refuse (ValueError) what is not the slots of so many rows."""
    if order_S.shape != (num_slots,) or order_S.dtype != torch.int64:
        raise ValueError(f"combine: order {tuple(order_S.shape)} {order_S.dtype} is not [{num_slots}] int64")


def check_expand(x_TH: Tensor, order_S: Tensor) -> int:
    """K, the rows of a token. Refuses (ValueError, TypeError) rows that are not a multiple of the tokens."""
    if x_TH.dim() != 2 or x_TH.dtype not in DTYPES:
        raise TypeError(f"expand: x {tuple(x_TH.shape)} {x_TH.dtype} is not [T, H] float32 or bfloat16")
    num_tokens, num_rows = x_TH.shape[0], order_S.shape[0] if order_S.dim() else 0
    if (num_rows % num_tokens or not num_rows) if num_tokens else num_rows:
        raise ValueError(f"expand: order {tuple(order_S.shape)} is not K slots of each of {num_tokens} tokens")
    check_order(order_S, num_rows)
    return num_rows // num_tokens if num_tokens else 1


def check(y_SH: Tensor, order_S: Tensor, weights_TK: Tensor, shared_TH: Tensor | None) -> None:
    """Refuse (ValueError, TypeError) operands that do not fit, naming both."""
    if y_SH.dtype not in DTYPES or weights_TK.dtype != torch.float32:
        raise TypeError(
            f"combine: y is {y_SH.dtype} (float32 or bfloat16) and weights are {weights_TK.dtype} (float32): a weight "
            "multiplies before any rounding"
        )
    if y_SH.dim() != 2 or weights_TK.dim() != 2 or not weights_TK.shape[1] or y_SH.shape[0] != weights_TK.numel():
        raise ValueError(
            f"combine: y {tuple(y_SH.shape)} and weights {tuple(weights_TK.shape)} are not [T K, H] and [T, K]"
        )
    check_order(order_S, y_SH.shape[0])
    like = (weights_TK.shape[0], y_SH.shape[1])
    if shared_TH is not None and (shared_TH.shape != like or shared_TH.dtype != y_SH.dtype):
        raise ValueError(
            f"combine: shared {tuple(shared_TH.shape)} {shared_TH.dtype} is not {like} {y_SH.dtype} like y's tokens"
        )
