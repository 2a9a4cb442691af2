"""Experts on an axis of their own: rows travel to them and back, and neither bits nor gradients know of it."""

from collections.abc import Callable

import pytest
import torch

from skyrl_isoexec.kernels.numeric.inputs import normal
from skyrl_isoexec.model.axes import Axis, SingleAxis
from skyrl_isoexec.model.checkpoint import export
from skyrl_isoexec.model.config import check_partition
from skyrl_isoexec.model.moe import MoE
from skyrl_isoexec.model.threads import run_mesh
from skyrl_isoexec.model.travel import Travel

MESHES = [(2, 1, 2), (4, 1, 4), (4, 1, 2), (2, 2, 1), (2, 2, 2), (4, 2, 2), (4, 2, 4), (4, 4, 2), (8, 4, 8)]
"""Ranks, and of these tensor- and expert-parallel ones: each alone, within each other, and over replicas."""
LAYER = "model.layers.1.mlp"


@pytest.fixture
def travels(monkeypatch: pytest.MonkeyPatch) -> list[Travel]:
    """Every way out and back that is made."""
    made: list[Travel] = []
    original = Travel.__init__

    def note(self: Travel, *given: object) -> None:
        original(self, *given)
        made.append(self)

    monkeypatch.setattr(Travel, "__init__", note)
    return made


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: "of {} ranks tp {} ep {}".format(*mesh))
@pytest.mark.parametrize("family, dtype", [("qwen3_moe", "float32"), ("qwen3_5_moe", "bfloat16")])
def test_logits_are_those_of_one_rank(m, travels, family, dtype, mesh) -> None:
    size, tp, ep = mesh
    config, tensors = m.toy(family, dtype=dtype)
    replicas = max(size // tp, 1)
    with torch.no_grad():
        whole = m.forward(m.build(config, tensors, num_leaves=4))
    parts = whole.split([len(sequence) for sequence in m.SEQUENCES])

    def run(axis: Axis, experts: Axis, ranks: Axis) -> tuple[int, list[torch.Tensor]]:
        replica = ranks.rank // tp
        decoder = m.build(config, tensors, axis, num_leaves=4, expert_axis=experts)
        assert decoder.model.layers["0"].mlp.experts.down_proj.shape[0] == config.num_experts // ep
        batch = m.SEQUENCES[replica::replicas]  # of four replicas, the second has one token
        with torch.no_grad():
            scored = m.forward(decoder, batch)
        return replica, [scored, m.forward(decoder, batch).detach()]

    for replica, found in run_mesh(size, (tp, ep, size), run):
        for logits in found:
            m.assert_same_bits(logits, torch.cat(parts[replica::replicas]))
    assert len(travels) == (0 if ep == 1 else size * 2 * config.num_layers)
    if mesh in ((4, 1, 4), (8, 4, 8)):
        assert any(0 in travel.sent for travel in travels) and any(0 in travel.received for travel in travels)


def layer_alone(m, config, tensors) -> Callable[..., MoE]:
    """make(axis, experts) -> the second layer's mixture of a decoder."""

    def make(axis: Axis, experts: Axis | None) -> MoE:
        return m.build(config, tensors, axis, num_leaves=4, expert_axis=experts).model.layers["1"].mlp

    return make


def steered(tensors: dict[str, torch.Tensor], best: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """The tensors, with a router that sends every row of ones to these experts."""
    gate = torch.zeros_like(tensors[f"{LAYER}.gate.weight"])
    for place, expert in enumerate(best):
        gate[expert] = 1.0 - place / 8
    return tensors | {f"{LAYER}.gate.weight": gate}


SKEWED = {
    "all to the first rank": (0, 1, 2),
    "all to the last rank": (5, 6, 7),
    "one expert each of three ranks": (0, 3, 7),
}


@pytest.mark.parametrize("best", SKEWED.values(), ids=SKEWED.keys())
@pytest.mark.parametrize("counts", [(5, 0), (1, 0), (0, 7), (0, 0), (300, 1)], ids=str)
def test_any_spread_of_rows(m, travels, best, counts) -> None:
    """Ranks without a token, experts without a row, and every row at one rank; with gradients."""
    config, tensors = m.toy("qwen3_moe")
    make = layer_alone(m, config, steered(tensors, best))
    rows = [1.0 + normal(seed, count, config.hidden_size, scale=0.01) for seed, count in enumerate(counts)]

    def run(axis: Axis, experts: Axis) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        x_TH = rows[experts.rank // 2].clone().requires_grad_()
        layer = make(axis, experts)
        y_TH = layer(x_TH)
        y_TH.sum().backward()
        return y_TH.detach(), x_TH.grad, {name: p.grad for name, p in layer.experts.named_parameters()}

    found = run_mesh(4, (2, 4), run)
    alone = make(SingleAxis(), None)
    for rank, (y_TH, dx_TH, _) in enumerate(found):
        x_TH = rows[rank // 2].clone().requires_grad_()
        expected = alone(x_TH)
        assert y_TH.shape == x_TH.shape and dx_TH.shape == x_TH.shape
        if len(x_TH):
            chosen = alone.gate(x_TH).topk(3).indices.sort().values
            assert (chosen == torch.tensor(best)).all()
            m.assert_same_bits(y_TH, expected.detach())
            expected.sum().backward()
            m.assert_same_bits(dx_TH, x_TH.grad)
    owners = {expert // 2 for expert in best}
    for rank, (_, _, gradients) in enumerate(found):
        (travel,) = (travel for travel in travels if travel._axis.rank == rank)
        received = sum(travel.received)
        assert (received > 0) == (rank in owners and sum(counts) > 0)
        for name, whole in alone.experts.named_parameters():
            grad = gradients[name]
            used = torch.tensor([rank * 2 + expert in best and sum(counts) > 0 for expert in range(2)])
            assert torch.equal(grad.flatten(1).any(1), used)
            if sum(counts):
                expected = whole.grad[rank * 2 : rank * 2 + 2] / 2  # once for each tensor rank that was compared
                assert (grad - expected).abs().max() <= 2**-20 * expected.abs().max()


@pytest.mark.parametrize("mesh", [(4, 2, 4), (4, 2, 2), (4, 1, 4), (2, 2, 1)], ids=str)
def test_gradients_are_those_of_one_rank(m, mesh) -> None:
    """Summed over replicas, as a trainer does; the same bits each time, and on tensor ranks that hold the same part."""
    size, tp, ep = mesh
    config, tensors = m.toy("qwen3_5_moe")
    batches = [m.SEQUENCES[replica :: size // tp] for replica in range(size // tp)]

    def gradients(decoder, batch) -> dict[str, torch.Tensor]:
        decoder.zero_grad(set_to_none=True)
        m.forward(decoder, batch).square().sum().backward()
        return {name: p.grad.clone() for name, p in decoder.named_parameters()}

    def run(axis: Axis, experts: Axis, ranks: Axis) -> tuple[int, int, dict[str, torch.Tensor], dict]:
        decoder = m.build(config, tensors, axis, num_leaves=4, expert_axis=experts)
        batch = batches[ranks.rank // tp]
        first, again = gradients(decoder, batch), gradients(decoder, batch)
        assert all(torch.equal(gradient, again[name]) for name, gradient in first.items())
        return axis.rank, experts.rank, first, {name: p.shard for name, p in decoder.named_parameters()}

    found = run_mesh(size, (tp, ep, size), run)
    alone = m.build(config, tensors, num_leaves=4)
    expected = gradients(alone, m.SEQUENCES)
    assert expected.keys() == found[0][2].keys()
    for name, whole in expected.items():
        for rank, (at_tp, at_ep, first, shards) in enumerate(found):
            shard, total = shards[name], torch.zeros_like(first[name])
            assert (shard.axis == "ep") == (".experts." in name) and whole.any()
            mine = at_ep if shard.axis == "ep" else at_tp
            for other in found:  # experts: over all ranks that hold the same ones; others: over replicas
                if (other[1] if shard.axis == "ep" else other[0]) == mine:
                    total += other[2][name]
            bound = 2**-17 * whole.abs().max()
            assert (total - shard.slice(whole, mine)).abs().max() <= bound, (name, rank)
            if shard.dim is None:
                twin = found[rank // tp * tp][2][name]
                assert torch.equal(first[name], twin), name


def test_tensors_come_and_go_whole(m) -> None:
    config, tensors = m.toy("qwen3_5_moe")
    for size, tp, ep in ((4, 2, 4), (4, 2, 2), (2, 2, 1)):

        def run(axis: Axis, experts: Axis) -> dict[str, torch.Tensor]:
            return export(m.build(config, tensors, axis, num_leaves=4, expert_axis=experts))

        for exported in run_mesh(size, (tp, ep), run):
            assert exported.keys() == tensors.keys()
            for name, tensor in tensors.items():
                m.assert_same_bits(exported[name], tensor)


def test_sums_in_the_order_of_ranks_have_other_bits(m, monkeypatch) -> None:
    """Otherwise the equality of degrees would not show that experts, not their owners, order a token's sum."""
    config, tensors = m.toy("qwen3_moe")

    def by_rank(self: MoE, x_TH, weights_TK, experts_TK, shared_TH) -> torch.Tensor:
        kernels, axis = self.place.kernels, self.place.expert_axis
        order_S, starts_E1 = kernels.dispatch(experts_TK, self.num_experts)
        travel = Travel(axis, starts_E1, kernels.expand)
        y_SH = travel.back(self._rows(travel.out(kernels.expand(x_TH, order_S)), travel.starts_F1))
        owner_S = experts_TK.flatten()[order_S] // (self.num_experts // axis.size)
        parts = [torch.where((owner_S == rank)[:, None], y_SH, 0) for rank in range(axis.size)]
        return sum(kernels.combine(part, order_S, weights_TK) for part in parts)

    def run(axis: Axis) -> torch.Tensor:
        with torch.no_grad():
            return m.forward(m.build(config, tensors, num_leaves=4, expert_axis=axis))

    expected = run(SingleAxis())
    assert all(torch.equal(logits, expected) for (logits,) in zip(run_mesh(2, (2,), run)))
    monkeypatch.setattr(MoE, "_travelling", by_rank)
    assert torch.equal(run(SingleAxis()), expected)
    assert all((logits != expected).any() for logits in run_mesh(2, (2,), run))


@pytest.mark.parametrize(
    "family, ep, words",
    [
        ("qwen3_moe", 3, "num_experts = 8 is not divisible by expert-parallel size 3"),
        ("qwen3_moe", 16, "num_experts = 8 is not divisible by expert-parallel size 16"),
        ("qwen3", 2, "expert-parallel size 2, but every layer of this model is dense"),
    ],
)
def test_uneven_experts_are_refused(m, family, ep, words) -> None:
    with pytest.raises(ValueError, match=words):
        check_partition(m.toy(family)[0], num_leaves=4, tp=1, ep=ep)


def test_tensor_parallel_ranks_need_not_divide_the_experts(m) -> None:
    config, _ = m.toy("qwen3_moe", num_experts=6)
    check_partition(config, num_leaves=4, tp=4, ep=3)
    with pytest.raises(ValueError, match="num_experts = 6 is not divisible by tensor-parallel size 4"):
        check_partition(config, num_leaves=4, tp=4)


def test_degrees_of_a_mesh_divide_it() -> None:
    with pytest.raises(ValueError, match=r"degrees \(2, 3\) do not all divide 4 ranks"):
        run_mesh(4, (2, 3), lambda *axes: None)
