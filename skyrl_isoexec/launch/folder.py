"""The run folder: `config.yaml` (ours and SkyRL's, resolved), `metrics.jsonl`, `logs/`, `checkpoints/`, `export/`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from .compose import resolved
from .config import LaunchConfig

CONFIG = "config.yaml"
DATA = "data"


def claim(folder: Path, *, checkpoints: Path | None) -> None:
    """Make the folder, or go on in one whose run saved into `checkpoints` (None: a run of its own).

    ValueError where a run's files would be mixed.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"run_dir={folder} is a file; name a folder")
    if folder.exists() and {path.name for path in folder.iterdir()} - {DATA}:  # a refused start leaves only its data
        if checkpoints is None or not (checkpoints / "latest_ckpt_global_step.txt").exists():
            why = "trainer.resume_mode=none" if checkpoints is None else f"{checkpoints} holds no checkpoint"
            raise ValueError(
                f"run_dir={folder} is not empty and {why}; name another folder, or go on in it with "
                "trainer.resume_mode=latest after a checkpoint was saved"
            )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"run_dir={folder} cannot be made ({error.strerror}); name another folder") from error


def write_config(launch: LaunchConfig, cfg: Any) -> None:
    """Store the resolved configuration; an earlier part of a resumed run keeps its own under a number."""
    path = launch.run_dir / CONFIG
    if path.exists():
        number = len(list(launch.run_dir.glob("config.*.yaml"))) + 1
        path.rename(launch.run_dir / f"config.{number}.yaml")
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(resolved(launch, cfg))), encoding="utf-8")
