"""Every gate finds a change of order: the same numbers, added, multiplied or rounded with one pair exchanged."""

import importlib
import importlib.util
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

from skyrl_isoexec.gate import decoder
from skyrl_isoexec.gate.run import SCHEDULE
from skyrl_isoexec.kernels.attention import cpu as attention
from skyrl_isoexec.kernels.bundle import OPS
from skyrl_isoexec.kernels.numeric import exp, lane_sum, narrow, tree


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


def exchanged(size: int, i: int, j: int, period: int | None = None) -> Tensor:
    """0 .. size-1 with i and j exchanged, in each period of that length; its own inverse."""
    order = torch.arange(size)
    for start in range(0, size, period or size):
        if start + max(i, j) < size:
            order[[start + i, start + j]] = order[[start + j, start + i]]
    return order


def linear_two_k() -> SimpleNamespace:
    """The second and the third product of a sum."""
    cpu = variant("linear")

    def linear(x, w, bias=None, out_dtype=None, packed=None):
        order = exchanged(x.shape[1], 1, 2)
        return cpu.linear(x[:, order], w[:, order], bias, out_dtype)

    return variant("linear", linear=linear)


def row_linear_two_leaves() -> SimpleNamespace:
    """The second and the third leaf of a tree, where it has as many."""
    cpu = variant("row_linear")

    def row_linear(x, w, num_leaves, packed=None, out_dtype=torch.float32):
        leaves = torch.arange(x.shape[1]).view(num_leaves, -1)
        order = leaves[exchanged(num_leaves, 1, 2)].flatten()
        return cpu.row_linear(x[:, order], w[:, order], num_leaves, None, out_dtype)

    return variant("row_linear", row_linear=row_linear)


def row_linear_tree_of_ranks() -> SimpleNamespace:
    """The second and the third rank's root."""
    cpu = variant("row_linear")
    return variant("row_linear", tree_sum=lambda parts: cpu.tree_sum(parts[exchanged(len(parts), 1, 2)]))


def rmsnorm_two_lanes() -> SimpleNamespace:
    """The second and the third of the 16 partial sums."""
    cpu = variant("rmsnorm")

    def rmsnorm(x, w, eps, offset=0.0):
        order = exchanged(x.shape[-1], 1, 2, period=16)
        return cpu.rmsnorm(x[..., order], w[order], eps, offset)[..., order]

    return variant("rmsnorm", rmsnorm=rmsnorm)


def rmsnorm_two_lanes_with_a_gate() -> SimpleNamespace:
    """As `rmsnorm_two_lanes`, where the norm has a gate."""
    cpu = variant("rmsnorm")

    def gated_rmsnorm(x, z, w, eps):
        order = exchanged(x.shape[-1], 1, 2, period=16)
        return cpu.gated_rmsnorm(x[..., order], z[..., order], w[order], eps)[..., order]

    return variant("rmsnorm", gated_rmsnorm=gated_rmsnorm)


def rmsnorm_gate_before_the_weight() -> ModuleType:
    """The gate and the weight exchanged, with a rounding after each."""
    changed = copied("rmsnorm")

    def gated_rmsnorm(x, z, w, eps):
        y = changed.gated(changed.rmsnorm(x, torch.ones_like(w), eps), z)
        return narrow(y.float() * w.float(), x.dtype)

    changed.gated_rmsnorm = gated_rmsnorm
    return changed


def rmsnorm_centered_weight_first() -> ModuleType:
    """1 + w multiplies x before the inverse does."""
    changed = copied("rmsnorm")
    original = changed.rmsnorm

    def rmsnorm(x, w, eps, offset=0.0):
        if not offset:
            return original(x, w, eps)
        wide = x.float()
        unit = torch.ones_like(wide)
        inverse = changed.normed(unit, lane_sum(wide * wide), eps)
        return narrow(wide * (w.float() + offset) * inverse, x.dtype)

    changed.rmsnorm = rmsnorm
    return changed


