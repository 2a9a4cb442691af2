"""One chunk of the gated delta rule in eager PyTorch: the definition of the order of its chunk form.

Every product and every sum rounds separately to fp32; sums ascend from +0, one accumulator an element. What must stay
equal: row t of everything below depends on rows up to t alone, so rows may be computed together or one by one.

Order, for one value head, rows t of a chunk of C that starts from the snapshot S0, `narrow` to the model's dtype:

1. G_t = g_0 + ... + g_t.  L_ts = beta_t * (exp(G_t - G_s) * (k_t . k_s)) for s < t.
2. T = (I + L)^-1 by forward substitution: T_tj = 0 - L_t0 T_0j - ... - L_t,t-1 T_t-1,j for j < t, T_tt = 1, 0 above.
3. u = narrow(T) narrow(beta v), w = narrow(T) narrow((beta exp(G)) k).
4. v_new = narrow(u - narrow(w) S0): what row t writes into the state.
5. At the chunk's end, chain' = exp(G_last) * chain + narrow(exp(G_last - G) k)^T v_new, and S0' = narrow(chain').

Source: the WY form of DeltaNet (arXiv 2406.06484) with the decay of Gated DeltaNet (arXiv 2412.06464).

Shapes: V value heads, K key heads, D their widths, C rows of a chunk, M rows that are computed, S rows that are seen.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from skyrl_isoexec.kernels.numeric.gdn_rows import Rows
from skyrl_isoexec.kernels.numeric.reference import exp, narrow


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """fp32 memory of one open chunk, filled row by row; what a later row has not reached may be anything."""

    keys_KDC: Tensor
    """Keys as columns, so that scores vectorise over rows."""
    decay_VC: Tensor
    """G."""
    values_VCD: Tensor
    """narrow(beta v)."""
    decayed_VCD: Tensor
    """narrow((beta exp(G)) k)."""
    inverse_VCC: Tensor
    """T."""
    fresh_VCD: Tensor
    """v_new."""


def ordered(weights_VMS: Tensor, rows_VSD: Tensor, first: int | None = None) -> Tensor:
    """fp32 [V, M, D]: rows s, weighted and added in ascending order from +0.

    With `first`, row m is row first + m of a chunk and sees the rows s <= first + m alone.
    """
    total_VMD = torch.zeros(*weights_VMS.shape[:2], rows_VSD.shape[2], device=rows_VSD.device)
    for s, (weight_VM, row_VD) in enumerate(zip(weights_VMS.unbind(2), rows_VSD.unbind(1), strict=True)):
        unseen = 0 if first is None else max(s - first, 0)
        total_VMD[:, unseen:] += weight_VM[:, unseen:, None] * row_VD[:, None]
    return total_VMD


def by_value_head(x_nKD: Tensor, group: int) -> Tensor:
    """Rows of key heads as [V, n, D]."""
    return x_nKD.transpose(0, 1).repeat_interleave(group, 0)


def decays(chunk: Chunk, first: int, stop: int) -> Tensor:
    """exp(G_t - G_s) of rows t = first .. stop over s = 0 .. stop; meaningless where s > t."""
    return exp(chunk.decay_VC[:, first:stop, None] - chunk.decay_VC[:, None, :stop])


def substitute(lower_VMS: Tensor, inverse_VCC: Tensor, first: int) -> None:
    """Rows first .. first + M of T, in place, from those before and from L."""
    stop, identity = first + lower_VMS.shape[1], torch.eye(inverse_VCC.shape[2], device=inverse_VCC.device)
    total_VMC = torch.zeros(*lower_VMS.shape[:2], inverse_VCC.shape[2], device=inverse_VCC.device)
    for s in range(stop):
        if s >= first:
            inverse_VCC[:, s] = identity[s]
            inverse_VCC[:, s, :s] = total_VMC[:, s - first, :s]
        seen = max(s + 1 - first, 0)
        total_VMC[:, seen:] += -lower_VMS[:, seen:, s, None] * inverse_VCC[:, None, s]


def extend(chunk: Chunk, first: int, rows: Rows, snapshot_VDD: Tensor, dtype: torch.dtype) -> None:
    """Rows first, first + 1, ... of everything in `chunk`, in place."""
    stop = first + rows.g_nV.shape[0]
    group = rows.g_nV.shape[1] // rows.k_nKD.shape[1]
    chunk.keys_KDC[:, :, first:stop] = rows.k_nKD.permute(1, 2, 0)
    for t in range(first, stop):
        before = chunk.decay_VC[:, t - 1] if t else torch.zeros(())
        chunk.decay_VC[:, t] = before + rows.g_nV[t - first]
    k_VMD, v_VMD, beta_VM1 = by_value_head(rows.k_nKD, group), rows.v_nVD.transpose(0, 1), rows.beta_nV.T[..., None]
    keys_VDS = chunk.keys_KDC[:, :, :stop].repeat_interleave(group, 0)
    lower = beta_VM1 * (decays(chunk, first, stop) * ordered(k_VMD, keys_VDS))
    substitute(lower, chunk.inverse_VCC, first)
    grown = beta_VM1 * exp(chunk.decay_VC[:, first:stop, None])
    chunk.values_VCD[:, first:stop] = narrow(beta_VM1 * v_VMD, dtype)
    chunk.decayed_VCD[:, first:stop] = narrow(grown * k_VMD, dtype)
    inverse = narrow(chunk.inverse_VCC[:, first:stop, :stop], dtype).float()
    u = ordered(inverse, chunk.values_VCD[:, :stop], first)
    w = narrow(ordered(inverse, chunk.decayed_VCD[:, :stop], first), dtype).float()
    chunk.fresh_VCD[:, first:stop] = narrow(u - ordered(w, snapshot_VDD), dtype)


def close(chunk: Chunk, chain_VDD: Tensor, dtype: torch.dtype) -> None:
    """The chain after a whole chunk, in place."""
    last_V1 = chunk.decay_VC[:, -1:]
    keys_VDC = chunk.keys_KDC.repeat_interleave(chain_VDD.shape[0] // chunk.keys_KDC.shape[0], 0)
    weights_VDC = narrow(exp(last_V1 - chunk.decay_VC)[:, None] * keys_VDC, dtype).float()
    chain_VDD.copy_(exp(last_V1)[..., None] * chain_VDD + ordered(weights_VDC, chunk.fresh_VCD))
