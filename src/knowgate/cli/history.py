"""`knowgate history`: the log of what was asked before."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from knowgate.cli.console import WORDS, plain_console, print_json
from knowgate.cli.options import Json
from knowgate.doors import COUNT, check_text, check_within, shown, user_path
from knowgate.errors import BadInput, BadSetting
from knowgate.files import read_jsonl
from knowgate.history import HistoryStore, Known, LogEntry, Outcome, Scope, Source, open_history
from knowgate.labels import entries_of, scope_of
from knowgate.runs import RunFolder

app = typer.Typer(
    help="The log of questions with what the LLM knew: what dhicl and skr learn from.", no_args_is_help=True
)
Log = Annotated[str, typer.Option("--history", help="The log: an SQLite file.")]
ModelName = Annotated[str | None, typer.Option("--model-fingerprint", help="Model whose labels are meant.")]
PromptName = Annotated[str | None, typer.Option("--prompts-fingerprint", help="Prompts whose labels are meant.")]
Tenant = Annotated[str, typer.Option(help="Tenant whose labels are meant.")]
DEFAULT = "history.db"
BATCH = 256
LAST = 1e11  # seconds since 1970: the year 5138


@app.command("import")
def import_(
    runs: Annotated[list[Path], typer.Argument(help="Label runs, or JSONL files made by `history export`.")],
    history: Log = DEFAULT,
    rule: Annotated[
        str, typer.Option(help="Known if: greedy answer right, all samples right, or the majority.")
    ] = "greedy",
    tenant: Tenant = "",
) -> None:
    """Log the questions of label runs with what the LLM knew."""
    if rule not in ("greedy", "all", "majority"):
        raise BadSetting(f"--rule is '{rule}'; allowed: greedy, all, majority.")
    store = open_history(history)
    for run in runs:
        if run.is_file():
            entries = [_from_record(record, f"{run} line {number}") for number, record in read_jsonl(run)]
        else:
            folder = RunFolder(run)
            scope = scope_of(folder.settings(), tenant)
            entries = list(entries_of(folder.rows(), scope, rule))  # type: ignore[arg-type]
        _add(store, entries)
        WORDS.print(f"{len(entries)} questions of {run} logged in {history}")


@app.command()
def add(
    question: Annotated[str, typer.Argument(help="The question.")],
    label: Annotated[str, typer.Option(help="known, unknown or time-sensitive.")],
    history: Log = DEFAULT,
    source: Annotated[str, typer.Option(help="human, gold, judge or agreement.")] = "human",
    outcome: Annotated[str | None, typer.Option(help="What retrieval did: better, worse or same.")] = None,
    days: Annotated[float | None, typer.Option(help="Forget it after so many days.")] = None,
    model: ModelName = None,
    prompts: PromptName = None,
    tenant: Tenant = "",
) -> None:
    """Log one question."""
    store = open_history(history)
    expires = None if days is None else time.time() + check_within(days, "--days", most=LAST / 86_400 / 2) * 86_400
    record = {"question": question, "label": label, "source": source, "outcome": outcome, "expires": expires}
    scope = _scope(store, model, prompts, tenant)
    _add(store, [_from_record({**record, **asdict(scope)}, "the entry")])


@app.command("list")
def list_(
    history: Log = DEFAULT,
    limit: Annotated[int, typer.Option(min=1, max=COUNT, help="Newest so many.")] = 20,
    as_json: Json = False,
) -> None:
    """Show logged questions, newest first."""
    _show([_record(entry) for entry in _existing(history).entries(limit=limit)], as_json)


@app.command()
def search(
    question: Annotated[str, typer.Argument(help="What to look for.")],
    history: Log = DEFAULT,
    k: Annotated[int, typer.Option(min=1, max=COUNT, help="How many.")] = 10,
    model: ModelName = None,
    prompts: PromptName = None,
    tenant: Tenant = "",
    as_json: Json = False,
) -> None:
    """Show the logged questions most similar to one."""
    store = _existing(history)
    found = store.search([question], k, _scope(store, model, prompts, tenant))[0]
    _show([{"similarity": round(near.similarity, 3), **asdict(near)} for near in found], as_json)


@app.command()
def stats(history: Log = DEFAULT) -> None:
    """Count what is logged, by model, prompts and tenant."""
    store = _existing(history)
    table = Table("model", "prompts", "tenant", "entries", "known", "unknown", "time-sensitive", "sources", box=None)
    for scope, count in store.scopes().items():
        entries = list(store.entries(scope))
        labels, sources = Counter(e.label for e in entries), Counter(e.source for e in entries)
        named = ", ".join(f"{source} {n}" for source, n in sources.items())
        cells = [str(labels[label]) for label in Known]
        table.add_row(scope.model, scope.prompts, scope.tenant or "-", str(count), *cells, named)
    plain_console().print(table)


@app.command()
def export(history: Log = DEFAULT) -> None:
    """Print the whole log, one JSON object per line; `history import` reads it back."""
    _show([_record(entry) for entry in _existing(history).entries()], as_json=True)


@app.command()
def prune(
    history: Log = DEFAULT,
    model: ModelName = None,
    prompts: PromptName = None,
    tenant: Tenant = "",
) -> None:
    """Delete what has expired; with fingerprints, also what belongs to other models or prompts."""
    store = _existing(history)
    if (model is None) != (prompts is None):
        raise BadSetting("give both --model-fingerprint and --prompts-fingerprint, or neither.")
    keep = Scope(model, prompts, tenant) if model and prompts else None
    WORDS.print(f"{store.prune(keep_scope=keep)} entries deleted")


@app.command()
def forget(
    history: Log = DEFAULT,
    contains: Annotated[str | None, typer.Option(help="Delete questions that hold this text, in any case.")] = None,
    ids: Annotated[
        list[int] | None, typer.Option("--id", min=1, max=2**63 - 1, help="Delete this entry; may be repeated.")
    ] = None,
) -> None:
    """Delete questions with their vectors, and wipe them from the file."""
    if not contains and not ids:
        raise BadSetting("say what to forget: --contains TEXT or --id NUMBER.")
    WORDS.print(f"{_existing(history).forget(ids=ids or [], contains=contains)} entries deleted")


def _existing(history: str) -> HistoryStore:
    """Looking into a log must not make an empty one."""
    if not user_path(history.removeprefix("sqlite:")).is_file():
        raise BadInput(f"there is no log '{history}'. Make one: knowgate history import RUN --history {history}")
    return open_history(history)


def _add(store: HistoryStore, entries: list[LogEntry]) -> None:
    for place in range(0, len(entries), BATCH):
        store.add(entries[place : place + BATCH])


def _scope(store: HistoryStore, model: str | None, prompts: str | None, tenant: str) -> Scope:
    """The scope meant: the given one, else the only one there is."""
    if model and prompts:
        return Scope(model, prompts, tenant)
    there = [scope for scope in store.scopes() if scope.tenant == tenant]
    fitting = [s for s in there if model in (None, s.model) and prompts in (None, s.prompts)]
    if len(fitting) != 1:
        listed = "; ".join(f"--model-fingerprint {s.model} --prompts-fingerprint {s.prompts}" for s in there) or "none"
        raise BadSetting(f"say whose labels are meant. The log has: {listed}.")
    return fitting[0]


def _record(entry: LogEntry) -> dict[str, Any]:
    values = {key: value for key, value in asdict(entry).items() if key != "scope"}
    return {**values, **asdict(entry.scope)}


def _from_record(record: dict[str, Any], where: str) -> LogEntry:
    for key in ("weight", "created", "expires"):
        value = record.get(key)
        check_within(0 if value is None else value, f"'{key}' of {where}", most=LAST)
    try:
        scope = Scope(str(record["model"]), str(record["prompts"]), str(record.get("tenant") or ""))
        outcome = Outcome(record["outcome"]) if record.get("outcome") else None
        return LogEntry(
            _text(record["question"]),
            Known(record["label"]),
            scope,
            Source(record.get("source") or "human"),
            outcome,
            record.get("weight"),
            record.get("created") or time.time(),
            record.get("expires"),
        )
    except (KeyError, ValueError) as error:
        raise BadInput(
            f"{where}: {error}. Expected question, label (known, unknown, time-sensitive), model, prompts."
        ) from None


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"the question is {shown(value)}")
    check_text(value, "the question")
    return value


def _show(records: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        for record in records:
            print_json(record)
        return
    columns = [
        key for key in ("id", "similarity", "label", "outcome", "source", "question") if records and key in records[0]
    ]
    table = Table(*columns, box=None)
    for record in records:
        table.add_row(*(str(record[key] if record[key] is not None else "-") for key in columns))
    plain_console().print(table)
