"""An engine with a contract: it says what it is, proves what it received, and serves only what is committed."""

import dataclasses

import pytest

torch = pytest.importorskip("torch")

NORM, UP = "model.layers.1.post_attention_layernorm.weight", "model.layers.0.mlp.up_proj"


def test_facts(driver) -> None:
    """Every field of the page of facts, read back; the contract's identities are recomputed from the text that came."""
    from skyrl_isoexec.contract import digest
    from skyrl_isoexec.patching import series_digest

    contract, facts = driver.contract, driver.call("isoexec_facts")
    wanted = {
        "runtime": "vllm",
        "contract.digest": digest(contract),
        "contract.semantic": contract.identities.semantic,
        "contract.numerical_policy": contract.identities.numerical_policy,
        "model.class": "IsoExecForCausalLM",
        "model.one_place": True,
        "numeric.flush_subnormals": False,
        "numeric.rounding": "nearest",
        "numeric.threads": 1,
        "degree.tp": 1,
        "degree.pp": 1,
        "constant.eps": contract.model.fields["rms_norm_eps"],
        "constant.num_leaves": 2,
        "constant.kv_block": 16,
        "constant.kv_partition": 512,
        "patch.vllm": series_digest("vllm"),
        "engine.block_size": 16,
        "engine.cache_dtype": "float32",
        "engine.enable_chunked_prefill": True,
        "engine.enable_prefix_caching": True,
        "engine.enforce": True,
        "engine.enforce_eager": True,
        "engine.logits_processors": "",
        "engine.logprobs_mode": "raw_logprobs",
        "engine.max_num_batched_tokens": 24,
        "engine.max_num_seqs": 8,
        "engine.seed": 0,
        "engine.worker_class": "skyrl_isoexec.runtimes.vllm.cpu_worker.GuardedCPUWorker",
    }
    wanted |= {f"plugin.{name}": True for name in ("architecture", "attention", "transfer", "log_softmax")}
    wanted |= {f"model.{name}": value for name, value in contract.model.fields.items()}
    wanted |= {f"version.{name}": value for name, value in contract.versions.items()}
    wanted |= {f"source.{name}": value for name, value in contract.sources.items() if "/" not in name}
    wanted |= {f"environment.{name}": value for name, value in contract.deployment["environment"].items()}
    sources = {entry.impl.op: entry.impl.source for entry in contract.composition}
    operators = sources.keys() - {"decoder"}
    wanted |= {f"kernel.{op}.source": sources[op] for op in operators}
    functions = {name for name in facts if name.startswith("kernel.") and name.endswith(".function")}
    assert functions == {f"kernel.{op}.function" for op in operators}
    assert facts["kernel.attention.function"] == "skyrl_isoexec.kernels.attention.cpu.attention"
    assert {name: value for name, value in facts.items() if name not in functions} == wanted


def test_requests_carry_the_epoch(driver, reference, prompts, generate, compare) -> None:
    """No epoch, and another than the committed one, are refused; with the right one every bit is the decoder's."""
    with pytest.raises(RuntimeError, match="isoexec refused: .* epoch is None: no weight sync was committed"):
        generate(driver.engine, prompts[:1], **driver.epoch(0))
    for number, (given, words) in enumerate(
        (({}, "is None, the"), (driver.epoch(0), "is 0, the"), (driver.epoch(9), "is 9, the"))
    ):
        driver.drop()
        driver.sync(number + 1, seed=1)
        with pytest.raises(RuntimeError, match=f"isoexec refused: .*_epoch {words} engine's epoch is {number + 1}"):
            generate(driver.engine, prompts[:1], **given)
    driver.drop()
    driver.sync(4, seed=1)
    outputs = generate(driver.engine, prompts, **driver.epoch(4))
    expected = reference(driver.checkpoint("float32", seed=1))
    assert compare(expected, prompts, outputs) == (0, 32 * len(prompts))


