"""The conversion of SmolLM2 on a tiny file of its form: names, shapes, the rotation's halves, and what is refused."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import gguf
import numpy as np
import pytest
import torch

from skyrl_isoexec.launch.compose import compose
from skyrl_isoexec.launch.preflight import model as preflight
from skyrl_isoexec.model.checkpoint import iter_tensors, read_config
from skyrl_isoexec.model.families import from_hf

ROOT = Path(__file__).resolve().parents[2]
HEADS, KV, WIDTH, FFN, LAYERS = 9, 3, 64, 96, 2
HIDDEN = HEADS * WIDTH
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"0123456789", "a", "b", "ab"]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("smollm2", ROOT / "scripts" / "smollm2.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(seed: int, *shape: int) -> np.ndarray:
    """Numbers that bf16 and a GGUF file both keep."""
    return np.random.default_rng(seed).integers(-8, 8, shape).astype(np.float32) / 8


def written(path: Path, leave_out: str = "", extra: str = "") -> dict[str, np.ndarray]:
    """A file of the model's form; returns what was put into it."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    tensors = {"token_embd": rows(0, len(TOKENS), HIDDEN), "output_norm": rows(1, HIDDEN)}
    for index in range(LAYERS):
        shapes = {
            "attn_norm": (HIDDEN,), "attn_q": (HIDDEN, HIDDEN), "attn_k": (KV * WIDTH, HIDDEN), "ffn_norm": (HIDDEN,),
            "attn_v": (KV * WIDTH, HIDDEN), "attn_output": (HIDDEN, HIDDEN), "ffn_gate": (FFN, HIDDEN),
            "ffn_up": (FFN, HIDDEN), "ffn_down": (HIDDEN, FFN),
        }  # fmt: skip
        tensors |= {f"blk.{index}.{name}": rows(10 * index + i, *s) for i, (name, s) in enumerate(shapes.items(), 2)}
    if extra:
        tensors[extra] = rows(99, 4)
    for name, data in tensors.items():
        if name != leave_out:
            writer.add_tensor(f"{name}.weight", data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def test_a_folder_that_the_trainer_and_engine_read(script: ModuleType, tmp_path: Path) -> None:
    put = written(tmp_path / "tiny.gguf")
    script.convert(tmp_path / "tiny.gguf", tmp_path / "out")
    config = preflight.checkpoint(tmp_path / "out", dtype="bfloat16")
    assert (config.family, config.num_heads, config.num_kv_heads, config.tied_head) == ("llama", HEADS, KV, True)
    found = dict(iter_tensors(tmp_path / "out"))
    gate = found["model.layers.1.mlp.gate_proj.weight"]
    assert gate.dtype == torch.bfloat16 and torch.equal(gate.float(), torch.from_numpy(put["blk.1.ffn_gate"]))
    q, there = found["model.layers.0.self_attn.q_proj.weight"].float(), torch.from_numpy(put["blk.0.attn_q"])
    half = WIDTH // 2
    for head, pair in ((0, 0), (0, 5), (8, half - 1)):
        assert torch.equal(q[head * WIDTH + pair], there[head * WIDTH + 2 * pair])
        assert torch.equal(q[head * WIDTH + half + pair], there[head * WIDTH + 2 * pair + 1])


def test_the_tokenizer_comes_along(script: ModuleType, tmp_path: Path) -> None:
    written(tmp_path / "tiny.gguf")
    script.convert(tmp_path / "tiny.gguf", tmp_path / "out")
    config = preflight.checkpoint(tmp_path / "out", dtype="bfloat16")
    tokenizer = preflight.tokenizer(tmp_path / "out", config)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "12ab"}], tokenize=True, return_dict=False)
    assert [TOKENS[i] for i in ids] == ["1", "2", "ab"]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.decode([3, 15, 2]) == "0ab<|im_end|>"


@pytest.mark.parametrize("side", ["trainer", "engine"])
def test_two_parts_are_refused_by_name(script: ModuleType, tmp_path: Path, side: str) -> None:
    written(tmp_path / "tiny.gguf")
    script.convert(tmp_path / "tiny.gguf", tmp_path / "out")
    arguments = ["model=smollm2_135m", f"model.path={tmp_path / 'out'}", "runtime=cuda", f"topology.{side}.tp=2"]
    launch, _ = compose(["+exec=isoexec", *arguments])
    with pytest.raises(preflight.Refusal, match=rf"topology\.{side}\.tp=2: .*heads = (9|3)"):
        preflight.layouts(from_hf(read_config(tmp_path / "out")), launch)


@pytest.mark.parametrize(
    ("change", "said"),
    [({"leave_out": "blk.1.ffn_up"}, "layers.1.mlp.up_proj.weight is None"), ({"extra": "blk.0.attn_rot"}, "attn_rot")],
)
def test_another_model_is_refused(script: ModuleType, tmp_path: Path, change: dict[str, str], said: str) -> None:
    written(tmp_path / "tiny.gguf", **change)
    with pytest.raises(script.ConversionError, match=said):
        script.convert(tmp_path / "tiny.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_other_bytes_than_the_packages_are_refused(script: ModuleType, tmp_path: Path, capsys) -> None:
    written(tmp_path / "tiny.gguf")
    assert script.main(["model", "--gguf", str(tmp_path / "tiny.gguf"), "--out", str(tmp_path / "out")]) == 2
    assert "SHA-256" in capsys.readouterr().err


def test_school_problems_get_skyrls_form(script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "raw.jsonl").write_text(json.dumps({"question": "How many?", "answer": "So.\n#### 1,200"}) + "\n")
    assert script.main(["data", str(tmp_path / "raw.jsonl"), str(tmp_path / "out.jsonl")]) == 0
    (row,) = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert row["reward_spec"]["ground_truth"] == "1200" and row["env_class"] == "gsm8k"
    assert row["prompt"][0]["content"].startswith("How many? ")
