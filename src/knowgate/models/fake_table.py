"""The table of the fake model: its entries, their checks, and the files they come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from knowgate.doors import read_json, shown
from knowgate.errors import BadInput
from knowgate.files import read_jsonl

BEYOND = 1e30  # of log-probabilities: no model says less


@dataclass(frozen=True)
class FakeEntry:
    """One line of the table."""

    closed: str | None = None
    open: str | None = None
    when: str | None = None
    known: bool | None = None
    logprob: float | None = None
    samples: tuple[str, ...] = ()

    def is_open(self, text: str) -> bool:
        """Whether a prompt with this text gets the open-book answer."""
        return self.open is not None and (self.open if self.when is None else self.when) in text


def read_table(path: Path) -> dict[str, Any]:
    """The table in a .json or .jsonl file."""
    if not path.is_file():
        raise BadInput(f"the table of the fake model, {path}, is not a file.")
    if path.suffix != ".jsonl":
        table = read_json(path)
        if not isinstance(table, dict):
            raise BadInput(f"{path} is not a JSON object of question -> entry.")
        return table
    rows: dict[str, Any] = {}
    for number, row in read_jsonl(path):
        question = row.pop("question", None)
        if not isinstance(question, str):
            raise BadInput(f"{path} line {number} has no text 'question'.")
        rows[question] = row
    return rows


def check_entry(key: str, value: object) -> FakeEntry:
    """A checked entry."""
    if isinstance(value, str):
        return FakeEntry(closed=value)
    key = shown(key)
    fields = FakeEntry.__dataclass_fields__
    if not isinstance(value, Mapping) or not set(value) <= set(fields):
        raise BadInput(f"table entry {key} must be a text or have only the fields {', '.join(fields)}.")
    for name in ("closed", "open", "when"):
        if not isinstance(value.get(name), str | None):
            raise BadInput(f"table entry {key}: {name} must be a text.")
    if not isinstance(value.get("known"), bool | None):
        raise BadInput(f"table entry {key}: known must be true or false.")
    logprob = value.get("logprob")
    if logprob is not None and not (isinstance(logprob, int | float) and -BEYOND < logprob <= 0):
        raise BadInput(f"table entry {key}: logprob must be a number not above 0, not {shown(logprob)}.")
    samples = value.get("samples", ())
    if not isinstance(samples, list | tuple) or not all(isinstance(sample, str) for sample in samples):
        raise BadInput(f"table entry {key}: samples must be a list of texts.")
    return FakeEntry(**{**value, "samples": tuple(samples)})
