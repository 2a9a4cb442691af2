"""Hazards 3, 4, 7 and 10 of layers with states, in whole engines whose memory is full of NaN when they start: every
log-probability has the bits of the plain decoder's packed forward.

A page has 64 tokens in float32 and 128 in bfloat16, where it is two chunks.
"""

import hashlib
import random

import pytest

torch = pytest.importorskip("torch")

from skyrl_isoexec.schedule.bits import count_mismatches  # noqa: E402

VOCABULARY, TOKENS = 128, 10
PAGE = {"float32": 64, "bfloat16": 128}
CUTS = [("float32", budget) for budget in (7, 48, 50, 63, 64, 65, 150)] + [("bfloat16", 50), ("bfloat16", 150)]
LENGTHS = (1, 2, 63, 64, 65, 127, 128, 129, 150, 200)
SHARED = 128
"""First tokens that all prompts of at least as many have in common."""


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Around the ends of pages and chunks."""
    source = random.Random(11)
    made = [[source.randrange(VOCABULARY) for _ in range(length)] for length in LENGTHS]
    return [made[-1][:SHARED] + p[SHARED:] if len(p) >= SHARED else p for p in made]


@pytest.fixture
def launch(start, checkpoint, hybrid):
    """launch(dtype, caching=True, changes={}, **engine arguments) -> (engine, its checkpoint)."""
    from skyrl_isoexec.runtimes.vllm.settings import HybridPages

    def make(dtype: str, caching: bool = True, changes: dict | None = None, **arguments: object):
        folder = checkpoint(dtype, **hybrid | (changes or {}))
        pages = HybridPages(page_size=PAGE[dtype], prefix_caching=caching)
        sizes = {"max_logprobs": VOCABULARY, "enable_prefix_caching": caching} | arguments
        sizes["max_num_seqs"] = min(8, sizes.get("max_num_batched_tokens", 8))
        engine = start(folder, dtype, family="qwen3_5", pages=pages, **sizes)
        assert engine.apply_model(spoil)[0] == 4
        return engine, folder

    return make


def spoil(model) -> int:
    """Fills the pages of all layers with NaN; how many layers there are."""
    for layer in model.pages:
        caches = [layer.kv_cache] if isinstance(layer.kv_cache, torch.Tensor) else layer.kv_cache
        for cache in caches:
            memory = torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage())
            memory.fill_(255)
            assert cache.isnan().all()
    return len(model.pages)


@pytest.mark.parametrize(("dtype", "budget"), CUTS)
def test_cut_batched_and_cached(launch, reference, prompts, generate, compare, dtype: str, budget: int) -> None:
    """Whole rows, wherever steps cut a prompt; then from cached states, also where a prompt is longer by one token."""
    engine, folder = launch(dtype, max_num_batched_tokens=budget)
    assert engine.llm_engine.vllm_config.model_config.uses_mrope  # three rows of positions
    for _ in range(2):
        outputs = generate(engine, prompts, logprobs=VOCABULARY, max_tokens=TOKENS)
        assert compare(reference(folder), prompts, outputs) == (0, VOCABULARY * TOKENS * len(prompts))
        cached = [output.num_cached_tokens for output in outputs]
    assert cached == [(length - 1) // PAGE[dtype] * PAGE[dtype] for length in LENGTHS]


def test_a_common_beginning(launch, reference, prompts, generate, compare) -> None:
    """A page that one prompt wrote, at whose end another one starts to differ, and which a third one outgrows."""
    engine, folder = launch("float32", max_num_batched_tokens=50)
    longest = prompts[-1]
    asked = [longest, longest[:128] + [5], longest[:129], longest[:64] + [9] * 40, longest[:63] + [9] * 40]
    outputs = [generate(engine, [prompt], logprobs=VOCABULARY)[0] for prompt in asked]
    assert [output.num_cached_tokens for output in outputs] == [0, 128, 128, 64, 0]
    assert compare(reference(folder), asked, outputs) == (0, VOCABULARY * 32 * len(asked))


def test_without_a_prefix_cache(launch, reference, prompts, generate, compare) -> None:
    """A sequence has one page of states, of more tokens than whole chunks; here positions have one row, as text has."""
    plain = {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.25}}
    engine, folder = launch("float32", False, plain, max_num_batched_tokens=50, max_model_len=250)
    assert not engine.llm_engine.vllm_config.model_config.uses_mrope
    cache = engine.llm_engine.vllm_config.cache_config
    assert (cache.mamba_cache_mode, cache.mamba_block_size, cache.block_size) == ("none", 250, 64)
    for _ in range(2):
        outputs = generate(engine, prompts, logprobs=VOCABULARY, max_tokens=TOKENS)
        assert compare(reference(folder), prompts, outputs) == (0, VOCABULARY * TOKENS * len(prompts))
    assert not any(output.num_cached_tokens for output in outputs)


def test_prompts(launch, reference, prompts, generate, compare) -> None:
    """Log-probabilities of prompt tokens, for which nothing cached is used."""
    engine, folder = launch("float32", max_num_batched_tokens=63)
    for _ in range(2):
        outputs = generate(engine, prompts, prompt_logprobs=2, max_tokens=2)
        mismatched, compared = compare(reference(folder), prompts, outputs)
        assert mismatched == 0 and compared > 2 * (sum(LENGTHS) - len(LENGTHS))


PRESSED = {"two": ((5, 6), 14, 64), "all": (range(10), 25, 65), "all, no prefix cache": (range(10), 12, 65)}
"""Which prompts, pages of the pool, tokens of a step."""


@pytest.mark.parametrize("pressed", PRESSED)
def test_preempted(launch, reference, prompts, generate, compare, counter, pressed: str) -> None:
    """Requests lose their pages, which others write, and go on as they do alone."""
    chosen, pages, budget = PRESSED[pressed]
    asked, caching = [prompts[index] for index in chosen], "no" not in pressed
    sizes = {"num_gpu_blocks_override": pages, "max_num_batched_tokens": budget}
    engine, folder = launch("float32", caching, max_model_len=192 if pressed == "two" else 256, **sizes)
    seeds = list(range(len(asked)))
    outputs = generate(engine, asked, seeds, max_tokens=55)
    assert counter(engine, "vllm:num_preemptions") > 0
    assert compare(reference(folder), asked, outputs) == (0, 55 * len(asked))
    before = counter(engine, "vllm:num_preemptions")
    for prompt, seed, output in list(zip(asked, seeds, outputs, strict=True))[-4:]:
        (alone,) = generate(engine, [prompt], [seed], max_tokens=55)
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids
    assert counter(engine, "vllm:num_preemptions") == before


def carried(model) -> set[str]:
    """Digests of what every page that was written carries on, seen as a page of states: all layers share the memory."""
    from skyrl_isoexec.kernels.gdn.spec import live

    states = model.pages[0].kv_cache
    pages = [live(states, page, PAGE["float32"], model.schedule) for page in range(len(states[0]))]
    written = [parts for parts in pages if not any(part.isnan().any() for part in parts)]
    return {hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest() for parts in written}


def test_carried_states(launch, prompts, generate) -> None:
    """Whatever the cut of a prompt of 200 tokens, its four pages hold the same states in each of three layers, and the
    full ones of the attention layer the same keys and values."""
    seen = []
    for budget in (7, 48, 63, 64, 65, 200):
        engine, _ = launch("float32", max_num_batched_tokens=budget)
        generate(engine, prompts[-1:], max_tokens=1)
        seen += engine.apply_model(carried)
        del engine
    assert len(seen[0]) == 4 * 3 + 3
    assert all(other == seen[0] for other in seen)


def flip(engine) -> int:
    """The last bit of every number that a cached page of states carries from chunk to chunk; how many pages."""
    from vllm.v1.core.kv_cache_utils import get_group_id
    from vllm.v1.kv_cache_interface import MambaSpec

    from skyrl_isoexec.kernels.gdn.spec import CHAIN

    cache = engine.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager
    groups = [isinstance(group.kv_cache_spec, MambaSpec) for group in cache.kv_cache_config.kv_cache_groups]
    cached = [block for block in cache.block_pool.blocks if block.block_hash is not None]
    pages = [block.block_id for block in cached if groups[get_group_id(block.block_hash)]]
    (chain,) = engine.apply_model(lambda model: model.pages[0].kv_cache[CHAIN])
    for page in pages:
        chain[page].view(torch.int32).bitwise_xor_(1)
    return len(pages)


def test_cached_states_are_read(launch, reference, prompts, generate, compare) -> None:
    """The comparison can fail: one bit of what cached pages carry is seen, and in rows that start from one alone."""
    engine, folder = launch("float32")
    generate(engine, prompts, max_tokens=1)
    assert flip(engine) == 3 * (1 + 1 + 1 + 2 + 1)  # three layers; the four longest prompts have two pages in common
    outputs = generate(engine, prompts, logprobs=VOCABULARY, max_tokens=TOKENS)
    for prompt, output in zip(prompts, outputs, strict=True):
        mismatched, compared = compare(reference(folder), [prompt], [output])
        assert compared == VOCABULARY * TOKENS and (mismatched > 100) == (output.num_cached_tokens > 0)


def test_two_documents_at_once(reference, checkpoint, hybrid) -> None:
    """Hazard 10: packed sequences of 5, 64 and 128 tokens are each what they are alone."""
    expected = reference(checkpoint("float32", **hybrid))
    source = random.Random(5)
    documents = [[source.randrange(VOCABULARY) for _ in range(length)] for length in (5, 64, 128)]
    bounds = torch.tensor([0, 5, 69, 197], dtype=torch.int32)
    decoder, ids = expected.decoder, torch.tensor(sum(documents, []))
    positions = torch.cat([torch.arange(len(document)) for document in documents])
    x_TH = decoder.layers(decoder.embed(ids), positions, decoder.end_to_end(bounds))
    together = expected.kernels.logprobs(decoder.full_logits(x_TH))
    alone = torch.cat([expected.logprobs(document) for document in documents])
    assert count_mismatches(together, alone) == (0, 197 * VOCABULARY)
