"""Proof of the whole decoder: each way of computing a log-probability gives the bits of every other.

The cases are those of a contract: packed rows with and without a graph (trainer), pages filled by prefills or token by
token (engine). Compared are log-probabilities over the full vocabulary, of small models that differ in their norms,
biases, heads and mixers, in fp32 and bf16; on Hopper in bf16 on the device, with heads as wide as its tensor cores
need.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.checkpoint import set_checkpoint_early_stop

from skyrl_isoexec.gate import experts
from skyrl_isoexec.gate.models import HEADS, TENSOR_CORE_WIDTHS, model_config, variants
from skyrl_isoexec.gate.ways import (
    BOUNDS,
    Builder,
    builder,
    decode_steps,
    engine,
    prefill_steps,
    recomputed,
    staged,
    token_ids,
    trainer,
)
from skyrl_isoexec.kernels.bundle import Kernels, load_kernels
from skyrl_isoexec.kernels.numeric.proof import DEGREES, Proof
from skyrl_isoexec.model.axes import Axis
from skyrl_isoexec.model.config import DecoderConfig
from skyrl_isoexec.model.decoder import Decoder
from skyrl_isoexec.model.threads import run_ranks
from skyrl_isoexec.schedule import Schedule

CASES = ("trainer_fwd", "trainer_fwd_no_autograd", "engine_prefill", "engine_decode")
"""Every way of computing a log-probability, by its name in a contract."""
LENGTHS = (9, 1, 3, 33, 70)
"""Sequences: one token, less than a softmax block, more than one, more than a partition."""
LONG, CUTS = 140, (1, 15, 16, 17, 63, 64, 65, 127, 128, 129)
"""A prompt, and where its prefill is cut: around pages, blocks and partitions."""
DEPLOYED = Schedule(num_leaves=8, kv_block=64, kv_partition=512)
"""The order of runs on Hopper, whose blocks and partitions are longer than the gates'."""
DEPLOYED_LENGTHS, DEPLOYED_CUTS = (9, 1, 530, 70), (63, 64, 65, 511, 512, 513)
"""Sequences of which one is longer than a partition, and where its prefill is cut."""


def prove(region: str, proof: Proof, file: str, schedule: Schedule) -> None:
    """Collect every check of a region's models over the implementations of this name in `proof`."""
    for model, form, fields in variants(region):
        for dtype in ("float32", "bfloat16"):
            config = model_config(dtype, fields)
            kernels, definition = (kernels_of(config, form, name, schedule) for name in (file, "reference"))
            prove_model(proof, f"{model} {dtype}", config, kernels, definition)
            _served(proof, kernels)


def prove_on(device: str, region: str, proof: Proof, file: str, schedule: Schedule) -> None:
    """The same on a device whose order PyTorch does not state: every check but the one against the definition.

    Cases and cuts are compared in the order of runs too.
    """
    for model, config, kernels in on_tensor_cores(region, file, schedule):
        prove_model(proof, f"{model} bfloat16", config, kernels, None, device)
        _served(proof, kernels)
    for model, config, kernels in on_tensor_cores(region, file, DEPLOYED):
        _deployed(proof, f"{model} bfloat16", config, kernels, device)


def _deployed(proof: Proof, label: str, config: DecoderConfig, kernels: Kernels, device: str) -> None:
    """Packed rows, a prefill, a prefill cut in two and decode steps, over more than one partition."""
    config = replace(config, max_position=2 * DEPLOYED.kv_partition)
    make, sequences = builder(config, kernels, device), token_ids(config, DEPLOYED_LENGTHS, device)
    decoder, longest = make(), DEPLOYED_LENGTHS.index(max(DEPLOYED_LENGTHS))
    whole = trainer(decoder, sequences, grad=False)
    for name, steps in (("prefill", prefill_steps(sequences)), ("decode", decode_steps(sequences))):
        proof.equal(f"{label}: deployed order", whole, engine(decoder, sequences, steps), at=name)
    for cut in DEPLOYED_CUTS:
        others = [(r, 0, len(s)) for r, s in enumerate(sequences) if r != longest]
        steps = [[(longest, 0, cut)], [*others, (longest, cut, len(sequences[longest]))]]
        proof.equal(f"{label}: deployed order", whole, engine(decoder, sequences, steps), at=f"cut at {cut}")


def on_tensor_cores(region: str, file: str, schedule: Schedule) -> Iterator[tuple[str, DecoderConfig, Kernels]]:
    """(name, configuration, kernels) of every model of a region, with heads as wide as tensor cores need."""
    for model, form, fields in variants(region):
        wide = {name: width for name, width in TENSOR_CORE_WIDTHS.items() if name in HEADS | fields}
        config = model_config("bfloat16", fields | wide)
        yield model, config, kernels_of(config, form, file, schedule)


