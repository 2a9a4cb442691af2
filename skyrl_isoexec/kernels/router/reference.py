"""Router in eager PyTorch: the definition of the order.

Scores in fp32, each operation rounded. softmax: e = exp(x - maximum); their sum is a balanced tree over neighbours, the
experts filled up with zeros to a power of two; score = e / sum. sigmoid: score = 1 / (exp(-x) + 1).

Choice by score, plus the bias where there is one. With groups, a group's value is the sum of its two best; of the kept
groups' experts, as of groups, the higher value comes first, of equal values the lower index; -0 equals +0. A token's
experts are returned in ascending order, whatever their scores.

Weights: chosen scores, without bias; divided by (their sum in ascending order of experts + eps) if renormalised; times
scale.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from skyrl_isoexec.kernels.numeric import exp, lane_tree
from skyrl_isoexec.kernels.numeric.router_rule import RouterRule
from skyrl_isoexec.kernels.router import spec


def scores(logits_TE: Tensor, rule: RouterRule) -> Tensor:
    """fp32 [T, E] scores of all experts."""
    if rule.scoring == "sigmoid":
        return 1.0 / (exp(-logits_TE) + 1.0)
    e_TE = exp(logits_TE - logits_TE.amax(1, keepdim=True))
    size = e_TE.shape[1]
    return e_TE / lane_tree(pad(e_TE, (0, (1 << (size - 1).bit_length()) - size)))[:, None]


def first(values: Tensor, count: int) -> Tensor:
    """int64 indices, ascending, of the `count` highest of the last dimension; of equal ones the lower index."""
    order = (values + 0.0).sort(dim=-1, descending=True, stable=True).indices
    return order[..., :count].sort(dim=-1).values


def group_values(choice_TE: Tensor, rule: RouterRule) -> Tensor:
    """fp32 [T, G]: the sum of the two best of each group."""
    best = choice_TE.unflatten(1, (rule.num_groups, -1)).sort(dim=2, descending=True).values
    return best[:, :, 0] + best[:, :, 1]


def choose(choice_TE: Tensor, top_k: int, rule: RouterRule) -> Tensor:
    """int64 [T, K] experts, ascending. ValueError for a row whose values cannot be compared."""
    bad_T = choice_TE.isnan().any(1)
    if rule.num_groups > 1:
        values_TG = group_values(choice_TE, rule)
        bad_T = bad_T | values_TG.isnan().any(1)
    if bad_T.any():
        spec.refuse_row(int(bad_T.nonzero()[0]), int(bad_T.sum()))
    if rule.num_groups == 1:
        return first(choice_TE, top_k)
    width = choice_TE.shape[1] // rule.num_groups
    groups = first(values_TG, rule.groups_kept)
    allowed = (groups[:, :, None] * width + torch.arange(width)).flatten(1)
    return allowed.gather(1, first(choice_TE.gather(1, allowed), top_k))


def route(logits_TE: Tensor, top_k: int, rule: RouterRule, bias_E: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(fp32 weights [T, K], int32 experts [T, K], ascending). Refuses what `spec` refuses, and rows with a NaN."""
    spec.check(logits_TE, top_k, rule, bias_E)
    score_TE = scores(logits_TE, rule)
    choice_TE = score_TE.detach() if bias_E is None else score_TE.detach() + bias_E.detach()
    experts_TK = choose(choice_TE, top_k, rule)
    weights_TK = score_TE.gather(1, experts_TK)
    if rule.renormalise:
        total = weights_TK[:, 0]
        for k in range(1, top_k):
            total = total + weights_TK[:, k]
        weights_TK = weights_TK / (total + torch.tensor(rule.eps))[:, None]
    return weights_TK * torch.tensor(rule.scale), experts_TK.int()
