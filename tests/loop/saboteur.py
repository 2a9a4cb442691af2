"""The product's own command with one thing changed on one side only: what the contract has to find.

`python -m saboteur FAULT ARGUMENT...` starts `skyrl.train` with a fault of STARTING. The fault `live` goes through all
of LIVE in one run instead: each is put into a running process, the launcher's handshake is made again and has to refuse
it, and it is taken away. What happened is written to `sabotage.json` in the working folder.
"""

import dataclasses
import importlib.metadata
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import ray
import torch

from skyrl_isoexec.contract import decode, encode, float_bits, from_bits, seal
from skyrl_isoexec.launch import assemble, engines, experiment, handshake, sync, workers
from skyrl_isoexec.launch.engine_extension import EngineExtension
from skyrl_isoexec.launch.expectation import FactsRefused
from skyrl_isoexec.launch.main import main
from skyrl_isoexec.runtimes.megatron.weights import unwrap

TRAINER, ENGINE = "trainer rank 0", "engine 0 rank 0"


def one_bit_warmer(text: str) -> str:
    """The contract with the last bit of its temperature changed, sealed as if it were meant."""
    contract = decode(text)
    entries = []
    for entry in contract.composition:
        if "temperature" in entry.constants:
            bits = int(entry.constants["temperature"][4:], 16) ^ 1
            entry = dataclasses.replace(entry, constants={**entry.constants, "temperature": f"f64:{bits:016x}"})
        entries.append(entry)
    return encode(seal(dataclasses.replace(contract, composition=tuple(entries)))).decode()


class Changes:
    """Faults by name: each changes the process it is called in, and returns what undoes it."""

    def __init__(self, model: torch.nn.Module, owner: object) -> None:
        self.model, self.owner = model, owner

    def variable(self, name: str, value: str):
        before = os.environ.get(name)
        os.environ[name] = value
        return lambda: os.environ.pop(name) if before is None else os.environ.update({name: before})

    def attribute(self, thing: object, name: str, value: object):
        before = getattr(thing, name)
        object.__setattr__(thing, name, value)
        return lambda: object.__setattr__(thing, name, before)

    def collective_algorithm(self):
        return self.variable("NCCL_ALGO", "Tree")

    def batch_invariant(self):
        return self.variable("VLLM_BATCH_INVARIANT", "1")

    def omp_threads(self):
        return self.variable("OMP_NUM_THREADS", "3")

    def threads(self):
        before = torch.get_num_threads()
        torch.set_num_threads(before + 1)
        return lambda: torch.set_num_threads(before)

    def flush(self):
        assert torch.set_flush_denormal(True)
        return lambda: torch.set_flush_denormal(False)

    def kernel(self):
        from skyrl_isoexec.kernels.rope import reference

        return self.attribute(self.model.kernels, "rope", reference.rope)

    def eps_of_one_norm(self):
        norm = self.model.model.norm
        bits = int(float_bits(norm.eps)[4:], 16) ^ 1
        return self.attribute(norm, "eps", from_bits(f"f64:{bits:016x}"))

    def rope_theta(self):
        return self.attribute(self.model.config, "rope_theta", self.model.config.rope_theta * 2)

    def dtype(self):
        return self.attribute(self.model.config, "dtype", "bfloat16")

    def schedule(self):
        from functools import partial

        from skyrl_isoexec.schedule import Schedule

        kernels = self.model.kernels
        other = Schedule(**{**kernels.schedule.to_dict(), "kv_partition": kernels.schedule.kv_partition * 2})
        return self.attribute(kernels, "attention", partial(kernels.attention, schedule=other))

    def version(self):
        real = importlib.metadata.version
        return self.attribute(importlib.metadata, "version", lambda name: "0.0" if name == "numpy" else real(name))

    def own_source(self):
        from skyrl_isoexec.model import facts

        copy = Path(tempfile.mkdtemp(prefix="sabotage-"))
        for name in (*facts.SOURCES, "kernels"):
            shutil.copytree(facts.PACKAGE / name, copy / name)
        (copy / "model" / "mlp.py").write_text("EDITED = True\n")
        undo = self.attribute(facts, "PACKAGE", copy)
        return lambda: (undo(), shutil.rmtree(copy))

    def patches(self):
        from skyrl_isoexec.model import facts

        real = facts.applied_state
        return self.attribute(
            facts, "applied_state", lambda package: dataclasses.replace(real(package), series_digest="0" * 64)
        )


