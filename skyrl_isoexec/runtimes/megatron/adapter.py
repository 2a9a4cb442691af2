"""The unified decoder as a Megatron module: a pipeline stage that Megatron's DDP, optimizers, schedules, recomputation
and distributed checkpoints take as they take a model of their own.

Activations between stages are [S, B, H], as Megatron's schedules move them; inside, a micro-batch is T packed rows.
Padding at a row's end is computed like a token: no row before it can see it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint

from ...model.decoder import EMBEDDING_NAME, HEAD_NAME, Decoder
from ...model.shard import Shard


class MegatronDecoder(MegatronModule):
    """One pipeline stage of the decoder with Megatron's attributes on its parameters."""

    model_type = ModelType.encoder_or_decoder

    def __init__(self, config: TransformerConfig, decoder: Decoder, *, pre_process: bool, post_process: bool) -> None:
        super().__init__(config)
        self.stage = decoder  # not `decoder`: Megatron looks for layers with numbers of its own under that name
        self.pre_process, self.post_process, self.vp_stage = pre_process, post_process, None
        self.share_embeddings_and_output_weights = decoder.config.tied_head
        self.stage_input: torch.Tensor | None = None
        for name, parameter in decoder.named_parameters():
            dim = parameter.shard.dim
            if dim is not None:
                tensor_parallel.set_tensor_model_parallel_attributes(parameter, True, dim, 1)
            if parameter.shard.axis == "ep":
                parameter.allreduce = False  # its gradient is summed over the ranks that hold the same experts
            if name in (EMBEDDING_NAME, HEAD_NAME):
                parameter.is_embedding_or_output_parameter = True
                if decoder.config.tied_head and config.pipeline_model_parallel_size > 1:
                    parameter.shared_embedding = True
                    parameter.shared = not pre_process  # the copy is left out of the gradient norm

    def set_input_tensor(self, input_tensor: torch.Tensor | list[torch.Tensor | None] | None) -> None:
        """The previous stage's output [S, B, H]; None on the first stage."""
        self.stage_input = input_tensor[0] if isinstance(input_tensor, (list, tuple)) else input_tensor

    def shared_embedding_or_output_weight(self) -> torch.Tensor | None:
        """The weight that first and last stage of a tied model share, if this stage holds it."""
        if self.pre_process:
            return self.stage.model.embed_tokens.weight
        return self.stage.lm_head.weight if self.post_process else None

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **unknown: Any,
    ) -> torch.Tensor:
        """Logits [B, S, V / TP] fp32 on the last stage, activations [S, B, H] elsewhere.

        `input_ids` is int64 [B, S], left-aligned, or packed [1, T] with `packed_seq_params`. Positions count from each
        sequence's start, so `position_ids` and `attention_mask` say nothing more. TypeError for any other argument.
        """
        if unknown:
            raise TypeError(f"MegatronDecoder does not take {sorted(unknown)}")
        self.stage.kernels.case = "trainer_fwd" if torch.is_grad_enabled() else "trainer_fwd_no_autograd"
        batch, length = input_ids.shape if self.pre_process else self._stage_shape()
        if packed_seq_params is None:
            cu_seqlens = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=input_ids.device)
            positions_T = torch.arange(length, device=input_ids.device).repeat(batch)
        else:
            cu_seqlens = packed_seq_params.cu_seqlens_q_padded.to(torch.int32)
            starts_T = torch.repeat_interleave(cu_seqlens[:-1].long(), cu_seqlens.diff().long())
            positions_T = torch.arange(length, device=input_ids.device) - starts_T
        if self.pre_process:
            x_TH = self.stage.embed(input_ids.reshape(-1))
        else:
            x_TH = self.stage_input.transpose(0, 1).reshape(batch * length, -1)
        x_TH = self._layers(x_TH, positions_T, cu_seqlens)
        if not self.post_process:
            return x_TH.view(batch, length, -1).transpose(0, 1).contiguous()
        return self.stage.logits(x_TH).view(batch, length, -1)

    def _stage_shape(self) -> tuple[int, int]:
        length, batch, _ = self.stage_input.shape
        return batch, length

    def _layers(self, x_TH: torch.Tensor, positions_T: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        sequences = self.stage.end_to_end(cu_seqlens)
        recompute = self.config.recompute_granularity == "full" and self.training and torch.is_grad_enabled()
        for index in self.stage.layer_indices:
            if recompute:

                def run(rows: torch.Tensor, index: int = index) -> torch.Tensor:
                    return self.stage.layer(index, rows, positions_T, sequences)

                x_TH = tensor_parallel.checkpoint(run, False, x_TH)
            else:
                x_TH = self.stage.layer(index, x_TH, positions_T, sequences)
        return x_TH

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Sharded tensors under the state dict's names; a last stage's copy of a tied embedding is a replica of it.

        A parameter that is cut in blocks is a tensor for each of them, `<name>.<i>`: so it loads at any degree.
        """
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        groups = {
            "tp_group": parallel_state.get_tensor_model_parallel_group(),
            "dp_cp_group": metadata["dp_cp_group"],
        }
        of_experts = {
            "tp_group": parallel_state.get_expert_model_parallel_group(),
            "dp_cp_group": parallel_state.get_expert_data_parallel_group(),
        }
        sharded = {}
        for axis, over in (("tp", groups), ("ep", of_experts)):
            own = {f"stage.{name}": p for name, p in self.stage.named_parameters() if p.shard.axis == axis}
            dims = {name: p.shard.dim for name, p in own.items() if p.shard.dim is not None}
            sharded |= make_sharded_tensors_for_checkpoint(own, prefix, dims, sharded_offsets, **over)
        for name, parameter in self.stage.named_parameters():
            key = f"{prefix}stage.{name}"
            if parameter.shard.blocks:
                sharded[key] = _by_block(sharded[key], parameter.shard, sharded_offsets, groups)
            if hasattr(parameter, "tied_to"):
                copy = sharded[key]
                copy.key = f"{prefix}stage.{parameter.tied_to}"
                copy.replica_id = (1, *copy.replica_id[1:])
        return sharded

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As torch's, with a tied head filled from the embedding that it is."""
        state = dict(state_dict)
        if self.pre_process and self.post_process and self.stage.config.tied_head:
            state.setdefault(f"stage.{HEAD_NAME}", state[f"stage.{EMBEDDING_NAME}"])
        return super().load_state_dict(state, strict=strict, assign=assign)


def _by_block(
    whole: ShardedTensor, shard: Shard, offsets: tuple, groups: Mapping[str, dist.ProcessGroup]
) -> ShardedTensorFactory:
    """A parameter, or one of its optimizer's states, as a sharded tensor for each block."""

    @torch.no_grad()
    def build(key: str, part: torch.Tensor, replica_id: Any, flattened_range: slice | None) -> list[ShardedTensor]:
        if flattened_range is not None:
            raise ValueError(
                f"{key} is cut in blocks {shard.blocks} and cannot be saved as the flat range {flattened_range}; "
                "set distrib_optim_sharding_type to fully_reshardable or dp_reshardable"
            )
        return [
            make_tp_sharded_tensor_for_checkpoint(
                block, f"{key}.{i}", shard.dim, replica_id=replica_id, prepend_offsets=offsets, **groups
            )
            for i, block in enumerate(shard.split(part))
        ]

    def merge(blocks: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(blocks, shard.dim)

    return ShardedTensorFactory(whole.key, whole.data, build, merge, whole.replica_id)
