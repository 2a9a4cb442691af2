"""Where the task keeps its files, and making those that are not there.

The base checkpoint lives in a cache, in a folder named by a digest of everything that decides its weights; the data
lives in the run's folder. Both appear at once, complete: two launches at the same time do not see half a file, and the
second waits for the first one's checkpoint instead of training its own.
"""

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from skyrl_isoexec.launch.config import LaunchConfig, ShapeConfig, TaskConfig

if TYPE_CHECKING:
    from skyrl.train.config import SkyRLTrainConfig

DATA = "data"
"""The folder of a run's data, in the run's folder."""
TRAIN_FILE, HELD_OUT_FILE = "train.jsonl", "held_out.jsonl"
SOURCES = ("base.py", "problems.py", "tokenizer.py")
LIBRARIES = ("torch", "transformers", "tokenizers")
COMPLETE = ("config.json", "model.safetensors", "tokenizer.json")


def base_folder(launch: LaunchConfig) -> Path:
    """Where the base checkpoint of `launch.model.shape` is, or will be. ValueError if the model has no shape."""
    if launch.model.shape is None:
        raise ValueError("model.shape is null: there is no base checkpoint to train")
    folder = launch.task.cache_dir
    root = Path(folder) if folder is not None else user_cache() / "skyrl-isoexec" / "base"
    return root / f"{launch.task.name}-{digest(launch.model.shape, launch.task)}"


def user_cache() -> Path:
    """The user's cache folder, as freedesktop.org defines it."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    return Path(named) if os.path.isabs(named) else Path.home() / ".cache"


def digest(shape: ShapeConfig, task: TaskConfig) -> str:
    """Sixteen hexadecimal digits that change with anything that can change the weights: settings, code, libraries."""
    settings = {name: value for name, value in asdict(task).items() if name != "cache_dir"}
    source = {name: Path(__file__).with_name(name).read_text(encoding="utf-8") for name in SOURCES}
    libraries = {name: version(name) for name in LIBRARIES}
    facts = {"shape": asdict(shape), "task": settings, "source": source, "libraries": libraries}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def is_embedded(launch: LaunchConfig, cfg: "SkyRLTrainConfig") -> bool:
    """Whether the run trains on the embedded task's data rather than on a user's."""
    return [str(launch.run_dir / DATA / TRAIN_FILE)] == list(cfg.data.train_data)


def forms(task: TaskConfig) -> ModuleType:
    """The module with `row` and `write_data` of a task: how its problems are put to a model."""
    from skyrl_isoexec.launch.task import arithmetic, problems

    return arithmetic if task.name == "arithmetic" else problems


def prepare_data(launch: LaunchConfig, cfg: "SkyRLTrainConfig") -> None:
    """Write the embedded task's data into the run's folder; data that the user named is not touched."""
    if is_embedded(launch, cfg):
        data = launch.run_dir / DATA
        forms(launch.task).write_data(data / TRAIN_FILE, data / HELD_OUT_FILE, launch.task)


def prepare_checkpoint(launch: LaunchConfig, progress: Callable[[str], None] = print) -> Path:
    """The checkpoint's folder: the user's, which is not touched, or the base checkpoint's, trained if need be."""
    return Path(launch.model.path) if launch.model.path is not None else ensure_base(launch, progress)


def ensure_base(launch: LaunchConfig, progress: Callable[[str], None] = print) -> Path:
    """The folder of the base checkpoint, trained now if it is not cached."""
    folder = base_folder(launch)
    if is_complete(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        where = f"task.cache_dir={launch.task.cache_dir}" if launch.task.cache_dir else "the user's cache folder"
        raise ValueError(
            f"{where}: {folder.parent} cannot be made ({error.strerror}); name another folder with task.cache_dir"
        ) from error
    with exclusive(folder.with_suffix(".lock"), lambda: progress("base checkpoint: another launch is training it")):
        if is_complete(folder):
            return folder
        from skyrl_isoexec.launch.task.base import train_base

        assert launch.model.shape is not None
        progress(f"base checkpoint: training it once, into {folder}")
        partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
        try:
            partial.chmod(0o755)
            train_base(launch.model.shape, launch.task, partial, progress)
            os.rename(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def is_complete(folder: Path) -> bool:
    """Whether the checkpoint is there. ValueError for a folder that somebody has taken files from."""
    if not folder.exists():
        return False
    missing = [name for name in COMPLETE if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"{folder} lacks {', '.join(missing)}: delete the folder, and it is made again")
    return True


@contextmanager
def exclusive(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold a lock that at most one process has; it is gone with its process, however that ends."""
    with open(path, "w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
