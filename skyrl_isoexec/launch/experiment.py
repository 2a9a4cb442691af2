"""SkyRL's experiment, trainer and generator with the three things this project adds to them: workers, counts, seeds.

Everything else of a run (data, environments, advantages, loss, dynamic sampling, checkpoints) is SkyRL's.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ray
from skyrl.backends.skyrl_train.inference_servers.utils import resolve_policy_model_name
from skyrl.train.dataset import PromptDataset
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator
from skyrl.train.trainer import RayPPOTrainer

from ..contract import Contract
from ..runtimes.vllm.guard import EPOCH
from ..runtimes.vllm.sampling import SCORED
from . import witness
from .exactness import compare, refuse_mismatch
from .handshake import Handshake
from .preflight import Refusal
from .record import Record, log_to
from .watch import Watch
from .workers import worker_classes


class CountingTrainer(RayPPOTrainer):
    """SkyRL's trainer; a step also counts the tokens whose rollout and trainer log-probabilities differ in a bit."""

    watch: Watch | None = None
    """Told which processes train, as soon as there are any."""
    handshake: Handshake | None = None
    """Holds every process to the contract; the native arm has none."""
    _scored = False
    _asking = _proving = 0.0

    @property
    def actors(self) -> list[Any]:
        """The policy's workers, by rank."""
        return [info.handle for info in self.policy_model.actor_infos]

    def init_weight_sync_state(self) -> None:
        """As SkyRL's, after every process has shown that it is what the contract says."""
        if self.handshake is not None:
            self.handshake.start(self.actors, self.inference_engine_client.server_urls)
        super().init_weight_sync_state()

    def epoch(self) -> int:
        """How many updates the trainer's weights have had since it started, by its own account."""
        began = time.perf_counter()
        try:
            return ray.get(self.actors[0].num_updates.remote())
        finally:
            self._asking += time.perf_counter() - began

    def _enforcement_seconds(self) -> float:
        """Time since the last call that went into epochs and into the proof of the last weight sync."""
        before, self._proving = self._proving, ray.get(self.actors[0].proof_seconds.remote())
        asking, self._asking = self._asking, 0.0
        return asking + self._proving - before

    def build_models(self, *worker_classes: Any) -> None:
        """As SkyRL's; from here on the trainer's processes are watched as well."""
        super().build_models(*worker_classes)
        if self.watch is not None and self.policy_model is not None:
            self.watch.add(_processes(self.actors))

    async def generate(self, input_batch: Any) -> Any:
        """SkyRL's rollouts, then what the engines have counted so far."""
        rollouts = await super().generate(input_batch)
        urls = self.inference_engine_client.server_urls
        self.all_metrics.update(await asyncio.to_thread(witness.counters, urls))
        return rollouts

    def fwd_logprobs_values_reward(self, training_input: Any) -> Any:
        """SkyRL's scoring pass, then the count. ComparisonError if there is nothing to compare."""
        scored = super().fwd_logprobs_values_reward(training_input)
        if self.handshake is not None:
            if not self._scored:
                self.handshake.scored(self.actors, self.inference_engine_client.server_urls)
                self._scored = True
            self.all_metrics["timing/enforcement"] = self._enforcement_seconds()
        counts = compare(scored.get("rollout_logprobs"), scored.get("action_log_probs"), scored["loss_mask"])
        self.all_metrics.update({**counts, witness.DIGEST: witness.digest(scored)})
        if self.handshake is not None:
            refuse_mismatch(counts)
        return scored


def request_seed(run_seed: int, step: int, instance: str, repetition: int) -> int:
    """A sampling seed in [0, 2**31) for one trajectory: a function of its place in the run, not of timing."""
    text = f"{run_seed}/{step}/{instance}/{repetition}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:4], "big") >> 1


class Generator(SkyRLGymGenerator):
    """SkyRL's generator, sampling from the very distribution that is trained, each trajectory with a seed of its own.

    SkyRL asks for at least one token, for which vLLM takes the end token out of the first distribution; the trainer
    scores the whole one. So no minimum is asked for here.
    """

    run_seed: int | None = None
    """None leaves the engine's own generator to draw; then a run cannot be repeated to the bit."""
    epoch_of_weights: Callable[[], int] | None = None
    """Which weights a request is meant for; an engine with others refuses it. None: the engine does not ask."""

    _extra: Mapping[str, Any] = MappingProxyType({})

    async def generate(self, input_batch: Any, disable_tqdm: bool = True) -> Any:
        """As SkyRL's; remembers which step the batch belongs to."""
        metadata = input_batch.get("batch_metadata")
        self._step = metadata.global_step if metadata is not None else 0
        if self.epoch_of_weights is not None:
            scored = metadata is None or metadata.training_phase == "train"
            self._extra = {"extra_args": {EPOCH: await asyncio.to_thread(self.epoch_of_weights), SCORED: scored}}
        return await super().generate(input_batch, disable_tqdm=disable_tqdm)

    async def agent_loop(self, *args: Any, sampling_params: Any = None, trajectory_id: Any = None, **rest: Any) -> Any:
        """As SkyRL's, with the trajectory's own sampling parameters."""
        if sampling_params is not None:
            sampling_params = {**sampling_params, **self._extra, "min_tokens": 0}
            if self.run_seed is not None and trajectory_id is not None:
                place = (self._step, trajectory_id.instance_id, trajectory_id.repetition_id)
                sampling_params["seed"] = request_seed(self.run_seed, *place)
        return await super().agent_loop(*args, sampling_params=sampling_params, trajectory_id=trajectory_id, **rest)


