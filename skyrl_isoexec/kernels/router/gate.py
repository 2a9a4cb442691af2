"""Proof of a router: the bits of the definition, and a choice that is the row's own, ties and tails included."""

from collections.abc import Mapping
from types import ModuleType

import torch

from skyrl_isoexec.kernels.numeric.inputs import count_hazards, normal, ties_at_the_cut
from skyrl_isoexec.kernels.numeric.proof import DTYPES, ROW_COUNTS, Proof
from skyrl_isoexec.kernels.router import reference
from skyrl_isoexec.kernels.router.cases import GROUPS, RAW, SIGMOID, SOFTMAX, cases, steps
from skyrl_isoexec.schedule import Schedule

RULES = {"softmax": SOFTMAX, "raw": RAW, "sigmoid": SIGMOID, "groups": GROUPS}


def prove(
    proof: Proof,
    impl: ModuleType,
    schedule: Schedule,
    dtypes: Mapping[str, torch.dtype] = DTYPES,
    definition: ModuleType = reference,
) -> None:
    """Collect every check of `impl` in `proof`; neither the schedule nor the model's dtype enters a router."""
    for name, (logits, top_k, rule, bias) in cases().items():
        expected, found = definition.route(logits, top_k, rule, bias), impl.route(logits, top_k, rule, bias)
        if name == "no rows":
            proof.empty("no rows", expected, found)
            continue
        proof.equal("reference", expected, found, at=name)
        score = definition.scores(logits, rule)
        if "ties" in name and "groups" not in name:
            proof.reached(f"{name} at the cut", ties_at_the_cut(score, expected[1]))
            proof.reached(f"{name}: -0 among the logits", count_hazards(logits)["-0"])
        if name == "groups ties":
            values = definition.group_values(score, rule)
            groups = definition.first(values, rule.groups_kept)
            proof.reached(f"{name} at the cut of groups", ties_at_the_cut(values, groups))
        if name == "saturated":
            is_one = (score == 1.0).sum(1) > top_k
            proof.reached(f"{name}: scores that tie where logits do not", int(is_one.sum()))
        if "tails" in name:
            chosen = count_hazards(expected[0] if name == "softmax tails" else score.gather(1, expected[1].long()))
            proof.reached(f"{name}: subnormal among the chosen", chosen.get("subnormal", 0))
            proof.reached(f"{name}: 0 among the chosen", chosen.get("+0", 0))
        if name == "barred":
            proof.reached(f"{name}: experts that a bias of -inf bars", int(bias.isinf().sum()))
    logits = steps(1, 60, 40)
    wide, across = torch.cat([logits, logits], 1)[:, :40], logits.t().contiguous().t()
    for name, rule in RULES.items():
        whole = impl.route(logits, 6, rule)
        proof.equal(f"{name} strides", whole, impl.route(across, 6, rule), at="transposed")
        proof.equal(f"{name} strides", whole, impl.route(wide, 6, rule), at="sliced")
        proof.autograd(f"{name} autograd", lambda x, rule=rule: impl.route(x, 6, rule)[0], logits)
        recorded = impl.route(logits.clone().requires_grad_(), 6, rule)[1]
        proof.equal(f"{name} choice of a recomputation", whole[1], recorded)
        proof.repeats(f"{name} repeats", lambda rule=rule: impl.route(logits, 6, rule))
        pool, anchor = steps(2, max(ROW_COUNTS), 40), steps(3, 1, 40)
        proof.rows(f"{name} rows", lambda x, rule=rule: impl.route(x, 6, rule), (pool,), (anchor,))
    for size in (2, 3, 100):  # the bits of a row depend on its experts alone
        x = normal(size, 9, size)
        alone = [impl.route(row, 2, SOFTMAX) for row in x.split(1)]
        whole = impl.route(x, 2, SOFTMAX)
        proof.equal("each row alone", whole, tuple(torch.cat(part) for part in zip(*alone, strict=True)), at=f"{size}")
