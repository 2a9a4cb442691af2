"""Ranks of the unified model in Megatron's stack, run by `main` in a process of its own.

It imports everything once and forks the ranks of one case after the other; each writes what it found, or why it failed.
A rank scores fixed batches (no gradients), probes, computes the same batches as training does, also in a wrong order,
trains two steps with recomputation and the distributed optimizer, each replica on its own part, scores again, saves,
trains a third step, loads into a fresh model, trains the third step once more, and exports. One of RESHARDS saves at
one tensor- and expert-parallel size and loads at others.
"""

import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from rank_cases import CHUNK, LAYOUTS, LEAVES, LENGTH, RAGGED, RECOMPUTE, RESHARDS, Micro, batches, packed, padded

PATIENCE = 200
"""Seconds for the ranks of one case."""


class Trainer:
    """Model, optimizer and schedule of one rank."""

    def __init__(self, checkpoint: str, dtype: str, **data_parallel: object) -> None:
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        from skyrl_isoexec.runtimes.megatron.install import build, distribute
        from skyrl_isoexec.runtimes.megatron.logprob import token_logprobs
        from skyrl_isoexec.schedule import Schedule

        schedule = Schedule(num_leaves=LEAVES, kv_block=16, kv_partition=32, gdn_chunk=CHUNK)
        module = build(checkpoint, "cpu", schedule, dtype=dtype, config_overrides=RECOMPUTE)
        self.model = distribute(module, data_parallel)
        stage = module.stage
        self.logprobs = token_logprobs(stage.kernels, stage.axis, LEAVES)
        half = dtype == "bfloat16"
        options = OptimizerConfig(
            optimizer="adam", lr=1e-2, bf16=half, params_dtype=stage.cos_sin_PR.dtype, use_distributed_optimizer=True
        )
        options.params_dtype = torch.bfloat16 if half else torch.float32
        self.optimizer = get_megatron_optimizer(options, [self.model])
        module.config.finalize_model_grads_func = finalize_model_grads
        module.config.grad_scale_func = self.optimizer.scale_loss

    def run(
        self, micro: Sequence[torch.Tensor | Micro], *, train: bool, lengths: Sequence[int] = (), step: bool = True
    ) -> torch.Tensor | None:
        """Token log-probabilities [rows, T - 1] on the last stage; with `train` also gradients and an optimizer step.

        The loss counts only the tokens of a row that are within `lengths`, if they are given.
        """
        from megatron.core.packed_seq_params import PackedSeqParams
        from megatron.core.pipeline_parallel import get_forward_backward_func

        micro = [one if isinstance(one, tuple) else (one, None) for one in micro]
        self.model.train(train)
        if train:
            self.model.zero_grad_buffer()

        def loss(ids: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, dict]:
            values = self.logprobs(logits[:, :-1].contiguous(), ids[:, 1:].contiguous())
            counted = [row[: length - 1] for row, length in zip(values, lengths, strict=True)] if lengths else [values]
            return -torch.cat([part.flatten() for part in counted]).mean(), {"logprobs": values.detach()}

        def forward(iterator: Iterator[Micro], model: torch.nn.Module) -> tuple[torch.Tensor, partial]:
            ids, bounds = next(iterator)
            bounds = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
            how = None if bounds is None else PackedSeqParams(qkv_format="thd", cu_seqlens_q_padded=bounds)
            return model(ids, packed_seq_params=how), partial(loss, ids)

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
        if train and step:
            _, self.norm, _ = self.optimizer.step()
            self.optimizer.zero_grad()
        return torch.cat([one["logprobs"] for one in found]) if found else None

    def gradients(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Of the tokens within RAGGED, by name."""
        self.run([ids], train=True, lengths=RAGGED, step=False)
        return self.held()

    def held(self) -> dict[str, torch.Tensor]:
        """The gradients of the last run, by name."""
        return {name: p.main_grad.clone() for name, p in self.trained()}

    def without_recomputation(self, micro: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, dict]:
        """Log-probabilities and gradients of a run that keeps every layer's activations."""
        config = self.model.module.config
        config.recompute_granularity = None
        found = self.run(micro, train=True, step=False), self.held()
        config.recompute_granularity = RECOMPUTE["recompute_granularity"]
        return found

    def exchanged(self, micro: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Log-probabilities of training in which linears, the head among them, exchange their first and last term.

        The head's sums are fp32 in a model of any dtype, so that no rounding hides the exchange.
        """
        kernels = self.model.module.stage.kernels
        stated = kernels.linear

        def linear(x_TK: torch.Tensor, w_NK: torch.Tensor, *rest: object, **named: object) -> torch.Tensor:
            order = torch.arange(w_NK.shape[1])
            order[[0, -1]] = order[[-1, 0]]
            return stated(x_TK[:, order], w_NK[:, order], *rest, **named)

        object.__setattr__(kernels, "linear", linear)
        found = self.run(micro, train=True, step=False)
        object.__setattr__(kernels, "linear", stated)
        return found

    def trained(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Parameters with a gradient: all but the bias of a router."""
        return ((name, p) for name, p in self.model.module.stage.named_parameters() if p.requires_grad)

    @torch.no_grad()
    def reduced(self, micro: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Full gradients by name, summed by Megatron over all replicas; for data parallelism that leaves them whole."""
        self.run(micro, train=True, step=False)
        stage = self.model.module.stage
        return {
            name: p.shard.join(stage.axes[p.shard.axis].stack_gather(p.main_grad).unbind(0)).clone()
            for name, p in stage.named_parameters()
        }

    def sharded(self, *, loading: bool) -> dict:
        """What Megatron's distributed checkpoint saves and loads."""
        from megatron.core import parallel_state

        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        metadata = {"distrib_optim_sharding_type": "fully_reshardable", "dp_cp_group": group}
        model = self.model.module.sharded_state_dict(metadata=metadata)
        optimizer = self.optimizer.sharded_state_dict(model, is_loading=loading, metadata=metadata)
        return {"model": model, "optimizer": optimizer}

    def save(self, folder: Path) -> None:
        """A distributed checkpoint, written as SkyRL writes it; collective."""
        from megatron.core import dist_checkpointing, parallel_state
        from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
        from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

        if dist.get_rank() == 0:
            folder.mkdir()
        dist.barrier()
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        strategy = FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy("torch_dist"), group)
        dist_checkpointing.save(self.sharded(loading=False), str(folder), sharded_strategy=strategy)
        dist.barrier()

    def load(self, folder: Path) -> None:
        """The model and the optimizer of a distributed checkpoint, read as SkyRL reads it; collective."""
        from megatron.core import dist_checkpointing, parallel_state
        from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
        from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper

        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        strategy = FullyParallelLoadStrategyWrapper(get_default_load_sharded_strategy(str(folder)), group)
        state = dist_checkpointing.load(self.sharded(loading=True), str(folder), sharded_strategy=strategy)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def train(checkpoint: str, dtype: str, output: Path) -> dict:
    """The results of one rank."""
    from megatron.core import parallel_state

    from skyrl_isoexec.runtimes.megatron.facts import probe
    from skyrl_isoexec.runtimes.megatron.weights import dtypes, export, shapes

    micro = batches()
    part = slice(parallel_state.get_data_parallel_rank(), None, parallel_state.get_data_parallel_world_size())
    mine = micro[part]
    trainer = Trainer(checkpoint, dtype)
    result = {"before": trainer.run(micro, train=False), "probe": probe(trainer.model)}
    result["padded"] = trainer.run([padded(0)], train=False)
    result["packed"] = trainer.run([packed()], train=False)
    result["gradients"] = [trainer.gradients(padded(token)) for token in (0, 17, 0)]
    result["recomputed"] = trainer.run(micro, train=True, step=False), trainer.held()
    result["kept"] = trainer.without_recomputation(micro)
    result["exchanged"] = trainer.exchanged(micro)
    result["part"], result["own"], result["norms"] = part, [], []
    for _ in range(2):
        result["own"].append(trainer.run(mine, train=True))
        result["norms"].append(trainer.norm)
    result["after"] = trainer.run(micro, train=False)
    trainer.save(output / "saved")
    trainer.run(mine, train=True)
    result["third"] = dict(export(trainer.model))
    fresh = Trainer(checkpoint, dtype)
    fresh.load(output / "saved")
    fresh.run(mine, train=True)
    result["resumed"] = dict(export(fresh.model))
    result["shapes"] = shapes(trainer.model)
    if "moe" in output.name:
        twice = [Trainer(checkpoint, dtype, use_distributed_optimizer=False).reduced(mine) for _ in range(2)]
        result["reduced"] = twice
    result["sent"] = {name: tensor.dtype for name, tensor in export(trainer.model, torch.bfloat16)}
    result["announced"] = dtypes(trainer.model, torch.bfloat16)
    return result


def reshard(checkpoint: str, dtype: str, output: Path) -> dict:
    """Weights and saved tensors of some ranks after two steps, then of others that loaded those, by their sizes."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing import load_plain_tensors

    from skyrl_isoexec.runtimes.megatron.weights import export

    trainer = Trainer(checkpoint, dtype)
    for _ in range(2):
        trainer.run(batches(), train=True)

    def found(trainer: Trainer, sizes: tuple[int, int]) -> tuple[dict, dict]:
        folder = output / "tp{}ep{}".format(*sizes)
        trainer.save(folder)
        return dict(export(trainer.model)), load_plain_tensors(str(folder))

    first, *others = RESHARDS[output.name]
    result = {first: found(trainer, first)}
    for tp, ep in others:
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(tp, expert_model_parallel_size=ep, expert_tensor_parallel_size=1)
        other = Trainer(checkpoint, dtype)
        other.load(output / "tp{}ep{}".format(*first))
        result[tp, ep] = found(other, (tp, ep))
    return result


def rank(case: str, checkpoints: Path, output: Path) -> None:
    """One rank of a case, in a process of its own with torch's variables."""
    from megatron.core import parallel_state, tensor_parallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model, layout, dtype = case.split("-")
    tp, pp, ep, _ = LAYOUTS[layout]
    parallel_state.initialize_model_parallel(tp, pp, expert_model_parallel_size=ep, expert_tensor_parallel_size=1)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    found = (reshard if case in RESHARDS else train)(str(checkpoints / model), dtype, output)
    torch.save(found, output / f"rank{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


def attempt(case: str, index: int, port: int, checkpoints: Path, output: Path) -> None:
    """One rank, or why it failed."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(index)}
    os.environ["WORLD_SIZE"] = str(LAYOUTS[case.split("-")[1]][-1])
    try:
        rank(case, checkpoints, output)
    except BaseException:
        (output / f"error{index}.txt").write_text(traceback.format_exc())
        raise


def main(checkpoints: str, output: str, *cases: str) -> None:
    """Run all ranks of these cases on a folder of checkpoints; results go to a folder for each case."""
    import skyrl_isoexec.runtimes.megatron.install  # noqa: F401

    forked = multiprocessing.get_context("fork")
    for case in cases:
        folder = Path(output) / case
        folder.mkdir()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        given = (port, Path(checkpoints), folder)
        ranks = [forked.Process(target=attempt, args=(case, i, *given)) for i in range(LAYOUTS[case.split("-")[1]][-1])]
        for process in ranks:
            process.start()
        ends = time.monotonic() + PATIENCE
        for process in ranks:
            process.join(max(0.0, ends - time.monotonic()))
        for process in (process for process in ranks if process.is_alive()):
            (folder / "error.txt").write_text(f"not all ranks ended within {PATIENCE} s")
            process.kill()
