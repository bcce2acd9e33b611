"""Options of what answers questions: the same for `ask`, `decide` and `serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from knowgate.cli.options import parse_path
from knowgate.errors import BadSetting
from knowgate.pipeline.settings import DecisionOptions, PipelineOptions, load_settings

GateSpec = Annotated[str | None, typer.Option("--gate", help="Gate with options, e.g. logprob:mean; folder of a fitted one (DIR,verdict=own: by its raw score). See `knowgate gates`.")]  # fmt: skip  # noqa: E501
PlugIn = Annotated[
    bool | None, typer.Option("--plug-in", help="Let a fitted gate decide for another LLM than its own.")
]
Threshold = Annotated[float | None, typer.Option(help="Retrieve when need is above this (0-1). Default: the gate's own.")]  # fmt: skip  # noqa: E501
Docs = Annotated[Path | None, typer.Option(parser=parse_path, metavar="PATH", help="Folder (txt, md, html, pdf) or JSONL file to retrieve from; indexed in the cache.")]  # fmt: skip  # noqa: E501
Index = Annotated[str | None, typer.Option(help="Index folder made by `knowgate index`, http:URL of a search endpoint, or a search engine: qdrant:, chroma:, lancedb:, elastic:, opensearch:, pgvector:, web:.")]  # fmt: skip  # noqa: E501
Rerank = Annotated[str | None, typer.Option(help="Reranker of 20 candidates: folder made by `fit reranker`, or any cross-encoder.")]  # fmt: skip  # noqa: E501
Preset = Annotated[str | None, typer.Option(help="cbdr: probe (--gate) with --beta, aligned reranker (--rerank), top --k.")]  # fmt: skip  # noqa: E501
Beta = Annotated[float | None, typer.Option(min=0, max=1, help="With --preset cbdr: answer directly above this confidence. Default 0.95.")]  # fmt: skip  # noqa: E501
ArbiterSpec = Annotated[str | None, typer.Option("--arbiter", help="Who chooses between draft and open-book answer: folder made by `fit arbiter`, rules, or none. Default: rules, where the gate reads a whole draft.")]  # fmt: skip  # noqa: E501
SecondLook = Annotated[str | None, typer.Option(help="Folder of a fitted kbm gate that drops useless passages.")]
RulesFile = Annotated[str | None, typer.Option("--rules", metavar="FILE", help="Your own rules (TOML), before the packaged ones for small talk, arithmetic, rewriting, sources and fresh events. See `knowgate rules`.")]  # fmt: skip  # noqa: E501
NoRules = Annotated[bool, typer.Option("--no-rules", help="The gate alone decides.")]
K = Annotated[int | None, typer.Option(help="Passages shown to the LLM. Default 3.")]
MaxTokens = Annotated[int | None, typer.Option(help="Longest answer in tokens. Default 32.")]
ConfigFile = Annotated[Path | None, typer.Option(parser=parse_path, metavar="FILE", help="Config file. Default: knowgate.toml in this folder, if there is one.")]  # fmt: skip  # noqa: E501
Log = Annotated[str | None, typer.Option("--log", metavar="DB", help="Log that grows with use (a file, or postgresql://...): retrieved questions, known where the answers with and without passages agree.")]  # fmt: skip  # noqa: E501
LogDrafts = Annotated[bool | None, typer.Option("--log-drafts", help="With --log: also answer from memory where the gate reads no whole draft (dhicl, skr, logprob:first).")]  # fmt: skip  # noqa: E501


def combine_rule_flags(rules: str | None, no_rules: bool) -> str | None:
    """The setting that the two flags make."""
    if rules is not None and no_rules:
        raise BadSetting("--rules and --no-rules are mutually exclusive; use one.")
    return "none" if no_rules else rules


def load_command_settings(config: Path | None, options: DecisionOptions, no_rules: bool) -> PipelineOptions:
    """Combine the settings file with the flags that were typed, which take precedence."""
    if no_rules and "rules" in options.model_fields_set:
        raise BadSetting("--rules and --no-rules are mutually exclusive; use one.")
    values = {name: getattr(options, name) for name in options.model_fields_set}
    return load_settings(config, **values, **({"rules": "none"} if no_rules else {}))
