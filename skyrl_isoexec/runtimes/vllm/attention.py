"""Our attention behind vLLM's backend interface: the engine pages the cache, our kernels define what is in a page.

A backend class is bound to one set of kernels by `bind`, because vLLM asks the class, not a layer, for the shape of the
cache. Nothing here depends on what else is in the batch.

Shapes: T tokens, N query heads, K key/value heads, D head width, R requests, B pages of a request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)

from skyrl_isoexec.kernels.bundle import Kernels

RESUMABLE, CONTINUED = "engine_prefill", "engine_decode"
"""The contract's names of the two ways in which an engine computes."""


@dataclass
class PagedMetadata(AttentionMetadata):
    """One step's batch; all layers share it."""

    block_table: torch.Tensor
    """int32 [R, B]."""
    query_start: torch.Tensor
    """int32 [R + 1]."""
    seq_lens: torch.Tensor
    """int32 [R], with the tokens of this step."""
    slots_T: torch.Tensor
    """int64, where each token's key and value go."""
    case: str
    """`CONTINUED` if every request has one token and a cached context, else `RESUMABLE`."""


class PagedBuilder(AttentionMetadataBuilder[PagedMetadata]):
    """Takes from vLLM's description of a batch what the kernels read.

    All tensors are views of the runner's own, at the same addresses in every step, as a captured graph needs them. In a
    graph a batch of one-token requests is padded: padding has no query rows, no context and slot -1.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    begin: ClassVar[Callable[[str], None] | None] = None
    """Called with the case of every batch, before the model or a graph of it computes; see `Steps.begin`."""

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PagedMetadata:
        """The metadata of one step; a shared prefix gets no treatment of its own."""
        common = common_attn_metadata
        if not common.causal:
            raise ValueError("attention that is not causal is not supported")
        case = CONTINUED if common.max_query_len == 1 and not _any_fresh(common) else RESUMABLE
        if self.begin is not None:
            self.begin(case)
        return PagedMetadata(
            block_table=common.block_table_tensor,
            query_start=common.query_start_loc,
            seq_lens=common.seq_lens,
            slots_T=common.slot_mapping[: common.num_actual_tokens],
            case=case,
        )


def _any_fresh(common: CommonAttentionMetadata) -> bool:
    """Whether a request of one token has no other; asks no device."""
    lens = common.seq_lens_cpu_upper_bound
    lens = common.seq_lens if lens is None else lens  # without a device they are the same memory
    return bool((lens[: common.num_reqs] == 1).any())


class PagedAttention(AttentionImpl[PagedMetadata]):
    """One layer. `after_loading` is called when vLLM has loaded, or reloaded, all weights."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        *,
        kernels: Kernels,
        after_loading: Callable[[], None] | None = None,
    ) -> None:
        refused = {
            "alibi_slopes": alibi_slopes,
            "sliding_window": sliding_window,
            "logits_soft_cap": logits_soft_cap,
            "kv_sharing_target_layer_name": kv_sharing_target_layer_name,
        }
        for name, value in refused.items():
            if value is not None:
                raise ValueError(f"attention with {name} = {value!r} is not supported")
        if kv_cache_dtype != "auto" or attn_type != AttentionType.DECODER:
            raise ValueError(f"attention with kv_cache_dtype {kv_cache_dtype!r}, type {attn_type!r} is not supported")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads, self.kv_cache_dtype = num_kv_heads or num_heads, kv_cache_dtype
        self.kernels, self.after_loading = kernels, after_loading

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: PagedMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Stores key and value [T, K, D], attends query [T, N, D] over the pages, writes `output` [T, N, D].

        Without metadata (the engine measures its memory) there is no cache, and the output is zero.
        """
        if attn_metadata is None:
            return output.zero_()
        self._attend(query, key, value, kv_cache, attn_metadata, output)
        return output

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        batch: PagedMetadata,
        output: torch.Tensor,
    ) -> None:
        self.kernels.write_kv(key, value, kv_cache, batch.slots_T)
        described = (batch.block_table, batch.query_start, batch.seq_lens)
        self.kernels.attention_paged(query, kv_cache, *described, self.scale, out=output)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Called by vLLM after the initial load and after every update of the weights."""
        if self.after_loading is not None:
            self.after_loading()


class PagedBackend(AttentionBackend):
    """Registered as vLLM's CUSTOM backend; only a class made by `bind` can be used."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto"]
    kernels: ClassVar[Kernels | None] = None
    page_multiple: ClassVar[int] = 1
    builder: ClassVar[type[PagedBuilder]] = PagedBuilder

    @staticmethod
    def get_name() -> str:
        """A member of vLLM's enumeration of backends."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[PagedAttention]:
        """The layer's implementation."""
        return PagedAttention

    @classmethod
    def get_builder_cls(cls) -> type[PagedBuilder]:
        """The builder of metadata."""
        return cls.builder

    @classmethod
    def get_supported_kernel_block_sizes(cls) -> list[int | MultipleOf]:
        """Pages hold whole softmax blocks."""
        return [MultipleOf(cls.page_multiple)]

    @classmethod
    def get_kv_cache_shape(
        cls, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """The kernels' shape of one layer's cache, pages first."""
        if cls.kernels is None:
            raise RuntimeError("the CUSTOM attention backend belongs to IsoExecForCausalLM and serves no other model")
        return cls._cache_shape(num_blocks, block_size, num_kv_heads, head_size)

    @classmethod
    def _cache_shape(cls, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        return cls.kernels.kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size)

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """A row's result does not depend on the batch."""
        return True


def bind(
    kernels: Kernels,
    page_multiple: int,
    begin: Callable[[str], None] | None = None,
    backend: type[PagedBackend] = PagedBackend,
) -> type[PagedBackend]:
    """`backend` over these kernels; pages are multiples of `page_multiple` positions. `begin` is the builder's."""
    builder = type("PagedBuilder", (PagedBuilder,), {"begin": None if begin is None else staticmethod(begin)})
    bound = {"kernels": kernels, "page_multiple": page_multiple, "builder": builder}
    return type(backend.__name__, (backend,), bound)
