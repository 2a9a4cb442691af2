"""Weight updates: in place, complete or refused, and what was cached under the old weights is not used."""

import socket
import threading

import pytest

torch = pytest.importorskip("torch")


@pytest.fixture
def sender(engine):
    """The trainer's end: a group that the engine has joined through vLLM's protocol."""
    from skyrl_isoexec.runtimes.vllm.transfer import GlooTransfer

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        info = {"master_address": "127.0.0.1", "master_port": free.getsockname()[1], "world_size": 2}
    joined = []
    thread = threading.Thread(target=lambda: joined.append(GlooTransfer.trainer_init(info)))
    thread.start()
    engine.init_weight_transfer_engine({"init_info": info | {"rank_offset": 1}})
    thread.join(30)
    return joined[0]


@pytest.fixture(params=["apart", "joined"])
def engine(request, start, checkpoint, monkeypatch):
    """An engine that holds the weights of seed 0; on a GPU linears of one input are parts of one tensor."""
    from skyrl_isoexec.runtimes.vllm.adapter import IsoExecForCausalLM

    if request.param == "joined":
        monkeypatch.setattr(IsoExecForCausalLM, "joined_on", ("cpu",))
    made = start(checkpoint("float32"), "float32", weight_transfer_config={"backend": "gloo"})
    assert made.apply_model(_num_joined) == [2 * 2 if request.param == "joined" else 0]
    return made


def _num_joined(model) -> int:
    """Modules that compute by one product; their parameters are parts of its weight, in order."""
    parts = [module for module in model.modules() if getattr(module, "joined", None) is not None]
    for module in parts:
        names = ("q_proj", "k_proj", "v_proj") if hasattr(module, "q_proj") else ("gate_proj", "up_proj")
        whole, lies = module.joined.weight, [getattr(module, name).weight for name in names]
        begins = [whole.data_ptr() + whole.element_size() * whole.stride(0) * n for n in _starts(lies)]
        assert [weight.data_ptr() for weight in lies] == begins and sum(map(len, lies)) == len(whole)
    return len(parts)


def _starts(weights) -> list[int]:
    return [sum(map(len, weights[:i])) for i in range(len(weights))]


def read(folder) -> dict:
    """All tensors of a checkpoint."""
    from skyrl_isoexec.model.checkpoint import iter_tensors

    return dict(iter_tensors(folder))


def update(engine, group, tensors: dict, checkpoint_format: bool = True) -> None:
    """One update as SkyRL drives it; errors of the engine are raised here."""
    from skyrl_isoexec.runtimes.vllm.transfer import GlooTransfer

    metadata = {
        "names": list(tensors),
        "dtype_names": [str(t.dtype).removeprefix("torch.") for t in tensors.values()],
        "shapes": [list(t.shape) for t in tensors.values()],
        "packed": True,
        "bucket_bytes": 20_000,
    }
    thread = threading.Thread(
        target=GlooTransfer.trainer_send_weights,
        args=(iter(tensors.items()), {"group": group, "packed": True, "bucket_bytes": 20_000}),
    )
    engine.start_weight_update(is_checkpoint_format=checkpoint_format)
    thread.start()
    engine.update_weights({"update_info": metadata})
    thread.join(30)
    engine.finish_weight_update()


def addresses(engine) -> dict[str, int]:
    """Of every parameter and of every derived layout."""
    (found,) = engine.apply_model(_addresses)
    return found


def _addresses(model) -> dict[str, int]:
    pairs = {name: p.data_ptr() for name, p in model.named_parameters()}
    packed = {name: m.packed.data_ptr() for name, m in model.named_modules() if isinstance(m, torch.nn.Module)
              and isinstance(getattr(m, "packed", None), torch.Tensor)}  # fmt: skip
    assert len(packed) > 10
    _num_joined(model)
    return pairs | {f"{name} packed": address for name, address in packed.items()}


def test_updates_in_place(engine, sender, checkpoint, reference, prompts, generate, compare):
    """Two updates; stale pages are seen as mismatches, and after the reset every bit is that of the new weights."""
    before = addresses(engine)
    old, new = checkpoint("float32"), checkpoint("float32", seed=1)
    warm = generate(engine, prompts)
    assert compare(reference(old), prompts, warm)[0] == 0
    for folder in (new, old):
        update(engine, sender, read(folder))
        assert addresses(engine) == before
        stale = generate(engine, prompts, max_tokens=8)
        assert compare(reference(folder), prompts, stale)[0] > 10  # pages of the old weights
        engine.reset_prefix_cache()
        fresh = generate(engine, prompts)
        mismatched, compared = compare(reference(folder), prompts, fresh)
        assert mismatched == 0 and compared == 32 * len(prompts)


