"""The decoder is the model that transformers computes: logits and gradients within a bound of fp32 arithmetic."""

from collections.abc import Sequence

import pytest
import torch

from skyrl_isoexec.model.decoder import Decoder

# Both sides sum in fp32 in different orders, over at most 120 terms a layer: a few hundred roundings of 2**-24 each.
BOUND = 256 * 2**-24
# A gated delta rule adds sums over a sequence, and divisions by the lengths of queries, keys and outputs, which enlarge
# the roundings before them.
HYBRID_BOUND = 1024 * 2**-24

CASES = {
    "qwen3": ("qwen3", {"head_dim": 8, "num_key_value_heads": 5}),
    "qwen3 one kv head, wide heads, tied": (
        "qwen3",
        {"head_dim": 24, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "qwen3 biases": ("qwen3", {"head_dim": 6, "num_key_value_heads": 1, "attention_bias": True}),
    "llama": ("llama", {}),
    "llama one kv head, tied": ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama biases": ("llama", {"attention_bias": True}),
    "llama llama3": (
        "llama",
        {
            "head_dim": 24,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "qwen2": ("qwen2", {"num_hidden_layers": 3}),
    "qwen2 tied": ("qwen2", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "mimo": ("mimo", {"num_key_value_heads": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 640000.0}}),
    "qwen3_5": ("qwen3_5", {}),
    "qwen3_5 three value heads a key head, half a head rotated, three taps, tied": (
        "qwen3_5",
        {
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 6,
            "linear_conv_kernel_dim": 3,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 500.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [3, 2, 1],
                "mrope_interleaved": True,
            },
        },
    ),
    "qwen3_5 biases, one layer in three, two taps": (
        "qwen3_5",
        {
            "full_attention_interval": 3,
            "num_hidden_layers": 5,
            "num_key_value_heads": 5,
            "attention_bias": True,
            "linear_num_value_heads": 6,
            "linear_conv_kernel_dim": 2,
        },
    ),
    "qwen3_5 odd widths, seven taps": (
        "qwen3_5",
        {"linear_key_head_dim": 17, "linear_value_head_dim": 3, "linear_conv_kernel_dim": 7},
    ),
    "qwen3_5 attention alone": ("qwen3_5", {"full_attention_interval": 1, "num_hidden_layers": 2}),
}
Pair = tuple[Decoder, torch.nn.Module, Sequence[list[int]], float]


def close(ours: torch.Tensor, theirs: torch.Tensor, bound: float, scale: float | None = None) -> bool:
    """Largest difference within the bound of the largest magnitude."""
    return (ours - theirs).abs().max().item() <= bound * (scale or theirs.abs().max().item())


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def pair(request, m) -> Pair:
    """(decoder, transformers' model) with the same weights, the sequences that they read, and the bound."""
    family, fields = request.param
    raw, model = m.make_hf(family, **fields)
    decoder = m.build(m.from_hf(raw), m.hf_tensors(model), gdn_chunk=64)
    assert decoder.config.family == family
    if family == "qwen3_5":
        return decoder, model, m.LONG, HYBRID_BOUND
    return decoder, model, m.SEQUENCES, BOUND


def theirs(model: torch.nn.Module, sequences: Sequence[list[int]]) -> torch.Tensor:
    return torch.cat([model(torch.tensor([s]), use_cache=False).logits[0] for s in sequences])


def test_logits(pair, m) -> None:
    decoder, model, sequences, bound = pair
    with torch.no_grad():
        ours, expected = m.forward(decoder, sequences), theirs(model, sequences)
    assert ours.dtype == torch.float32 and ours.shape == expected.shape
    assert expected.abs().max() > 0.1
    assert close(ours, expected, bound)


def test_gradients_of_all_parameters(pair, m) -> None:
    decoder, model, sequences, bound = pair
    m.loss_of(m.forward(decoder, sequences), sequences).backward()
    m.loss_of(theirs(model, sequences), sequences).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    ours = {name: p.grad for name, p in decoder.named_parameters()}
    assert ours.keys() == expected.keys()
    largest = max(grad.abs().max().item() for grad in expected.values())
    for name, grad in ours.items():
        assert grad is not None and grad.abs().max() > 0, name
        assert close(grad, expected[name], bound, largest), (name, (grad - expected[name]).abs().max().item(), largest)


def test_bfloat16_follows_the_same_rounding_points(m) -> None:
    """In bf16 the two differ by roundings only: far less than either differs from fp32."""
    raw, model = m.make_hf("qwen3", head_dim=8)
    tensors = m.hf_tensors(model.bfloat16())
    with torch.no_grad():
        ours = m.forward(m.build(m.from_hf(raw | {"dtype": "bfloat16"}), tensors))
        expected = theirs(model, m.SEQUENCES).float()
    assert (ours - expected).abs().max() <= 8 * 2**-8 * expected.abs().max()


def test_bfloat16_of_a_hybrid_is_as_near_to_float32(m) -> None:
    """Its rounding points are our own: the states in fp32, chunks' matrices in bf16. The error is transformers'."""
    raw, model = m.make_hf("qwen3_5")
    tensors = m.hf_tensors(model.bfloat16())
    with torch.no_grad():
        ours = m.forward(m.build(m.from_hf(raw | {"dtype": "bfloat16"}), tensors, gdn_chunk=64), m.LONG)
        rounded = theirs(model, m.LONG).float()
        expected = theirs(model.float(), m.LONG)
    errors = [(logits - expected).square().mean().sqrt() for logits in (ours, rounded)]
    assert 0 < errors[0] <= 1.25 * errors[1] and errors[1] <= 8 * 2**-8 * expected.abs().max()
