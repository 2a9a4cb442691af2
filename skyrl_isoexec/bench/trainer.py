"""`isoexec bench trainer`: forward and backward of a whole decoder beside transformers' class, same weights and tokens.

Notable: both arms run eagerly in this process and compute the mean log-probability of the next tokens and the gradient
of every weight, without recomputation: ours on packed sequences, transformers' on rows of equal length with PyTorch's
attention. A time is the median of CUDA events over some repeats, so the time between launches counts, as it does in a
trainer. The losses of the two arms are printed beside: one work.

Shapes: B sequences of T tokens, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from skyrl_isoexec.bench.timing import floor_ms
from skyrl_isoexec.gate.models import operators, region_of
from skyrl_isoexec.gate.record import GateError, require
from skyrl_isoexec.kernels.bundle import load_kernels
from skyrl_isoexec.model.axes import SingleAxis
from skyrl_isoexec.model.checkpoint import random_tensors
from skyrl_isoexec.model.config import DecoderConfig
from skyrl_isoexec.model.decoder import Decoder
from skyrl_isoexec.model.families import from_hf
from skyrl_isoexec.model.weights import layout, load
from skyrl_isoexec.schedule import Schedule

COMMON = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 32768}
MODELS: dict[str, tuple[str, Mapping[str, object]]] = {
    "SmolLM2-135M": (
        "LlamaConfig",
        {
            "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
            "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
        },
    ),
    "MiMo-7B, 4 layers": (
        "Qwen2Config",
        {
            "vocab_size": 151680, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 4,
            "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False,
        },
    ),
    "Qwen3-8B, 4 layers": (
        "Qwen3Config",
        {
            "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 4,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False,
        },
    ),
}  # fmt: skip
"""Name -> transformers' configuration class and fields, from the models' public configurations."""
BATCH, LENGTH, WARM, REPEATS = 4, 2048, 3, 10
SCHEDULE = Schedule(num_leaves=1, kv_block=64, kv_partition=512)
Arm = Callable[[], Tensor]
"""One forward and backward; the loss."""


def described(name: str, dtype: str, changes: Mapping[str, object]) -> tuple[Any, str, DecoderConfig]:
    """(transformers' configuration, its class of model, ours) of a model with some fields changed."""
    import transformers

    cls, fields = MODELS[name]
    hf = getattr(transformers, cls)(**COMMON | dict(fields) | dict(changes))
    architecture = cls.removesuffix("Config") + "ForCausalLM"
    return hf, architecture, from_hf(hf.to_dict() | {"architectures": [architecture]}, dtype=dtype)


def pair(
    name: str, device: str, dtype: str, impl: str, shape: tuple[int, int], changes: Mapping[str, object] | None = None
) -> tuple[Arm, Arm]:
    """(our arm, transformers' arm) with the same random weights and tokens."""
    import transformers

    hf, architecture, config = described(name, dtype, changes or {})
    tensors, torch_dtype = dict(random_tensors(config, 0)), getattr(torch, dtype)
    kernels = load_kernels(dict.fromkeys(config.operators, impl), SCHEDULE)
    decoder = Decoder(config, kernels, SingleAxis(), SCHEDULE, device=device)
    load(decoder, tensors)
    stock = getattr(transformers, architecture)._from_config(hf, dtype=torch_dtype, attn_implementation="sdpa")
    missing, unexpected = stock.load_state_dict(tensors, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise RuntimeError(f"{architecture} does not take these weights: {missing}, {unexpected}")
    stock = stock.to(device).train()
    batch, length = shape
    ids_BT = torch.randint(config.vocab_size, shape, generator=torch.Generator().manual_seed(0)).to(device)
    bounds = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=device)
    positions = torch.arange(length, device=device).repeat(batch)
    flat, following = ids_BT.flatten(), ids_BT.roll(-1, 1).flatten()

    def ours() -> Tensor:
        decoder.zero_grad(set_to_none=True)
        x_TH = decoder.layers(decoder.embed(flat), positions, decoder.end_to_end(bounds))
        scores = kernels.token_logprobs(decoder.full_logits(x_TH), following)
        loss = -scores.view(batch, length)[:, :-1].mean()
        loss.backward()
        return loss.detach()

    def native() -> Tensor:
        stock.zero_grad(set_to_none=True)
        scores = stock(ids_BT, use_cache=False).logits[:, :-1].float().log_softmax(-1)
        loss = -scores.gather(2, ids_BT[:, 1:, None]).mean()
        loss.backward()
        return loss.detach()

    return ours, native


def operations(config: DecoderConfig, shape: tuple[int, int]) -> float:
    """Floating-point operations of a forward and a backward: 6 for each weight of a product and token, and 12 for each
    pair of positions that see each other, and entry of a head."""
    num_parameters = sum(math.prod(size) for size in layout(config).values())
    batch, length = shape
    pairs = batch * length * (length + 1) / 2
    weights = num_parameters - (0 if config.tied_head else config.vocab_size * config.hidden_size)
    return 6 * weights * batch * length + 12 * pairs * config.num_heads * config.head_dim * config.num_layers


def median_ms(arm: Arm) -> float:
    """Median time of a call, after some that are not counted."""
    times = []
    for number in range(WARM + REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        arm()
        end.record()
        end.synchronize()
        if number >= WARM:
            times.append(begin.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def run(arguments: argparse.Namespace) -> int:
    """Times both arms of every model, prints a line for each, writes the JSON; 2 without a GPU or a valid gate."""
    unknown = sorted(set(arguments.models or ()) - MODELS.keys())
    if unknown or not torch.cuda.is_available():
        reason = f"unknown {unknown}" if unknown else "there is no CUDA device"
        print(f"bench trainer: {reason}", file=sys.stderr)
        return 2
    device, results, refused = torch.cuda.get_device_name(0), [], False
    print(f"{device}, torch {torch.__version__}; medians of {REPEATS} eager forwards and backwards, milliseconds")
    for name in arguments.models or MODELS:
        _, _, config = described(name, "bfloat16", {})
        try:
            for region in (region_of(config), *operators(region_of(config))):
                require(region, "sm90")
        except GateError as error:
            print(f"bench trainer refuses {name}: {error}")
            refused = True
            continue
        arms = pair(name, "cuda", "bfloat16", "kernel", (BATCH, LENGTH))
        losses, times = [arm().item() for arm in arms], [median_ms(arm) for arm in arms]
        floor = floor_ms(0, operations(config, (BATCH, LENGTH)))
        results.append({
            "model": name, "tokens": BATCH * LENGTH, "ours_ms": times[0], "native_ms": times[1],
            "ratio": times[0] / times[1], "floor_ms": floor, "losses": losses,
        })  # fmt: skip
        line = (
            f"{name:20} {BATCH}x{LENGTH} ours {times[0]:8.1f} native {times[1]:8.1f} ratio {times[0] / times[1]:5.2f}"
        )
        print(f"{line} floor {floor:7.1f}  losses {losses[0]:.4f} {losses[1]:.4f}", flush=True)
        del arms
        torch.cuda.empty_cache()
    report = {"device": device, "torch": torch.__version__, "results": results}
    arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 2 if refused else 0