def test_kernels_say_what_they_served(driver, prompts, generate) -> None:
    """Dummy runs count for nothing; a prompt is a prefill, also of one token; what follows is decode."""
    operators = {entry.impl.op for entry in driver.contract.composition} - {"decoder"}

    def served() -> set[str]:
        found = driver.call("isoexec_served")
        assert all(value == f"skyrl_isoexec.kernels.{name.split('.')[1]}.cpu" for name, value in found.items())
        return set(found)

    driver.engine.apply_model(lambda model: model.kernels.tally.cases.clear())
    driver.engine.collective_rpc("execute_dummy_batch")
    assert served() == set()
    driver.sync(1, seed=0)
    generate(driver.engine, [[5]], max_tokens=1, **driver.epoch(1))
    assert served() == {f"served.{op}.engine_prefill" for op in operators}
    generate(driver.engine, [[5]], max_tokens=2, **driver.epoch(1))
    assert served() == {f"served.{op}.engine_{case}" for op in operators for case in ("prefill", "decode")}


def test_stale_pages(driver, reference, prompts, generate, compare) -> None:
    """A sync without a reset of the prefix cache is found at the first hit; with one, the new weights' bits come."""
    prompt = [prompts[7]]
    driver.sync(1, seed=0)
    assert generate(driver.engine, prompt, **driver.epoch(1))
    assert generate(driver.engine, prompt, **driver.epoch(1))[0].num_cached_tokens == 112
    driver.sync(2, seed=1, reset=False)
    with pytest.raises(RuntimeError, match="isoexec refused: .* written under epoch 1, .* is epoch 2, .*; reset"):
        generate(driver.engine, prompt, **driver.epoch(2))
    driver.drop()
    driver.sync(2, seed=1)
    outputs = generate(driver.engine, prompt, **driver.epoch(2))
    assert compare(reference(driver.checkpoint("float32", seed=1)), prompt, outputs) == (0, 32)


def test_preemption_is_no_offence(driver, reference, prompts, generate, compare, counter) -> None:
    """Requests that lose their pages and resume, some of them on cached pages, are served."""
    driver.sync(1, seed=0)
    before = counter(driver.engine, "vllm:num_preemptions")
    outputs = generate(driver.engine, prompts, max_tokens=60, **driver.epoch(1))
    assert counter(driver.engine, "vllm:num_preemptions") > before
    assert compare(reference(driver.checkpoint("float32")), prompts, outputs) == (0, 60 * len(prompts))


@pytest.mark.parametrize("event", ["sleep", "wake_up", "weights", "refused commit"])
def test_what_needs_a_sync(driver, prompts, generate, event: str) -> None:
    """Sleep, waking up and weights from elsewhere leave nothing that may be served, until the next whole sync."""
    driver.sync(5, seed=0)
    if event in ("sleep", "wake_up"):
        driver.engine.collective_rpc(event)
    elif event == "weights":
        tensors = list(driver.tensors(1).items())
        driver.engine.apply_model(lambda model: model.load_weights(tensors))
    else:
        driver.call("isoexec_begin_sync", 6)
        with pytest.raises(RuntimeError, match="isoexec refused: isoexec_commit: contract_digest is 'f00d'"):
            driver.call("isoexec_commit", 6, "f00d")
    words = {"sleep": "put to sleep", "wake_up": "woken up", "weights": "outside a weight sync"}
    why = words.get(event, "of epoch 6 has begun")
    with pytest.raises(RuntimeError, match=f"isoexec refused: .* epoch is None: .*{why}"):
        generate(driver.engine, prompts[:1], **driver.epoch(5))
    driver.drop()
    driver.sync(5, seed=0)
    assert generate(driver.engine, prompts[:1], **driver.epoch(5))


def test_the_cache_alone_wakes_up(driver, prompts, generate) -> None:
    """As when weights come first and the cache's memory after them: served, but no page is known any more."""
    driver.sync(1, seed=0)
    generate(driver.engine, [prompts[7]], **driver.epoch(1))
    driver.engine.collective_rpc("wake_up", args=(["kv_cache"],))
    assert generate(driver.engine, prompts[:1], **driver.epoch(1))
    with pytest.raises(RuntimeError, match="isoexec refused: .* was written under no epoch that is known"):
        generate(driver.engine, [prompts[7]], **driver.epoch(1))


