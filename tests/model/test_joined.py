"""Linears of one input that an engine on a GPU joins: the same bits, and memory that loads still reach."""

import pytest
import torch

from skyrl_isoexec.gate.models import DECODERS, model_config
from skyrl_isoexec.gate.ways import builder, engine, prefill_steps, random_weights, token_ids, trainer
from skyrl_isoexec.kernels.bundle import load_kernels
from skyrl_isoexec.model.layers import ColumnLinear, Joined, Place
from skyrl_isoexec.model.weights import load
from skyrl_isoexec.schedule import Schedule
from skyrl_isoexec.schedule.bits import count_mismatches

SCHEDULE = Schedule(num_leaves=8, kv_block=16, kv_partition=64)
MODELS = {name: fields for models in DECODERS.values() for name, fields in models.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", MODELS)
def test_a_joined_decoder_has_the_same_bits(model: str, dtype: str) -> None:
    """Forwards without a graph, and over pages; weights that are loaded later are computed with."""
    config = model_config(dtype, MODELS[model])
    kernels = load_kernels({op: "cpu" for op in config.operators}, SCHEDULE)
    make, sequences = builder(config, kernels), token_ids(config, (9, 1, 20))
    plain, joined = make(), make()
    joined.join()
    parts = [module for module in joined.modules() if getattr(module, "joined", None) is not None]
    assert parts, "nothing was joined"
    for weights in (None, {name: tensor * 0.5 for name, tensor in random_weights(config).items()}):
        if weights is not None:
            for decoder in (plain, joined):
                load(decoder, weights)
            joined.refresh_packed()
        wanted = trainer(plain, sequences, grad=False)
        assert count_mismatches(trainer(joined, sequences, grad=False), wanted) == (0, wanted.numel())
        assert count_mismatches(engine(joined, sequences, prefill_steps(sequences)), wanted) == (0, wanted.numel())


def test_parameters_are_parts_of_one_memory() -> None:
    """Whoever writes a parameter writes what the one product reads; shards stay with their parameters."""
    kernels = load_kernels({"linear": "cpu"}, SCHEDULE)
    place = Place(kernels, axis=_One(), num_leaves=1, dtype=torch.float32, device="cpu")
    linears = [ColumnLinear(4, size, True, place) for size in (3, 5)]
    shards = [linear.weight.shard for linear in linears]
    joined = Joined(linears)
    for linear, value in zip(linears, (1.0, 2.0), strict=True):
        linear.weight.data.fill_(value)
        linear.bias.data.zero_()
    one, two = joined(torch.ones(2, 4))
    assert one.shape == (2, 3) and two.shape == (2, 5) and (one == 4).all() and (two == 8).all()
    assert [linear.weight.shard for linear in linears] == shards


def test_biases_of_all_or_of_none() -> None:
    """A product has a bias for each of its columns."""
    place = Place(load_kernels({"linear": "cpu"}, SCHEDULE), _One(), 1, torch.float32, "cpu")
    with pytest.raises(ValueError, match="1 of 2 linears have a bias"):
        Joined([ColumnLinear(4, 3, True, place), ColumnLinear(4, 3, False, place)])


class _One:
    size = 1
