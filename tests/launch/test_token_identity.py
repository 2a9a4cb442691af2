"""What is trained are the ids that were sampled, also where their text would be read back as others."""

import asyncio
from itertools import pairwise
from typing import Any

import pytest
import skyrl_gym
from skyrl.train.generators.base import TrajectoryID
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from skyrl_isoexec.launch.compose import compose
from skyrl_isoexec.launch.experiment import Generator

LETTERS = "abcdefghijk"
MERGES = list(pairwise(LETTERS))
"""Ten pairs: two letters that were sampled as two ids are read back as one."""
SPECIAL = ("<pad>", "<eos>")
VOCABULARY = {symbol: index for index, symbol in enumerate((*SPECIAL, *LETTERS, *map("".join, MERGES)))}
EOS = VOCABULARY["<eos>"]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.BPE(VOCABULARY, MERGES))
    made.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return fast


class Answers:
    """Stands for the engines: answers with the given ids, one list a turn, and keeps what it was asked."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, turns: list[list[int]]) -> None:
        self.tokenizer, self.turns, self.asked = tokenizer, list(turns), []

    async def generate(self, question: dict[str, Any], model: str | None = None) -> dict[str, Any]:
        self.asked += [list(ids) for ids in question["prompt_token_ids"]]  # the caller goes on with its own
        ids = self.turns.pop(0)
        return {
            "responses": [self.tokenizer.decode(ids)],
            "response_ids": [ids],
            "stop_reasons": ["stop"],
            "response_logprobs": [[-0.5 - i for i in range(len(ids))]],
        }

    async def finish_session(self, session: str) -> None:
        """Nothing is held for a session."""


class Talk(BaseTextEnv):
    """As many turns as `extras` says; it answers with the letter a."""

    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.left = (extras or {})["turns_of_test"]

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.left -= 1
        said = [] if self.left == 0 else [{"role": "user", "content": "a"}]
        return BaseTextEnvStepOutput(observations=said, reward=1.0, done=self.left == 0, metadata={})


def generated(tokenizer: PreTrainedTokenizerFast, turns: list[list[int]]) -> tuple[dict[str, Any], Answers]:
    """(what SkyRL's trainer gets, the engines)."""
    if "test_talk" not in skyrl_gym.registry:
        skyrl_gym.register(id="test_talk", entry_point=f"{__name__}:Talk")
    _, cfg = compose(["+exec=isoexec", f"generator.max_turns={len(turns)}"])
    engines = Answers(tokenizer, turns)
    generator = Generator(cfg.generator, cfg.environment.skyrl_gym, engines, tokenizer)
    batch = {
        "prompts": [[{"role": "user", "content": "ka"}]],
        "env_classes": ["test_talk"],
        "env_extras": [{"turns_of_test": len(turns)}],
        "sampling_params": None,
        "trajectory_ids": [TrajectoryID(instance_id="0", repetition_id=0)],
        "batch_metadata": None,
    }
    return asyncio.run(generator.generate(batch)), engines


@pytest.mark.parametrize("pair", MERGES, ids="".join)
def test_ids_that_are_not_read_back(tokenizer: PreTrainedTokenizerFast, pair: tuple[str, str]) -> None:
    sampled = [VOCABULARY[letter] for letter in pair] + [EOS]
    assert tokenizer.encode(tokenizer.decode(sampled)) == [VOCABULARY["".join(pair)], EOS]
    found, _ = generated(tokenizer, [sampled])
    assert found["response_ids"] == [sampled] and found["loss_masks"] == [[1, 1, 1]]
    assert found["rollout_logprobs"] == [[-0.5, -1.5, -2.5]]


def test_a_second_turn_keeps_the_ids_of_the_first(tokenizer: PreTrainedTokenizerFast) -> None:
    """The engine is asked with, and the trainer gets, the ids that were sampled; what an environment says is masked."""
    first, second = ([VOCABULARY[letter] for letter in text] + [EOS] for text in ("bc", "de"))
    found, engines = generated(tokenizer, [first, second])
    prompt = [VOCABULARY["k"], VOCABULARY["a"]]
    assert engines.asked[0] == prompt and engines.asked[1][: len(prompt + first)] == prompt + first
    said = engines.asked[1][len(prompt + first) :]
    assert said and found["response_ids"] == [first + said + second]
    assert found["loss_masks"] == [[1] * len(first) + [0] * len(said) + [1] * len(second)]
    trained = [x for x, kept in zip(found["rollout_logprobs"][0], found["loss_masks"][0], strict=True) if kept]
    assert trained == [-0.5, -1.5, -2.5] * 2
