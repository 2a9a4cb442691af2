"""Rows are rounded where Qwen3.5 rounds them in transformers: equal bits where the order of a sum plays no part.

The squares of these rows add up exactly in any order, to a mean of 25, so that inverses are equal and only the products
and roundings behind them are compared. Where a function has an exponential, elements count on which both agree.
"""

import pytest
import torch
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5RMSNorm,
    Qwen3_5RMSNormGated,
    apply_rotary_pos_emb,
)

from skyrl_isoexec.kernels.numeric import exp, narrow
from skyrl_isoexec.kernels.numeric.inputs import normal
from skyrl_isoexec.kernels.rmsnorm import cpu as rmsnorm
from skyrl_isoexec.kernels.rope import cpu as rope
from skyrl_isoexec.kernels.swiglu import cpu as swiglu

ROWS, WIDTH = 40, 64
SIXTEENTHS = (1.0, 7.0, 7.0, 1.0), (9.0, 3.0, 3.0, 1.0), (8.0, 4.0, 4.0, 2.0)
"""Magnitudes of a quarter of a row each: four squares add up to 100."""


@pytest.fixture
def x(dtype: torch.dtype) -> torch.Tensor:
    """[ROWS, WIDTH] in any order and of any sign."""
    generator = torch.Generator().manual_seed(0)
    rows = [
        torch.tensor(SIXTEENTHS[i % 3]).repeat(WIDTH // 4)[torch.randperm(WIDTH, generator=generator)]
        for i in range(ROWS)
    ]
    made = (torch.stack(rows) * torch.where(normal(1, ROWS, WIDTH) < 0, -1.0, 1.0)).to(dtype)
    assert (made.double().square().mean(1) == 25).all() and torch.rsqrt(torch.tensor(25.0)) == torch.tensor(0.2)
    return made


@pytest.mark.parametrize("residual", [False, True])
def test_a_zero_centred_norm(x, dtype, residual, same_bits):
    theirs = Qwen3_5RMSNorm(WIDTH, eps=0.0).to(dtype)
    theirs.weight.data = normal(2, WIDTH, dtype=dtype, scale=0.3)
    w = theirs.weight.data
    half = x / 2
    found = rmsnorm.add_rmsnorm(half, half, w, 0.0, 1.0)[0] if residual else rmsnorm.rmsnorm(x, w, 0.0, 1.0)
    same_bits(found, theirs(x).detach())
    whole = rmsnorm.rmsnorm(x, narrow(1.0 + w.float(), dtype), 0.0)  # rounded twice more
    assert torch.equal(found, whole) == (dtype == torch.float32)


def test_a_gated_norm(x, dtype, same_bits):
    theirs = Qwen3_5RMSNormGated(WIDTH, eps=0.0).to(dtype)
    theirs.weight.data = normal(3, WIDTH, dtype=dtype)
    z = normal(4, ROWS, WIDTH, dtype=dtype, scale=3.0)
    g = z.float()
    agree = g / (exp(-g) + 1.0) == torch.nn.functional.silu(g)
    assert agree.sum() > ROWS * WIDTH // 2
    w = theirs.weight.data
    same_bits(rmsnorm.gated_rmsnorm(x, z, w, 0.0)[agree], theirs(x, z).detach()[agree])
    n = x.float() * 0.2
    once = narrow(n * w.float() * torch.nn.functional.silu(g), dtype)
    assert torch.equal(once[agree], theirs(x, z)[agree]) == (dtype == torch.float32)


def test_a_norm_is_close(dtype):
    """On any rows, within a few units of the dtype's last place."""
    rows, w = normal(5, ROWS, 250, dtype=dtype), normal(6, 250, dtype=dtype, scale=0.3)
    theirs = Qwen3_5RMSNorm(250, eps=1e-6).to(dtype)
    theirs.weight.data = w
    found, expected = rmsnorm.rmsnorm(rows, w, 1e-6, 1.0).double(), theirs(rows).detach().double()
    unit = 2.0**-23 if dtype == torch.float32 else 2.0**-8
    assert ((found - expected).abs() <= 4 * unit * expected.abs()).all()
    if dtype == torch.bfloat16:
        assert (found != expected).double().mean() < 1e-3  # a tie of the last place at most


def test_a_partial_rotation(same_bits):
    """fp32, in which the tables of both are: the first quarter of a head, by halves of that quarter."""
    positions, angles = torch.arange(9), normal(7, 9, 32)
    x = normal(8, 9, 3, 256)
    cos, sin = (torch.cat((f(angles), f(angles)), -1)[None] for f in (torch.cos, torch.sin))
    theirs, _ = apply_rotary_pos_emb(x[None], x[None], cos, sin, unsqueeze_dim=2)
    same_bits(rope.rope(x, positions, torch.cat((angles.cos(), angles.sin()), -1)), theirs[0])


def test_an_output_gate_rounds_once():
    """attn_output * sigmoid(gate): equal where fp32 is the dtype; in bf16 theirs rounds the sigmoid too."""
    x, gate = normal(9, ROWS, WIDTH), normal(10, ROWS, WIDTH, scale=3.0)
    agree = 1.0 / (exp(-gate) + 1.0) == torch.sigmoid(gate)
    assert agree.sum() > ROWS * WIDTH // 2
    assert torch.equal(swiglu.sigmoid_mul(x, gate)[agree], (x * torch.sigmoid(gate))[agree])
    x, gate = x.bfloat16(), gate.bfloat16()
    exact = x.double() * gate.double().sigmoid()
    ours, theirs = swiglu.sigmoid_mul(x, gate).double(), (x * torch.sigmoid(gate)).double()
    assert ((ours - exact).abs() <= 1.001 * 2.0**-8 * exact.abs()).all()
    assert (ours - exact).abs().mean() < (theirs - exact).abs().mean()
