"""Trains the tiny base checkpoint by supervision: a transformers model, AdamW, one thread, a fixed number of steps.

What must stay equal: the same settings give the same checkpoint on the same machine, because nothing here depends on
time, on the number of cores or on earlier work of the process. The labels are smoothed: the model then knows more than
it is sure of, and reinforcement learning has something to sharpen.

B problems of a batch, T positions.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from skyrl_isoexec.launch.config import RecipeConfig, ShapeConfig, TaskConfig
from skyrl_isoexec.launch.task.problems import Problem, context, split
from skyrl_isoexec.launch.task.tokenizer import BOS, EOS, IDS, PAD, SYMBOLS, encode, save_tokenizer

IGNORED = -100
"""Label of the positions that are not learnt: the problem itself, and padding."""
SHORT_CHUNK = 16
"""Rows of a chunk of transformers' gated delta rule, in place of 64."""
ROUTER_BIAS = 0.05
"""Largest bias of a router's choice; no gradient reaches it, so it stays as it is made here."""

Progress = Callable[[str], None]


def train_base(shape: ShapeConfig, task: TaskConfig, folder: Path, progress: Progress) -> None:
    """Train and write a complete Hugging Face checkpoint, tokenizer included, into the existing `folder`."""
    with single_thread():
        train, held_out = split(task.digits, task.held_out_one_in)
        started = time.monotonic()
        torch.manual_seed(task.base.seed)
        model = build_model(shape)
        fit(model, train, task, progress)
        seconds = time.monotonic() - started
        before = context(task.shots, train)
        asked = [Problem(prompt=before + row.prompt, answer=row.answer) for row in held_out[:: 1 + task.shots]]
        sampled, greedy = accuracy(model, asked, temperature=1.0), accuracy(model, asked, temperature=0.0)
    progress(f"base checkpoint: {sampled:.0%} of held-out answers right when sampled, {greedy:.0%} greedily")
    save(model, folder)
    facts = {"settings": asdict(task), "sampled": sampled, "greedy": greedy, "seconds": round(seconds, 1)}
    (folder / "base.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


@contextmanager
def single_thread() -> Iterator[None]:
    """One thread of arithmetic: as fast for a model of this size, and the same sums on every machine of a kind."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def build_model(shape: ShapeConfig) -> PreTrainedModel:
    """transformers' own class of the family with random weights, in float32."""
    tokens = {"pad_token_id": IDS[PAD], "eos_token_id": IDS[EOS], "bos_token_id": IDS[BOS]}
    config = AutoConfig.for_model(**shape.fields(len(SYMBOLS)), **tokens)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for module in model.modules():
        if hasattr(module, "chunk_gated_delta_rule"):  # its loop over the rows of a chunk is what takes the time
            module.chunk_gated_delta_rule = partial(module.chunk_gated_delta_rule, chunk_size=SHORT_CHUNK)
        if hasattr(module, "e_score_correction_bias"):
            bias = module.e_score_correction_bias
            bias.copy_(torch.linspace(-ROUTER_BIAS, ROUTER_BIAS, len(bias)))
    return model


def batch(rows: list[list[Problem]]) -> tuple[Tensor, Tensor]:
    """(token ids, labels), each int64 [B, T], of rows of solved problems; padded on the right to the longest row."""
    ids: list[list[int]] = []
    labels: list[list[int]] = []
    for row in rows:
        ids.append([])
        labels.append([])
        for problem in row:
            asked, answered = encode(problem.prompt), [*encode(problem.answer), IDS[EOS]]
            ids[-1] += asked + answered
            labels[-1] += [IGNORED] * len(asked) + answered
    width = max(map(len, ids))
    ids_BT = torch.tensor([row + [IDS[PAD]] * (width - len(row)) for row in ids])
    labels_BT = torch.tensor([row + [IGNORED] * (width - len(row)) for row in labels])
    return ids_BT, labels_BT


def fit(model: PreTrainedModel, rows: list[Problem], task: TaskConfig, progress: Progress) -> None:
    """Train `model` in place for `task.base.steps` steps; where a task has shots, on rows of so many problems more."""
    recipe, in_row = task.base, 1 + task.shots
    generator = torch.Generator().manual_seed(recipe.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=(0.9, 0.98), weight_decay=0.01)
    started = time.monotonic()
    for step in range(1, recipe.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(recipe, step)
        chosen = torch.randint(len(rows), (recipe.batch_size, in_row), generator=generator)
        ids_BT, labels_BT = batch([[rows[i] for i in row] for row in chosen.tolist()])
        logits = model(input_ids=ids_BT[:, :-1], use_cache=False).logits
        loss = functional.cross_entropy(
            logits.flatten(0, 1),
            labels_BT[:, 1:].flatten(),
            ignore_index=IGNORED,
            label_smoothing=recipe.label_smoothing,
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0 or step == recipe.steps:
            progress(f"base checkpoint: step {step}/{recipe.steps}, loss {loss.item():.3f}, {_since(started)}")


def learning_rate(recipe: RecipeConfig, step: int) -> float:
    """The rate of step 1, 2, ...: a linear rise over the warm-up, then constant."""
    return recipe.lr * min(1.0, step / max(1, recipe.warmup_steps))


@torch.no_grad()
def accuracy(model: PreTrainedModel, rows: list[Problem], *, temperature: float, seed: int = 0) -> float:
    """Share of `rows` answered exactly right, sampled at `temperature` (0 is greedy) with a seed of its own."""
    generator = torch.Generator().manual_seed(seed)
    right = 0
    for length in sorted({len(encode(row.prompt)) for row in rows}):
        group = [row for row in rows if len(encode(row.prompt)) == length]
        ids_BT = torch.tensor([encode(row.prompt) for row in group])
        for _ in range(max(len(row.answer) for row in group) + 1):
            logits = model(input_ids=ids_BT, use_cache=False).logits[:, -1]
            if temperature == 0:
                chosen = logits.argmax(-1, keepdim=True)
            else:
                chosen = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            ids_BT = torch.cat([ids_BT, chosen], dim=1)
        for row, ids in zip(group, ids_BT[:, length:].tolist(), strict=True):
            wanted = [*encode(row.answer), IDS[EOS]]
            right += ids[: len(wanted)] == wanted
    return right / len(rows)


def save(model: PreTrainedModel, folder: Path) -> None:
    """Write weights (without a tied head), configuration and tokenizer."""
    model.config.architectures = [type(model).__name__]
    model.config.to_json_file(folder / "config.json", use_diff=False)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    save_tokenizer(folder)


def _since(started: float) -> str:
    return f"{time.monotonic() - started:.0f} s"
