"""Proof of the whole decoder: each way of computing a log-probability gives the bits of every other.

The cases are those of a contract: packed rows with and without a graph (trainer), pages filled by prefills or token by
token (engine). Compared are log-probabilities over the full vocabulary, of small models that differ in their norms,
biases, heads and mixers, in fp32 and bf16; on Hopper in bf16 on the device, with heads as wide as its tensor cores
need.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recompute
from torch.utils.checkpoint import set_checkpoint_early_stop

from skyrl_isoexec.gate.engine import Engine, Rows
from skyrl_isoexec.gate.models import HEADS, SIZES, TENSOR_CORE_WIDTHS, TWINS, model_config, variants
from skyrl_isoexec.kernels.bundle import Kernels, load_kernels
from skyrl_isoexec.kernels.numeric.inputs import normal
from skyrl_isoexec.kernels.numeric.proof import DEGREES, Proof
from skyrl_isoexec.kernels.router.cases import ties_at_the_cut
from skyrl_isoexec.kernels.router.reference import scores
from skyrl_isoexec.model.axes import Axis, SingleAxis
from skyrl_isoexec.model.config import DecoderConfig
from skyrl_isoexec.model.decoder import Decoder
from skyrl_isoexec.model.moe import MoE
from skyrl_isoexec.model.threads import run_mesh, run_ranks
from skyrl_isoexec.model.weights import dtypes, layout, load
from skyrl_isoexec.schedule import Schedule

CASES = ("trainer_fwd", "trainer_fwd_no_autograd", "engine_prefill", "engine_decode")
"""Every way of computing a log-probability, by its name in a contract."""
LENGTHS = (9, 1, 3, 33, 70)
"""Sequences: one token, less than a softmax block, more than one, more than a partition."""
LONG, CUTS = 140, (1, 15, 16, 17, 63, 64, 65, 127, 128, 129)
"""A prompt, and where its prefill is cut: around pages, blocks and partitions."""
MESHES = ((2, 1, 2), (4, 1, 4), (8, 1, 8), (2, 2, 1), (2, 2, 2), (4, 2, 2), (8, 4, 8))
"""Ranks of a trainer, and of these tensor- and expert-parallel ones: experts cut over replicas, over tensor ranks, over
both, and not at all."""
Builder = Callable[..., Decoder]


def prove(region: str, proof: Proof, file: str, schedule: Schedule) -> None:
    """Collect every check of a region's models over the implementations of this name in `proof`."""
    for model, form, fields in variants(region):
        for dtype in ("float32", "bfloat16"):
            config = model_config(dtype, fields)
            kernels, definition = (kernels_of(config, form, name, schedule) for name in (file, "reference"))
            prove_model(proof, f"{model} {dtype}", config, kernels, definition)
            _served(proof, kernels)


def prove_on(device: str, region: str, proof: Proof, file: str, schedule: Schedule) -> None:
    """The same on a device whose order PyTorch does not state: every check but the one against the definition."""
    for model, config, kernels in on_tensor_cores(region, file, schedule):
        prove_model(proof, f"{model} bfloat16", config, kernels, None, device)
        _served(proof, kernels)


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


def random_weights(config: DecoderConfig) -> dict[str, Tensor]:
    """Full tensors, the same bits on every machine. Two experts of a layer have one router's row: their scores tie."""
    kinds, tensors = dtypes(config), {}
    for seed, (name, shape) in enumerate(sorted(layout(config).items())):
        centre = 1.0 if name.endswith("norm.weight") else 0.0
        tensors[name] = (normal(seed, *shape, scale=0.2) + centre).to(kinds[name])
        if ".mlp.gate." in name:
            tensors[name][TWINS[1]] = tensors[name][TWINS[0]]
    return tensors


def builder(config: DecoderConfig, kernels: Kernels, device: str = "cpu") -> Builder:
    """make(axis=None, **stage) -> a loaded decoder on a device."""
    tensors = random_weights(config)

    def make(axis: Axis | None = None, **stage: object) -> Decoder:
        decoder = Decoder(config, kernels, axis or SingleAxis(), kernels.schedule, device=device, **stage)
        load(decoder, tensors)
        return decoder

    return make


