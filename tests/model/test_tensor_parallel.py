"""Tensor parallelism changes no bit of the logits, and no gradient beyond rounding."""

import pytest
import torch

from skyrl_isoexec.model.probe import probe
from skyrl_isoexec.model.threads import run_ranks

TOYS = {
    "qwen3": ("qwen3", {}),
    "qwen3 tied": ("qwen3", {"tied_head": True}),
    "qwen3 bf16": ("qwen3", {"dtype": "bfloat16"}),
    "llama biases": ("llama", {"qkv_bias": True, "o_bias": True}),
    "qwen2": ("qwen2", {"num_kv_heads": 8}),
    "mimo tied bf16": ("mimo", {"tied_head": True, "dtype": "bfloat16"}),
    "qwen3_5": ("qwen3_5", {"num_layers": 3}),
    "qwen3_5 one value head a key head, tied bf16": (
        "qwen3_5",
        {"linear_num_value_heads": 4, "tied_head": True, "dtype": "bfloat16"},
    ),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe top 1 after a dense layer, shared, bf16": (
        "qwen3_moe",
        {
            "num_experts_per_tok": 1,
            "first_dense_layers": 1,
            "intermediate_size": 28,
            "shared_expert_intermediate_size": 12,
            "dtype": "bfloat16",
        },
    ),
    "qwen3_5_moe": ("qwen3_5_moe", {"router_scale": 2.5, "router_renormalise": False}),
    "qwen3_5_moe tied bf16": ("qwen3_5_moe", {"tied_head": True, "dtype": "bfloat16"}),
    "glm4_moe_lite groups": ("glm4_moe_lite", {"router_groups": 4, "router_groups_kept": 2}),
    "glm4_moe_lite one projection of queries, biases, halves, tied bf16": (
        "glm4_moe_lite",
        {
            "q_lora_rank": None,
            "qkv_bias": True,
            "o_bias": True,
            "rope_interleaved": False,
            "tied_head": True,
            "dtype": "bfloat16",
        },
    ),
}


@pytest.fixture(params=TOYS.values(), ids=TOYS.keys())
def toy(request, m):
    """(config, tensors)."""
    family, changes = request.param
    return m.toy(family, **changes)


@pytest.fixture
def step(toy, m):
    """axis -> (logits, name -> (gradient, shard)) of one forward and backward with 4 leaves."""

    def run(axis, num_leaves=4):
        decoder = m.build(*toy, axis, num_leaves=num_leaves)
        logits = m.forward(decoder)
        m.loss_of(logits).backward()
        return logits.detach(), {name: (p.grad, p.shard) for name, p in decoder.named_parameters() if p.requires_grad}

    return run


@pytest.mark.parametrize("size", [2, 4])
def test_logits_are_equal_and_gradients_close(step, toy, m, size) -> None:
    config, _ = toy
    expected, whole = step(None)
    bound = (512 * 2**-24 if config.dtype == "float32" else 16 * 2**-8) * max(g.abs().max() for g, _ in whole.values())
    for rank, (logits, gradients) in enumerate(run_ranks(size, step)):
        m.assert_same_bits(logits, expected)
        assert gradients.keys() == whole.keys()
        for name, (gradient, shard) in gradients.items():
            difference = (gradient - shard.slice(whole[name][0], rank)).abs().max()
            assert difference <= bound, (name, difference, bound)


def test_logits_without_autograd_are_the_same(toy, m) -> None:
    def run(axis):
        with torch.no_grad():
            return m.forward(m.build(*toy, axis, num_leaves=4))

    expected = m.forward(m.build(*toy, num_leaves=4)).detach()
    for size in (1, 2, 4):
        for logits in run_ranks(size, run):
            m.assert_same_bits(logits, expected)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "glm4_moe_lite"])
def test_the_number_of_leaves_matters(m, family) -> None:
    """Otherwise the equality above would prove nothing about the tree."""
    toy = m.toy(family)
    one, four = (m.forward(m.build(*toy, num_leaves=n)) for n in (1, 4))
    assert (one != four).any()


