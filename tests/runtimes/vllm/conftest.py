"""A tiny random Qwen3 or Qwen3.5, real in-process vLLM engines over it, and the plain decoder outside that they must
equal."""

from __future__ import annotations

import gc
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

VOCABULARY = 128
SIZES = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "enable_prefix_caching": True,
    "disable_log_stats": False,
    "block_size": 16,
    "kv_cache_memory_bytes": 16 * 2**20,
    "max_model_len": 256,
    "max_num_batched_tokens": 48,
    "max_num_seqs": 8,
}
HF_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "hidden_act": "silu",
}
HYBRID = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.25, "mrope_section": [3, 3, 2]},
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
"""Changes that make it a Qwen3.5 whose page of states fits into one of keys and values: of 64 tokens in float32, of 128
in bfloat16."""

EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
"""Changes that make it a mixture of experts."""
LATENT = {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "model_type": "glm4_moe_lite",
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.8,
}
"""Changes that make it a GLM-4.7-Flash: latent attention, and experts after a dense layer."""


def write_checkpoint(folder: Path, dtype: str, seed: int, **changes: object) -> Path:
    """A checkpoint of random weights, wide enough apart that distributions are not flat, and states that last."""
    from skyrl_isoexec.model import families
    from skyrl_isoexec.model.checkpoint import random_tensors, save

    hf = HF_CONFIG | {"dtype": dtype} | changes
    tensors = dict(random_tensors(families.from_hf(hf), seed, std=0.2))
    for name in (name for name in tensors if name.endswith(".A_log")):
        tensors[name] -= 7 + seed  # by a token a state loses parts in a thousand, and still matters pages later
    for name in (name for name in tensors if name.endswith(".e_score_correction_bias")):
        tensors[name] += torch.linspace(-0.2, 0.2 + seed, len(tensors[name]))  # other experts than without
    save(folder, hf, tensors)
    return folder


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """checkpoint(dtype, seed=0, **changes of the configuration) -> folder, written once."""
    made: dict[tuple, Path] = {}

    def get(dtype: str, seed: int = 0, **changes: object) -> Path:
        key = (dtype, seed, json.dumps(changes, sort_keys=True))
        if key not in made:
            made[key] = write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "model", dtype, seed, **changes)
        return made[key]

    return get


@pytest.fixture(scope="session")
def experts() -> dict[str, object]:
    """Changes of the checkpoint that make it a mixture of experts; its family is qwen3_moe."""
    return EXPERTS


