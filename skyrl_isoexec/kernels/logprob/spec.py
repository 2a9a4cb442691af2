"""What the log-probability functions accept: the checks every implementation runs first, and what temperature means.

Shapes: T rows (tokens), V vocabulary (or a rank's slice of it), L leaves.
"""

import math

import torch
from torch import Tensor

from skyrl_isoexec.schedule.tree import is_power_of_two

Temperature = float | Tensor


def check_logits(logits_TV: Tensor, num_leaves: int) -> None:
    """Refuse logits that are not fp32 [T, V > 0] (TypeError) or not a whole number of leaves (ValueError)."""
    if logits_TV.dtype != torch.float32 or logits_TV.dim() != 2:
        raise TypeError(f"logprob: logits are {logits_TV.dtype} {tuple(logits_TV.shape)}, not float32 [T, V]")
    size = logits_TV.shape[1]
    if not is_power_of_two(num_leaves):
        raise ValueError(f"logprob: num_leaves {num_leaves} is not a power of two")
    if size == 0 or size % num_leaves:
        raise ValueError(f"logprob: vocabulary size {size} is not a multiple of num_leaves {num_leaves}")


def check_host(*tensors: Tensor) -> None:
    """Refuse (TypeError) tensors whose memory compiled loops of the host cannot read."""
    for x in tensors:
        if not x.is_cpu:
            raise TypeError(f"logprob: the cpu implementation was given a tensor on {x.device}")


def check_leaves(sums_LT: Tensor) -> None:
    """Refuse (ValueError) leaf sums whose number is not a power of two: a part of the leaves, most likely."""
    if sums_LT.dim() != 2 or not is_power_of_two(sums_LT.shape[0]):
        raise ValueError(f"logprob: leaf sums {tuple(sums_LT.shape)} are not [L, T] with L a power of two")


def row_values(name: str, x_T: Tensor, num_rows: int) -> Tensor:
    """x_T contiguous; refuses (TypeError) anything but one fp32 number per row."""
    if x_T.dtype != torch.float32 or x_T.shape != (num_rows,):
        raise TypeError(f"logprob: {name} is {x_T.dtype} {tuple(x_T.shape)}, not float32 [{num_rows}]")
    return x_T.contiguous()


def check_ids(ids_T: Tensor, num_rows: int, size: int) -> None:
    """Refuse token ids that are not int64 [T] (TypeError) or lie outside [0, size) (ValueError)."""
    if ids_T.dtype != torch.int64 or ids_T.shape != (num_rows,):
        raise TypeError(f"logprob: token ids are {ids_T.dtype} {tuple(ids_T.shape)}, not int64 [{num_rows}]")
    if num_rows and not (0 <= int(ids_T.min()) and int(ids_T.max()) < size):
        raise ValueError(
            f"logprob: token ids {int(ids_T.min())}..{int(ids_T.max())} lie outside a vocabulary of {size}"
        )


def temperatures(temperature: Temperature, num_rows: int) -> Tensor | None:
    """fp32 [T] divisors, or None where the logits stay as they are (the number 1); ValueError for what is not > 0."""
    if isinstance(temperature, Tensor):
        if temperature.dtype != torch.float32 or temperature.shape != (num_rows,):
            raise TypeError(
                f"logprob: temperature is {temperature.dtype} {tuple(temperature.shape)}, not float32 [{num_rows}]"
            )
        if num_rows and not bool(((temperature > 0) & temperature.isfinite()).all()):
            raise ValueError("logprob: every temperature must be a finite number greater than 0")
        return temperature.contiguous()
    if temperature == 1.0:
        return None
    if not (temperature > 0.0 and math.isfinite(temperature)):
        raise ValueError(f"logprob: temperature {temperature} is not a finite number greater than 0")
    return torch.full((num_rows,), temperature, dtype=torch.float32)
