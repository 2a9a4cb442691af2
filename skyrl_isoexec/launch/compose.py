"""From a command line to the two configurations of a run: ours, frozen, and SkyRL's own dataclass.

Hydra composes the files of `configs/`; before and after that every name and type is checked against the dataclasses
themselves, because Hydra alone would let a misspelled key of SkyRL's through as a new one. Nothing is created on disk
and no process is started here. SkyRL's configuration imports torch and ray when it is constructed, which is therefore
the last thing that happens.
"""

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from skyrl_isoexec.launch import layout, links
from skyrl_isoexec.launch.config import LaunchConfig
from skyrl_isoexec.launch.overrides import Overrides, groups_of, parse
from skyrl_isoexec.launch.schema import ConfigError, annotation_of, build, check, hints
from skyrl_isoexec.launch.task import DATA, HELD_OUT_FILE, TRAIN_FILE, base_folder

if TYPE_CHECKING:
    from skyrl.train.config import SkyRLTrainConfig

READ = ("data.train_data", "data.val_data")
WRITTEN = (
    "run_dir",
    "task.cache_dir",
    "trainer.ckpt_path",
    "trainer.export_path",
    "trainer.log_path",
    "trainer.resume_path",
)
"""Keys of what is read, and of folders that are written or resumed from."""
CONFIGS = Path(__file__).resolve().parents[2] / "configs"
"""Folder of the configuration's files."""


def compose(
    arguments: Sequence[str], *, now: float | None = None, present: Callable[[str], None] | None = None
) -> "tuple[LaunchConfig, SkyRLTrainConfig]":
    """The configurations that `arguments` (in the form of `sys.argv[1:]`) ask for.

    ConfigError, with a text for the user, for everything that is refused: an unknown or misspelled group, option or key
    at any depth, a value of a wrong type, settings that contradict each other. `now` (seconds since the epoch) decides
    the name of a run that has none. `present` is given `runtime.device` before settings are compared with each other,
    and may refuse it: what contradicts a device that the machine does not have is no help.
    """
    root = schema()
    overrides = parse(arguments, groups_of(CONFIGS))
    if "exec" not in overrides.groups:
        raise ConfigError("no stack is chosen: add +exec=isoexec, or +exec=native for the stock one")
    for key, value in overrides.values.items():
        check(annotation_of(key, root), value, key, root)
    tree = merge(overrides)
    check(root, tree, "", root)
    links.adopt(tree, overrides.values)
    anchor(tree)
    layout.resolve(tree, overrides.values)
    name_run(tree, now)
    if present is not None:
        present(tree["runtime"]["device"])
    links.spread(tree)
    if tree["exec"]["name"] != overrides.groups["exec"]:
        chosen, name = overrides.groups["exec"], tree["exec"]["name"]
        raise ConfigError(f"exec.name={name} contradicts exec={chosen}; choose the stack with exec={name}")
    launch = build(LaunchConfig, {**ours(tree), "run_dir": Path(tree["run_dir"])})
    links.fill(tree, {**embedded_data(tree, launch.run_dir), **implied(launch)})
    check(root, tree, "", root)
    return launch, skyrl_config(tree)


