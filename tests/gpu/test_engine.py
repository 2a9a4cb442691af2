"""Hazards 1, 5, 7 and 10 with whole engines: CUDA graphs, prefix caching and chunked prefill on, against the decoder
alone.

One engine of each model, in this process. Its prompts are so long, and its steps so small, that decode rows share steps
with prefill chunks of every length; pure decode steps are replayed graphs.
"""

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl_isoexec.schedule import Schedule
from skyrl_isoexec.schedule.bits import count_mismatches

pytest.importorskip("vllm")

SCHEDULE = Schedule(num_leaves=1, kv_block=64, kv_partition=128)
VOCABULARY, LONGEST, STEP = 512, 1024, 160
HF = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": LONGEST,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "hidden_act": "silu",
    "dtype": "bfloat16",
}
HYBRID = HF | {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {
        "rope_theta": 10000.0,
        "rope_type": "default",
        "partial_rotary_factor": 0.25,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    },
}
LATENT = {name: value for name, value in HF.items() if name != "head_dim"} | {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "model_type": "glm4_moe_lite",
    "num_hidden_layers": 3,
    "num_key_value_heads": 8,
    "q_lora_rank": 96,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "n_routed_experts": 16,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 128,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.8,
    "tie_word_embeddings": False,
}
MODELS = {"qwen3": HF, "qwen3_5": HYBRID, "glm4_moe_lite": LATENT}
RUNS = (("qwen3", 1), ("qwen3", 2), ("qwen3_5", 1), ("glm4_moe_lite", 1), ("glm4_moe_lite", 2))
"""Families, and vLLM's model runner."""
PAGES = {"qwen3": 150, "qwen3_5": 48, "glm4_moe_lite": 150}
"""Too few for `PRESSED` long sequences."""
PRESSED = 24
CHANGED = ("model.layers.0.mlp.gate_proj.weight", "model.layers.0.input_layernorm.weight")


@pytest.fixture(scope="module", params=RUNS, ids=lambda run: f"{run[0]}-runner-{run[1]}")
def run(request: pytest.FixtureRequest) -> tuple[str, int]:
    return request.param


@pytest.fixture(scope="module")
def family(run: tuple[str, int]) -> str:
    return run[0]


@pytest.fixture(scope="module")
def pages(family: str) -> Any:
    """Pages of a model with states; None for another."""
    from skyrl_isoexec.model.families import from_hf
    from skyrl_isoexec.runtimes.vllm.pages import hybrid_page_size, state_kernels
    from skyrl_isoexec.runtimes.vllm.settings import HybridPages

    config = from_hf(MODELS[family])
    if not config.hybrid:
        return None
    return HybridPages(page_size=hybrid_page_size(config, 1, state_kernels("kernel", SCHEDULE)), prefix_caching=True)


@pytest.fixture(scope="module")
def page_size(pages: Any) -> int:
    """Tokens of a page, in whose steps cached beginnings are found."""
    return 64 if pages is None else pages.page_size


