"""Settings that have two names, one of ours and one or more of SkyRL's, and values of SkyRL's that follow from ours.

A user may give either name. Both with different values is a contradiction, which is refused naming both; the names that
were not given are filled in, so that afterwards every name of a setting holds the same value.

`given` is what the command line set, as {dotted key: value}. A file of configs/ never decides between two names: ours
holds the value there, and SkyRL's is not written.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from skyrl_isoexec.launch.schema import ConfigError

Tree = dict[str, Any]

MEGATRON = ("trainer.policy.megatron_config", "trainer.ref.megatron_config")
ENGINE = "generator.inference_engine"
ARGUMENTS = f"{ENGINE}.engine_init_kwargs"


@dataclass(frozen=True, kw_only=True)
class Link:
    """One setting under two names."""

    ours: str
    """Our key."""
    theirs: str
    """SkyRL's key."""
    to: Callable[[Any], Any] = lambda value: value
    """Their value, from ours."""
    back: Callable[[Any], Any] = lambda value: value
    """Our value, from theirs."""


LINKS = (
    *(Link(ours="topology.trainer.tp", theirs=f"{side}.tensor_model_parallel_size") for side in MEGATRON),
    *(Link(ours="topology.trainer.pp", theirs=f"{side}.pipeline_model_parallel_size") for side in MEGATRON),
    *(Link(ours="topology.trainer.ep", theirs=f"{side}.expert_model_parallel_size") for side in MEGATRON),
    Link(ours="topology.engine.tp", theirs=f"{ENGINE}.tensor_parallel_size"),
    Link(ours="topology.engine.num", theirs=f"{ENGINE}.num_engines"),
    Link(ours="topology.colocate", theirs="trainer.placement.colocate_all"),
    Link(ours="model.path", theirs="trainer.policy.model.path"),
    Link(
        ours="model.dtype",
        theirs="trainer.bf16",
        to=lambda dtype: dtype == "bfloat16",
        back=lambda bf16: "bfloat16" if bf16 else "float32",
    ),
    Link(
        ours="model.dtype",
        theirs="trainer.policy.megatron_config.optimizer_config_kwargs.bf16",
        to=lambda dtype: dtype == "bfloat16",
        back=lambda bf16: "bfloat16" if bf16 else "float32",
    ),
    Link(ours="model.dtype", theirs="trainer.policy.megatron_config.optimizer_config_kwargs.params_dtype"),
    Link(ours="model.dtype", theirs=f"{ENGINE}.model_dtype"),
    Link(ours="runtime.page_size", theirs=f"{ARGUMENTS}.block_size"),
    Link(ours="run.name", theirs="trainer.run_name"),
)

FIXED: dict[str, Any] = {
    "trainer.strategy": "megatron",
    "trainer.policy.sequence_parallel_size": 1,
    "trainer.policy.model.lora.rank": 0,
    **{f"{side}.context_parallel_size": 1 for side in MEGATRON},
    **{f"{side}.expert_tensor_parallel_size": 1 for side in MEGATRON},
    f"{ENGINE}.backend": "vllm",
    f"{ENGINE}.pipeline_parallel_size": 1,
    f"{ENGINE}.data_parallel_size": 1,
    f"{ENGINE}.expert_parallel_size": 1,
    f"{ENGINE}.run_engines_locally": True,
    f"{ENGINE}.external_proxy_url": None,
    f"{ENGINE}.external_server_urls": None,
    f"{ENGINE}.enable_pd": False,
    f"{ENGINE}.distributed_executor_backend": "mp",
    f"{ENGINE}.speculative_config": None,
    f"{ENGINE}.enable_chunked_prefill": True,
    "generator.batched": False,
    "generator.step_wise_trajectories": False,
    "generator.vision_language_generator": False,
    "trainer.flash_attn": False,
    "trainer.fully_async.enabled": False,
    "trainer.fused_lm_head_logprob": False,
    "trainer.mtp.enabled": False,
    "trainer.policy.inference_only_init": False,
    "trainer.policy.optimizer_config.scheduler": "constant_with_warmup",
}
"""Settings of SkyRL's that have one value here: a layout or a feature that nothing has proven is refused."""

