"""The decoder is the model that transformers computes: logits and gradients within a bound of fp32 arithmetic."""

import pytest
import torch

# Both sides sum in fp32 in different orders, over at most 120 terms a layer: a few hundred roundings of 2**-24 each.
BOUND = 256 * 2**-24

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
}


def close(ours: torch.Tensor, theirs: torch.Tensor, scale: float | None = None) -> bool:
    """Largest difference within BOUND of the largest magnitude."""
    return (ours - theirs).abs().max().item() <= BOUND * (scale or theirs.abs().max().item())


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def pair(request, m):
    """(decoder, transformers' model) with the same weights."""
    family, fields = request.param
    raw, model = m.make_hf(family, **fields)
    decoder = m.build(m.from_hf(raw), m.hf_tensors(model))
    assert decoder.config.family == family
    return decoder, model


def theirs(m, model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([model(torch.tensor([s])).logits[0] for s in m.SEQUENCES])


def test_logits(pair, m) -> None:
    decoder, model = pair
    with torch.no_grad():
        ours, expected = m.forward(decoder), theirs(m, model)
    assert ours.dtype == torch.float32 and ours.shape == expected.shape
    assert expected.abs().max() > 0.1
    assert close(ours, expected)


def test_gradients_of_all_parameters(pair, m) -> None:
    decoder, model = pair
    m.loss_of(m.forward(decoder)).backward()
    m.loss_of(theirs(m, model)).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    ours = {name: p.grad for name, p in decoder.named_parameters()}
    assert ours.keys() == expected.keys()
    largest = max(grad.abs().max().item() for grad in expected.values())
    for name, grad in ours.items():
        assert grad is not None and grad.abs().max() > 0, name
        assert close(grad, expected[name], largest), (name, (grad - expected[name]).abs().max().item(), largest)


def test_bfloat16_follows_the_same_rounding_points(m) -> None:
    """In bf16 the two differ by roundings only: far less than either differs from fp32."""
    raw, model = m.make_hf("qwen3", head_dim=8)
    tensors = m.hf_tensors(model.bfloat16())
    with torch.no_grad():
        ours = m.forward(m.build(m.from_hf(raw | {"dtype": "bfloat16"}), tensors))
        expected = theirs(m, model).float()
    assert (ours - expected).abs().max() <= 8 * 2**-8 * expected.abs().max()
