"""The gates of a mixture of experts hold for the compiled operators, and find one pair exchanged or one tie turned."""

import importlib
import importlib.util
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

from skyrl_isoexec.gate import decoder
from skyrl_isoexec.gate.run import SCHEDULE
from skyrl_isoexec.kernels.numeric import exp, lane_tree
from skyrl_isoexec.kernels.numeric.proof import Proof
from skyrl_isoexec.model.moe import MoE

OPS = ("router", "experts", "combine")


def module(op: str, file: str) -> ModuleType:
    return importlib.import_module(f"skyrl_isoexec.kernels.{op}.{file}")


def copied(op: str) -> ModuleType:
    """The definition of an operator as a module of its own, to be changed."""
    spec = importlib.util.spec_from_file_location(f"changed_{op}", module(op, "reference").__file__)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def variant(op: str, **functions: object) -> SimpleNamespace:
    """The compiled implementation with some functions changed."""
    return SimpleNamespace(**vars(module(op, "cpu")) | functions)


def exchanged(size: int, i: int, j: int) -> Tensor:
    """0 .. size-1 with i and j exchanged, where there are both."""
    order = torch.arange(size)
    if max(i, j) < size:
        order[[i, j]] = order[[j, i]]
    return order


def router_two_experts() -> ModuleType:
    """The second and the third exponential of the sum."""
    changed = copied("router")
    original = changed.scores

    def scores(logits, rule):
        if rule.scoring == "sigmoid":
            return original(logits, rule)
        e = exp(logits - logits.amax(1, keepdim=True))
        size = e.shape[1]
        filled = torch.nn.functional.pad(e, (0, (1 << (size - 1).bit_length()) - size))
        return e / lane_tree(filled[:, exchanged(filled.shape[1], 1, 2)])[:, None]

    changed.scores = scores
    return changed


def router_tie_to_the_higher() -> ModuleType:
    """Of equal values the higher index first."""
    changed = copied("router")

    def first(values, count):
        order = values.flip(-1).sort(dim=-1, descending=True, stable=True).indices
        return (values.shape[-1] - 1 - order[..., :count]).sort(dim=-1).values

    changed.first = first
    return changed


def router_tie_of_groups() -> ModuleType:
    """Of equal groups the higher first, and of equal experts the lower."""
    changed, turned = copied("router"), router_tie_to_the_higher()
    original = changed.first
    changed.first = lambda values, count: (turned.first if values.shape[-1] == 4 else original)(values, count)
    return changed


def router_choice_by_logit() -> ModuleType:
    """Where scores tie and logits do not."""
    changed = copied("router")

    def route(logits, top_k, rule, bias=None):
        weights, experts = module("router", "cpu").route(logits, top_k, rule, bias)
        if bias is None and rule.num_groups == 1 and logits.shape[0]:
            experts = changed.first(logits, top_k).int()
        return weights, experts

    return variant("router", route=route)


def router_two_chosen() -> ModuleType:
    """The second and the third score of the sum that renormalises."""
    changed = copied("router")

    def route(logits, top_k, rule, bias=None):
        weights, experts = module("router", "cpu").route(logits, top_k, rule, bias)
        if not rule.renormalise:
            return weights, experts
        chosen = changed.scores(logits, rule).gather(1, experts.long())
        order = exchanged(top_k, 1, 2)
        total = chosen[:, 0]
        for k in order[1:]:
            total = total + chosen[:, k]
        return chosen / (total + torch.tensor(rule.eps))[:, None] * torch.tensor(rule.scale), experts

    return variant("router", route=route)


def experts_two_k() -> SimpleNamespace:
    """The second and the third product of a sum."""
    cpu = variant("experts")

    def grouped_linear(x, w, starts, out_dtype=None):
        order = exchanged(x.shape[1], 1, 2)
        return cpu.grouped_linear(x[:, order], w[:, :, order], starts, out_dtype)

    return variant("experts", grouped_linear=grouped_linear)


def experts_a_row_of_the_next() -> SimpleNamespace:
    """The first row of one expert with the weight of the one before."""
    cpu = variant("experts")

    def grouped_linear(x, w, starts, out_dtype=None):
        starts = starts.clone()
        for e in range(1, len(starts) - 1):
            if starts[e] < starts[e + 1]:
                starts[e] += 1
                break
        return cpu.grouped_linear(x, w, starts, out_dtype)

    return variant("experts", grouped_linear=grouped_linear)


