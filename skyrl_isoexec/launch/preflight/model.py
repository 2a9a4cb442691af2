"""The checkpoint's files, and whether its model fits the layout, the lengths and the kernels that were asked for."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from skyrl.utils.tok import get_tokenizer

from ...kernels.attention.spec import kv_cache_shape
from ...model.checkpoint import CONFIG, INDEX, SINGLE, read_config
from ...model.config import DecoderConfig, check_partition
from ...model.families import from_hf, lookup
from ...model.families.base import Family
from ...model.pieces import Pieces
from ...model.weights import HEAD_NAME, layout
from ...runtimes.megatron.router import check_router
from ...runtimes.vllm.pages import hybrid_page_size, pages_of_sequence, state_kernels
from ..composition import GDN
from ..config import LaunchConfig
from ..links import MEGATRON
from ..task.tokenizer import SYMBOLS
from .refusal import Refusal

ENGINE = "generator.inference_engine"
GIVE = "give a Hugging Face checkpoint folder with config.json, safetensors and a tokenizer"
LARGEST = 50 * 10**6
"""Parameters of a base checkpoint that is still trained in minutes on a CPU."""
NATIVE_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes of vLLM's own attention on a CPU."""


def planned(launch: LaunchConfig) -> DecoderConfig:
    """The configuration of the base checkpoint that `model.shape` describes, known before it is trained."""
    shape = launch.model.shape
    assert shape is not None
    try:
        config = from_hf(shape.fields(len(SYMBOLS)), dtype=launch.model.dtype)
    except (ValueError, TypeError) as error:
        raise Refusal(f"model.shape: {error}; mend the shape") from error
    inner = (config.intermediate_size or 0) + (config.num_experts or 0) * (config.moe_intermediate_size or 0)
    size = config.num_layers * config.hidden_size * (4 * config.num_heads * config.head_dim + 3 * inner)
    if size > LARGEST:
        raise Refusal(
            f"model.shape has about {size // 10**6} million parameters, and up to {LARGEST // 10**6} are trained here; "
            "lower its sizes, or name a checkpoint with model.path"
        )
    return config


def checkpoint(folder: Path, *, dtype: str, key: str = "model.path") -> DecoderConfig:
    """The decoder's configuration, after every tensor's presence and shape was read from the files' headers."""
    if not folder.is_dir():
        raise Refusal(f"{key}={folder} is not a folder; {GIVE}")
    if not (folder / CONFIG).is_file():
        raise Refusal(f"{key}={folder} has no {CONFIG}; {GIVE}")
    try:
        fields = read_config(folder)
        if not isinstance(fields, dict):
            raise ValueError("not a JSON object")
        config = from_hf(fields, dtype=dtype)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Refusal(f"{key}={folder}: {CONFIG}: {error}; mend the file, or give another checkpoint") from error
    expected = layout(config)
    found, problems, begun = _whole(folder, lookup(config.family), config.num_layers, expected)
    for name, shape in expected.items():
        if name in begun:
            problems.append(f"tensor {begun[name]} is missing")
        elif name not in found:
            problems.append(f"tensor {name} is missing (shape {shape} by config.json)")
        elif found[name] != shape:
            problems.append(f"tensor {name} has shape {found[name]}, config.json gives {shape}")
    for name in sorted(found.keys() - expected.keys()):
        if not (config.tied_head and name == HEAD_NAME):
            problems.append(f"tensor {name} is not part of this model")
    if problems:
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise Refusal(f"checkpoint {folder}: {shown}; mend the checkpoint, or give another one")
    return config


def _whole(
    folder: Path, family: Family, num_layers: int, expected: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, tuple[int, ...]], list[str], dict[str, str]]:
    """(shapes of whole tensors, problems with those of single experts, whole tensor -> what is missing of it)."""
    found: dict[str, tuple[int, ...]] = {}
    pieces = Pieces(family, expected)
    for given, shape in _shapes(folder).items():
        if family.reason(given, num_layers) is not None:
            continue
        added = pieces.add(family.own_name(given), torch.empty(shape, device="meta"))
        if added is not None and added[0] in found:
            pieces.problems.append(f"{given} was given twice")
        elif added is not None:
            found[added[0]] = tuple(added[1].shape)
    return found, [f"tensor {problem}" for problem in pieces.problems], pieces.missing()


