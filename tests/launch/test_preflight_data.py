"""Data and checkpoints that cannot be used are refused, with the file, the row and the mend."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from skyrl_isoexec.launch.compose import compose
from skyrl_isoexec.launch.preflight import Refusal, data, model
from skyrl_isoexec.launch.task.tokenizer import build_tokenizer

GOOD = [
    {
        "prompt": [{"role": "user", "content": f"{n}+1="}],
        "env_class": "addition",
        "reward_spec": {"ground_truth": str(n + 1)},
    }
    for n in range(40)
]
LONG = {**GOOD[0], "prompt": [{"role": "user", "content": "11111+22222="}]}


def lines(*rows: dict) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def refused(arguments: list[str]) -> None:
    """Everything that is checked of the data, as a run does it."""
    launch, cfg = compose(["+exec=isoexec", *arguments])
    for source in data.sources(launch, cfg):
        data.environments(source, cfg)
        data.prompts(source, build_tokenizer(), cfg)


FILES = {
    "empty.jsonl": ("", "is empty; give a file with rows"),
    "garbage.jsonl": ("garbage\n", "cannot be read (JSON parse error"),
    "garbage.parquet": ("garbage" * 50, "cannot be read (Parquet magic bytes"),
    "table.csv": ("a,b\n1,2\n", "whose kind is unknown; give a file that ends in .jsonl"),
    "columns.jsonl": (lines(*[{"question": "1+1="}] * 40), "no reward_spec.ground_truth"),
    "text.jsonl": (lines(*({**row, "prompt": "1+1="} for row in GOOD)), "the prompt of row 1 is '1+1='"),
    "nothing.jsonl": (lines(*GOOD, {**GOOD[0], "prompt": None}), "the prompt of row 41 is 'None'"),
    "other.jsonl": (lines(*GOOD, {**GOOD[0], "env_class": "foo"}), "env_class=foo is unknown"),
    "answer.jsonl": (lines(*GOOD, {**GOOD[0], "reward_spec": None}), "row 41 of"),
    "long.jsonl": (lines(*GOOD, LONG), "are longer than trainer.max_prompt_length = 8 tokens, the longest has 12"),
}


@pytest.mark.parametrize("key", ["train_data", "val_data"])
@pytest.mark.parametrize("name", FILES)
def test_files_that_cannot_be_used(name: str, key: str, tmp_path: Path) -> None:
    text, named = FILES[name]
    (tmp_path / name).write_text(text)
    (tmp_path / "good.jsonl").write_text(lines(*GOOD))
    files = {"train_data": tmp_path / "good.jsonl", key: tmp_path / name}
    with pytest.raises(Refusal, match=re.escape(named)) as refusal:
        refused([f"data.{which}=[{file}]" for which, file in files.items()])
    assert str(tmp_path / name) in str(refusal.value) and "\n" not in str(refusal.value)


def test_data_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "few.jsonl").write_text(lines(*GOOD[:3]))
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "good.jsonl").write_text(lines(*GOOD))
    train = "data.train_data="
    for arguments, named in (
        ([f"{train}[]"], r"train_data=\[\] names no data"),
        ([f"{train}[/no.jsonl]"], "/no.jsonl, which does not exist"),
        ([f"{train}[{tmp_path / 'folder.jsonl'}]"], "which is not a file"),
        ([f"{train}[{tmp_path / 'few.jsonl'}]"], "has 3 prompts, fewer than trainer.train_batch_size = 32"),
        ([f"{train}[{tmp_path / 'good.jsonl'}]", "trainer.eval_interval=1"], "data.val_data names no data"),
        (["task.digits=1", "trainer.train_batch_size=128"], "has 88 prompts, fewer than"),
        (["trainer.max_prompt_length=4"], "longest has 6"),
    ):
        with pytest.raises(Refusal, match=named):
            refused(arguments)
    refused([f"{train}[{tmp_path / 'good.jsonl'}]"])
    refused([])


FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda folder: None, "has no config.json; give a Hugging Face checkpoint folder"),
    "list": (lambda folder: (folder / "config.json").write_text("[1]"), "config.json: not a JSON object; mend"),
    "cut": (lambda folder: (folder / "config.json").write_text("{"), "config.json: Expecting property name"),
    "family": (lambda folder: (folder / "config.json").write_text('{"model_type": "foo"}'), "supported: "),
}


@pytest.mark.parametrize("kind", FOLDERS)
def test_folders_that_are_no_checkpoint(kind: str, tmp_path: Path) -> None:
    make, named = FOLDERS[kind]
    make(tmp_path)
    with pytest.raises(Refusal, match=re.escape(named)) as refusal:
        model.checkpoint(tmp_path, dtype="float32")
    assert f"model.path={tmp_path}" in str(refusal.value)


def test_a_checkpoint_of_single_experts(tmp_path: Path) -> None:
    """As transformers writes it; what is missing or misshapen is named as it is in the files."""
    hf = Qwen3MoeConfig(
        vocab_size=16,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        norm_topk_prob=True,
        max_position_embeddings=32,
    )
    Qwen3MoeForCausalLM(hf).save_pretrained(tmp_path)
    assert model.checkpoint(tmp_path, dtype="float32").num_experts == 4
    file, name = tmp_path / "model.safetensors", "model.layers.1.mlp.experts.2.up_proj.weight"
    tensors = load_file(file)
    assert name in tensors
    for changes, words in (
        ({name: None}, f"tensor {name} is missing"),
        (
            {name: tensors[name][:, 1:].contiguous()},
            f"tensor {name} has shape (8, 15), the configuration gives (8, 16)",
        ),
        ({name.replace(".2.", ".4."): torch.zeros(8, 16)}, f"{name.replace('.2.', '.4.')} is not part of this model"),
        ({f"{name.partition('.2.')[0]}.down_proj": torch.zeros(4, 16, 8)}, "down_proj was given twice"),
    ):
        given = {key: tensor for key, tensor in (tensors | changes).items() if tensor is not None}
        save_file(given, file, metadata={"format": "pt"})
        with pytest.raises(Refusal, match=re.escape(words)):
            model.checkpoint(tmp_path, dtype="float32")


def test_an_index_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(Refusal, match="is no index"):
        model._files(tmp_path)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(Refusal, match="has both"):
        model._files(tmp_path)
