"""Sums in words for a model with a chat template: its prompts, and the environment that reads a number in an answer.

The problems and their split are those of `problems.py`, so that a problem held out there is held out here.
"""

import json
import re
from pathlib import Path
from typing import Any

import skyrl_gym
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

from skyrl_isoexec.launch.task.problems import Problem, split

ENV_ID = "arithmetic"
"""The name under which SkyRL-Gym makes this environment."""
NUMBER = re.compile(r"-?\d+")


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


def row(problem: Problem) -> dict:
    """A problem as a row of SkyRL's data format."""
    asked = problem.prompt.removesuffix("=").replace("+", " + ")
    return {
        "data_source": ENV_ID,
        "prompt": [{"role": "user", "content": f"What is {asked}? Answer with the number only."}],
        "env_class": ENV_ID,
        "reward_spec": {"method": "rule", "ground_truth": problem.answer},
    }


def write_data(train_path: Path, held_out_path: Path, digits: int, one_in: int) -> None:
    """Write the training part and the held-out part to their paths."""
    for path, part in zip((train_path, held_out_path), split(digits, one_in), strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row(problem)) + "\n" for problem in part), encoding="utf-8")
