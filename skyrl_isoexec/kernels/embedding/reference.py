"""Embedding in eager PyTorch: the definition. Row t of the result is row ids[t] of the table, bit for bit."""

from torch import Tensor

from skyrl_isoexec.kernels.embedding import spec


def embedding(ids_T: Tensor, w_VH: Tensor) -> Tensor:
    """Rows [T, H] of the table, in its dtype. Refuses what `spec` refuses; IndexError for an id outside the table."""
    spec.check(ids_T, w_VH)
    if ids_T.numel() and not 0 <= int(ids_T.min()) <= int(ids_T.max()) < w_VH.shape[0]:
        raise IndexError(f"embedding: ids from {int(ids_T.min())} to {int(ids_T.max())}, but {w_VH.shape[0]} rows")
    return w_VH[ids_T]
