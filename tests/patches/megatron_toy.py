"""A toy decoder of our own in Megatron's training stack: sharded embedding, residual blocks, sharded head.

The tests of the megatron-core patches use it in their own process. For several ranks this file is the script of one:
RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set, and the arguments are a layout and a folder for its checkpoint.
"""

import json
import sys
from pathlib import Path

import torch

VOCABULARY, HIDDEN, INNER, LAYERS, LENGTH, ROWS = 32, 16, 32, 2, 8, 4
CLIP = 0.5
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LAYOUTS = {"tp2": {"tp": 2}, "pp2": {"pp": 2}, "dp2": {}}


def start_world(tp: int = 1, pp: int = 1) -> None:
    """Joins the process group that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe."""
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("nccl" if DEVICE.type == "cuda" else "gloo")
    parallel_state.initialize_model_parallel(tp, pp)


def new_config(tp: int = 1, pp: int = 1, dtype: torch.dtype = torch.float32, recompute: bool = False, **more):
    """Megatron's configuration for the toy; on gloo, stage outputs must not be freed while they are being sent."""
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        ffn_hidden_size=INNER,
        num_attention_heads=2,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        add_bias_linear=False,
        gradient_accumulation_fusion=False,
        use_cpu_initialization=True,
        deallocate_pipeline_outputs=False,
        recompute_granularity="full" if recompute else None,
        recompute_method="uniform" if recompute else None,
        recompute_num_layers=1 if recompute else None,
        **more,
    )