class TrainerChanges(Changes):
    """What only a trainer's process has."""

    def contract(self):
        told = self.owner._settings
        before = told["contract"]
        told["contract"] = one_bit_warmer(before)
        return lambda: told.update(contract=before)

    def temperature(self):
        return self.attribute(self.owner.cfg.algorithm, "temperature", 0.5)

    def seed(self):
        return self.attribute(self.owner.strategy, "seed", self.owner.strategy.seed + 1)

    def missing_fact(self):
        real = workers.facts

        def without(*arguments, **named):
            return {key: value for key, value in real(*arguments, **named).items() if key != "numeric.rounding"}

        return self.attribute(workers, "facts", without)

    def unknown_fact(self):
        real = workers.facts
        return self.attribute(workers, "facts", lambda *a, **named: {**real(*a, **named), "numeric.roundness": "round"})


class EngineChanges(Changes):
    """What only an engine's process has."""

    def contract(self):
        settings = self.model.settings
        return self.attribute(settings, "contract", one_bit_warmer(settings.contract))

    def prefix_caching(self):
        return self.attribute(self.owner.vllm_config.cache_config, "enable_prefix_caching", False)

    def raw_logprobs(self):
        return self.attribute(self.owner.vllm_config.model_config, "logprobs_mode", "raw_logprobs")

    def log_softmax(self):
        from vllm.v1.sample.ops import logprobs

        return self.attribute(logprobs, "log_softmax_override", None)

    def token_logprobs(self):
        from vllm.v1.sample.ops import logprobs

        return self.attribute(logprobs, "token_logprobs_override", None)

    def architecture(self):
        from vllm import ModelRegistry

        held = ModelRegistry.models.pop("IsoExecForCausalLM")
        return lambda: ModelRegistry.models.update(IsoExecForCausalLM=held)

    def transfer(self):
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as factory

        held = factory._registry.pop("gloo")
        return lambda: factory._registry.update(gloo=held)


COMMON = {
    "collective_algorithm": "environment.NCCL_ALGO",
    "omp_threads": "environment.OMP_NUM_THREADS",
    "flush": "numeric.flush_subnormals",
    "kernel": "kernel.rope.function",
    "eps_of_one_norm": "constant.eps",
    "rope_theta": "model.rope_theta",
    "dtype": "model.dtype",
    "version": "version.numpy",
    "own_source": "source.model",
    "contract": "contract.numerical_policy",
}
LIVE = [(TRAINER, name, field) for name, field in COMMON.items()]
LIVE += [(ENGINE, name, field) for name, field in COMMON.items()]
LIVE += [
    (TRAINER, "temperature", "constant.temperature"),
    (TRAINER, "schedule", "kv_partition"),
    (TRAINER, "seed", "seed.run"),
    (TRAINER, "threads", "numeric.threads"),
    (TRAINER, "patches", "patch.megatron-core"),
    (TRAINER, "missing_fact", "numeric.rounding"),
    (TRAINER, "unknown_fact", "numeric.roundness"),
    (ENGINE, "batch_invariant", "environment.VLLM_BATCH_INVARIANT"),
    (ENGINE, "patches", "patch.vllm"),
    (ENGINE, "prefix_caching", "engine.enable_prefix_caching"),
    (ENGINE, "raw_logprobs", "engine.logprobs_mode"),
    (ENGINE, "log_softmax", "plugin.log_softmax"),
    (ENGINE, "token_logprobs", "plugin.log_softmax"),
    (ENGINE, "architecture", "plugin.architecture"),
    (ENGINE, "transfer", "plugin.transfer"),
]
"""(process, change, what the refusal has to name)."""


