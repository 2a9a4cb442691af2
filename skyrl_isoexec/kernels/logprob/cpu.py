"""Log-probabilities on the CPU: `loops.py` behind the functions that every implementation has.

What must stay equal: the bits of `reference.py`, for whole rows, one token per row and slices of the vocabulary.

Shapes: T rows (tokens), V vocabulary or a slice of it, L leaves.
"""

import torch
from torch import Tensor

from skyrl_isoexec.kernels.logprob import backward, loops, spec
from skyrl_isoexec.kernels.logprob.spec import Temperature
from skyrl_isoexec.kernels.numeric import tree

__all__ = ["entropy", "finish", "grad_logits", "leaf_sums", "logprobs", "row_max", "token_logprobs", "total"]


def _divisors(temperature: Temperature, num_rows: int) -> tuple[Tensor | None, int]:
    """fp32 [T] divisors, to be kept alive, and their address; 0 for temperature 1."""
    divisors = spec.temperatures(temperature, num_rows)
    return divisors, 0 if divisors is None else divisors.data_ptr()


def row_max(logits_TV: Tensor, temperature: Temperature = 1.0) -> Tensor:
    """fp32 [T]: maximum of each row; ranks combine theirs with any exact, NaN-propagating maximum."""
    spec.check_host(logits_TV)
    spec.check_logits(logits_TV, 1)
    logits_TV = logits_TV.contiguous()
    num_rows, size = logits_TV.shape
    _kept, divisors = _divisors(temperature, num_rows)
    out = torch.empty(num_rows)
    loops.row_max(logits_TV.data_ptr(), divisors, out.data_ptr(), num_rows, size)
    return out


def _leaf_sums(
    logits_TV: Tensor, row_max_T: Tensor, local_leaves: int, temperature: Temperature, is_weighted: bool
) -> Tensor:
    spec.check_host(logits_TV, row_max_T)
    spec.check_logits(logits_TV, local_leaves)
    logits_TV, row_max_T = logits_TV.contiguous(), spec.row_values("row_max", row_max_T, logits_TV.shape[0])
    num_rows, size = logits_TV.shape
    _kept, divisors = _divisors(temperature, num_rows)
    out = torch.empty(local_leaves, num_rows)
    loops.leaf_sums(
        logits_TV.data_ptr(), divisors, row_max_T.data_ptr(), out.data_ptr(),
        num_rows, size, local_leaves, int(is_weighted),
    )  # fmt: skip
    return out


def leaf_sums(logits_TV: Tensor, row_max_T: Tensor, local_leaves: int, temperature: Temperature = 1.0) -> Tensor:
    """fp32 [L, T]: each local leaf's sum of exp(x - maximum)."""
    return _leaf_sums(logits_TV, row_max_T, local_leaves, temperature, False)


def total(sums_LT: Tensor) -> Tensor:
    """fp32 [T]: balanced tree over all leaves, lower index left."""
    spec.check_leaves(sums_LT)
    return tree(sums_LT)


def finish(logits: Tensor, row_max_T: Tensor, total_T: Tensor, temperature: Temperature = 1.0) -> Tensor:
    """Log-probabilities of whole rows [T, V] or of one logit per row [T], from the rows' maximum and total."""
    spec.check_host(logits, row_max_T, total_T)
    logits = logits.contiguous()
    num_rows = logits.shape[0]
    spec.check_logits(logits if logits.dim() == 2 else logits[:, None], 1)
    row_max_T, total_T = (spec.row_values(n, x, num_rows) for n, x in (("row_max", row_max_T), ("total", total_T)))
    _kept, divisors = _divisors(temperature, num_rows)
    out = torch.empty_like(logits)
    loops.finish(
        logits.data_ptr(), divisors, row_max_T.data_ptr(), total_T.data_ptr(), out.data_ptr(),
        num_rows, logits.shape[1] if logits.dim() == 2 else 1,
    )  # fmt: skip
    return out


def logprobs(logits_TV: Tensor, temperature: Temperature = 1.0, *, num_leaves: int = 1) -> Tensor:
    """fp32 [T, V]: log-probabilities of whole rows."""
    m = row_max(logits_TV, temperature)
    return finish(logits_TV, m, total(leaf_sums(logits_TV, m, num_leaves, temperature)), temperature)


def _token(
    logits_TV: Tensor, ids_T: Tensor, temperature: Temperature, num_leaves: int
) -> tuple[Tensor, Tensor, Tensor]:
    m = row_max(logits_TV, temperature)
    sums = total(leaf_sums(logits_TV, m, num_leaves, temperature))
    return finish(logits_TV.gather(1, ids_T[:, None])[:, 0], m, sums, temperature), m, sums


def token_logprobs(logits_TV: Tensor, ids_T: Tensor, temperature: Temperature = 1.0, *, num_leaves: int = 1) -> Tensor:
    """fp32 [T]: the log-probability of one token per row, the bits that `logprobs` has there; differentiable."""
    spec.check_logits(logits_TV, num_leaves)
    spec.check_ids(ids_T, *logits_TV.shape)
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
    spec.check_host(grad_T, logits_TV, ids_T, row_max_T, total_T)
    spec.check_logits(logits_TV, 1)
    num_rows, size = logits_TV.shape
    logits_TV, ids_T = logits_TV.contiguous(), ids_T.contiguous()
    named = (("grad", grad_T), ("row_max", row_max_T), ("total", total_T))
    grad_T, row_max_T, total_T = (spec.row_values(name, x, num_rows) for name, x in named)
    _kept, divisors = _divisors(temperature, num_rows)
    out = torch.empty_like(logits_TV)
    loops.gradient(
        grad_T.data_ptr(), logits_TV.data_ptr(), divisors, ids_T.data_ptr(), row_max_T.data_ptr(), total_T.data_ptr(),
        out.data_ptr(), num_rows, size, first_id,
    )  # fmt: skip
    return out


def entropy(logits_TV: Tensor, temperature: Temperature = 1.0, *, num_leaves: int = 1) -> Tensor:
    """fp32 [T]: log(total) - sum(e (x - m)) / total, e = exp(x - m), a term with e = 0 being 0; differentiable."""
    spec.check_logits(logits_TV, num_leaves)
    return backward.entropy(_entropy, logits_TV, temperature, num_leaves)


def _entropy(logits_TV: Tensor, temperature: Temperature, num_leaves: int) -> tuple[Tensor, Tensor, Tensor]:
    m = row_max(logits_TV, temperature)
    sums = total(_leaf_sums(logits_TV, m, num_leaves, temperature, False))
    weighted = total(_leaf_sums(logits_TV, m, num_leaves, temperature, True))
    log_total = 0.0 - finish(torch.zeros_like(m), torch.zeros_like(m), sums)
    return log_total - weighted / sums, m, sums
