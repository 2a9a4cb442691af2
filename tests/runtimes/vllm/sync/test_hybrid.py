"""A hybrid with a contract: what it says of itself, weights of recurrent layers in place, and states of old weights."""

import random

import pytest

torch = pytest.importorskip("torch")

PAGE = 64
LENGTHS = (1, 63, 64, 65, 150, 129, 128)
CHANGED = {
    "model.layers.0.linear_attn.conv1d.weight": lambda t: t.flip(0),
    "model.layers.1.linear_attn.A_log": lambda t: t + 0.5,
    "model.layers.1.linear_attn.dt_bias": lambda t: t - 1,
    "model.layers.2.linear_attn.norm.weight": lambda t: t * 1.25,
    "model.layers.2.linear_attn.in_proj_qkv.weight": lambda t: t * 0.5,
    "model.layers.3.input_layernorm.weight": lambda t: t + 0.25,
}
"""Tensors that differ between the two checkpoints of this file."""


@pytest.fixture(scope="module")
def running(serve, hybrid):
    """One engine for this file: 20 pages, of which one sequence may need twelve."""
    from skyrl_isoexec.runtimes.vllm.settings import HybridPages

    pages = HybridPages(page_size=PAGE, prefix_caching=True)
    sizes = {"max_model_len": 192, "num_gpu_blocks_override": 20, "max_num_batched_tokens": 50}
    return serve(pages, hybrid, enable_prefix_caching=True, **sizes)


@pytest.fixture(scope="module")
def other(running, tmp_path_factory):
    """The checkpoint that the engine started with, but for CHANGED."""
    from skyrl_isoexec.model.checkpoint import read_config, save

    folder, tensors = tmp_path_factory.mktemp("other") / "model", running.tensors(0)
    assert tensors.keys() >= CHANGED.keys()
    changed = {name: change(tensors[name]) for name, change in CHANGED.items()}
    save(folder, read_config(running.checkpoint("float32")), tensors | changed)
    return folder


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """The last three share their first page."""
    source = random.Random(13)
    made = [[source.randrange(128) for _ in range(length)] for length in LENGTHS]
    return made[:4] + [made[4][:PAGE] + prompt[PAGE:] for prompt in made[4:]]


def test_facts(driver) -> None:
    """Those of any engine, and how states are cached."""
    contract, facts = driver.contract, driver.call("isoexec_facts")
    wanted = {
        "model.class": "IsoExecHybridForCausalLM",
        "model.one_place": True,
        "model.full_attention_interval": 4,
        "model.linear_num_value_heads": 4,
        "engine.block_size": PAGE,
        "engine.cache_dtype": "float32",
        "engine.enable_chunked_prefill": True,
        "engine.enable_prefix_caching": True,
        "engine.mamba_cache_mode": "all",
        "constant.gdn_chunk": 64,
        "kernel.gdn.function": "skyrl_isoexec.kernels.gdn.cpu.gdn",
        "plugin.architecture": True,
    }
    assert {name: facts.get(name) for name in wanted} == wanted
    assert {name for name in facts if name.startswith("model.")} == {
        *(f"model.{name}" for name in contract.model.fields),
        "model.class",
        "model.one_place",
    }


@pytest.mark.parametrize("part", ["kernels", "heads", "kv_cache"])
def test_states_elsewhere_are_a_difference(driver, part: str) -> None:
    """A layer with other kernels, other heads or other pages than the model's is not in one place with it."""
    from skyrl_isoexec.runtimes.vllm.facts import own_recurrence

    (model,) = driver.engine.apply_model(lambda model: model)
    layer = model.pages[1]
    real = getattr(layer, part)
    setattr(layer, part, real[:-1] if part == "kv_cache" else None)
    try:
        assert not own_recurrence(model)
    finally:
        setattr(layer, part, real)
    assert own_recurrence(model)


def addresses(model) -> dict[str, int]:
    """Of every parameter, derived layout and state, as a captured graph would hold them."""
    found = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    for name, module in model.named_modules():
        if isinstance(getattr(module, "packed", None), torch.Tensor):
            found[f"{name} packed"] = module.packed.data_ptr()
        for index, state in enumerate(getattr(module, "kv_cache", ())):
            found[f"{name} {index}"] = state.data_ptr()
    return found


