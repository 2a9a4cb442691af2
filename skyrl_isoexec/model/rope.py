"""Rotary table: cosines and sines of every position, computed in float64 and rounded once to fp32.

Both runtimes index the same table, so an angle never depends on how a batch was cut. Nothing here calls a maths
library, whose results differ between versions, machines, and body and remainder of a vectorised loop: powers are
decimal, sine and cosine are polynomials of products and sums, each rounded on its own.
"""

from __future__ import annotations

import decimal
import math

import torch

from skyrl_isoexec.model.config import DecoderConfig

MAX_ANGLE = 2**20
HALF_PI = tuple(map(float.fromhex, ("0x1.921fb544p+0", "0x1.0b4611a6p-34", "0x1.3198a2e037073p-69")))
"""pi / 2 in parts of 33 bits, so that multiples up to 2**20 of the first two are exact."""
SIN = [(-1) ** i / math.factorial(2 * i + 1) for i in range(9)]
COS = [(-1) ** i / math.factorial(2 * i) for i in range(9)]
ROWS = 4096
"""Positions computed at a time."""


def rotary_dim(config: DecoderConfig) -> int:
    """Entries of a head that are rotated: its leading ones, in latent attention those after the others."""
    if config.latent:
        return config.qk_rope_head_dim
    return config.head_dim if config.rotary_dim is None else config.rotary_dim


def inverse_frequencies(config: DecoderConfig) -> list[float]:
    """An angular step per position for each rotated pair, in float64; the llama3 rule stretches long wavelengths."""
    half = rotary_dim(config) // 2
    with decimal.localcontext(prec=40):
        base = decimal.Decimal(config.rope_theta)
        plain = [float(base ** (decimal.Decimal(-i) / half)) for i in range(half)]
    if config.rope_scaling is None:
        return plain
    scaling = config.rope_scaling
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]

    def stretch(step: float) -> float:
        turns = scaling["original_max_position_embeddings"] * step / (2 * math.pi)
        keep = min(max((turns - low) / (high - low), 0.0), 1.0)  # 0: long wavelength, 1: short
        return keep * step + (1.0 - keep) * step / factor

    return [stretch(step) for step in plain]


def _polynomial(coefficients: list[float], x: torch.Tensor) -> torch.Tensor:
    total = torch.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = total * x + coefficient
    return total


def cos_sin(angles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of float64 angles in [0, MAX_ANGLE], each within 1e-15."""
    turns = torch.round(angles * (2 / math.pi))
    rest = angles
    for part in HALF_PI:
        rest = rest - turns * part
    square = rest * rest
    cos, sin = _polynomial(COS, square), _polynomial(SIN, square) * rest
    quarter = turns.to(torch.int64) % 4
    swap = quarter % 2 == 1
    cos, sin = torch.where(swap, sin, cos), torch.where(swap, cos, sin)
    return torch.where((quarter == 1) | (quarter == 2), -cos, cos), torch.where(quarter >= 2, -sin, sin)


def rope_table(config: DecoderConfig, device: torch.device | str | None = None) -> torch.Tensor:
    """cos_sin_PR, fp32 [max_position, rotary_dim]: cosines of the half's angles, then their sines.

    ValueError for angles above MAX_ANGLE, where the reduction to a quarter turn would no longer be exact.
    """
    steps = torch.tensor(inverse_frequencies(config), dtype=torch.float64)
    largest = config.max_position * float(steps.max())
    if largest > MAX_ANGLE:
        raise ValueError(f"max_position = {config.max_position} reaches angle {largest}, more than {MAX_ANGLE}")
    table = torch.empty(config.max_position, rotary_dim(config), dtype=torch.float32)
    for first in range(0, config.max_position, ROWS):
        rows = table[first : first + ROWS]
        positions = torch.arange(first, first + len(rows), dtype=torch.float64)
        rows.copy_(torch.cat(cos_sin(positions[:, None] * steps), dim=1))
    return table.to(device or "cpu")
