"""Router on Hopper (Triton): the bits of `reference.py`, one program a row, nothing fused.

Notable: an expert is one 64-bit key, its value in the order of integers above its index counted down, so that a choice
is a plain maximum and ties need no second look. The host does not see values: a row with a NaN, which the CPU refuses,
gets experts 0, 1, ... and NaN for every weight, and whatever is computed from it shows that.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from skyrl_isoexec.kernels.numeric.router_rule import RouterRule
from skyrl_isoexec.kernels.numeric.sm90 import EXACT, exp, power_of_two, require, tree
from skyrl_isoexec.kernels.router import backward, spec

__all__ = ["route"]

MAX_EXPERTS = 4096
"""Experts, with each group filled up to a power of two, that one program holds."""
LOWEST = tl.constexpr(-(2**63))
"""Key of nothing."""


@triton.jit
def _key(value, index):
    """int64 in the order of fp32 `value`, then of lower int32 `index`; -0 equals +0."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return ordered.to(tl.int64) * 4294967296 + (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def _value(key):
    """The fp32 value of a key."""
    ordered = (key >> 32).to(tl.int32)
    return tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)


@triton.jit
def _route(
    logits, bias, weights, experts, scores, stride, num_experts, scale, eps,
    SOFTMAX: tl.constexpr, BIAS: tl.constexpr, RENORMALISE: tl.constexpr, SCORES: tl.constexpr, TOP_K: tl.constexpr,
    GROUPS: tl.constexpr, KEPT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row as a tile of ROWS groups, of which GROUPS are there, by BLOCK experts: both powers of two."""
    row = tl.program_id(0).to(tl.int64)
    width = num_experts // GROUPS
    group, inside = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]
    index = group * width + inside
    there = (group < GROUPS) & (inside < width)
    x = tl.load(logits + row * stride + index, mask=there, other=float("-inf"))
    if SOFTMAX:
        e = tl.where(there, exp(x - tl.max(tl.max(x, 1), 0)), 0.0)
        score = tl.div_rn(e, tl.zeros((ROWS, BLOCK), tl.float32) + tree(e, 1, BLOCK)[:, None])
    else:
        score = tl.div_rn(tl.full((ROWS, BLOCK), 1.0, tl.float32), exp(-x) + 1.0)
    if SCORES:
        tl.store(scores + row * num_experts + index, score, mask=there)
    choice = score
    if BIAS:
        choice = score + tl.load(bias + index, mask=there, other=0.0)
    is_bad = tl.max(tl.max((there & (choice != choice)).to(tl.int32), 1), 0)
    key = tl.where(there, _key(tl.where(is_bad > 0, 0.0, choice), index), LOWEST)
    if GROUPS > 1:
        best = tl.max(key, 1)
        second = tl.max(tl.where(key == best[:, None], LOWEST, key), 1)
        number = tl.arange(0, ROWS)
        value = tl.where(number < GROUPS, _value(best) + _value(second), 0.0)
        is_bad = tl.maximum(is_bad, tl.max((value != value).to(tl.int32), 0))
        left = tl.where(number < GROUPS, _key(tl.where(is_bad > 0, 0.0, value), number), LOWEST)
        kept = number < 0
        for _ in tl.static_range(KEPT):
            highest = tl.max(left, 0)
            kept = kept | (left == highest)
            left = tl.where(left == highest, LOWEST, left)
        key = tl.where(there, _key(tl.where(is_bad > 0, 0.0, choice), index), LOWEST)
        key = tl.where(kept[:, None], key, LOWEST)
    chosen = index < 0
    for _ in tl.static_range(TOP_K):
        highest = tl.max(tl.max(key, 1), 0)
        chosen = chosen | (key == highest)
        key = tl.where(key == highest, LOWEST, key)
    chosen, score = tl.reshape(chosen, (ROWS * BLOCK,)), tl.reshape(score, (ROWS * BLOCK,))
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    if RENORMALISE:
        total = tl.sum(tl.where(chosen & (place == 0), score, 0.0), 0)
        for k in tl.static_range(1, TOP_K):
            total += tl.sum(tl.where(chosen & (place == k), score, 0.0), 0)
        score = tl.div_rn(score, tl.zeros((ROWS * BLOCK,), tl.float32) + (total + eps))
    weight = tl.where(is_bad > 0, float("nan"), score * scale)
    tl.store(weights + row * TOP_K + place, weight, mask=chosen)
    tl.store(experts + row * TOP_K + place, tl.reshape(index, (ROWS * BLOCK,)), mask=chosen)


def _tile(num_experts: int, rule: RouterRule) -> tuple[int, int]:
    """(groups, experts of a group) of the tile of a row."""
    return power_of_two(rule.num_groups), power_of_two(num_experts // rule.num_groups)


def _run(
    logits_TE: Tensor, top_k: int, rule: RouterRule, bias_E: Tensor | None, wants_scores: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(weights, experts, scores or None)."""
    logits_TE = logits_TE if logits_TE.stride(1) == 1 else logits_TE.contiguous()
    num_rows, size = logits_TE.shape
    weights_TK = torch.empty(num_rows, top_k, dtype=torch.float32, device=logits_TE.device)
    experts_TK = torch.empty(num_rows, top_k, dtype=torch.int32, device=logits_TE.device)
    scores_TE = torch.empty_like(logits_TE, memory_format=torch.contiguous_format) if wants_scores else None
    rows, block = _tile(size, rule)
    if num_rows:
        _route[(num_rows,)](
            logits_TE, logits_TE if bias_E is None else bias_E.contiguous(), weights_TK, experts_TK,
            weights_TK if scores_TE is None else scores_TE, logits_TE.stride(0), size, rule.scale, rule.eps,
            SOFTMAX=rule.scoring == "softmax", BIAS=bias_E is not None, RENORMALISE=rule.renormalise,
            SCORES=wants_scores, TOP_K=top_k, GROUPS=rule.num_groups, KEPT=rule.groups_kept, ROWS=rows, BLOCK=block,
            num_warps=max(1, min(8, rows * block // 256)), **EXACT,
        )  # fmt: skip
    return weights_TK, experts_TK, scores_TE


def route(logits_TE: Tensor, top_k: int, rule: RouterRule, bias_E: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(fp32 weights [T, K], int32 experts [T, K], ascending). Refuses what `spec` refuses and `MAX_EXPERTS`.

    Values are not looked at: see above for a row with a NaN.
    """
    spec.check(logits_TE, top_k, rule, bias_E)
    require("router", logits_TE, bias_E)
    rows, block = _tile(logits_TE.shape[1], rule)
    if rows * block > MAX_EXPERTS:
        raise ValueError(
            f"router: the sm90 implementation holds {MAX_EXPERTS} experts of filled groups, not {rows} x {block}"
        )
    return backward.route(_run, logits_TE, top_k, rule, bias_E)
