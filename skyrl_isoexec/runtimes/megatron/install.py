"""Build the trainer's model inside Megatron: configuration, stage, checkpoint, distributed data parallelism.

The process groups must exist (`megatron.core.parallel_state`). Nothing is built at import; `build` says what it built.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer import TransformerConfig

from ...model.checkpoint import iter_tensors, load, read_config
from ...model.config import DecoderConfig
from ...model.decoder import Decoder
from ...model.families import from_hf
from ...schedule.schedule import Schedule
from .adapter import MegatronDecoder
from .axes import expert_parallel_axis, tensor_parallel_axis
from .native import NativeModel
from .router import check_router


def transformer_config(model: DecoderConfig, **overrides: Any) -> TransformerConfig:
    """Megatron's description of the decoder for this process's groups. Keyword arguments override its fields.

    ValueError for sequence or context parallelism, which this model has no proven layout for, and for what a router is
    asked and does not compute.
    """
    check_router(model, overrides)
    dtype = getattr(torch, model.dtype)
    cuda = torch.cuda.is_available()
    fields: dict[str, Any] = {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_heads,
        "num_query_groups": model.num_kv_heads,
        "kv_channels": model.head_dim,
        "ffn_hidden_size": model.intermediate_size or model.moe_intermediate_size,  # of no layer of Megatron's own
        "layernorm_epsilon": model.rms_norm_eps,
        "add_bias_linear": False,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "use_cpu_initialization": not cuda,
        "gradient_accumulation_fusion": False,
        "deallocate_pipeline_outputs": cuda,  # gloo sends from the buffer that this would free
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",  # asked for with variable lengths, also of a dense model
    }
    if model.has_experts:
        fields |= {
            "num_moe_experts": model.num_experts,
            "moe_ffn_hidden_size": model.moe_intermediate_size,
            "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
            "expert_tensor_parallel_size": 1,
        }
    fields.update(overrides)
    for name in ("sequence_parallel", "context_parallel_size"):
        if fields.get(name, False) not in (False, None, 1):
            raise ValueError(f"TransformerConfig.{name} = {fields[name]} is not supported by the unified model")
    return TransformerConfig(**fields)


def stage_layers(num_layers: int, first_dense_layers: int = 0) -> range:
    """Layers of this pipeline stage; ValueError if the stages cannot be equal, or one of them would be dense alone.

    Megatron keeps experts' states in an optimizer of their own, and resumes a run if every stage has one.
    """
    size = parallel_state.get_pipeline_model_parallel_world_size()
    rank = parallel_state.get_pipeline_model_parallel_rank()
    if num_layers % size:
        raise ValueError(f"num_layers = {num_layers} is not divisible by pipeline-parallel size {size}")
    per_stage = num_layers // size
    if per_stage <= first_dense_layers:
        raise ValueError(
            f"pipeline-parallel size {size} makes stages of {per_stage} layers, and {first_dense_layers} come before "
            "those with experts; choose a smaller size"
        )
    return range(rank * per_stage, (rank + 1) * per_stage)


def build(
    checkpoint: Path | str,
    implementations: str | Mapping[str, str],
    schedule: Schedule,
    *,
    dtype: str,
    config_overrides: Mapping[str, Any],
) -> MegatronDecoder:
    """This rank's stage of the unified model with the weights of a Hugging Face checkpoint folder.

    `implementations` is as of `load_kernels`. `dtype` is that of weights and activations, whatever the checkpoint's.
    Errors name the tensor or field.
    """
    from ...kernels.bundle import load_kernels  # here, so that the native arm loads none of them

    model = from_hf(read_config(checkpoint), dtype=dtype)
    config = transformer_config(model, **config_overrides)
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    layers = stage_layers(model.num_layers, model.first_dense_layers)
    decoder = Decoder(
        model,
        load_kernels(implementations, schedule),
        tensor_parallel_axis(),
        schedule,
        expert_axis=expert_parallel_axis(model),
        device="cuda" if torch.cuda.is_available() else None,
        first_layer=layers.start,
        last_layer=layers.stop,
        with_embedding=first,
        with_head=last,
    )
    load(decoder, iter_tensors(checkpoint))
    return MegatronDecoder(config, decoder, pre_process=first, post_process=last)


def build_native(checkpoint: Path | str, *, dtype: str, config_overrides: Mapping[str, Any]) -> NativeModel:
    """The stock model of transformers in the same Megatron stack; one rank holds it whole."""
    sizes = {
        "tensor": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
    }
    if set(sizes.values()) != {1}:
        raise ValueError(f"the native trainer holds its model whole: parallel sizes are {sizes}, all must be 1")
    config = transformer_config(from_hf(read_config(checkpoint), dtype=dtype), **config_overrides)
    return NativeModel(config, checkpoint, getattr(torch, dtype))


def distribute(module: MegatronDecoder | NativeModel, options: Mapping[str, Any]) -> DistributedDataParallel:
    """Megatron's data parallelism with the distributed optimizer's buffers around a stage."""
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True)
    for name, value in options.items():
        if not hasattr(ddp, name):
            raise ValueError(f"DistributedDataParallelConfig has no field {name!r}")
        setattr(ddp, name, value)
    return DistributedDataParallel(module.config, ddp, module)
