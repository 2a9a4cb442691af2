"""The entry point of the plugin, and the one function that changes vLLM's behaviour in a worker process.

`register` runs in every process of every engine, so it only adds names: two architectures, an attention backend, a
format of configurations and a way to transfer weights. An engine that asks for none of them computes what it did.
`install_log_softmax` is called by our model when a worker builds it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from skyrl_isoexec.runtimes.vllm.settings import ARCHITECTURE, CONFIG_FORMAT, HYBRID_ARCHITECTURE, TRANSFER_BACKEND

MODELS = {name: f"skyrl_isoexec.runtimes.vllm.adapter:{name}" for name in (ARCHITECTURE, HYBRID_ARCHITECTURE)}
BACKEND = "skyrl_isoexec.runtimes.vllm.attention.PagedBackend"
ENGINE = ("skyrl_isoexec.runtimes.vllm.weights", "GlooWeightTransferEngine")


def register() -> None:
    """Adds our names to vLLM's registries; may run any number of times in a process."""
    from vllm import ModelRegistry
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.transformers_utils.config import _CONFIG_FORMAT_TO_CONFIG_PARSER, register_config_parser
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    for architecture, model in MODELS.items():
        if architecture not in ModelRegistry.models:
            ModelRegistry.register_model(architecture, model)
    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
    if CONFIG_FORMAT not in _CONFIG_FORMAT_TO_CONFIG_PARSER:
        from skyrl_isoexec.runtimes.vllm.parser import DataConfigParser

        register_config_parser(CONFIG_FORMAT)(DataConfigParser)
    if TRANSFER_BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(TRANSFER_BACKEND, *ENGINE)


LogSoftmax = Callable[[torch.Tensor], torch.Tensor]
"""fp32 [rows, vocabulary] -> same; -inf marks a token that cannot be sampled."""


def install_log_softmax(function: LogSoftmax) -> None:
    """Makes every log-probability of this process ours; RuntimeError if vLLM has no place for it."""
    from vllm.v1.sample.ops import logprobs

    if not hasattr(logprobs, "log_softmax_override"):
        raise RuntimeError(
            "this vLLM lacks patches/vllm/seam-log-softmax.patch, so its log-probabilities cannot be those of the "
            "trainer; run: isoexec patches apply"
        )
    logprobs.log_softmax_override = function


def installed_log_softmax() -> LogSoftmax | None:
    """What `install_log_softmax` put in place; None if nothing is, or if vLLM has no place for it."""
    from vllm.v1.sample.ops import logprobs

    return getattr(logprobs, "log_softmax_override", None)