class Extension(EngineExtension):
    """The engine's extension with a way to change its process, and after a sync its weights."""

    def sabotage(self, change: str) -> None:
        """Apply a change by name."""
        changes = EngineChanges(self.model_runner.get_model(), self)
        self.undo_sabotage = getattr(changes, change)()

    def repair(self) -> None:
        """Undo it."""
        self.undo_sabotage()

    def flip(self) -> None:
        """One bit of one weight."""
        self.model_runner.get_model().model.norm.weight.data.view(torch.int32)[0] ^= 1


class Policy(workers._PolicyWorker):
    """The trainer's worker with a way to change its process, in the thread that computes."""

    def sabotage(self, change: str) -> None:
        """Apply a change by name."""
        changes = TrainerChanges(unwrap(self.actor_module[0]).stage, self)
        self.undo_sabotage = getattr(changes, change)()

    def repair(self) -> None:
        """Undo it."""
        self.undo_sabotage()


def live() -> None:
    """Go through LIVE at the handshake, then let the run go on."""
    real = handshake.Handshake.start

    def start(self, actors, urls):
        real(self, actors, urls)  # without a fault it passes
        found = []
        for process, change, _ in LIVE:
            refusal = None
            if process == TRAINER:
                ray.get(actors[0].sabotage.remote(change))
            else:
                engines.call(urls, "sabotage", change=change)
            try:
                real(self, actors, urls)
            except FactsRefused as error:
                refusal = str(error)
            finally:
                if process == TRAINER:
                    ray.get(actors[0].repair.remote())
                else:
                    engines.call(urls, "repair")
            found.append({"process": process, "change": change, "refusal": refusal})
        Path("sabotage.json").write_text(json.dumps(found, indent=1))
        real(self, actors, urls)

    handshake.Handshake.start = start


def variable_in_one_worker() -> None:
    """A run with nothing but one variable changed, in one process."""
    real = handshake.Handshake.start

    def start(self, actors, urls):
        ray.get(actors[0].sabotage.remote("collective_algorithm"))
        real(self, actors, urls)

    handshake.Handshake.start = start


class FlippingPolicy(Policy):
    """The trainer's worker; one bit of a weight changes in the engine after it was sent, before it is proven."""

    async def init_weight_sync_state(self, inference_engine_client, inference_engine_cfg) -> None:
        """As the worker's; its proof is made after the flip."""
        await super().init_weight_sync_state(inference_engine_client, inference_engine_cfg)
        real = sync.SyncProof.finish

        def finish(proof):
            engines.call(inference_engine_client.server_urls, "flip")
            real(proof)

        sync.SyncProof.finish = finish


def flipped_weight() -> type:
    """After a sync one bit of a weight differs in the engine."""
    return FlippingPolicy


def no_plugin() -> None:
    """The engine's processes do not load the plugin."""
    from skyrl_isoexec.launch import cluster

    real = cluster.environment
    cluster.environment = lambda **options: {**real(**options), "VLLM_PLUGINS": "none"}


def other_epoch() -> None:
    """Requests are meant for weights that the engine does not have."""
    from skyrl_isoexec.launch.experiment import CountingTrainer

    real = CountingTrainer.epoch
    CountingTrainer.epoch = lambda self: real(self) + 1


def other_bits_for_the_engine() -> None:
    """The engine is handed a contract with one bit of one constant changed; the trainer has the real one."""
    real = assemble.settings_from_contract
    assemble.settings_from_contract = lambda text, *, enforce: real(one_bit_warmer(text), enforce=enforce)


STARTING = {
    fault.__name__: fault
    for fault in (live, variable_in_one_worker, flipped_weight, no_plugin, other_epoch, other_bits_for_the_engine)
}

if __name__ == "__main__":
    import saboteur  # its classes have to be importable in the workers, not to be this script's

    assemble.EXTENSION = "saboteur.Extension"
    policy = saboteur.STARTING[sys.argv[1]]() or saboteur.Policy
    experiment.worker_classes = lambda: tuple(
        kind and ray.remote(num_gpus=1)(kind) for kind in (policy, None, workers._RefWorker)
    )
    main(sys.argv[2:])
