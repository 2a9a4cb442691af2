"""Proof of a linear: an element is a function of its row and its column, in the order that the reference states.

Where the tensor core hides the order (`definition` None), every admitted tile must give the same accumulator, which
keeps a bound and is rounded as the reference rounds its own.
"""

from collections.abc import Mapping
from types import ModuleType

import torch
from torch import Tensor

from skyrl_isoexec.kernels.linear import reference
from skyrl_isoexec.kernels.linear.cases import cases
from skyrl_isoexec.kernels.numeric import narrow
from skyrl_isoexec.kernels.numeric.bound import product_bound
from skyrl_isoexec.kernels.numeric.inputs import count_hazards, normal
from skyrl_isoexec.kernels.numeric.proof import DEGREES, DTYPES, ROW_COUNTS, Proof
from skyrl_isoexec.schedule import Schedule

WIDTH = 2048
"""Inputs and outputs of the linear in which a row is moved about."""
TILED = ((192, 2048), (512, 1032))
"""(N, K) on which every tile of a table is proved; the second is not whole blocks of K."""


def prove(
    proof: Proof,
    impl: ModuleType,
    schedule: Schedule,
    dtypes: Mapping[str, torch.dtype] = DTYPES,
    definition: ModuleType | None = reference,
) -> None:
    """Collect every check of `impl` in `proof`; the schedule does not enter a linear."""
    for label, dtype in dtypes.items():
        (_tensor_core if definition is None else _reference)(proof, impl, label, dtype)
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
        _rows(proof, impl, label, dtype, definition)


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


def _tensor_core(proof: Proof, impl: ModuleType, label: str, dtype: torch.dtype) -> None:
    """Bound, rounding, each row by itself, and every tile of the table."""
    for name, (x, w, bias) in cases(dtype).items():
        sums = impl.linear(x, w, None, torch.float32)
        if name == "no rows":
            proof.empty(f"{label} no rows", torch.zeros(x.shape[0], w.shape[0]), sums)
            continue
        if x.isfinite().all():
            holds = (x.abs().double() @ w.abs().double().T) < torch.finfo(torch.float32).max  # no sum can overflow
            exact, bound = product_bound(x, w)
            proof.within(f"{label} within the bound", sums[holds], exact[holds], bound[holds], at=name)
            if name == "finite hazards":
                proof.reached(f"{label} {name}: sums that may overflow", int((~holds).sum()))
        for hazard, count in count_hazards(x).items() if "hazards" in name else ():
            proof.reached(f"{label} {name}: {hazard}", count)
        rounded = narrow(sums, dtype)
        proof.equal(f"{label} rounding", rounded, impl.linear(x, w), at=name)
        expected = narrow(rounded.float() + bias.float(), dtype)
        proof.equal(f"{label} rounding", expected, impl.linear(x, w, bias), at=f"{name}, bias")
        alone = torch.cat([impl.linear(row, w, None, torch.float32) for row in x.split(1)])
        proof.equal(f"{label} each row alone", sums, alone, at=name)
        if name == "finite hazards":
            _tiles(proof, impl, f"{label} tiles", x, w, sums, name)
    for n, k in TILED:
        x, w = normal(1, 257, k, dtype=dtype), normal(2, n, k, dtype=dtype)
        sums = impl.linear(x, w, None, torch.float32)
        proof.within(f"{label} within the bound", sums, *product_bound(x, w), at=f"{n} x {k}")
        _tiles(proof, impl, f"{label} tiles", x, w, sums, f"{n} x {k}")


def _tiles(proof: Proof, impl: ModuleType, name: str, x: Tensor, w: Tensor, sums: Tensor, at: str) -> None:
    for tile in impl.TABLE.tiles(*w.shape, 1, w.shape[1] % 8 == 0):
        proof.equal(name, sums, impl.forward(x, w, None, torch.float32, tile), at=f"{at}, {tile}")


def _transposed(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


def _rows(proof: Proof, impl: ModuleType, label: str, dtype: torch.dtype, definition: ModuleType | None) -> None:
    w = normal(1, WIDTH, WIDTH, dtype=dtype)
    pool, anchor = normal(2, max(ROW_COUNTS), WIDTH, dtype=dtype), normal(3, 1, WIDTH, dtype=dtype)
    packed = impl.pack(w)
    if definition is not None:
        proof.equal(f"{label} rows", definition.linear(anchor, w), impl.linear(anchor, w), at="alone")
    proof.rows(f"{label} rows", lambda x: impl.linear(x, w), (pool,), (anchor,))
    proof.rows(f"{label} rows, packed", lambda x: impl.linear(x, w, packed=packed), (pool,), (anchor,))
