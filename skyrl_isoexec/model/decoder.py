"""The decoder: embedding, layers, final norm and head, whole or one pipeline stage of it.

Module and parameter names are those of Hugging Face checkpoints, with global layer numbers in every stage. A layer maps
the residual stream to the residual stream, so a runtime may recompute it, or cut the pipeline, between any two layers.

Shapes: T tokens, H hidden, V vocabulary of this rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from skyrl_isoexec.model.attention import Attention
from skyrl_isoexec.model.axes import Axis
from skyrl_isoexec.model.config import DecoderConfig, check_partition
from skyrl_isoexec.model.gdn import GatedDeltaNet
from skyrl_isoexec.model.latent import LatentAttention
from skyrl_isoexec.model.layers import TORCH_DTYPES, ColumnLinear, Place, RMSNorm, VocabEmbedding
from skyrl_isoexec.model.mlp import MLP
from skyrl_isoexec.model.moe import MoE
from skyrl_isoexec.model.rope import rope_table
from skyrl_isoexec.model.sequences import Packed, Sequences

if TYPE_CHECKING:
    from skyrl_isoexec.kernels.bundle import Kernels
    from skyrl_isoexec.schedule.schedule import Schedule

EMBEDDING_NAME = "model.embed_tokens.weight"
HEAD_NAME = "lm_head.weight"


class Layer(nn.Module):
    """Pre-norm mixer of positions and MLP, dense or of experts, on the residual stream."""

    def __init__(self, config: DecoderConfig, index: int, place: Place) -> None:
        super().__init__()
        offset = 1.0 if config.zero_centred_norm else 0.0
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, place, offset=offset)
        if config.attends(index):
            self.self_attn = (LatentAttention if config.latent else Attention)(config, index, place)
        else:
            self.linear_attn = GatedDeltaNet(config, index, place)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, place, offset=offset)
        if config.mixes_experts(index):
            self.mlp = MoE(config, place)
        else:
            self.mlp = MLP(config.hidden_size, config.intermediate_size, place)
        self.attends = config.attends(index)

    def forward(
        self, x_TH: torch.Tensor, positions_T: torch.Tensor, cos_sin_PR: torch.Tensor, sequences: Sequences
    ) -> torch.Tensor:
        """x_TH after this layer, in the dtype of the residual stream."""
        y_TH = self.input_layernorm(x_TH)
        if self.attends:
            y_TH = self.self_attn(y_TH, positions_T, cos_sin_PR, sequences)
        else:
            y_TH = self.linear_attn(y_TH, sequences)
        y_TH, x_TH = self.post_attention_layernorm.add(y_TH, x_TH)
        return x_TH + self.mlp(y_TH)


class Decoder(nn.Module):
    """A stage of the model on one rank of the tensor-parallel axis; by default the whole model.

    With an `expert_axis`, rows travel over it to the ranks that have their experts; its ranks may have other tokens.
    Without one, experts are cut over the tensor-parallel axis: see `moe`. ValueError if a cut is not even.

    Layers first_layer .. last_layer-1 are built. A stage that has the head but not the embedding of a tied model holds
    its own copy as `lm_head.weight`, whose `tied_to` names the tensor it must stay equal to.
    """

    def __init__(
        self,
        config: DecoderConfig,
        kernels: Kernels,
        axis: Axis,
        schedule: Schedule,
        *,
        expert_axis: Axis | None = None,
        device: torch.device | str | None = None,
        first_layer: int = 0,
        last_layer: int | None = None,
        with_embedding: bool = True,
        with_head: bool = True,
    ) -> None:
        super().__init__()
        ep = None if expert_axis is None else expert_axis.size
        check_partition(config, num_leaves=schedule.num_leaves, tp=axis.size, ep=ep)
        last_layer = config.num_layers if last_layer is None else last_layer
        if not 0 <= first_layer <= last_layer <= config.num_layers:
            raise ValueError(f"layers {first_layer} .. {last_layer} are not within 0 .. {config.num_layers}")
        if kernels is not None:
            kernels.need(config.operators)
        self.config, self.axis, self.kernels, self.schedule = config, axis, kernels, schedule
        self.axes = {"tp": axis, "ep": expert_axis}
        """By the names in `Shard.axis`."""
        self.layer_indices = range(first_layer, last_layer)
        place = Place(kernels, axis, schedule.num_leaves, TORCH_DTYPES[config.dtype], device, expert_axis)
        self.model = nn.Module()
        if with_embedding:
            self.model.embed_tokens = VocabEmbedding(config.vocab_size, config.hidden_size, place)
        self.model.layers = nn.ModuleDict({str(i): Layer(config, i, place) for i in self.layer_indices})
        if with_head:
            offset = 1.0 if config.zero_centred_norm else 0.0
            self.model.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, place, offset=offset)
            self.lm_head = ColumnLinear(config.hidden_size, config.vocab_size, False, place)
            if config.tied_head and with_embedding:
                self.lm_head.weight = self.model.embed_tokens.weight
            elif config.tied_head:
                self.lm_head.weight.tied_to = EMBEDDING_NAME
        table = torch.empty(0, device="meta") if str(device) == "meta" else rope_table(config, device)
        self.register_buffer("cos_sin_PR", table, persistent=False)

    def end_to_end(self, cu_seqlens: torch.Tensor) -> Packed:
        """Whole sequences of this decoder, laid end to end at int32 `cu_seqlens`."""
        return Packed(self.kernels, self.config, self.axis.size, cu_seqlens)

    def embed(self, ids_T: torch.Tensor) -> torch.Tensor:
        """x_TH of token ids (int64)."""
        return self.model.embed_tokens(ids_T)

    def layer(self, index: int, x_TH: torch.Tensor, positions_T: torch.Tensor, sequences: Sequences) -> torch.Tensor:
        """x_TH after layer `index` (numbered over the whole model)."""
        return self.model.layers[str(index)](x_TH, positions_T, self.cos_sin_PR, sequences)

    def layers(self, x_TH: torch.Tensor, positions_T: torch.Tensor, sequences: Sequences) -> torch.Tensor:
        """x_TH after all layers of this stage."""
        for layer in self.model.layers.values():
            x_TH = layer(x_TH, positions_T, self.cos_sin_PR, sequences)
        return x_TH

    def norm(self, x_TH: torch.Tensor) -> torch.Tensor:
        """Final norm of the residual stream."""
        return self.model.norm(x_TH)

    def head(self, y_TH: torch.Tensor) -> torch.Tensor:
        """fp32 logits [T, V] of this rank's part of the vocabulary, from normed rows: the accumulator, not rounded."""
        return self.lm_head(self.axis.copy_in(y_TH), torch.float32)

    def logits(self, x_TH: torch.Tensor) -> torch.Tensor:
        """fp32 logits [T, V] of this rank's part of the vocabulary, from the residual stream."""
        return self.head(self.norm(x_TH))

    def full_logits(self, x_TH: torch.Tensor) -> torch.Tensor:
        """fp32 logits [T, vocab_size] on every rank."""
        return self.axis.all_gather(self.logits(x_TH), dim=1)

    def join(self) -> None:
        """For an engine whose kernels read weights as they are: linears of one input become one product."""
        for module in self.modules():
            if module is not self and hasattr(module, "join"):
                module.join()

    def refresh_packed(self) -> None:
        """(Re)build every derived weight layout in place: after loading, and after each weight sync of an engine."""
        for module in self.modules():
            if module is not self and hasattr(module, "refresh_packed"):
                module.refresh_packed()