def test_another_way_to_reload(engine, checkpoint, reference, prompts, generate, compare):
    """vLLM's own reload from a folder, and a direct call of the model in this process."""
    new, old = checkpoint("float32", seed=1), checkpoint("float32")
    engine.collective_rpc("reload_weights", kwargs={"weights_path": str(new)})
    engine.reset_prefix_cache()
    assert compare(reference(new), prompts, generate(engine, prompts)) == (0, 32 * len(prompts))
    tensors = list(read(old).items())
    engine.apply_model(lambda model: [model.load_weights([pair]) for pair in tensors])
    engine.reset_prefix_cache()
    assert compare(reference(old), prompts, generate(engine, prompts)) == (0, 32 * len(prompts))


NORM = "model.layers.1.post_attention_layernorm.weight"


def without_norm(tensors: dict) -> dict:
    return {name: tensor for name, tensor in tensors.items() if name != NORM}


FAULTS = {
    "missing": (without_norm, f"incomplete; missing: {NORM}"),
    "unexpected": (lambda t: t | {"model.layers.7.mlp.up_proj.weight": t[NORM]}, "unexpected tensor model.layers.7"),
    "renamed": (lambda t: without_norm(t) | {"norm": t[NORM]}, "unexpected tensor norm"),
    "misshapen": (lambda t: t | {NORM: t[NORM][:-1].clone()}, f"{NORM} has shape \\(63,\\)"),
    "wrong type": (lambda t: t | {NORM: t[NORM].double()}, f"{NORM} was sent as torch.float64"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_updates_are_refused(engine, sender, checkpoint, generate, fault: str):
    """The refusal names the tensor, and the engine refuses to compute with what it has."""
    change, message = FAULTS[fault]
    with pytest.raises(Exception, match=message):
        update(engine, sender, change(read(checkpoint("float32", seed=1))))
    with pytest.raises(Exception, match="weights are incomplete"):
        generate(engine, [[1, 2, 3]])


def test_dummy_weights_serve_nothing(start, checkpoint, reference, prompts, generate, compare):
    """An engine that vLLM filled with random values starts, refuses requests, and is exact after a whole load."""
    engine = start(checkpoint("float32"), "float32", load_format="dummy")
    tensors = list(read(checkpoint("float32")).items())
    engine.apply_model(lambda model: model.load_weights(tensors))
    assert compare(reference(checkpoint("float32")), prompts, generate(engine, prompts))[0] == 0
    del engine
    engine = start(checkpoint("float32"), "float32", load_format="dummy")
    with pytest.raises(Exception, match="weights are incomplete"):
        generate(engine, [[1, 2, 3]])


def test_tied_head(start, checkpoint, reference, prompts, generate, compare):
    """A tied head follows the embedding; a separate head that differs is refused."""
    old, new = (checkpoint("float32", seed=seed, tie_word_embeddings=True) for seed in (0, 1))
    engine = start(old, "float32")
    assert compare(reference(old), prompts, generate(engine, prompts))[0] == 0
    engine.collective_rpc("reload_weights", kwargs={"weights_path": str(new)})
    engine.reset_prefix_cache()
    assert compare(reference(new), prompts, generate(engine, prompts))[0] == 0
    tensors = read(new)
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    engine.apply_model(lambda model: model.load_weights(list((head | tensors).items())))
    head["lm_head.weight"][5, 5] += 1
    with pytest.raises(Exception, match="lm_head.weight differs"):
        engine.apply_model(lambda model: model.load_weights(list((head | tensors).items())))


@pytest.mark.parametrize("engine", ["joined"], indirect=True)
def test_a_parameter_that_leaves_its_joined_weight(engine):
    """Its digest would be right, and what is computed another: the commit of a sync refuses it, by name."""

    def check(model) -> str | None:
        from skyrl_isoexec.model.weights import LoadError

        try:
            model.loader.check()
        except LoadError as error:
            return str(error)
        return None

    assert engine.apply_model(check) == [None]
    for name in ("k_proj.weight", "gate_proj.weight"):

        def leave(model, name=name) -> tuple:
            held = next(p for found, p in model.named_parameters() if found.endswith(name))
            whole, held.data = held.data, held.data.clone()
            return held, whole

        ((parameter, whole),) = engine.apply_model(leave)
        (said,) = engine.apply_model(check)
        parts = {"k_proj.weight": "self_attn", "gate_proj.weight": "mlp"}
        assert f"joined weight that computes them: model.layers.0.{parts[name]};" in said
        parameter.data = whole
        assert engine.apply_model(check) == [None]
