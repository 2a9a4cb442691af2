"""What a run is, as frozen data: the schema of every group in `configs/` that is not SkyRL's own.

YAML only chooses values: every field below has to come from a file of its group or from the command line, there are no
defaults here. SkyRL's keys (`trainer`, `generator`, `data`, `environment`) keep SkyRL's schema and are not repeated,
except where the name here decides several of them at once; `links.py` keeps such pairs equal.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from skyrl_isoexec.schedule.schedule import Schedule

Dtype = Literal["float32", "bfloat16"]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _is_power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


@dataclass(frozen=True, kw_only=True)
class ExecConfig:
    """Which stack executes the policy, on both sides."""

    name: Literal["isoexec", "native"]
    """`isoexec`: the unified model on both sides. `native`: transformers in the trainer, vLLM's class in the engine."""


@dataclass(frozen=True, kw_only=True)
class ShapeConfig:
    """The shape of a tiny model that is built here, in the words of its Hugging Face configuration."""

    family: Literal["qwen3", "qwen3_5_text", "qwen3_moe", "qwen3_5_moe_text", "glm4_moe_lite"]
    """Hugging Face `model_type`."""
    hidden_size: int
    """Width of the residual stream."""
    intermediate_size: int | None
    """Width of the MLP; null where a family has only mixtures of experts."""
    num_layers: int
    """Decoder layers."""
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key and value heads; divides `num_heads`."""
    head_dim: int | None
    """Width of one head; even, for rotary embeddings. Null where a family has several, which `more` says."""
    max_position: int
    """Longest sequence in tokens."""
    rope_theta: float
    """Base of the rotary frequencies."""
    rms_norm_eps: float
    """Added to the mean square in every norm."""
    tied_head: bool
    """Whether the head uses the embedding's weight."""
    more: dict[str, Any]
    """What else the family's Hugging Face configuration has, by its own names."""

    def fields(self, vocab_size: int) -> dict[str, Any]:
        """The Hugging Face configuration of the model. ValueError for a field that `more` has a second time."""
        rope = {"rope_type": "default", "rope_theta": self.rope_theta}
        optional = {"intermediate_size": self.intermediate_size, "head_dim": self.head_dim}
        own = {name: width for name, width in optional.items() if width is not None} | {
            "model_type": self.family,
            "vocab_size": vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "max_position_embeddings": self.max_position,
            "rms_norm_eps": self.rms_norm_eps,
            "tie_word_embeddings": self.tied_head,
        }
        for name in sorted(own.keys() & self.more.keys()):
            raise ValueError(f"more.{name}={self.more[name]!r} beside {own[name]!r} of the shape; leave it out")
        return own | self.more | {"rope_parameters": rope | self.more.get("rope_parameters", {})}

    def __post_init__(self) -> None:
        sizes = ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "max_position")
        for name in (*sizes, "intermediate_size", "head_dim"):
            size = getattr(self, name)
            _require(size is None or size > 0, f"model.shape.{name} {size} is not positive")
        _require(
            self.num_heads % self.num_kv_heads == 0,
            f"model.shape.num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}",
        )
        _require(self.head_dim is None or self.head_dim % 2 == 0, f"model.shape.head_dim {self.head_dim} is odd")
        for name in ("rope_theta", "rms_norm_eps"):
            _require(getattr(self, name) > 0, f"model.shape.{name} {getattr(self, name)} is not positive")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The policy's checkpoint and number format."""

    path: str | None
    """Folder of a Hugging Face checkpoint, or null to train the tiny one of `shape` once and cache it."""
    dtype: Dtype
    """Number format of weights, activations and KV cache on both sides."""
    shape: ShapeConfig | None
    """The tiny model's shape; null, or not looked at, where `path` names a checkpoint."""

    def __post_init__(self) -> None:
        _require(
            self.path is not None or self.shape is not None,
            "model.path is null and model.shape is null: name a checkpoint folder with model.path=FOLDER",
        )


