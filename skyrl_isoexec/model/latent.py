"""Multi-head latent attention over a runtime's sequences, in the latent (absorbed) form in every case.

Parameters have the names of Hugging Face's Glm4MoeLiteAttention (transformers 5.8.0), which computes the expanded form.
A position's key is (normed latent | rotated part), the same for all heads; its value is the latent. A head's query and
output pass through its own rows of `kv_b_proj`, read as they lie.

Rounded to the dtype are: what each projection gives, the normed latents, the rotated parts of queries and keys, the
absorbed queries, what the attention gives in the latent, and a head's output.

Heads are cut over the axis. The projections down to the latents, their norms and the keys are whole on every rank, from
whole rows, so their gradients are whole there once those of the ranks' heads have been added: `copy_in` stands where
latents go to heads.

Shapes: T tokens, H hidden, N heads of this rank, D head width, P entries of it that are not rotated, R rotated ones, L
width of the latent, Q = L + R, V width of a value, F = N * V.
"""

from __future__ import annotations

import torch
from torch import nn

from skyrl_isoexec.model.config import DecoderConfig
from skyrl_isoexec.model.layers import ColumnLinear, Joined, Place, RMSNorm, RowLinear, parameter
from skyrl_isoexec.model.sequences import Sequences
from skyrl_isoexec.model.shard import Shard


class HeadProjections(nn.Module):
    """Between each head and the latent, by one weight [heads * (P + V), L]: a head's rows of keys, then of values."""

    def __init__(self, config: DecoderConfig, place: Place) -> None:
        super().__init__()
        self.widths = config.qk_nope_head_dim, config.v_head_dim
        self.weight = parameter((config.num_heads * sum(self.widths), config.kv_lora_rank), place.cut(0), place)
        self.place = place

    def absorb(self, q_TNP: torch.Tensor) -> torch.Tensor:
        """q_TNL whose products with latents are those of q_TNP with the keys made of them."""
        keys_NPL, _ = self._parts()
        return self.place.kernels.head_linear(q_TNP, keys_NPL.mT)

    def values(self, o_TNL: torch.Tensor) -> torch.Tensor:
        """o_TNV of sums of latents."""
        _, values_NVL = self._parts()
        return self.place.kernels.head_linear(o_TNL, values_NVL)

    def _parts(self) -> tuple[torch.Tensor, ...]:
        return self.weight.unflatten(0, (-1, sum(self.widths))).split(self.widths, dim=1)


class LatentAttention(nn.Module):
    """Self-attention of layer `index`; heads are cut over the axis."""

    def __init__(self, config: DecoderConfig, index: int, place: Place) -> None:
        super().__init__()
        hidden, heads, latent = config.hidden_size, config.num_heads, config.kv_lora_rank
        bias, query = config.qkv_bias, config.q_lora_rank
        if query is None:
            self.q_proj = ColumnLinear(hidden, heads * config.head_dim, False, place)
        else:
            self.q_a_proj = ColumnLinear(hidden, query, bias, place, shard=Shard())
            self.q_a_layernorm = _norm(query, config, place)
            self.q_b_proj = ColumnLinear(query, heads * config.head_dim, False, place)
        self.kv_a_proj_with_mqa = ColumnLinear(hidden, config.latent_width, bias, place, shard=Shard())
        self.kv_a_layernorm = _norm(latent, config, place)
        self.kv_b_proj = HeadProjections(config, place)
        self.o_proj = RowLinear(heads * config.v_head_dim, hidden, config.o_bias, place)
        self.head = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.key = latent, config.qk_rope_head_dim
        self.index, self.interleaved, self.place = index, config.rope_interleaved, place
        self.joined: Joined | None = None

    def join(self) -> None:
        """From now on one product computes the latents of query and key, if the query has one, see `Joined`."""
        if hasattr(self, "q_a_proj"):
            self.joined = Joined((self.q_a_proj, self.kv_a_proj_with_mqa))

    def forward(
        self, x_TH: torch.Tensor, positions_T: torch.Tensor, cos_sin_PR: torch.Tensor, sequences: Sequences
    ) -> torch.Tensor:
        """y_TH, whole on every rank."""
        axis = self.place.axis
        queries, keys = self._project(x_TH)
        q_TNP, q_TNR = queries.unflatten(1, (-1, sum(self.head))).split(self.head, dim=2)
        latent_TL, k_TR = keys.split(self.key, dim=1)
        k_T1R = self._rotate(k_TR[:, None], positions_T, cos_sin_PR)
        c_TQ = axis.copy_in(torch.cat((self.kv_a_layernorm(latent_TL), k_T1R[:, 0]), dim=1))
        q_TNR = self._rotate(q_TNR, positions_T, cos_sin_PR)
        q_TNQ = torch.cat((self.kv_b_proj.absorb(q_TNP), q_TNR), dim=2)
        o_TNL = sequences.attend_latent(self.index, q_TNQ, c_TQ)
        return self.o_proj(self.kv_b_proj.values(o_TNL).flatten(1))

    def _project(self, x_TH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [T, N * D], and [T, Q] of the latent and the rotated part of the key."""
        copy_in = self.place.axis.copy_in
        if hasattr(self, "q_proj"):
            return self.q_proj(copy_in(x_TH)), self.kv_a_proj_with_mqa(x_TH)
        if self.joined is None:
            latents, keys = self.q_a_proj(x_TH), self.kv_a_proj_with_mqa(x_TH)
        else:
            latents, keys = self.joined(x_TH)
        return self.q_b_proj(copy_in(self.q_a_layernorm(latents))), keys

    def _rotate(self, x_TNR: torch.Tensor, positions_T: torch.Tensor, cos_sin_PR: torch.Tensor) -> torch.Tensor:
        """x_TNR rotated. Neighbours are moved apart first, to one place of either half, and stay there.

        Queries and keys are moved alike, so their products are the same ones in another order.
        """
        if self.interleaved:
            x_TNR = x_TNR.unflatten(2, (-1, 2)).mT.flatten(2)
        return self.place.kernels.rope(x_TNR, positions_T, cos_sin_PR)


def _norm(width: int, config: DecoderConfig, place: Place) -> RMSNorm:
    return RMSNorm(width, config.latent_norm_eps, place)
