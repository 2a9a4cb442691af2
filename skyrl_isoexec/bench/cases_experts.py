"""What `bench layers` times of a mixture of experts: from a router's logits to the sum over a token's experts.

Notable: our arm calls what the model calls, in its order. Stock is vLLM's Triton experts behind its own router for the
steps of an engine, and for a trainer's rows PyTorch's grouped product on sorted tokens. Both without the shared expert;
the stock routers leave out the bias that ours adds.

Shapes: T tokens, E experts, K of a token, H hidden, F features of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from skyrl_isoexec.bench.cases import Case, normal
from skyrl_isoexec.bench.natives import of_vllm
from skyrl_isoexec.kernels.combine import kernel as combine
from skyrl_isoexec.kernels.experts import kernel as experts
from skyrl_isoexec.kernels.numeric.router_rule import RouterRule
from skyrl_isoexec.kernels.router import kernel as router
from skyrl_isoexec.kernels.swiglu import kernel as swiglu

STEPS, BATCHES = (1, 16, 64, 256), (8192, 16384)
"""Tokens of an engine's step, and of a trainer's forward."""
RULES = {
    "softmax": RouterRule(scoring="softmax", renormalise=True),
    "sigmoid": RouterRule(scoring="sigmoid", renormalise=True, scale=1.8, eps=1e-20),
}
"""Of Qwen3.5's routers and GLM-4.7-Flash's."""
NAMES = {"experts": "vllm fused_topk, fused_experts", "experts_batch": "torch topk, grouped_mm"}
Layer = Callable[[Tensor, Tensor], object]
"""(x_TH, fp32 logits_TE) -> y_TH."""


def ours(model: dict, gate_up: Tensor, down: Tensor) -> Layer:
    """As `model/moe.py` computes it where all experts are on one rank."""
    num, rule = model["experts"], RULES[model["scoring"]]
    bias = torch.zeros(num, device=down.device) if model["scoring"] == "sigmoid" else None

    def run(x_TH: Tensor, logits_TE: Tensor) -> Tensor:
        weights_TK, experts_TK = router.route(logits_TE, model["top"], rule, bias)
        order_S, starts_E1 = combine.dispatch(experts_TK, num)
        both_SF = experts.grouped_linear(combine.expand(x_TH, order_S), gate_up, starts_E1)
        gate_SF, up_SF = both_SF.chunk(2, dim=1)
        y_SH = experts.grouped_linear(swiglu.silu_mul(gate_SF, up_SF), down, starts_E1)
        return combine.combine(y_SH, order_S, weights_TK, None)

    return run


def fused(model: dict, gate_up: Tensor, down: Tensor) -> Layer:
    """By vLLM; calling it is a RuntimeError where that is not installed."""
    module = "vllm.model_executor.layers.fused_moe"
    topk, layer = of_vllm(module, "fused_topk"), of_vllm(module, "fused_experts")

    def run(x_TH: Tensor, logits_TE: Tensor) -> Tensor:
        if topk is None or layer is None:
            raise RuntimeError(f"{module} cannot be imported")
        weights, ids, _ = topk(x_TH, logits_TE, model["top"], renormalize=True, scoring_func=model["scoring"])
        return layer(x_TH, gate_up, down, weights, ids)

    return run


def grouped(model: dict, gate_up: Tensor, down: Tensor) -> Layer:
    """By PyTorch: rows sorted by expert, two grouped products, and a product of each token's weights and rows."""
    top, num = model["top"], model["experts"]
    product = getattr(F, "grouped_mm", None) or torch._grouped_mm
    numbers = torch.arange(num, device=down.device)

    def run(x_TH: Tensor, logits_TE: Tensor) -> Tensor:
        scores = logits_TE.softmax(-1) if model["scoring"] == "softmax" else logits_TE.sigmoid()
        weights, ids = scores.topk(top, dim=-1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x_TH.dtype)
        ascending, order = ids.flatten().sort()
        ends = torch.searchsorted(ascending, numbers, right=True, out_int32=True)
        both = product(x_TH[order // top], gate_up.mT, offs=ends)
        gate, up = both.chunk(2, dim=1)
        y = product(F.silu(gate) * up, down.mT, offs=ends)
        slots = torch.empty_like(y).index_copy_(0, order, y)
        return torch.bmm(weights[:, None], slots.view(len(x_TH), top, -1))[:, 0]

    return run


def cases(model: dict, num_tokens: int) -> Iterator[Case]:
    """A layer of `model` on that many tokens, each of which chooses at random."""
    num, top, hidden, width = model["experts"], model["top"], model["hidden"], model["width"]
    gate_up, down = normal(num, 2 * width, hidden), normal(num, hidden, width)
    wide = num_tokens > max(STEPS)
    used = num * (1 - (1 - top / num) ** num_tokens)
    yield Case(
        op="experts_batch" if wide else "experts",
        shape=f"{num}/{top}x{width}",
        made=[(normal(num_tokens, hidden), torch.randn(num_tokens, num, device=down.device))],
        ours=ours(model, gate_up, down),
        native=(grouped if wide else fused)(model, gate_up, down),
        num_bytes=2 * (3 * used * width * hidden + 2 * num_tokens * hidden) + 4 * num_tokens * num,
        flops=6 * num_tokens * top * width * hidden,
    )