def test_replicated_gradients_are_equal_on_all_ranks(step) -> None:
    """Norms and output biases are whole everywhere: an optimizer must be able to update each copy alone."""
    first, *others = run_ranks(4, step)
    whole = [name for name, (_, shard) in first[1].items() if shard.dim is None]
    assert whole
    for _, gradients in others:
        for name in whole:
            assert torch.equal(gradients[name][0], first[1][name][0]), name


def test_embedding_keeps_signed_zeros(m) -> None:
    config, tensors = m.toy()
    weight = tensors["model.embed_tokens.weight"]
    weight[::3] = -0.0
    ids = torch.arange(config.vocab_size)

    def run(axis):
        return m.build(config, tensors, axis, num_leaves=4).embed(ids).detach()

    for rows in run_ranks(4, run):
        m.assert_same_bits(rows, weight)
    assert torch.signbit(rows[0]).all()


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "qwen3_moe", "qwen3_5_moe", "glm4_moe_lite"])
def test_no_rows(m, family) -> None:
    """An idle step: no token at all."""
    none = torch.zeros(0, dtype=torch.int64)

    def run(axis):
        decoder = m.build(*m.toy(family), axis, num_leaves=4)
        empty = decoder.end_to_end(torch.zeros(1, dtype=torch.int32))
        with torch.no_grad():
            return decoder.full_logits(decoder.layers(decoder.embed(none), none, empty))

    assert all(logits.shape == (0, 36) for size in (1, 2) for logits in run_ranks(size, run))


@pytest.mark.parametrize(
    "family, changes, num_leaves, tp, words",
    [
        ("qwen3", {"num_heads": 6, "num_kv_heads": 2, "head_dim": 8}, 4, 4, ["num_heads = 6", "size 4"]),
        ("qwen3", {"num_kv_heads": 2}, 4, 4, ["num_kv_heads = 2", "size 4"]),
        ("qwen3", {"vocab_size": 37}, 2, 2, ["vocab_size = 37", "size 2"]),
        ("qwen3", {"vocab_size": 38}, 4, 1, ["vocab_size = 38", "num_leaves = 4"]),
        ("qwen3", {"intermediate_size": 30}, 4, 1, ["intermediate_size = 30", "num_leaves = 4"]),
        ("qwen3", {"num_heads": 5, "num_kv_heads": 5}, 4, 1, ["num_heads * head_dim = 30", "num_leaves = 4"]),
        ("qwen3", {}, 2, 4, ["size 4", "num_leaves = 2"]),
        ("qwen3", {}, 4, 3, ["size 3"]),
        ("qwen3_5", {"linear_num_key_heads": 2}, 4, 4, ["linear_num_key_heads = 2", "size 4"]),
        (
            "qwen3_5",
            {"linear_num_value_heads": 12, "linear_num_key_heads": 6},
            4,
            4,
            ["linear_num_key_heads = 6", "size 4"],
        ),
        (
            "qwen3_5",
            {"linear_num_key_heads": 2, "linear_num_value_heads": 2},
            4,
            1,
            ["linear_num_value_heads * linear_value_head_dim = 10", "num_leaves = 4"],
        ),
        ("qwen3_moe", {"num_experts": 6}, 4, 4, ["num_experts = 6", "size 4"]),
        (
            "qwen3_5_moe",
            {"shared_expert_intermediate_size": 18},
            4,
            1,
            ["shared_expert_intermediate_size = 18", "num_leaves = 4"],
        ),
    ],
)
def test_uneven_cuts_are_refused(m, family, changes, num_leaves, tp, words) -> None:
    def run(axis):
        return m.build(*m.toy(family, **changes), axis, num_leaves=num_leaves)

    with pytest.raises(ValueError) as error:
        run_ranks(tp, run)
    assert all(word in str(error.value) for word in words), error.value


def test_the_probe_is_the_same_on_every_rank(toy, m) -> None:
    expected = probe(m.build(*toy, num_leaves=4))
    assert expected is not None
    for size in (2, 4):
        assert run_ranks(size, lambda axis: probe(m.build(*toy, axis, num_leaves=4))) == [expected] * size