OPTIMIZER = "trainer.policy.optimizer_config"
NAMED: dict[str, str] = {
    f"{ARGUMENTS}.model": "model.path",
    f"{ARGUMENTS}.tokenizer": "model.path",
    f"{ARGUMENTS}.tensor_parallel_size": "topology.engine.tp",
    f"{ARGUMENTS}.seed": "trainer.seed",
    **{
        f"{MEGATRON[0]}.optimizer_config_kwargs.{name}": f"{OPTIMIZER}.{key}"
        for name, key in {
            "lr": "lr",
            "min_lr": "lr",
            "weight_decay": "weight_decay",
            "clip_grad": "max_grad_norm",
            "adam_beta1": "adam_betas",
            "adam_beta2": "adam_betas",
        }.items()
    },
    **{
        f"{ARGUMENTS}.{name}": f"{ENGINE}.{name}"
        for name in (
            "pipeline_parallel_size",
            "data_parallel_size",
            "gpu_memory_utilization",
            "enable_prefix_caching",
            "enable_chunked_prefill",
            "enforce_eager",
            "max_num_batched_tokens",
            "max_num_seqs",
            "served_model_name",
            "speculative_config",
            "distributed_executor_backend",
        )
    },
}
"""Arguments of the hosts that have a key of their own: given bare, they would pass by every check of it."""
TRANSFORMER = (
    "recompute_granularity",
    "recompute_method",
    "recompute_modules",
    "recompute_num_layers",
    "gradient_accumulation_fusion",
)
"""Fields of Megatron's TransformerConfig that are a user's: the others follow from the checkpoint and the topology."""


def get(tree: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """The value at a dotted key, or `default`."""
    node: Any = tree
    for name in key.split("."):
        if not isinstance(node, Mapping) or name not in node:
            return default
        node = node[name]
    return node


def put(tree: Tree, key: str, value: Any) -> None:
    """Set the value at a dotted key, making the levels that are not there."""
    *path, last = key.split(".")
    node = tree
    for name in path:
        if not isinstance(node.get(name), dict):
            node[name] = {}
        node = node[name]
    node[last] = value


def contradiction(first: str, second: str, given: Mapping[str, Any]) -> ConfigError:
    """The refusal of two names of one setting that were given different values."""
    return ConfigError(
        f"{first}={given[first]} and {second}={given[second]} contradict each other: "
        "they are two names of one setting, give one of them"
    )


def adopt(tree: Tree, given: Mapping[str, Any]) -> None:
    """Take our values from SkyRL's names where only those were given; refuse contradictions."""
    source: dict[str, str] = {link.ours: link.ours for link in LINKS if given.get(link.ours) is not None}
    for link in LINKS:
        if given.get(link.theirs) is None:
            continue
        value = link.back(given[link.theirs])
        if link.ours in source and get(tree, link.ours) != value:
            raise contradiction(source[link.ours], link.theirs, given)
        source.setdefault(link.ours, link.theirs)
        put(tree, link.ours, value)
    for key, value in FIXED.items():
        if get(tree, key, value) != value:
            raise ConfigError(f"{key}={get(tree, key)} is not supported here: it has to be {value}")
    for key, value in given.items():
        bare(key, value)


def bare(key: str, value: Any) -> None:
    """Refuse a key, or one below it, that reaches a host past the setting's own name."""
    for argument, own in NAMED.items():
        if f"{key}.".startswith(f"{argument}."):
            raise ConfigError(f"{key}={value}: this setting has a key of its own, set {own} instead")
    for side in MEGATRON:
        prefix = f"{side}.transformer_config_kwargs."
        if key.startswith(prefix) and key.removeprefix(prefix).split(".")[0] not in TRANSFORMER:
            raise ConfigError(
                f"{key}={value}: it follows from the checkpoint and topology, leave it out "
                f"(allowed are {', '.join(TRANSFORMER)})"
            )


def spread(tree: Tree) -> None:
    """Write our values under SkyRL's names, and the values that have to be fixed."""
    for link in LINKS:
        value = get(tree, link.ours)
        if value is not None:
            put(tree, link.theirs, link.to(value))
    for key, value in FIXED.items():
        put(tree, key, value)


def fill(tree: Tree, values: Mapping[str, Any]) -> None:
    """Set those of `values` whose keys have no value yet."""
    for key, value in values.items():
        if get(tree, key) is None:
            put(tree, key, value)
