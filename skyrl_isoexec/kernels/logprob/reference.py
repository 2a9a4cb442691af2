"""Log-probabilities in eager PyTorch: the definition of the order of their arithmetic.

Every operation rounds separately to fp32, except the logarithm. What must stay equal: a row's bits depend on that row,
its temperature and the number of leaves, never on other rows, on the token asked for, or on how many ranks hold the
vocabulary.

Order, for one row:

1. x = logits / temperature, an IEEE division; at temperature 1 the logits themselves.
2. m = the exact maximum, with -0 counted as +0; NaN if any x is NaN.
3. The vocabulary is cut into `num_leaves` contiguous leaves. In a leaf, element i adds exp(x_i - m) to lane i % 16, i
   ascending from 0 at the leaf's start; lanes are added by a balanced tree.
4. Leaves are added by a balanced tree, lower index left: the total.
5. log(total) in float64 by a stated series, rounded once.
6. logprob = (x - m) - log(total). Where the total is NaN (a NaN or +inf logit, or only -inf), the row is the quiet NaN
   0x7fc00000.

The pieces `row_max`, `leaf_sums`, `total`, `finish` let ranks that hold slices of the vocabulary follow the same order.

Shapes: T rows (tokens), V vocabulary or a slice of it, L leaves.
"""

import torch
from torch import Tensor

from skyrl_isoexec.kernels.logprob import backward, series, spec
from skyrl_isoexec.kernels.logprob.spec import Temperature
from skyrl_isoexec.kernels.numeric import exp, lane_sum, tree


def divide(logits_TV: Tensor, temperature: Temperature) -> Tensor:
    """x [T, V] (or [T]): the logits by their row's temperature."""
    divisor = spec.temperatures(temperature, logits_TV.shape[0])
    return logits_TV if divisor is None else logits_TV / divisor.view(-1, *[1] * (logits_TV.dim() - 1))


def row_max(logits_TV: Tensor, temperature: Temperature = 1.0) -> Tensor:
    """fp32 [T]: maximum of each row; ranks combine theirs with any exact, NaN-propagating maximum."""
    spec.check_logits(logits_TV, 1)
    return divide(logits_TV, temperature).amax(1) + 0.0


def _leaf_terms(term_TV: Tensor, num_leaves: int) -> Tensor:
    """[L, T]: sums of the terms of each leaf, 16 lanes ascending, then their tree."""
    num_rows, size = term_TV.shape
    return lane_sum(term_TV.view(num_rows, num_leaves, size // num_leaves)).T


def leaf_sums(logits_TV: Tensor, row_max_T: Tensor, local_leaves: int, temperature: Temperature = 1.0) -> Tensor:
    """fp32 [L, T]: each local leaf's sum of exp(x - maximum)."""
    spec.check_logits(logits_TV, local_leaves)
    return _leaf_terms(exp(divide(logits_TV, temperature) - row_max_T[:, None]), local_leaves)


def total(sums_LT: Tensor) -> Tensor:
    """fp32 [T]: balanced tree over all leaves."""
    spec.check_leaves(sums_LT)
    return tree(sums_LT)


def log(total_T: Tensor) -> Tensor:
    """Logarithm of positive normal fp32 numbers by 2 atanh((f - 1) / (f + 1)) in float64, rounded once to fp32."""
    bits = total_T.contiguous().view(torch.int32)
    exponent = ((bits >> 23) - 127).double()
    f = ((bits & 0x7FFFFF) | 0x3F800000).view(torch.float32).double()
    exponent, f = torch.where(f > series.SQRT2, exponent + 1.0, exponent), torch.where(f > series.SQRT2, f * 0.5, f)
    s = (f - 1.0) / (f + 1.0)
    z = s * s
    p = torch.full_like(z, series.COEFFICIENTS[0])
    for coefficient in series.COEFFICIENTS[1:]:
        p = p * z + coefficient
    return (exponent * series.LN2 + (s + s) * p).float()


def finish(logits: Tensor, row_max_T: Tensor, total_T: Tensor, temperature: Temperature = 1.0) -> Tensor:
    """Log-probabilities of whole rows [T, V] or of one logit per row [T], from the rows' maximum and total."""
    spec.check_logits(logits if logits.dim() == 2 else logits[:, None], 1)
    x = divide(logits, temperature)
    shape = (-1, *[1] * (x.dim() - 1))
    out = (x - row_max_T.view(shape)) - log(total_T).view(shape)
    return torch.where(total_T.isnan().view(shape), torch.tensor(float("nan")), out)


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
    p = exp(divide(logits_TV, temperature) - row_max_T[:, None]) / total_T[:, None]
    chosen = torch.arange(first_id, first_id + logits_TV.shape[1]) == ids_T[:, None]
    return divide(grad_T[:, None] * (chosen.float() - p), temperature)


def entropy(logits_TV: Tensor, temperature: Temperature = 1.0, *, num_leaves: int = 1) -> Tensor:
    """fp32 [T]: log(total) - sum(e (x - m)) / total, e = exp(x - m), a term with e = 0 being 0; differentiable."""
    spec.check_logits(logits_TV, num_leaves)
    return backward.entropy(_entropy, logits_TV, temperature, num_leaves)


def _entropy(logits_TV: Tensor, temperature: Temperature, num_leaves: int) -> tuple[Tensor, Tensor, Tensor]:
    m = row_max(logits_TV, temperature)
    shifted = divide(logits_TV, temperature) - m[:, None]
    e = exp(shifted)
    sums = total(_leaf_terms(e, num_leaves))
    weighted = total(_leaf_terms(torch.where(e == 0, e, e * shifted), num_leaves))
    log_total = 0.0 - finish(torch.zeros_like(m), torch.zeros_like(m), sums)
    return log_total - weighted / sums, m, sums
