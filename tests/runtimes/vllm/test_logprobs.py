"""Every log-probability an engine returns has the bits of the plain decoder, whatever the engine did to compute it."""

import pytest

DTYPES = ("float32", "bfloat16")
SHAPES = ((7, 1), (24, 3), (48, 8))
"""(tokens a step may compute, requests it may serve): prompts are cut everywhere, and rows keep changing company."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("budget", "seqs"), SHAPES)
def test_cut_batched_and_cached(start, checkpoint, reference, prompts, generate, compare, dtype, budget, seqs):
    """Chunked prefill, continuous batching and prefix caching, seeded and unseeded rows side by side."""
    folder = checkpoint(dtype)
    engine = start(folder, dtype, max_num_batched_tokens=budget, max_num_seqs=seqs)
    seeds = [i if i % 2 else None for i in range(len(prompts))]
    for logprobs in (3, 0):  # the second pass finds its prompts in the cache
        outputs = generate(engine, prompts, seeds, logprobs=logprobs)
        mismatched, compared = compare(reference(folder), prompts, outputs)
        assert mismatched == 0
        assert compared >= 32 * len(prompts) * max(logprobs, 1)
        cached = sum(out.num_cached_tokens for out in outputs)
    assert cached > 300


@pytest.mark.parametrize("dtype", DTYPES)
def test_preempted(start, checkpoint, reference, prompts, generate, compare, counter, dtype):
    """Requests that lose their pages and are computed again."""
    folder = checkpoint(dtype)
    engine = start(folder, dtype, num_gpu_blocks_override=17, max_num_batched_tokens=24)
    outputs = generate(engine, prompts, max_tokens=60)
    assert counter(engine, "vllm:num_preemptions") > 0
    mismatched, compared = compare(reference(folder), prompts, outputs)
    assert (mismatched, compared) == (0, 60 * len(prompts))


def test_temperature_greedy_and_prompt(start, checkpoint, reference, prompts, generate, compare):
    """Processed log-probabilities at a temperature, of greedy rows, and those of prompt tokens."""
    folder = checkpoint("float32")
    engine = start(folder, "float32", logprobs_mode="processed_logprobs", max_num_batched_tokens=24)
    expected = reference(folder)
    outputs = generate(engine, prompts, temperature=0.7, logprobs=2)
    mismatched, compared = compare(expected, prompts, outputs, temperature=0.7)
    assert mismatched == 0 and compared > 500
    assert compare(expected, prompts, outputs)[0] > 0  # the temperature does change bits
    outputs = generate(engine, prompts, temperature=0.0, prompt_logprobs=2, max_tokens=8)
    mismatched, compared = compare(expected, prompts, outputs)
    assert mismatched == 0 and compared > 1000


def test_sampling_filters_keep_raw_logprobs(start, checkpoint, reference, prompts, generate, compare):
    """Raw log-probabilities are those of the whole distribution, also when top-k and top-p choose the token."""
    folder = checkpoint("float32")
    engine = start(folder, "float32", logprobs_mode="raw_logprobs")
    outputs = generate(engine, prompts, temperature=0.8, top_p=0.9, top_k=20, logprobs=1)
    mismatched, compared = compare(reference(folder), prompts, outputs)
    assert mismatched == 0 and compared > 500


def test_seeded_tokens_do_not_depend_on_the_batch(start, checkpoint, prompts, generate):
    """Equal bits and a seed give equal tokens: alone and cut small, or in company."""
    folder, seeds = checkpoint("bfloat16"), list(range(12))
    sampled = []
    for budget, seqs in (SHAPES[0], SHAPES[2]):
        engine = start(folder, "bfloat16", max_num_batched_tokens=budget, max_num_seqs=seqs)
        sampled.append([list(out.outputs[0].token_ids) for out in generate(engine, prompts, seeds)])
        del engine
    assert sampled[0] == sampled[1]


def test_the_comparison_can_fail(start, checkpoint, reference, prompts, generate, compare):
    """Another order of arithmetic, here another number of leaves, is seen."""
    folder = checkpoint("float32")
    outputs = generate(start(folder, "float32"), prompts)
    assert compare(reference(folder, num_leaves=4), prompts, outputs)[0] > 100
