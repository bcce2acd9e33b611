"""Settings of `ask` and `decide`: built-in defaults, then `knowgate.toml`, then flags."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from knowgate.errors import BadSetting
from knowgate.gates import DEFAULT

FILE = Path("knowgate.toml")


class Settings(BaseModel):
    """Every key of `knowgate.toml`, with its default."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = "smollm"
    """The LLM: smollm, hf:NAME_OR_DIR, gguf:FILE, openai:MODEL@URL, ..."""
    gate: str = DEFAULT
    """Gate with options, or the folder of a fitted one. Default: one fitted on the LLM, else logprob:first."""
    plug_in: bool = False
    """Let a fitted gate decide for another LLM than its own."""
    threshold: float | None = None
    """Retrieve when need is above this, from 0 to 1. Default: the gate's own."""
    docs: Path | None = None
    """Folder (txt, md, html, pdf) or JSONL file to retrieve from; indexed in the cache."""
    index: str | None = Field(default=None, repr=False)  # its URL may hold a key
    """Index folder, or http:URL of a search endpoint; instead of docs."""
    retriever: str | None = None
    """bm25, dense or hybrid. Default: bm25, or as the index was built."""
    rerank: str | None = None
    """Reranker of 20 candidates: a folder made by `knowgate fit reranker`, or any cross-encoder."""
    rerank_margin: float | None = None
    """Skip reranking where the best passage leads by this share of its score."""
    preset: str | None = None
    """cbdr: a fitted probe with beta, and an aligned reranker."""
    beta: float | None = None
    """With preset cbdr: answer directly above this confidence. Default: 0.95."""
    second_look: str | None = None
    """Folder of a fitted kbm gate that drops useless passages."""
    log: str | None = None
    """Log (SQLite file) that grows with use: retrieved questions, known where both answers agree."""
    log_drafts: bool = False
    """With log: also answer from memory where the gate reads no whole draft, so that there is something to compare."""
    k: int = 3
    """Passages shown to the LLM."""
    max_tokens: int = 32
    """Longest answer in tokens."""
    lang: str | None = None
    """Language of the prompts, en or zh. Default: detected per question."""
    prompts: Path | None = None
    """TOML file with your own answer prompts."""


def load_settings(config: str | Path | None = None, **flags: Any) -> Settings:
    """Flags that were given override the file, which overrides the defaults."""
    values = {**_read(config), **{key: value for key, value in flags.items() if value is not None}}
    empty = [key for key, value in values.items() if value == ""]
    if empty:
        raise BadSetting(f"setting '{empty[0]}' is empty: give it a value or leave it out.")
    try:
        return Settings(**values)
    except ValidationError as error:
        raise BadSetting(_explain(error)) from None


def _read(config: str | Path | None) -> dict[str, Any]:
    if config is None and not FILE.is_file():
        return {}
    path = Path(config) if config is not None else FILE
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadSetting(f"cannot read the config file '{path}': {error.strerror}.") from None
    except ValueError as error:  # not UTF-8, or not TOML
        raise BadSetting(f"the config file '{path}' is not valid TOML: {error}.") from None
    unknown = sorted(set(values) - set(Settings.model_fields))
    if unknown:
        raise BadSetting(f"{path}: unknown key '{unknown[0]}'. Known: {', '.join(Settings.model_fields)}.")
    return values


def _explain(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"setting '{'.'.join(map(str, first['loc']))}' is {first['input']!r}: {first['msg'].lower()}."
