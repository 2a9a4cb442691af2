"""Proof of the way to the experts and back: exact places, and for each token one order, whoever is beside it."""

from collections.abc import Mapping
from types import ModuleType

import torch
from torch import Tensor

from skyrl_isoexec.kernels.combine import reference
from skyrl_isoexec.kernels.combine.cases import cases, chosen, weighing
from skyrl_isoexec.kernels.numeric.inputs import count_hazards, normal
from skyrl_isoexec.kernels.numeric.proof import DTYPES, ROW_COUNTS, Proof
from skyrl_isoexec.schedule import Schedule

SPREADS = ((1200, 8, 60), (300, 4, 256), (40, 1, 3), (64, 8, 8))
"""(T, K, E) of choices that are only sorted: more slots than are sorted by counting, more experts than tokens."""


def prove(
    proof: Proof,
    impl: ModuleType,
    schedule: Schedule,
    dtypes: Mapping[str, torch.dtype] = DTYPES,
    definition: ModuleType = reference,
) -> None:
    """Collect every check of `impl` in `proof`; the schedule does not enter."""
    sorted_only = [(chosen(t, t, k, e), e) for t, k, e in SPREADS]
    for experts, e in sorted_only:
        order, starts = impl.dispatch(experts, e)
        proof.equal("places", definition.dispatch(experts, e), (order, starts), at=f"{len(experts)} tokens")
        proof.reached("experts with several rows", int((starts[1:] - starts[:-1] > 1).sum()))
    for experts, e in sorted_only:
        proof.repeats("places repeat", lambda x=experts, e=e: impl.dispatch(x, e))
    for label, dtype in dtypes.items():
        for name, case in cases(dtype).items():
            _case(proof, impl, definition, label, name, *case)
        _rows(proof, impl, label, dtype)
        y, experts, e, weights, shared = cases(dtype)["odd"]
        order, _ = impl.dispatch(experts, e)
        by_row, x = y[order], shared
        whole = impl.combine(by_row, order, weights, shared)
        across = [t.t().contiguous().t() for t in (by_row, weights, shared)]
        proof.equal(f"{label} strides", whole, impl.combine(across[0], order, *across[1:]), at="transposed")
        proof.equal(f"{label} strides", impl.expand(x, order), impl.expand(across[2], order), at="transposed")
        proof.autograd(f"{label} autograd", lambda y, w, s, o=order: impl.combine(y, o, w, s), by_row, weights, shared)
        proof.autograd(f"{label} autograd, expand", lambda x, o=order: impl.expand(x, o), x)
        proof.repeats(f"{label} repeats", lambda y=by_row, o=order, w=weights, s=shared: impl.combine(y, o, w, s))
        proof.repeats(f"{label} repeats", lambda x=x, o=order: impl.expand(x, o))


def _case(
    proof: Proof,
    impl: ModuleType,
    definition: ModuleType,
    label: str,
    name: str,
    y: Tensor,
    experts: Tensor,
    num_experts: int,
    weights: Tensor,
    shared: Tensor,
) -> None:
    expected, found = definition.dispatch(experts, num_experts), impl.dispatch(experts, num_experts)
    order = expected[0]
    if name == "no tokens":
        proof.equal(f"{label} reference", expected[1], found[1], at=name)
        proof.empty(f"{label} no tokens", order, found[0])
        proof.empty(f"{label} no tokens", y, impl.expand(shared, order))
        proof.empty(f"{label} no tokens", shared, impl.combine(y, order, weights, shared))
        return
    by_row, name_of = y[order], f"{label} reference"
    alone, both = definition.combine(by_row, order, weights), definition.combine(by_row, order, weights, shared)
    proof.equal(name_of, expected, found, at=f"{name}, places")
    proof.equal(name_of, definition.expand(shared, order), impl.expand(shared, order), at=f"{name}, rows")
    proof.equal(name_of, alone, impl.combine(by_row, order, weights), at=name)
    proof.equal(name_of, both, impl.combine(by_row, order, weights, shared), at=f"{name}, shared")
    for hazard, count in count_hazards(y).items() if "hazards" in name else ():
        proof.reached(f"{label} {name}: {hazard}", count)
    if name == "zeros":
        proof.reached(f"{label} zeros: tokens of -0 alone stay -0", int((alone.signbit() & both.signbit()).sum()))
        proof.reached(f"{label} zeros: +0 among -0 gives +0", count_hazards(alone)["+0"])
    if "subnormal" in name:
        proof.reached(f"{label} {name}", count_hazards(weights)["subnormal"])
    if name == "subnormal weights alone":
        proof.reached(f"{label} {name}: subnormal results", count_hazards(alone)["subnormal"])


def _rows(proof: Proof, impl: ModuleType, label: str, dtype: torch.dtype) -> None:
    """A token among other tokens, whose experts' rows lie elsewhere in each batch."""
    num_experts, top_k, width, size = 12, 4, 40, max(ROW_COUNTS)

    def there_and_back(experts: Tensor, y_TKH: Tensor, weights: Tensor, shared: Tensor) -> Tensor:
        order, _ = impl.dispatch(experts, num_experts)
        return impl.combine(y_TKH.flatten(0, 1)[order], order, weights, shared)

    def there(experts: Tensor, x: Tensor) -> Tensor:
        order, _ = impl.dispatch(experts, num_experts)
        by_slot = torch.empty(order.shape[0], width, dtype=dtype)
        by_slot[order] = impl.expand(x, order)
        return by_slot.unflatten(0, (-1, top_k))

    def operands(seed: int, count: int) -> tuple[Tensor, ...]:
        y = normal(seed + 1, count, top_k, width, dtype=dtype)
        weights, shared = weighing(seed + 2, count, top_k), normal(seed + 3, count, width, dtype=dtype)
        return chosen(seed, count, top_k, num_experts), y, weights, shared

    pool, anchor = operands(1, size), operands(5, 1)
    proof.rows(f"{label} rows", there_and_back, pool, anchor)
    proof.rows(f"{label} rows of a token", there, (pool[0], pool[3]), (anchor[0], anchor[3]))
