"""The stock arm of a comparison: transformers' own model class in Megatron's training stack, nothing of ours in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint


class NativeModel(MegatronModule):
    """A transformers causal language model as the only stage; refuses packed micro-batches."""

    model_type = ModelType.encoder_or_decoder
    pre_process = post_process = True
    vp_stage = None

    def __init__(self, config: TransformerConfig, checkpoint: Path | str, dtype: torch.dtype) -> None:
        super().__init__(config)
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(str(checkpoint), dtype=dtype, attn_implementation="sdpa")
        self.share_embeddings_and_output_weights = bool(self.model.config.tie_word_embeddings)

    def set_input_tensor(self, input_tensor: Any) -> None:
        """There is no previous stage."""

    def shared_embedding_or_output_weight(self) -> torch.Tensor:
        """The output head's weight."""
        return self.model.get_output_embeddings().weight

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Logits [B, S, V] fp32 of int64 ids [B, S], left-aligned; causal, so that trailing padding is unseen."""
        if packed_seq_params is not None:
            raise ValueError("the native trainer takes no packed batch: set trainer.remove_microbatch_padding=false")
        return self.model(input_ids=input_ids, use_cache=False).logits.float()

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Every parameter once, whole."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        tensors = {f"model.{name}": p for name, p in self.model.named_parameters()}
        group = parallel_state.get_tensor_model_parallel_group()
        return make_sharded_tensors_for_checkpoint(
            tensors, prefix, {}, sharded_offsets, tp_group=group, dp_cp_group=metadata["dp_cp_group"]
        )

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """As torch's, with a tied head filled from the embedding that it is."""
        state = dict(state_dict)
        for name, _ in self.named_parameters(remove_duplicate=False):
            if name not in state and self.share_embeddings_and_output_weights:
                state[name] = state["model.model.embed_tokens.weight"]
        return super().load_state_dict(state, strict=strict, assign=assign)

    def export(self) -> dict[str, torch.Tensor]:
        """Parameters by checkpoint name: all that a checkpoint of a model without experts has."""
        return {name: p.detach() for name, p in self.model.named_parameters()}