@dataclass(frozen=True, kw_only=True)
class KernelsConfig:
    """Which implementations compute, and in which order they add."""

    impl: Literal["cpu", "reference", "kernel"]
    """Name of the implementations, one per op; `kernel` are those of a GPU."""
    num_leaves: int | None
    """Leaves of the reduction trees, a power of two; null takes the largest tensor-parallel degree of either side."""
    kv_block: int
    """Positions in one block of the softmax."""
    kv_partition: int
    """Positions in one partition of the KV cache; a multiple of `kv_block`."""
    gdn: Literal["row_causal", "cpr"]
    """Form of a gated delta rule, in a model that has one."""
    gdn_chunk: int
    """Rows in one chunk of it, a power of two of at least 16."""

    def __post_init__(self) -> None:
        if self.num_leaves is not None:
            _require(_is_power_of_two(self.num_leaves), f"kernels.num_leaves {self.num_leaves} is not a power of two")
        _require(self.kv_block > 0, f"kernels.kv_block {self.kv_block} is not positive")
        _require(
            self.kv_partition > 0 and self.kv_partition % self.kv_block == 0,
            f"kernels.kv_partition {self.kv_partition} is not a multiple of kernels.kv_block {self.kv_block}",
        )
        _require(
            _is_power_of_two(self.gdn_chunk) and 16 <= self.gdn_chunk <= 2**10,
            f"kernels.gdn_chunk {self.gdn_chunk} is not a power of two from 16 to 1024",
        )
        _require(self.kv_partition <= 2**20, f"kernels.kv_partition {self.kv_partition} is above {2**20}")


@dataclass(frozen=True, kw_only=True)
class TrainerTopology:
    """Parallel degrees of the trainer; tp x pp x dp is its number of ranks."""

    tp: int
    """Tensor parallel."""
    pp: int
    """Pipeline parallel."""
    ep: int
    """Expert parallel: in so many parts are experts cut, over tensor ranks and data-parallel replicas of a stage."""
    dp: int | None
    """Data parallel; null takes what ep and a colocated engine imply, else 1."""

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "ep", "dp"):
            value = getattr(self, name)
            _require(value is None or value > 0, f"topology.trainer.{name} {value} is not positive")
        _require(_is_power_of_two(self.tp), f"topology.trainer.tp {self.tp} is not a power of two")


@dataclass(frozen=True, kw_only=True)
class EngineTopology:
    """Parallel degrees of the rollout engine."""

    tp: int
    """Tensor parallel, of each engine."""
    num: int | None
    """Engines; null takes what a colocated trainer implies, else 1."""

    def __post_init__(self) -> None:
        _require(_is_power_of_two(self.tp), f"topology.engine.tp {self.tp} is not a power of two")
        _require(self.num is None or self.num > 0, f"topology.engine.num {self.num} is not positive")


@dataclass(frozen=True, kw_only=True)
class TopologyConfig:
    """Where trainer and engine run, and in how many parts. The two sides need not have the same degrees."""

    colocate: bool
    """Whether trainer and engine share the same devices and take turns."""
    trainer: TrainerTopology
    engine: EngineTopology


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """What the processes of both runtimes are given."""

    device: Literal["cpu", "cuda"]
    """Where both runtimes compute."""
    transport: Literal["gloo", "device"]
    """How weights go from trainer to engine: over gloo by way of the host's memory, or SkyRL's own way between devices
    (CUDA IPC where both share one, NCCL where not)."""
    threads: int
    """Threads of one process's arithmetic on the CPU."""
    page_size: int
    """Tokens in one page of the engine's KV cache; a multiple of `kernels.kv_block`."""
    kv_cache_mib: int
    """Memory of one engine worker's KV cache."""
    object_store_mib: int
    """Memory of Ray's object store."""
    runner: int
    """vLLM's model runner of our model's engine on a GPU, 1 or 2; a CPU has the first, and so have recurrent layers."""

    def __post_init__(self) -> None:
        for name in ("threads", "page_size", "kv_cache_mib", "object_store_mib"):
            _require(getattr(self, name) > 0, f"runtime.{name} {getattr(self, name)} is not positive")
        _require(
            self.runner in (1, 2), f"runtime.runner={self.runner} is none of vLLM's model runners; set it to 1 or 2"
        )
        _require(
            self.device == "cuda" or self.runner == 1,
            f"runtime.runner={self.runner} needs runtime.device=cuda; leave it out, or choose runtime=cuda",
        )
        _require(
            self.device == "cuda" or self.transport == "gloo",
            f"runtime.transport={self.transport} needs runtime.device=cuda; set runtime.transport=gloo, or choose "
            "runtime=cuda",
        )


MOST_STEPS = 100_000
"""Of a base checkpoint, which takes a few hundred."""


