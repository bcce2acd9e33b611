"""`knowgate history`: manage the log of earlier questions, each labeled with whether the LLM knew the answer."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from knowgate.cli.console import inform, print_json, print_table
from knowgate.cli.option_flags import expand_options
from knowgate.cli.options import JsonOption
from knowgate.core import split_batches
from knowgate.core.files import read_jsonl
from knowgate.core.options import Options, option
from knowgate.core.redaction import redact_secrets
from knowgate.core.validation import MAX_COUNT
from knowgate.data.history import history_exists, open_history
from knowgate.data.history.entries import (
    MAX_TIMESTAMP,
    HistoryScope,
    KnowledgeLabel,
    LogEntry,
    entry_from_record,
    entry_to_record,
)
from knowgate.data.history.store import HistoryStore, copy_history
from knowgate.data.questions import load_questions
from knowgate.data.runs.folder import RunFolder
from knowgate.errors import BadInput, BadSetting
from knowgate.labels.history_entries import KnownRule, entries_from_rows, scope_from_settings, time_sensitive_entries
from knowgate.models.prompts.templates import detect_language

app = typer.Typer(help="Manage the log of questions, from which gates 'dhicl' and 'skr' learn.", no_args_is_help=True)
HistoryOption = Annotated[str, typer.Option("--history", help="Log: an SQLite file, or postgresql://USER@HOST/DB.")]
EmbedderName = Annotated[
    str | None,
    typer.Option(
        "--embedder",
        help="Embedding model, such as `minilm` (English) or `m3e` (Chinese). Default: the embedding model of the log.",
    ),
]
log = logging.getLogger(__name__)
DEFAULT_HISTORY = "history.db"
SECONDS_PER_DAY = 86_400
MAX_DAYS = MAX_TIMESTAMP / SECONDS_PER_DAY / 2
ADD_BATCH = 256  # entries written per transaction
SHOWN_COLUMNS = ("id", "similarity", "label", "question", "outcome", "source")


class ScopeOptions(Options):
    """Options to select the log entries of one model, one set of prompts and one tenant."""

    model: str | None = option(
        None, "Fingerprint of the model. `knowgate history stats` lists all fingerprints.", flag="--model-fingerprint"
    )
    prompts: str | None = option(
        None,
        "Fingerprint of the prompts. `knowgate history stats` lists all fingerprints.",
        flag="--prompts-fingerprint",
    )
    tenant: str = option("", "Tenant that the entries belong to. Default: no tenant.")


class ImportOptions(Options):
    """Options of `knowgate history import`."""

    rule: KnownRule = option(
        "greedy", "When a question counts as known: if the greedy answer, all samples, or most samples are right."
    )
    time_sensitive: str | None = option(None, "Also log the time-sensitive questions of this data, such as jsonl:FILE.")
    tenant: str = option("", "Tenant that the entries belong to. Default: no tenant.")


@app.command("import")
@expand_options
def import_(
    runs: Annotated[list[Path], typer.Argument(help="Folders of label runs, or JSONL files made by `history export`.")],
    options: ImportOptions,
    history: HistoryOption = DEFAULT_HISTORY,
    embedder: EmbedderName = None,
) -> None:
    """Add the questions of label runs to the log, labeled as known or unknown.

    A time-sensitive question is logged only if the LLM answered wrong. A right answer may be outdated tomorrow. Such
    questions have `fact_type` or `time_sensitive` in their meta.

    Example: knowgate history import runs/train --rule all --time-sensitive bench:uar_gate_time/train --history log.db
    """
    gets_default_embedding = embedder is None and not history_exists(history)
    store = open_history(history, embedder)
    scopes: set[HistoryScope] = set()
    for run in runs:
        entries = _read_entries(run, options)
        if gets_default_embedding:
            _warn_about_language(entries)
        _add(store, entries)
        scopes |= {entry.scope for entry in entries}
        count = sum(entry.label == KnowledgeLabel.TIME_SENSITIVE for entry in entries)
        inform(f"{len(entries)} questions of {run} logged in {redact_secrets(history)}, {count} of them time-sensitive")
    if options.time_sensitive:
        _add_time_sensitive(store, options.time_sensitive, scopes, history)


class AddOptions(ScopeOptions):
    """Options of `knowgate history add`."""

    label: str = option(..., "Whether the LLM knows the answer: known, unknown or time-sensitive.")
    source: str = option("human", "Where the label comes from: human, gold, judge or agreement.")
    outcome: str | None = option(
        None, "How retrieval changes the answer: `better`, `worse` or `same`. Default: unknown."
    )
    days: float | None = option(
        None, "Number of days after which the entry is ignored. Default: never.", ge=0, le=MAX_DAYS, allow_inf_nan=False
    )


@app.command()
@expand_options
def add(
    question: Annotated[str, typer.Argument(help="The question to log.")],
    options: AddOptions,
    history: HistoryOption = DEFAULT_HISTORY,
    embedder: EmbedderName = None,
) -> None:
    """Add one question with its label to the log."""
    store = open_history(history, embedder)
    scope = _resolve_scope(store, options)
    expires = None if options.days is None else time.time() + options.days * SECONDS_PER_DAY
    labels = {"label": options.label, "source": options.source, "outcome": options.outcome}
    record = {"question": question, **labels, "expires": expires, **asdict(scope)}
    _add(store, [entry_from_record(record, "the entry")])


@app.command("list")
def list_(
    history: HistoryOption = DEFAULT_HISTORY,
    limit: Annotated[int, typer.Option(min=1, max=MAX_COUNT, help="Maximum number of entries to show.")] = 20,
    as_json: JsonOption = False,
) -> None:
    """Show logged questions, newest first."""
    _print_records([entry_to_record(entry) for entry in _open_existing(history).entries(limit=limit)], as_json)


@app.command()
@expand_options
def search(
    question: Annotated[str, typer.Argument(help="Question to compare with the logged questions.")],
    options: ScopeOptions,
    history: HistoryOption = DEFAULT_HISTORY,
    k: Annotated[int, typer.Option(min=1, max=MAX_COUNT, help="Number of similar questions to show.")] = 10,
    embedder: EmbedderName = None,
    as_json: JsonOption = False,
) -> None:
    """Show the most similar logged questions."""
    store = _open_existing(history, embedder)
    neighbors = store.search([question], k, _resolve_scope(store, options))[0]
    _print_records([{**asdict(item), "similarity": round(item.similarity, 3)} for item in neighbors], as_json)


@app.command()
def stats(history: HistoryOption = DEFAULT_HISTORY) -> None:
    """Count the entries of each model, set of prompts and tenant."""
    store = _open_existing(history)
    rows = []
    for scope, count in store.scopes().items():
        entries = list(store.entries(scope))
        labels = Counter(entry.label for entry in entries)
        sources = Counter(entry.source for entry in entries)
        counts = [str(labels[label]) for label in KnowledgeLabel]
        source_counts = ", ".join(f"{source} {n}" for source, n in sources.items())
        rows.append((scope.model, scope.prompts, str(count), *counts, scope.tenant or "-", source_counts))
    print_table(("model", "prompts", "entries", *KnowledgeLabel, "tenant", "sources"), rows)


@app.command()
def export(history: HistoryOption = DEFAULT_HISTORY) -> None:
    """Print the whole log as JSON Lines, which `history import` can read."""
    _print_records([entry_to_record(entry) for entry in _open_existing(history).entries()], as_json=True)


@app.command()
@expand_options
def prune(options: ScopeOptions, history: HistoryOption = DEFAULT_HISTORY) -> None:
    """Delete expired entries.

    Give fingerprints to delete the tenant's entries for other models and prompts, too.
    """
    model, prompts = options.model, options.prompts
    if (model is None) != (prompts is None):
        raise BadSetting("--model-fingerprint and --prompts-fingerprint belong together: give both, or neither.")
    kept = HistoryScope(model, prompts, options.tenant) if model and prompts else None
    inform(f"{_open_existing(history).prune(keep_scope=kept)} entries deleted")


@app.command()
def forget(
    history: HistoryOption = DEFAULT_HISTORY,
    contains: Annotated[
        str | None, typer.Option(help="Delete all questions that contain this text, in upper or lower case.")
    ] = None,
    ids: Annotated[
        list[int] | None, typer.Option("--id", min=1, max=2**63 - 1, help="Delete this entry; may be repeated.")
    ] = None,
) -> None:
    """Delete questions and their embeddings, and erase them from the files on disk."""
    if not contains and not ids:
        raise BadSetting("no question is selected for deletion. Give --contains TEXT or --id NUMBER.")
    inform(f"{_open_existing(history).forget(ids=ids or [], contains=contains)} entries deleted")


@app.command()
def copy(
    source: Annotated[str, typer.Argument(help="Log to copy: a file, or postgresql://USER@HOST/DATABASE.")],
    target: Annotated[str, typer.Argument(help="Log to copy to. It is created if it does not exist.")],
    embedder: EmbedderName = None,
) -> None:
    """Copy all entries of a log into another log, such as a file into a database.

    Existing entries of the target are replaced. If the embeddings differ, the questions are embedded again.

    Example: knowgate history copy history.db postgresql://knowgate@db/knowledge
    """
    if source.strip() == target.strip():
        raise BadSetting("SOURCE and TARGET name the same log. Name another TARGET.")
    source_store = _open_existing(source)
    target_store = open_history(target, embedder)
    if embedder is None and target_store.embedding_fingerprint is None:  # a new log takes the embedding of the source
        target_store = open_history(target, source_store.embedding_name)
    inform(f"{copy_history(source_store, target_store)} entries copied into {redact_secrets(target)}")


def _open_existing(history: str, embedder: str | None = None) -> HistoryStore:
    """Open an existing log. Reading commands must not create one."""
    if not history_exists(history):
        name = redact_secrets(history)
        raise BadInput(f"there is no log '{name}'. Make one: knowgate history import RUN --history {name}")
    return open_history(history, embedder)


def _read_entries(run: Path, options: ImportOptions) -> list[LogEntry]:
    """Read the log entries of an exported file, or make them from a label run."""
    if run.is_file():
        return [entry_from_record(record, f"{run} line {number}") for number, record in read_jsonl(run)]
    folder = RunFolder(run)
    scope = scope_from_settings(folder.settings(), options.tenant)
    return list(entries_from_rows(folder.rows(), scope, options.rule))


def _add_time_sensitive(store: HistoryStore, data: str, scopes: set[HistoryScope], history: str) -> None:
    """Log the time-sensitive questions of a data set, once for each scope. A scope is a model with its prompts.

    Raises:
        BadInput: The data marks no question as time-sensitive.
    """
    questions = load_questions(data)
    for scope in scopes:
        entries = list(time_sensitive_entries(questions, scope))
        if not entries:
            raise BadInput(
                f"no question of {data} is time-sensitive. Mark some in the data: meta.time_sensitive = true."
            )
        _add(store, entries)
        inform(f"{len(entries)} time-sensitive questions of {data} logged in {redact_secrets(history)}")


def _warn_about_language(entries: Sequence[LogEntry]) -> None:
    """Warn if most questions are Chinese. The default embedding knows only English."""
    n_chinese = sum(detect_language(entry.question) == "zh" for entry in entries)
    if n_chinese * 2 > len(entries):
        log.warning("Most of these questions are Chinese, but minilm is an English embedding. Use --embedder m3e.")


def _add(store: HistoryStore, entries: Sequence[LogEntry]) -> None:
    """Write entries to the log in batches, each in one transaction."""
    for batch in split_batches(entries, ADD_BATCH):
        store.add(batch)


def _resolve_scope(store: HistoryStore, options: ScopeOptions) -> HistoryScope:
    """Return the scope (model, prompts, tenant) of the options. Missing values are taken from the log.

    Raises:
        BadSetting: Several scopes of the log match, or none does.
    """
    if options.model and options.prompts:
        return HistoryScope(options.model, options.prompts, options.tenant)
    scopes = [scope for scope in store.scopes() if scope.tenant == options.tenant]
    matching = [scope for scope in scopes if options.model in (None, scope.model)]
    matching = [scope for scope in matching if options.prompts in (None, scope.prompts)]
    if len(matching) != 1:
        available = [f"--model-fingerprint {scope.model} --prompts-fingerprint {scope.prompts}" for scope in scopes]
        raise BadSetting(
            f"it is unclear which model and prompts of the log are meant. Choose: {'; '.join(available) or 'none'}."
        )
    return matching[0]


def _print_records(records: list[dict[str, Any]], as_json: bool) -> None:
    """Print records as JSON Lines, or as a table of `SHOWN_COLUMNS`."""
    if as_json:
        for record in records:
            print_json(record)
        return
    columns = [key for key in SHOWN_COLUMNS if records and key in records[0]]
    print_table(columns, [["-" if record[key] is None else str(record[key]) for key in columns] for record in records])
