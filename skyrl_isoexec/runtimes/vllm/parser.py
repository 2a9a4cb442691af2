"""Configurations of families that transformers does not know: read as data, without running a checkpoint's code.

vLLM uses this parser only for an engine that was started with `config_format` set to `CONFIG_FORMAT`.
"""

from __future__ import annotations

from pathlib import Path

from transformers import AutoConfig, PretrainedConfig
from vllm.transformers_utils.config_parser_base import ConfigParserBase

from skyrl_isoexec.runtimes.vllm.settings import STAND_INS


class DataConfigParser(ConfigParserBase):
    """Puts the fields of config.json into the configuration class of a family with the same fields."""

    def parse(
        self,
        model: str | Path,
        trust_remote_code: bool,
        revision: str | None = None,
        code_revision: str | None = None,
        **kwargs: object,
    ) -> tuple[dict, PretrainedConfig]:
        """(the parsed file, a configuration object); ValueError for a model_type without a stand-in."""
        found, _ = PretrainedConfig.get_config_dict(model, revision=revision)
        kind = found.get("model_type")
        if kind not in STAND_INS:
            raise ValueError(f"config.json of {model} has model_type {kind!r}; read as data are {sorted(STAND_INS)}")
        fields = {name: value for name, value in found.items() if name not in ("model_type", "auto_map")}
        return found, type(AutoConfig.for_model(STAND_INS[kind])).from_dict(fields)
