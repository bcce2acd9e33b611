"""The questions of a first run, labelled part by part, closed- and open-book; without gold answers by agreement."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from knowgate.errors import BadInput
from knowgate.files import new_folder, sha256_text
from knowgate.firstrun.asked import Asked
from knowgate.firstrun.parts import Part, Rounds, read_rounds, write_rounds
from knowgate.firstrun.telling import Teller
from knowgate.fitting import says_the_same
from knowgate.labels import Tally, label
from knowgate.prompts import packaged
from knowgate.runs import AGREED, AGREEMENT, LabelRow, RunFolder, settings_hash
from knowgate.types import Model, Retriever

LAYERS = "mid,late,last"  # those that packaged gates read are among them


@dataclass(frozen=True)
class Labelled:
    """Label runs by part. key: of what they were made from."""

    folder: Path
    rounds: Rounds
    key: str

    def runs(self, *parts: Part) -> list[Path]:
        return self.rounds.runs(self.folder, *parts)


def label_parts(asked: Asked, out: Path, model: Model, retriever: Retriever, *, seed: int, tell: Teller) -> Labelled:
    """Goes on where it was; questions that failed before are tried again."""
    made_from = (asked.source, model.fingerprint, retriever.fingerprint, packaged("answer").fingerprint, seed, LAYERS)
    folder = out / "labels" / sha256_text(*map(str, made_from))[:8]
    rounds = read_rounds(folder).plus(asked.questions)
    write_rounds(folder, rounds)
    known, total, before = {one.id: one for one in asked.every}, sum(len(one.ids) for one in rounds.rounds), 0
    for one in rounds.rounds:
        label(
            [known[key] for key in one.ids],
            out=folder / one.name,
            model=model,
            index=retriever,
            samples=0,
            layers=LAYERS,
            seed=seed,
            retry_failed=True,
            on_progress=_showing(tell, before, total),
        )
        before += len(one.ids)
    done = sum(error is None for one in rounds.rounds for error in RunFolder(folder / one.name).done().values())
    labelled = Labelled(folder, rounds, sha256_text(folder.name, str(total), str(done))[:16])
    return labelled if asked.has_gold else _agreed(labelled)


def _showing(tell: Teller, before: int, total: int) -> Callable[[Tally], None]:
    def show(tally: Tally) -> None:
        pace = f"{tally.fresh / tally.seconds:.2f} questions/s" if tally.seconds else ""
        tell.show("labelling", before + tally.done, total, "questions", pace)

    return show


# --- without gold answers -------------------------------------------------------------------------


def _agreed(labelled: Labelled) -> Labelled:
    for one in labelled.rounds.rounds:
        grade_by_agreement(RunFolder(labelled.folder / one.name), labelled.folder / AGREED / one.name)
    return replace(labelled, folder=labelled.folder / AGREED, key=f"{labelled.key} {AGREED}")


def grade_by_agreement(run: RunFolder, out: Path) -> None:
    """The same run with other verdicts: the answer with passages is right, the other one where it says the same.

    What a gate is proven to lose on such rows is the share of answers that skipping changes. By any gold answer it
    loses no more: who says the same is as right.
    """
    settings = {key: value for key, value in run.settings().items() if key not in ("hash", "depth")}
    settings["grader"] = AGREEMENT
    manifest = {key: value for key, value in run.manifest().items() if key not in ("version", "settings")}
    with new_folder(out) as folder:
        made = RunFolder(folder)
        made.start({**settings, "hash": settings_hash(settings)}, manifest)
        for shard in run.path.glob("*.safetensors"):
            shutil.copyfile(shard, folder / shard.name)
        made.append([_regraded(row) for row in run.rows()], {})


def _regraded(row: LabelRow) -> LabelRow:
    if row.error is not None or row.closed is None or row.open is None:
        return replace(row, grader=AGREEMENT)
    same = says_the_same(row)
    closed, opened = replace(row.closed, correct=same), replace(row.open, correct=True)
    return replace(row, grader=AGREEMENT, benefit=int(not same), closed=closed, open=opened)


def check_answered(runs: Sequence[Path]) -> None:
    """Say why nothing can be measured, where every question failed or found nothing."""
    rows = [row for run in runs for row in RunFolder(run).rows()]
    failed = [row.error for row in rows if row.error is not None]
    if rows and len(failed) == len(rows):
        raise BadInput(f"all {len(rows)} questions failed, the first with: {failed[0]}")
    if all(row.open is None for row in rows):
        raise BadInput(
            "for no question a passage was found: are these questions about these documents? Look: "
            f"knowgate report {runs[0]}"
        )
