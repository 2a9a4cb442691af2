"""Latent attention in whole engines, whose pages hold one key a position for all heads and are full of NaN when they
start: every log-probability has the bits of the plain decoder's packed forward.

The model has experts too, which a biased router chooses: one wrong bit before it would send a token elsewhere.
"""

import random

import pytest

torch = pytest.importorskip("torch")

VOCABULARY, TOKENS, PAGE = 128, 10, 16
CUTS = [("float32", budget) for budget in (7, 48, 64, 65)] + [("bfloat16", 48)]
LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 100, 120)
SHARED = 64
"""First tokens that all prompts of at least as many have in common."""


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Around the ends of pages, which here are softmax blocks, and of steps."""
    source = random.Random(13)
    made = [[source.randrange(VOCABULARY) for _ in range(length)] for length in LENGTHS]
    return [made[-1][:SHARED] + p[SHARED:] if len(p) >= SHARED else p for p in made]


@pytest.fixture
def launch(start, checkpoint, latent):
    """launch(dtype, **engine arguments) -> (engine, its checkpoint)."""

    def make(dtype: str, **arguments: object):
        folder = checkpoint(dtype, **latent)
        sizes = {"max_logprobs": VOCABULARY} | arguments
        sizes["max_num_seqs"] = min(8, sizes.get("max_num_batched_tokens", 8))
        engine = start(folder, dtype, family="glm4_moe_lite", **sizes)
        assert engine.apply_model(spoil) == [3]
        return engine, folder

    return make


def spoil(model) -> int:
    """Fills the pages of all layers with NaN; how many layers there are."""
    for layer in model.pages:
        assert layer.kv_cache.shape[1:] == (PAGE, 16 + 8) and layer.kv_cache.is_contiguous()
        layer.kv_cache.fill_(float("nan"))
    return len(model.pages)


@pytest.mark.parametrize(("dtype", "budget"), CUTS)
def test_cut_batched_and_cached(launch, reference, prompts, generate, compare, dtype: str, budget: int) -> None:
    """Whole rows, wherever steps cut a prompt; then from cached pages, also where a prompt is longer by one token."""
    engine, folder = launch(dtype, max_num_batched_tokens=budget)
    scheduler = engine.llm_engine.vllm_config.scheduler_config
    assert scheduler.enable_chunked_prefill and scheduler.max_num_batched_tokens == budget < max(LENGTHS)
    for _ in range(2):
        outputs = generate(engine, prompts, logprobs=VOCABULARY, max_tokens=TOKENS)
        assert compare(reference(folder), prompts, outputs) == (0, VOCABULARY * TOKENS * len(prompts))
        cached = [output.num_cached_tokens for output in outputs]
    assert cached == [(length - 1) // PAGE * PAGE for length in LENGTHS]


def test_prompts(launch, reference, prompts, generate, compare) -> None:
    """Log-probabilities of prompt tokens, for which nothing cached is used."""
    engine, folder = launch("float32", max_num_batched_tokens=50)
    outputs = generate(engine, prompts, prompt_logprobs=2, max_tokens=2)
    mismatched, compared = compare(reference(folder), prompts, outputs)
    assert mismatched == 0 and compared > 2 * (sum(LENGTHS) - len(LENGTHS))


def test_preempted(launch, reference, prompts, generate, compare, counter) -> None:
    """Requests lose their pages, which others write, and go on as they do alone."""
    engine, folder = launch("float32", num_gpu_blocks_override=20, max_num_batched_tokens=65)
    seeds = list(range(len(prompts)))
    outputs = generate(engine, prompts, seeds, max_tokens=55)
    assert counter(engine, "vllm:num_preemptions") > 0
    assert compare(reference(folder), prompts, outputs) == (0, 55 * len(prompts))


def flip(engine) -> int:
    """The last bit of every number of one position of every cached page, in the first layer; how many pages."""
    pool = engine.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    pages = [block.block_id for block in pool.blocks if block.block_hash is not None]
    (cache,) = engine.apply_model(lambda model: model.pages[0].kv_cache)
    for page in pages:
        cache[page, 3].view(torch.int32).bitwise_xor_(1)
    return len(pages)


def test_cached_keys_are_read(launch, reference, prompts, generate, compare) -> None:
    """The comparison can fail: one bit of what is cached is seen, and in rows that start from a page alone."""
    engine, folder = launch("float32")
    generate(engine, prompts, max_tokens=1)
    whole = [length // PAGE for length in LENGTHS]
    common = SHARED // PAGE * (sum(length >= SHARED for length in LENGTHS) - 1)
    assert flip(engine) == sum(whole) - common
    outputs = generate(engine, prompts, logprobs=VOCABULARY, max_tokens=TOKENS)
    for prompt, output in zip(prompts, outputs, strict=True):
        mismatched, compared = compare(reference(folder), [prompt], [output])
        assert compared == VOCABULARY * TOKENS and (mismatched > 100) == (output.num_cached_tokens > 0)


BIAS = "model.layers.2.mlp.gate.e_score_correction_bias"


def test_a_bias_of_the_router_is_a_weight(launch, checkpoint, latent, reference, prompts, generate, compare) -> None:
    """An update of all tensors, then one of fp32 biases of a bfloat16 model alone, which sends tokens elsewhere."""
    from skyrl_isoexec.model.checkpoint import iter_tensors

    engine, old = launch("bfloat16")
    new = checkpoint("bfloat16", seed=1, **latent)
    engine.collective_rpc("reload_weights", kwargs={"weights_path": str(new)})
    engine.reset_prefix_cache()
    outputs = generate(engine, prompts, max_tokens=TOKENS)
    assert compare(reference(new), prompts, outputs) == (0, TOKENS * len(prompts))
    assert compare(reference(old), prompts, outputs)[0] > 10
    tensors, other = dict(iter_tensors(new)), dict(iter_tensors(old))[BIAS]
    assert other.dtype == torch.float32 and not torch.equal(other, other.bfloat16().float())
    assert not torch.equal(tensors[BIAS], other)
    engine.apply_model(lambda model: model.load_weights((tensors | {BIAS: other}).items()))
    engine.reset_prefix_cache()
    assert compare(reference(new), prompts, generate(engine, prompts, max_tokens=TOKENS))[0] > 10


def test_pages_as_said(start, checkpoint, latent) -> None:
    """Bytes of a page and pages of a sequence, read back from an engine with just enough of them; with one less it does
    not start. They are the same for every degree: each rank holds all keys."""
    from skyrl_isoexec.model.checkpoint import read_config
    from skyrl_isoexec.model.families import from_hf
    from skyrl_isoexec.runtimes.vllm.pages import page_bytes, pages_of_sequence

    folder = checkpoint("bfloat16", **latent)
    made = from_hf(read_config(folder))
    needed = pages_of_sequence(made, PAGE, 256, True)
    assert page_bytes(made, 1, PAGE) == page_bytes(made, 2, PAGE) == 3 * PAGE * (16 + 8) * 2
    sizes = {"family": "glm4_moe_lite", "num_gpu_blocks_override": needed}
    engine = start(folder, "bfloat16", **sizes)
    (cache,) = engine.collective_rpc(lambda worker: worker.model_runner.kv_cache_config)
    (group,) = cache.kv_cache_groups
    assert type(group.kv_cache_spec).__name__ == "MLAAttentionSpec" and len(group.layer_names) == 3
    assert sum(tensor.size for tensor in cache.kv_cache_tensors) == needed * page_bytes(made, 1, PAGE)
    del engine
    with pytest.raises(Exception, match="KV cache is needed, which is larger than the available"):
        start(folder, "bfloat16", **sizes | {"num_gpu_blocks_override": needed - 1})


def test_vllms_own_latents_are_off(start, checkpoint, latent, monkeypatch) -> None:
    """With them vLLM would cut no prompt on a CPU; it has read the variable long ago, so the test says what it said."""
    from vllm.config import ModelConfig

    folder = checkpoint("float32", **latent)
    monkeypatch.setattr(ModelConfig, "use_mla", True)
    with pytest.raises(Exception, match="VLLM_MLA_DISABLE = '0' is not supported; supported: 1: vLLM turns chunked"):
        start(folder, "float32", family="glm4_moe_lite")
