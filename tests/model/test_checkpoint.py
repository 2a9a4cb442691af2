"""Checkpoints load strictly, and what is written is what was read."""

import json

import pytest
import torch
from safetensors.torch import save_file

from skyrl_isoexec.model import checkpoint, families
from skyrl_isoexec.model.checkpoint import CheckpointError, LoadError
from skyrl_isoexec.model.threads import run_ranks

EMBED, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


def contents(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    "family, dtype", [("qwen3", "float32"), ("qwen3", "bfloat16"), ("qwen3_5", "bfloat16"), ("qwen3_5_moe", "bfloat16")]
)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("max_bytes", [10**9, 9000, 1])
def test_round_trip_is_byte_equal(m, tmp_path, family, dtype, tied, max_bytes) -> None:
    config, tensors = m.toy(family, tied_head=tied, dtype=dtype)
    text = '{"model_type":   "qwen3"}'
    checkpoint.save(tmp_path / "a", text, tensors, max_bytes)
    files = sorted((tmp_path / "a").glob("*.safetensors"))
    assert len(files) == 1 if max_bytes == 10**9 else 1 < len(files) <= len(tensors)
    assert max_bytes > 1 or len(files) == len(tensors)
    assert max_bytes == 1 or all(path.stat().st_size < max_bytes + 5000 for path in files)
    decoder = m.build(config, checkpoint.iter_tensors(tmp_path / "a"))
    checkpoint.save(tmp_path / "b", text, checkpoint.iter_export(decoder), max_bytes)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert (HEAD in dict(checkpoint.iter_tensors(tmp_path / "b"))) != tied
    assert (tmp_path / "b" / "config.json").read_text() == text
    assert [path.name for path in tmp_path.iterdir() if path.name not in "ab"] == []


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "qwen3_5_moe"])
def test_ranks_export_the_whole_model(m, family) -> None:
    config, tensors = m.toy(family, tied_head=True)

    def run(axis):
        return checkpoint.export(m.build(config, tensors, axis, num_leaves=4))

    for size in (1, 2, 4):
        for exported in run_ranks(size, run):
            assert exported.keys() == tensors.keys()
            for name, tensor in exported.items():
                m.assert_same_bits(tensor, tensors[name])


def test_fresh_tensors_of_a_gated_delta_rule(m) -> None:
    """Starting values that a first step can learn from: decays of 1 to 16, norms that multiply by 1."""
    config, _ = m.toy("qwen3_5", tied_head=True)
    tensors = dict(checkpoint.random_tensors(config, 5))
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == checkpoint.layout(config)
    rule = {name.split("linear_attn.")[1]: tensor for name, tensor in tensors.items() if "layers.0.linear_attn" in name}
    torch.testing.assert_close(rule["A_log"].exp(), torch.linspace(1.0, 16.0, 8))
    assert (rule["dt_bias"] == 1).all() and (rule["norm.weight"] == 1).all()
    assert 0.01 < rule["conv1d.weight"].std() < 0.03 and rule["conv1d.weight"].shape == (88, 1, 4)
    centred = [tensor for name, tensor in tensors.items() if name.endswith("norm.weight") and "linear_attn" not in name]
    assert len(centred) == 7 and not any(tensor.any() for tensor in centred)


