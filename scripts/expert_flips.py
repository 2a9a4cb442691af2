#!/usr/bin/env python3
"""Count tokens that change an expert between forward, recomputation, scoring, prefill and decode.

    python scripts/expert_flips.py [--kind decoder_moe] [--routed 1000000] [--device cpu] [--size gate]

The models are those of the gate of a kind of decoder with experts, two of which tie wherever they meet; on a GPU they
are wider, with more experts, by the kernels of sm90. Sequences are random; every way routes each of their tokens in
every layer with experts, and its choice is compared, as integers, with that of the forward. Exit 1 if one differs.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recompute

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from skyrl_isoexec.gate import ways  # noqa: E402
from skyrl_isoexec.gate.models import DECODERS, HEADS, TENSOR_CORE_WIDTHS, model_config  # noqa: E402
from skyrl_isoexec.gate.run import SCHEDULE  # noqa: E402
from skyrl_isoexec.kernels.bundle import load_kernels  # noqa: E402
from skyrl_isoexec.kernels.numeric.inputs import ties_at_the_cut  # noqa: E402
from skyrl_isoexec.kernels.router import reference as router_reference  # noqa: E402
from skyrl_isoexec.model.config import DecoderConfig  # noqa: E402
from skyrl_isoexec.model.decoder import Decoder  # noqa: E402
from skyrl_isoexec.model.moe import MoE  # noqa: E402
from skyrl_isoexec.schedule import Schedule  # noqa: E402

LENGTH = 100
"""Tokens of a sequence."""
FILES = {"cpu": "cpu", "cuda": "kernel"}
"""Device -> name of its kernels."""
WIDE = {
    "vocab_size": 512,
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_layers": 4,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "q_lora_rank": 128,
}
"""Instead of the gates' sizes, where a model has them."""
SCHEDULES = {"gate": SCHEDULE, "wide": Schedule(num_leaves=1, kv_block=64, kv_partition=512)}
WAYS = ("scoring", "recomputation", "prefill", "decode")
"""What is compared with the forward that records a graph."""


def choosing(router: MoE, logits_TE: Tensor) -> Tensor:
    """What the experts of a token are chosen by."""
    bias_E = getattr(router.gate, "e_score_correction_bias", None)
    scores_TE = router_reference.scores(logits_TE, router.rule)
    return scores_TE if bias_E is None else scores_TE + bias_E


def watched(decoder: Decoder) -> list[list[Tensor]]:
    """For every layer with experts, a list that each later call of its router adds its choice [T, K] to."""
    found: list[list[Tensor]] = []
    for module in (part for part in decoder.modules() if isinstance(part, MoE)):
        seen: list[Tensor] = []

        def route(
            logits: Tensor, module: MoE = module, real: Callable = module.route, seen: list[Tensor] = seen
        ) -> tuple[Tensor, Tensor]:
            weights, experts = real(logits)
            seen.append(experts.detach())
            module.route.ties += ties_at_the_cut(choosing(module, logits.detach()), experts.detach())
            return weights, experts

        route.ties = 0
        module.route = route
        found.append(seen)
    return found


def taken(seen: list[list[Tensor]]) -> list[Tensor]:
    """The choices so far of each layer, [T, K], and forget them."""
    choices = [torch.cat(calls) for calls in seen]
    for calls in seen:
        calls.clear()
    return choices


def by_sequence(choice: Tensor, num: int) -> Tensor:
    """Choices of decode steps, step by step, in the order of packed sequences of equal length."""
    return choice.unflatten(0, (-1, num)).transpose(0, 1).flatten(0, 1)


def round_of(decoder: Decoder, seen: list[list[Tensor]], sequences: list[Tensor]) -> dict[str, list[Tensor]]:
    """{way: choices of each layer} over some sequences."""
    ids, positions, cu = ways.packed(sequences)
    rows = decoder.end_to_end(cu)
    found: dict[str, list[Tensor]] = {}
    x = decoder.embed(ids)
    for index in decoder.layer_indices:
        x = recompute(decoder.layer, index, x, positions, rows, use_reentrant=False)
    found["forward"] = taken(seen)
    decoder.full_logits(x).sum().backward()
    found["recomputation"] = taken(seen)
    decoder.zero_grad(set_to_none=True)
    with torch.no_grad():
        decoder.layers(decoder.embed(ids), positions, rows)
        found["scoring"] = taken(seen)
    ways.engine(decoder, sequences, ways.prefill_steps(sequences))
    found["prefill"] = taken(seen)
    ways.engine(decoder, sequences, ways.decode_steps(sequences))
    found["decode"] = [by_sequence(choice, len(sequences)) for choice in taken(seen)]
    return found


def described(kind: str, size: str) -> tuple[str, DecoderConfig]:
    """(name, configuration) of the first model of a kind of decoder."""
    name, fields = next(iter(DECODERS[kind].items()))
    if size == "gate":
        return name, model_config("bfloat16", fields)
    heads = {field: width for field, width in TENSOR_CORE_WIDTHS.items() if field in HEADS | fields}
    kept = {field for field, value in WIDE.items() if field in fields and fields[field] is not None}
    kept |= {"vocab_size", "hidden_size", "num_layers"} | ({"intermediate_size"} - fields.keys())
    return name, model_config("bfloat16", fields | heads | {field: WIDE[field] for field in kept})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = [kind for kind in DECODERS if any("num_experts" in fields for fields in DECODERS[kind].values())]
    parser.add_argument("--kind", default="decoder_moe", choices=kinds)
    parser.add_argument("--routed", type=int, default=1_000_000, help="choices that every way has to make")
    parser.add_argument("--device", default="cpu", choices=list(FILES))
    parser.add_argument("--size", choices=list(SCHEDULES), help="of the model; default: gate on cpu, wide on cuda")
    parser.add_argument("--sequences", type=int, help="of a round; default: 128 on cpu, 512 on cuda")
    given = parser.parse_args()
    on_gpu = given.device == "cuda"
    size, num = given.size or ("wide" if on_gpu else "gate"), given.sequences or (512 if on_gpu else 128)
    if on_gpu and size == "gate":
        parser.error("--size gate has heads that tensor cores do not take; leave it out")
    name, config = described(given.kind, size)
    kernels = load_kernels(dict.fromkeys(config.operators, FILES[given.device]), SCHEDULES[size])
    decoder = ways.builder(config, kernels, given.device)()
    seen, begin = watched(decoder), time.monotonic()
    compared, flipped, number = dict.fromkeys(WAYS, 0), dict.fromkeys(WAYS, 0), 0
    while min(compared.values()) < given.routed:
        random = torch.Generator().manual_seed(number)
        ids = torch.randint(config.vocab_size, (num, LENGTH), generator=random).to(given.device)
        found = round_of(decoder, seen, list(ids))
        for way in WAYS:
            for expected, choice in zip(found["forward"], found[way], strict=True):
                assert expected.shape == choice.shape == (num * LENGTH, config.num_experts_per_tok)
                compared[way] += len(choice)
                flipped[way] += int((expected != choice).any(1).sum())
        number += 1
        print(f"{min(compared.values())} choices after {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    ties = sum(part.route.ties for part in decoder.modules() if isinstance(part, MoE))
    for way in WAYS:
        print(
            f"{name}, {size}, {given.device}: {way:13} {flipped[way]} of {compared[way]} tokens choose another expert"
        )
    print(f"a tie decided {ties} choices; {time.monotonic() - begin:.0f} s")
    return int(any(flipped.values()) or not ties)


if __name__ == "__main__":
    sys.exit(main())
