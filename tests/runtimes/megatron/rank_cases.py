"""What the ranks of a test are: their models, layouts and inputs."""

from collections.abc import Sequence

import torch

DENSE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 32,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": True,
}
HYBRID = DENSE | {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "full_attention_interval": 4,
    "partial_rotary_factor": 0.5,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 4,
    "linear_conv_kernel_dim": 4,
    "tie_word_embeddings": False,
}
MOE = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "norm_topk_prob": True,
}
LATENT = {name: value for name, value in DENSE.items() if name != "head_dim"} | {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "model_type": "glm4_moe_lite",
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "n_group": 2,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.8,
    "tie_word_embeddings": False,
}
MODELS = {"dense": DENSE, "hybrid": HYBRID, "latent": LATENT, "moe": MOE}
"""Configurations. The stages at pp2 are, of a hybrid, two delta rules, and one with an attention; of the latent one, a
dense layer and one with experts, and two with experts."""
LAYOUTS = {
    "single": (1, 1, 1, 1),
    "tp2": (2, 1, 1, 2),
    "pp2": (1, 2, 1, 2),
    "dp2": (1, 1, 1, 2),
    "ep2": (1, 1, 2, 2),
    "tp2ep2": (2, 1, 2, 4),
    "reshard": (2, 1, 1, 4),
    "redeal": (1, 1, 2, 4),
}
"""Tensor-, pipeline- and expert-parallel size, number of ranks. With ep2 experts are cut over the two replicas, with
tp2ep2 over the two tensor ranks of each, so that two ranks hold the same ones."""
REPLICATED = ("dp2", "ep2", "tp2ep2")
"""Layouts of two data-parallel replicas, each of which trains on its own half of a batch."""
CASES = [
    "dense-single-float32",
    "dense-single-bfloat16",
    "dense-tp2-float32",
    "dense-tp2-bfloat16",
    "dense-pp2-float32",
    "dense-dp2-float32",
    "hybrid-single-float32",
    "hybrid-tp2-bfloat16",
    "hybrid-pp2-float32",
    "moe-single-float32",
    "moe-tp2-float32",
    "moe-ep2-bfloat16",
    "moe-tp2ep2-float32",
    "latent-tp2-bfloat16",
    "latent-pp2-float32",
]
RESHARDS = {
    "hybrid-reshard-float32": ((2, 1), (1, 1), (4, 1)),
    "latent-reshard-float32": ((2, 1), (1, 1), (4, 1)),
    "moe-redeal-float32": ((1, 2), (1, 1), (2, 4)),
}
"""Case -> tensor- and expert-parallel sizes: of those who save, then of those who load."""
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
ROWS, LENGTH, VOCABULARY, LEAVES, CHUNK = 4, 36, 32, 4, 16
RAGGED = (31, 32, 33, 5)
"""Lengths of the sequences that are padded, and packed: around the end of a chunk."""
Micro = tuple[torch.Tensor, Sequence[int] | None]
"""Token ids, and, if they are packed sequences, where those start and end."""


def batches() -> list[torch.Tensor]:
    """Two micro-batches of token ids [2, LENGTH]."""
    generator = torch.Generator().manual_seed(3)
    return list(torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator).split(2))


def sequences() -> list[torch.Tensor]:
    """The batches' rows, cut to their lengths."""
    return [row[:length] for row, length in zip(torch.cat(batches()), RAGGED, strict=True)]


def padded(token: int) -> torch.Tensor:
    """The sequences [ROWS, LENGTH], left-aligned, each followed by that token."""
    ids = torch.full((ROWS, LENGTH), token)
    for row, sequence in zip(ids, sequences(), strict=True):
        row[: len(sequence)] = sequence
    return ids


def packed() -> Micro:
    """The sequences end to end [1, T], each padded to a multiple of four."""
    whole = [torch.nn.functional.pad(sequence, (0, -len(sequence) % 4), value=9) for sequence in sequences()]
    bounds = [0, *torch.tensor([len(one) for one in whole]).cumsum(0).tolist()]
    return torch.cat(whole)[None], bounds
