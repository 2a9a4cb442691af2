"""A checkpoint that has a matrix for each expert: an engine loads what a trainer loads, on any number of ranks."""

import pytest

torch = pytest.importorskip("torch")

AT = "model.layers.1.mlp.experts"


def pieces(folder) -> dict:
    """The tensors of a folder by name, of experts one matrix each."""
    from skyrl_isoexec.model.checkpoint import iter_tensors

    tensors = dict(iter_tensors(folder))
    assert f"{AT}.7.up_proj.weight" in tensors and f"{AT}.gate_up_proj" not in tensors
    return tensors


def test_an_engine_equals_the_decoder(start, of_transformers, reference, prompts, generate, compare, experts) -> None:
    """Equal bits from the folder that transformers wrote."""
    folder = of_transformers("bfloat16", **experts)
    assert len(pieces(folder)) > 2 * 8 * 3
    engine = start(folder, "bfloat16", family="qwen3_moe")
    mismatched, compared = compare(reference(folder), prompts, generate(engine, prompts))
    assert mismatched == 0 and compared == 32 * len(prompts)


def test_vllms_own_expert_parallelism_is_refused(start, checkpoint, experts) -> None:
    with pytest.raises(Exception, match="enable_expert_parallel = True is not supported; supported: off: experts are"):
        start(checkpoint("float32", **experts), "float32", family="qwen3_moe", enable_expert_parallel=True)


@pytest.fixture
def on_ranks(of_transformers, experts):
    """on_ranks(size, use) -> what use(loader) gave on each tensor-parallel rank, a decoder of each in this process."""
    from skyrl_isoexec.kernels.bundle import load_kernels
    from skyrl_isoexec.model.checkpoint import read_config
    from skyrl_isoexec.model.decoder import Decoder
    from skyrl_isoexec.model.families import from_hf
    from skyrl_isoexec.model.threads import run_ranks
    from skyrl_isoexec.runtimes.vllm.weights import WeightLoader
    from skyrl_isoexec.schedule import Schedule

    schedule = Schedule(num_leaves=2)
    kernels, config = load_kernels("cpu", schedule), from_hf(read_config(of_transformers("float32", **experts)))

    def run(size: int, use) -> list:
        def rank(axis):
            return use(WeightLoader(Decoder(config, kernels, axis, schedule).requires_grad_(False)))

        return run_ranks(size, rank)

    return run


@pytest.mark.parametrize("size", [1, 2])
def test_parts_on_ranks(on_ranks, of_transformers, checkpoint, experts, size: int) -> None:
    """Of matrices that come backwards, one call each: the bytes of the parts of the whole tensors."""

    from skyrl_isoexec.model.checkpoint import iter_tensors
    from skyrl_isoexec.model.digest import tensor_digest
    from skyrl_isoexec.model.shard import Shard

    split = pieces(of_transformers("float32", **experts))
    whole = dict(iter_tensors(checkpoint("float32", **experts)))

    def load(loader):
        for pair in reversed(split.items()):
            assert not loader.complete
            loader.accept([pair])
        loader.check()
        return loader.arrived()

    for arrived in on_ranks(size, load):
        assert arrived.keys() == whole.keys()
        for name, part in arrived.items():
            data = Shard(dim=part["dim"], parts=part["parts"]).slice(whole[name], part["rank"])
            assert part["digest"] == tensor_digest(data), name
        assert arrived[f"{AT}.down_proj"]["parts"] == size


def test_faulty_pieces_are_refused(on_ranks, of_transformers, experts) -> None:
    """By their own names; a set that lacks one is not complete, and the next whole set is."""
    from skyrl_isoexec.model.weights import LoadError

    split, name = pieces(of_transformers("float32", **experts)), f"{AT}.3.up_proj.weight"

    def use(loader) -> None:
        for given, words in (
            ([(name, split[name]), (name, split[name])], f"{name} was given twice"),
            ([(name, split[name][:, 1:])], f"{name} has shape .32, 63."),
            ([(f"{AT}.8.up_proj.weight", split[name])], f"unexpected tensor {AT}.8.up_proj.weight"),
        ):
            with pytest.raises(LoadError, match=words):
                loader.accept(given)
            with pytest.raises(LoadError, match="incomplete"):
                loader.accept([(f"{AT}.0.up_proj.weight", split[f"{AT}.0.up_proj.weight"])])
                loader.finish()
        loader.accept((other, tensor) for other, tensor in split.items() if other != name)
        with pytest.raises(LoadError, match=f"missing: {name}"):
            loader.finish()
        assert not loader.complete
        loader.accept(split.items())
        assert loader.complete
        loader.accept([("model.norm.weight", split["model.norm.weight"])])
        with pytest.raises(LoadError, match="missing: lm_head.weight"):
            loader.finish()

    on_ranks(1, use)