@pytest.fixture(scope="session")
def of_transformers(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """of_transformers(dtype, seed=0, **changes) -> the checkpoint as transformers writes it: a matrix an expert."""
    from transformers import AutoModelForCausalLM

    made: dict[tuple, Path] = {}

    def get(dtype: str, seed: int = 0, **changes: object) -> Path:
        ours = checkpoint(dtype, seed, **changes)
        if ours not in made:
            made[ours] = tmp_path_factory.mktemp("transformers") / "model"
            model, info = AutoModelForCausalLM.from_pretrained(ours, output_loading_info=True)
            assert not any(info.values()), info
            again = AutoModelForCausalLM.from_config(
                model.config, dtype=model.dtype
            )  # one that was read is saved as read
            again.load_state_dict(model.state_dict())
            again.save_pretrained(made[ours])
        return made[ours]

    return get


@pytest.fixture(scope="session")
def hybrid() -> dict[str, object]:
    """Changes of the checkpoint that make it a hybrid; its family is qwen3_5."""
    return HYBRID


@pytest.fixture(scope="session")
def latent() -> dict[str, object]:
    """Changes of the checkpoint that give it latent attention; its family is glm4_moe_lite."""
    return LATENT


@pytest.fixture(scope="module")
def host() -> Iterator[None]:
    """This process as the host of CPU engines, and as it was before when a file of tests ends."""
    from skyrl_isoexec.runtimes.vllm.settings import CPU_ENVIRONMENT

    environment = dict(os.environ)
    replaced = [(torch, "set_num_threads"), (torch.accelerator, "synchronize"), (torch.accelerator, "empty_cache")]
    originals, dtype = [getattr(owner, name) for owner, name in replaced], torch.get_default_dtype()
    torch.set_num_threads(1)
    os.environ.update(CPU_ENVIRONMENT, VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")
    yield
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.v1.sample.ops import logprobs

    logprobs.log_softmax_override = logprobs.token_logprobs_override = None
    gc.collect()
    cleanup_dist_env_and_memory()
    for (owner, name), original in zip(replaced, originals, strict=True):
        setattr(owner, name, original)  # a CPU worker of vLLM replaces them
    torch.set_default_dtype(dtype)  # vLLM leaves its own behind when an engine does not start
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture
def start(host: None, checkpoint: Callable[..., Path]) -> Iterator[Callable[..., object]]:
    """start(folder, dtype, num_leaves=2, family="qwen3", pages=None, **engine arguments) -> LLM; at most one lives at a
    time. `pages` are of a hybrid."""

    def make(folder: Path, dtype: str, num_leaves: int = 2, family: str = "qwen3", pages=None, **arguments: object):
        from vllm import LLM

        return LLM(str(folder), **engine_arguments(dtype, num_leaves, family, pages) | arguments)

    yield make
    gc.collect()


def settings(num_leaves: int = 2, family: str = "qwen3"):
    """What engine and reference share."""
    from skyrl_isoexec.runtimes.vllm.settings import EngineSettings
    from skyrl_isoexec.schedule import Schedule

    return EngineSettings(family=family, kernels="cpu", schedule=Schedule(num_leaves=num_leaves))


def engine_arguments(dtype: str, num_leaves: int = 2, family: str = "qwen3", pages=None) -> dict[str, object]:
    """Everything a small engine of ours is started with, but the checkpoint."""
    return SIZES | settings(num_leaves, family).engine_arguments(dtype=dtype, hybrid=pages)


@pytest.fixture
def arguments(host: None) -> Callable[..., dict[str, object]]:
    """See `engine_arguments`."""
    return engine_arguments


@pytest.fixture(scope="session")
def contract(checkpoint: Callable[..., Path]) -> Callable[..., object]:
    """contract(dtype, tp=1, num_leaves=2, **changes of the checkpoint) -> a valid Contract for its engine here.

    Digests and versions are this machine's; the gates that it names were not run.
    """
    from skyrl_isoexec import contract as c
    from skyrl_isoexec.kernels.sources import impl_source
    from skyrl_isoexec.model.checkpoint import read_config
    from skyrl_isoexec.model.facts import model_fields, source_digests, version
    from skyrl_isoexec.model.families import from_hf
    from skyrl_isoexec.runtimes.vllm.settings import CPU_ENVIRONMENT

    def gate(op: str) -> str:
        return f"gates/cpu/{op}@{'0' * 16}"

    def make(dtype: str, tp: int = 1, num_leaves: int = 2, **changes: object):
        config = from_hf(read_config(checkpoint(dtype, **changes)))
        constants = {
            "attention": {"kv_block": 16, "kv_partition": 512},
            "gdn": {"gdn_chunk": 64},
            "mla": {"kv_block": 16, "kv_partition": 512},
            "logprob": {"num_leaves": num_leaves, "temperature": c.float_bits(1.0)},
            "row_linear": {"num_leaves": num_leaves},
        }
        impls = {
            op: c.Impl(id=f"{op}.cpu", version=1, arch="cpu", source=impl_source(f"{op}.cpu"))
            for op in config.operators
        }
        impls["decoder"] = c.Impl(id="decoder.torch", version=1, arch="cpu", source=source_digests()["model"])
        axes = {"dp": (1, 2), "tp": (1, 2)}
        return c.seal(
            c.Contract(
                model=c.Model(family=config.family, dtype=dtype, ops=tuple(impls), fields=model_fields(config)),
                composition=tuple(
                    c.Entry(region=(op,), cases=c.CASE_NAMES, impl=impl, constants=constants.get(op, {}), gate=gate(op))
                    for op, impl in impls.items()
                ),
                versions={name: version(name) for name in ("torch", "numba", "vllm")},
                sources=source_digests() | {"patches/vllm": "0" * 64},
                claims=c.Claims(
                    topology=tuple(
                        c.TopologyClaim(axis=axis, kind="invariant", degrees=axes[axis], proof=(gate("decoder"),))
                        if axis in axes
                        else c.TopologyClaim(axis=axis, kind="pinned", degrees=(1,))
                        for axis in c.AXES
                    ),
                    state=tuple(c.StateClaim(state=state, invalidated_by=("weight_sync",)) for state in c.STATES),
                ),
                deployment={
                    "engine": {"tp": tp, "num": 1},
                    "trainer": {"tp": 1, "pp": 1, "dp": 1, "ep": 1},
                    "environment": {**CPU_ENVIRONMENT, "NUMBA_OPT": None},
                },
            )
        )

    return make


class Reference:
    """The decoder outside vLLM: packed rows, no cache, one axis of one rank."""

    def __init__(self, folder: Path, num_leaves: int = 2) -> None:
        from skyrl_isoexec.kernels.bundle import load_kernels
        from skyrl_isoexec.model import families
        from skyrl_isoexec.model.axes import SingleAxis
        from skyrl_isoexec.model.checkpoint import iter_tensors, load, read_config
        from skyrl_isoexec.model.decoder import Decoder

        schedule = settings(num_leaves).schedule
        self.kernels = load_kernels("cpu", schedule)
        config = families.from_hf(read_config(folder))
        self.decoder = Decoder(config, self.kernels, SingleAxis(), schedule).requires_grad_(False)
        load(self.decoder, iter_tensors(folder))

    @torch.no_grad()
    def logprobs(self, ids: list[int], temperature: float = 1.0):
        """fp32 [len(ids), vocabulary]: row t is the distribution after ids[: t + 1]."""
        bounds = torch.tensor([0, len(ids)], dtype=torch.int32)
        x_TH = self.decoder.layers(
            self.decoder.embed(torch.tensor(ids)),
            torch.arange(len(ids)),
            self.decoder.end_to_end(bounds),
        )
        return self.kernels.logprobs(self.decoder.full_logits(x_TH), temperature)


@pytest.fixture(scope="session")
def reference() -> Callable[..., Reference]:
    """reference(folder, num_leaves=2) -> Reference, made once."""
    made: dict[tuple, Reference] = {}

    def get(folder: Path, num_leaves: int = 2) -> Reference:
        return made.setdefault((folder, num_leaves), Reference(folder, num_leaves))

    return get


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Twelve prompts of 1 to 120 tokens; the last four share their first 40."""
    source = random.Random(7)
    lengths = (1, 2, 5, 15, 16, 17, 33, 120, 41, 48, 57, 80)
    made = [[source.randrange(VOCABULARY) for _ in range(n)] for n in lengths]
    return made[:8] + [made[8][:40] + p[40:] for p in made[8:]]


@pytest.fixture(scope="session")
def compare() -> Callable[..., tuple[int, int]]:
    """compare(reference, prompts, outputs, temperature=1.0) -> (mismatches, compared) over every log-probability
    the engine returned: of the sampled tokens, of the top ones beside them, of the prompt where it was asked for."""
    from skyrl_isoexec.schedule.bits import count_mismatches

    def count(expected: Reference, prompts: list[list[int]], outputs: list, temperature: float = 1.0):
        got, want = [], []
        for prompt, output in zip(prompts, outputs, strict=True):
            sampled = output.outputs[0]
            rows = expected.logprobs(prompt + list(sampled.token_ids), temperature)
            for step, entries in enumerate(sampled.logprobs):
                for token, entry in entries.items():
                    got.append(entry.logprob)
                    want.append(rows[len(prompt) + step - 1, token].item())
            if output.prompt_logprobs is not None:
                rows = expected.logprobs(prompt)
                for step, entries in enumerate(output.prompt_logprobs[1:]):
                    for token, entry in entries.items():
                        got.append(entry.logprob)
                        want.append(rows[step, token].item())
        return count_mismatches(torch.tensor(got), torch.tensor(want))

    return count


@pytest.fixture(scope="session")
def generate() -> Callable[..., list]:
    """generate(engine, prompts, seeds=None, **sampling) -> outputs in the order of the prompts."""

    def run(engine, prompts: list[list[int]], seeds: list[int | None] | None = None, **sampling: object) -> list:
        from vllm import SamplingParams

        chosen = {"max_tokens": 32, "logprobs": 0, "ignore_eos": True, "temperature": 1.0} | sampling
        params = [SamplingParams(seed=seed, **chosen) for seed in seeds or [None] * len(prompts)]
        return engine.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)

    return run


@pytest.fixture(scope="session")
def counter() -> Callable[[object, str], int]:
    """counter(engine, name) -> value of one of vLLM's counters."""

    def read(engine, name: str) -> int:
        found = [metric.value for metric in engine.get_metrics() if metric.name == name]
        assert found, f"vLLM has no counter {name}"
        return sum(found)

    return read


@pytest.fixture
def namespace() -> type[SimpleNamespace]:
    """Stands for a configuration object of vLLM."""
    return SimpleNamespace
