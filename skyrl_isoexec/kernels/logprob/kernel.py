"""Log-probabilities on Hopper: `triton_loops.py` behind the functions that every implementation has.

Notable: a token's log-probability reads the logits twice (maximum, sum) and writes nothing of their size. Where the CPU
raises for an id outside the vocabulary or a temperature that is not positive, this gives NaN: it never waits for the
device. What must stay equal: the bits of `reference_sm90.py`, for whole rows, one token per row and slices.

Shapes: T rows (tokens), V vocabulary or a slice of it, L leaves.
"""

import torch
import triton
from torch import Tensor

from skyrl_isoexec.kernels.logprob import backward, spec
from skyrl_isoexec.kernels.logprob import triton_loops as loops
from skyrl_isoexec.kernels.logprob.reference_sm90 import BLOCK
from skyrl_isoexec.kernels.logprob.spec import Temperature
from skyrl_isoexec.kernels.numeric.sm90 import EXACT, power_of_two, require
from skyrl_isoexec.kernels.numeric.sm90_product import tree_sum

__all__ = ["finish", "grad_logits", "leaf_sums", "logprobs", "row_max", "token_logprobs", "total"]

MAX_BLOCK, WIDE_BLOCK, WARPS = 8192, 2048, 4
"""Elements of a program for the maximum and for results, and its warps: change no bit."""


def _divisors(temperature: Temperature, logits: Tensor) -> Tensor | None:
    """fp32 [T] divisors on the logits' device, or None for the number 1. A tensor's values are not looked at."""
    num_rows = logits.shape[0]
    if not isinstance(temperature, Tensor):
        made = spec.temperatures(temperature, num_rows)
        return None if made is None else torch.full((num_rows,), temperature, device=logits.device)
    divisors = spec.row_values("temperature", temperature, num_rows)
    require("logprob", divisors)
    return torch.where(divisors > 0, divisors, float("nan"))


def _rows(logits: Tensor, num_leaves: int = 1) -> Tensor:
    """Checked logits with contiguous rows."""
    require("logprob", logits)
    spec.check_logits(logits, num_leaves)
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _check_ids(ids_T: Tensor, num_rows: int) -> Tensor:
    require("logprob", ids_T)
    if ids_T.dtype != torch.int64 or ids_T.shape != (num_rows,):
        raise TypeError(f"logprob: token ids are {ids_T.dtype} {tuple(ids_T.shape)}, not int64 [{num_rows}]")
    return ids_T.contiguous()


def _or(divisors: Tensor | None, logits: Tensor) -> dict[str, object]:
    return {"divisors": logits if divisors is None else divisors, "HAS_DIVISOR": divisors is not None}


def _block_max(logits_TV: Tensor, divisors: Tensor | None) -> Tensor:
    """[T, blocks] maxima."""
    num_rows, size = logits_TV.shape
    num_parts = triton.cdiv(size, MAX_BLOCK)
    parts = torch.empty(num_rows, num_parts, device=logits_TV.device)
    if num_rows:
        loops.block_max[(num_rows, num_parts)](
            logits_TV, parts=parts, stride=logits_TV.stride(0), size=size,
            BLOCK=MAX_BLOCK, num_warps=8, **_or(divisors, logits_TV), **EXACT,
        )  # fmt: skip
    return parts


def _block_sums(logits_TV: Tensor, divisors: Tensor | None, maxima: Tensor, num_leaves: int) -> Tensor:
    """[T, L, B] sums of blocks; `maxima` are [T] or parts of them [T, parts]."""
    num_rows, width = logits_TV.shape[0], logits_TV.shape[1] // num_leaves
    num_parts = maxima.numel() // max(1, num_rows)
    sums = torch.empty(num_rows, num_leaves, triton.cdiv(width, BLOCK), device=logits_TV.device)
    if num_rows:
        loops.block_sums[(num_rows, sums.shape[2], num_leaves)](
            logits_TV, maxima=maxima, sums=sums, stride=logits_TV.stride(0), width=width, num_parts=num_parts,
            PARTS=power_of_two(num_parts), BLOCK=BLOCK, num_warps=WARPS, **_or(divisors, logits_TV), **EXACT,
        )  # fmt: skip
    return sums


def row_max(logits_TV: Tensor, temperature: Temperature = 1.0) -> Tensor:
    """fp32 [T]: maximum of each row; ranks combine theirs with any exact, NaN-propagating maximum."""
    logits_TV = _rows(logits_TV)
    parts = _block_max(logits_TV, _divisors(temperature, logits_TV))
    num_rows, num_parts = parts.shape
    out = torch.empty(num_rows, device=logits_TV.device)
    if num_rows:
        loops.row_max[(num_rows,)](parts, out, num_parts, PARTS=power_of_two(num_parts), num_warps=1, **EXACT)
    return out