def test_two_syncs(driver, other, reference, prompts, generate, compare) -> None:
    """Hazard 5: there and back, in place, by our loader and by vLLM's reload; results follow, served by each kernel."""
    from skyrl_isoexec.contract import digest

    (before,) = driver.engine.apply_model(addresses)
    assert any(".linear_attn.in_proj_qkv packed" in name for name in before) and len(before) > 100
    first = driver.checkpoint("float32")
    for epoch, folder in enumerate((first, other, first, other), 1):
        if epoch < 3:
            driver.sync(epoch, folder)
        else:
            driver.call("isoexec_begin_sync", epoch)
            assert driver.engine.reset_prefix_cache()
            driver.engine.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
            driver.call("isoexec_arrived")
            driver.call("isoexec_commit", epoch, digest(driver.contract))
        for _ in range(2):
            outputs = generate(driver.engine, prompts, logprobs=3, max_tokens=8, **driver.epoch(epoch))
            mismatched, compared = compare(reference(folder), prompts, outputs)
            assert mismatched == 0 and compared >= 3 * 8 * len(prompts)
        assert sum(output.num_cached_tokens for output in outputs) > 0
        wrong = reference(first if folder is other else other)
        assert compare(wrong, prompts, outputs)[0] > compared // 2
    assert driver.engine.apply_model(addresses) == [before]
    operators = {entry.impl.op for entry in driver.contract.composition} - {"decoder"}
    assert driver.call("isoexec_served").keys() == {
        f"served.{op}.engine_{case}" for op in operators for case in ("prefill", "decode")
    }


def test_states_of_old_weights(driver, other, reference, prompts, generate, compare) -> None:
    """Hazard 7: without a reset of the prefix cache, found at the first hit; with one, nothing is left of them."""
    prompt = [prompts[4]]
    driver.sync(1, seed=0)
    assert generate(driver.engine, prompt, max_tokens=8, **driver.epoch(1))
    assert generate(driver.engine, prompt, max_tokens=8, **driver.epoch(1))[0].num_cached_tokens == 128
    driver.sync(2, other, reset=False)
    with pytest.raises(RuntimeError, match="isoexec refused: .* written under epoch 1, .* is epoch 2, .*; reset"):
        generate(driver.engine, prompt, **driver.epoch(2))
    driver.drop()
    driver.sync(2, other)
    (output,) = generate(driver.engine, prompt, max_tokens=8, **driver.epoch(2))
    assert output.num_cached_tokens == 0 and compare(reference(other), prompt, [output]) == (0, 8)


def test_preemption_is_no_offence(
    driver, reference, prompts, generate, compare, counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that lose their pages and resume, some on a cached prefix: of its states only the last has a page."""
    from skyrl_isoexec.runtimes.vllm import worker

    resumed: list[tuple[list[int], ...]] = []
    review = worker.review

    def recorded(guard, step, groups) -> None:
        cached = step.scheduled_cached_reqs
        found = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        resumed.extend(pages for name, pages, count in found if name in cached.resumed_req_ids and count > PAGE)
        review(guard, step, groups)

    monkeypatch.setattr(worker, "review", recorded)
    driver.sync(1, seed=0)
    before = counter(driver.engine, "vllm:num_preemptions")
    longest = prompts[4]
    asked = [longest[:-1] + [last] for last in (1, 2, 3, 4)] + [longest[:127], longest[:128]]
    outputs = generate(driver.engine, asked, max_tokens=40, **driver.epoch(1))
    assert compare(reference(driver.checkpoint("float32")), asked, outputs) == (0, 40 * len(asked))
    assert counter(driver.engine, "vllm:num_preemptions") > before
    assert resumed and all(sorted(pages[0] == 0 for pages in groups) == [False, True, True, True] for groups in resumed)


def test_arrived(driver, other) -> None:
    """Each tensor's place with its blocks, and the digest of what was sent; one flipped bit is named."""
    from skyrl_isoexec.model.digest import tensor_digest

    driver.sync(1, other)
    sent = {name: tensor_digest(tensor) for name, tensor in driver.tensors(other).items()}
    arrived = driver.call("isoexec_arrived")
    assert {name: part["digest"] for name, part in arrived.items()} == sent
    cut = {name.rsplit(".linear_attn.")[1] for name, part in arrived.items() if part["blocks"]}
    assert cut == {"in_proj_qkv.weight", "conv1d.weight"}
    assert arrived["model.layers.0.linear_attn.conv1d.weight"]["blocks"] == [32, 32, 64]
    name = "model.layers.1.linear_attn.A_log"
    for changed in ([name], []):
        driver.engine.apply_model(lambda model: model.get_parameter(name).detach().view(torch.int32)[2].bitwise_xor_(1))
        found = driver.call("isoexec_arrived")
        assert [key for key, part in found.items() if part["digest"] != sent[key]] == changed