def _files(folder: Path) -> list[str]:
    single, index = (folder / SINGLE).exists(), (folder / INDEX).exists()
    if single and index:
        raise Refusal(f"checkpoint {folder} has both {SINGLE} and {INDEX}; remove the one that does not belong to it")
    if single:
        return [SINGLE]
    if not index:
        raise Refusal(f"checkpoint {folder} has neither {SINGLE} nor {INDEX}; convert the weights to safetensors")
    try:
        return sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Refusal(f"checkpoint file {folder / INDEX} is no index ({error!r}); copy it again") from error


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for file in _files(folder):
        try:
            with safe_open(folder / file, framework="pt") as handle:
                for name in handle.keys():  # noqa: SIM118
                    shapes[name] = tuple(handle.get_slice(name).get_shape())
        except Exception as error:
            raise Refusal(f"checkpoint file {folder / file} cannot be read: {error}; copy it again") from error
    return shapes


def tokenizer(folder: Path, config: DecoderConfig, *, use_fast: bool = True) -> Any:
    """SkyRL's tokenizer of the checkpoint; refuses one that can produce ids the model has no row for."""
    try:
        loaded = get_tokenizer(str(folder), use_fast=use_fast, padding_side="left")
    except Exception as error:
        said = " ".join(str(error).split())[:200]
        raise Refusal(f"the tokenizer in {folder} cannot be read ({said}); copy its files into the folder") from error
    if len(loaded) > config.vocab_size:
        raise Refusal(
            f"the tokenizer in {folder} has {len(loaded)} tokens, the model's vocab_size is {config.vocab_size}; "
            "give the tokenizer that belongs to the checkpoint"
        )
    return loaded


def pages(launch: LaunchConfig) -> None:
    """Refuse page and block sizes that the attention kernel does not take."""
    if launch.exec.name != "isoexec":
        return
    try:
        kv_cache_shape(1, launch.runtime.page_size, 1, 1, schedule=launch.schedule)
    except ValueError as error:
        raise Refusal(f"runtime.page_size, kernels.kv_block: {error}; choose a multiple") from error


def layouts(config: DecoderConfig, launch: LaunchConfig) -> None:
    """Refuse parallel degrees and a number of leaves that do not divide the model."""
    pp = launch.topology.trainer.pp
    if config.num_layers % pp:
        raise Refusal(
            f"topology.trainer.pp={pp} does not divide the model's {config.num_layers} layers; choose one that does"
        )
    if launch.exec.name == "native":
        _native(config, launch)
        return
    if config.num_layers // pp <= config.first_dense_layers:
        raise Refusal(
            f"topology.trainer.pp={pp} makes stages of {config.num_layers // pp} layers, and the model's first "
            f"{config.first_dense_layers} layers have no experts; choose a smaller degree"
        )
    ep = launch.topology.trainer.ep
    if ep > 1 and not config.has_experts:
        raise Refusal(
            f"topology.trainer.ep={ep}: every layer of this model is dense, and only experts are cut by it; set "
            "topology.trainer.ep=1"
        )
    try:
        check_partition(config, num_leaves=1, tp=1, ep=ep)
    except ValueError as error:
        raise Refusal(f"topology.trainer.ep={ep}: {error}; choose a degree that divides it, or 1") from error
    for side, experts in (("trainer", ep), ("engine", None)):
        degree = getattr(launch.topology, side).tp
        try:
            check_partition(config, num_leaves=degree, tp=degree, ep=experts)
        except ValueError as error:
            said = str(error).replace("schedule.num_leaves =", "tensor-parallel size")
            raise Refusal(f"topology.{side}.tp={degree}: {said}; choose a degree that divides it") from error
    leaves = launch.schedule.num_leaves
    try:
        check_partition(config, num_leaves=leaves, tp=1)
    except ValueError as error:
        said = str(error).replace("schedule.num_leaves", "kernels.num_leaves")
        raise Refusal(f"kernels.num_leaves={leaves}: {said}; choose a lower power of two, or null") from error