@dataclass(frozen=True, kw_only=True)
class RecipeConfig:
    """How the base checkpoint is trained by supervision. It stops on a step count, so it is the same every time."""

    steps: int
    """Optimizer steps."""
    batch_size: int
    """Problems in one step."""
    lr: float
    """Learning rate after the warm-up, constant: after a fall to zero, reinforcement learning gained half as much."""
    warmup_steps: int
    """Steps over which the learning rate rises linearly."""
    label_smoothing: float
    """Probability spread over all symbols: it leaves the model unsure, which gives sampling room to explore."""
    seed: int
    """Of the initial weights and of the batches."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size"):
            _require(getattr(self, name) > 0, f"task.base.{name} {getattr(self, name)} is not positive")
        _require(self.steps <= MOST_STEPS, f"task.base.steps {self.steps} would take days; {MOST_STEPS} at most")
        _require(0 < self.lr <= 1, f"task.base.lr {self.lr} is not in (0, 1]")
        _require(self.warmup_steps >= 0, f"task.base.warmup_steps {self.warmup_steps} is negative")
        _require(0 <= self.seed < 2**31, f"task.base.seed {self.seed} is not in [0, 2**31)")
        _require(0 <= self.label_smoothing < 1, f"task.base.label_smoothing {self.label_smoothing} is not in [0, 1)")


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """What is learnt."""

    name: Literal["addition", "arithmetic"]
    """The embedded task, in bare characters for the tiny model, or in words for a model with a chat template."""
    digits: int
    """Digits of the larger number of an addition."""
    shots: int
    """Solved additions before every problem, the same ones: a long common beginning."""
    held_out_one_in: int
    """One in so many problems is held out of all training, chosen by a hash."""
    cache_dir: str | None
    """Where base checkpoints are kept; null is the user's cache folder."""
    base: RecipeConfig

    def __post_init__(self) -> None:
        _require(1 <= self.digits <= 3, f"task.digits {self.digits} is not 1, 2 or 3")
        _require(0 <= self.shots <= 512, f"task.shots {self.shots} is not in [0, 512]")
        _require(self.name == "addition" or self.shots == 0, f"task.shots {self.shots}: task.name={self.name} has none")
        _require(self.held_out_one_in > 1, f"task.held_out_one_in {self.held_out_one_in} is not above 1")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What the run is called and how it is repeated."""

    name: str | None
    """Name of the run and of its folder under `runs/`; null makes one of task, model, stack and time."""
    seeded_requests: bool
    """Whether every rollout samples with a seed of its own, so that the same run gives the same rollouts."""

    def __post_init__(self) -> None:
        is_plain = self.name is None or (self.name.isprintable() and not {"/", "\\"} & set(self.name))
        _require(
            is_plain and self.name not in (".", ".."),
            f"run.name {self.name!r} is not one name of a folder; give one without a separator, and "
            "run_dir=FOLDER to say where the run's folder is",
        )


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """One run, resolved: no field that says "decide for me" is left null, except `model.path` and its alternative."""

    exec: ExecConfig
    model: ModelConfig
    kernels: KernelsConfig
    topology: TopologyConfig
    runtime: RuntimeConfig
    task: TaskConfig
    run: RunConfig
    run_dir: Path
    """Absolute path of the run's folder; created by the launcher, not while composing."""

    @property
    def schedule(self) -> Schedule:
        """The order of arithmetic that both sides are given."""
        return Schedule(
            num_leaves=self.kernels.num_leaves or 1,
            kv_block=self.kernels.kv_block,
            kv_partition=self.kernels.kv_partition,
            gdn_chunk=self.kernels.gdn_chunk,
        )

    def __post_init__(self) -> None:
        if self.exec.name == "isoexec":
            device, impl = self.runtime.device, self.kernels.impl
            _require(
                (device == "cuda") == (impl == "kernel"),
                f"kernels.impl={impl} does not compute on runtime.device={device}; choose "
                + ("kernels=sm90" if device == "cuda" else "kernels=cpu, or runtime=cuda"),
            )
        page, block = self.runtime.page_size, self.kernels.kv_block
        _require(
            page % block == 0,
            f"runtime.page_size {page} is not a multiple of kernels.kv_block {block}; set it to one, such as "
            f"{-(-page // block) * block}",
        )
        largest = max(self.topology.trainer.tp, self.topology.engine.tp)
        leaves = self.kernels.num_leaves
        _require(
            leaves is None or leaves >= largest,
            f"kernels.num_leaves {leaves} is below the largest tensor-parallel degree {largest} of topology; set it to "
            f"{largest} or null",
        )
        if self.exec.name == "isoexec":
            _require(
                self.kernels.impl != "kernel" or self.model.dtype == "bfloat16",
                f"model.dtype={self.model.dtype} with kernels.impl=kernel: a GPU has no exact fp32 product; set "
                "model.dtype=bfloat16",
            )
        if self.exec.name == "native":
            for name in ("tp", "pp", "ep"):
                degree = getattr(self.topology.trainer, name)
                _require(
                    degree == 1, f"topology.trainer.{name}={degree} with exec=native: that trainer has 1; set it to 1"
                )
