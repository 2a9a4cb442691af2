"""Log-probabilities in eager PyTorch in the order of the Hopper kernel: the definition of its bits.

As `reference.py`, but for the sum of a leaf: it is cut into blocks of `BLOCK` elements from the leaf's start; a block,
filled up with zeros, is added by one balanced tree over neighbours, and blocks are added in ascending order.
"""

from torch import Tensor
from torch.nn.functional import pad

from skyrl_isoexec.kernels.logprob import spec
from skyrl_isoexec.kernels.logprob.reference import divide, finish, grad_logits, row_max, total
from skyrl_isoexec.kernels.logprob.spec import Temperature
from skyrl_isoexec.kernels.numeric import exp, lane_tree

__all__ = ["finish", "grad_logits", "leaf_sums", "logprobs", "row_max", "token_logprobs", "total"]

BLOCK = 4096
"""Elements of the vocabulary that one tree adds; decides bits."""


def leaf_sums(logits_TV: Tensor, row_max_T: Tensor, local_leaves: int, temperature: Temperature = 1.0) -> Tensor:
    """fp32 [L, T]: each local leaf's sum of exp(x - maximum)."""
    spec.check_logits(logits_TV, local_leaves)
    num_rows, size = logits_TV.shape
    term = exp(divide(logits_TV, temperature) - row_max_T[:, None]).view(num_rows, local_leaves, size // local_leaves)
    blocks = pad(term, (0, -term.shape[2] % BLOCK)).unflatten(2, (-1, BLOCK))
    blocks = lane_tree(blocks)
    sums = blocks[:, :, 0]
    for i in range(1, blocks.shape[2]):
        sums = sums + blocks[:, :, i]
    return sums.T.contiguous()


def logprobs(logits_TV: Tensor, temperature: Temperature = 1.0, *, num_leaves: int = 1) -> Tensor:
    """fp32 [T, V]: log-probabilities of whole rows."""
    m = row_max(logits_TV, temperature)
    return finish(logits_TV, m, total(leaf_sums(logits_TV, m, num_leaves, temperature)), temperature)


def token_logprobs(logits_TV: Tensor, ids_T: Tensor, temperature: Temperature = 1.0, *, num_leaves: int = 1) -> Tensor:
    """fp32 [T]: the log-probability of one token per row."""
    return logprobs(logits_TV, temperature, num_leaves=num_leaves).gather(1, ids_T[:, None])[:, 0]
