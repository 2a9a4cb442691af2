"""The probe of a live model: an engine and a trainer's decoder agree on it, and any change of one side moves it."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")


def one_bit(tensor, index: int = 0) -> None:
    """The last bit of one number."""
    tensor.detach().view(torch.int32).flatten()[index].bitwise_xor_(1)


def table(model) -> None:
    """One ulp of an entry of the rotary table, which no probed position reads."""
    one_bit(model.cos_sin_PR, 200 * 32 + 3)


def table_that_is_read(model) -> None:
    """One ulp of an entry of the rotary table."""
    model.cos_sin_PR[5, 3] = torch.nextafter(model.cos_sin_PR[5, 3], torch.tensor(2.0))


def leaves(model) -> None:
    """A sum of one row-parallel linear is cut otherwise."""
    model.model.layers["1"].mlp.down_proj.local_leaves *= 2


def scale(model) -> None:
    """The factor on attention scores."""
    config = model.config
    names = ("vocab_size", "num_layers", "hybrid", "kv_lora_rank")
    model.config = SimpleNamespace(**{n: getattr(config, n) for n in names}, scale=config.scale * (1 + 2**-20))


def hook(model) -> None:
    """A hook on the final norm."""
    model.model.norm.register_forward_hook(lambda module, given, y: y * (1 + 2**-20))


def weight(model) -> None:
    """One bit of a weight that is computed with as it is."""
    one_bit(model.model.layers["0"].input_layernorm.weight, 5)


def method(model) -> None:
    """A replaced method of one layer."""
    mlp = model.model.layers["0"].mlp
    real = mlp.forward
    mlp.forward = lambda x: real(x) * (1 + 2**-20)


def way_through(model) -> None:
    """A replaced method that only one of the runtimes calls."""
    real = model.layers
    model.layers = lambda x, positions, attend: real(x, positions, attend) * (1 + 2**-20)


SILENT = 5
"""A token whose log-probability alone is moved."""


def one_logit(model) -> None:
    """The last bit of one token's logit, in every row: too little to move the sum of a row."""
    real = model.full_logits

    def moved(x):
        logits = real(x)
        logits.view(torch.int32)[:, SILENT] ^= 1
        return logits

    model.full_logits = moved


CHANGES = (table, table_that_is_read, leaves, scale, hook, weight, method, way_through, one_logit)


@pytest.fixture(scope="module")
def decoder(checkpoint) -> Callable[..., object]:
    """decoder(**options of its stage) -> a Decoder of one rank, as a trainer builds it, with the checkpoint's weights.

    It is read in the test's own process, and holds no packed weights.
    """
    from skyrl_isoexec.kernels.bundle import load_kernels
    from skyrl_isoexec.model import families
    from skyrl_isoexec.model.axes import SingleAxis
    from skyrl_isoexec.model.checkpoint import iter_tensors, load, read_config
    from skyrl_isoexec.model.decoder import Decoder
    from skyrl_isoexec.schedule import Schedule

    def make(dtype: str = "float32", **options: object):
        folder, schedule = checkpoint(dtype), Schedule(num_leaves=2)
        config = families.from_hf(read_config(folder))
        made = Decoder(config, load_kernels("cpu", schedule), SingleAxis(), schedule, **options)
        if not options:
            load(made, iter_tensors(folder))
        return made

    return make


@pytest.fixture(scope="module")
def engine(host, checkpoint, arguments_of_module) -> Iterator[object]:
    """One engine for this file."""
    from vllm import LLM

    yield LLM(str(checkpoint("float32")), **arguments_of_module)


@pytest.fixture(scope="module")
def arguments_of_module(host) -> dict[str, object]:
    """Of a small engine without a contract."""
    from skyrl_isoexec.runtimes.vllm.settings import EngineSettings
    from skyrl_isoexec.schedule import Schedule

    chosen = EngineSettings(family="qwen3", kernels="cpu", schedule=Schedule(num_leaves=2))
    sizes = {
        "skip_tokenizer_init": True, "enforce_eager": True, "block_size": 16, "kv_cache_memory_bytes": 2**22,
        "max_model_len": 256, "max_num_seqs": 8, "num_gpu_blocks_override": 17, "max_num_batched_tokens": 24,
    }  # fmt: skip
    return chosen.engine_arguments(dtype="float32") | sizes


def asked(engine) -> str:
    """The answer of the only worker."""
    (answer,) = engine.collective_rpc("isoexec_probe")
    assert set(answer) == {"probe"}
    return answer["probe"]


def packed(model) -> None:
    """One bit of a layout that an engine derives from a weight."""
    one_bit(model.model.layers["1"].self_attn.q_proj.packed, 7)