def leaf_sums(logits_TV: Tensor, row_max_T: Tensor, local_leaves: int, temperature: Temperature = 1.0) -> Tensor:
    """fp32 [L, T]: each local leaf's sum of exp(x - maximum)."""
    logits_TV = _rows(logits_TV, local_leaves)
    row_max_T, num_rows = spec.row_values("row_max", row_max_T, logits_TV.shape[0]), logits_TV.shape[0]
    sums = _block_sums(logits_TV, _divisors(temperature, logits_TV), row_max_T, local_leaves)
    out = torch.empty(local_leaves, num_rows, device=logits_TV.device)
    if num_rows:
        loops.leaf_sums[(num_rows,)](sums, out, num_rows, sums.shape[2], LEAVES=local_leaves, num_warps=1, **EXACT)
    return out


def total(sums_LT: Tensor) -> Tensor:
    """fp32 [T]: balanced tree over all leaves, lower index left."""
    spec.check_leaves(sums_LT)
    require("logprob", sums_LT)
    return tree_sum(sums_LT)


def finish(logits: Tensor, row_max_T: Tensor, total_T: Tensor, temperature: Temperature = 1.0) -> Tensor:
    """Log-probabilities of whole rows [T, V] or of one logit per row [T], from the rows' maximum and total."""
    rows = _rows(logits if logits.dim() == 2 else logits[:, None])
    num_rows, size = rows.shape
    row_max_T, total_T = (spec.row_values(n, x, num_rows) for n, x in (("row_max", row_max_T), ("total", total_T)))
    divisors, out = _divisors(temperature, rows), torch.empty(rows.shape, device=rows.device)
    if num_rows:
        block = min(WIDE_BLOCK, max(16, power_of_two(size)))
        loops.finish[(num_rows, triton.cdiv(size, block))](
            rows, maxima=row_max_T, totals=total_T, out=out, stride=rows.stride(0), size=size,
            BLOCK=block, num_warps=WARPS, **_or(divisors, rows), **EXACT,
        )  # fmt: skip
    return out.view(logits.shape)


def logprobs(logits_TV: Tensor, temperature: Temperature = 1.0, *, num_leaves: int = 1) -> Tensor:
    """fp32 [T, V]: log-probabilities of whole rows."""
    m = row_max(logits_TV, temperature)
    return finish(logits_TV, m, total(leaf_sums(logits_TV, m, num_leaves, temperature)), temperature)


def _token(
    logits_TV: Tensor, ids_T: Tensor, temperature: Temperature, num_leaves: int
) -> tuple[Tensor, Tensor, Tensor]:
    divisors, num_rows = _divisors(temperature, logits_TV), logits_TV.shape[0]
    parts = _block_max(logits_TV, divisors)
    sums = _block_sums(logits_TV, divisors, parts, num_leaves)
    out, m, totals = (torch.empty(num_rows, device=logits_TV.device) for _ in range(3))
    if num_rows:
        loops.token[(num_rows,)](
            logits_TV, ids=ids_T, parts=parts, sums=sums, out=out, maxima=m, totals=totals,
            stride=logits_TV.stride(0), size=logits_TV.shape[1], num_parts=parts.shape[1], num_blocks=sums.shape[2],
            PARTS=power_of_two(parts.shape[1]), LEAVES=num_leaves, num_warps=1, **_or(divisors, logits_TV), **EXACT,
        )  # fmt: skip
    return out, m, totals


def token_logprobs(logits_TV: Tensor, ids_T: Tensor, temperature: Temperature = 1.0, *, num_leaves: int = 1) -> Tensor:
    """fp32 [T]: the log-probability of one token per row, the bits that `logprobs` has there; differentiable."""
    logits_TV = _rows(logits_TV, num_leaves)
    ids_T = _check_ids(ids_T, logits_TV.shape[0])
    return backward.token_logprobs(_token, grad_logits, logits_TV, ids_T, temperature, num_leaves)


def grad_logits(
    grad_T: Tensor,
    logits_TV: Tensor,
    ids_T: Tensor,
    row_max_T: Tensor,
    total_T: Tensor,
    temperature: Temperature = 1.0,
    *,
    first_id: int = 0,
) -> Tensor:
    """Gradient [T, V] of token log-probabilities for the slice of the vocabulary that starts at `first_id`."""
    logits_TV = _rows(logits_TV)
    num_rows, size = logits_TV.shape
    ids_T = _check_ids(ids_T, num_rows)
    named = (("grad", grad_T), ("row_max", row_max_T), ("total", total_T))
    grad_T, row_max_T, total_T = (spec.row_values(name, x, num_rows) for name, x in named)
    divisors, out = _divisors(temperature, logits_TV), torch.empty(num_rows, size, device=logits_TV.device)
    if num_rows:
        loops.gradient[(num_rows, triton.cdiv(size, WIDE_BLOCK))](
            grad_T, logits_TV, ids=ids_T, maxima=row_max_T, totals=total_T, out=out, stride=logits_TV.stride(0),
            size=size, first_id=first_id, BLOCK=WIDE_BLOCK, num_warps=WARPS, **_or(divisors, logits_TV), **EXACT,
        )  # fmt: skip
    return out
