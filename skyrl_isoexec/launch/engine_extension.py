"""The class that vLLM mixes into its workers: SkyRL's weight-update calls and this package's facts."""

from __future__ import annotations

from skyrl.backends.skyrl_train.inference_servers.new_inference_worker_wrap import NewInferenceWorkerWrap

from ..runtimes.vllm.facts import FactsExtension


class EngineExtension(FactsExtension, NewInferenceWorkerWrap):
    """Methods that a launcher may call on every worker of an engine."""
