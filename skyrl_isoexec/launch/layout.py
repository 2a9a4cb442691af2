"""How many ranks and engines a run has, where the configuration leaves it to be derived.

A trainer replica has tp x pp ranks and there are dp of them; an engine has tp workers and there are num of them.
Colocated, both sides use the same devices, so dp x tp x pp = num x tp of the engine. A trainer's experts are cut over
ep of the dp x tp ranks of a stage.
"""

import math
from collections.abc import Mapping
from typing import Any

from skyrl_isoexec.launch.config import TopologyConfig
from skyrl_isoexec.launch.links import Tree, get, put
from skyrl_isoexec.launch.schema import ConfigError, build

GPUS, NODES = "trainer.placement.policy_num_gpus_per_node", "trainer.placement.policy_num_nodes"


def sizes(
    *, replica: int, dp: int | None, engine: int, num: int | None, colocate: bool, experts: int = 1
) -> tuple[int, int]:
    """(trainer replicas, engines), derived where null. ConfigError if the two sides cannot share devices.

    `replica`, `engine` and `experts` are the devices of one trainer replica, of one engine and of one of all experts.
    """
    if not colocate:
        return dp or math.lcm(replica, experts) // replica, num or 1
    if dp is None:
        devices = engine * num if num is not None else math.lcm(replica, engine, experts)
    else:
        devices = replica * dp
    if devices % replica or devices % engine or (num is not None and devices != engine * num):
        raise ConfigError(
            f"topology.trainer (tp x pp = {replica}, dp = {dp}) and topology.engine (tp = {engine}, num = {num}) "
            "cannot share devices (topology.colocate=true): dp x tp x pp of the trainer has to equal num x tp of "
            "the engine; set one of them, or topology.colocate=false"
        )
    return devices // replica, devices // engine


def resolve(tree: Tree, given: Mapping[str, Any]) -> None:
    """Fill in the derived parts of `topology`, `kernels.num_leaves` and SkyRL's placement.

    A number of trainer devices that was given under SkyRL's name is taken as the data-parallel degree that it implies.
    """
    topology = tree["topology"]
    build(TopologyConfig, topology, "topology")
    trainer, engine = topology["trainer"], topology["engine"]
    replica = trainer["tp"] * trainer["pp"]
    nodes = get(tree, NODES, 1)
    for key, value in ((NODES, nodes), (GPUS, given.get(GPUS, 1))):
        if value < 1:
            raise ConfigError(f"{key}={value} is not positive; set it to 1 or more")
    if GPUS in given:
        devices = given[GPUS] * nodes
        if devices % replica:
            raise ConfigError(
                f"{GPUS}={given[GPUS]} with {nodes} node(s) is not a multiple of topology.trainer tp x pp = {replica}"
            )
        dp = devices // replica
        if given.get("topology.trainer.dp") not in (None, dp):
            raise ConfigError(f"topology.trainer.dp={trainer['dp']} and {GPUS}={given[GPUS]} contradict each other")
        trainer["dp"] = dp
    trainer["dp"], engine["num"] = sizes(
        replica=replica,
        dp=trainer["dp"],
        engine=engine["tp"],
        num=engine["num"],
        colocate=topology["colocate"],
        experts=trainer["ep"] * trainer["pp"],
    )
    ranks = replica * trainer["dp"]
    stage = ranks // trainer["pp"]
    if stage % trainer["ep"]:
        raise ConfigError(
            f"topology.trainer.ep={trainer['ep']} does not divide the {stage} ranks of a stage (tp x dp = "
            f"{trainer['tp']} x {trainer['dp']}); lower it, or raise topology.trainer.dp"
        )
    if ranks % nodes:
        raise ConfigError(f"{NODES}={nodes} does not divide the trainer's {ranks} ranks")
    put(tree, GPUS, ranks // nodes)
    if tree["kernels"]["num_leaves"] is None:
        tree["kernels"]["num_leaves"] = max(trainer["tp"], engine["tp"])