def compose_or_exit(arguments: Sequence[str]) -> "tuple[LaunchConfig, SkyRLTrainConfig]":
    """As `compose`; what is refused is printed to standard error and ends the process with code 2."""
    try:
        return compose(arguments)
    except ConfigError as error:
        print(f"configuration refused: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None


def schema() -> type:
    """A dataclass type whose fields are our groups and SkyRL's sections: the one namespace of a command line."""
    from skyrl.train.config.config import SkyRLTrainConfig

    both = {**hints(SkyRLTrainConfig), **hints(LaunchConfig), "run_dir": str | None}
    return dataclasses.make_dataclass("Configuration", [(name, annotation) for name, annotation in both.items()])


def merge(overrides: Overrides) -> dict[str, Any]:
    """The files of `configs/` with the overrides on top, as plain data."""
    groups = [f"+exec={overrides.groups['exec']}"]
    groups += [f"{group}={option}" for group, option in overrides.groups.items() if group != "exec"]
    try:
        with hydra.initialize_config_dir(config_dir=str(CONFIGS), version_base="1.3"):
            composed = hydra.compose(config_name="config", overrides=[*groups, *overrides.assignments])
        tree = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(" ".join(str(error).split())) from error
    assert isinstance(tree, dict)
    return tree


def anchor(tree: dict[str, Any]) -> None:
    """Make paths absolute, because Ray's workers run in a folder of their own.

    What is read may be the name of something that is not on this disk, and stays as it is unless it exists here.
    """

    def absolute(key: str, name: str) -> str:
        path = expanded(key, name)
        return str(path.absolute()) if os.path.exists(path) else name

    if tree["model"]["path"] is not None:
        tree["model"]["path"] = absolute("model.path", tree["model"]["path"])
    for key in READ:
        files = links.get(tree, key)
        if files is not None:
            links.put(tree, key, [absolute(key, file) for file in files])
    for key in WRITTEN:
        folder = links.get(tree, key)
        if folder is not None and "://" not in folder:
            links.put(tree, key, str(expanded(key, folder).absolute()))


def expanded(key: str, name: str) -> Path:
    """A path with the user's home folder in it. ConfigError for the home of a user that does not exist."""
    path = os.path.expanduser(name)
    if path.startswith("~"):
        raise ConfigError(f"{key}={name}: there is no such home folder; write the path out")
    return Path(path)


def name_run(tree: dict[str, Any], now: float | None) -> None:
    """Give the run a name and a folder where the command line gave none. The folder is absolute afterwards."""
    folder = tree["run_dir"]
    if tree["run"]["name"] is None:
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
        named = Path(os.path.abspath(folder)).name if folder is not None else ""
        path, shape = tree["model"]["path"], tree["model"]["shape"]
        model = Path(os.path.abspath(path)).name if path is not None else (shape or {}).get("family")
        tree["run"]["name"] = named or f"{tree['task']['name']}-{model}-{tree['exec']['name']}-{stamp}"
    if folder is None:
        tree["run_dir"] = str((Path("runs") / tree["run"]["name"]).absolute())


def ours(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The part of the tree that SkyRL does not know."""
    return {name: tree[name] for name in hints(LaunchConfig) if name in tree}


def implied(launch: LaunchConfig) -> dict[str, Any]:
    """Values of SkyRL's that follow from ours and that a user may still have set otherwise."""
    ranks = launch.topology.trainer.tp * launch.topology.trainer.pp * (launch.topology.trainer.dp or 1)
    values: dict[str, Any] = {
        "trainer.ckpt_path": str(launch.run_dir / "checkpoints"),
        "trainer.export_path": str(launch.run_dir / "export"),
        "trainer.log_path": str(launch.run_dir / "logs"),
        "trainer.placement.ref_num_gpus_per_node": ranks,
    }
    if launch.model.path is None:
        values["trainer.policy.model.path"] = str(base_folder(launch))
    return values


def embedded_data(tree: Mapping[str, Any], run_dir: Path) -> dict[str, list[str]]:
    """The embedded task's files, which the launcher writes; none of them where a user trains on other data."""
    if links.get(tree, "data.train_data") is not None:
        return {"data.val_data": []}
    train, held_out = (str(run_dir / DATA / name) for name in (TRAIN_FILE, HELD_OUT_FILE))
    return {"data.train_data": [train], "data.val_data": [held_out]}


def skyrl_config(tree: Mapping[str, Any]) -> "SkyRLTrainConfig":
    """SkyRL's own dataclass from its part of a checked tree. ConfigError for what it refuses itself."""
    from skyrl.train.config.config import SkyRLTrainConfig, build_nested_dataclass

    theirs = {name: tree[name] for name in hints(SkyRLTrainConfig) if name in tree}
    try:
        return build_nested_dataclass(SkyRLTrainConfig, theirs)
    except (ValueError, AssertionError) as error:
        raise ConfigError(f"SkyRL refuses the configuration: {error}") from error


def resolved(launch: LaunchConfig, skyrl: "SkyRLTrainConfig") -> dict[str, Any]:
    """Both configurations as plain data, for the run folder."""
    plain = {**dataclasses.asdict(launch), **dataclasses.asdict(skyrl)}
    return {**plain, "run_dir": str(launch.run_dir)}