def kernels_of(config: DecoderConfig, form: Mapping[str, str], file: str, schedule: Schedule) -> Kernels:
    """The operators of a model, each of one name, some in another form."""
    return load_kernels({form.get(op, op): file for op in config.operators}, schedule)


def _served(proof: Proof, kernels: Kernels) -> None:
    for op, case in itertools.product(kernels.impls, CASES):
        proof.reached(f"{op} served {case}", (op, case) in kernels.served)


def prove_model(
    proof: Proof,
    label: str,
    config: DecoderConfig,
    kernels: Kernels,
    definition: Kernels | None,
    device: str = "cpu",
) -> None:
    """Every check of one model; without a definition, all but that one."""
    make, sequences = builder(config, kernels, device), token_ids(config, LENGTHS, device)
    runs = (
        lambda: trainer(make(), sequences, grad=True),
        lambda: trainer(make(), sequences, grad=False),
        lambda: engine(make(), sequences, prefill_steps(sequences)),
        lambda: engine(make(), sequences, decode_steps(sequences)),
    )
    results = {}
    for kernels.case, run in zip(CASES, runs, strict=True):
        results[kernels.case] = run()
    kernels.case = None
    whole = results[CASES[0]]
    for a, b in itertools.combinations(CASES, 2):
        proof.equal(f"{label}: pairs of cases", results[a], results[b], at=f"{a} and {b}")
    if definition is not None:
        short = sequences[:4]
        expected = trainer(builder(config, definition)(), short, grad=False)
        proof.equal(f"{label}: definition", expected, trainer(make(), short, grad=False))
    if config.has_experts:
        experts.prove_choices(proof, label, make(), sequences)
    _packing(proof, f"{label}: packing", make(), sequences, whole)
    _cuts(proof, f"{label}: cut prefills", make(), config)
    _degrees(proof, f"{label}: tensor ranks", make, sequences, whole)
    if config.has_experts:
        experts.prove_ranks(proof, label, make, sequences, whole)
    _stages(proof, f"{label}: pipeline stages", make, sequences, whole)
    _recomputation(proof, f"{label}: recomputation", make(), sequences)


def _packing(proof: Proof, name: str, decoder: Decoder, sequences: list[Tensor], whole: Tensor) -> None:
    """A sequence alone, and all of them in the opposite order."""
    parts = whole.split([len(s) for s in sequences])
    for sequence, part in zip(sequences, parts, strict=True):
        alone = trainer(decoder, [sequence], grad=False)
        proof.equal(name, part, alone, at=f"{len(sequence)} tokens alone")
    backwards = trainer(decoder, sequences[::-1], grad=False)
    proof.equal(name, torch.cat(parts[::-1]), backwards, at="in the opposite order")


def _cuts(proof: Proof, name: str, decoder: Decoder, config: DecoderConfig) -> None:
    """A prompt in two parts, the second in one step with a decode row and a prefill of others, then decoded."""
    sequences = token_ids(config, (LONG, 40, 20), decoder.cos_sin_PR.device)
    whole = trainer(decoder, sequences, grad=False)
    for cut in CUTS:
        steps = [
            [(1, 0, 39), (0, 0, cut)],
            [(2, 0, 20), (0, cut, LONG - 5), (1, 39, 40)],
            *([(0, t, t + 1)] for t in range(LONG - 5, LONG)),
        ]
        proof.equal(name, whole, engine(decoder, sequences, steps), at=f"at {cut}")


def _degrees(proof: Proof, name: str, make: Builder, sequences: list[Tensor], whole: Tensor) -> None:
    """Trainer and engine on the ranks of an axis; every rank has the whole rows."""
    num_leaves = make().schedule.num_leaves
    last = [(r, len(s) - 1, len(s)) for r, s in enumerate(sequences)]
    steps = [[(r, 0, lo) for r, lo, _ in last if lo], last]
    for size in (degree for degree in DEGREES if degree <= num_leaves):

        def run(axis: Axis) -> list[Tensor]:
            decoder = make(axis)
            results = [trainer(decoder, sequences, grad=grad) for grad in (True, False)]
            return [*results, engine(make(axis), sequences, steps)]

        for rank, results in enumerate(run_ranks(size, run)):
            for found in results:
                proof.equal(name, whole, found, at=f"rank {rank} of {size}")


def _stages(proof: Proof, name: str, make: Builder, sequences: list[Tensor], whole: Tensor) -> None:
    """The layers cut into stages at every place, and a stage for each layer."""
    for bounds in BOUNDS:
        proof.equal(name, whole, staged(make, sequences, bounds), at=f"cut at {bounds[1:-1]}")


def _recomputation(proof: Proof, name: str, decoder: Decoder, sequences: list[Tensor]) -> None:
    """What a layer gives when the backward recomputes it is what it gave in the forward."""
    with set_checkpoint_early_stop(False):  # to the end of the layer, though its last sum is not needed
        for index, (first, again) in recomputed(decoder, sequences).items():
            proof.equal(name, first, again, at=f"layer {index}")
