"""`knowgate history`: the log of what was asked before."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from knowgate.cli.console import STDERR_CONSOLE, print_json, print_table
from knowgate.cli.options import JsonOption
from knowgate.core.files import read_jsonl
from knowgate.core.redaction import redact_secrets
from knowgate.core.validation import MAX_COUNT, check_number
from knowgate.data.history import history_exists, open_history
from knowgate.data.history.entries import (
    MAX_TIMESTAMP,
    HistoryScope,
    HistoryStore,
    KnowledgeLabel,
    LogEntry,
    copy_history,
    entry_from_record,
    entry_to_record,
)
from knowgate.data.questions import load_questions
from knowgate.data.runs.folder import RunFolder
from knowgate.errors import BadInput, BadSetting
from knowgate.labels.history_entries import entries_from_rows, scope_from_settings, time_sensitive_entries
from knowgate.models.prompts.templates import detect_language

app = typer.Typer(
    help="The log of questions with what the LLM knew: what dhicl and skr learn from.", no_args_is_help=True
)
HistoryOption = Annotated[
    str, typer.Option("--history", help="The log: an SQLite file, or postgresql://USER@HOST/DATABASE.")
]
ModelFingerprint = Annotated[str | None, typer.Option("--model-fingerprint", help="Model whose labels are meant.")]
PromptsFingerprint = Annotated[
    str | None, typer.Option("--prompts-fingerprint", help="Prompts whose labels are meant.")
]
EmbedderName = Annotated[
    str | None,
    typer.Option(
        "--embedder",
        help="What questions are compared by: minilm (English), mpnet, m3e (Chinese), a hub name or folder. "
        "Default: the log's own, else minilm.",
    ),
]
Tenant = Annotated[str, typer.Option(help="Tenant whose labels are meant.")]
log = logging.getLogger(__name__)
DEFAULT_HISTORY = "history.db"
ADD_BATCH = 256


@app.command("import")
def import_(
    runs: Annotated[list[Path], typer.Argument(help="Label runs, or JSONL files made by `history export`.")],
    history: HistoryOption = DEFAULT_HISTORY,
    rule: Annotated[
        str,
        typer.Option(
            help="Known if: greedy answer right, all samples right (DH-ICL: label --samples 10), or the majority."
        ),
    ] = "greedy",
    time_sensitive: Annotated[
        str | None,
        typer.Option(help="Also log the questions of this data that change with time, e.g. bench:uar_gate_time/train."),
    ] = None,
    embedder: EmbedderName = None,
    tenant: Tenant = "",
) -> None:
    """Log the questions of label runs with what the LLM knew.

    Of questions whose answer changes with time (meta: FreshQA's fact_type, or time_sensitive) only those answered
    wrongly are logged.

    Example: knowgate history import runs/train --rule all --time-sensitive bench:uar_gate_time/train --history log.db
    """
    if rule not in ("greedy", "all", "majority"):
        raise BadSetting(f"--rule is '{rule}'; allowed: greedy, all, majority.")
    is_new = embedder is None and not history_exists(history)
    store = open_history(history, embedder)
    scopes: set[HistoryScope] = set()
    for run in runs:
        if run.is_file():
            entries = [entry_from_record(record, f"{run} line {number}") for number, record in read_jsonl(run)]
        else:
            folder = RunFolder(run)
            scope = scope_from_settings(folder.settings(), tenant)
            entries = list(entries_from_rows(folder.rows(), scope, rule))  # type: ignore[arg-type]
        if is_new:
            _warn_of_language(entries)
        _add(store, entries)
        scopes |= {entry.scope for entry in entries}
        STDERR_CONSOLE.print(
            f"{len(entries)} questions of {run} logged in {redact_secrets(history)}{_changing(entries)}"
        )
    if time_sensitive:
        _add_time_sensitive(store, time_sensitive, scopes, history)


@app.command()
def add(
    question: Annotated[str, typer.Argument(help="The question.")],
    label: Annotated[str, typer.Option(help="known, unknown or time-sensitive.")],
    history: HistoryOption = DEFAULT_HISTORY,
    source: Annotated[str, typer.Option(help="human, gold, judge or agreement.")] = "human",
    outcome: Annotated[str | None, typer.Option(help="What retrieval did: better, worse or same.")] = None,
    days: Annotated[float | None, typer.Option(help="Forget it after so many days.")] = None,
    embedder: EmbedderName = None,
    model: ModelFingerprint = None,
    prompts: PromptsFingerprint = None,
    tenant: Tenant = "",
) -> None:
    """Log one question."""
    store = open_history(history, embedder)
    expires = (
        None
        if days is None
        else time.time() + check_number(days, "--days", maximum=MAX_TIMESTAMP / 86_400 / 2) * 86_400
    )
    record = {"question": question, "label": label, "source": source, "outcome": outcome, "expires": expires}
    scope = _scope(store, model, prompts, tenant)
    _add(store, [entry_from_record({**record, **asdict(scope)}, "the entry")])


@app.command("list")
def list_(
    history: HistoryOption = DEFAULT_HISTORY,
    limit: Annotated[int, typer.Option(min=1, max=MAX_COUNT, help="Newest so many.")] = 20,
    as_json: JsonOption = False,
) -> None:
    """Show logged questions, newest first."""
    _show([entry_to_record(entry) for entry in _existing(history).entries(limit=limit)], as_json)


@app.command()
def search(
    question: Annotated[str, typer.Argument(help="What to look for.")],
    history: HistoryOption = DEFAULT_HISTORY,
    k: Annotated[int, typer.Option(min=1, max=MAX_COUNT, help="How many.")] = 10,
    embedder: EmbedderName = None,
    model: ModelFingerprint = None,
    prompts: PromptsFingerprint = None,
    tenant: Tenant = "",
    as_json: JsonOption = False,
) -> None:
    """Show the logged questions most similar to one."""
    store = _existing(history, embedder)
    found = store.search([question], k, _scope(store, model, prompts, tenant))[0]
    _show([{**asdict(near), "similarity": round(near.similarity, 3)} for near in found], as_json)


@app.command()
def stats(history: HistoryOption = DEFAULT_HISTORY) -> None:
    """Count what is logged, by model, prompts and tenant."""
    store = _existing(history)
    rows = []
    for scope, count in store.scopes().items():
        entries = list(store.entries(scope))
        labels, sources = Counter(e.label for e in entries), Counter(e.source for e in entries)
        named = ", ".join(f"{source} {n}" for source, n in sources.items())
        cells = [str(labels[label]) for label in KnowledgeLabel]
        rows.append((scope.model, scope.prompts, str(count), *cells, scope.tenant or "-", named))
    print_table(("model", "prompts", "entries", *KnowledgeLabel, "tenant", "sources"), rows)


@app.command()
def export(history: HistoryOption = DEFAULT_HISTORY) -> None:
    """Print the whole log, one JSON object per line; `history import` reads it back."""
    _show([entry_to_record(entry) for entry in _existing(history).entries()], as_json=True)


@app.command()
def prune(
    history: HistoryOption = DEFAULT_HISTORY,
    model: ModelFingerprint = None,
    prompts: PromptsFingerprint = None,
    tenant: Tenant = "",
) -> None:
    """Delete what has expired; with fingerprints, also what belongs to other models or prompts."""
    store = _existing(history)
    if (model is None) != (prompts is None):
        raise BadSetting("give both --model-fingerprint and --prompts-fingerprint, or neither.")
    keep = HistoryScope(model, prompts, tenant) if model and prompts else None
    STDERR_CONSOLE.print(f"{store.prune(keep_scope=keep)} entries deleted")


@app.command()
def forget(
    history: HistoryOption = DEFAULT_HISTORY,
    contains: Annotated[str | None, typer.Option(help="Delete questions that hold this text, in any case.")] = None,
    ids: Annotated[
        list[int] | None, typer.Option("--id", min=1, max=2**63 - 1, help="Delete this entry; may be repeated.")
    ] = None,
) -> None:
    """Delete questions with their vectors, and wipe them from the file."""
    if not contains and not ids:
        raise BadSetting("say what to forget: --contains TEXT or --id NUMBER.")
    STDERR_CONSOLE.print(f"{_existing(history).forget(ids=ids or [], contains=contains)} entries deleted")


@app.command()
def copy(
    source: Annotated[str, typer.Argument(help="The log to copy: a file, or postgresql://USER@HOST/DATABASE.")],
    target: Annotated[str, typer.Argument(help="The log to copy into; made if need be.")],
    embedder: EmbedderName = None,
) -> None:
    """Copy a log into another one: from a file into a database, or back. What is there already stays or is replaced.

    Vectors are copied, too, unless the other log compares by another embedding; then the questions are embedded anew.

    Example: knowgate history copy history.db postgresql://knowgate@db/knowledge
    """
    if source.strip() == target.strip():
        raise BadSetting("a log cannot be copied into itself: name another TARGET.")
    known, into = _existing(source), open_history(target, embedder)
    if embedder is None and into.embedding.fingerprint is None:
        into = open_history(target, known.embedding.name)
    STDERR_CONSOLE.print(f"{copy_history(known, into)} entries copied into {redact_secrets(target)}")


def _existing(history: str, embedder: str | None = None) -> HistoryStore:
    """Looking into a log must not make an empty one."""
    if not history_exists(history):
        shown = redact_secrets(history)
        raise BadInput(f"there is no log '{shown}'. Make one: knowgate history import RUN --history {shown}")
    return open_history(history, embedder)


def _add_time_sensitive(store: HistoryStore, data: str, scopes: set[HistoryScope], history: str) -> None:
    questions = load_questions(data)
    for scope in scopes:
        entries = list(time_sensitive_entries(questions, scope))
        if not entries:
            raise BadInput(
                f"none of the {len(questions)} questions of {data} is marked as time-sensitive. "
                'Mark them: "meta": {"time_sensitive": true}'
            )
        _add(store, entries)
        STDERR_CONSOLE.print(f"{len(entries)} time-sensitive questions of {data} logged in {redact_secrets(history)}")


def _changing(entries: Sequence[LogEntry]) -> str:
    count = sum(entry.label == KnowledgeLabel.TIME_SENSITIVE for entry in entries)
    return f", {count} of them time-sensitive" if count else ""


def _warn_of_language(entries: Sequence[LogEntry]) -> None:
    chinese = sum(detect_language(entry.question) == "zh" for entry in entries)
    if chinese * 2 > len(entries):
        log.warning("Most of these questions are Chinese, which MiniLM was not made for: --embedder m3e was.")


def _add(store: HistoryStore, entries: Sequence[LogEntry]) -> None:
    for place in range(0, len(entries), ADD_BATCH):
        store.add(entries[place : place + ADD_BATCH])


def _scope(store: HistoryStore, model: str | None, prompts: str | None, tenant: str) -> HistoryScope:
    """The scope meant: the given one, else the only one there is."""
    if model and prompts:
        return HistoryScope(model, prompts, tenant)
    there = [scope for scope in store.scopes() if scope.tenant == tenant]
    fitting = [s for s in there if model in (None, s.model) and prompts in (None, s.prompts)]
    if len(fitting) != 1:
        listed = "; ".join(f"--model-fingerprint {s.model} --prompts-fingerprint {s.prompts}" for s in there) or "none"
        raise BadSetting(
            f"say whose labels are meant: --model-fingerprint and --prompts-fingerprint. The log has: {listed}."
        )
    return fitting[0]


def _show(records: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        for record in records:
            print_json(record)
        return
    columns = [
        key for key in ("id", "similarity", "label", "question", "outcome", "source") if records and key in records[0]
    ]
    rows = [tuple(str(record[key] if record[key] is not None else "-") for key in columns) for record in records]
    print_table(columns, rows)
