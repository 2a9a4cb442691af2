"""What the engine is told is strict, what it cannot compute exactly it refuses, and it says what it runs."""

import json

import pytest

torch = pytest.importorskip("torch")

GOOD = {"family": "qwen3", "kernels": "cpu", "schedule": {"num_leaves": 2, "kv_block": 16, "kv_partition": 512}}


def changed(**parts: object) -> dict:
    return {"isoexec": GOOD | parts}


BAD = {
    "absent": ({}, '"isoexec"\\] is missing'),
    "not a mapping": ({"isoexec": "qwen3"}, "not a mapping"),
    "unknown key": (changed(sede=1), "unknown keys \\['sede'\\]"),
    "missing key": ({"isoexec": {"family": "qwen3", "schedule": GOOD["schedule"]}}, "missing keys \\['kernels'\\]"),
    "wrong type": (changed(kernels=3), '"kernels"\\] is 3'),
    "unknown constant": (changed(schedule=GOOD["schedule"] | {"kv_blok": 1}), "kv_blok"),
    "missing constant": (changed(schedule={"num_leaves": 2}), "kv_block"),
}


@pytest.mark.parametrize("case", BAD)
def test_settings_are_strict(case: str) -> None:
    """Each refusal names the key."""
    from skyrl_isoexec.runtimes.vllm.settings import EngineSettings

    given, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        EngineSettings.from_additional_config(given)


def test_settings_round_trip() -> None:
    """What `engine_arguments` passes is what the worker reads."""
    from skyrl_isoexec.runtimes.vllm.settings import EngineSettings

    settings = EngineSettings.from_additional_config({"isoexec": GOOD})
    arguments = json.loads(json.dumps(settings.engine_arguments(dtype="bfloat16")))
    assert EngineSettings.from_additional_config(arguments["additional_config"]) == settings
    assert arguments["hf_overrides"] == {"architectures": ["IsoExecForCausalLM"]}
    assert arguments["dtype"] == "bfloat16"


REFUSED = {
    "block_size": {"block_size": 24},
    "kv_cache_dtype": {"kv_cache_dtype": "fp8"},
    "settings": {"additional_config": {"isoexec": GOOD | {"kernel": "cpu"}}},
    "family": {"additional_config": {"isoexec": GOOD | {"family": "qwen9"}}},
    "kernels": {"additional_config": {"isoexec": GOOD | {"kernels": "cpus"}}},
}


@pytest.mark.parametrize("option", REFUSED)
def test_engines_refuse_by_name(start, checkpoint, option: str) -> None:
    """An engine that cannot be exact does not start, and says which option is at fault."""
    names = {"settings": "unknown keys \\['kernel'\\]", "family": "'qwen9'", "kernels": "cpus"}
    with pytest.raises(Exception, match=names.get(option, option)):
        start(checkpoint("float32"), "float32", **REFUSED[option])


def test_one_engine_a_process(start, checkpoint, generate) -> None:
    """The log-softmax belongs to the process, so an engine that was superseded refuses rather than use another's."""
    first = start(checkpoint("float32"), "float32")
    second = start(checkpoint("float32"), "float32", num_leaves=4)
    assert generate(second, [[1, 2, 3]])
    with pytest.raises(Exception, match="one engine per process"):
        generate(first, [[1, 2, 3]])


def test_facts(start, checkpoint) -> None:
    """Plain data that says which functions are bound, and that the plugin is there."""
    engine = start(checkpoint("float32"), "float32")
    (facts,) = engine.collective_rpc("isoexec_facts")
    assert json.loads(json.dumps(facts)) == facts
    assert facts["architecture"] == "IsoExecForCausalLM" and facts["isoexec"] == GOOD
    assert facts["plugin"]["architecture"] and facts["plugin"]["attention"] and facts["plugin"]["transfer"]
    assert any("skyrl_isoexec.runtimes.vllm.install:register" in p for p in facts["plugin"]["entry_points"])
    assert facts["tp"] == {"rank": 0, "size": 1}
    assert facts["patches"]["vllm"]["num_patches"] >= 4
    assert facts["log_softmax_is_ours"] and facts["weights_complete"]
    assert facts["log_softmax"] == facts["kernels"]["logprobs"]
    assert facts["kernels"]["linear"].startswith("skyrl_isoexec.kernels.")
    assert facts["model"]["dtype"] == facts["engine"]["dtype"] == facts["attention"]["cache_dtype"] == "float32"
    assert facts["versions"]["torch"] and facts["pid"] > 0


def test_native_engines_are_left_alone(host, checkpoint) -> None:
    """The plugin is loaded and a stock architecture computes stock log-probabilities."""
    from vllm import LLM, SamplingParams
    from vllm.v1.sample.ops import logprobs

    logprobs.log_softmax_override = None  # of an engine that an earlier test ran in this process
    engine = LLM(
        str(checkpoint("float32")), dtype="float32", skip_tokenizer_init=True, enforce_eager=True,
        max_model_len=128, block_size=16, kv_cache_memory_bytes=2**22,
    )  # fmt: skip
    (out,) = engine.generate({"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=4, logprobs=0), use_tqdm=False)
    assert len(out.outputs[0].token_ids) == 4 and logprobs.log_softmax_override is None
    assert engine.apply_model(lambda model: type(model).__name__) == ["Qwen3ForCausalLM"]
