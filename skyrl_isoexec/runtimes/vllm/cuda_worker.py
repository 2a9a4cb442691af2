"""The guarded worker of an engine on CUDA."""

from vllm.v1.worker.gpu_worker import Worker

from skyrl_isoexec.runtimes.vllm.worker import Guarded


class GuardedWorker(Guarded, Worker):
    """vLLM's worker behind a guard."""