def router(config: DecoderConfig, launch: LaunchConfig, cfg: Any) -> None:
    """Refuse what SkyRL's and Megatron's settings ask of a router and our trainer does not compute."""
    if launch.exec.name != "isoexec":
        return
    for key in MEGATRON:
        settings: Any = cfg
        for name in key.split("."):
            settings = getattr(settings, name)
        try:
            check_router(config, {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)})
        except ValueError as error:
            raise Refusal(f"{key}.{error}") from error


def _native(config: DecoderConfig, launch: LaunchConfig) -> None:
    if config.has_experts:
        raise Refusal(
            f"exec=native with a model of family {config.family}: vLLM's own class takes each expert's matrices alone, "
            "and transformers' gives those of all experts in one tensor, so the trainer's weights would not load; nor "
            "does vLLM compute experts or latent attention on a CPU; choose exec=isoexec, or another model"
        )
    tp, heads, kv_heads = launch.topology.engine.tp, config.num_heads, config.num_kv_heads
    inner = config.intermediate_size
    if heads % tp or (kv_heads % tp and tp % kv_heads) or inner % tp:
        raise Refusal(
            f"topology.engine.tp={tp} does not divide the model (num_heads = {heads}, num_kv_heads = {kv_heads}, "
            f"intermediate_size = {inner}); choose a degree that divides it"
        )
    if launch.runtime.device == "cpu" and config.hybrid and config.dtype != "bfloat16":
        raise Refusal(
            f"model.dtype={config.dtype} with exec=native: vLLM's gated delta rule on a CPU takes bfloat16; choose it"
        )
    if launch.runtime.device == "cpu" and config.head_dim not in NATIVE_HEAD_DIMS:
        raise Refusal(
            f"the model's head_dim = {config.head_dim} with exec=native: vLLM's attention on a CPU takes "
            f"{', '.join(map(str, NATIVE_HEAD_DIMS))}; choose another model"
        )


def transport(config: DecoderConfig, launch: LaunchConfig) -> None:
    """Refuse to send tensors of several types by CUDA IPC: SkyRL's sender casts all to one."""
    by_ipc = launch.runtime.transport == "device" and launch.topology.colocate
    if by_ipc and config.router_bias and config.dtype != "float32":
        raise Refusal(
            f"runtime.transport=device with topology.colocate=true and model.dtype={config.dtype}: the model's router "
            "has a bias in float32, and CUDA IPC would send it rounded; set runtime.transport=gloo, or "
            "topology.colocate=false"
        )


def states(config: DecoderConfig, launch: LaunchConfig) -> None:
    """Refuse a page that does not hold whole chunks, or less than a page of recurrent states takes."""
    if not config.hybrid or launch.exec.name != "isoexec":
        return
    impls = {GDN[launch.kernels.gdn]: launch.kernels.impl}
    smallest = hybrid_page_size(config, launch.topology.engine.tp, state_kernels(impls, launch.schedule))
    if launch.runtime.page_size % smallest:
        raise Refusal(
            f"runtime.page_size={launch.runtime.page_size} with a model of gated delta rules: a page is whole chunks "
            f"and as large as a page of states; set it to {smallest} or a multiple"
        )


