"""What one choice means in the hosts' own settings, and that a user's setting cannot undo it unseen."""

import dataclasses
from pathlib import Path

import pytest

from skyrl_isoexec.launch.assemble import assemble
from skyrl_isoexec.launch.compose import compose
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
ENGINE = "++generator.inference_engine.engine_init_kwargs"


def test_both_sides_get_one_schedule(tmp_path: Path) -> None:
    launch, cfg = compose(["+exec=isoexec", "topology=trainer_tp2", f"run_dir={tmp_path / 'run'}"])
    assemble(launch, cfg, tmp_path, MODEL)
    trainer = cfg.trainer.policy.megatron_config.model_config_kwargs["isoexec"]
    engine = cfg.generator.inference_engine.engine_init_kwargs["additional_config"]["isoexec"]
    assert trainer["schedule"] == engine["schedule"] and trainer["kernels"] == engine["kernels"]
    assert engine["schedule"]["num_leaves"] == 2


@pytest.mark.parametrize("override", ["dtype=bfloat16", "logprobs_mode=raw_logprobs"])
def test_engine_arguments_that_decide_bits_are_refused(tmp_path: Path, override: str) -> None:
    launch, cfg = compose(["+exec=isoexec", f"{ENGINE}.{override}", f"run_dir={tmp_path / 'run'}"])
    with pytest.raises(ValueError, match=f"engine_init_kwargs.{override.split('=')[0]}"):
        assemble(launch, cfg, tmp_path, MODEL)


def test_a_users_folder_for_checkpoints_is_kept(tmp_path: Path) -> None:
    launch, cfg = compose(["+exec=isoexec", f"trainer.ckpt_path={tmp_path / 'mine'}", f"run_dir={tmp_path / 'run'}"])
    assemble(launch, cfg, tmp_path, MODEL)
    assert cfg.trainer.ckpt_path == str(tmp_path / "mine")
    assert cfg.trainer.export_path == str(tmp_path / "run" / "export")


def test_a_cache_below_one_sequence_is_refused(tmp_path: Path) -> None:
    launch, cfg = compose(["+exec=isoexec", "runtime.kv_cache_mib=1", f"run_dir={tmp_path / 'run'}"])
    long = dataclasses.replace(MODEL, max_position=2**16)
    with pytest.raises(ValueError, match="runtime.kv_cache_mib=1"):
        assemble(launch, cfg, tmp_path, long)
