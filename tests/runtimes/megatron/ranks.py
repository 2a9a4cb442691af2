"""One rank of the unified model in Megatron's stack. Run as a script: LAYOUT CHECKPOINT OUTPUT, with torch's variables.

Scores a fixed batch (no gradients), probes, trains two steps with recomputation and the distributed optimizer, scores
again, saves, trains a third step, loads into a fresh model, trains the third step once more, and exports.
"""

import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

LAYOUTS = {"single": (1, 1), "tp2": (2, 1), "pp2": (1, 2), "dp2": (1, 1)}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
ROWS, LENGTH, VOCABULARY, LEAVES = 4, 12, 32, 4


def batches() -> list[torch.Tensor]:
    """Two micro-batches of token ids [2, LENGTH]."""
    generator = torch.Generator().manual_seed(3)
    return list(torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator).split(2))


class Trainer:
    """Model, optimizer and schedule of one rank."""

    def __init__(self, checkpoint: str, dtype: str) -> None:
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        from skyrl_isoexec.runtimes.megatron.install import build, distribute
        from skyrl_isoexec.runtimes.megatron.logprob import token_logprobs
        from skyrl_isoexec.schedule import Schedule

        schedule = Schedule(num_leaves=LEAVES, kv_block=16, kv_partition=32)
        module = build(checkpoint, "cpu", schedule, dtype=dtype, config_overrides=RECOMPUTE)
        self.model = distribute(module, {})
        stage = module.stage
        self.logprobs = token_logprobs(stage.kernels, stage.axis, LEAVES)
        half = dtype == "bfloat16"
        options = OptimizerConfig(
            optimizer="adam", lr=1e-2, bf16=half, params_dtype=stage.cos_sin_PD.dtype, use_distributed_optimizer=True
        )
        options.params_dtype = torch.bfloat16 if half else torch.float32
        self.optimizer = get_megatron_optimizer(options, [self.model])
        module.config.finalize_model_grads_func = finalize_model_grads
        module.config.grad_scale_func = self.optimizer.scale_loss

    def run(self, micro: list[torch.Tensor], *, train: bool) -> torch.Tensor | None:
        """Token log-probabilities [ROWS, LENGTH - 1] on the last stage; with `train` also one optimizer step."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.model.train(train)
        if train:
            self.model.zero_grad_buffer()

        def loss(ids: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, dict]:
            values = self.logprobs(logits[:, :-1].contiguous(), ids[:, 1:].contiguous())
            return -values.mean(), {"logprobs": values.detach()}

        def forward(iterator, model):
            ids = next(iterator)
            return model(ids), partial(loss, ids)

        with torch.set_grad_enabled(train):
            found = get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=iter(micro),
                model=[self.model],
                num_microbatches=len(micro),
                seq_length=LENGTH,
                micro_batch_size=2,
                forward_only=not train,
            )
        if train:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return torch.cat([one["logprobs"] for one in found]) if found else None

    def sharded(self, *, loading: bool) -> dict:
        """What Megatron's distributed checkpoint saves and loads."""
        from megatron.core import parallel_state

        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        metadata = {"distrib_optim_sharding_type": "fully_reshardable", "dp_cp_group": group}
        model = self.model.module.sharded_state_dict(metadata=metadata)
        optimizer = self.optimizer.sharded_state_dict(model, is_loading=loading, metadata=metadata)
        return {"model": model, "optimizer": optimizer}


def main(layout: str, dtype: str, checkpoint: str, output: str) -> None:
    """The script; rank files of results are written to `output`."""
    from megatron.core import dist_checkpointing, parallel_state, tensor_parallel

    from skyrl_isoexec.runtimes.megatron.facts import probe
    from skyrl_isoexec.runtimes.megatron.weights import export, shapes

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    tp, pp = LAYOUTS[layout]
    parallel_state.initialize_model_parallel(tp, pp)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    micro = batches()
    size = parallel_state.get_data_parallel_world_size()
    mine = micro[parallel_state.get_data_parallel_rank() :: size]
    trainer = Trainer(checkpoint, dtype)
    result = {"before": trainer.run(micro, train=False), "probe": probe(trainer.model)}
    result["training"] = [trainer.run(mine, train=True) for _ in range(2)]
    result["after"] = trainer.run(micro, train=False)
    saved = Path(output) / "saved"
    if dist.get_rank() == 0:
        saved.mkdir()
    dist.barrier()
    dist_checkpointing.save(trainer.sharded(loading=False), str(saved))
    trainer.run(mine, train=True)
    result["third"] = dict(export(trainer.model))
    fresh = Trainer(checkpoint, dtype)
    state = dist_checkpointing.load(fresh.sharded(loading=True), str(saved))
    fresh.model.load_state_dict(state["model"])
    fresh.optimizer.load_state_dict(state["optimizer"])
    fresh.run(mine, train=True)
    result["resumed"] = dict(export(fresh.model))
    result["shapes"] = shapes(trainer.model)
    torch.save(result, Path(output) / f"rank{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