class Experiment(BasePPOExp):
    """A run of one arm: `exec=isoexec` or `exec=native`."""

    def __init__(self, cfg: Any, *, run_dir: Path, seeded: bool, contract: Contract | None) -> None:
        self._run_dir, self._seeded, self._contract = run_dir, seeded, contract
        self.watch: Watch | None = None
        super().__init__(cfg)

    def _dataset(self, files: list[str]) -> PromptDataset:
        return PromptDataset(
            datasets=files,
            tokenizer=self.tokenizer,
            max_prompt_length=self.cfg.trainer.max_prompt_length,
            num_workers=1,  # a small set; more would start interpreters that take longer than the work
        )

    def get_train_dataset(self) -> PromptDataset:
        """The training prompts; refuses prompts that are too long, which SkyRL would drop without a word."""
        data = self._dataset(self.cfg.data.train_data)
        _refuse_dropped(data, self.cfg.data.train_data, self.cfg.trainer.max_prompt_length)
        if len(data) < self.cfg.trainer.train_batch_size:
            raise Refusal(
                f"data.train_data has {len(data)} prompts, fewer than trainer.train_batch_size = "
                f"{self.cfg.trainer.train_batch_size}; lower it, or give more data"
            )
        return data

    def get_eval_dataset(self) -> PromptDataset | None:
        """The evaluation prompts, if evaluation is on."""
        if self.cfg.trainer.eval_interval > 0 and self.cfg.data.val_data:
            data = self._dataset(self.cfg.data.val_data)
            _refuse_dropped(data, self.cfg.data.val_data, self.cfg.trainer.max_prompt_length)
            return data
        return None

    def get_inference_client(self) -> Any:
        """SkyRL's client; from here on the servers' health is watched."""
        client = super().get_inference_client()
        self.watch = Watch(client.server_urls)
        self.watch.start()
        return client

    def get_worker_classes(self) -> tuple[Any, None, Any]:
        """Workers that build this project's model, or the stock one."""
        return worker_classes()

    def get_generator(self, cfg: Any, tokenizer: Any, inference_engine_client: Any) -> Any:
        """SkyRL's generator for single- and multi-turn text, with seeds if the run asks for them."""
        generator = Generator(
            generator_cfg=cfg.generator,
            skyrl_gym_cfg=cfg.environment.skyrl_gym,
            inference_engine_client=inference_engine_client,
            tokenizer=tokenizer,
            policy_model_name=resolve_policy_model_name(cfg),
        )
        generator.run_seed = cfg.trainer.seed if self._seeded else None
        return generator

    def get_trainer(self, **parts: Any) -> CountingTrainer:
        """SkyRL's trainer that also counts."""
        trainer = CountingTrainer(**parts)
        trainer.watch = self.watch
        if self._contract is not None:
            trainer.handshake = Handshake(self._contract, self._run_dir)
            trainer.generator.epoch_of_weights = trainer.epoch
        log_to(self._run_dir)  # its constructor sends the log to the terminal
        return trainer

    def get_tracker(self) -> Record:
        """SkyRL's tracker, recorded in the run folder."""
        return Record(super().get_tracker(), self._run_dir, self.cfg.trainer.max_training_steps)

    def close(self) -> None:
        """Stop router and servers; safe to call twice and after a failed start."""
        if self.watch is not None:
            self.watch.stop()
        for group in self._server_groups or []:
            group.shutdown()
        if self._inference_router is not None:
            self._inference_router.shutdown()


def _processes(actors: list[Any]) -> dict[str, int]:
    def whereabouts(_: Any) -> tuple[str, int]:
        return socket.gethostname(), os.getpid()

    found = ray.get([actor.__ray_call__.remote(whereabouts) for actor in actors])
    here = socket.gethostname()
    return {f"the trainer's rank {rank}": pid for rank, (host, pid) in enumerate(found) if host == here}


def _refuse_dropped(data: PromptDataset, files: list[str], limit: int) -> None:
    import datasets

    kinds = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
    total = 0
    for file in files:
        kind = kinds.get(Path(file).suffix)
        if kind is None:
            return  # a data set by name: SkyRL's own filter decides
        total += len(datasets.load_dataset(kind, data_files=file, keep_in_memory=True)["train"])
    if total != len(data):
        raise Refusal(
            f"{total - len(data)} of {total} prompts in {', '.join(files)} are longer than "
            f"trainer.max_prompt_length = {limit} tokens; raise it (and generator.max_input_length) or shorten them"
        )
