"""Options of a pipeline, shared by the library, `ask`, `decide`, `serve`, `mcp` and the file `knowgate.toml`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from knowgate.core.options import Count, Options, Share, UserPath, read_options
from knowgate.core.validation import check_encodable, expand_path, format_value, parse_toml, read_text
from knowgate.errors import BadInput, BadSetting
from knowgate.gates import DEFAULT_GATE

CONFIG_FILE = Path("knowgate.toml")
MAX_CONFIG_BYTES = 1 << 20


def _check_plain_text(text: str) -> str:
    check_encodable(text, format_value(text))
    if "\0" in text:
        raise BadSetting(f"the setting {format_value(text)} contains the character NUL.")
    return text


PlainText = Annotated[str, AfterValidator(_check_plain_text)]


class DecisionOptions(Options):
    """Options of a pipeline that only decides."""

    model: PlainText = Field(
        default="smollm",
        description="The LLM: smollm, hf:NAME_OR_DIR, gguf:FILE, openai:MODEL@URL, ... (`knowgate models` lists them).",
    )
    gate: PlainText = Field(
        default=DEFAULT_GATE,
        description="Gate with options, such as logprob:mean, or the folder of a fitted one (DIR,verdict=own: by its "
        "raw score). Default: one fitted on the LLM, else logprob:first.",
    )
    plug_in: bool = Field(default=False, description="Let a fitted gate decide for another LLM than its own.")
    threshold: Share | None = Field(
        default=None, description="Retrieve when need is above this, from 0 to 1. Default: the gate's own."
    )
    rules: PlainText = Field(
        default="packaged",
        description="Rules that decide before the gate (small talk, arithmetic, fresh events): packaged, none, or a "
        "TOML file of your own rules. See `knowgate rules`.",
        json_schema_extra={"metavar": "FILE"},
    )
    lang: PlainText | None = Field(
        default=None, description="Language of the prompts, en or zh. Default: detected per question."
    )
    prompts: UserPath | None = Field(
        default=None,
        description="Wording of the answer prompts: free (answers at length), or your own TOML file.",
        json_schema_extra={"metavar": "free|FILE"},
    )


class PipelineOptions(DecisionOptions):
    """Options of a pipeline: every key of `knowgate.toml`, with its default."""

    docs: UserPath | None = Field(
        default=None,
        description="Folder (txt, md, html, pdf) or JSONL file to retrieve from; indexed in the cache.",
        json_schema_extra={"metavar": "PATH"},
    )
    index: PlainText | None = Field(
        default=None,
        description="Instead of docs: index folder, http:URL of a search endpoint, or a search engine (qdrant:, "
        "chroma:, lancedb:, elastic:, opensearch:, pgvector:, web:).",
        repr=False,  # its URL may contain a key
    )
    retriever: PlainText | None = Field(
        default=None, description="bm25, dense or hybrid. Default: bm25, or as the index was built."
    )
    rerank: PlainText | None = Field(
        default=None,
        description="Reranker of 20 candidates: a folder made by `knowgate fit reranker`, or any cross-encoder.",
    )
    rerank_margin: Share | None = Field(
        default=None, description="Skip reranking where the best passage leads by this share of its score."
    )
    preset: PlainText | None = Field(
        default=None, description="cbdr: a fitted probe with beta, and an aligned reranker."
    )
    beta: Share | None = Field(
        default=None, description="With preset cbdr: answer directly above this confidence. Default: 0.95."
    )
    arbiter: PlainText | None = Field(
        default=None,
        description="What chooses between draft and open-book answer: a fitted arbiter's folder, rules, or none. "
        "Default: rules, if the gate reads a complete draft.",
    )
    second_look: PlainText | None = Field(
        default=None, description="Folder of a fitted kbm gate that drops useless passages."
    )
    log: PlainText | None = Field(
        default=None,
        description="Log of retrieved questions (SQLite file, postgresql://...), labeled known if the answers with "
        "and without passages agree.",
        json_schema_extra={"metavar": "DB"},
        repr=False,  # its address may contain a password
    )
    log_drafts: bool = Field(
        default=False,
        description="With `log`: also generate the closed-book answer if the gate reads no complete draft, to have "
        "something to compare.",
    )
    k: Count = Field(default=3, description="Passages shown to the LLM.")
    max_tokens: Count = Field(default=32, description="Longest answer in tokens.")
    serve: dict[str, Any] = Field(
        default_factory=dict,
        description="A table of its own, [serve]: options that only `knowgate serve` reads.",
        json_schema_extra={"flag": None},
    )


def load_settings(config: str | Path | None = None, **values: Any) -> PipelineOptions:
    """Load the options of a pipeline from `knowgate.toml` and keyword arguments, which take precedence.

    Args:
        config: Settings file. Default: `knowgate.toml` in the current folder, if it exists.
        **values: Fields of `PipelineOptions`; None means "not given".

    Raises:
        BadSetting: The file cannot be read, or a key or value is not allowed.

    Example:
        >>> load_settings(gate="never", k=5).k  # doctest: +SKIP
        5
    """
    given = {key: value for key, value in values.items() if value is not None}
    merged = {**_drop_replaced_source(_read_config(config), given), **given}
    empty = [key for key, value in merged.items() if value == ""]
    if empty:
        raise BadSetting(f"setting '{empty[0]}' is empty: give it a value or leave it out.")
    return PipelineOptions(**merged)


def _drop_replaced_source(values: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Drop `docs` or `index` of the file if the caller gave the other one."""
    replaced = {other for name, other in (("docs", "index"), ("index", "docs")) if name in given}
    return {key: value for key, value in values.items() if key not in replaced}


def _read_config(config: str | Path | None) -> dict[str, Any]:
    if config is None and not CONFIG_FILE.is_file():
        return {}
    path = expand_path(config) if config is not None else CONFIG_FILE
    try:
        values = parse_toml(read_text(path, maximum=MAX_CONFIG_BYTES), f"the config file '{path}'")
    except OSError as error:
        raise BadSetting(f"cannot read the config file '{path}': {error.strerror}. Check `config`.") from None
    except BadInput as error:
        raise BadSetting(str(error)) from None
    unknown = sorted(set(values) - set(PipelineOptions.model_fields))
    if unknown:
        raise BadSetting(f"{path}: unknown key '{unknown[0]}'. Known: {', '.join(PipelineOptions.model_fields)}.")
    given = {key: value for key, value in values.items() if value != ""}
    read_options(PipelineOptions, given, f"the config file '{path}'")  # so that its errors name the file
    return values
