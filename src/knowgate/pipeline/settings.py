"""Settings of `ask`, `decide` and `serve`: built-in defaults, then `knowgate.toml`, then flags."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from knowgate.core.validation import (
    check_encodable,
    check_integer,
    check_number,
    expand_path,
    format_value,
    parse_toml,
    read_text,
)
from knowgate.errors import BadInput, BadSetting
from knowgate.gates import DEFAULT_GATE

CONFIG_FILE = Path("knowgate.toml")
MAX_CONFIG_BYTES = 1 << 20  # bytes of a file of some fifteen lines


def _plain(text: str) -> str:
    check_encodable(text, format_value(text))
    if "\0" in text:
        raise BadSetting(f"the setting {format_value(text)} holds the character NUL.")
    return text


Threshold = Annotated[float, AfterValidator(partial(check_number, name="the threshold"))]
Margin = Annotated[float, AfterValidator(partial(check_number, name="the rerank margin"))]
Beta = Annotated[float, AfterValidator(partial(check_number, name="beta"))]
K = Annotated[int, Field(strict=True), AfterValidator(partial(check_integer, name="k"))]
MaxTokens = Annotated[int, Field(strict=True), AfterValidator(partial(check_integer, name="max_tokens"))]
PlainText = Annotated[str, AfterValidator(_plain)]
UserPath = Annotated[Path, AfterValidator(expand_path)]


class Settings(BaseModel):
    """Every key of `knowgate.toml`, with its default."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: PlainText = "smollm"
    """The LLM: smollm, hf:NAME_OR_DIR, gguf:FILE, openai:MODEL@URL, ... (`knowgate models` lists them)."""
    gate: PlainText = DEFAULT_GATE
    """Gate with options, or the folder of a fitted one. Default: one fitted on the LLM, else logprob:first."""
    plug_in: bool = False
    """Let a fitted gate decide for another LLM than its own."""
    threshold: Threshold | None = None
    """Retrieve when need is above this, from 0 to 1. Default: the gate's own."""
    docs: UserPath | None = None
    """Folder (txt, md, html, pdf) or JSONL file to retrieve from; indexed in the cache."""
    index: PlainText | None = Field(default=None, repr=False)  # its URL may hold a key
    """Index folder, http:URL of a search endpoint, or a search engine (qdrant:, web:, ...); instead of docs."""
    retriever: PlainText | None = None
    """bm25, dense or hybrid. Default: bm25, or as the index was built."""
    rerank: PlainText | None = None
    """Reranker of 20 candidates: a folder made by `knowgate fit reranker`, or any cross-encoder."""
    rerank_margin: Margin | None = None
    """Skip reranking where the best passage leads by this share of its score."""
    preset: PlainText | None = None
    """cbdr: a fitted probe with beta, and an aligned reranker."""
    beta: Beta | None = None
    """With preset cbdr: answer directly above this confidence. Default: 0.95."""
    arbiter: PlainText | None = None
    """Who chooses between draft and open-book answer: a fitted arbiter's folder, rules, or none. Default: rules."""
    rules: PlainText = "packaged"
    """What is looked up, or never, whatever the gate says: packaged, none, or a TOML file of your own rules."""
    second_look: PlainText | None = None
    """Folder of a fitted kbm gate that drops useless passages."""
    log: PlainText | None = Field(default=None, repr=False)  # its address may hold a password
    """Log (SQLite file, postgresql://...) that grows with use: retrieved questions, known where both answers agree."""
    log_drafts: bool = False
    """With log: also answer from memory where the gate reads no whole draft, so that there is something to compare."""
    k: K = 3
    """Passages shown to the LLM."""
    max_tokens: MaxTokens = 32
    """Longest answer in tokens."""
    lang: PlainText | None = None
    """Language of the prompts, en or zh. Default: detected per question."""
    prompts: UserPath | None = None
    """Wording of the answer prompts: free (answers at length), or your own TOML file."""
    serve: dict[str, Any] = Field(default_factory=dict)
    """A table of its own, [serve]: what only `knowgate serve` reads."""


def load_settings(config: str | Path | None = None, **flags: Any) -> Settings:
    """Flags that were given override the file, which overrides the defaults."""
    given = {key: value for key, value in flags.items() if value is not None}
    values = {**_without_rivals(_read(config), given), **given}
    empty = [key for key, value in values.items() if value == ""]
    if empty:
        raise BadSetting(f"setting '{empty[0]}' is empty: give it a value or leave it out.")
    try:
        return Settings(**values)
    except ValidationError as error:
        raise BadSetting(_explain(error)) from None


def _without_rivals(values: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """What the file says, but for the other of two ways to name the same, where a flag names one."""
    rivals = {other for one, other in (("docs", "index"), ("index", "docs")) if one in given}
    return {key: value for key, value in values.items() if key not in rivals}


def _read(config: str | Path | None) -> dict[str, Any]:
    if config is None and not CONFIG_FILE.is_file():
        return {}
    path = expand_path(config) if config is not None else CONFIG_FILE
    try:
        values = parse_toml(read_text(path, most=MAX_CONFIG_BYTES), f"the config file '{path}'")
    except OSError as error:
        raise BadSetting(f"cannot read the config file '{path}': {error.strerror}. Check --config.") from None
    except BadInput as error:
        raise BadSetting(str(error)) from None
    unknown = sorted(set(values) - set(Settings.model_fields))
    if unknown:
        raise BadSetting(f"{path}: unknown key '{unknown[0]}'. Known: {', '.join(Settings.model_fields)}.")
    return values


def _explain(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"setting '{'.'.join(map(str, first['loc']))}' is {format_value(first['input'])}: {first['msg'].lower()}."
