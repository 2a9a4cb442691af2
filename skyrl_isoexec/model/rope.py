"""Rotary table: cosines and sines of every position, built once in float64 and rounded once to fp32.

Both runtimes index the same table, so an angle never depends on how a batch was cut.
"""

from __future__ import annotations

import math

import torch

from skyrl_isoexec.model.config import DecoderConfig


def inverse_frequencies(config: DecoderConfig) -> list[float]:
    """head_dim / 2 angular steps per position, in float64; the llama3 rule stretches long wavelengths."""
    half = config.head_dim // 2
    plain = [config.rope_theta ** (-i / half) for i in range(half)]
    if config.rope_scaling is None:
        return plain
    scaling = config.rope_scaling
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]

    def stretch(step: float) -> float:
        turns = scaling["original_max_position_embeddings"] * step / (2 * math.pi)
        keep = min(max((turns - low) / (high - low), 0.0), 1.0)  # 0: long wavelength, 1: short
        return keep * step + (1.0 - keep) * step / factor

    return [stretch(step) for step in plain]


def rope_table(config: DecoderConfig, device: torch.device | str | None = None) -> torch.Tensor:
    """cos_sin_PD, fp32 [max_position, head_dim]: cosines of the half's angles, then their sines."""
    steps = torch.tensor(inverse_frequencies(config), dtype=torch.float64)
    angles = torch.arange(config.max_position, dtype=torch.float64).outer(steps)
    return torch.cat((angles.cos(), angles.sin()), dim=1).float().to(device or "cpu")
