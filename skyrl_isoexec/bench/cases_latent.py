"""What `bench layers` times of latent attention: decode, and the latent form of a prefill against the expanded one.

Notable: for a decode step the stock arm is the first that can be called of vLLM's FlashMLA, vLLM's FlashAttention 3 in
its form for latents, and PyTorch's batched products over keys without pages. `mla_prefill` is the attention alone,
`mla_form` with what surrounds it: products of each head with the latents here, there one product that expands them.
Stock in both is attention over expanded keys and values.

Shapes: T tokens, N heads, P entries of a head that are not rotated, R rotated ones, L latent, Q = L + R, V width of a
value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from skyrl_isoexec.bench.cases import PAGE, SCHEDULE, Case, normal, steps
from skyrl_isoexec.bench.natives import Natives, of_vllm
from skyrl_isoexec.bench.timing import copies
from skyrl_isoexec.kernels.mla import kernel as mla

DECODES = ((1, 2048), (16, 2048), (128, 2048), (1, 32768), (16, 32768))
"""(sequences, context)."""
PREFILL = 8192
ROWS = (16, 256, 8192)
"""Of the products of each head."""
NAMES = {"head_linear": "torch.bmm"}
"""That of `mla_decode` is found when it is called."""
Batch = tuple[Tensor, Tensor, Tensor]
"""(block table, starts of queries, lengths), as `cases.steps` makes them."""
Step = Callable[[Tensor, Tensor], object]
"""(q_TNQ, cache [P, 64, Q]) -> o_TNL."""


def _flash_mla(batch: Batch, scale: float, latent: int, heads: int, width: int) -> Step:
    """As vLLM's backend FLASHMLA calls it; the plan of the step is made once, at the first call."""
    table, _, lengths = batch
    run, plan = (
        of_vllm("vllm.v1.attention.ops.flashmla", name) for name in ("flash_mla_with_kvcache", "get_mla_metadata")
    )
    metadata, _ = plan(lengths, heads, 1, is_fp8_kvcache=False)
    return lambda q, cache: run(
        q=q[:, None], k_cache=cache.unsqueeze(-2), block_table=table, cache_seqlens=lengths, head_dim_v=latent,
        tile_scheduler_metadata=metadata, softmax_scale=scale, causal=True, is_fp8_kvcache=False,
    )  # fmt: skip


def _flash_attention(batch: Batch, scale: float, latent: int, heads: int, width: int) -> Step:
    """As vLLM's backend FLASH_ATTN_MLA calls it; the plan of the step is made here."""
    table, starts, lengths = batch
    run = of_vllm("vllm.vllm_flash_attn", "flash_attn_varlen_func")
    plan = Natives().plan((heads, 1), (width - latent, latent), PAGE, batch)
    return lambda q, cache: run(
        q=q[..., latent:], k=cache[..., latent:].unsqueeze(-2), v=cache[..., :latent].unsqueeze(-2),
        q_v=q[..., :latent], max_seqlen_q=1, cu_seqlens_q=starts, max_seqlen_k=table.shape[1] * PAGE, seqused_k=lengths,
        block_table=table, softmax_scale=scale, causal=True, fa_version=3, scheduler_metadata=plan,
    )  # fmt: skip


def _products(batch: Batch, scale: float, latent: int, heads: int, width: int) -> Step:
    """Scores and sums of all heads as batched products."""

    def run(q: Tensor, cache: Tensor) -> Tensor:
        keys = cache.view(len(q), -1, cache.shape[2])
        weights = (torch.bmm(q, keys.mT).float() * scale).softmax(-1)
        return torch.bmm(weights.to(q.dtype), keys[..., :latent])

    return run


STOCK = {"vllm FlashMLA": _flash_mla, "vllm FlashAttention 3 (latent)": _flash_attention, "torch bmm": _products}


def served(*about: object, operands: tuple[Tensor, Tensor]) -> tuple[str, Step]:
    """(name, step) of the first stock arm that runs on these operands; says why others did not."""
    for name, make in STOCK.items():
        try:
            step = make(*about)
            step(*operands)
            torch.cuda.synchronize()
            return name, step
        except Exception as error:
            print(f"mla_decode: {name} cannot be called: {error!r}"[:300], flush=True)
    raise RuntimeError("no stock arm of latent decode can be called")


