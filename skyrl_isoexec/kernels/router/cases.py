"""Inputs on which a router is proved: (logits, top_k, rule, bias) by name, and how often each hazard is in them."""

import torch
from torch import Tensor

from skyrl_isoexec.kernels.numeric.inputs import normal
from skyrl_isoexec.kernels.numeric.router_rule import RouterRule

SOFTMAX = RouterRule(scoring="softmax", renormalise=True)
RAW = RouterRule(scoring="softmax", renormalise=False, scale=2.5)
SIGMOID = RouterRule(scoring="sigmoid", renormalise=True, eps=1e-20, scale=1.8)
GROUPS = RouterRule(scoring="sigmoid", renormalise=True, eps=1e-20, scale=1.8, num_groups=4, groups_kept=2)
Case = tuple[Tensor, int, RouterRule, Tensor | None]


def steps(seed: int, *shape: int) -> Tensor:
    """Multiples of a quarter from -1 to 1, both zeros among them: rows in which many are equal."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-4, 5, shape, generator=generator) / 4.0
    return torch.where((x == 0) & (torch.arange(shape[-1]) % 2 == 0), -0.0, x)


def cases() -> dict[str, Case]:
    """Odd numbers of experts, every rule, ties, scores that tie where logits do not, tails, infinities, no rows."""
    made: dict[str, Case] = {}
    for size, top_k in ((1, 1), (5, 2), (17, 7), (60, 4), (256, 8)):
        for name, rule in (("softmax", SOFTMAX), ("raw", RAW), ("sigmoid", SIGMOID)):
            made[f"{name} {size}"] = (normal(size, 40, size, scale=2.0), top_k, rule, None)
    bias = normal(3, 64, scale=0.1)
    made["bias"] = (normal(1, 40, 64), 4, SIGMOID, bias)
    made["groups"] = (normal(2, 40, 64), 4, GROUPS, bias)
    made["odd groups"] = (normal(4, 40, 60), 8, GROUPS, normal(5, 60))
    for name, rule in (("softmax", SOFTMAX), ("sigmoid", SIGMOID), ("groups", GROUPS)):
        made[f"{name} ties"] = (steps(6, 60, 20), 4, rule, None)
    made["groups and bias ties"] = (torch.zeros(60, 20), 3, GROUPS, steps(8, 20))
    made["saturated"] = (normal(9, 60, 24, scale=20.0), 6, SIGMOID, None)
    made["softmax tails"] = (normal(10, 60, 12, scale=40.0), 8, SOFTMAX, None)
    made["sigmoid tails"] = (-95.0 + normal(11, 60, 12, scale=6.0), 6, SIGMOID, None)
    masked = normal(12, 40, 12)
    masked[:, ::2] = float("-inf")
    made["masked softmax"] = (masked, 7, SOFTMAX, None)
    made["masked sigmoid"] = (-masked, 7, SIGMOID, None)
    made["barred"] = (normal(13, 40, 16), 8, GROUPS, torch.where(torch.arange(16) % 5 < 2, float("-inf"), 0.0))
    made["no rows"] = (torch.zeros(0, 8), 2, SOFTMAX, None)
    return made
