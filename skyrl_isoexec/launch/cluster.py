"""The Ray cluster of a run on one machine, and the environment of its processes. All variables set here are the hosts'.

Without CUDA, Ray's GPUs are logical slots: one per trainer rank and engine worker, so that SkyRL's placement groups
work as they are.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
from skyrl.backends.skyrl_train.utils.ppo_utils import sync_registries

from ..runtimes.vllm.settings import CPU_ENVIRONMENT, cuda_environment

THREADS = ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
WATCHED: dict[str, None] = dict.fromkeys(
    (
        "CUBLAS_WORKSPACE_CONFIG",
        "DISABLE_PTXAS_OPT",
        "MKL_CBWR",
        "NCCL_ALGO",
        "NCCL_PROTO",
        "NUMBA_CPU_FEATURES",
        "NUMBA_CPU_NAME",
        "NUMBA_DISABLE_JIT",
        "NUMBA_OPT",
        "NVIDIA_TF32_OVERRIDE",
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
        "PTXAS_OPTIONS",
        "TRITON_DEFAULT_FP_FUSION",
        "TRITON_ENABLE_ASAN",
        "TRITON_F32_DEFAULT",
        "TRITON_INSTRUMENTATION_MODE",
        "TRITON_INTERPRET",
        "TRITON_KERNEL_OVERRIDE",
        "TRITON_LIBDEVICE_PATH",
        "TRITON_MOCK_PTX_VERSION",
        "TRITON_OVERRIDE_ARCH",
        "VLLM_ATTENTION_BACKEND",
        "VLLM_BATCH_INVARIANT",
    )
)
"""Variables of the hosts that can decide how something is computed, and that a run leaves unset in every process."""


def computing(*, cuda: bool, threads: int, runner: int | None) -> dict[str, str]:
    """Variables that every computing process has to see; the contract names them, and each process reads them back.

    `runner` is vLLM's of our model, 1 or 2; None is the stock stack's, whose engine chooses by itself.
    """
    common = {"VLLM_PLUGINS": "isoexec", "CUDA_DEVICE_MAX_CONNECTIONS": "1", **dict.fromkeys(THREADS, str(threads))}
    return {**common, **(cuda_environment(runner=runner) if cuda else CPU_ENVIRONMENT)}


def environment(*, log_file: Path, cuda: bool, threads: int, runner: int | None) -> dict[str, str]:
    """Variables of every Ray worker of a run; `threads` is of one process, `runner` as `computing` has it."""
    common = {
        **computing(cuda=cuda, threads=threads, runner=runner),
        "SKYRL_LOG_FILE": str(log_file),
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "HYDRA_FULL_ERROR": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_HOST_IP": "127.0.0.1",
    }
    if cuda:
        return {**common, "NCCL_CUMEM_ENABLE": "0"}  # as SkyRL sets it; vLLM's sleeping memory and NCCL's do not mix
    return {**common, "VLLM_CPU_KVCACHE_SPACE": "1"}  # GiB, an upper bound; the engine is told its number of pages


def slots(cfg: Any) -> int:
    """GPUs, or logical slots, that SkyRL's placement asks for."""
    placement, engine = cfg.trainer.placement, cfg.generator.inference_engine
    trainer = placement.policy_num_gpus_per_node * placement.policy_num_nodes
    if placement.colocate_all:
        return trainer
    workers = engine.tensor_parallel_size * engine.pipeline_parallel_size * engine.data_parallel_size
    uses_ref = cfg.trainer.algorithm.use_kl_loss or cfg.trainer.algorithm.use_kl_in_reward
    ref = 0 if placement.colocate_policy_ref or not uses_ref else placement.ref_num_gpus_per_node
    return trainer + ref + engine.num_engines * workers


class Cluster:
    """A local Ray, started on entry and ended with all its processes and files on exit."""

    def __init__(self, cfg: Any, env: dict[str, str], *, cuda: bool, object_store_mib: int) -> None:
        self._cfg, self._env, self._cuda = cfg, env, cuda
        self._object_store = object_store_mib * 2**20
        self._folder: Path | None = None

    def __enter__(self) -> Cluster:
        os.environ["RAY_BACKEND_LOG_LEVEL"] = "fatal"
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        os.environ.update(self._env)
        os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"  # of the launcher; the engine's own log is kept in full
        os.environ.pop("SKYRL_LOG_FILE")  # the workers' output goes to the file, the launcher's to the terminal
        self._folder = Path(tempfile.mkdtemp(prefix="isoexec-ray-"))  # Ray's sockets need a short path
        count = slots(self._cfg)
        devices = torch.cuda.device_count() if self._cuda else count
        options: dict[str, Any] = {"num_gpus": devices, "num_cpus": max(16, 4 * count)}
        try:
            ray.init(
                address="local",
                include_dashboard=False,
                log_to_driver=True,
                logging_level="WARNING",
                object_store_memory=self._object_store,
                runtime_env={"env_vars": self._env},
                _temp_dir=str(self._folder),
                **options,
            )
            sync_registries()
        except BaseException:  # nobody leaves what was not entered
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        ray.shutdown()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