def rmsnorm_centered_weight_rounded_twice() -> ModuleType:
    """1 + w rounded to the dtype, and the normalised row as well, as where weights are stored whole."""
    changed = copied("rmsnorm")
    original = changed.weighted
    changed.weighted = lambda n, w, offset: original(n, narrow(w.float() + offset, w.dtype) if offset else w, 0.0)
    return changed


def rmsnorm_offset_added_always() -> ModuleType:
    """Also where it is 0: -0 + 0 is +0."""
    changed = copied("rmsnorm")
    original = changed.weighted
    changed.weighted = lambda n, w, offset: original(n, w if offset else w + 0.0, offset)
    return changed


def rope_rounded_once() -> SimpleNamespace:
    """Products kept exact until they are added, as a fused instruction does."""

    def rope(x, positions, cos_sin):
        c, s = cos_sin[positions].double()[:, None, :].chunk(2, dim=-1)
        a, b = x.double().chunk(2, dim=-1)
        return narrow(torch.cat((a * c - b * s, b * c + a * s), dim=-1).float(), x.dtype)

    return variant("rope", rope=rope)


def rope_rest_by_no_angle() -> SimpleNamespace:
    """The rest of a head turned by an angle of 0, by arithmetic, where it is copied: -0 becomes +0."""
    cpu = variant("rope")

    def rope(x, positions, cos_sin):
        rotated = cos_sin.shape[1]
        return torch.cat((cpu.rope(x[..., :rotated].contiguous(), positions, cos_sin), x[..., rotated:] + 0.0), -1)

    return variant("rope", rope=rope)


