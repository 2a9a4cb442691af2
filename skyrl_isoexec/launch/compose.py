"""From a command line to the two configurations of a run: ours, frozen, and SkyRL's own dataclass.

Hydra composes the files of `configs/`; before and after that every name and type is checked against the dataclasses
themselves, because Hydra alone would let a misspelled key of SkyRL's through as a new one. Nothing is created on disk
and no process is started here. SkyRL's configuration imports torch and ray when it is constructed, which is therefore
the last thing that happens.
"""

import dataclasses
import sys
import time
from collections.abc import Mapping, Sequence
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
from skyrl_isoexec.launch.task import HELD_OUT_FILE, TRAIN_FILE, base_folder

if TYPE_CHECKING:
    from skyrl.train.config import SkyRLTrainConfig

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
"""Folder of the configuration's files."""


def compose(arguments: Sequence[str], *, now: float | None = None) -> "tuple[LaunchConfig, SkyRLTrainConfig]":
    """The configurations that `arguments` (in the form of `sys.argv[1:]`) ask for.

    ConfigError, with a text for the user, for everything that is refused: an unknown or misspelled group, option or key
    at any depth, a value of a wrong type, settings that contradict each other. `now` (seconds since the epoch) decides
    the name of a run that has none.
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
    links.spread(tree)
    if tree["exec"]["name"] != overrides.groups["exec"]:
        chosen, name = overrides.groups["exec"], tree["exec"]["name"]
        raise ConfigError(f"exec.name={name} contradicts exec={chosen}; choose the stack with exec={name}")
    launch = build(LaunchConfig, {**ours(tree), "run_dir": Path(tree["run_dir"]).expanduser().absolute()})
    links.fill(tree, implied(launch))
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
    """Make paths that exist here absolute, because Ray's workers run in a folder of their own."""

    def absolute(name: str) -> str:
        return str(Path(name).expanduser().absolute()) if Path(name).expanduser().exists() else name

    if tree["model"]["path"] is not None:
        tree["model"]["path"] = absolute(tree["model"]["path"])
    for key in ("data.train_data", "data.val_data"):
        files = links.get(tree, key)
        if files is not None:
            links.put(tree, key, [absolute(file) for file in files])


def name_run(tree: dict[str, Any], now: float | None) -> None:
    """Give the run a name and a folder where the command line gave none."""
    if tree["run"]["name"] is None:
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
        folder = tree["run_dir"]
        tree["run"]["name"] = Path(folder).name if folder else f"{tree['task']['name']}-{tree['exec']['name']}-{stamp}"
    if tree["run_dir"] is None:
        tree["run_dir"] = str(Path("runs") / tree["run"]["name"])


def ours(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The part of the tree that SkyRL does not know."""
    return {name: tree[name] for name in hints(LaunchConfig) if name in tree}


def implied(launch: LaunchConfig) -> dict[str, Any]:
    """Values of SkyRL's that follow from ours and that a user may still have set otherwise."""
    ranks = launch.topology.trainer.tp * launch.topology.trainer.pp * (launch.topology.trainer.dp or 1)
    values: dict[str, Any] = {
        "data.train_data": [str(launch.run_dir / "data" / TRAIN_FILE)],
        "data.val_data": [str(launch.run_dir / "data" / HELD_OUT_FILE)],
        "trainer.ckpt_path": str(launch.run_dir / "checkpoints"),
        "trainer.export_path": str(launch.run_dir / "export"),
        "trainer.log_path": str(launch.run_dir / "logs"),
        "trainer.placement.ref_num_gpus_per_node": ranks,
    }
    if launch.model.path is None:
        values["trainer.policy.model.path"] = str(base_folder(launch))
    return values


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
