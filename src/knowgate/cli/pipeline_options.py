"""Flags and settings that `ask`, `decide`, `serve` and `mcp` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from knowgate.cli.options import parse_path
from knowgate.errors import BadSetting
from knowgate.pipeline.settings import DecisionOptions, PipelineOptions, load_settings

NoRules = Annotated[bool, typer.Option("--no-rules", help="Turn off the rules that decide before the gate.")]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        parser=parse_path,
        metavar="FILE",
        help="Settings file. Default: knowgate.toml in this folder, if there is one.",
    ),
]


def load_command_settings(config: Path | None, options: DecisionOptions, no_rules: bool) -> PipelineOptions:
    """Combine the settings file with the flags of a command. Flags that were typed take precedence.

    Args:
        config: The settings file. Default: knowgate.toml in the current folder, if there is one.
        options: Options from the flags.
        no_rules: Whether `--no-rules` was typed.
    """
    if no_rules and "rules" in options.model_fields_set:
        raise BadSetting("--rules and --no-rules are mutually exclusive; use one.")
    values = {name: getattr(options, name) for name in options.model_fields_set}
    return load_settings(config, **values, **({"rules": "none"} if no_rules else {}))
