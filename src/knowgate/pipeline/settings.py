"""Options of a pipeline, shared by the library, `ask`, `decide`, `serve`, `mcp` and the file `knowgate.toml`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator

from knowgate.core.options import Count, Options, Share, UserPath, option, read_options
from knowgate.core.validation import check_encodable, expand_path, format_value, parse_toml, read_text
from knowgate.errors import BadInput, BadSetting
from knowgate.gates import DEFAULT_GATE

CONFIG_FILE = Path("knowgate.toml")
MAX_CONFIG_BYTES = 1 << 20


def _check_plain_text(text: str) -> str:
    """Return the text; raise if it is not valid Unicode or contains NUL."""
    check_encodable(text, format_value(text))
    if "\0" in text:
        raise BadSetting(f"the setting {format_value(text)} contains a NUL character, which is not allowed. Remove it.")
    return text


PlainText = Annotated[str, AfterValidator(_check_plain_text)]


class DecisionOptions(Options):
    """Options of a pipeline that only decides whether questions need retrieval."""

    model: PlainText = option(
        "smollm", "LLM that answers: smollm, hf:NAME_OR_DIR, openai:MODEL@URL; see `knowgate models`."
    )
    gate: PlainText = option(
        DEFAULT_GATE,
        "Gate that decides whether to retrieve: a name with options, such as logprob:mean, or the folder of a fitted gate "
        "(DIR,verdict=own uses its uncalibrated score). Default: the gate that comes with the LLM, else logprob:first, or "
        "always:rules for an LLM that returns only text.",
    )
    plug_in: bool = option(False, "Use the gate even if it was fitted on another LLM. Its guarantee does not hold.")
    threshold: Share | None = option(
        None, "Retrieve if the gate's score is above this threshold. Default: the threshold of the gate."
    )
    rules: PlainText = option(
        "packaged",
        "Rules that decide before the gate does: `packaged`, `none`, or a TOML file. See `knowgate rules`.",
        metavar="FILE",
    )
    lang: PlainText | None = option(
        None, "Language of the prompts: `en` or `zh`. Default: the language of each question."
    )
    prompts: UserPath | None = option(
        None,
        "Wording of the prompts: `free` (the LLM answers in full sentences) or your own TOML file. Default: "
        "prompts that ask for short answers.",
        metavar="free|FILE",
    )


class PipelineOptions(DecisionOptions):
    """Options of a pipeline: every key of `knowgate.toml`, with its default."""

    docs: UserPath | None = option(
        None, "Documents: a folder (txt, md, html, pdf) or a JSONL file. The index is cached.", metavar="PATH"
    )
    index: PlainText | None = option(
        None,
        "Index to search, instead of `docs`: a folder, a search endpoint (`http:` before its URL), or a search engine "
        "(qdrant:, chroma:, lancedb:, elastic:, opensearch:, pgvector:, web:).",
        repr=False,
    )
    retriever: PlainText | None = option(
        None, "Search method: `bm25`, `dense` or `hybrid`. Default: the method of the index, or `bm25`."
    )
    rerank: PlainText | None = option(
        None, "Reranker that orders 20 candidates: a folder made by `knowgate fit reranker`, or any cross-encoder."
    )
    rerank_margin: Share | None = option(
        None, "Skip reranking if the best score exceeds the second best by this share."
    )
    preset: PlainText | None = option(
        None, "Group of settings to start from. `cbdr` works as in the CBDR paper, with a fitted probe and reranker."
    )
    beta: Share | None = option(
        None, "With the preset `cbdr`: minimum confidence of the LLM for answering without a search. Default: 0.95."
    )
    arbiter: PlainText | None = option(
        None,
        "Arbiter that chooses, after retrieval, between the answer from memory and the answer with passages: the folder of a "
        "fitted arbiter, `rules`, or `none`. Default: the arbiter of the policy, else `rules`.",
    )
    second_look: PlainText | None = option(
        None,
        "Folder of a fitted gate `kbm` that drops useless passages. `DIR,verdict=own` drops them as in the KBM paper.",
    )
    log: PlainText | None = option(
        None, "Log of which questions the LLM can answer: an SQLite file or postgresql://...", metavar="DB", repr=False
    )
    log_drafts: bool = option(
        False,
        "To `log` more questions, also generate an answer from memory if the gate reads no complete one. Not with an "
        "upstream, where audits add labels.",
    )
    k: Count = option(3, "Maximum number of passages shown to the LLM.")
    max_tokens: Count = option(32, "Maximum length of an answer in tokens.")
    serve: dict[str, Any] = option({}, "Table [serve] with options that only `knowgate serve` reads.", flag=None)


def load_settings(config: str | Path | None = None, **values: Any) -> PipelineOptions:
    """Load the options of a pipeline from a settings file and keyword arguments. The arguments take precedence.

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
    file_values = _read_config(config)
    if "docs" in given or "index" in given:  # the documents of the caller replace those of the file
        file_values = {key: value for key, value in file_values.items() if key not in ("docs", "index")}
    merged = {**file_values, **given}
    empty = [key for key, value in merged.items() if value == ""]
    if empty:
        raise BadSetting(f"the setting '{empty[0]}' is empty. Give it a value or leave it out.")
    return PipelineOptions(**merged)


def _read_config(config: str | Path | None) -> dict[str, Any]:
    """Read and check a settings file in TOML. Default: `knowgate.toml` in the current folder, if it exists.

    Raises:
        BadSetting: The file cannot be read, or a key or value is not allowed.
    """
    if config is None and not CONFIG_FILE.is_file():
        return {}
    path = expand_path(config) if config is not None else CONFIG_FILE
    try:
        values = parse_toml(read_text(path, maximum=MAX_CONFIG_BYTES), f"the config file '{path}'")
    except OSError as error:
        raise BadSetting(f"cannot read the config file '{path}': {error.strerror}. Check the path.") from None
    except BadInput as error:
        raise BadSetting(str(error)) from None
    _check_config(values, path)
    return values


def _check_config(values: dict[str, Any], path: Path) -> None:
    """Raise BadSetting if a settings file has an unknown key or a wrong value."""
    unknown = sorted(set(values) - set(PipelineOptions.model_fields))
    if unknown:
        raise BadSetting(
            f"the config file '{path}' has the unknown key '{unknown[0]}'. Remove it, or use one of "
            f"{', '.join(PipelineOptions.model_fields)}."
        )
    # `load_settings` checks the values again. They are checked here, too, so that errors name the file.
    not_empty = {key: value for key, value in values.items() if value != ""}
    read_options(PipelineOptions, not_empty, f"the config file '{path}'")