def rope_halves_of_the_head() -> SimpleNamespace:
    """Pairs that lie half a head apart, not half of what is rotated."""
    cpu = variant("rope")

    def rope(x, positions, cos_sin):
        dim, half = x.shape[-1], cos_sin.shape[1] // 2
        if dim // 2 < half:
            return cpu.rope(x, positions, cos_sin)
        near, far = slice(0, half), slice(dim // 2, dim // 2 + half)
        turned = cpu.rope(torch.cat((x[..., near], x[..., far]), -1), positions, cos_sin)
        y = x.clone()
        y[..., near], y[..., far] = turned.chunk(2, -1)
        return y

    return variant("rope", rope=rope)


def swiglu_product_first() -> SimpleNamespace:
    """gate * up before the division."""

    def silu_mul(gate, up):
        g = gate.float()
        return narrow(g * up.float() / (module("numeric", "reference").exp(-g) + 1.0), gate.dtype)

    return variant("swiglu", silu_mul=silu_mul)


def sigmoid_divides() -> SimpleNamespace:
    """x divided by exp(-g) + 1, not multiplied by its inverse."""

    def sigmoid_mul(x, gate):
        return narrow(x.float() / (exp(-gate.float()) + 1.0), x.dtype)

    return variant("swiglu", sigmoid_mul=sigmoid_mul)


def sigmoid_rounded() -> ModuleType:
    """The sigmoid rounded to the dtype before it multiplies."""
    changed = copied("swiglu")
    original = changed.sigmoid
    changed.sigmoid = lambda gate: narrow(original(gate), gate.dtype).float()
    return changed


def embedding_sum_of_shards() -> SimpleNamespace:
    """Rows added to the zeros of ranks that do not own them."""
    cpu = variant("embedding")
    return variant("embedding", embedding=lambda ids, w: cpu.embedding(ids, w) + 0.0)


def attention_two_dims() -> SimpleNamespace:
    """The second and the third product of a score, over packed rows."""
    cpu = variant("attention")

    def attend(q, k, v, cu, scale, *, schedule):
        order = exchanged(q.shape[2], 1, 2)
        return cpu.attention(q[..., order], k[..., order], v, cu, scale, schedule=schedule)

    return variant("attention", attention=attend)


def attention_order(change) -> ModuleType:
    """The definition with another order of a partition's positions, which `change` gives."""
    changed = copied("attention")
    original = changed.partition

    def partition(s, v, seen, kv_block):
        order = change(s.shape[2], kv_block)
        return original(s[:, :, order], v[order], seen[:, order], kv_block)

    changed.partition = partition
    return changed


def attention_two_blocks() -> ModuleType:
    """The first and the second whole block of a partition."""

    def change(size: int, kv_block: int) -> Tensor:
        whole = size // kv_block * kv_block
        order = torch.arange(size)
        if whole >= 2 * kv_block:
            order[:whole] = order[:whole].view(-1, kv_block)[exchanged(whole // kv_block, 0, 1)].flatten()
        return order

    return attention_order(change)


def attention_two_lanes() -> ModuleType:
    """The second and the third lane of the denominator."""
    return attention_order(lambda size, kv_block: exchanged(size, 1, 2, period=kv_block))


def logprob_two_lanes() -> ModuleType:
    """The second and the third lane of a leaf's sum."""
    changed = copied("logprob")

    def leaf_terms(terms, num_leaves):
        parts = terms.view(len(terms), num_leaves, -1)
        return lane_sum(parts[..., exchanged(parts.shape[2], 1, 2, period=16)]).T

    changed._leaf_terms = leaf_terms
    return changed


def logprob_two_leaves() -> SimpleNamespace:
    """The second and the third leaf of the vocabulary's tree."""
    return variant("logprob", total=lambda sums: tree(sums[exchanged(len(sums), 1, 2)]))


CHANGES = {
    "linear": [linear_two_k],
    "row_linear": [row_linear_two_leaves, row_linear_tree_of_ranks],
    "rmsnorm": [
        rmsnorm_two_lanes,
        rmsnorm_two_lanes_with_a_gate,
        rmsnorm_gate_before_the_weight,
        rmsnorm_centered_weight_first,
        rmsnorm_centered_weight_rounded_twice,
        rmsnorm_offset_added_always,
    ],
    "rope": [rope_rounded_once, rope_rest_by_no_angle, rope_halves_of_the_head],
    "swiglu": [swiglu_product_first, sigmoid_divides, sigmoid_rounded],
    "embedding": [embedding_sum_of_shards],
    "attention": [attention_two_dims, attention_two_blocks, attention_two_lanes],
    "logprob": [logprob_two_lanes, logprob_two_leaves],
}


@pytest.mark.parametrize(
    ("op", "change"), [(op, change) for op, changes in CHANGES.items() for change in changes], ids=lambda x: str(
        getattr(x, "__name__", x)
    )
)  # fmt: skip
def test_a_change_of_order_is_found(op: str, change, stopping, difference) -> None:
    """In the first comparison that can see it."""
    with pytest.raises(difference, match="elements differ"):
        importlib.import_module(f"skyrl_isoexec.kernels.{op}.gate").prove(stopping, change(), SCHEDULE)


ELSEWHERE = {"combine", "experts", "gdn", "gdn_cpr", "mla", "router"}
"""Operators whose changes are in files of their own."""


def test_every_operator_is_changed() -> None:
    assert set(CHANGES) | ELSEWHERE == set(OPS)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda: (attention, "attention_paged", attention_two_blocks().attention_paged), "pairs of cases"),
        (lambda: (module("linear", "cpu"), "linear", linear_two_k().linear), "definition"),
        (lambda: (module("row_linear", "cpu"), "tree_sum", row_linear_tree_of_ranks().tree_sum), "tensor ranks"),
    ],
    ids=["two blocks of a page", "two products everywhere", "two ranks"],
)
def test_the_decoder_finds_a_change(change, name, stopping, difference, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one case only, in every case alike, and between ranks."""
    monkeypatch.setattr(*change())
    with pytest.raises(difference, match=f"qwen3 float32: {name}"):
        decoder.prove("decoder", stopping, "cpu", SCHEDULE)
