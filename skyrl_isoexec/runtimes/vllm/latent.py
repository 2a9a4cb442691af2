"""Our latent attention behind vLLM's interface of attention layers: a page holds one vector a position, the key of all
heads, whose first entries are its value.

vLLM's own multi-head latent attention is none of this: it has other layers, which choose between two forms. Here a
layer is attention with one key/value head, in the one form, and only what a page holds is said to be latent. Batches
are described as in `attention`; every tensor-parallel rank keeps all keys.

Shapes: T tokens, N query heads of this rank, L width of the latent, Q of it with the rotated part.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.v1.kv_cache_interface import KVCacheSpec, MLAAttentionSpec

from skyrl_isoexec.model.config import DecoderConfig
from skyrl_isoexec.runtimes.vllm.attention import PagedAttention, PagedBackend, PagedMetadata


class PagedLatent(PagedAttention):
    """One layer; `latent` is how many of a key's entries are its value."""

    def __init__(self, *arguments: Any, latent: int, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.latent = latent

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        batch: PagedMetadata,
        output: torch.Tensor,
    ) -> None:
        """Stores key [T, 1, Q], of which `value` is a view, attends query [T, N, Q], writes `output` [T, N, L]."""
        self.kernels.write_latent(key[:, 0], kv_cache, batch.slots_T)
        described = (batch.block_table, batch.query_start, batch.seq_lens)
        self.kernels.mla_paged(query, kv_cache, *described, self.scale, self.latent, out=output)


class LatentBackend(PagedBackend):
    """As its base; see `attention.bind`."""

    @staticmethod
    def get_impl_cls() -> type[PagedLatent]:
        """The layer's implementation."""
        return PagedLatent

    @classmethod
    def _cache_shape(cls, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        return cls.kernels.mla_cache_shape(num_blocks, block_size, num_kv_heads * head_size)


class LatentPages(Attention):
    """The pages of one layer's keys, and the kernels over them."""

    def __init__(
        self, config: DecoderConfig, size: int, vllm_config: VllmConfig, prefix: str, **implementation: Any
    ) -> None:
        """`size` is that of the tensor-parallel axis; `implementation` as for `Attention`."""
        super().__init__(
            config.num_heads // size,
            config.latent_width,
            config.scale,
            num_kv_heads=1,
            head_size_v=config.kv_lora_rank,
            cache_config=vllm_config.cache_config,
            prefix=prefix,
            latent=config.kv_lora_rank,
            **implementation,
        )

    def forward(self, q_TNQ: torch.Tensor, c_TQ: torch.Tensor) -> torch.Tensor:
        """o_TNL."""
        return super().forward(q_TNQ, c_TQ, c_TQ[:, : self.head_size_v]).view(-1, self.num_heads, self.head_size_v)

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        """What vLLM pages: of a position only the key."""
        return MLAAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            dtype=self.kv_cache_torch_dtype,
        )