@pytest.fixture(scope="module")
def folders(family: str, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two checkpoints that differ in one projection and one norm."""
    from skyrl_isoexec.model.checkpoint import random_tensors, save
    from skyrl_isoexec.model.families import from_hf

    base, fields = tmp_path_factory.mktemp("checkpoints"), MODELS[family]
    first = dict(random_tensors(from_hf(fields), 0, std=0.1))
    other = dict(random_tensors(from_hf(fields), 1, std=0.1))
    for name in (name for name in first if name.endswith(".A_log")):
        first[name] -= 7  # by a token a state loses parts in a thousand, and still matters pages later
    second = first | {CHANGED[0]: other[CHANGED[0]], CHANGED[1]: first[CHANGED[1]] * 1.25}
    for name, tensors in (("first", first), ("second", second)):
        save(base / name, fields, tensors)
    return [base / "first", base / "second"]


@pytest.fixture(scope="module")
def engine(run: tuple[str, int], pages: Any, page_size: int, folders: list[Path]) -> Iterator[Any]:
    from skyrl_isoexec.runtimes.vllm.settings import EngineSettings, cuda_environment

    before, (family, runner) = dict(os.environ), run
    os.environ.update(cuda_environment(runner=runner), VLLM_ENABLE_V1_MULTIPROCESSING="0", TORCHDYNAMO_DISABLE="1")
    from vllm import LLM

    settings = EngineSettings(family=family, kernels="kernel", schedule=SCHEDULE)
    arguments = {"block_size": page_size} | settings.engine_arguments(dtype="bfloat16", device="cuda", hybrid=pages)
    yield LLM(
        str(folders[0]),
        **arguments,
        skip_tokenizer_init=True,
        num_gpu_blocks_override=PAGES[family],
        max_model_len=LONGEST,
        max_num_seqs=32,
        max_num_batched_tokens=STEP,
        kv_cache_memory_bytes=2**28,
        gpu_memory_utilization=0.2,
        enable_prefix_caching=True,
        disable_log_stats=False,
        logprobs_mode="processed_logprobs",
        seed=0,
    )
    os.environ.clear()
    os.environ.update(before)


class Reference:
    """The decoder alone, packed rows, no cache."""

    def __init__(self, family: str, folder: Path) -> None:
        from skyrl_isoexec.kernels.bundle import load_kernels
        from skyrl_isoexec.model.axes import SingleAxis
        from skyrl_isoexec.model.checkpoint import iter_tensors, load
        from skyrl_isoexec.model.decoder import Decoder
        from skyrl_isoexec.model.families import from_hf

        config = from_hf(MODELS[family])
        self.kernels = load_kernels(dict.fromkeys(config.operators, "kernel"), SCHEDULE)
        self.decoder = Decoder(config, self.kernels, SingleAxis(), SCHEDULE, device="cuda").requires_grad_(False)
        load(self.decoder, iter_tensors(folder))

    @torch.no_grad()
    def logprobs(self, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
        """fp32 [len(ids), vocabulary]."""
        bounds = torch.tensor([0, len(ids)], dtype=torch.int32, device="cuda")
        x_TH = self.decoder.layers(
            self.decoder.embed(torch.tensor(ids, device="cuda")),
            torch.arange(len(ids), device="cuda"),
            self.decoder.end_to_end(bounds),
        )
        return self.kernels.logprobs(self.decoder.full_logits(x_TH), temperature).cpu()


@pytest.fixture(scope="module")
def references(family: str, folders: list[Path]) -> list[Reference]:
    return [Reference(family, folder) for folder in folders]


def prompt(length: int, seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(VOCABULARY) for _ in range(length)]


def generate(engine: Any, prompts: list[list[int]], tokens: int = 24, **others: Any) -> list[Any]:
    from vllm import SamplingParams

    chosen = {"temperature": 1.0, "logprobs": 4} | others
    wanted = SamplingParams(max_tokens=tokens, seed=3, ignore_eos=True, detokenize=False, **chosen)
    return engine.generate([{"prompt_token_ids": ids} for ids in prompts], wanted, use_tqdm=False)


def mismatched(reference: Reference, outputs: list[Any], temperature: float = 1.0) -> tuple[int, int]:
    """(differing, compared) over the sampled tokens and the likeliest that came beside them."""
    got, want = [], []
    for output in outputs:
        start, answer = list(output.prompt_token_ids), output.outputs[0]
        rows = reference.logprobs(start + list(answer.token_ids), temperature)
        for step, entries in enumerate(answer.logprobs):
            got += [entry.logprob for entry in entries.values()]
            want += [rows[len(start) + step - 1, token].item() for token in entries]
    return count_mismatches(torch.tensor(got), torch.tensor(want))


def addresses(model: Any) -> dict[str, int]:
    """Where a graph reads what it was captured with."""
    weights = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    return weights | {"rotary table": model.cos_sin_PR.data_ptr()}


def counter(engine: Any, name: str) -> float:
    """A counter of the engine's so far."""
    return sum(metric.value for metric in engine.get_metrics() if metric.name == name)


def replays(engine: Any) -> int:
    return engine.collective_rpc("isoexec_replays")[0]


NEIGHBOURS = {
    "one token": [1],
    "nine": [9],
    "ten": [10],
    "129": [129],
    "longer than steps": [900],
    "a mixture": [1, 9, 10, 129, 700],
    "many of one token": [1] * 30,
}


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_neighbours_do_not_move_a_row(name: str, engine: Any, references: list[Reference]) -> None:
    """Hazard 1: 300 tokens of context beside neighbours of any query length, in mixed steps and in replayed graphs."""
    anchor = prompt(300, 1)
    before = replays(engine)
    outputs = generate(engine, [anchor, *(prompt(n, 50 + i) for i, n in enumerate(NEIGHBOURS[name]))])
    wrong, compared = mismatched(references[0], outputs)
    assert compared >= 24 * len(outputs) and wrong == 0
    assert replays(engine) > before, "no graph was replayed"
    alone = generate(engine, [anchor])[0].outputs[0]
    assert list(alone.token_ids) == list(outputs[0].outputs[0].token_ids)


def test_every_number_of_sequences_pads_alike(engine: Any, references: list[Reference]) -> None:
    """A graph is padded to its size: 1 to 32 sequences, also between two sizes."""
    for count in (1, 2, 3, 5, 8, 13, 17, 31, 32):
        wrong, _ = mismatched(
            references[0], generate(engine, [prompt(20 + i, 100 + i) for i in range(count)], tokens=6)
        )
        assert wrong == 0, f"{count} sequences"


@pytest.mark.parametrize("logprobs", [0, 4])
def test_a_temperature_is_divided_by_exactly(logprobs: int, engine: Any, references: list[Reference]) -> None:
    """Log-probabilities of sampled tokens alone and of others beside them, at a temperature that is no power of two."""
    outputs = generate(engine, [prompt(20 + i, 300 + i) for i in range(9)], temperature=0.7, logprobs=logprobs)
    wrong, compared = mismatched(references[0], outputs, 0.7)
    assert compared >= 9 * 24 * (1 + (logprobs > 0)) and wrong == 0
    assert mismatched(references[0], outputs)[0] > 0, "the temperature changed nothing that shows"


def test_a_common_beginning_is_found(engine: Any, page_size: int, references: list[Reference]) -> None:
    """Hazard 7, first half: a hit on a cached block changes nothing."""
    common = prompt(page_size, 7)
    outputs = generate(engine, [common + prompt(9, 8)]) + generate(engine, [common + prompt(30, 9)])
    assert [output.num_cached_tokens for output in outputs] == [0, page_size]
    assert mismatched(references[0], outputs)[0] == 0


def test_preempted_requests_go_on_alike(engine: Any, references: list[Reference]) -> None:
    """Requests lose their pages to others, and are computed again."""
    before = counter(engine, "vllm:num_preemptions")
    outputs = generate(engine, [prompt(500 + 9 * i, 200 + i) for i in range(PRESSED)], tokens=160)
    assert counter(engine, "vllm:num_preemptions") > before
    wrong, compared = mismatched(references[0], outputs)
    assert compared >= 160 * PRESSED and wrong == 0


def test_graphs_survive_weight_syncs(
    engine: Any, page_size: int, folders: list[Path], references: list[Reference]
) -> None:
    """Hazards 5 and 7: two syncs under captured graphs; addresses stay, results follow, and old pages are not used."""
    asked = [prompt(page_size, 7) + prompt(9, 8), prompt(page_size, 7) + prompt(30, 9)]
    (before,) = engine.apply_model(addresses)
    for index in (1, 0, 1):
        engine.collective_rpc("reload_weights", kwargs={"weights_path": str(folders[index])})
        assert engine.reset_prefix_cache()
        (after,) = engine.apply_model(addresses)
        assert after == before, "a graph reads at addresses that are no longer those of the weights"
        steps = replays(engine)
        outputs = generate(engine, asked)
        assert mismatched(references[index], outputs)[0] == 0
        assert mismatched(references[1 - index], outputs)[0] > 0, "the sync changed nothing that shows"
        assert replays(engine) > steps
    served = engine.collective_rpc("isoexec_served")[0]
    assert {name.rsplit(".", 1)[1] for name in served} == {"engine_prefill", "engine_decode"}
