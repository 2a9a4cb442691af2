"""Checkpoints in Hugging Face format: config.json and safetensors, in one file or sharded with an index.

Reading is strict about files, `load` about tensors. Writing is atomic: a folder appears complete or not at all.
`load`, `export` and `iter_export` (from `weights`) move tensors in and out of a decoder; `export_config` describes
those that come out.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from skyrl_isoexec.model.families import detect
from skyrl_isoexec.model.weights import (
    LoadError,
    LoadReport,
    dtypes,
    export,
    iter_export,
    layout,
    load,
    random_tensors,
)

__all__ = [
    "CheckpointError",
    "LoadError",
    "LoadReport",
    "dtypes",
    "export",
    "export_config",
    "iter_export",
    "iter_tensors",
    "layout",
    "load",
    "random_tensors",
    "read_config",
    "save",
]

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5 * 10**9


class CheckpointError(ValueError):
    """A checkpoint folder whose files do not fit together."""


def read_config(folder: Path | str) -> dict[str, object]:
    """The parsed config.json; `families.from_hf` interprets it."""
    return json.loads((Path(folder) / CONFIG).read_text(encoding="utf-8"))


def export_config(folder: Path | str) -> Mapping[str, object] | bytes:
    """config.json for exported tensors of the model in `folder`, as `save` takes it: the same bytes where they fit.

    They do not where the folder's model has more than the decoder, such as a vision tower.
    """
    fields = read_config(folder)
    found = detect(fields).to_hf(fields)
    return (Path(folder) / CONFIG).read_bytes() if found == fields else found


def iter_tensors(folder: Path | str) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor on the CPU) of every tensor, file by file.

    CheckpointError if there is no safetensors checkpoint, or two, or if the index and a file disagree about a tensor.
    """
    folder = Path(folder)
    single, index = (folder / SINGLE).exists(), (folder / INDEX).exists()
    if single == index:
        found = "both" if single else "neither"
        raise CheckpointError(f"{folder} must hold {SINGLE} or {INDEX}, and holds {found}")
    if single:
        yield from _read_file(folder / SINGLE, None)
        return
    weight_map = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
    for file in sorted(set(weight_map.values())):
        yield from _read_file(folder / file, {name for name, home in weight_map.items() if home == file})


def _read_file(path: Path, expected: set[str] | None) -> Iterator[tuple[str, torch.Tensor]]:
    if not path.exists():
        raise CheckpointError(f"{INDEX} names {path.name}, which is not in {path.parent}")
    with safe_open(path, framework="pt", device="cpu") as file:
        names = set(file.keys())
        if expected is not None and names != expected:
            absent, extra = sorted(expected - names), sorted(names - expected)
            raise CheckpointError(
                f"{INDEX} and {path.name} disagree: not in the file {absent}, not in the index {extra}"
            )
        for name in sorted(names):
            yield name, file.get_tensor(name)


def save(
    folder: Path | str,
    config_json: Mapping[str, object] | str | bytes,
    tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
    max_shard_bytes: int = MAX_SHARD_BYTES,
    *,
    companions: Iterable[Path | str] = (),
    overwrite: bool = False,
) -> None:
    """Write a checkpoint folder by way of a temporary sibling and one rename.

    Text or bytes of config_json are kept as they are; a mapping is written as JSON. Tensors are taken one by one, in
    the order given, and written when `max_shard_bytes` would be exceeded. `companions` (tokenizer files and the like)
    are copied. An existing folder that is not empty is refused unless `overwrite`; then it is moved aside, replaced and
    removed.
    """
    folder = Path(folder)
    if not overwrite and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists and is not empty; pass overwrite=True to replace it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        if isinstance(config_json, Mapping):
            config_json = json.dumps(config_json, indent=2, sort_keys=True) + "\n"
        content = config_json.encode() if isinstance(config_json, str) else config_json
        (staging / CONFIG).write_bytes(content)
        for path in map(Path, companions):
            shutil.copy(path, staging / path.name)
        _write_shards(staging, tensors, max_shard_bytes)
        _sync(staging)
        staging.chmod(0o755)
        _put_in_place(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _write_shards(
    folder: Path, tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]], max_bytes: int
) -> None:
    shards: list[list[str]] = []
    pending: dict[str, torch.Tensor] = {}
    seen: set[str] = set()
    total = size = 0

    def flush() -> None:
        if pending:
            save_file(pending, folder / f"part-{len(shards)}", metadata={"format": "pt"})
            shards.append(list(pending))
            pending.clear()

    for name, tensor in tensors.items() if isinstance(tensors, Mapping) else tensors:
        if name in seen:
            raise CheckpointError(f"tensor {name} was given twice")
        seen.add(name)
        if size + tensor.nbytes > max_bytes:
            flush()
            size = 0
        pending[name] = tensor.detach().contiguous().cpu().clone()
        size += tensor.nbytes
        total += tensor.nbytes
    flush()
    if not shards:
        raise CheckpointError("a checkpoint without tensors was to be written")
    if len(shards) == 1:
        (folder / "part-0").rename(folder / SINGLE)
        return
    weight_map = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"part-{i}").rename(folder / file)
        weight_map.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _sync(folder: Path) -> None:
    for path in (*folder.iterdir(), folder):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _put_in_place(staging: Path, folder: Path) -> None:
    if folder.exists() and any(folder.iterdir()):
        aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.old.", dir=folder.parent))
        folder.rename(aside)
        try:
            staging.rename(folder)
        except OSError:
            aside.rename(folder)
            raise
        shutil.rmtree(aside, ignore_errors=True)
    else:
        staging.rename(folder)  # an empty folder is replaced
