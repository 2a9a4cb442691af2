"""A router chooses as transformers' own classes do, ties go to the lower index, and what it refuses; its bits: gate."""

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from skyrl_isoexec.kernels.numeric.inputs import normal, ties_at_the_cut
from skyrl_isoexec.kernels.numeric.router_rule import RouterRule
from skyrl_isoexec.kernels.router import cpu, reference
from skyrl_isoexec.kernels.router.cases import GROUPS, RAW, SIGMOID, SOFTMAX, steps

ROUNDINGS = 24 * 2.0**-24
"""Relative: of an exponential, a sum of at most 60 and one of at most 8 in another order, two divisions, a product."""
SIZES = [(size, top_k) for size in (5, 17, 60) for top_k in range(1, min(size, 8) + 1)]


def eighths(seed: int, rows: int, size: int) -> Tensor:
    """Logits that differ by an eighth or not at all, so that no rounding decides a choice."""
    return torch.randint(-16, 17, (rows, size), generator=torch.Generator().manual_seed(seed)) / 8.0


def qwen(family: str, logits: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """(weights, experts) of transformers' router, given logits as hidden states and ones as its weight."""
    if family == "qwen3_moe":
        from transformers.models.qwen3_moe import Qwen3MoeConfig as Config
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter as Router
    else:
        from transformers.models.qwen3_5_moe import Qwen3_5MoeTextConfig as Config
        from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeTopKRouter as Router
    size = logits.shape[1]
    router = Router(Config(hidden_size=size, num_experts=size, num_experts_per_tok=top_k, norm_topk_prob=renormalise))
    router.weight.data = torch.eye(size)
    with torch.no_grad():
        _, weights, experts = router(logits)
    return weights, experts


def glm(logits: Tensor, top_k: int, rule: RouterRule, bias: Tensor) -> tuple[Tensor, Tensor]:
    """(weights, experts) of transformers' layer."""
    from transformers.models.glm4_moe_lite import Glm4MoeLiteConfig
    from transformers.models.glm4_moe_lite.modeling_glm4_moe_lite import Glm4MoeLiteMoE

    config = Glm4MoeLiteConfig(
        hidden_size=4, moe_intermediate_size=4, n_shared_experts=1, n_routed_experts=logits.shape[1],
        num_experts_per_tok=top_k, n_group=rule.num_groups, topk_group=rule.groups_kept,
        norm_topk_prob=rule.renormalise, routed_scaling_factor=rule.scale,
    )  # fmt: skip
    layer = Glm4MoeLiteMoE(config)
    layer.gate.e_score_correction_bias = bias
    experts, weights = layer.route_tokens_to_experts(logits)
    return weights, experts


def compare(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor], choice: Tensor) -> tuple[int, int]:
    """(rows that tie at the cut, others): the others choose alike, the tied ones among equals; weights are close."""
    weights, experts = ours
    their_experts, order = theirs[1].sort(dim=1)
    tied = torch.zeros_like(choice, dtype=torch.bool).scatter_(1, experts.long(), True)
    tied = ((choice == choice.gather(1, experts.long()).amin(1, keepdim=True)) & ~tied).any(1)
    assert torch.equal(experts[~tied].long(), their_experts[~tied])
    values = (choice.gather(1, e.long()).sort(dim=1).values for e in (experts, their_experts))
    assert torch.equal(*values)
    close = (weights - theirs[0].gather(1, order)).abs() <= ROUNDINGS * weights
    assert close[~tied].all()
    return int(tied.sum()), int((~tied).sum())


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_moe raw", "qwen3_5_moe"])
def test_softmax_routers_of_transformers(family):
    rule = RouterRule(scoring="softmax", renormalise="raw" not in family)
    tied, others = 0, 0
    for size, top_k in SIZES:
        logits = eighths(size + top_k, 40, size)
        theirs = qwen(family.split()[0], logits, top_k, rule.renormalise)
        counts = compare(cpu.route(logits, top_k, rule), theirs, reference.scores(logits, rule))
        tied, others = tied + counts[0], others + counts[1]
    assert tied > 100 and others > 200


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("biased", [False, True])
def test_sigmoid_router_of_transformers(groups, biased):
    """With groups only as far as no two groups tie, which transformers leaves open."""
    rule = RouterRule(
        scoring="sigmoid", renormalise=True, eps=1e-20, scale=1.8, num_groups=groups, groups_kept=max(1, groups - 2)
    )
    tied, others = 0, 0
    for size, top_k in SIZES if groups == 1 else [(60, 1), (60, 8), (8, 3)]:
        logits, bias = eighths(size + top_k, 40, size), normal(size, size) * biased
        choice = reference.scores(logits, rule) + bias
        if groups > 1:
            values = reference.group_values(choice, rule)
            logits = logits[(values.sort(1).values.diff(dim=1) != 0).all(1)]
            choice = reference.scores(logits, rule) + bias
            kept = reference.first(reference.group_values(choice, rule), rule.groups_kept)
            allowed = torch.zeros(len(choice), groups, dtype=torch.bool).scatter_(1, kept, True)
            choice = choice.masked_fill(~allowed.repeat_interleave(size // groups, 1), float("-inf"))
        ours = cpu.route(logits, top_k, rule, bias if biased else None)
        counts = compare(ours, glm(logits, top_k, rule, bias), choice)
        tied, others = tied + counts[0], others + counts[1]
    assert others > 60 and (biased or tied > 5)


@pytest.mark.parametrize("rule", [SOFTMAX, RAW, SIGMOID])
def test_ties_go_to_the_lower_index(rule):
    logits, tied = steps(1, 200, 17), 0
    score = reference.scores(logits, rule)
    for top_k in range(1, 9):
        experts = cpu.route(logits, top_k, rule)[1]
        tied += ties_at_the_cut(score, experts)
        for row, chosen in zip(score.tolist(), experts.tolist(), strict=True):
            assert chosen == sorted(sorted(range(17), key=lambda i: (-row[i], i))[:top_k])
    assert tied > 500


def test_groups_tie_to_the_lower_index():
    """All groups equal: the first two are kept, and of them the first experts."""
    weights, experts = cpu.route(torch.zeros(3, 20), 7, GROUPS)
    assert experts.tolist() == [[0, 1, 2, 3, 4, 5, 6]] * 3
    assert torch.equal(weights, weights[:1, :1].expand(3, 7))


def test_a_recomputation_chooses_the_same(same_bits):
    """Under activation checkpointing the forward runs again with a graph; its choice is compared by index."""
    logits = steps(2, 64, 20).requires_grad_()
    chosen = []

    def run(x: Tensor) -> Tensor:
        weights, experts = cpu.route(x, 4, SOFTMAX)
        chosen.append((weights.detach(), experts))
        return weights

    plain = cpu.route(logits.detach(), 4, SOFTMAX)
    with set_checkpoint_early_stop(False):
        checkpoint(run, logits, use_reentrant=False).square().sum().backward()
    assert len(chosen) == 2 and ties_at_the_cut(reference.scores(logits.detach(), SOFTMAX), plain[1]) > 10
    for weights, experts in chosen:
        same_bits(weights, plain[0])
        assert torch.equal(experts, plain[1])


@pytest.mark.parametrize("rule", [SOFTMAX, RAW, SIGMOID, GROUPS])
def test_backward(rule, check_backward):
    bias = normal(3, 20) if rule.scoring == "sigmoid" else None
    ours, theirs = (lambda x, op=op: op.route(x, 5, rule, bias)[0] for op in (cpu, reference))
    check_backward(ours, theirs, normal(1, 30, 20))


def test_a_bias_only_chooses():
    """It gets no gradient and moves no weight of experts that are chosen anyway."""
    logits, bias = normal(1, 9, 6), torch.full((6,), 0.5, requires_grad=True)
    weights, experts = cpu.route(logits, 6, SIGMOID, bias)
    assert not weights.requires_grad and not experts.requires_grad
    assert torch.equal(weights, cpu.route(logits, 6, SIGMOID)[0])


@pytest.mark.parametrize(
    ("rule", "bias", "values"),
    [
        (SOFTMAX, None, {(2, 3): float("nan")}),
        (SOFTMAX, None, {(2, 3): float("inf")}),
        (SIGMOID, None, {(2, 3): float("nan")}),
        (GROUPS, [float("inf"), float("-inf"), 0, 0, 0, 0, 0, 0], {}),
        (SIGMOID, [float("nan"), 0, 0, 0, 0, 0, 0, 0], {}),
    ],
)
@pytest.mark.parametrize("op", [cpu, reference])
def test_what_cannot_be_compared_is_refused(rule, bias, values, op):
    """A NaN, infinities that cancel: by the first row that has them."""
    logits = torch.zeros(4, 8)
    for place, value in values.items():
        logits[place] = value
    with pytest.raises(ValueError, match="row 2" if values else "row 0"):
        op.route(logits, 2, rule, None if bias is None else torch.tensor(bias))


@pytest.mark.parametrize(
    ("operands", "error"),
    [
        ((torch.zeros(3, 8).bfloat16(), 2, SOFTMAX), TypeError),
        ((torch.zeros(8), 2, SOFTMAX), ValueError),
        ((torch.zeros(3, 0), 1, SOFTMAX), ValueError),
        ((torch.zeros(3, 8), 0, SOFTMAX), ValueError),
        ((torch.zeros(3, 8), 9, SOFTMAX), ValueError),
        ((torch.zeros(3, 8), 5, GROUPS), ValueError),
        ((torch.zeros(3, 9), 2, GROUPS), ValueError),
        ((torch.zeros(3, 4), 1, GROUPS), ValueError),
        ((torch.zeros(3, 8), 2, "softmax"), TypeError),
        ((torch.zeros(3, 8), 2, SIGMOID, torch.zeros(7)), ValueError),
        ((torch.zeros(3, 8), 2, SIGMOID, torch.zeros(8).double()), ValueError),
        ((torch.zeros(3, 8, device="meta"), 2, SOFTMAX), ValueError),
    ],
)
def test_refusals(operands, error):
    """Types, shapes, more experts than may be chosen, unequal groups, and memory that is not the CPU's."""
    with pytest.raises(error):
        cpu.route(*operands)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"scoring": "relu"}, "scoring"),
        ({"renormalise": 1}, "renormalise"),
        ({"scale": 0.0}, "scale"),
        ({"scale": 2}, "scale"),
        ({"eps": float("nan")}, "eps"),
        ({"renormalise": False, "eps": 1e-20}, "eps"),
        ({"scoring": "sigmoid"}, "eps"),
        ({"num_groups": 0}, "num_groups"),
        ({"groups_kept": 2}, "groups_kept"),
        ({"num_groups": 4, "groups_kept": 2}, "num_groups"),
    ],
)
def test_a_rule_without_a_meaning_is_refused(fields, name):
    with pytest.raises(ValueError, match=f"RouterRule.{name}"):
        RouterRule(**{"scoring": "softmax", "renormalise": True} | fields)