def token_ids(config: DecoderConfig, lengths: Sequence[int], device: torch.device | str = "cpu") -> list[Tensor]:
    """Random sequences, the same on every device."""
    random = torch.Generator().manual_seed(len(lengths))
    return [torch.randint(config.vocab_size, (length,), generator=random).to(device) for length in lengths]


def packed(sequences: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """(ids, positions, cu_seqlens) of sequences laid end to end."""
    cu, ids = torch.tensor([0, *(len(s) for s in sequences)]).cumsum(0).int(), torch.cat(list(sequences))
    positions = torch.cat([torch.arange(len(s)) for s in sequences])
    return ids, positions.to(ids.device), cu.to(ids.device)


def trainer(decoder: Decoder, sequences: Sequence[Tensor], *, grad: bool) -> Tensor:
    """Log-probabilities [T, V] of packed rows, with or without a graph; the next token's is what a loss computes."""
    ids, positions, cu = packed(sequences)
    next_T1 = ids.roll(-1)[:, None]
    with torch.set_grad_enabled(grad):
        logits = decoder.full_logits(decoder.layers(decoder.embed(ids), positions, decoder.end_to_end(cu)))
        if logits.requires_grad != grad:
            raise RuntimeError(f"a graph was{'' if logits.requires_grad else ' not'} recorded")
        chosen_T = decoder.kernels.token_logprobs(logits, next_T1[:, 0])
        return decoder.kernels.logprobs(logits.detach()).scatter(1, next_T1, chosen_T.detach()[:, None])


@torch.no_grad()
def engine(decoder: Decoder, sequences: Sequence[Tensor], steps: Sequence[Rows]) -> Tensor:
    """Log-probabilities [T, V] of the rows of all steps over pages, with packed weights, in the sequences' order."""
    decoder.refresh_packed()
    run = Engine(decoder, sequences)
    for step in steps:
        run.step(step)
    return run.logprobs()


def prefill_steps(sequences: Sequence[Tensor]) -> list[Rows]:
    """All prompts whole, in one step."""
    return [[(r, 0, len(s)) for r, s in enumerate(sequences)]]


def decode_steps(sequences: Sequence[Tensor]) -> list[Rows]:
    """One token of each live request a step."""
    longest = max(len(s) for s in sequences)
    return [[(r, t, t + 1) for r, s in enumerate(sequences) if t < len(s)] for t in range(longest)]


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
        _choices(proof, label, make(), sequences)
    _packing(proof, f"{label}: packing", make(), sequences, whole)
    _cuts(proof, f"{label}: cut prefills", make(), config)
    _degrees(proof, f"{label}: tensor ranks", make, sequences, whole)
    if config.has_experts:
        _expert_ranks(proof, f"{label}: expert ranks", make, sequences, whole)
    _stages(proof, f"{label}: pipeline stages", make, sequences, whole)
    _recomputation(proof, f"{label}: recomputation", make(), sequences)


def _choices(proof: Proof, label: str, decoder: Decoder, sequences: list[Tensor]) -> None:
    """No token changes an expert when its sequence is alone; for some a tie decides."""
    routers = [decoder.model.layers[str(i)].mlp for i in decoder.layer_indices if decoder.config.mixes_experts(i)]
    logits: list[Tensor] = []
    hooks = [router.gate.register_forward_hook(lambda _, __, rows: logits.append(rows.detach())) for router in routers]

    def choices(given: list[Tensor]) -> list[Tensor]:
        logits.clear()
        trainer(decoder, given, grad=False)
        return [router.route(rows)[1] for router, rows in zip(routers, logits, strict=True)]

    whole = choices(sequences)
    values = (_choosing(router, rows) for router, rows in zip(routers, logits, strict=True))
    ties = sum(ties_at_the_cut(rows, experts) for rows, experts in zip(values, whole, strict=True))
    proof.reached(f"{label}: choices that a tie decides", ties)
    alone = [choices([sequence]) for sequence in sequences]
    for layer, experts in enumerate(whole):
        proof.equal(f"{label}: experts", experts, torch.cat([found[layer] for found in alone]), at=f"router {layer}")
    for hook in hooks:
        hook.remove()


def _choosing(router: MoE, logits_TE: Tensor) -> Tensor:
    """What the experts of a token are chosen by."""
    bias_E = getattr(router.gate, "e_score_correction_bias", None)
    return logits_TE if bias_E is None else scores(logits_TE, router.rule) + bias_E


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
            return [
                trainer(make(axis), sequences, grad=True),
                trainer(make(axis), sequences, grad=False),
                engine(make(axis), sequences, steps),
            ]

        for rank, results in enumerate(run_ranks(size, run)):
            for found in results:
                proof.equal(name, whole, found, at=f"rank {rank} of {size}")


def _expert_ranks(proof: Proof, name: str, make: Builder, sequences: list[Tensor], whole: Tensor) -> None:
    """A trainer whose replicas have other sequences, among them one of a token, and share out the experts."""
    num_leaves, parts = make().schedule.num_leaves, whole.split([len(s) for s in sequences])
    for size, tp, ep in (mesh for mesh in MESHES if mesh[1] <= num_leaves):
        replicas = size // tp
        own = [[i % len(parts) for i in range(r, max(len(parts), replicas), replicas)] for r in range(replicas)]

        def run(axis: Axis, experts: Axis, ranks: Axis, tp: int = tp, own: list[list[int]] = own) -> list[Tensor]:
            given = [sequences[i] for i in own[ranks.rank // tp]]
            return [trainer(make(axis, expert_axis=experts), given, grad=grad) for grad in (True, False)]

        for rank, results in enumerate(run_mesh(size, (tp, ep, size), run)):
            expected = torch.cat([parts[i] for i in own[rank // tp]])
            for found in results:
                proof.equal(name, expected, found, at=f"rank {rank} of {size}, tp {tp}, ep {ep}")


def _stages(proof: Proof, name: str, make: Builder, sequences: list[Tensor], whole: Tensor) -> None:
    """The layers cut into stages at every place, and a stage for each layer."""
    ids, positions, cu = packed(sequences)
    num_layers = SIZES["num_layers"]
    cuts = [(0, cut, num_layers) for cut in range(1, num_layers)] + [tuple(range(num_layers + 1))]
    for bounds in cuts:
        x = None
        with torch.no_grad():
            for lo, hi in itertools.pairwise(bounds):
                ends = {"with_embedding": lo == 0, "with_head": hi == num_layers}
                stage = make(first_layer=lo, last_layer=hi, **ends)
                x = stage.embed(ids) if lo == 0 else x
                x = stage.layers(x, positions, stage.end_to_end(cu))
            rows = stage.kernels.logprobs(stage.full_logits(x))
        proof.equal(name, whole, rows, at=f"cut at {bounds[1:-1]}")


def _recomputation(proof: Proof, name: str, decoder: Decoder, sequences: list[Tensor]) -> None:
    """What a layer gives when the backward recomputes it is what it gave in the forward."""
    ids, positions, cu = packed(sequences)
    outputs: dict[int, list[Tensor]] = {index: [] for index in decoder.layer_indices}

    def layer(index: int, x: Tensor) -> Tensor:
        y = decoder.layer(index, x, positions, decoder.end_to_end(cu))
        outputs[index].append(y.detach())
        return y

    x = decoder.embed(ids)
    with set_checkpoint_early_stop(False):  # to the end of the layer, though its last sum is not needed
        for index in decoder.layer_indices:
            x = recompute(layer, index, x, use_reentrant=False)
        decoder.full_logits(x).sum().backward()
    for index, (first, again) in outputs.items():
        proof.equal(name, first, again, at=f"layer {index}")
