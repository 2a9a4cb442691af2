"""Proof of a mixture of experts within a decoder: who is chosen, and rows that travel to the ranks that have experts.

Whatever rank computes a row, and whether a forward, a recomputation or a stage of a pipeline asks for it,
log-probabilities are those of one rank. Among the ranks are some that no row comes to, and some without a row of their
own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import set_checkpoint_early_stop

from skyrl_isoexec.gate.ways import BOUNDS, Builder, recomputed, staged, trainer
from skyrl_isoexec.kernels.numeric.inputs import ties_at_the_cut
from skyrl_isoexec.kernels.numeric.proof import Proof
from skyrl_isoexec.model.axes import Axis
from skyrl_isoexec.model.decoder import Decoder
from skyrl_isoexec.model.moe import MoE
from skyrl_isoexec.model.threads import run_mesh

MESHES = ((1, 1, 1), (2, 1, 2), (4, 1, 4), (8, 1, 8), (2, 2, 1), (2, 2, 2), (4, 2, 2), (8, 4, 8), (8, 8, 8))
"""Ranks of a trainer, and of these tensor- and expert-parallel ones: experts cut over replicas, over tensor ranks, over
both, and not at all."""
BOTH = ((2, 1, 2), (4, 2, 4))
"""Those of recomputation and of stages: experts cut over replicas, and over tensor ranks as well."""
FEW = ((8, 1, 8), (8, 8, 8))
"""Those of one token, the same in each replica: its experts are on fewer ranks than there are."""

T = TypeVar("T")


class Watched(Axis):
    """An axis that keeps how many rows each way out and back brought."""

    def __init__(self, axis: Axis) -> None:
        self.rank, self.size, self._axis = axis.rank, axis.size, axis
        self.brought: list[int] = []

    def exchange(self, x: Tensor) -> Tensor:
        """See `Axis.exchange`."""
        return self._axis.exchange(x)

    def all_to_all(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """See `Axis.all_to_all`."""
        self.brought.append(sum(received))
        return super().all_to_all(x, sent, received)


def prove_choices(proof: Proof, label: str, decoder: Decoder, sequences: list[Tensor]) -> None:
    """No token changes an expert when its sequence is alone; for some a tie decides."""
    routers = [decoder.model.layers[str(i)].mlp for i in decoder.layer_indices if decoder.config.mixes_experts(i)]
    logits: list[Tensor] = []
    hooks = [router.gate.register_forward_hook(lambda _, __, rows: logits.append(rows.detach())) for router in routers]

    def choices(given: list[Tensor]) -> list[Tensor]:
        logits.clear()
        trainer(decoder, given, grad=False)
        return [router.route(rows)[1] for router, rows in zip(routers, logits, strict=True)]

    whole = choices(sequences)
    ties = sum(_ties(*given) for given in zip(routers, logits, whole, strict=True))
    proof.reached(f"{label}: choices that a tie decides", ties)
    alone = [choices([sequence]) for sequence in sequences]
    for layer, experts in enumerate(whole):
        proof.equal(f"{label}: experts", experts, torch.cat([found[layer] for found in alone]), at=f"router {layer}")
    for hook in hooks:
        hook.remove()


def _ties(router: MoE, logits_TE: Tensor, experts_TK: Tensor) -> int:
    """Tokens whose choice among the experts of the groups that they have is decided by a tie."""
    rule, num_experts = router.rule, logits_TE.shape[1]
    plain = dataclasses.replace(rule, renormalise=False, eps=0.0, scale=1.0, num_groups=1, groups_kept=1)
    choice_TE, _ = router.place.kernels.route(logits_TE, num_experts, plain)  # all scores, in order of experts
    bias_E = getattr(router.gate, "e_score_correction_bias", None)
    choice_TE = choice_TE if bias_E is None else choice_TE + bias_E
    chosen_TE = torch.zeros_like(choice_TE, dtype=torch.bool).scatter_(1, experts_TK.long(), True)
    had_TGE = chosen_TE.unflatten(1, (rule.num_groups, -1)).any(2, keepdim=True)
    kept_TE = had_TGE.expand(-1, -1, num_experts // rule.num_groups).flatten(1)
    return ties_at_the_cut(choice_TE.masked_fill(~kept_TE, float("-inf")), experts_TK)


def prove_ranks(proof: Proof, label: str, make: Builder, sequences: list[Tensor], whole: Tensor) -> None:
    """A trainer whose replicas have other sequences, among them one of a token, and share out the experts."""
    parts = whole.split([len(s) for s in sequences])

    def forward(given: list[Tensor], *axes: Axis, **stage: Axis) -> list[Tensor]:
        decoder = make(*axes, **stage)
        return [trainer(decoder, given, grad=grad) for grad in (True, False)]

    def stages(given: list[Tensor], *axes: Axis, **stage: Axis) -> list[Tensor]:
        return [staged(make, given, bounds, *axes, **stage) for bounds in BOUNDS]

    for name, meshes, way in (("expert ranks", MESHES, forward), ("expert ranks in stages", BOTH, stages)):
        for mesh in meshes:
            for place, expected, results in _run(mesh, _shares(len(parts), mesh), sequences, parts, way):
                for found in results:
                    proof.equal(f"{label}: {name}", expected, found, at=place)
    _recomputations(proof, f"{label}: expert ranks recompute", make, sequences)
    _few(proof, f"{label}: expert ranks, one token", make, sequences, parts)


def _shares(num_sequences: int, mesh: tuple[int, int, int]) -> list[list[int]]:
    """Numbers of the sequences that each replica has, at least one."""
    replicas = mesh[0] // mesh[1]
    return [[i % num_sequences for i in range(r, max(num_sequences, replicas), replicas)] for r in range(replicas)]


def _run(
    mesh: tuple[int, int, int],
    own: list[list[int]],
    sequences: list[Tensor],
    parts: tuple[Tensor, ...],
    way: Callable[..., T],
) -> list[tuple[str, Tensor, T]]:
    """(which rank, those rows of `parts` that are its replica's, what way(sequences, axis, expert_axis=) gives)."""
    size, tp, ep = mesh

    def run(axis: Axis, experts: Axis, ranks: Axis) -> T:
        return way([sequences[i] for i in own[ranks.rank // tp]], axis, expert_axis=experts)

    found = enumerate(run_mesh(size, (tp, ep, size), run))
    rows = [torch.cat([parts[i] for i in numbers]) for numbers in own]
    return [(f"rank {rank} of {size}, tp {tp}, ep {ep}", rows[rank // tp], results) for rank, results in found]


def _recomputations(proof: Proof, name: str, make: Builder, sequences: list[Tensor]) -> None:
    """Rows travel again when the backward recomputes a layer, which gives what it gave before, and on one rank."""
    lengths = [len(s) for s in sequences]

    def again(given: list[Tensor], *axes: Axis, **stage: Axis) -> dict[int, tuple[Tensor, Tensor]]:
        return recomputed(make(*axes, **stage), given)

    with set_checkpoint_early_stop(False):
        alone = [first for first, _ in again(sequences).values()]
        parts = torch.cat(alone, dim=1).split(lengths)
        for mesh in BOTH:
            for place, expected, results in _run(mesh, _shares(len(parts), mesh), sequences, parts, again):
                for when, found in zip(("forward", "backward"), zip(*results.values(), strict=True), strict=True):
                    proof.equal(name, expected, torch.cat(found, dim=1), at=f"{place}, {when}")


def _few(proof: Proof, name: str, make: Builder, sequences: list[Tensor], parts: tuple[Tensor, ...]) -> None:
    """One token in each replica: to some ranks no row comes, and tensor ranks but one have no row of their own."""
    shortest = min(range(len(sequences)), key=lambda i: len(sequences[i]))

    def watched(given: list[Tensor], *axes: Axis, expert_axis: Axis) -> tuple[list[int], list[Tensor]]:
        axis = Watched(expert_axis)
        decoder = make(*axes, expert_axis=axis)
        return axis.brought, [trainer(decoder, given, grad=grad) for grad in (True, False)]

    nothing, without = 0, 0
    for mesh in FEW:
        own = [[shortest]] * (mesh[0] // mesh[1])
        for place, expected, (brought, results) in _run(mesh, own, sequences, parts, watched):
            nothing, without = nothing + brought[::2].count(0), without + brought[1::2].count(0)
            for found in results:
                proof.equal(name, expected, found, at=place)
    proof.reached(f"{name}: ranks that no row comes to", nothing)
    proof.reached(f"{name}: ranks without a row of their own", without)