def widths(config: DecoderConfig, launch: LaunchConfig) -> None:
    """Refuse heads, blocks and partitions that the GPU's attention does not have."""
    if launch.exec.name != "isoexec" or launch.runtime.device != "cuda":
        return
    from ...kernels.attention import kernel as attention  # Triton's, for a GPU alone
    from ...kernels.mla import kernel as latent

    try:
        if config.latent:
            latent.check_order(launch.schedule, config.kv_lora_rank, config.latent_width)
        else:
            attention.check_order(launch.schedule, config.head_dim, config.num_heads // config.num_kv_heads)
    except ValueError as error:
        raise Refusal(f"kernels.impl={launch.kernels.impl}: {error}; choose what it has, or another model") from error


def runner(config: DecoderConfig, launch: LaunchConfig) -> None:
    """Refuse recurrent layers in a runner of vLLM that has no pages of states, and a choice that nobody reads."""
    if launch.runtime.runner == 1:
        return
    if launch.exec.name != "isoexec":
        raise Refusal(
            f"runtime.runner={launch.runtime.runner} is of our model's engine; with exec={launch.exec.name} vLLM "
            "chooses its runner itself: leave the key out"
        )
    if config.hybrid:
        raise Refusal(
            f"runtime.runner={launch.runtime.runner} has no pages of states, which the layers of family "
            f"{config.family} need; set runtime.runner=1"
        )


def cache(cfg: Any, config: DecoderConfig, launch: LaunchConfig) -> None:
    """Refuse fewer pages, where they were counted by hand, than one sequence of the longest kind takes."""
    engine = cfg.generator.inference_engine
    given = engine.engine_init_kwargs.get("num_gpu_blocks_override")
    if given is None or launch.exec.name != "isoexec":
        return
    longest = engine.engine_init_kwargs.get("max_model_len", config.max_position)
    needed = 1 + pages_of_sequence(config, launch.runtime.page_size, longest, engine.enable_prefix_caching)
    if given < needed:
        raise Refusal(
            f"{ENGINE}.engine_init_kwargs.num_gpu_blocks_override={given} is less than the {needed} pages of "
            f"{launch.runtime.page_size} tokens that a sequence of {longest} takes, with the one that is nobody's; "
            "raise it, or leave it out"
        )


def lengths(cfg: Any, config: DecoderConfig) -> None:
    """Refuse lengths that do not fit the model's positions, or the engine's own limit."""
    prompt, engine = cfg.trainer.max_prompt_length, cfg.generator.inference_engine
    limit = engine.engine_init_kwargs.get("max_model_len", config.max_position)
    if type(limit) is not int or not 0 < limit <= config.max_position:
        raise Refusal(
            f"{ENGINE}.engine_init_kwargs.max_model_len={limit} is not a number of tokens up to the model's "
            f"max_position_embeddings = {config.max_position}; set it to one"
        )
    for name in ("sampling_params", "eval_sampling_params"):
        longest = prompt + getattr(cfg.generator, name).max_generate_length
        bound = "max_position_embeddings" if limit == config.max_position else "max_model_len"
        if longest > limit:
            raise Refusal(
                f"trainer.max_prompt_length + generator.{name}.max_generate_length = {longest} is more than the "
                f"model's {bound} = {limit}; lower one of them"
            )


def scheduling(cfg: Any, device: str) -> None:
    """Refuse a budget of tokens or pages with which vLLM's scheduler does not start, and graphs on a CPU."""
    engine = cfg.generator.inference_engine
    if device == "cpu" and not engine.enforce_eager:
        raise Refusal(f"{ENGINE}.enforce_eager=false with runtime=cpu: a CPU captures no graphs; set it to true")
    pages = engine.engine_init_kwargs.get("num_gpu_blocks_override", 1)
    if type(pages) is not int or pages < 1:
        raise Refusal(f"{ENGINE}.engine_init_kwargs.num_gpu_blocks_override={pages} is not positive; leave it out")
    if engine.max_num_batched_tokens < engine.max_num_seqs:
        raise Refusal(
            f"{ENGINE}.max_num_batched_tokens={engine.max_num_batched_tokens} is below {ENGINE}.max_num_seqs="
            f"{engine.max_num_seqs}, and every sequence needs one token of a step; raise it, or lower max_num_seqs"
        )
