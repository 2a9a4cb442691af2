"""The gate of latent attention holds, and finds a change of order: the same numbers with one pair exchanged."""

import dataclasses
import importlib.util
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

from skyrl_isoexec.gate import decoder
from skyrl_isoexec.gate.models import model_config
from skyrl_isoexec.gate.run import SCHEDULE
from skyrl_isoexec.kernels.linear import cpu as linear
from skyrl_isoexec.kernels.mla import cpu, gate, reference
from skyrl_isoexec.kernels.numeric.proof import Proof
from skyrl_isoexec.kernels.router import cpu as router
from skyrl_isoexec.model.latent import LatentAttention
from skyrl_isoexec.model.moe import MoE


def copied() -> ModuleType:
    """The definition as a module of its own, to be changed."""
    spec = importlib.util.spec_from_file_location("changed_mla", reference.__file__)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def variant(**functions: object) -> SimpleNamespace:
    """The compiled implementation with some functions changed."""
    return SimpleNamespace(**vars(cpu) | functions)


def exchanged(size: int, i: int, j: int, period: int | None = None) -> Tensor:
    """0 .. size-1 with i and j exchanged, in each period of that length; its own inverse."""
    order = torch.arange(size)
    for start in range(0, size, period or size):
        if start + max(i, j) < size:
            order[[start + i, start + j]] = order[[start + j, start + i]]
    return order


def two_entries() -> SimpleNamespace:
    """The last entry of the latent and the one before it, in scores and not in values."""

    def mla(q, c, cu, scale, latent, *, schedule):
        order = exchanged(c.shape[1], max(0, latent - 2), latent - 1)
        return cpu.mla(q[..., order], c[:, order], cu, scale, latent, schedule=schedule)[..., order[:latent]]

    return variant(mla=mla)


def rotated_part_first() -> ModuleType:
    """The products of the rotated part before those of the latent: rotated by its default width."""
    changed = copied()
    original, width = changed.scores, 4
    changed.scores = lambda q, c, scale: original(q.roll(width, -1), c.roll(width, -1), scale)
    return changed


def changed_order(change) -> ModuleType:
    """The definition with another order of a partition's positions, which `change` gives."""
    changed = copied()
    original = changed.partition

    def partition(s, v, seen, kv_block):
        order = change(s.shape[2], kv_block)
        return original(s[:, :, order], v[order], seen[:, order], kv_block)

    changed.partition = partition
    return changed


