"""Proof of a linear: an element is a function of its row and its column, in the order that the reference states."""

from types import ModuleType

import torch
from torch import Tensor

from skyrl_isoexec.kernels.linear import reference
from skyrl_isoexec.kernels.linear.cases import cases
from skyrl_isoexec.kernels.numeric.inputs import count_hazards, normal
from skyrl_isoexec.kernels.numeric.proof import DEGREES, DTYPES, ROW_COUNTS, Proof
from skyrl_isoexec.schedule import Schedule

WIDTH = 2048
"""Inputs and outputs of the linear in which a row is moved about."""


def prove(proof: Proof, impl: ModuleType, schedule: Schedule) -> None:
    """Collect every check of `impl` in `proof`; the schedule does not enter a linear."""
    for label, dtype in DTYPES.items():
        _reference(proof, impl, label, dtype)
        x, w, bias = (normal(i, *shape, dtype=dtype) for i, shape in enumerate(((5, 70), (96, 70), (96,)), 1))
        whole, packed = impl.linear(x, w, bias), impl.pack(w)
        for size in DEGREES:
            parts = [(part, b) for part, b in zip(w.chunk(size), bias.chunk(size), strict=True)]
            shards = [impl.linear(x, part, b) for part, b in parts]
            proof.equal(f"{label} column shards", whole, torch.cat(shards, 1), at=f"degree {size}")
            shards = [impl.linear(x, part, b, None, impl.pack(part)) for part, b in parts]
            proof.equal(f"{label} column shards", whole, torch.cat(shards, 1), at=f"degree {size}, packed")
        proof.autograd(f"{label} autograd", impl.linear, x, w, bias)
        proof.equal(f"{label} strides", whole, impl.linear(_transposed(x), _transposed(w), bias), at="transposed")
        proof.equal(f"{label} strides", whole, impl.linear(torch.cat([x, x], 1)[:, :70], w, bias), at="sliced")
        old = impl.pack(torch.zeros_like(w))
        proof.equal(f"{label} refreshed weight", whole, impl.linear(x, w, bias, None, impl.pack(w, old)))
        proof.repeats(
            f"{label} repeats", lambda x=x, w=w, bias=bias, packed=packed: impl.linear(x, w, bias, None, packed)
        )
        _rows(proof, impl, label, dtype)


def _reference(proof: Proof, impl: ModuleType, label: str, dtype: torch.dtype) -> None:
    for name, (x, w, bias) in cases(dtype).items():
        packed = impl.pack(w)
        for out_dtype in (None, torch.float32, torch.bfloat16):
            for b in (None, bias):
                expected = reference.linear(x, w, b, out_dtype)
                for weight, found in (
                    ("plain", impl.linear(x, w, b, out_dtype)),
                    ("packed", impl.linear(x, w, b, out_dtype, packed)),
                ):
                    if name == "no rows":
                        proof.empty(f"{label} no rows", expected, found)
                    else:
                        proof.equal(f"{label} reference", expected, found, at=f"{name}, {weight}, out {out_dtype}")
        for hazard, count in count_hazards(x).items() if "hazards" in name else ():
            proof.reached(f"{label} {name}: {hazard}", count)
    minus_zero = torch.full((1, 3), -0.0, dtype=dtype)  # every product is -0, and the sum starts at +0
    proof.equal(f"{label} reference", torch.zeros(1, 1, dtype=dtype), impl.linear(minus_zero, -minus_zero), at="-0")


def _transposed(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


def _rows(proof: Proof, impl: ModuleType, label: str, dtype: torch.dtype) -> None:
    w = normal(1, WIDTH, WIDTH, dtype=dtype)
    pool, anchor = normal(2, max(ROW_COUNTS), WIDTH, dtype=dtype), normal(3, 1, WIDTH, dtype=dtype)
    packed = impl.pack(w)
    proof.equal(f"{label} rows", reference.linear(anchor, w), impl.linear(anchor, w), at="alone")
    proof.rows(f"{label} rows", lambda x: impl.linear(x, w), (pool,), (anchor,))
    proof.rows(f"{label} rows, packed", lambda x: impl.linear(x, w, packed=packed), (pool,), (anchor,))
