"""Label runs made small enough to be committed, without what belongs to the data sets."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

META = ("dataset", "type", "num_hops", "hops", "fact_type", "false_premise", "time_sensitive", "subject")


def pack(full: Path, out: Path, needs: Sequence[Any]) -> None:
    """The rows, the settings, what gates said, and what second looks said. OUT's folder is called after the LLM.

    Questions that some gate was not asked, as it was fitted on them, are left out.
    """
    from knowgate.core.files import write_json
    from knowgate.data.runs.folder import RunFolder
    from knowgate.data.runs.records import read_usefulness, write_needs, write_usefulness
    from knowgate.data.runs.rows import row_to_json

    out.mkdir(parents=True, exist_ok=True)
    foreign = str(RunFolder(full).manifest()["settings"]["model"]).startswith("recorded:")
    rows = [row for row in RunFolder(full).rows() if all(row.id in one.needs for one in needs)]
    needs = [_only(one, {row.id for row in rows}) for one in needs]
    lines = [json.dumps(row_to_json(packed(row, foreign)), ensure_ascii=False) for row in rows]
    with gzip.GzipFile(out / "labels.jsonl.gz", "wb", mtime=0) as file:
        file.write(("\n".join(lines) + "\n").encode())
    manifest = RunFolder(full).manifest()
    write_json(out / "run.json", manifest if foreign else _named(manifest, out.parent.name, len(rows)))
    (out / "needs.jsonl").unlink(missing_ok=True)  # of an earlier recording
    if needs:
        write_needs(out, needs)
    for use in read_usefulness(full):
        write_usefulness(out, use)


def _only(said: Any, ids: set[str]) -> Any:
    kept = {name: {key: need for key, need in getattr(said, name).items() if key in ids} for name in ("needs", "raw")}
    return replace(said, **kept)


def _named(manifest: dict[str, Any], model: str, questions: int) -> dict[str, Any]:
    """The LLM by its name, not by the file it was read from."""
    from knowgate.data.runs.folder import hash_settings

    rest = {key: value for key, value in manifest["settings"].items() if key != "hash"}
    rest |= {"model": model, "questions": questions}
    return {**manifest, "settings": {**rest, "hash": hash_settings(rest)}}


def packed(row: Any, foreign: bool) -> Any:
    """The row without what belongs to the data set: questions, gold answers, passages, choices, samples.

    foreign: the answers were recorded by others and are part of the data set too.
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
        closed=_numbers(row.closed, foreign, whole=True),
        open=_numbers(row.open, foreign),
        mask=_numbers(row.mask, foreign),
        iterative=_numbers(row.iterative, foreign),
        signals={name: round(value, 3) for name, value in row.signals.items()},
        seconds=round(row.seconds, 3),
    )


def _numbers(side: Any, foreign: bool, *, whole: bool = False) -> Any:
    """An answer with the statistics of its tokens; whole: entropy and margin too."""
    from knowgate.types import Token

    if side is None:
        return None

    def short(value: float | None) -> float | None:
        return round(value, 3) if whole and value is not None else None

    tokens = side.tokens and tuple(
        Token("", round(one.logprob, 3), short(one.entropy), short(one.margin)) for one in side.tokens
    )
    return replace(side, text="" if foreign else side.text, tokens=tokens, samples=(), sample_correct=())
