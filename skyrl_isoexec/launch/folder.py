"""The run folder: `config.yaml` (ours and SkyRL's, resolved), `metrics.jsonl`, `logs/`, `checkpoints/`, `export/`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from .compose import resolved
from .config import LaunchConfig

CONFIG = "config.yaml"


def vacant(folder: Path, *, checkpoints: Path | None) -> None:
    """Refuse a folder in which two runs' files would be mixed: ValueError. Nothing is made.

    A run may go on in a folder whose run saved into `checkpoints` (None: a run of its own).
    """
    try:
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"run_dir={folder} is a file; name a folder")
        taken = folder.exists() and any(folder.iterdir())
    except OSError as error:
        raise ValueError(f"run_dir={folder} cannot be read ({error.strerror}); name another folder") from error
    if taken and (checkpoints is None or not (checkpoints / "latest_ckpt_global_step.txt").exists()):
        why = "trainer.resume_mode=none" if checkpoints is None else f"{checkpoints} holds no checkpoint"
        raise ValueError(
            f"run_dir={folder} is not empty and {why}; name another folder, or go on in it with "
            "trainer.resume_mode=latest after a checkpoint was saved"
        )
    if not can_be_made(folder):
        raise ValueError(f"run_dir={folder} cannot be made: what is above it is not a folder to write in; name another")


def can_be_made(folder: Path) -> bool:
    """Whether a folder is there to be written in, or can be made. Nothing is made."""
    there = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def claim(folder: Path) -> None:
    """Make the run's folder if it is not there. ValueError if it cannot be made."""
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
