"""Rows that travel: the gate finds one pair exchanged in a recomputation, a stage, a mesh or beside an idle rank."""

import threading
from collections.abc import Callable

import pytest
import torch

from skyrl_isoexec.gate import decoder, experts
from skyrl_isoexec.gate.models import model_config, variants
from skyrl_isoexec.gate.run import SCHEDULE
from skyrl_isoexec.gate.ways import builder, token_ids, trainer
from skyrl_isoexec.kernels.combine import cpu
from skyrl_isoexec.kernels.numeric.proof import Proof, ProofError
from skyrl_isoexec.model.axes import Axis
from skyrl_isoexec.model.decoder import Decoder
from skyrl_isoexec.model.moe import MoE
from skyrl_isoexec.model.travel import Travel

Change = tuple[object, str, object]


def two_experts_where(condition: Callable[[], bool]) -> Change:
    """The second and the third expert of every token's sum exchanged, where the condition holds."""
    original = cpu.combine

    def combine(y, order, weights, shared=None):
        turn = torch.arange(weights.shape[1])
        if condition():
            turn[[1, 2]] = turn[[2, 1]]
        return original(y, order // len(turn) * len(turn) + turn[order % len(turn)], weights[:, turn], shared)

    return cpu, "combine", combine


def marked(owner: type, name: str, condition: Callable[..., bool]) -> tuple[Change, Callable[[], bool]]:
    """(a method that marks its thread while it runs for an object of which the condition holds, whether it is)."""
    original, local = getattr(owner, name), threading.local()

    def method(self, *given):
        local.on = condition(self)
        try:
            return original(self, *given)
        finally:
            local.on = False

    return (owner, name, method), lambda: getattr(local, "on", False)


def in_a_recomputation() -> list[Change]:
    """Two experts of a sum, where a backward asks for it."""
    return [two_experts_where(lambda: torch._C._current_graph_task_id() != -1)]


def in_a_stage() -> list[Change]:
    """Two experts of a sum, in a stage that has some of the layers, of a decoder whose rows travel."""
    mark, on = marked(Decoder, "layers", lambda d: d.axes["ep"] is not None and len(d.layer_indices) < 3)
    return [mark, two_experts_where(on)]


def on_one_rank() -> list[Change]:
    """Two experts of a sum, where an expert-parallel axis has one rank and nothing travels."""
    mark, on = marked(MoE, "_travelling", lambda layer: (layer.place.axis.size, layer.place.expert_axis.size) == (1, 1))
    return [mark, two_experts_where(on)]


def two_tensor_ranks() -> list[Change]:
    """Neighbours among eight tensor ranks have each other's share of the tokens."""
    original = Axis._share

    def share(self, x):
        size, other = -(-len(x) // self.size), self.rank ^ 1
        return original(self, x) if self.size < 8 else x[other * size : (other + 1) * size]

    return [(Axis, "_share", share)]


def beside_an_idle_rank() -> list[Change]:
    """Two rows that come back to a rank that no row came to."""
    original = Travel.back

    def back(self, y):
        rows = original(self, y)
        if sum(self.received) or len(rows) < 2:
            return rows
        return torch.cat([rows[1:2], rows[:1], rows[2:]])

    return [(Travel, "back", back)]


CHANGES = {
    on_one_rank: "expert ranks, rank 0 of 1, tp 1, ep 1",
    two_tensor_ranks: "expert ranks, rank . of 8, tp 8, ep 8",
    in_a_stage: "expert ranks in stages, rank . of 2",
    in_a_recomputation: "expert ranks recompute, rank . of 2, tp 1, ep 2, backward",
    beside_an_idle_rank: "expert ranks, one token, rank . of 8",
}
"""Change -> the comparison that finds it."""


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_the_decoder_finds_a_change(change, stopping, difference, monkeypatch: pytest.MonkeyPatch) -> None:
    for replaced in change():
        monkeypatch.setattr(*replaced)
    with pytest.raises(difference, match=f"qwen3_moe float32: {CHANGES[change]}.*elements differ"):
        decoder.prove("decoder_moe", stopping, "cpu", SCHEDULE)


def prove_one_token(proof: Proof, monkeypatch: pytest.MonkeyPatch) -> None:
    """That part of the gate of a model of experts alone."""
    monkeypatch.setattr(experts, "MESHES", ())
    monkeypatch.setattr(experts, "BOTH", ())
    ((_, form, fields),) = variants("decoder_moe")
    config = model_config("float32", fields)
    make, sequences = builder(config, decoder.kernels_of(config, form, "cpu", SCHEDULE)), token_ids(config, (4, 1))
    experts.prove_ranks(proof, "model", make, sequences, trainer(make(), sequences, grad=False))


@pytest.mark.parametrize(
    ("meshes", "missing"),
    [(((1, 1, 1),), "ranks that no row comes to"), (((8, 1, 8),), "ranks without a row of their own")],
    ids=["no idle rank", "a token for each"],
)
def test_idle_ranks_have_to_occur(meshes, missing, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gate whose rows reach every rank proves nothing about the others, and says so."""
    monkeypatch.setattr(experts, "FEW", meshes)
    with pytest.raises(ProofError, match=f"one token: {missing}' did not occur"):
        prove_one_token(Proof(), monkeypatch)


def test_idle_ranks_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of eight ranks with an expert each, five have none of a token's three, in three layers and two forwards."""
    proof, name = Proof(), "model: expert ranks, one token: ranks"
    prove_one_token(proof, monkeypatch)
    nothing, without = 5 * 3 * 2, 7 * 3 * 2
    assert proof.hazards == {f"{name} that no row comes to": 2 * nothing, f"{name} without a row of their own": without}
    assert not proof.failures
