"""A mixture of experts in the place of the MLP: router, experts, and an expert that every token has.

Parameters have the names of Hugging Face's Qwen3_5MoeSparseMoeBlock and Glm4MoeLiteMoE (transformers 5.8.0), which name
the shared expert differently. A rank has neighbouring experts, an equal number each, and there are two ways to them.
There is never a sum over ranks: -0 stays -0, and a token's outputs are added in ascending order of experts, whoever
computed them.

- Rows gathered, in an engine: experts are cut over the tensor-parallel axis, whose ranks have the same tokens. Each
  computes the rows of its own experts, and takes each other row from the rank that owns it. The host sees no count, so
  a step can be captured.
- Rows travelling, in a trainer: experts are cut over an axis of their own, also over ranks that have other tokens.
  Tensor-parallel ranks share their tokens out; each token's rows go to the owners of its experts and come back, and
  only the sums are gathered. Each expert's row is computed once.

Shapes: T tokens, H hidden, E experts, K of them for a token, S = T K rows sorted by expert, F features of an expert.
"""

from __future__ import annotations

import torch
from torch import nn

from skyrl_isoexec.kernels.numeric.router_rule import RouterRule
from skyrl_isoexec.model.config import DecoderConfig
from skyrl_isoexec.model.families import lookup
from skyrl_isoexec.model.layers import ColumnLinear, Place, parameter
from skyrl_isoexec.model.mlp import MLP
from skyrl_isoexec.model.shard import Shard
from skyrl_isoexec.model.travel import Travel


def router_rule(config: DecoderConfig) -> RouterRule:
    """How a model turns logits into experts and weights. ValueError names what does not go together."""
    return RouterRule(
        scoring=config.router_scoring,
        renormalise=config.router_renormalise,
        scale=config.router_scale,
        num_groups=config.router_groups,
        groups_kept=config.router_groups_kept,
        eps=config.router_eps,
    )


class MoE(nn.Module):
    """Router and experts of one layer, with linears without biases; the router is whole on every rank.

    The bias of a router chooses, and no weight depends on it: it is fp32 whatever the dtype, and has no gradient.
    """

    def __init__(self, config: DecoderConfig, place: Place) -> None:
        super().__init__()
        hidden, width, num_experts = config.hidden_size, config.moe_intermediate_size, config.num_experts
        shared = config.shared_expert_intermediate_size
        self.gate = ColumnLinear(hidden, num_experts, False, place, shard=Shard())
        if config.router_bias:
            bias = parameter((num_experts,), Shard(), place, dtype=torch.float32, trained=False)
            self.gate.e_score_correction_bias = bias
        self.experts = nn.Module()
        self.experts.gate_up_proj = parameter((num_experts, 2 * width, hidden), place.cut_experts(), place)
        self.experts.down_proj = parameter((num_experts, hidden, width), place.cut_experts(), place)
        self.shared_name = lookup(config.family).shared_expert
        if shared is not None:
            self.add_module(self.shared_name, MLP(hidden, shared, place))
        gated = config.shared_expert_gate
        self.shared_expert_gate = ColumnLinear(hidden, 1, False, place, shard=Shard()) if gated else None
        self.rule, self.top_k, self.num_experts, self.place = (
            router_rule(config),
            config.num_experts_per_tok,
            num_experts,
            place,
        )

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        """y_TH, whole on every rank of the tensor-parallel axis."""
        kernels, axis = self.place.kernels, self.place.axis
        weights_TK, experts_TK = self.route(self.gate(x_TH, torch.float32))
        shared_TH = self._shared(x_TH)
        if self.place.expert_axis is not None:
            given = (x_TH, weights_TK, experts_TK, shared_TH)
            shares = [None if whole is None else axis.scatter_rows(whole) for whole in given]
            return axis.gather_rows(self._travelling(*shares), len(x_TH))
        order_S, starts_E1 = kernels.dispatch(experts_TK, self.num_experts)
        own_SH = self._own_rows(kernels.expand(axis.copy_in(x_TH), order_S), starts_E1)
        y_SH = self._rows_of_all(own_SH, experts_TK.flatten()[order_S])
        return kernels.combine(y_SH, order_S, weights_TK, shared_TH)

    def _travelling(
        self, x_TH: torch.Tensor, weights_TK: torch.Tensor, experts_TK: torch.Tensor, shared_TH: torch.Tensor | None
    ) -> torch.Tensor:
        """y_TH of tokens that are this rank's alone. Collective over the expert-parallel axis."""
        kernels, axis = self.place.kernels, self.place.expert_axis
        order_S, starts_E1 = kernels.dispatch(experts_TK, self.num_experts)
        x_SH = kernels.expand(x_TH, order_S)
        if axis.size == 1:
            y_SH = self._rows(x_SH, starts_E1)
        else:
            travel = Travel(axis, starts_E1, kernels.expand)
            y_SH = travel.back(self._rows(travel.out(x_SH), travel.starts_F1))
        return kernels.combine(y_SH, order_S, weights_TK, shared_TH)

    def route(self, logits_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(fp32 weights [T, K], int32 experts [T, K], ascending) of fp32 logits."""
        bias_E = getattr(self.gate, "e_score_correction_bias", None)
        return self.place.kernels.route(logits_TE, self.top_k, self.rule, bias_E)

    def _own_rows(self, x_SH: torch.Tensor, starts_E1: torch.Tensor) -> torch.Tensor:
        """y_SH of this rank's experts among rows of all; those of others are +0."""
        num_own = self.experts.down_proj.shape[0]
        first = self.place.axis.rank * num_own
        return self._rows(x_SH, starts_E1[first : first + num_own + 1])

    def _rows(self, x_SH: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """y_SH of this rank's experts, whose rows begin at `starts`; rows of nobody are +0."""
        kernels, weights = self.place.kernels, self.experts
        gate_SF, up_SF = kernels.grouped_linear(x_SH, weights.gate_up_proj, starts).chunk(2, dim=1)
        return kernels.grouped_linear(kernels.silu_mul(gate_SF, up_SF), weights.down_proj, starts)

    def _rows_of_all(self, own_SH: torch.Tensor, expert_S: torch.Tensor) -> torch.Tensor:
        """y_SH, each row from the rank that has its expert."""
        axis = self.place.axis
        if axis.size == 1:
            return own_SH
        owner_S = torch.div(expert_S, self.num_experts // axis.size, rounding_mode="floor").long()
        return axis.stack_gather(own_SH)[owner_S, torch.arange(len(owner_S), device=owner_S.device)]

    def _shared(self, x_TH: torch.Tensor) -> torch.Tensor | None:
        """Output of the expert that every token has, if there is one."""
        shared = getattr(self, self.shared_name, None)
        if shared is None:
            return None
        y_TH = shared(x_TH)
        gate = self.shared_expert_gate
        return y_TH if gate is None else self.place.kernels.sigmoid_mul(y_TH, gate(x_TH))
