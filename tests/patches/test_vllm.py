"""Each vLLM patch has a test here that fails without it, on the stock CPU engine with a tiny random model."""

import gc
import os
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

BUDGET = 16
"""Tokens a step may compute: prompts longer than this are prefilled in parts."""


@pytest.fixture(scope="module")
def host() -> Iterator[None]:
    """This process as the host of a CPU engine, and as it was before afterwards."""
    environment = dict(os.environ)
    replaced = [(torch, "set_num_threads"), (torch.accelerator, "synchronize"), (torch.accelerator, "empty_cache")]
    originals = [getattr(owner, name) for owner, name in replaced]
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", TORCHDYNAMO_DISABLE="1", VLLM_CPU_KVCACHE_SPACE="1")
    yield
    from vllm.distributed import cleanup_dist_env_and_memory

    gc.collect()
    cleanup_dist_env_and_memory()
    for (owner, name), original in zip(replaced, originals, strict=True):
        setattr(owner, name, original)  # a CPU worker of vLLM replaces them
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture(scope="module")
def engine(host: None, tmp_path_factory: pytest.TempPathFactory):
    """A stock in-process engine: 2 layers, 64 tokens of vocabulary, blocks of 16 tokens."""
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from vllm import LLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )
    path = tmp_path_factory.mktemp("tiny")
    Qwen3ForCausalLM(config).save_pretrained(path)
    yield LLM(
        str(path),
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        block_size=16,
        max_model_len=128,
        max_num_batched_tokens=BUDGET,
        max_num_seqs=8,
        logprobs_mode="processed_logprobs",
    )


def sample(engine, prompts: list[list[int]], **rows: object) -> list[list[int]]:
    """Sampled token ids; a list among `rows` gives one value per prompt, anything else is shared."""
    from vllm import SamplingParams

    params = [
        SamplingParams(
            max_tokens=12, ignore_eos=True, **{k: v[i] if isinstance(v, list) else v for k, v in rows.items()}
        )
        for i in range(len(prompts))
    ]
    requests = [{"prompt_token_ids": p} for p in prompts]
    return [list(out.outputs[0].token_ids) for out in engine.generate(requests, params, use_tqdm=False)]


def test_every_logprob_goes_through_the_override(engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampled (random and greedy) and prompt log-probabilities are what the override returns; without one, torch's."""
    from vllm import SamplingParams
    from vllm.v1.sample.ops import logprobs

    logits = torch.randn(3, 64)
    assert torch.equal(logprobs.log_softmax(logits), logits.log_softmax(-1))
    monkeypatch.setattr(logprobs, "log_softmax_override", lambda rows: torch.full_like(rows, -7.0))
    for temperature in (0.0, 0.7):
        params = SamplingParams(temperature=temperature, max_tokens=3, logprobs=2, prompt_logprobs=1, ignore_eos=True)
        (out,) = engine.generate({"prompt_token_ids": [1, 2, 3]}, params, use_tqdm=False)
        sampled = [entry.logprob for step in out.outputs[0].logprobs for entry in step.values()]
        prompt = [entry.logprob for step in out.prompt_logprobs[1:] for entry in step.values()]
        assert len(sampled) >= 6 and set(sampled) == {-7.0}
        assert len(prompt) >= 2 and set(prompt) == {-7.0}


def test_the_second_runner_asks_for_token_logprobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its one function for log-probabilities, of sampled and of prompt tokens, returns what the override does."""
    from vllm.v1.sample.ops import logprobs
    from vllm.v1.worker.gpu.sample import logprob, prompt_logprob, sampler

    asked = []
    monkeypatch.setattr(logprobs, "token_logprobs_override", lambda *given: asked.append(given) or torch.zeros(3, 2))
    logits, ids = torch.randn(3, 64), torch.tensor([[1, 2], [3, 4], [5, 6]], dtype=torch.int32)
    assert not logprob.compute_token_logprobs(logits, ids).any()
    ((rows, chosen),) = asked
    assert rows is logits and chosen.dtype == torch.int64 and torch.equal(chosen, ids.long())
    assert sampler.compute_topk_logprobs is prompt_logprob.compute_topk_logprobs is logprob.compute_topk_logprobs


def test_a_seed_holds_beside_unseeded_rows(engine) -> None:
    """A seeded request samples the same tokens alone and beside unseeded requests, each of which keeps its freedom."""
    prompt = [5, 6, 7]
    (alone,) = sample(engine, [prompt], seed=[11])
    mixed = [sample(engine, [prompt] * 4, seed=[None, 11, None, 12]) for _ in range(2)]
    assert mixed[0][1] == mixed[1][1] == alone
    assert mixed[0][3] == mixed[1][3] != alone
    assert mixed[0][0] != mixed[1][0]


def test_a_seeded_prompt_longer_than_the_budget(engine) -> None:
    """A prompt prefilled in parts neither ends the engine nor spends draws: its tokens are those of one part."""
    prompt = [3 + i % 50 for i in range(4 * BUDGET)]
    engine.reset_prefix_cache()
    in_parts = sample(engine, [prompt, prompt[::-1]], seed=[21, 22])
    (cached,) = sample(engine, [prompt], seed=[21])
    assert in_parts[0] == cached
    assert in_parts[1] != cached


def test_state_pages_are_copied() -> None:
    """What mamba cache mode `align` calls to copy a state page copies bytes on the CPU."""
    from vllm.v1.worker import mamba_utils
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    CPUModelRunner._postprocess_triton(CPUModelRunner.__new__(CPUModelRunner))
    source, target = torch.randn(2, 300), torch.full((2, 300), torch.nan)
    pointers = [torch.tensor([row.data_ptr() for row in pages]) for pages in (source, target)]
    mamba_utils.batch_memcpy(*pointers, torch.tensor([1200, 40]))
    assert torch.equal(target[0], source[0]) and torch.equal(target[1, :10], source[1, :10])
    assert target[1, 10:].isnan().all()
