"""Router on one core (numba): the same bits as `router.reference`.

Notable: a choice is as many passes over the experts as are chosen, each for the highest value that is left, so that of
equal values the lower index comes first without a word about it.
"""

import numpy as np
import torch
from torch import Tensor

from skyrl_isoexec.kernels.numeric.cpu import ONE, ZERO, compiled, exp, f32, i32, inlined, require_cpu, scratch
from skyrl_isoexec.kernels.numeric.router_rule import RouterRule
from skyrl_isoexec.kernels.router import backward, spec

NEG_INF = np.float32(-np.inf)
FREE, TAKEN = np.int32(0), np.int32(1)


@inlined
def _softmax(row, score, terms, size, width):
    """score [size] of a row; `terms` holds `width` numbers, a power of two."""
    best = row[0]
    for i in range(1, size):
        best = row[i] if row[i] > best or row[i] != row[i] else best
    for i in range(size):
        terms[i] = exp(row[i] - best)
        score[i] = terms[i]
    for i in range(size, width):
        terms[i] = ZERO
    while width > 1:
        width //= 2
        for i in range(width):
            terms[i] = terms[2 * i] + terms[2 * i + 1]
    for i in range(size):
        score[i] = score[i] / terms[0]


@inlined
def _highest(values, taken, size):
    """The first index of the highest value that is not taken."""
    best = -1
    for i in range(size):
        if taken[i] == FREE and (best < 0 or values[i] > values[best]):
            best = i
    return best


@inlined
def _keep_groups(choice, taken, size, groups, kept, values, passed):
    """Mark as taken the experts of all groups but the `kept` best; whether a group's value is NaN."""
    width, is_bad = size // groups, False
    for g in range(groups):
        best, second = NEG_INF, NEG_INF
        for i in range(g * width, (g + 1) * width):
            if choice[i] > best:
                best, second = choice[i], best
            elif choice[i] > second:
                second = choice[i]
        values[g], passed[g] = best + second, FREE
        is_bad = is_bad or values[g] != values[g]
    if is_bad:
        return True
    for i in range(size):
        taken[i] = TAKEN
    for _ in range(kept):
        g = _highest(values, passed, groups)
        passed[g] = TAKEN
        for i in range(g * width, (g + 1) * width):
            taken[i] = FREE
    return False


@compiled
def _route(
    logits, bias, softmax, renormalise, scale, eps, num_rows, size, width, top_k, groups, kept,
    weights, experts, scores, stride, terms_at, choice_at, values_at, taken_at, passed_at, before_at,
):  # fmt: skip
    """The first row whose values cannot be compared, or -1; scores of a row lie `stride` behind those of the last."""
    terms, choice, taken, before = f32(terms_at), f32(choice_at), i32(taken_at), i32(before_at)
    for t in range(num_rows):
        row, score = f32(logits + 4 * t * size), f32(scores + 4 * t * stride)
        if softmax:
            _softmax(row, score, terms, size, width)
        else:
            for i in range(size):
                score[i] = ONE / (exp(-row[i]) + ONE)
        is_bad = False
        for i in range(size):
            choice[i] = score[i] + f32(bias)[i] if bias != 0 else score[i]
            is_bad = is_bad or choice[i] != choice[i]
            taken[i] = FREE
        if groups > 1 and not is_bad:
            is_bad = _keep_groups(choice, taken, size, groups, kept, f32(values_at), i32(passed_at))
        if is_bad:
            return t
        for i in range(size):
            before[i] = taken[i]
        for _ in range(top_k):
            taken[_highest(choice, taken, size)] = TAKEN
        to, chosen, k, total = f32(weights + 4 * t * top_k), i32(experts + 4 * t * top_k), 0, ZERO
        for i in range(size):
            if taken[i] != before[i]:
                chosen[k], to[k] = np.int32(i), score[i]
                total = total + score[i]
                k += 1
        total = total + np.float32(eps)
        for k in range(top_k):
            to[k] = (to[k] / total if renormalise else to[k]) * np.float32(scale)
    return -1


def _run(
    logits_TE: Tensor, top_k: int, rule: RouterRule, bias_E: Tensor | None, wants_scores: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(weights, experts, scores or None). ValueError for a row whose values cannot be compared."""
    require_cpu(logits_TE, bias_E)
    logits_TE, bias_E = logits_TE.contiguous(), None if bias_E is None else bias_E.contiguous()
    num_rows, size = logits_TE.shape
    width = 1 << (size - 1).bit_length()
    weights_TK, experts_TK = torch.empty(num_rows, top_k), torch.empty(num_rows, top_k, dtype=torch.int32)
    scores_TE = torch.empty(num_rows, size) if wants_scores else None
    places = [scratch(width + 4 * size + 2 * rule.num_groups)]
    for count in (width, size, size, size, size, rule.num_groups):
        places.append(places[-1] + 4 * count)
    terms, choice, taken, before, score, values, passed = places
    bad = _route(
        logits_TE.data_ptr(), 0 if bias_E is None else bias_E.data_ptr(), int(rule.scoring == "softmax"),
        int(rule.renormalise), rule.scale, rule.eps, num_rows, size, width, top_k, rule.num_groups, rule.groups_kept,
        weights_TK.data_ptr(), experts_TK.data_ptr(), score if scores_TE is None else scores_TE.data_ptr(),
        0 if scores_TE is None else size, terms, choice, values, taken, passed, before,
    )  # fmt: skip
    if bad >= 0:
        spec.refuse_row(bad)
    return weights_TK, experts_TK, scores_TE


def route(logits_TE: Tensor, top_k: int, rule: RouterRule, bias_E: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(fp32 weights [T, K], int32 experts [T, K], ascending). Refuses what `spec` refuses, and rows with a NaN."""
    spec.check(logits_TE, top_k, rule, bias_E)
    return backward.route(_run, logits_TE, top_k, rule, bias_E)