def test_arrived(driver) -> None:
    """Digests of what lies in memory are those of what was sent; one flipped bit is named, stale derived data too."""
    from skyrl_isoexec.contract import digest
    from skyrl_isoexec.model.digest import tensor_digest

    def flip(name: str) -> None:
        driver.engine.apply_model(
            lambda model: model.get_parameter(name).detach().view(torch.int32).flatten()[5].bitwise_xor_(1)
        )

    driver.sync(1, seed=1)
    sent = {name: tensor_digest(tensor) for name, tensor in driver.tensors(1).items()}
    for name in (NORM, f"{UP}.weight"):
        arrived = driver.call("isoexec_arrived")
        assert {key: part["digest"] for key, part in arrived.items()} == sent
        assert arrived[name]["rank"] == 0 and arrived[name]["parts"] == 1 and "dim" in arrived[name]
        flip(name)
        assert [key for key, part in driver.call("isoexec_arrived").items() if part["digest"] != sent[key]] == [name]
        if name != NORM:
            driver.call("isoexec_begin_sync", 2)
            driver.call("isoexec_arrived")
            with pytest.raises(ValueError, match=f"layouts derived from other weights than those in place: {UP}$"):
                driver.call("isoexec_commit", 2, digest(driver.contract))
        flip(name)


def test_the_rotary_table(driver) -> None:
    """It is no weight: waking up computes it again where it was, and a damaged one is not committed."""
    from skyrl_isoexec.contract import digest
    from skyrl_isoexec.model.rope import rope_table

    driver.sync(1, seed=1)
    (address,) = driver.engine.apply_model(lambda model: model.cos_sin_PR.data_ptr())
    driver.engine.apply_model(lambda model: model.cos_sin_PR.fill_(float("nan")))
    driver.call("isoexec_begin_sync", 2)
    driver.call("isoexec_arrived")
    with pytest.raises(ValueError, match="the rotary table in memory is not the one"):
        driver.call("isoexec_commit", 2, digest(driver.contract))
    driver.engine.collective_rpc("wake_up", args=(["weights"],))
    (model,) = driver.engine.apply_model(lambda model: (model.cos_sin_PR.data_ptr(), model.cos_sin_PR, model.config))
    assert model[0] == address and torch.equal(model[1], rope_table(model[2]))


def test_a_contract_of_another_engine(host, checkpoint, contract) -> None:
    """An engine that is not the contract's does not start, and names each field with both values."""
    from vllm import LLM

    from skyrl_isoexec.contract import encode, seal
    from skyrl_isoexec.runtimes.vllm.settings import EngineSettings, settings_from_contract

    folder, small = str(checkpoint("float32")), {"block_size": 16, "kv_cache_memory_bytes": 2**22, "max_model_len": 64}
    made = contract("float32", tp=2)
    fields = dict(made.model.fields) | {"head_dim": 16}
    other = seal(dataclasses.replace(made, model=dataclasses.replace(made.model, fields=fields)))
    settings = settings_from_contract(encode(other).decode(), enforce=True)
    assert settings == EngineSettings.from_additional_config({"isoexec": settings.to_dict()})
    assert settings.kernels["attention"] == "cpu" and settings.schedule.num_leaves == 2
    with pytest.raises(Exception, match="engine.tp is 2, this engine's is 1; model.fields.head_dim is 16, .* is 32$"):
        LLM(folder, enforce_eager=True, **settings.engine_arguments(dtype="float32"), **small)
    with pytest.raises(Exception, match="model.dtype is 'float32', this engine's is 'bfloat16'"):
        LLM(folder, enforce_eager=True, **settings.engine_arguments(dtype="bfloat16"), **small)
    with pytest.raises(ValueError, match="identities.semantic"):
        settings_from_contract(encode(dataclasses.replace(other, identities=made.identities)).decode(), enforce=True)
