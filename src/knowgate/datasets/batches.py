"""OpenAI's batches: `openai-batch:REQUESTS?closed=RESULTS&open=RESULTS&gold=FILE`.

The requests hold the questions, the results what the LLM said: `import-answers --closed closed --open open`. Gold
answers come from a JSONL file of {"custom_id": ..., "answers": [...]}. What failed has no answer: it is named.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from knowgate.datasets.fields import read_options, text_of
from knowgate.datasets.parse import parse_question
from knowgate.datasets.tables import named_file
from knowgate.errors import BadInput
from knowgate.files import read_jsonl
from knowgate.types import Question

OPTIONS = ("closed", "open", "gold")
ID = "custom_id"


def read_batch(value: str) -> Iterator[Question]:
    """The questions of a batch with the answers that came back."""
    path, query = named_file(value)
    options = read_options(query, OPTIONS, "openai-batch")
    replies = {name: dict(_replies(options[name])) for name in ("closed", "open") if name in options}
    golds = dict(_golds(options["gold"])) if "gold" in options else {}
    for number, record in read_jsonl(path):
        where, own = f"{path} line {number}", _id(record, f"{path} line {number}")
        body = record.get("body")
        asked = text_of(body.get("messages") or body.get("input")) if isinstance(body, dict) else ""
        missing = [name for name, found in replies.items() if own not in found]
        if missing:
            raise BadInput(
                f"{where}: '{own}' has no answer in {options[missing[0]]}. Take it out of the requests, or run it."
            )
        meta = {name: found[own] for name, found in replies.items()}
        made = {"question": asked, "id": own, "answers": golds.get(own, []), "meta": meta}
        yield parse_question(made, where, default_id=own)


def _replies(file: str) -> Iterator[tuple[str, str]]:
    """What was answered, by the request's id; what failed is left out."""
    path, _ = named_file(file)
    for number, record in read_jsonl(path):
        reply = record.get("response")
        body = reply.get("body") if isinstance(reply, dict) and reply.get("status_code") == 200 else None
        if isinstance(body, dict) and not record.get("error"):
            yield _id(record, f"{path} line {number}"), text_of(body.get("choices") or body.get("output"))


def _golds(file: str) -> Iterator[tuple[str, list[Any]]]:
    path, _ = named_file(file)
    for number, record in read_jsonl(path):
        answers = record.get("answers")
        yield _id(record, f"{path} line {number}"), answers if isinstance(answers, list) else [answers]


def _id(record: dict[str, Any], where: str) -> str:
    own = record.get(ID)
    if not isinstance(own, str) or not own:
        raise BadInput(f"{where} has no '{ID}': it is no line of a batch. Check which file is which.")
    return own