def restored(model) -> Callable[[], None]:
    """A function that undoes whatever one of the changes did to the model of an engine."""
    from skyrl_isoexec.model.layers import RowLinear

    values = [(tensor, tensor.detach().clone()) for tensor in (*model.parameters(), model.cos_sin_PR)]
    rows = [(part, part.local_leaves) for part in model.modules() if isinstance(part, RowLinear)]
    config = model.config

    def undo() -> None:
        for tensor, value in values:
            tensor.detach().copy_(value)
        for part, count in rows:
            part.local_leaves = count
        model.config = config
        model.model.norm._forward_hooks.clear()
        for part in (model, model.model.layers["0"].mlp):
            for name in ("layers", "forward", "full_logits"):
                part.__dict__.pop(name, None)
        model.refresh_packed()

    return undo


def test_engine_and_decoder_agree(engine, decoder) -> None:
    """From one checkpoint, with packed weights and without."""
    from skyrl_isoexec.model.probe import probe

    trained = decoder()
    (is_packed,) = engine.apply_model(lambda model: model.lm_head.packed is not None)
    assert is_packed and trained.lm_head.packed is None
    assert asked(engine) == probe(trained) == asked(engine)


@pytest.mark.parametrize("change", (*CHANGES, packed), ids=lambda change: change.__name__)
def test_a_change_of_the_engine(engine, decoder, change) -> None:
    """Each is seen, and nothing of it once it is undone."""
    before = asked(engine)
    (model,) = engine.apply_model(lambda model: model)
    undo = restored(model)
    try:
        engine.apply_model(change)
        assert asked(engine) != before
    finally:
        undo()
    assert asked(engine) == before


def test_what_no_sampled_token_shows(engine, generate, prompts) -> None:
    """A fault that leaves the sampled tokens' log-probabilities alone, and moves others, is found by the probe."""

    def sampled() -> dict[tuple[int, int], tuple[int, float]]:
        """(request, step) -> token and log-probability."""
        outputs = generate(engine, prompts[:6], seeds=list(range(6)))
        return {
            (number, step): (token, output.outputs[0].logprobs[step][token].logprob)
            for number, output in enumerate(outputs)
            for step, token in enumerate(output.outputs[0].token_ids)
        }

    before, probed = sampled(), asked(engine)
    (model,) = engine.apply_model(lambda model: model)
    undo = restored(model)
    try:
        engine.apply_model(one_logit)
        after = sampled()
        others = [place for place, (token, _) in before.items() if token != SILENT]
        assert len(others) > 100
        assert {place: after[place] for place in others} == {place: before[place] for place in others}
        assert asked(engine) != probed
    finally:
        undo()
    assert asked(engine) == probed


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_of_the_trainer(decoder, change) -> None:
    """The same in a decoder that can be trained."""
    from skyrl_isoexec.model.probe import probe

    model = decoder()
    before = probe(model)
    change(model)
    assert probe(model) != before


def test_it_leaves_no_trace(engine, decoder, generate, prompts) -> None:
    """Nothing is counted, no gradient, mode as it was, the case in hand as well; the engine's answers stay."""
    from skyrl_isoexec.model.probe import probe

    model = decoder("bfloat16").eval()
    model.kernels.case = "trainer_fwd"
    assert probe(model) == probe(model.train()) and model.training
    assert model.kernels.case == "trainer_fwd" and not model.kernels.served
    assert all(parameter.grad is None for parameter in model.parameters())
    words = [one.outputs[0].token_ids for one in generate(engine, prompts[:3], seeds=[1, 2, 3])]
    (served,) = engine.apply_model(lambda model: set(model.kernels.served))
    asked(engine)
    assert engine.apply_model(lambda model: set(model.kernels.served)) == [served]
    assert [one.outputs[0].token_ids for one in generate(engine, prompts[:3], seeds=[1, 2, 3])] == words


@pytest.mark.parametrize(
    "options", [{"last_layer": 1}, {"first_layer": 1}, {"with_head": False}, {"with_embedding": False}], ids=str
)
def test_a_part_of_the_model_has_none(decoder, options: dict) -> None:
    """A stage of a pipeline cannot compute what others do."""
    from skyrl_isoexec.model.probe import probe

    assert probe(decoder(**options)) is None


def test_a_sleeping_worker_is_not_read() -> None:
    """Its weights have no memory."""
    from skyrl_isoexec.runtimes.vllm.facts import FactsExtension

    worker = FactsExtension()
    worker.isoexec_asleep = True
    with pytest.raises(RuntimeError, match="this worker is asleep"):
        worker.isoexec_probe()


def test_weights_elsewhere(decoder) -> None:
    """As those of a trainer that gave its device away."""
    from skyrl_isoexec.model.probe import probe

    moved, freed = decoder(), decoder()
    moved.model.norm.to("meta")
    freed.model.norm.weight.untyped_storage().resize_(0)
    for model, words in ((moved, "is on meta"), (freed, "is on cpu or without memory")):
        with pytest.raises(RuntimeError, match=f"model.norm.weight {words}"):
            probe(model)
