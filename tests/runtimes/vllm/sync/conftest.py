"""An engine with a contract, driven as a trainer, a launcher and a client drive it."""

import functools
import json
from pathlib import Path

import pytest


class Driver:
    """A trainer's and a launcher's calls on one engine, and the requests of a client."""

    def __init__(self, engine, contract, checkpoint) -> None:
        """`checkpoint(dtype, seed=0)` is of the engine's model."""
        self.engine, self.contract, self.checkpoint = engine, contract, checkpoint

    def call(self, method: str, *args: object):
        """The only worker's answer, which must survive JSON."""
        (answer,) = self.engine.collective_rpc(method, args=args)
        assert json.loads(json.dumps(answer)) == answer and isinstance(answer, dict)
        return answer

    def tensors(self, seed: int | Path) -> dict:
        """All tensors of a checkpoint, of that seed or in that folder."""
        from skyrl_isoexec.model.checkpoint import iter_tensors

        return dict(iter_tensors(seed if isinstance(seed, Path) else self.checkpoint("float32", seed=seed)))

    def sync(self, epoch: int, seed: int | Path, reset: bool = True) -> None:
        """One weight sync, with the prefix cache reset as SkyRL resets it."""
        from skyrl_isoexec.contract import digest

        tensors = list(self.tensors(seed).items())
        assert self.call("isoexec_begin_sync", epoch) == {"begun": epoch}
        if reset:
            assert self.engine.reset_prefix_cache()
        self.engine.apply_model(lambda model: model.load_weights(tensors))
        self.call("isoexec_arrived")
        assert self.call("isoexec_commit", epoch, digest(self.contract)) == {"committed": epoch}

    @staticmethod
    def epoch(number: int, scored: bool = True) -> dict[str, object]:
        """Sampling parameters of a request that carries it."""
        return {"extra_args": {"isoexec_epoch": number, "isoexec_scored": scored}}

    def drop(self) -> None:
        """Abort whatever a refusal left behind."""
        left = list(self.engine.llm_engine.output_processor.request_states)
        self.engine.llm_engine.abort_request(left, internal=True)


@pytest.fixture(scope="module")
def serve(host, checkpoint, contract):
    """serve(pages=None, changes={}, **engine arguments) -> the Driver of an engine with little memory and small steps.

    `changes` are of the checkpoint's configuration, `pages` of a hybrid.
    """
    from vllm import LLM

    from skyrl_isoexec.contract import encode
    from skyrl_isoexec.runtimes.vllm.settings import settings_from_contract

    def make(pages=None, changes: dict | None = None, **arguments: object) -> Driver:
        changes = changes or {}
        made = contract("float32", **changes)
        settings = settings_from_contract(encode(made).decode(), enforce=True)
        sizes = {
            "skip_tokenizer_init": True, "enforce_eager": True, "disable_log_stats": False, "block_size": 16,
            "kv_cache_memory_bytes": 2**22, "max_model_len": 256, "max_num_seqs": 8, "num_gpu_blocks_override": 17,
            "max_num_batched_tokens": 24,
        }  # fmt: skip
        sizes |= settings.engine_arguments(dtype="float32", hybrid=pages)
        engine = LLM(str(checkpoint("float32", **changes)), **sizes | arguments)
        return Driver(engine, made, functools.partial(checkpoint, **changes))

    return make


@pytest.fixture(scope="module")
def running(serve):
    """One engine for this file."""
    return serve()


@pytest.fixture
def driver(running):
    """The engine as it is before its first sync."""
    running.drop()
    running.engine.collective_rpc(lambda worker: worker.isoexec_guard.__init__(worker.isoexec_guard.temperature))
    return running
