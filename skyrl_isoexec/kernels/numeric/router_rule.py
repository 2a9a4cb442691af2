"""How a router turns its logits into experts and weights: plain data, the same for every implementation."""

from __future__ import annotations

import math
from dataclasses import dataclass

SCORINGS = ("sigmoid", "softmax")


@dataclass(frozen=True, kw_only=True)
class RouterRule:
    """The rule of one model. Sources: Qwen3MoeConfig, Qwen3_5MoeTextConfig and Glm4MoeLiteConfig of transformers."""

    scoring: str
    """"softmax" over all experts, or "sigmoid" of each."""
    renormalise: bool
    """Whether the chosen scores are divided by their sum (norm_topk_prob)."""
    scale: float = 1.0
    """What every weight is multiplied by in the end (routed_scaling_factor)."""
    num_groups: int = 1
    """Equal groups of neighbouring experts (n_group); 1: there is no limit by groups."""
    groups_kept: int = 1
    """Groups from which experts may be chosen (topk_group), by the sum of the two best scores of each."""
    eps: float = 0.0
    """Added to the sum that renormalises: 1e-20 where scores may all be 0."""

    def __post_init__(self) -> None:
        if self.scoring not in SCORINGS:
            raise ValueError(f"RouterRule.scoring = {self.scoring!r} is none of {SCORINGS}")
        if type(self.renormalise) is not bool:
            raise ValueError(f"RouterRule.renormalise = {self.renormalise!r} is neither True nor False")
        for name, least in (("scale", "above 0"), ("eps", "0 or above")):
            value = getattr(self, name)
            fits = type(value) is float and math.isfinite(value) and value >= 0 and (value > 0 or name == "eps")
            if not fits:
                raise ValueError(f"RouterRule.{name} = {value!r} is not a finite float {least}")
        for name in ("num_groups", "groups_kept"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"RouterRule.{name} = {value!r} is not a positive integer")
        if self.groups_kept > self.num_groups:
            raise ValueError(f"RouterRule.groups_kept = {self.groups_kept} is more than num_groups = {self.num_groups}")
        if self.num_groups > 1 and self.scoring != "sigmoid":
            raise ValueError(
                f"RouterRule.num_groups = {self.num_groups} with scoring = {self.scoring!r}: the limit by groups is "
                "defined for 'sigmoid' alone"
            )
        if self.renormalise and self.scoring == "sigmoid" and not self.eps:
            raise ValueError("RouterRule.eps = 0.0 with scoring = 'sigmoid': all chosen scores may be 0; give it 1e-20")
        if self.eps and not self.renormalise:
            raise ValueError(f"RouterRule.eps = {self.eps!r} has no effect with renormalise = False; leave it 0.0")
