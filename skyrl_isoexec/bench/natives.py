"""The stock operators that ours are compared with: vLLM's where it is installed, PyTorch's otherwise.

Notable: vLLM is looked up by name, because a benchmark takes what is there.
"""

import importlib
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def of_vllm(module: str, name: str) -> Any:
    """What vLLM has there, or None."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, OSError, RuntimeError):
        return None


class Natives:
    """Each operator and the name of what serves it."""

    def __init__(self) -> None:
        self.ops = of_vllm("vllm._custom_ops", "fused_add_rms_norm") and importlib.import_module("vllm._custom_ops")
        self.flash = of_vllm("vllm.vllm_flash_attn", "flash_attn_varlen_func")
        self.names = {
            "linear": "torch.mm",
            "row_linear": "torch.mm",
            "add_rmsnorm": "vllm fused_add_rms_norm" if self.ops else "torch add, rms_norm",
            "rope": "vllm rotary_embedding" if self.ops else "torch, eager",
            "silu_mul": "vllm silu_and_mul" if self.ops else "torch silu, mul",
            "prefill": "vllm FlashAttention 3" if self.flash else "torch SDPA (flash)",
            "decode": "vllm FlashAttention 3" if self.flash else "torch SDPA (flash)",
            "token_logprobs": "torch log_softmax, gather",
        }

    def add_rmsnorm(self, x: Tensor, residual: Tensor, w: Tensor) -> None:
        """In place with vLLM."""
        if self.ops:
            self.ops.fused_add_rms_norm(x, residual, w, 1e-6)
        else:
            F.rms_norm(x + residual, w.shape, w, 1e-6)

    def rope(self, x: Tensor, positions: Tensor, table: Tensor) -> None:
        """In place with vLLM; `table` is of x's dtype, as vLLM keeps it."""
        if self.ops:
            self.ops.rotary_embedding(positions, x.view(x.shape[0], -1), None, x.shape[2], table, True)
            return
        c, s = table[positions][:, None].chunk(2, -1)
        a, b = x.chunk(2, -1)
        torch.cat((a * c - b * s, b * c + a * s), -1).to(x.dtype)

    def silu_mul(self, both: Tensor, out: Tensor) -> None:
        """`both` holds gate and up beside each other."""
        if self.ops:
            torch.ops._C.silu_and_mul(out, both)
        else:
            gate, up = both.chunk(2, -1)
            torch.mul(F.silu(gate), up, out=out)

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, scale: float) -> None:
        """Causal, packed sequences of equal length."""
        if self.flash:
            self.flash(q, k, v, max_seqlen_q=longest, cu_seqlens_q=bounds, max_seqlen_k=longest, cu_seqlens_k=bounds,
                       softmax_scale=scale, causal=True, fa_version=3)  # fmt: skip
            return
        q, k, v = (x.view(-1, longest, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)

    def plan(self, heads: tuple[int, int], widths: tuple[int, int], page: int, batch: tuple[Tensor, ...]) -> Any:
        """FlashAttention 3's plan of a decode step, which vLLM makes once for all layers; None without it.

        (query, key-value) heads, widths of (a key, a value), and what `cases.steps` makes.
        """
        make = of_vllm("vllm.vllm_flash_attn", "get_scheduler_metadata")
        if not self.flash or make is None:
            return None
        table, starts, lengths = batch
        return make(
            batch_size=len(lengths), max_seqlen_q=1, max_seqlen_k=table.shape[1] * page, num_heads_q=heads[0],
            num_heads_kv=heads[1], headdim=widths[0], headdim_v=widths[1], cache_seqlens=lengths,
            qkv_dtype=torch.bfloat16, cu_seqlens_q=starts, page_size=page, causal=True,
        )  # fmt: skip

    def decode(
        self, q: Tensor, cache: Tensor, table: Tensor, lengths: Tensor, starts: Tensor, scale: float, plan: Any
    ) -> None:
        """One row per sequence; with PyTorch over contiguous keys of the same size, without pages."""
        longest = table.shape[1] * cache.shape[4]
        keys, values = cache.view(cache.shape[0], 2, cache.shape[4], cache.shape[2], cache.shape[3]).unbind(1)
        if self.flash:
            self.flash(q, keys, values, max_seqlen_q=1, cu_seqlens_q=starts, max_seqlen_k=longest, seqused_k=lengths,
                       block_table=table, softmax_scale=scale, causal=True, fa_version=3,
                       scheduler_metadata=plan)  # fmt: skip
            return
        k, v = (x.reshape(q.shape[0], longest, *x.shape[2:]).transpose(1, 2) for x in (keys, values))
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            F.scaled_dot_product_attention(q[:, :, None], k, v, scale=scale, enable_gqa=True)
