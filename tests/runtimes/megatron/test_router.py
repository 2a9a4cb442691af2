"""What Megatron's and SkyRL's settings may ask of a router, and what is refused by name."""

import dataclasses

import pytest
from megatron.core.transformer import TransformerConfig
from rank_cases import DENSE, LATENT
from skyrl.train.config.config import MegatronConfig

from skyrl_isoexec.model.families import from_hf
from skyrl_isoexec.runtimes.megatron.router import ALLOWED, check_router

MODELS = {"dense": from_hf(DENSE, dtype="float32"), "latent": from_hf(LATENT, dtype="float32")}
REFUSED = {
    "moe_token_dispatcher_type": "flex",
    "moe_grouped_gemm": False,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 1e-3,
    "moe_z_loss_coeff": 1e-3,
    "moe_input_jitter_eps": 0.1,
    "moe_expert_capacity_factor": 1.5,
    "moe_router_force_load_balancing": True,
    "moe_router_dtype": "fp64",
    "moe_enable_routing_replay": True,
    "moe_per_layer_logging": True,
    "freeze_moe_router": True,
    "mtp_num_layers": 1,
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "softmax",
}


@pytest.mark.parametrize("model", MODELS)
def test_the_defaults_of_skyrl_are_allowed(model) -> None:
    check_router(MODELS[model], dataclasses.asdict(MegatronConfig()))
    check_router(MODELS[model], {"recompute_granularity": "full"})


def test_names_are_fields_of_the_hosts() -> None:
    """A name that nobody has would refuse nothing."""
    known = {field.name for cls in (TransformerConfig, MegatronConfig) for field in dataclasses.fields(cls)}
    assert ALLOWED.keys() < REFUSED.keys() <= known


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_computed_is_refused(model, name) -> None:
    with pytest.raises(ValueError, match=f"{name} = {REFUSED[name]!r} is not supported by the unified model.*leave it"):
        check_router(MODELS[model], {name: REFUSED[name]})


def test_a_bias_cannot_be_switched_off() -> None:
    check_router(MODELS["dense"], {"moe_router_enable_expert_bias": False})
    check_router(MODELS["latent"], {"moe_router_score_function": "sigmoid"})
    with pytest.raises(ValueError, match="moe_router_enable_expert_bias = False.*never updated; leave it None"):
        check_router(MODELS["latent"], {"moe_router_enable_expert_bias": False})
