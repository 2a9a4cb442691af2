"""The entry point of the plugin, and the one function that changes vLLM's behaviour in a worker process.

`register` runs in every process of every engine, so it only adds names: two architectures, an attention backend, a
format of configurations and a way to transfer weights. An engine that asks for none of them computes what it did.
`install_logprobs` is called by our model when a worker builds it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from skyrl_isoexec.kernels.bundle import Kernels
from skyrl_isoexec.runtimes.vllm.settings import ARCHITECTURE, CONFIG_FORMAT, HYBRID_ARCHITECTURE, TRANSFER_BACKEND

MODELS = {name: f"skyrl_isoexec.runtimes.vllm.adapter:{name}" for name in (ARCHITECTURE, HYBRID_ARCHITECTURE)}
BACKEND = "skyrl_isoexec.runtimes.vllm.attention.PagedBackend"
OVERRIDES = ("log_softmax_override", "token_logprobs_override")
"""Where vLLM, patched, asks: whole rows, and chosen tokens."""
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


@dataclass(frozen=True)
class TokenLogprobs:
    """What vLLM's second runner asks for: log-probabilities of chosen tokens, of which most steps want one a row."""

    kernels: Kernels

    def __call__(self, logits_TV: torch.Tensor, ids_TK: torch.Tensor) -> torch.Tensor:
        """fp32 [T, K] of fp32 logits and int64 ids: the bits of whole rows, which are made for K > 1 alone."""
        if ids_TK.shape[1] == 1:
            return self.kernels.token_logprobs(logits_TV, ids_TK[:, 0])[:, None]
        return self.kernels.logprobs(logits_TV).gather(1, ids_TK)


def install_logprobs(kernels: Kernels) -> None:
    """Makes every log-probability of this process that of `kernels`; RuntimeError if vLLM has no place for it.

    -inf among logits marks a token that cannot be sampled.
    """
    from vllm.v1.sample.ops import logprobs

    if not all(hasattr(logprobs, name) for name in OVERRIDES):
        raise RuntimeError(
            "this vLLM lacks patches/vllm/seam-log-softmax.patch or seam-runner-logprobs.patch, so its "
            "log-probabilities cannot be those of the trainer; run: isoexec patches apply"
        )
    logprobs.log_softmax_override, logprobs.token_logprobs_override = kernels.logprobs, TokenLogprobs(kernels)


def has_logprobs(kernels: Kernels) -> bool:
    """Whether `install_logprobs` put these in place, and nothing else has come since."""
    from vllm.v1.sample.ops import logprobs

    whole, chosen = (getattr(logprobs, name, None) for name in OVERRIDES)
    return whole is kernels.logprobs and type(chosen) is TokenLogprobs and chosen.kernels is kernels
