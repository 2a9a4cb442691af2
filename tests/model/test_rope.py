"""The rotary table is right to the last fp32 bit, and the same however it is made."""

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from skyrl_isoexec.model.rope import MAX_ANGLE, cos_sin, inverse_frequencies, rope_table

LLAMA3 = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_sine_and_cosine() -> None:
    """Within 1e-15 over the whole range, near the multiples of pi / 4 too."""
    generator = torch.Generator().manual_seed(0)
    anywhere = torch.rand(200_000, dtype=torch.float64, generator=generator) * MAX_ANGLE
    whole = torch.arange(0, MAX_ANGLE, 13, dtype=torch.float64)
    critical = torch.arange(0, 20_000, dtype=torch.float64) * (math.pi / 4)
    angles = torch.cat((anywhere, whole, critical))
    cos, sin = cos_sin(angles)
    assert (cos - angles.cos()).abs().max() <= 1e-15 and (sin - angles.sin()).abs().max() <= 1e-15
    assert cos[-20_000] == 1.0 and sin[-20_000] == 0.0


@pytest.mark.parametrize("scaling", [None, LLAMA3])
def test_steps_are_those_of_transformers(m, scaling) -> None:
    config, _ = m.toy("llama", head_dim=128, rope_theta=500000.0, rope_scaling=scaling)
    if scaling is None:
        expected = 500000.0 ** (-torch.arange(0, 128, 2, dtype=torch.float64) / 128)
    else:
        theirs = LlamaConfig(head_dim=128, rope_parameters=scaling | {"rope_type": "llama3", "rope_theta": 500000.0})
        expected = ROPE_INIT_FUNCTIONS["llama3"](theirs, None)[0].double()
    ours = torch.tensor(inverse_frequencies(config), dtype=torch.float64)
    assert ((ours - expected).abs() <= (1e-14 if scaling is None else 1e-6) * expected).all()


def test_table_is_rounded_once(m) -> None:
    config, _ = m.toy(max_position=5000)
    table = rope_table(config)
    angles = torch.arange(5000, dtype=torch.float64)[:, None] * torch.tensor(
        inverse_frequencies(config), dtype=torch.float64
    )
    assert table.shape == (5000, 6) and table.dtype == torch.float32
    assert torch.equal(table, torch.cat((angles.cos(), angles.sin()), dim=1).float())
    assert torch.equal(table[0], torch.tensor([1.0, 1, 1, 0, 0, 0]))


def test_a_longer_table_starts_with_the_shorter_one(m) -> None:
    """Trainer and engine may cover different lengths."""
    long = rope_table(m.toy(max_position=9001)[0])
    for length in (1, 4095, 4097):
        m.assert_same_bits(long[:length], rope_table(m.toy(max_position=length)[0]))


def test_number_of_threads_changes_nothing(m) -> None:
    config, _ = m.toy(max_position=9001, head_dim=128)
    one = rope_table(config)
    torch.set_num_threads(3)
    try:
        m.assert_same_bits(rope_table(config), one)
    finally:
        torch.set_num_threads(1)


def test_angles_beyond_the_exact_range_are_refused(m) -> None:
    with pytest.raises(ValueError, match="max_position = 1048577"):
        rope_table(m.toy(max_position=MAX_ANGLE + 1)[0])
