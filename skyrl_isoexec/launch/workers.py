"""SkyRL's Megatron workers with the unified model, or transformers' stock model, where megatron-bridge's would be.

What a worker needs beyond SkyRL's configuration travels in it, as `model_config_kwargs.isoexec`: the arm (`exec`) and,
for the unified model, the contract: the same bytes that the engine gets.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import ray
import torch
from omegaconf import OmegaConf
from skyrl.backends.skyrl_train.distributed.megatron import model_utils
from skyrl.backends.skyrl_train.workers.megatron.megatron_worker import (
    MegatronPolicyWorkerBase,
    MegatronRefWorkerBase,
)
from skyrl.backends.skyrl_train.workers.worker import PolicyWorkerBase
from skyrl.train.config.config import get_config_as_dict
from skyrl.utils.tok import get_tokenizer
from transformers import AutoConfig

from ..contract import decode, digest
from ..kernels.selection import select
from ..model.checkpoint import export_config, save
from ..runtimes.megatron.facts import facts, probe, served
from ..runtimes.megatron.install import build, build_native, distribute
from ..runtimes.megatron.logprob import token_logprobs
from ..runtimes.megatron.weights import export
from .expectation import refuse, unlike
from .transfer import CHUNK_BYTES, Extractor, GlooStrategy, proven

SETTINGS_KEY = "isoexec"


def _plain(value: Any) -> dict[str, Any]:
    return dict(OmegaConf.to_container(value, resolve=True)) if OmegaConf.is_config(value) else dict(value)


class ModelWorker:
    """The methods of SkyRL's Megatron worker that know which model is trained."""

    def init_configs(
        self,
        model_path: str,
        megatron_config: Any,
        model_config_kwargs: Any,
        transformer_config_kwargs: Any,
        bf16: bool = True,
        **options: Any,
    ) -> None:
        """Remember what to build; nothing is read but the checkpoint's configuration and tokenizer."""
        asked = [name for name, value in options.items() if value not in (None, False)]
        if asked:
            raise ValueError(f"the {type(self).__name__} does not support {asked}; switch them off")
        if not torch.cuda.is_available():
            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # set by the launcher, see `cluster`
        self._settings = _plain(model_config_kwargs)[SETTINGS_KEY]
        overrides = _plain(transformer_config_kwargs)
        if not self.cfg.gradient_checkpointing:
            overrides.update(recompute_granularity=None, recompute_method=None, recompute_num_layers=None)
        self._overrides = overrides
        self._checkpoint, self._dtype = model_path, "bfloat16" if bf16 else "float32"
        self.megatron_config = megatron_config
        self.provider, self.bridge = SimpleNamespace(mtp_num_layers=None), None
        self.is_vlm = self.enable_router_replay = False
        self.strategy.hf_config = AutoConfig.from_pretrained(model_path)
        self.tokenizer = get_tokenizer(model_path)

    def make_megatron_module(
        self,
        wrap_with_ddp: bool = True,
        ddp_config: Any = None,
        lora_config: Any = None,
        lora_type: str | None = None,
        bf16: bool = True,
    ) -> list[torch.nn.Module]:
        """The arm's model, with Megatron's data parallelism around a policy."""
        if lora_config is not None:
            raise ValueError("trainer.policy.model.lora is not supported; set its rank to 0")
        common = {"dtype": self._dtype, "config_overrides": self._overrides}
        if self._settings["exec"] == "native":
            module = build_native(self._checkpoint, **common)
        else:
            self._contract = decode(self._settings["contract"])
            module = build(self._checkpoint, *select(self._contract, "trainer"), **common)
            decoder = module.stage
            model_utils.token_logprobs = token_logprobs(decoder.kernels, decoder.axis, decoder.schedule.num_leaves)
        if not wrap_with_ddp:
            return [module]
        return [distribute(module, {} if ddp_config is None else get_config_as_dict(ddp_config))]

    def save_hf_model(self, export_dir: str, tokenizer: Any) -> None:
        """A checkpoint folder in Hugging Face format, written by the first rank. Collective."""
        tensors = dict(export(self.actor_module[0]))
        if torch.distributed.get_rank() == 0:
            save(export_dir, export_config(self._checkpoint), tensors, overwrite=True)
            tokenizer.save_pretrained(export_dir)
        torch.distributed.barrier()

    def facts(self) -> dict[str, Any]:
        """What this process really runs, read back."""
        algorithm = self.cfg.algorithm
        return facts(
            self.actor_module[0],
            self._settings["contract"],
            temperature=float(algorithm.temperature),
            seed=self.strategy.seed,
        )

    def served(self) -> dict[str, str]:
        """Which kernels forwards of this process have used."""
        return served(self.actor_module[0])

    def probe(self) -> str | None:
        """Digest of a short forward of the live model; None for a part of a pipeline. Collective over the ranks of
        a stage's tensor- and expert-parallel axes."""
        return probe(self.actor_module[0])


class _PolicyWorker(ModelWorker, MegatronPolicyWorkerBase):
    """SkyRL's policy worker with this model and the weight transfer that was asked for."""

    _num_updates = 0

    def num_updates(self) -> int:
        """Optimizer steps since this process started: the epoch of its weights."""
        return self._num_updates

    def proof_seconds(self) -> float:
        """Time that this process has spent on proofs of weight syncs; only rank 0 makes any."""
        proof = getattr(self._weight_transfer_sender, "proof", None)
        return 0.0 if proof is None else proof.seconds

    def optim_step(self) -> float | None:
        """As SkyRL's; before the first one, the kernels that the forward has used must be the contract's."""
        if self._num_updates == 0 and self._settings["exec"] == "isoexec":
            process = f"trainer rank {torch.distributed.get_rank()}"
            refuse(unlike(self._contract, ("trainer_fwd",), self.served(), process))
        norm = super().optim_step()
        self._num_updates += 1
        return norm

    def get_transfer_strategy_cls(self, weight_sync_backend: str, colocate_all: bool) -> type:
        """SkyRL's own between devices, or gloo."""
        if self._settings["transport"] == "device":
            return super().get_transfer_strategy_cls(weight_sync_backend, colocate_all)
        return GlooStrategy

    async def init_weight_sync_state(self, inference_engine_client: Any, inference_engine_cfg: Any) -> None:
        """As SkyRL's, with tensors read from this model instead of through megatron-bridge."""
        await PolicyWorkerBase.init_weight_sync_state(self, inference_engine_client, inference_engine_cfg)
        between_devices = self._settings["transport"] == "device"
        self.weight_extractor = Extractor(self.actor_module[0], CHUNK_BYTES if between_devices else 0)
        if self._settings["exec"] == "isoexec":
            self._weight_transfer_sender = proven(
                self._weight_transfer_sender, inference_engine_client, digest(self._contract), self.num_updates
            )


class _RefWorker(ModelWorker, MegatronRefWorkerBase):
    """SkyRL's reference worker with this model."""


def worker_classes() -> tuple[Any, None, Any]:
    """(policy, no critic, reference) Ray actor classes for SkyRL's experiment."""
    return ray.remote(num_gpus=1)(_PolicyWorker), None, ray.remote(num_gpus=1)(_RefWorker)
