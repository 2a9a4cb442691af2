"""One test per patch of the SkyRL series; each fails on the pristine wheel."""

import asyncio
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch


def run(code: str, *, timeout: int = 240) -> str:
    """Standard output of code in a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_training_stack_imports() -> None:
    assert "imported" in run("import skyrl.backends.skyrl_train.workers.worker; print('imported')")


def test_train_entry_is_loaded() -> None:
    done = subprocess.run([sys.executable, "-m", "skyrl.train"], capture_output=True, text=True, timeout=240)
    assert done.returncode == 2
    assert "+exec=isoexec" in done.stderr and "+exec=native" in done.stderr


def test_worker_classes_hook() -> None:
    from skyrl.train.entrypoints.main_base import BasePPOExp

    class Asked(Exception):
        pass

    class Probe(BasePPOExp):
        def __init__(self) -> None:
            trainer = SimpleNamespace(export_path="/tmp", ckpt_path="/tmp", strategy="fsdp")
            self.cfg = SimpleNamespace(trainer=trainer)

        get_cfg_as_str = staticmethod(lambda cfg: "")

        def get_worker_classes(self) -> tuple[None, None, None]:
            return None, None, None

        def get_tracker(self) -> None:
            raise Asked

    assert BasePPOExp.get_worker_classes(Probe()) is None
    with pytest.raises(Asked):
        Probe()._setup_trainer()  # the stock switch would import the fsdp workers, and they flash-attn


def test_megatron_worker_without_bridge() -> None:
    code = "import importlib.util as u, skyrl.backends.skyrl_train.workers.megatron.megatron_worker as w; "
    assert "True" in run(code + "print(w.AutoBridge is None or u.find_spec('megatron.bridge') is not None)")


def test_workers_run_without_cuda() -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a machine without CUDA")
    code = """
import os, torch, torch.distributed as dist
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
from skyrl.utils.device import process_group_backend
from skyrl.backends.skyrl_train.distributed.megatron.megatron_strategy import MegatronStrategy
from skyrl.train.config.config import MegatronConfig
dist.init_process_group(process_group_backend(), store=dist.HashStore(), rank=0, world_size=1)
strategy = MegatronStrategy(MegatronConfig())
strategy.setup_distributed()
print(strategy.all_reduce({"a": 3.0}), strategy.all_gather(torch.ones(1)).tolist())
"""
    assert "{'a': 3.0} [1.0]" in run(code)


def test_token_logprobs_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    from skyrl.backends.skyrl_train.distributed.megatron import model_utils

    assert model_utils.token_logprobs is None
    monkeypatch.setattr(model_utils, "token_logprobs", lambda logits, ids: ids.float() * 10)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None: 0)
    ids = torch.arange(6).view(2, 3)
    out = model_utils.from_parallel_logits_to_logprobs(
        torch.zeros(2, 3, 8), ids, vocab_start_index=0, vocab_end_index=8, tp_group=None
    )
    assert out.tolist() == [[10.0, 20.0], [40.0, 50.0]]
    packed = model_utils.from_parallel_logits_to_logprobs_packed_sequences(
        torch.zeros(1, 6, 8), ids.view(1, 6), torch.tensor([0, 3, 6]), 3, 0, 8, group=None
    )
    assert packed.tolist() == out.tolist()


def test_transfer_strategy_hook() -> None:
    from skyrl.backends.skyrl_train.workers.worker import Worker

    class Asked(Exception):
        pass

    class Probe(Worker):
        def __init__(self) -> None:
            self.cfg = SimpleNamespace(placement=SimpleNamespace(colocate_all=True))

        def get_transfer_strategy_cls(self, weight_sync_backend: str, colocate_all: bool) -> type:
            raise Asked

    with pytest.raises(Asked):
        asyncio.run(Probe().init_weight_sync_state(object(), SimpleNamespace(weight_sync_backend="nccl")))


def test_router_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    from skyrl.backends.skyrl_train.inference_servers import vllm_router
    from vllm_router.router_args import RouterArgs

    class Process:
        def __init__(self, **_: object) -> None: ...

        def start(self) -> None: ...

    monkeypatch.setattr(vllm_router.multiprocessing, "Process", Process)
    monkeypatch.setattr(vllm_router.VLLMRouter, "_wait_until_healthy", lambda *_: None)
    router = vllm_router.VLLMRouter(RouterArgs(worker_urls=["http://127.0.0.1:1"]))
    assert router.start().startswith("http://")


def test_dynamic_sampling_keeps_nothing_twice() -> None:
    from skyrl.train.utils.trainer_utils import handle_filter_sampling

    def batch(rewards: list[float]) -> dict:
        count = len(rewards)
        return {
            "prompt_token_ids": [[1]] * count,
            "response_ids": [[2]] * count,
            "rewards": rewards,
            "loss_masks": [[1]] * count,
            "stop_reasons": None,
            "rollout_metrics": {},
            "rollout_logprobs": [[-1.0]] * count,
        }

    config = {"train_batch_size": 1, "n_samples_per_prompt": 2}
    state: dict = {"sample_batch_count": 1}
    for _ in range(2):
        *_, keep, state = handle_filter_sampling(batch([0.0, 0.0]), ["a", "a"], config, state)
        assert keep and state["num_prompts_in_batch"] == 0
    output, uids, keep, _ = handle_filter_sampling(batch([0.0, 1.0]), ["b", "b"], config, state)
    assert not keep and uids == ["b", "b"] and output["rewards"] == [0.0, 1.0]


def test_port_of_a_starting_server_is_not_shared() -> None:
    from skyrl.backends.skyrl_train.inference_servers.common import find_and_reserve_port

    with socket.socket() as starting:  # as vLLM's server has it until its engine is ready
        starting.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        starting.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        starting.bind(("0.0.0.0", 0))
        taken = starting.getsockname()[1]
        port, reservation = find_and_reserve_port(taken)
        reservation.close()
    assert port != taken
