"""What a model with latent attention changes in a contract, in the engine's cache, and in what is refused."""

from pathlib import Path

import pytest
import torch

from skyrl_isoexec.contract import Contract, float_bits
from skyrl_isoexec.contract.values import is_scalar
from skyrl_isoexec.kernels.selection import select
from skyrl_isoexec.launch import composition
from skyrl_isoexec.launch.assemble import assemble, num_pages
from skyrl_isoexec.launch.compose import compose
from skyrl_isoexec.launch.expectation import expected
from skyrl_isoexec.launch.preflight import model as preflight
from skyrl_isoexec.launch.preflight.refusal import Refusal
from skyrl_isoexec.launch.task.base import build_model
from skyrl_isoexec.launch.task.problems import context, split
from skyrl_isoexec.launch.task.tokenizer import encode
from skyrl_isoexec.model.config import DecoderConfig

MODEL = ("+exec=isoexec", "model=tiny_mla")
IPC = ("runtime=cuda", "model.dtype=bfloat16")


@pytest.fixture(autouse=True)
def _no_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(composition, "require", lambda region, arch: f"gates/{arch}/{region}@{'0' * 16}")


def contract_of(*arguments: str) -> Contract:
    launch, cfg = compose([*MODEL, *arguments])
    return composition.compose_contract(launch, cfg, composition.decoder_config(launch))


def config_of(*arguments: str) -> DecoderConfig:
    return composition.decoder_config(compose([*MODEL, *arguments])[0])


def ops_of(contract: Contract) -> dict[str, tuple[str, ...]]:
    return {entry.impl.op: entry.region for entry in contract.composition}


def test_latent_attention_is_a_region_of_its_own() -> None:
    contract = contract_of("topology=trainer_tp2", "kernels.kv_block=32", "runtime.page_size=32")
    ops = ops_of(contract)
    assert "attention" not in ops and ops["mla"] == ("attn.core", "attn.kv_b_proj")
    assert {"attn.kv_a_proj", "attn.q_a_proj", "attn.q_b_proj", "moe.router_proj"} <= set(ops["linear"])
    assert not {"attn.k_proj", "attn.v_proj", "attn.q_proj"} & set(ops["linear"])
    assert {"attn.kv_a_norm", "attn.q_a_norm"} <= set(ops["rmsnorm"]) and ops["decoder"] == ("mlp.residual",)
    (entry,) = [entry for entry in contract.composition if entry.impl.op == "mla"]
    assert entry.constants == {"kv_block": 32, "kv_partition": 512}
    (tp,) = [claim for claim in contract.claims.topology if claim.axis == "tp"]
    assert entry.gate in tp.proof and any("/decoder_mla@" in gate for gate in tp.proof)
    files, schedule = select(contract, "engine")
    assert files["mla"] == "cpu" and schedule.kv_block == 32
    facts = expected(contract, "engine")
    assert facts["kernel.mla.function"] == "skyrl_isoexec.kernels.mla.cpu.mla"
    assert facts["model.class"] == "IsoExecForCausalLM" and "kernel.attention.function" not in facts
    assert composition.against_installation(contract) == []


def test_queries_by_one_projection() -> None:
    ops = ops_of(contract_of("model.shape.more.q_lora_rank=null"))
    assert "attn.q_proj" in ops["linear"] and not {"attn.q_a_proj", "attn.q_b_proj"} & set(ops["linear"])
    assert "attn.q_a_norm" not in ops["rmsnorm"]


def test_norms_with_two_eps_are_one_fact() -> None:
    """Ascending, as the live model says it, and a value that facts may have."""
    eps = expected(contract_of(), "trainer")["constant.eps"]
    assert eps == f"2: {float_bits(1e-6)}, {float_bits(1e-5)}" and is_scalar(eps)
    alike = expected(contract_of("model.shape.rms_norm_eps=1e-6"), "trainer")["constant.eps"]
    assert alike == float_bits(1e-6)


@pytest.mark.parametrize("tp", [1, 2])
def test_pages_hold_one_key_for_all_heads(tp: int, tmp_path: Path) -> None:
    """Of 32 + 8 numbers in two layers, whatever the degree."""
    launch, cfg = compose([*MODEL, f"topology.engine.tp={tp}", "model.dtype=bfloat16", f"run_dir={tmp_path}"])
    config = composition.decoder_config(launch)
    pages = launch.runtime.kv_cache_mib * 2**20 // (2 * 16 * (32 + 8) * 2)
    assert num_pages(launch, config, prefix_caching=True) == pages
    assemble(launch, cfg, tmp_path, config, composition.compose_contract(launch, cfg, config))
    arguments = cfg.generator.inference_engine.engine_init_kwargs
    assert arguments["hf_overrides"] == {"architectures": ["IsoExecForCausalLM"]}
    assert (arguments["num_gpu_blocks_override"], arguments["block_size"]) == (pages, 16)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("topology.trainer.tp=16",), "topology.trainer.tp=16: num_heads = 8 is not divisible"),
        (IPC, "runtime.transport=device .* router has a bias in float32.* set runtime.transport=gloo"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: tuple[str, ...], said: str) -> None:
    launch, _ = compose([*MODEL, *arguments])
    config = composition.decoder_config(launch)
    with pytest.raises(Refusal, match=said):
        preflight.layouts(config, launch)
        preflight.transport(config, launch)


@pytest.mark.parametrize(
    ("model", "family"), [("tiny_mla", "glm4_moe_lite"), ("tiny_moe", "qwen3_moe"), ("tiny_hybrid_moe", "qwen3_5_moe")]
)
def test_there_is_no_native_arm(model: str, family: str) -> None:
    launch, _ = compose(["+exec=native", f"model={model}"])
    with pytest.raises(Refusal, match=f"exec=native with a model of family {family}: vLLM's own class takes"):
        preflight.layouts(preflight.planned(launch), launch)


@pytest.mark.parametrize("mend", ["runtime.transport=gloo", "topology=separate"])
def test_ways_to_send_a_bias_as_it_is(mend: str) -> None:
    launch, _ = compose([*MODEL, *IPC, mend])
    preflight.transport(composition.decoder_config(launch), launch)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("+model.shape.more.kv_lora_rang=2", "model.shape: .*kv_lora_rang"),
        ("model.shape.head_dim=16", "model.shape: .*head_dim"),
        ("model.shape.more.kv_lora_rank=0", "model.shape: .*kv_lora_rank = 0"),
    ],
)
def test_a_wrong_shape_is_refused(change: str, said: str) -> None:
    launch, _ = compose([*MODEL, change])
    with pytest.raises(Refusal, match=said):
        preflight.planned(launch)


def test_the_base_has_a_bias_that_chooses() -> None:
    """Between experts, in fp32, and out of the optimizer's reach; the model is the one that was described."""
    launch, _ = compose([*MODEL])
    model = build_model(launch.model.shape)
    (name,) = [name for name in model.state_dict() if name.endswith("e_score_correction_bias")]
    bias = model.state_dict()[name]
    assert bias.dtype == torch.float32 and len(bias.unique()) == 8 and bias.abs().max() <= 0.05
    assert name not in dict(model.named_parameters())
    config = config_of()
    assert config.router_bias and config.first_dense_layers == 1 and config.latent_width == 32 + 8


def test_the_common_beginning_fills_a_page() -> None:
    launch, cfg = compose([*MODEL])
    ids = encode(context(launch.task.shots, split(2, launch.task.held_out_one_in)[0]))
    assert launch.runtime.page_size < len(ids) <= cfg.trainer.max_prompt_length - len("99+99=")
