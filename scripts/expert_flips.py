#!/usr/bin/env python3
"""Count tokens that change an expert between forward, recomputation, scoring, prefill and decode.

    python scripts/expert_flips.py [--kind decoder_moe] [--routed 1000000] [--device cpu]

The models are those of the gate of a kind of decoder with experts, two of which tie wherever they meet. Sequences are
random; every way routes each of their tokens in every layer with experts, and its choice is compared, as integers, with
that of the forward. Exit 1 if one differs.
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

from skyrl_isoexec.gate import decoder as gate  # noqa: E402
from skyrl_isoexec.gate import ways  # noqa: E402
from skyrl_isoexec.gate.models import DECODERS, model_config  # noqa: E402
from skyrl_isoexec.gate.run import SCHEDULE  # noqa: E402
from skyrl_isoexec.kernels.bundle import load_kernels  # noqa: E402
from skyrl_isoexec.kernels.numeric.inputs import ties_at_the_cut  # noqa: E402
from skyrl_isoexec.model.decoder import Decoder  # noqa: E402
from skyrl_isoexec.model.moe import MoE  # noqa: E402

NUM, LENGTH = 128, 100
"""Sequences of a round, and tokens of each."""
WAYS = ("scoring", "recomputation", "prefill", "decode")
"""What is compared with the forward that records a graph."""


def watched(decoder: Decoder) -> list[list[Tensor]]:
    """For every layer with experts, a list that each later call of its router adds its choice [T, K] to."""
    found: list[list[Tensor]] = []
    for module in (part for part in decoder.modules() if isinstance(part, MoE)):
        seen: list[Tensor] = []

        def route(logits: Tensor, real: Callable = module.route, seen: list[Tensor] = seen) -> tuple[Tensor, Tensor]:
            weights, experts = real(logits)
            seen.append(experts.detach().cpu())
            route.ties += ties_at_the_cut(logits.detach().cpu(), experts.detach().cpu())
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = [kind for kind in DECODERS if any("num_experts" in fields for fields in DECODERS[kind].values())]
    parser.add_argument("--kind", default="decoder_moe", choices=kinds)
    parser.add_argument("--routed", type=int, default=1_000_000, help="choices that every way has to make")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    given = parser.parse_args()
    if given.device == "cuda":
        name, config, kernels = next(iter(gate.on_tensor_cores(given.kind, "kernel", SCHEDULE)))
    else:
        name, fields = next(iter(DECODERS[given.kind].items()))
        config = model_config("bfloat16", fields)
        kernels = load_kernels(dict.fromkeys(config.operators, "cpu"), SCHEDULE)
    decoder = ways.builder(config, kernels, given.device)()
    seen, begin = watched(decoder), time.monotonic()
    compared, flipped, number = dict.fromkeys(WAYS, 0), dict.fromkeys(WAYS, 0), 0
    while min(compared.values()) < given.routed:
        random = torch.Generator().manual_seed(number)
        ids = torch.randint(config.vocab_size, (NUM, LENGTH), generator=random).to(given.device)
        found = round_of(decoder, seen, list(ids))
        for way in WAYS:
            for expected, choice in zip(found["forward"], found[way], strict=True):
                assert expected.shape == choice.shape == (NUM * LENGTH, config.num_experts_per_tok)
                compared[way] += len(choice)
                flipped[way] += int((expected != choice).any(1).sum())
        number += 1
    ties = sum(part.route.ties for part in decoder.modules() if isinstance(part, MoE))
    for way in WAYS:
        print(f"{name}, {given.device}: {way:13} {flipped[way]} of {compared[way]} tokens choose another expert")
    print(f"a tie decided {ties} choices; {time.monotonic() - begin:.0f} s")
    return int(any(flipped.values()) or not ties)


if __name__ == "__main__":
    sys.exit(main())
