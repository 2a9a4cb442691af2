"""What a model with gated delta rules changes in a contract, in the engine's arguments, and in what is refused."""

from pathlib import Path
from typing import Any

import pytest

from skyrl_isoexec.contract import Contract
from skyrl_isoexec.kernels.selection import select
from skyrl_isoexec.launch import composition
from skyrl_isoexec.launch.assemble import assemble
from skyrl_isoexec.launch.compose import compose
from skyrl_isoexec.launch.expectation import expected
from skyrl_isoexec.launch.preflight import model as preflight
from skyrl_isoexec.launch.preflight.refusal import Refusal
from skyrl_isoexec.launch.task.problems import context, split
from skyrl_isoexec.launch.task.tokenizer import EOS, build_tokenizer, encode

MODEL = ("+exec=isoexec", "model=tiny_hybrid")


@pytest.fixture(autouse=True)
def _no_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(composition, "require", lambda region, arch: f"gates/{arch}/{region}@{'0' * 16}")


def contract_of(*arguments: str) -> Contract:
    launch, cfg = compose([*MODEL, *arguments])
    return composition.compose_contract(launch, cfg, composition.decoder_config(launch))


def assembled(folder: Path, *arguments: str) -> dict[str, Any]:
    """The engine's arguments."""
    launch, cfg = compose([*MODEL, f"run_dir={folder}", *arguments])
    config = composition.decoder_config(launch)
    assemble(launch, cfg, folder, config, composition.compose_contract(launch, cfg, config))
    return cfg.generator.inference_engine.engine_init_kwargs


@pytest.mark.parametrize(("form", "region", "other"), [("row_causal", "gdn", "gdn_cpr"), ("cpr", "gdn_cpr", "gdn")])
def test_the_form_of_the_rule_is_an_entry_of_its_own(form: str, region: str, other: str) -> None:
    contract = contract_of(f"kernels.gdn={form}", "kernels.gdn_chunk=32", "runtime.page_size=64")
    files, schedule = select(contract, "engine")
    assert files[region] == "cpu" and other not in files and schedule.gdn_chunk == 32
    (entry,) = [entry for entry in contract.composition if entry.impl.op == region]
    assert entry.region == ("gdn.conv", "gdn.core", "gdn.gates", "gdn.l2_norm")
    assert entry.constants == {"gdn_chunk": 32}
    (tp,) = [claim for claim in contract.claims.topology if claim.axis == "tp"]
    assert entry.gate in tp.proof
    facts = expected(contract, "engine")
    assert facts[f"kernel.{region}.function"] == f"skyrl_isoexec.kernels.{region}.cpu.gdn"
    assert facts["constant.gdn_chunk"] == 32 and f"kernel.{other}.function" not in facts
    assert composition.against_installation(contract) == []


def test_a_dense_model_has_nothing_of_it() -> None:
    launch, cfg = compose(["+exec=isoexec", "kernels.gdn=cpr", "kernels.gdn_chunk=32"])
    contract = composition.compose_contract(launch, cfg, composition.decoder_config(launch))
    assert not any(entry.impl.op.startswith("gdn") for entry in contract.composition)
    facts = expected(contract, "engine")
    assert facts["model.class"] == "IsoExecForCausalLM" and "engine.mamba_cache_mode" not in facts
    assert "constant.gdn_chunk" not in facts


@pytest.mark.parametrize(("caching", "mode"), [("true", "all"), ("false", "none")])
def test_states_are_in_the_engines_pages(caching: str, mode: str, tmp_path: Path) -> None:
    caches = f"generator.inference_engine.enable_prefix_caching={caching}"
    arguments = assembled(tmp_path, caches)
    assert arguments["hf_overrides"] == {"architectures": ["IsoExecHybridForCausalLM"]}
    assert arguments["block_size"] == 64
    sizes = {name: arguments.get(name) for name in ("mamba_block_size", "mamba_cache_mode")}
    wanted = {"mamba_block_size": 64, "mamba_cache_mode": "all"}
    assert sizes == (wanted if mode == "all" else dict.fromkeys(wanted))
    facts = expected(contract_of(caches), "engine")
    assert (facts["model.class"], facts["engine.mamba_cache_mode"]) == ("IsoExecHybridForCausalLM", mode)


def test_another_size_of_states_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="engine_init_kwargs.mamba_block_size=128 is not 64"):
        assembled(tmp_path, "++generator.inference_engine.engine_init_kwargs.mamba_block_size=128")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("runtime.page_size=32",), "runtime.page_size=32 .*set it to 64 or a multiple"),
        (("model.dtype=bfloat16",), "runtime.page_size=64 .*set it to 128 or a multiple"),
        (("topology.trainer.tp=4", "topology.engine.tp=4"), "linear_num_key_heads = 2 is not divisible"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: tuple[str, ...], said: str) -> None:
    launch, _ = compose([*MODEL, *arguments])
    config = composition.decoder_config(launch)
    with pytest.raises(Refusal, match=said):
        preflight.layouts(config, launch)
        preflight.states(config, launch)


def test_the_native_arm_says_what_it_cannot() -> None:
    launch, _ = compose(["+exec=native", "model=tiny_hybrid"])
    with pytest.raises(Refusal, match="model.dtype=float32 with exec=native: vLLM's gated delta rule"):
        preflight.layouts(preflight.planned(launch), launch)


def test_a_wrong_field_of_the_shape_is_refused() -> None:
    launch, _ = compose([*MODEL, "+model.shape.more.linear_num_kee_heads=2"])
    with pytest.raises(Refusal, match="model.shape: .*linear_num_kee_heads"):
        preflight.planned(launch)


def test_a_field_of_the_shape_has_one_value() -> None:
    launch, _ = compose([*MODEL, "+model.shape.more.hidden_size=64"])
    with pytest.raises(Refusal, match="more.hidden_size=64 beside 128 of the shape; leave it out"):
        preflight.planned(launch)


def test_the_common_beginning_fills_a_page() -> None:
    """Twelve solved problems before every one: longer than a page, within the limit, and read back as written."""
    launch, cfg = compose([*MODEL])
    before = context(launch.task.shots, split(2, launch.task.held_out_one_in)[0])
    ids = encode(before)
    assert before.count(EOS) == 12 and len(ids) > launch.runtime.page_size
    assert len(ids) + len("99+99=") <= cfg.trainer.max_prompt_length
    assert build_tokenizer().encode(before + "1+2=", add_special_tokens=False) == [*ids, *encode("1+2=")]
