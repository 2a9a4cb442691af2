"""The operators of a mixture of experts together: a token keeps its experts and its bits, whoever is beside it.

Shapes: T tokens, H hidden, E experts, F features of an expert, K experts of a token.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from skyrl_isoexec.kernels.combine import cpu as combine
from skyrl_isoexec.kernels.experts import cpu as experts
from skyrl_isoexec.kernels.linear import cpu as linear
from skyrl_isoexec.kernels.numeric.inputs import normal, ties_at_the_cut
from skyrl_isoexec.kernels.router import cpu as router
from skyrl_isoexec.kernels.router import reference
from skyrl_isoexec.kernels.router.cases import GROUPS, SOFTMAX
from skyrl_isoexec.kernels.swiglu import cpu as swiglu

HIDDEN, FEATURES, EXPERTS, TOP_K, TOKENS = 32, 24, 8, 3, 60


def layer(dtype: torch.dtype) -> SimpleNamespace:
    """Weights; two experts have the same router's row, so that their scores tie in every token."""
    gate = normal(1, EXPERTS, HIDDEN, dtype=dtype)
    gate[5] = gate[2]
    up, down = normal(2, EXPERTS, 2 * FEATURES, HIDDEN, dtype=dtype), normal(3, EXPERTS, HIDDEN, FEATURES, dtype=dtype)
    return SimpleNamespace(gate=gate, up=up, down=down)


def forward(x_TH: Tensor, w: SimpleNamespace, rule=SOFTMAX, ranks: int = 1) -> tuple[Tensor, Tensor]:
    """(out, experts) with the experts spread over so many ranks, whose rows are gathered in ascending order."""
    logits = linear.linear(x_TH, w.gate, None, torch.float32)
    weights, chosen = router.route(logits, TOP_K, rule)
    order, starts = combine.dispatch(chosen, EXPERTS)
    rows, parts, owned = combine.expand(x_TH, order), [], EXPERTS // ranks
    for first in range(0, EXPERTS, owned):
        mine = starts[first : first + owned + 1]
        gate, up = experts.grouped_linear(rows, w.up[first : first + owned], mine).chunk(2, 1)
        part = experts.grouped_linear(swiglu.silu_mul(gate, up), w.down[first : first + owned], mine)
        parts.append(part[int(mine[0]) : int(mine[-1])])
    return combine.combine(torch.cat(parts), order, weights, x_TH), chosen


@pytest.mark.parametrize("rule", [SOFTMAX, GROUPS], ids=["softmax", "groups"])
def test_no_expert_flips_between_batches(rule, dtype, same_bits):
    x, w = normal(4, TOKENS, HIDDEN, dtype=dtype), layer(dtype)
    whole, chosen = forward(x, w, rule)
    if rule is SOFTMAX:
        score = reference.scores(linear.linear(x, w.gate, None, torch.float32), rule)
        assert ties_at_the_cut(score, chosen) > 3
    flips, compared = 0, 0
    for batch in (*x.split(1), *x.split(7), x.flip(0)):
        out, experts_of = forward(batch, w, rule)
        at = [int((x == row).all(1).nonzero()[0]) for row in batch]
        same_bits(out, whole[at])
        flips, compared = flips + int((experts_of != chosen[at]).sum()), compared + experts_of.numel()
    assert flips == 0 and compared == 3 * TOKENS * TOP_K


def test_experts_on_ranks_have_the_bits_of_one(dtype, same_bits):
    x, w = normal(4, TOKENS, HIDDEN, dtype=dtype), layer(dtype)
    whole, _ = forward(x, w)
    for ranks in (2, 4, 8):
        same_bits(forward(x, w, ranks=ranks)[0], whole)


def test_gradients_of_a_layer_repeat_and_reach_everything(dtype, gradients, same_bits):
    w = layer(dtype)

    def run(x, gate, up, down):
        return forward(x, SimpleNamespace(gate=gate, up=up, down=down))[0]

    operands = (normal(4, TOKENS, HIDDEN, dtype=dtype), w.gate, w.up, w.down)
    for first, again in zip(gradients(run, *operands), gradients(run, *operands), strict=True):
        assert first.isfinite().all() and first.any()
        same_bits(first, again)
