"""Proof of log-probabilities: one token's bits are those of the whole row, in any batch and any cut of the vocabulary.

Shapes: T rows (tokens), V vocabulary.
"""

from types import ModuleType

import torch
from torch import Tensor

from skyrl_isoexec.kernels.logprob import cases, reference
from skyrl_isoexec.kernels.logprob.spec import Temperature
from skyrl_isoexec.kernels.numeric.inputs import normal
from skyrl_isoexec.kernels.numeric.proof import DEGREES, ROW_COUNTS, Proof
from skyrl_isoexec.schedule import Schedule

SIZES = ((1, 1), (7, 1), (1001, 1), (640, 8), (1040, 2))
"""Vocabulary and leaves."""
TEMPERATURES = (1.0, 0.6, 1.5, "rows")


def prove(proof: Proof, impl: ModuleType, schedule: Schedule, definition: ModuleType = reference) -> None:
    """Collect every check of `impl` in `proof`; logits are fp32 whatever the model is. Leaves are the schedule's."""
    for kind in cases.KINDS:
        proof.reached(kind, cases.reached(kind, cases.rows(kind, 40, 504)))
        for size, num_leaves in SIZES:
            _reference(proof, impl, definition, kind, size, num_leaves)
    for kind in cases.KINDS:
        _tokens(proof, impl, kind)
    for kind in cases.KINDS:
        _degrees(proof, impl, definition, kind, schedule.num_leaves)
    _temperatures(proof, impl)
    _logarithm(proof, impl)
    logits = cases.rows("normal", 33, 999)
    rows = impl.logprobs(logits)
    proof.equal("strides", rows, impl.logprobs(torch.cat([logits, logits], 1)[:, :999]), at="sliced")
    proof.equal("strides", rows[3::5], impl.logprobs(logits[3::5]), at="some rows")
    ids = _ids(logits)
    proof.repeats("repeats", lambda: (impl.logprobs(logits), impl.token_logprobs(logits, ids)))
    pool, anchor = normal(1, max(ROW_COUNTS), 1000, scale=4.0), normal(2, 1, 1000, scale=4.0)
    proof.rows("rows", lambda x: impl.logprobs(x, num_leaves=8), (pool,), (anchor,))
    chosen, one = torch.arange(max(ROW_COUNTS)) % 1000, torch.tensor([7])
    proof.rows("rows, one token", lambda x, i: impl.token_logprobs(x, i, num_leaves=8), (pool, chosen), (anchor, one))
    none, no_ids = torch.zeros(0, 16), torch.zeros(0, dtype=torch.int64)
    proof.empty("no rows", (none, none[:, 0]), (impl.logprobs(none), impl.token_logprobs(none, no_ids)))


def _temperature(name: float | str, num_rows: int) -> Temperature:
    return torch.arange(num_rows) * 0.25 + 0.5 if name == "rows" else name


def _ids(logits: Tensor) -> Tensor:
    return torch.randint(logits.shape[1], logits.shape[:1], generator=torch.Generator().manual_seed(3))


def _reference(proof: Proof, impl: ModuleType, definition: ModuleType, kind: str, size: int, num_leaves: int) -> None:
    """Whole rows, single tokens and, where an implementation has it, the entropy."""
    logits = cases.rows(kind, 9, size)
    ids = _ids(logits)
    for name in TEMPERATURES:
        at = _temperature(name, 9)
        expected, found = (
            (
                module.logprobs(logits, at, num_leaves=num_leaves),
                module.token_logprobs(logits, ids, at, num_leaves=num_leaves),
                *([module.entropy(logits, at, num_leaves=num_leaves)] if hasattr(impl, "entropy") else []),
            )
            for module in (definition, impl)
        )
        where = f"{kind}, {size} tokens, {num_leaves} leaves, temperature {name}"
        proof.equal("reference", expected, found, at=where)


def _tokens(proof: Proof, impl: ModuleType, kind: str) -> None:
    """The log-probability of one token has the bits that the whole row has there, with and without a graph."""
    logits = cases.rows(kind, 40, 504)
    ids = _ids(logits)
    for name in TEMPERATURES:
        at = _temperature(name, 40)
        chosen = impl.logprobs(logits, at, num_leaves=4).gather(1, ids[:, None])[:, 0]
        found = impl.token_logprobs(logits, ids, at, num_leaves=4)
        proof.equal("token of a row", chosen, found, at=f"{kind}, temperature {name}")
        recorded = impl.token_logprobs(logits.clone().requires_grad_(), ids, at, num_leaves=4)
        proof.reached("graphs recorded", recorded.requires_grad)
        proof.equal("token of a row", chosen, recorded, at=f"{kind}, temperature {name}, with a graph")


def _degrees(proof: Proof, impl: ModuleType, definition: ModuleType, kind: str, num_leaves: int) -> None:
    """Ranks with slices of the vocabulary make the bits of one; so do their parts of the gradient."""
    logits, grad = cases.rows(kind, 12, num_leaves * 35), torch.arange(12) * 0.125 - 0.75
    ids = _ids(logits)
    chosen = logits.gather(1, ids[:, None])[:, 0]
    for name in (1.0, "rows"):
        at = _temperature(name, 12)
        rows = definition.logprobs(logits, at, num_leaves=num_leaves)
        tokens = definition.token_logprobs(logits, ids, at, num_leaves=num_leaves)
        m = definition.row_max(logits, at)
        total = definition.total(definition.leaf_sums(logits, m, num_leaves, at))
        whole_grad = definition.grad_logits(grad, logits, ids, m, total, at)
        for size in (degree for degree in DEGREES if degree <= num_leaves):
            shards, width = logits.chunk(size, 1), logits.shape[1] // size
            maxima = torch.stack([impl.row_max(x, at) for x in shards]).amax(0)
            sums = torch.cat([impl.leaf_sums(x, maxima, num_leaves // size, at) for x in shards])
            totals = impl.total(sums)
            parts = [
                impl.grad_logits(grad, x, ids, maxima, totals, at, first_id=rank * width)
                for rank, x in enumerate(shards)
            ]
            found = (
                impl.finish(chosen, maxima, totals, at),
                torch.cat([impl.finish(x, maxima, totals, at) for x in shards], 1),
                torch.cat(parts, 1),
            )
            where = f"{kind}, temperature {name}, degree {size}"
            proof.equal("vocabulary shards", (tokens, rows, whole_grad), found, at=where)


def _temperatures(proof: Proof, impl: ModuleType) -> None:
    """The number 1, a tensor of ones and no argument are the same; another one divides the logits."""
    logits = cases.rows("normal", 5, 100)
    rows, other = impl.logprobs(logits), impl.logprobs(logits, 0.6)
    proof.equal("temperature", rows, impl.logprobs(logits, 1.0), at="1")
    proof.equal("temperature", rows, impl.logprobs(logits, torch.ones(5)), at="ones")
    proof.equal("temperature", other, impl.logprobs(logits, torch.full((5,), 0.6)), at="0.6 for each row")
    proof.equal("temperature", other, impl.logprobs(logits / torch.full((5, 1), 0.6)), at="divided before")
    proof.reached("temperature 0.6 moves bits", (rows != other).sum())


def _logarithm(proof: Proof, impl: ModuleType) -> None:
    """Of sums of every size, from 1 to more than any vocabulary."""
    fractions = 1.0 + torch.arange(4097) / 4096
    totals = torch.cat([fractions, *(fractions[::64] * 2.0**exponent for exponent in range(1, 25))])
    zero = torch.zeros_like(totals)
    proof.equal("logarithm", 0.0 - reference.log(totals), impl.finish(zero, zero, totals))