def two_blocks() -> ModuleType:
    """The first and the second whole block of a partition."""

    def change(size: int, kv_block: int) -> Tensor:
        whole = size // kv_block * kv_block
        order = torch.arange(size)
        if whole >= 2 * kv_block:
            order[:whole] = order[:whole].view(-1, kv_block)[exchanged(whole // kv_block, 0, 1)].flatten()
        return order

    return changed_order(change)


def two_lanes() -> ModuleType:
    """The second and the third lane of the denominator."""
    return changed_order(lambda size, kv_block: exchanged(size, 1, 2, period=kv_block))


def merged_late() -> ModuleType:
    """The second and the third partition merged with each other, then with the first."""
    changed = copied()
    original, held = changed.merge, []

    def merge(whole, part, reached):
        if not held:
            held.append((whole, part, reached))
            return original(whole, part, reached)
        first, second, seen = held.pop()
        return original(first, original(second, part, reached), seen)

    changed.merge = merge
    return changed


def pages_of_two_blocks() -> SimpleNamespace:
    """As `two_blocks`, over pages alone."""
    return variant(mla_paged=two_blocks().mla_paged)


def two_products_of_a_head() -> SimpleNamespace:
    """The second and the third product of a sum."""

    def head_linear(x, w):
        order = exchanged(x.shape[2], 1, 2)
        return cpu.head_linear(x[..., order], w[..., order])

    return variant(head_linear=head_linear)


CHANGES = {
    two_entries: "fp32 reference, normal",
    rotated_part_first: "fp32 reference, normal",
    two_blocks: "fp32 reference, normal",
    two_lanes: "fp32 reference, normal",
    merged_late: "fp32 reference, normal",
    pages_of_two_blocks: "fp32 pages, normal",
    two_products_of_a_head: "fp32 head linear, odd",
}
"""Change -> the comparison that finds it."""


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_of_order_is_found(change, stopping, difference) -> None:
    """In the first comparison that can see it."""
    with pytest.raises(difference, match=f"{CHANGES[change]}.*elements differ"):
        gate.prove(stopping, change(), SCHEDULE)


def test_the_gate_holds() -> None:
    """For both dtypes, every kind reached and every hazard counted."""
    proof = Proof()
    gate.prove(proof, cpu, SCHEDULE)
    proof.finish()
    assert not proof.failures
    assert sum(check.elements for check in proof.checks.values()) > 4 * 10**6
    for label in ("fp32", "bf16"):
        assert all(f"{label} {kind}" in proof.hazards for kind in gate.cases.KINDS)


def two_entries_of_a_page() -> tuple[object, str, object]:
    """The last two entries of the latent, where keys are read from pages."""
    original = cpu.mla_paged

    def mla_paged(q, cache, table, starts, lengths, scale, latent, out=None, *, schedule):
        order = exchanged(cache.shape[2], latent - 2, latent - 1)
        given = q[..., order].contiguous(), cache[..., order].contiguous(), table, starts, lengths, scale, latent
        return original(*given, schedule=schedule)[..., order[:latent]]

    return cpu, "mla_paged", mla_paged


def pairs_put_back() -> tuple[object, str, object]:
    """The rotated part as neighbours again, where a token is alone in its step: the same products in another order."""
    original = LatentAttention._rotate

    def rotate(self, x, *given):
        turned = original(self, x, *given)
        return turned.unflatten(2, (2, -1)).mT.flatten(2) if len(x) == 1 else turned

    return LatentAttention, "_rotate", rotate


def two_products_on_ranks() -> tuple[object, str, object]:
    """The second and the third product of a head's sum, on ranks with some of the heads."""
    original = cpu.head_linear

    def head_linear(x, w):
        order = exchanged(x.shape[2], 1, 2)
        return original(x[..., order], w[..., order]) if x.shape[1] < 16 else original(x, w)

    return cpu, "head_linear", head_linear


def a_bias_that_weighs() -> tuple[object, str, object]:
    """Weights of what the choice was made by, where a token is alone in its step."""
    original = MoE.route

    def route(self, logits):
        weights, experts = original(self, logits)
        bias = self.gate.e_score_correction_bias[experts.long()]
        return (weights + bias if len(logits) == 1 else weights), experts

    return MoE, "route", route


def groups_unlimited() -> tuple[object, str, object]:
    """Experts of all groups, where a token is alone in its step."""
    original = router.route

    def route(logits, top_k, rule, bias=None):
        alone = dataclasses.replace(rule, num_groups=1, groups_kept=1)
        return original(logits, top_k, alone if len(logits) == 1 else rule, bias)

    return router, "route", route


def bias_first() -> tuple[object, str, object]:
    """A sum that begins with its bias, where a token is alone in its step."""
    original = linear.linear

    def biased(x, w, bias=None, out_dtype=None, packed=None):
        if bias is None or len(x) > 1:
            return original(x, w, bias, out_dtype, packed)
        return original(torch.cat([torch.ones_like(x[:, :1]), x], 1), torch.cat([bias[:, None], w], 1), None, out_dtype)

    return linear, "linear", biased


def two_products_of_one_projection() -> tuple[object, str, object]:
    """The second and the third product of every query's sum, where no latent is between, in a step of one token."""
    original = LatentAttention._project

    def project(self, x):
        queries, keys = original(self, x)
        if not hasattr(self, "q_proj") or len(x) > 1:
            return queries, keys
        order = exchanged(x.shape[1], 1, 2)
        return self.place.kernels.linear(x[:, order], self.q_proj.weight[:, order]), keys

    return LatentAttention, "_project", project


def halves_put_as_neighbours() -> tuple[object, str, object]:
    """The rotated part in another order, where it is halves and a token is alone in its step."""
    original = LatentAttention._rotate

    def rotate(self, x, *given):
        turned = original(self, x, *given)
        return turned if self.interleaved or len(x) > 1 else turned.unflatten(2, (2, -1)).mT.flatten(2)

    return LatentAttention, "_rotate", rotate


DECODER_CHANGES = {
    two_entries_of_a_page: ("glm4_moe_lite", "pairs of cases"),
    pairs_put_back: ("glm4_moe_lite", "pairs of cases"),
    a_bias_that_weighs: ("glm4_moe_lite", "pairs of cases"),
    two_products_on_ranks: ("glm4_moe_lite", "tensor ranks"),
    groups_unlimited: ("glm4_moe_lite biases", "pairs of cases"),
    bias_first: ("glm4_moe_lite biases", "pairs of cases"),
    two_products_of_one_projection: ("glm4_moe_lite one projection", "pairs of cases"),
    halves_put_as_neighbours: ("glm4_moe_lite one projection", "pairs of cases"),
}
"""Change -> the model and the comparison that find it."""


@pytest.mark.parametrize("change", DECODER_CHANGES, ids=lambda change: change.__name__)
def test_the_decoder_finds_a_change(change, stopping, difference, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of latent attention over pages or ranks, of what a bias may do, and of what only some configurations say."""
    model, check = DECODER_CHANGES[change]
    made = [variant for variant in decoder.variants("decoder_mla") if variant[0] == model]
    monkeypatch.setattr(decoder, "variants", lambda region: made)
    monkeypatch.setattr(*change())
    with pytest.raises(difference, match=f"{model} float32: {check}.*elements differ"):
        decoder.prove("decoder_mla", stopping, "cpu", SCHEDULE)


def test_every_shape_of_the_family_is_run() -> None:
    """Each field that the family sets in more than one way has both, in some model of the region."""
    configs = [model_config("float32", fields) for _, _, fields in decoder.variants("decoder_mla")]
    for name in ("rope_interleaved", "qkv_bias", "o_bias", "router_renormalise", "tied_head"):
        assert {getattr(config, name) for config in configs} == {True, False}, name
    for name in ("q_lora_rank", "rope_scaling", "intermediate_size"):
        assert {getattr(config, name) is None for config in configs} == {True, False}, name
    for name, least in (("router_groups", 1), ("first_dense_layers", 0)):
        assert {getattr(config, name) > least for config in configs} == {True, False}, name
    with_latent = {config.qkv_bias for config in configs if config.q_lora_rank is not None}
    assert with_latent == {True, False} and all(config.has_experts for config in configs)
