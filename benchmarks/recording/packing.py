"""Pack label runs: small enough to be committed, and without content of the data sets."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

META = ("dataset", "type", "num_hops", "hops", "fact_type", "false_premise", "time_sensitive", "subject")


def pack(full: Path, out: Path, needs: Sequence[Any]) -> None:
    """Write a packed label run: its rows and settings, the needs of gates, and the verdicts of second looks.

    Args:
        full: Folder of the full label run.
        out: Folder of the packed run. The name of its parent folder is the name of the LLM.
        needs: Recorded needs. Questions without a need of every gate are left out: some gate was fitted on them.
    """
    from knowgate.core.files import write_json
    from knowgate.data.runs.folder import RunFolder
    from knowgate.data.runs.records import read_usefulness, write_needs, write_usefulness
    from knowgate.data.runs.rows import row_to_json

    out.mkdir(parents=True, exist_ok=True)
    foreign = str(RunFolder(full).manifest()["settings"]["model"]).startswith("recorded:")
    rows = [row for row in RunFolder(full).rows() if all(row.id in record.needs for record in needs)]
    needs = [_select_ids(record, {row.id for row in rows}) for record in needs]
    lines = [json.dumps(row_to_json(pack_row(row, foreign)), ensure_ascii=False) for row in rows]
    with gzip.GzipFile(out / "labels.jsonl.gz", "wb", mtime=0) as file:
        file.write(("\n".join(lines) + "\n").encode())
    manifest = RunFolder(full).manifest()
    write_json(out / "run.json", manifest if foreign else _name_model(manifest, out.parent.name, len(rows)))
    (out / "needs.jsonl").unlink(missing_ok=True)  # An earlier record may have left one.
    if needs:
        write_needs(out, needs)
    for verdicts in read_usefulness(full):
        write_usefulness(out, verdicts)


def _select_ids(record: Any, ids: set[str]) -> Any:
    """Return recorded needs of the given questions only."""
    selected = {
        name: {key: need for key, need in getattr(record, name).items() if key in ids} for name in ("needs", "raw")
    }
    return replace(record, **selected)


def _name_model(manifest: dict[str, Any], model: str, questions: int) -> dict[str, Any]:
    """Return the manifest with the name of the LLM in place of the file from which it was loaded."""
    from knowgate.data.runs.folder import hash_settings

    rest = {key: value for key, value in manifest["settings"].items() if key != "hash"}
    rest |= {"model": model, "questions": questions}
    return {**manifest, "settings": {**rest, "hash": hash_settings(rest)}}


def pack_row(row: Any, foreign: bool) -> Any:
    """Return a row without content of the data set: questions, gold answers, passages, choices, samples.

    Args:
        row: Row of the full label run.
        foreign: Whether others recorded the answers, so that these belong to the data set, too.
    """
    return replace(
        row,
        question="",
        answers=(),
        choices=("",) * len(row.choices),
        passages=(),
        vector=None,
        states="",
        meta={key: row.meta[key] for key in META if key in row.meta},
        answer_frequency=row.meta.get("answer_frequency", row.answer_frequency),
        closed=_pack_answer(row.closed, foreign, with_entropy=True),
        open=_pack_answer(row.open, foreign),
        mask=_pack_answer(row.mask, foreign),
        iterative=_pack_answer(row.iterative, foreign),
        signals={name: round(value, 3) for name, value in row.signals.items()},
        seconds=round(row.seconds, 3),
    )


def _pack_answer(answer: Any, foreign: bool, *, with_entropy: bool = False) -> Any:
    """Return an answer with the log-probabilities of its tokens, and with entropy and margin if wanted."""
    from knowgate.types import Token

    if answer is None:
        return None

    def shorten(value: float | None) -> float | None:
        return round(value, 3) if with_entropy and value is not None else None

    tokens = answer.tokens and tuple(
        Token("", round(token.logprob, 3), shorten(token.entropy), shorten(token.margin)) for token in answer.tokens
    )
    return replace(answer, text="" if foreign else answer.text, tokens=tokens, samples=(), sample_correct=())
