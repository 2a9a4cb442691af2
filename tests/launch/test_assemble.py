"""What one choice means in the hosts' own settings, and that a user's setting cannot undo it unseen."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from skyrl_isoexec.contract import encode
from skyrl_isoexec.launch import composition
from skyrl_isoexec.launch.assemble import assemble
from skyrl_isoexec.launch.compose import compose
from skyrl_isoexec.launch.expectation import expected
from skyrl_isoexec.model.config import DecoderConfig

MODEL = DecoderConfig(
    family="qwen3",
    vocab_size=16,
    hidden_size=32,
    intermediate_size=32,
    num_layers=1,
    num_heads=4,
    num_kv_heads=4,
    head_dim=32,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    max_position=64,
)
MOE = dataclasses.replace(
    MODEL,
    family="qwen3_moe",
    intermediate_size=None,
    num_experts=16,
    num_experts_per_tok=2,
    moe_intermediate_size=8,
    router_scoring="softmax",
    router_renormalise=True,
)
ENGINE = "++generator.inference_engine.engine_init_kwargs"


CUDA = ("runtime=cuda", "model.dtype=bfloat16")


@pytest.fixture
def assembled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """assembled(*arguments, model=MODEL) -> (contract, SkyRL's configuration); gates are not asked for."""
    monkeypatch.setattr(composition, "require", lambda region, arch: f"gates/{arch}/{region}@{'0' * 16}")

    def make(*arguments: str, model: DecoderConfig = MODEL) -> tuple[Any, Any]:
        launch, cfg = compose(["+exec=isoexec", f"run_dir={tmp_path / 'run'}", *arguments])
        model = dataclasses.replace(model, dtype=launch.model.dtype)
        contract = composition.compose_contract(launch, cfg, model)
        assemble(launch, cfg, tmp_path, model, contract)
        return contract, cfg

    return make


def test_both_sides_get_the_same_bytes(assembled: Any) -> None:
    contract, cfg = assembled("topology=trainer_tp2")
    trainer = cfg.trainer.policy.megatron_config.model_config_kwargs["isoexec"]
    engine = cfg.generator.inference_engine.engine_init_kwargs["additional_config"]["isoexec"]
    assert trainer["contract"] == engine["contract"] == encode(contract).decode()
    assert (trainer["transport"], engine["enforce"]) == ("gloo", True)


def test_an_engine_on_a_gpu_captures_and_compiles_nothing(assembled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {name: "1" for name in composition.VERSIONS["sm90"]}
    monkeypatch.setattr(composition.importlib.metadata, "version", lambda name: versions[name])
    contract, cfg = assembled(*CUDA)
    arguments = cfg.generator.inference_engine.engine_init_kwargs
    assert arguments["compilation_config"] == {"mode": "NONE", "cudagraph_mode": "FULL_DECODE_ONLY"}
    assert arguments["worker_cls"].endswith("cuda_worker.GuardedWorker") and arguments["block_size"] == 64
    assert arguments["kv_cache_memory_bytes"] == 8192 * 2**20
    assert not {"weight_transfer_config", "num_gpu_blocks_override", "enable_sleep_mode"} & arguments.keys()
    assert {entry.impl.id.split(".")[1] for entry in contract.composition} == {"kernel", "torch"}
    assert contract.deployment["engine"]["cudagraph_mode"] == "FULL_DECODE_ONLY"
    assert contract.deployment["environment"]["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    other, _ = assembled(*CUDA, "runtime.runner=2")
    assert other.deployment["environment"]["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    assert other.identities.numerical_policy == contract.identities.numerical_policy
    _, gloo = assembled(*CUDA, "runtime.transport=gloo")
    assert gloo.generator.inference_engine.engine_init_kwargs["weight_transfer_config"] == {"backend": "gloo"}


def test_experts_have_a_degree_of_their_own(assembled: Any) -> None:
    """Proven where there are experts, and read back from every trainer; Megatron cuts no single one."""
    contract, cfg = assembled("topology=trainer_ep2", model=MOE)
    (claim,) = (claim for claim in contract.claims.topology if claim.axis == "ep")
    assert claim.kind == "invariant" and claim.degrees == (1, 2, 4, 8)
    regions = [ref.split("/")[2].split("@")[0] for ref in claim.proof]
    assert sorted(regions) == ["combine", "decoder_moe", "experts"]
    assert contract.deployment["trainer"]["ep"] == expected(contract, "trainer")["degree.ep"] == 2
    assert "degree.ep" not in expected(contract, "engine")
    for role in (cfg.trainer.policy, cfg.trainer.ref):
        megatron = role.megatron_config
        assert (megatron.expert_model_parallel_size, megatron.expert_tensor_parallel_size) == (2, 1)


@pytest.mark.parametrize(("degree", "model", "claimed"), [(2, MODEL, "1"), (16, MOE, "1 or 2 or 4 or 8")])
def test_an_expert_parallel_degree_that_nobody_has_shown(assembled: Any, degree: int, model, claimed: str) -> None:
    words = f"deployment.trainer.ep is {degree}; it must be {claimed}, as claims.topology has it of ep"
    with pytest.raises(ValueError, match=words):
        assembled(f"topology.trainer.ep={degree}", model=model)


def test_an_engines_own_expert_parallelism_is_refused(assembled: Any) -> None:
    with pytest.raises(ValueError, match="enable_expert_parallel=true.*leave it out, and set topology.engine.tp"):
        assembled(f"{ENGINE}.enable_expert_parallel=true", model=MOE)


@pytest.mark.parametrize("override", ["dtype=bfloat16", "logprobs_mode=raw_logprobs"])
def test_engine_arguments_that_decide_bits_are_refused(assembled: Any, override: str) -> None:
    with pytest.raises(ValueError, match=f"engine_init_kwargs.{override.split('=')[0]}"):
        assembled(f"{ENGINE}.{override}")


def test_a_users_folder_for_checkpoints_is_kept(assembled: Any, tmp_path: Path) -> None:
    _, cfg = assembled(f"trainer.ckpt_path={tmp_path / 'mine'}")
    assert cfg.trainer.ckpt_path == str(tmp_path / "mine")
    assert cfg.trainer.export_path == str(tmp_path / "run" / "export")


def test_a_cache_below_one_sequence_is_refused(assembled: Any) -> None:
    with pytest.raises(ValueError, match="runtime.kv_cache_mib=1"):
        assembled("runtime.kv_cache_mib=1", model=dataclasses.replace(MODEL, max_position=2**16))
