"""The unified decoder as a vLLM model: the engine schedules, pages and samples; the arithmetic is ours.

One worker holds one tensor-parallel rank of the decoder. Every row of a step is computed as if it were alone, so what
shares the step, how a prompt was cut, and what was cached change nothing.

Shapes: T tokens of a step, H hidden, V whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.sequence import IntermediateTensors

from skyrl_isoexec.kernels.bundle import load_kernels
from skyrl_isoexec.kernels.numeric.gdn_checks import StateShapes
from skyrl_isoexec.model.decoder import Decoder
from skyrl_isoexec.model.sequences import GdnRows
from skyrl_isoexec.runtimes.vllm.attention import PagedBackend, PagedMetadata, bind
from skyrl_isoexec.runtimes.vllm.axes import tensor_axis
from skyrl_isoexec.runtimes.vllm.checks import check_contract, check_engine, check_pages, read_model_config
from skyrl_isoexec.runtimes.vllm.install import has_logprobs, install_logprobs
from skyrl_isoexec.runtimes.vllm.latent import LatentBackend, LatentPages
from skyrl_isoexec.runtimes.vllm.pages import state_kernels, state_shapes
from skyrl_isoexec.runtimes.vllm.recurrence import Recurrence
from skyrl_isoexec.runtimes.vllm.settings import EngineSettings
from skyrl_isoexec.runtimes.vllm.steps import Steps
from skyrl_isoexec.runtimes.vllm.weights import WeightLoader, expected_table


class IsoExecForCausalLM(Decoder):
    """Registered with vLLM under this name; parameters have the names of Hugging Face checkpoints.

    It is its decoder's `Sequences`: earlier rows are in vLLM's pages.
    """

    is_hybrid: ClassVar[bool] = False
    """Whether layers have recurrent states: vLLM asks the class, before there is a model."""
    joined_on: ClassVar[tuple[str, ...]] = ("cuda",)
    """Devices whose kernels read weights as they are, so that linears of one input are joined."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        settings = EngineSettings.from_additional_config(vllm_config.additional_config)
        config = read_model_config(vllm_config, settings)
        check_engine(vllm_config, config, settings)
        if settings.contract is not None:
            check_contract(vllm_config, config, settings.decoded)
        kernels = load_kernels(settings.kernels, settings.schedule)
        check_pages(vllm_config, config, kernels)
        device = vllm_config.device_config.device
        super().__init__(config, kernels, tensor_axis(), settings.schedule, device=device)
        self.requires_grad_(False)
        if vllm_config.device_config.device_type in self.joined_on:
            self.join()
        table = self.cos_sin_PR
        del self.cos_sin_PR
        self.cos_sin_PR = table  # no buffer: a reload of the weights would take it for one of them
        self.restore_table()
        self.settings, self.loader, self.steps = settings, WeightLoader(self), Steps(kernels, self._check_ready)
        install_logprobs(kernels)
        paged = LatentBackend if config.latent else PagedBackend
        backend = bind(kernels, settings.schedule.kv_block, self.steps.begin, paged)
        self.last_attention = max(index for index in range(config.num_layers) if config.attends(index))
        self.pages = nn.ModuleList(
            self._attention(index, backend, vllm_config)
            if config.attends(index)
            else Recurrence(config, self.axis.size, kernels, vllm_config, f"model.layers.{index}.linear_attn")
            for index in range(config.num_layers)
        )

    def _attention(self, index: int, backend: type[PagedBackend], vllm_config: VllmConfig) -> Attention:
        config, size, prefix = self.config, self.axis.size, f"model.layers.{index}.self_attn.attn"
        finish = self.loader.finish if index == self.last_attention else None
        implementation = {"attn_backend": backend, "kernels": self.kernels, "after_loading": finish}
        if config.latent:
            return LatentPages(config, size, vllm_config, prefix, **implementation)
        return Attention(
            config.num_heads // size,
            config.head_dim,
            config.scale,
            num_kv_heads=config.num_kv_heads // size,
            cache_config=vllm_config.cache_config,
            prefix=prefix,
            **implementation,
        )

    def attend(self, layer: int, q_TND: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> torch.Tensor:
        """Attention of one layer over vLLM's pages, [T, N * D]."""
        return self.pages[layer](q_TND, k_TKD, v_TKD)

    def attend_latent(self, layer: int, q_TNQ: torch.Tensor, c_TQ: torch.Tensor) -> torch.Tensor:
        """Latent attention of one layer over vLLM's pages, o_TNL."""
        return self.pages[layer](q_TNQ, c_TQ)

    def recur(self, layer: int, rows: GdnRows) -> torch.Tensor:
        """The gated delta rule of one layer over vLLM's pages, o_TVD."""
        return self.pages[layer](rows)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """x_TH of token ids."""
        return self.embed(input_ids.long())

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **unknown: object,
    ) -> torch.Tensor:
        """The residual stream x_TH after the last layer. RuntimeError if it would not be the trainer's."""
        if unknown or intermediate_tensors is not None or inputs_embeds is not None:
            given = sorted(unknown) + [
                name
                for name, value in (("intermediate_tensors", intermediate_tensors), ("inputs_embeds", inputs_embeds))
                if value is not None
            ]
            raise TypeError(f"IsoExecForCausalLM takes token ids and positions; it was given {given}")
        metadata: dict[str, PagedMetadata] | None = get_forward_context().attn_metadata
        self.steps.forward(None if metadata is None else metadata[self.pages[self.last_attention].layer_name].case)
        return self.layers(self.embed_input_ids(input_ids), positions, self)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """fp32 logits [T, V] on every rank, from rows of the residual stream."""
        self.steps.end()
        return self.full_logits(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Take full tensors, of a checkpoint or of a trainer's update; returns the names that vLLM may tick off."""
        self.loader.accept(weights)
        return set(self.loader.homes)

    def restore_table(self) -> None:
        """Computes the rotary table again, at the same address, and as a trainer does: on the CPU.

        vLLM builds a model with its device as the default one, and gives the memory of a sleeping worker away.
        """
        self.cos_sin_PR.copy_(expected_table(self))

    def _check_ready(self) -> None:
        if not self.loader.complete or self.loader.received:
            raise RuntimeError(
                f"the weights are incomplete: {len(self.loader.received)} of {len(self.loader.homes)} tensors of an "
                "update have come, or the last update was refused"
            )
        if not has_logprobs(self.kernels):
            raise RuntimeError(
                "another model of this process replaced the log-probabilities; run one engine per process"
            )


class IsoExecHybridForCausalLM(IsoExecForCausalLM):
    """The same for a decoder with recurrent layers, under a name of its own."""

    is_hybrid = True
    has_inner_state: ClassVar[bool] = True
    supports_mamba_prefix_caching: ClassVar[bool] = True
    """A state is kept for every page, vLLM's cache mode "all"."""
    supports_mrope: ClassVar[bool] = True
    """vLLM gives three rows of positions where a configuration has sections for images; of text they are equal."""

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple[tuple[int, ...], ...]:
        """Of each state in a page of one layer."""
        return tuple(shape for shape, _ in cls._states(vllm_config))

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        """Of each state."""
        return tuple(dtype for _, dtype in cls._states(vllm_config))

    @staticmethod
    def _states(vllm_config: VllmConfig) -> StateShapes:
        settings = EngineSettings.from_additional_config(vllm_config.additional_config)
        config, tp = read_model_config(vllm_config, settings), vllm_config.parallel_config.tensor_parallel_size
        return state_shapes(config, tp, state_kernels(settings.kernels, settings.schedule))

    def get_mrope_input_positions(self, input_tokens: list[int], mm_features: list[object]) -> tuple[torch.Tensor, int]:
        """Three equal rows of positions [3, T], and nothing to add to those that follow. ValueError for an image."""
        if mm_features:
            raise ValueError(f"{type(self).__name__} takes token ids; a request has {len(mm_features)} other inputs")
        return torch.arange(len(input_tokens)).expand(3, -1), 0

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **unknown: object,
    ) -> torch.Tensor:
        """As its base's; positions [T], or [3, T] with equal rows."""
        positions = positions if positions.dim() == 1 else positions[0]
        return super().forward(input_ids, positions, intermediate_tensors, inputs_embeds, **unknown)
