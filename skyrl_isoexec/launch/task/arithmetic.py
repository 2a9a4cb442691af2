"""Sums in words for a model with a chat template: its prompts, and the environment that reads a number in an answer.

The problems and their split are those of `problems.py`, so that a problem held out there is held out here.
"""

import json
import re
from pathlib import Path
from typing import Any

import skyrl_gym
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

from skyrl_isoexec.launch.config import TaskConfig
from skyrl_isoexec.launch.task.problems import Problem, split

ENV_ID = "arithmetic"
"""The name under which SkyRL-Gym makes this environment."""
NUMBER = re.compile(r"-?\d+")
ASKING = ("What is {}?", "{} = ?", "Compute {}.", "Add: {}.", "How much is {}?", "Find the sum {}.", "{} equals what?")
ENDINGS = (
    "Answer with the number only.",
    "Reply with just the number.",
    "Give only the number.",
    "Only the number, please.",
)
WORDINGS = tuple(f"{asking} {ending}" for ending in ENDINGS for asking in ASKING)
"""Ways to ask for a sum. With one alone an epoch would be three batches, and SkyRL refuses a batch of dynamic sampling
that meets a prompt twice."""


class ArithmeticEnv(BaseTextEnv):
    """A single answer to a single sum, in any words; `extras` are as of `env.AdditionEnv`."""

    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.answer = str((extras or {})["reward_spec"]["ground_truth"])

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Reward 1 if the first number of the response is the answer."""
        found = NUMBER.search(action)
        reward = 1.0 if found is not None and found.group() == self.answer else 0.0
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={})


def register() -> None:
    """Make the environment known to SkyRL-Gym in this process. Calling it again changes nothing."""
    if ENV_ID not in skyrl_gym.registry:
        skyrl_gym.register(id=ENV_ID, entry_point=f"{ArithmeticEnv.__module__}:{ArithmeticEnv.__name__}")


def row(problem: Problem, wording: str = WORDINGS[0]) -> dict:
    """A problem as a row of SkyRL's data format."""
    asked = problem.prompt.removesuffix("=").replace("+", " + ")
    return {
        "data_source": ENV_ID,
        "prompt": [{"role": "user", "content": wording.format(asked)}],
        "env_class": ENV_ID,
        "reward_spec": {"method": "rule", "ground_truth": problem.answer},
    }


def write_data(train_path: Path, held_out_path: Path, task: TaskConfig) -> None:
    """Write the training part, in every wording, and the held-out part, in the first, to their paths."""
    train, held_out = split(task.digits, task.held_out_one_in)
    for path, part, wordings in ((train_path, train, WORDINGS), (held_out_path, held_out, WORDINGS[:1])):
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [row(problem, wording) for wording in wordings for problem in part]
        path.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