def new_decoder(config):
    """This rank's part of the toy: sharded embedding, residual blocks and head; the same weights in every layout."""
    from megatron.core import parallel_state as mpu
    from megatron.core import tensor_parallel as tp
    from megatron.core.enums import ModelType
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

    F = torch.nn.functional
    tp_size, tp_rank = mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()
    pp_size, pp_rank = mpu.get_pipeline_model_parallel_world_size(), mpu.get_pipeline_model_parallel_rank()
    own_layers = range(LAYERS)[pp_rank * LAYERS // pp_size : (pp_rank + 1) * LAYERS // pp_size]

    class Decoder(MegatronModule):
        model_type = ModelType.encoder_or_decoder
        vp_stage = None
        share_embeddings_and_output_weights = False

        def __init__(self) -> None:
            super().__init__(config)
            self.pre_process, self.post_process = pp_rank == 0, pp_rank == pp_size - 1
            self.received, self.axis = None, {}
            if self.pre_process:
                self.add("embedding", (VOCABULARY, HIDDEN), 0, seed=1)
            for layer in own_layers:
                self.add(f"norm{layer}", (HIDDEN,), None, seed=10 * layer + 2)
                self.add(f"up{layer}", (INNER, HIDDEN), 0, seed=10 * layer + 3)
                self.add(f"down{layer}", (HIDDEN, INNER), 1, seed=10 * layer + 4)
            if self.post_process:
                self.add("head", (VOCABULARY, HIDDEN), 0, seed=5)

        def add(self, name: str, shape: tuple[int, ...], axis: int | None, seed: int) -> None:
            full = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.3
            own = full if axis is None else full.chunk(tp_size, axis)[tp_rank].contiguous()
            parameter = torch.nn.Parameter(own.to(DEVICE, config.params_dtype))
            if axis is not None:
                tp.set_tensor_model_parallel_attributes(parameter, True, axis, 1)
                self.axis[name] = axis
            self.register_parameter(name, parameter)

        def set_input_tensor(self, received) -> None:
            self.received = received[0] if isinstance(received, list) else received

        def block(self, layer: int, x):
            y = F.rms_norm(x, (HIDDEN,), getattr(self, f"norm{layer}"))
            y = F.silu(F.linear(tp.copy_to_tensor_model_parallel_region(y), getattr(self, f"up{layer}")))
            return x + tp.reduce_from_tensor_model_parallel_region(F.linear(y, getattr(self, f"down{layer}")))

        def forward(self, tokens, labels):
            x = self.received
            if self.pre_process:
                size = VOCABULARY // tp_size
                own = (tokens // size == tp_rank)[..., None]
                x = F.embedding(tokens % size, self.embedding) * own
                x = tp.reduce_from_tensor_model_parallel_region(x.transpose(0, 1).contiguous())
            for layer in own_layers:
                if config.recompute_granularity == "full":
                    x = tp.checkpoint(lambda x, layer=layer: self.block(layer, x), False, x)
                else:
                    x = self.block(layer, x)
            if not self.post_process:
                return x
            logits = F.linear(tp.copy_to_tensor_model_parallel_region(x), self.head).float()
            return tp.vocab_parallel_cross_entropy(logits, labels.transpose(0, 1).contiguous())

        def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
            raw = dict(self.named_parameters())
            tp_group, dp_group = mpu.get_tensor_model_parallel_group(), metadata["dp_cp_group"]
            return make_sharded_tensors_for_checkpoint(
                raw, prefix, self.axis, sharded_offsets, tp_group=tp_group, dp_cp_group=dp_group
            )

    return Decoder()


def new_trainer(config, distributed: bool):
    """The toy in Megatron's data parallelism, with its Adam."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module

    bf16 = config.params_dtype == torch.bfloat16
    model = Float16Module(config, new_decoder(config)) if bf16 else new_decoder(config)
    buffers = DistributedDataParallelConfig(use_distributed_optimizer=distributed, grad_reduce_in_fp32=True)
    model = DistributedDataParallel(config, buffers, model)
    settings = OptimizerConfig(
        lr=1e-2,
        weight_decay=0.0,
        clip_grad=CLIP,
        bf16=bf16,
        params_dtype=config.params_dtype,
        use_distributed_optimizer=distributed,
    )
    return model, get_megatron_optimizer(settings, [model])


def batch(step: int):
    """The global batch of one step, tokens and labels [ROWS, LENGTH], for every layout."""
    rows = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(100 + step))
    return rows[:, :-1].to(DEVICE), rows[:, 1:].to(DEVICE)


def run_schedule(model, config, step: int) -> list[torch.Tensor]:
    """Forward and backward of this rank's rows, one a microbatch; the loss of each on the last stage."""
    from megatron.core import parallel_state as mpu
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def forward(rows, model):
        losses = model(*next(rows))
        return losses, lambda losses: (losses.mean(), losses.detach().mean())

    size, rank = mpu.get_data_parallel_world_size(), mpu.get_data_parallel_rank()
    own = [tensor.chunk(size)[rank].split(1) for tensor in batch(step)]
    return get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter(list(zip(*own, strict=True))),
        model=model,
        num_microbatches=ROWS // size,
        seq_length=LENGTH,
        micro_batch_size=1,
        forward_only=False,
    )


def train(model, optimizer, config, steps: range) -> list[float]:
    """The loss of each step, over the global batch; empty off the last stage."""
    from megatron.core import parallel_state as mpu
    from megatron.core.distributed import finalize_model_grads

    losses = []
    for step in steps:
        config.finalize_model_grads_func, config.grad_scale_func = finalize_model_grads, optimizer.scale_loss
        model.zero_grad_buffer()
        optimizer.zero_grad()
        rows = run_schedule(model, config, step)
        assert optimizer.step()[0]
        if rows:
            loss = torch.stack(rows).mean()
            torch.distributed.all_reduce(loss, group=mpu.get_data_parallel_group())
            losses.append(loss.item() / mpu.get_data_parallel_world_size())
    return losses


def sharding(form: str = "fully_reshardable") -> dict[str, object]:
    """What sharded_state_dict() wants to know: the optimizer's format and the group over which weights are copies."""
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return {"distrib_optim_sharding_type": form, "dp_cp_group": group}


def sharded_state(model, optimizer, loading: bool, form: str):
    """The state of both as dist_checkpointing saves or loads it."""
    how = sharding(form)
    state = {"model": model.module.sharded_state_dict(metadata=how)}
    state["optimizer"] = optimizer.sharded_state_dict(state["model"], is_loading=loading, metadata=how)
    return state


def save(folder: Path, state) -> None:
    """Saves with the strategy that SkyRL uses."""
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

    folder.mkdir(exist_ok=True)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    strategy = FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy("torch_dist"), group)
    dist_checkpointing.save(state, str(folder), sharded_strategy=strategy)
    torch.distributed.barrier()


def load(folder: Path, state):
    """Loads with the strategy that SkyRL uses."""
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    strategy = FullyParallelLoadStrategyWrapper(get_default_load_sharded_strategy(str(folder)), group)
    return dist_checkpointing.load(state, str(folder), sharded_strategy=strategy)


def weights(model) -> dict[str, torch.Tensor]:
    """Copies of the model's parameters by name."""
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def train_and_resume(folder: Path, config, form: str) -> list[float]:
    """Three steps, a checkpoint, three more; then the last three again, resumed from it: the same bits."""
    trainer = new_trainer(config, distributed=True)
    before = train(*trainer, config, range(3))
    save(folder, sharded_state(*trainer, loading=False, form=form))
    after = train(*trainer, config, range(3, 6))
    model, optimizer = new_trainer(config, distributed=True)
    state = load(folder, sharded_state(model, optimizer, loading=True, form=form))
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    assert train(model, optimizer, config, range(3, 6)) == after
    resumed = weights(model)
    assert all(torch.equal(value, resumed[name]) for name, value in weights(trainer[0]).items())
    return before + after


if __name__ == "__main__":
    layout, folder = LAYOUTS[sys.argv[1]], Path(sys.argv[2])
    start_world(**layout)
    print(json.dumps(train_and_resume(folder, new_config(**layout, recompute=True), "fully_reshardable")))
    torch.distributed.destroy_process_group()
