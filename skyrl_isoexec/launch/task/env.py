"""The environment: one turn, reward 1 for exactly the right digits and 0 for anything else."""

from typing import Any

import skyrl_gym
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

from skyrl_isoexec.launch.task.tokenizer import EOS

ENV_ID = "addition"
"""The name under which SkyRL-Gym makes this environment, and the `env_class` of every row of the data."""


class AdditionEnv(BaseTextEnv):
    """A single answer to a single addition.

    `extras["reward_spec"]["ground_truth"]` holds the right answer; a row without it raises KeyError when the
    environment is made, not later.
    """

    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.answer = str((extras or {})["reward_spec"]["ground_truth"])

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Compare the whole response with the answer; SkyRL decodes the end-of-sequence symbol with it."""
        reward = 1.0 if action.removesuffix(EOS) == self.answer else 0.0
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={})


def register() -> None:
    """Make the environment known to SkyRL-Gym in this process. Calling it again changes nothing."""
    if ENV_ID not in skyrl_gym.registry:
        skyrl_gym.register(id=ENV_ID, entry_point=f"{AdditionEnv.__module__}:{AdditionEnv.__name__}")
