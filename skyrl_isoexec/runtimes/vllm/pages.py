"""How many bytes a page of the cache takes, and how many tokens it has to hold in a hybrid.

vLLM has one pool of pages of one size. A page of keys and values grows with its tokens, a page of recurrent states does
not: so pages must hold at least as many tokens as make them large enough for states, which are then padded. Otherwise
vLLM would choose another size itself. Needs no vLLM.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from skyrl_isoexec.kernels.bundle import FORMS, Kernels, choose, load_kernels
from skyrl_isoexec.kernels.numeric.gdn_checks import StateShapes
from skyrl_isoexec.model.config import DecoderConfig
from skyrl_isoexec.model.layers import TORCH_DTYPES
from skyrl_isoexec.model.sequences import gdn_heads
from skyrl_isoexec.schedule import Schedule


def state_kernels(impls: str | Mapping[str, str], schedule: Schedule) -> Kernels:
    """Of the operators named as for `load_kernels` only the one with states, for a process that computes nothing."""
    return load_kernels({op: file for op, file in choose(impls).items() if FORMS.get(op, op) == "gdn"}, schedule)


def state_shapes(config: DecoderConfig, tp: int, kernels: Kernels) -> StateShapes:
    """(shape, dtype) of each state in one page of one layer of one of `tp` ranks."""
    return kernels.gdn_states(gdn_heads(config, tp), config.linear_conv_kernel_dim, TORCH_DTYPES[config.dtype])


def state_bytes(config: DecoderConfig, tp: int, kernels: Kernels) -> int:
    """Bytes of the states in one page of one layer."""
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in state_shapes(config, tp, kernels))


def token_bytes(config: DecoderConfig, tp: int) -> int:
    """Bytes of one token's keys and values in one layer; a latent key has its value, and is whole on every rank."""
    entries = config.latent_width if config.latent else 2 * (config.num_kv_heads // tp) * config.head_dim
    return entries * TORCH_DTYPES[config.dtype].itemsize


def hybrid_page_size(config: DecoderConfig, tp: int, kernels: Kernels) -> int:
    """Tokens of the smallest page that is whole chunks and softmax blocks, and large enough for states."""
    unit = math.lcm(kernels.schedule.gdn_chunk, kernels.schedule.kv_block)
    return unit * _cdiv(state_bytes(config, tp, kernels), unit * token_bytes(config, tp))


def groups(config: DecoderConfig) -> tuple[int, int, int]:
    """(layers of a group, groups of attention layers, groups of recurrent layers), as vLLM makes them.

    A page of the pool belongs to one group, for all of its layers.
    """
    attending = sum(config.attends(layer) for layer in range(config.num_layers))
    recurrent = config.num_layers - attending
    small, large = sorted((attending, recurrent))
    if not small:
        return large, int(attending > 0), int(recurrent > 0)
    size = large if large < 1.5 * small else small
    return size, _cdiv(attending, size), _cdiv(recurrent, size)


def page_bytes(config: DecoderConfig, tp: int, page_size: int) -> int:
    """Bytes of one page of the pool, of `page_size` tokens."""
    return groups(config)[0] * token_bytes(config, tp) * page_size


def pages_of_sequence(config: DecoderConfig, page_size: int, length: int, prefix_caching: bool) -> int:
    """Pages that vLLM wants to have for one sequence of `length` tokens; the pool has one more, which is nobody's."""
    _, attention, recurrent = groups(config)
    pages = _cdiv(length, page_size)
    return attention * pages + recurrent * (pages if prefix_caching else 1)


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)
