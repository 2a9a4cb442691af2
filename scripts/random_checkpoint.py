#!/usr/bin/env python3
"""A checkpoint of published widths, fewer layers and random weights: to prove and time a large model on one GPU.

    python scripts/random_checkpoint.py Qwen3_5TextConfig --layers 4 --out FOLDER [--set max_position_embeddings=4096]

Sizes are the defaults of transformers' configuration class (5.8.0): for Qwen3_5TextConfig those of Qwen3.5-9B, for
Glm4MoeLiteConfig those of GLM-4.7-Flash, whose first layer is dense. A router's bias is 0. The tokenizer is the
embedded task's, of sixteen symbols, whatever the vocabulary. Weights are the same for the same arguments. Needs
transformers.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from skyrl_isoexec.launch.task.tokenizer import BOS, EOS, IDS, PAD, save_tokenizer  # noqa: E402
from skyrl_isoexec.model.checkpoint import random_tensors, save  # noqa: E402
from skyrl_isoexec.model.families import from_hf  # noqa: E402


def configuration(name: str, layers: int, changes: dict[str, Any]) -> dict[str, Any]:
    """The fields of transformers' class `name`. ValueError for a class or a field that does not exist."""
    import transformers

    cls = getattr(transformers, name, None)
    if cls is None:
        raise ValueError(f"transformers has no configuration class {name!r}")
    unknown = sorted(changes.keys() - cls().to_dict().keys())
    if unknown:
        raise ValueError(f"{name} has no fields {unknown}")
    tokens = {"pad_token_id": IDS[PAD], "eos_token_id": IDS[EOS], "bos_token_id": IDS[BOS]}
    return cls(num_hidden_layers=layers, dtype="bfloat16", **tokens, **changes).to_dict()


def write(fields: dict[str, Any], architecture: str, seed: int, out: Path) -> None:
    """The whole checkpoint folder, at once. ValueError for a family that is not computed here."""
    fields = fields | {"architectures": [architecture]}
    config = from_hf(fields, dtype="bfloat16")
    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer(Path(folder))
        companions = sorted(Path(folder).iterdir())
        save(out, json.dumps(fields, indent=1), random_tensors(config, seed), companions=companions)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="transformers' configuration class, such as Qwen3_5TextConfig")
    parser.add_argument("--layers", type=int, required=True, help="decoder layers")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--seed", type=int, default=0, help="of the weights")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=JSON", help="another value of a field")
    arguments = parser.parse_args()
    changes = {key: json.loads(value) for key, _, value in (item.partition("=") for item in arguments.set)}
    architecture = arguments.config.removesuffix("TextConfig").removesuffix("Config") + "ForCausalLM"
    try:
        write(configuration(arguments.config, arguments.layers, changes), architecture, arguments.seed, arguments.out)
    except ValueError as error:
        sys.exit(f"random_checkpoint: {error}")
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