def decode(model: dict, num: int, context: int, natives: Natives) -> Iterator[Case]:
    """One step of `num` sequences over pages."""
    heads, latent, width = model["heads"], model["latent"], model["latent"] + model["rope"]
    batch = table, starts, lengths = steps(num, context)
    scale, size = model["dim"] ** -0.5, 2 * num * context * width
    made = copies(lambda: (normal(num, heads, width), normal(table.numel(), PAGE, width)), size)
    name, native = served(batch, scale, latent, heads, width, operands=made[0])
    natives.names["mla_decode"] = name
    yield Case(
        op="mla_decode",
        shape=f"{num}x{context}",
        made=made,
        ours=lambda q, c: mla.mla_paged(q, c, table, starts, lengths, scale, latent, schedule=SCHEDULE),
        native=native,
        num_bytes=size,
        flops=2 * num * context * heads * (width + latent),
    )


def prefill(model: dict, natives: Natives, *, whole: bool) -> Iterator[Case]:
    """One sequence; the attention alone, or `whole` from queries, latents and rotated keys to heads' outputs."""
    heads, latent, rope, nope, value = (model[name] for name in ("heads", "latent", "rope", "nope", "value"))
    num, scale = PREFILL, model["dim"] ** -0.5
    kv_b = normal(heads * (nope + value), latent) * latent**-0.5
    bounds = torch.tensor([0, num], dtype=torch.int32, device=kv_b.device)
    keys, values = kv_b.unflatten(0, (heads, -1)).split((nope, value), dim=1)

    def attend(q: Tensor, c: Tensor) -> Tensor:
        return mla.mla(q, c, bounds, scale, latent, schedule=SCHEDULE)

    def expanded(q: Tensor, k: Tensor, v: Tensor) -> None:
        natives.prefill(q, k, v, bounds, num, scale)

    def ours(q: Tensor, c: Tensor) -> Tensor:
        absorbed = torch.cat((mla.head_linear(q[..., :nope], keys.mT), q[..., nope:]), dim=2)
        return mla.head_linear(attend(absorbed, c), values)

    def native(q: Tensor, c: Tensor) -> None:
        k, v = torch.mm(c[:, :latent], kv_b.t()).unflatten(1, (heads, -1)).split((nope, value), dim=2)
        k = torch.cat((k, c[:, None, latent:].expand(-1, heads, -1)), dim=2)
        expanded(q, k, v.contiguous())

    pairs, product = num * num / 2, 2 * num * heads * latent * (nope + value)
    if whole:
        made = [(normal(num, heads, nope + rope), normal(num, latent + rope))]
    else:
        wide = (normal(num, heads, nope + rope), normal(num, heads, nope + rope), normal(num, heads, value))
        made = [(normal(num, heads, latent + rope), normal(num, latent + rope), *wide)]
    yield Case(
        op="mla_form" if whole else "mla_prefill",
        shape=f"1x{num}",
        made=made,
        ours=ours if whole else (lambda q, c, *_: attend(q, c)),
        native=native if whole else (lambda _q, _c, *wide: expanded(*wide)),
        num_bytes=2 * num * heads * (nope + rope + value),
        flops=2 * pairs * heads * (nope + rope + value) + (product if whole else 0),
    )


def products(model: dict, num_m: int) -> Iterator[Case]:
    """Values of each head from sums of latents."""
    heads, latent, value = model["heads"], model["latent"], model["value"]
    size = 2 * heads * (value * latent + num_m * latent)
    yield Case(
        op="head_linear",
        shape=f"{heads}x{value}x{latent}",
        made=copies(lambda: (normal(num_m, heads, latent), normal(heads, value, latent)), size),
        ours=mla.head_linear,
        native=lambda x, w: torch.bmm(x.transpose(0, 1), w.mT),
        num_bytes=size + 2 * num_m * heads * value,
        flops=2 * num_m * heads * value * latent,
    )