@pytest.mark.parametrize("family, fields", [("qwen3", {"head_dim": 8}), ("qwen3_5", {"linear_num_value_heads": 6})])
def test_transformers_reads_what_we_write(m, tmp_path, family, fields) -> None:
    raw, model = m.make_hf(family, tie_word_embeddings=True, **fields)
    decoder = m.build(m.from_hf(raw), m.hf_tensors(model))
    checkpoint.save(tmp_path / "c", raw, checkpoint.export(decoder), 9000)
    assert len(list((tmp_path / "c").glob("*.safetensors"))) > 1
    assert checkpoint.export_config(tmp_path / "c") == (tmp_path / "c" / "config.json").read_bytes()
    again, info = type(model).from_pretrained(tmp_path / "c", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    for (name, a), (_, b) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    assert m.from_hf(checkpoint.read_config(tmp_path / "c")) == decoder.config


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_transformers_checkpoints_load(m, tmp_path, family) -> None:
    raw, model = m.make_hf(family)
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    decoder = m.build(m.from_hf(raw), checkpoint.iter_tensors(tmp_path))
    for name, tensor in checkpoint.export(decoder).items():
        m.assert_same_bits(tensor, model.state_dict()[name])


def change(tensors, name, tensor) -> dict[str, torch.Tensor]:
    """tensors with one replaced, or without it if tensor is None."""
    return {k: v for k, v in tensors.items() if k != name} | ({} if tensor is None else {name: tensor})


@pytest.mark.parametrize(
    "name, tensor, words",
    [
        (NORM, None, ["missing model.norm.weight of shape (40,)"]),
        (HEAD, None, ["missing lm_head.weight of shape (36, 40)"]),
        ("model.norm.wait", torch.ones(4), ["unexpected model.norm.wait of shape (4,)"]),
        ("model.layers.2.mlp.up_proj.weight", torch.ones(28, 40), ["unexpected model.layers.2.mlp.up_proj.weight"]),
        ("model.mtp_layers.0.input_proj.weight", torch.ones(4), ["unexpected model.mtp_layers.0"]),
        (NORM, torch.ones(41), ["model.norm.weight has shape (41,)", "(40,)"]),
        (EMBED, torch.ones(40, 40), [EMBED, "vocabulary of 40 rows", "vocab_size = 36"]),
        (HEAD, torch.ones(32, 40), [HEAD, "vocabulary of 32 rows", "vocab_size = 36"]),
    ],
)
def test_wrong_tensors_are_named(m, name, tensor, words) -> None:
    config, tensors = m.toy()
    with pytest.raises(LoadError) as error:
        m.build(config, change(tensors, name, tensor))
    assert all(word in str(error.value) for word in words), error.value


def test_all_problems_are_listed_at_once(m) -> None:
    config, tensors = m.toy()
    wrong = change(change(tensors, NORM, None), "model.extra", torch.ones(1))
    with pytest.raises(LoadError, match="unexpected model.extra.*missing model.norm.weight"):
        m.build(config, wrong)
    with pytest.raises(LoadError, match="missing .* and 5 more"):
        m.build(config, {})
    with pytest.raises(LoadError, match="model.norm.weight was given twice"):
        m.build(config, [*tensors.items(), (NORM, tensors[NORM])])


@pytest.mark.parametrize("head_first", [False, True])
def test_a_head_in_a_tied_checkpoint_must_equal_the_embedding(m, head_first) -> None:
    config, tensors = m.toy(tied_head=True)

    def given(head):
        return {HEAD: head} | tensors if head_first else tensors | {HEAD: head}

    def run(axis):
        m.build(config, given(tensors[EMBED].clone()), axis, num_leaves=4)
        head = tensors[EMBED].clone()
        head[35, 39] = -head[35, 39]
        return checkpoint.load(m.build(config, tensors, axis, num_leaves=4), given(head))

    with pytest.raises(LoadError, match=f"{HEAD} differs from {EMBED}"):
        run_ranks(4, run)  # the last rank owns the difference
    with pytest.raises(LoadError, match=f"missing {EMBED}"):
        m.build(config, change(given(tensors[EMBED]), EMBED, None))


def test_tensors_left_out_by_rule_are_reported(m) -> None:
    for family, name in (
        ("mimo", "model.mtp_layers.0.self_attn.q_proj.weight"),
        ("llama", "model.layers.1.self_attn.rotary_emb.inv_freq"),
        ("qwen3_5", "model.visual.pos_embed.weight"),
        ("qwen3_5", "mtp.layers.0.mlp.up_proj.weight"),
    ):
        config, tensors = m.toy(family)
        report = checkpoint.load(m.build(config, tensors), tensors | {name: torch.ones(3)})
        assert report.ignored == {name: families.lookup(family).reason(name, config.num_layers)}
        assert set(report.loaded) == set(tensors) and not report.elsewhere and not report.rounded


def test_names_of_the_family_are_known(m) -> None:
    """A tensor may come under another name, and then not under its own as well."""
    config, tensors = m.toy("qwen3_5")
    other = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    assert set(other) & set(tensors) == {HEAD}
    exported = checkpoint.export(m.build(config, other))
    assert exported.keys() == tensors.keys()
    for name, tensor in exported.items():
        m.assert_same_bits(tensor, tensors[name])
    with pytest.raises(LoadError, match="model.language_model.norm.weight was given twice"):
        m.build(config, tensors | {"model.language_model.norm.weight": tensors[NORM]})
    with pytest.raises(LoadError, match="unexpected model.language_model.norm.weight"):
        m.build(m.toy()[0], m.toy()[1] | {"model.language_model.norm.weight": tensors[NORM]})


def test_other_stages_and_roundings_are_reported(m) -> None:
    config, tensors = m.toy(dtype="bfloat16", num_layers=3)
    decoder = m.build(config, tensors, first_layer=1, last_layer=2, with_embedding=False, with_head=False)
    name = "model.layers.1.mlp.up_proj.weight"
    report = checkpoint.load(decoder, tensors | {name: tensors[name].float() * (1 + 2**-20)})
    assert report.rounded == (name,)
    assert set(report.elsewhere) == {n for n in tensors if not n.startswith("model.layers.1.")}


def test_parameters_start_as_nan_and_say_how_they_are_cut(m) -> None:
    config, tensors = m.toy()
    shapes = checkpoint.layout(config)
    assert {name: tuple(t.shape) for name, t in tensors.items()} == shapes

    def run(axis):
        decoder = m.build(config, tensors, axis, num_leaves=4)
        fresh = type(decoder)(config, decoder.kernels, axis, decoder.schedule)
        assert all(p.isnan().all() for p in fresh.parameters())
        return {name: (p.shard.full_shape(p.shape), p.shard.dim) for name, p in decoder.named_parameters()}

    for found in run_ranks(2, run):
        assert {name: shape for name, (shape, _) in found.items()} == shapes
        assert found["model.layers.0.self_attn.q_proj.weight"][1] == 0
        assert found["model.layers.0.mlp.down_proj.weight"][1] == 1
        assert found[NORM][1] is None


def test_broken_folders_are_refused(m, tmp_path) -> None:
    _, tensors = m.toy()
    with pytest.raises(CheckpointError, match="neither"):
        list(checkpoint.iter_tensors(tmp_path))
    checkpoint.save(tmp_path / "a", {}, tensors, 9000)
    folder = tmp_path / "a"
    index = json.loads((folder / checkpoint.INDEX).read_text())
    first = next(iter(index["weight_map"].values()))
    moved = {"metadata": {}, "weight_map": index["weight_map"] | {"model.other": first}}
    (folder / checkpoint.INDEX).write_text(json.dumps(moved))
    with pytest.raises(CheckpointError, match="file lacks|not in the file"):
        list(checkpoint.iter_tensors(folder))
    (folder / checkpoint.INDEX).write_text(json.dumps(index))
    (folder / first).unlink()
    with pytest.raises(CheckpointError, match=first):
        list(checkpoint.iter_tensors(folder))
    save_file(tensors, folder / checkpoint.SINGLE)
    with pytest.raises(CheckpointError, match="both"):
        list(checkpoint.iter_tensors(folder))


def test_writing_is_atomic(m, tmp_path) -> None:
    _, tensors = m.toy()

    def failing():
        yield from list(tensors.items())[:3]
        raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError, match="interrupted"):
        checkpoint.save(tmp_path / "a", {}, failing(), 1)
    assert list(tmp_path.iterdir()) == []
    checkpoint.save(tmp_path / "a", {"old": 1}, tensors)
    before = contents(tmp_path / "a")
    with pytest.raises(FileExistsError, match="overwrite"):
        checkpoint.save(tmp_path / "a", {}, tensors)
    with pytest.raises(RuntimeError, match="interrupted"):
        checkpoint.save(tmp_path / "a", {}, failing(), 1, overwrite=True)
    assert contents(tmp_path / "a") == before
    extra = tmp_path / "tokenizer.json"
    extra.write_text("{}")
    checkpoint.save(tmp_path / "a", {"new": 1}, tensors, companions=[extra], overwrite=True)
    assert checkpoint.read_config(tmp_path / "a") == {"new": 1} and (tmp_path / "a" / "tokenizer.json").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"a", "tokenizer.json"}
    for wrong in ([], [(NORM, tensors[NORM])] * 2):
        with pytest.raises(CheckpointError):
            checkpoint.save(tmp_path / "b", {}, wrong)
    assert not (tmp_path / "b").exists()
