"""Questions about invented lands, documents that answer them, and a fake model that knows every other answer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from knowgate.types import Question

SYLLABLES = ("ba", "ko", "lu", "mi", "ra", "te", "vo", "zu")


@dataclass(frozen=True)
class Invented:
    """Where things are written."""

    data: str
    model: str
    docs: Path
    questions: list[Question]


def write_invented(folder: Path, n: int = 120) -> Invented:
    """Every other capital is known; the documents hold all of them, and the model can read."""
    folder.mkdir(parents=True, exist_ok=True)
    places = [(word(number, "land"), word(number, "stad")) for number in range(n)]
    questions = [
        Question(f"What is the capital of {land}?", id=f"q{number}", answers=(town,))
        for number, (land, town) in enumerate(places)
    ]
    table = {one.text: entry(number, one.answers[0]) for number, one in enumerate(questions)}
    documents = [{"id": f"d{i}", "text": f"The capital of {land} is {town}."} for i, (land, town) in enumerate(places)]
    asked = [{"id": one.id, "question": one.text, "answers": list(one.answers)} for one in questions]
    (folder / "table.json").write_text(json.dumps(table))
    (folder / "questions.jsonl").write_text(lines(asked))
    (folder / "docs.jsonl").write_text(lines(documents))
    return Invented(f"jsonl:{folder}/questions.jsonl", f"fake:{folder}/table.json", folder / "docs.jsonl", questions)


def word(number: int, ending: str) -> str:
    digits = [number // 64 % 8, number // 8 % 8, number % 8]
    return ("".join(SYLLABLES[digit] for digit in digits) + ending).capitalize()


def entry(number: int, town: str) -> dict[str, Any]:
    known = number % 2 == 0
    return {"closed": town if known else "Nowhere", "open": town, "known": known}


def lines(records: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)