def combine_two_experts() -> SimpleNamespace:
    """The second and the third expert of a token."""
    cpu = variant("combine")

    def combine(y, order, weights, shared=None):
        top_k = weights.shape[1]
        turn = exchanged(top_k, 1, 2)
        return cpu.combine(y, order // max(top_k, 1) * top_k + turn[order % top_k], weights[:, turn], shared)

    return variant("combine", combine=combine)


def combine_shared_first() -> ModuleType:
    """The shared expert's row before the others."""
    changed = copied("combine")

    def combine(y, order, weights, shared=None):
        if shared is None:
            return module("combine", "cpu").combine(y, order, weights)
        total = shared.float()
        for k in range(weights.shape[1]):
            total = total + weights[:, k : k + 1] * y[changed.inverse(order)].unflatten(0, weights.shape)[:, k].float()
        return total.to(y.dtype)

    return variant("combine", combine=combine)


def combine_from_zero() -> SimpleNamespace:
    """A sum that starts with +0: all that changes is the sign of a zero."""
    cpu = variant("combine")
    return variant("combine", combine=lambda *operands: cpu.combine(*operands) + 0.0)


def combine_two_tokens() -> SimpleNamespace:
    """Two tokens of one expert in descending order."""
    cpu = variant("combine")

    def dispatch(experts, num_experts):
        order, starts = cpu.dispatch(experts, num_experts)
        for first, last in zip(starts.tolist(), starts[1:].tolist(), strict=False):
            if last - first > 1:
                order[[first, first + 1]] = order[[first + 1, first]]
                break
        return order, starts

    return variant("combine", dispatch=dispatch)


CHANGES = [
    ("router", router_two_experts),
    ("router", router_two_chosen),
    ("router", router_tie_to_the_higher),
    ("router", router_tie_of_groups),
    ("router", router_choice_by_logit),
    ("experts", experts_two_k),
    ("experts", experts_a_row_of_the_next),
    ("combine", combine_two_experts),
    ("combine", combine_shared_first),
    ("combine", combine_from_zero),
    ("combine", combine_two_tokens),
]


@pytest.mark.parametrize("op", OPS)
def test_the_compiled_operator_passes(op: str) -> None:
    proof = Proof()
    module(op, "gate").prove(proof, module(op, "cpu"), SCHEDULE)
    proof.finish()
    assert not proof.failures and sum(check.elements for check in proof.checks.values()) > 10_000


@pytest.mark.parametrize(("op", "change"), CHANGES, ids=lambda x: str(getattr(x, "__name__", x)))
def test_a_change_of_order_is_found(op: str, change, stopping, difference) -> None:
    """In the first comparison that can see it."""
    with pytest.raises(difference, match="elements differ"):
        module(op, "gate").prove(stopping, change(), SCHEDULE)


def layer_that_sums_ranks() -> tuple[object, str, object]:
    """Each rank combines its own experts' rows, and the sums are added."""

    def forward(self, x_TH):
        kernels, axis = self.place.kernels, self.place.axis
        weights, experts = kernels.route(self.gate(x_TH, torch.float32), self.top_k, self.rule)
        order, starts = kernels.dispatch(experts, self.num_experts)
        own = self._own_rows(kernels.expand(x_TH, order), starts)
        return axis.sum(kernels.combine(own, order, weights)) + self._shared(x_TH)

    return MoE, "forward", forward


def router_tie_of_one_row() -> tuple[object, str, object]:
    """Of equal values the higher index first, where a token is alone in its step."""
    original, turned = module("router", "cpu").route, router_tie_to_the_higher().route

    def route(logits, *given):
        return (turned if len(logits) == 1 else original)(logits, *given)

    return module("router", "cpu"), "route", route


@pytest.mark.parametrize(
    ("change", "name"), [(router_tie_of_one_row, "pairs of cases"), (layer_that_sums_ranks, "tensor ranks")]
)
def test_the_decoder_finds_a_change(change, name, stopping, difference, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a choice in one case only, and of whose rows are added when."""
    monkeypatch.setattr(*change())
    with pytest.raises(difference, match=f"qwen3_5_moe float32: {name}"):
        decoder.prove("decoder_hybrid_moe", stopping, "cpu", SCHEDULE)
