"""The guarded worker of an engine on the CPU."""

from vllm.v1.worker.cpu_worker import CPUWorker

from skyrl_isoexec.runtimes.vllm.worker import Guarded


class GuardedCPUWorker(Guarded, CPUWorker):
    """vLLM's worker behind a guard."""
