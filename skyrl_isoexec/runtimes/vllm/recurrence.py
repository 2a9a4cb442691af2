"""Our gated delta rule behind vLLM's interface of recurrent layers: the engine pages the states, our kernels define
what is in a page.

A page holds the state after the last token that fell into it, so a sequence has one page every `page_size` tokens, and
a full one is a cached prefix like any other. The kernels find position and page from lengths and block table alone: no
counter is kept beside a page, and nothing is cleared or copied by the host.

Shapes: T tokens, V value heads of this rank, D their width, R requests, B pages of a request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import KVCacheSpec

from skyrl_isoexec.kernels.bundle import Kernels
from skyrl_isoexec.model.config import DecoderConfig
from skyrl_isoexec.model.sequences import GdnRows, gdn_heads
from skyrl_isoexec.runtimes.vllm.pages import state_shapes


@dataclass
class StateMetadata(AttentionMetadata):
    """One step's batch, for the layers of one group."""

    block_table: torch.Tensor
    """int32 [R, B]."""
    query_start: torch.Tensor
    """int32 [R + 1]."""
    seq_lens: torch.Tensor
    """int32 [R], with the tokens of this step."""


class StateBuilder(AttentionMetadataBuilder[StateMetadata]):
    """Takes from vLLM's description of a batch what the kernels read.

    All tensors are views of the runner's own, at the same addresses in every step, as a captured graph needs them. In a
    graph padding has no rows and no length, and its row of the block table names vLLM's null page.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> StateMetadata:
        """The metadata of one step; a shared prefix gets no treatment of its own."""
        common = common_attn_metadata
        return StateMetadata(
            block_table=common.block_table_tensor, query_start=common.query_start_loc, seq_lens=common.seq_lens
        )


class StateBackend(AttentionBackend):
    """What vLLM asks of a kind of layer; the layer itself says what is in a page."""

    @staticmethod
    def get_name() -> str:
        """A member of vLLM's enumeration of backends."""
        return MambaAttentionBackendEnum.CUSTOM.name

    @staticmethod
    def get_impl_cls() -> type:
        """None: a recurrent layer computes itself."""
        raise NotImplementedError("a recurrent layer has no implementation beside itself")

    @staticmethod
    def get_builder_cls() -> type[StateBuilder]:
        """The builder of metadata."""
        return StateBuilder

    @staticmethod
    def get_kv_cache_shape(*_: object, **__: object) -> tuple[int, ...]:
        """None: a page holds states, no keys and values."""
        raise NotImplementedError("a recurrent layer has states, no keys and values")

    @classmethod
    def is_ssm(cls) -> bool:
        """A page is no sequence of slots for tokens."""
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """A row's result does not depend on the batch."""
        return True


class Recurrence(nn.Module, MambaBase):
    """The pages of one layer's states, and the kernels over them."""

    def __init__(
        self, config: DecoderConfig, size: int, kernels: Kernels, vllm_config: VllmConfig, prefix: str
    ) -> None:
        """`size` is that of the tensor-parallel axis; `prefix` is the layer's name. ValueError for a name twice."""
        super().__init__()
        cache, chunk = vllm_config.cache_config, kernels.schedule.gdn_chunk
        self.kernels, self.heads, self.layer_name = kernels, gdn_heads(config, size), prefix
        self.shapes = state_shapes(config, size, kernels)
        self.block_size = cache.mamba_block_size
        """Tokens of a page, as vLLM counts them: all of a sequence's, without a prefix cache."""
        self.page_size = -(-self.block_size // chunk) * chunk
        """The same in whole chunks."""
        self.kv_cache: tuple[torch.Tensor, ...] = ()
        """The states, [P, ...] each: vLLM puts them here."""
        layers = vllm_config.compilation_config.static_forward_context
        if prefix in layers:
            raise ValueError(f"a layer named {prefix} exists already")
        layers[prefix] = self

    def forward(self, rows: GdnRows) -> torch.Tensor:
        """o_TVD. Without metadata (the engine measures its memory) there are no pages, and the output is zero."""
        out = rows.x_TC.new_empty(rows.x_TC.shape[0], self.heads.num_value_heads, self.heads.value_width)
        described = get_forward_context().attn_metadata
        if described is None:
            return out.zero_()
        batch: StateMetadata = described[self.layer_name]
        paged = (self.kv_cache, batch.block_table, batch.query_start, batch.seq_lens, self.page_size, self.heads)
        return self.kernels.gdn_paged(*rows.all(), *paged, out=out)

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        """Of each state of one page."""
        return tuple(shape for shape, _ in self.shapes)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        """Of each state."""
        return tuple(dtype for _, dtype in self.shapes)

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        """None of vLLM's own."""
        return MambaAttentionBackendEnum.CUSTOM

    def get_attn_backend(self) -> type[AttentionBackend]:
        """Ours."""
        return StateBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        """What vLLM pages, once it has settled the size of pages; ValueError if that is not what this layer was built
        for."""
        spec = super().get_kv_cache_spec(vllm_config)
        if spec.block_size != self.block_size:
            raise ValueError(
                f"engine option mamba_block_size was {self.block_size} and became {spec.block_size}: vLLM found no "
                "page of keys and values as large as one of states; set block_size to pages.hybrid_page_size"
            )
        return spec
