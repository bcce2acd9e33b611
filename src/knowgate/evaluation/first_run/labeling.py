"""The questions of a first run, labelled part by part, closed- and open-book; without gold answers by agreement."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from knowgate.core.files import atomic_folder, sha256_text, write_json
from knowgate.core.schema import read_record
from knowgate.core.validation import read_json
from knowgate.data.runs.caveats import AGREEMENT_GRADER
from knowgate.data.runs.folder import AGREEMENT_FOLDER, RunFolder, hash_settings
from knowgate.data.runs.rows import LabelRow
from knowgate.errors import ArtifactError, BadInput
from knowgate.evaluation.first_run.options import ProgressReporter
from knowgate.evaluation.first_run.questions import FirstRunQuestions
from knowgate.labels.labeling import label
from knowgate.labels.run import LabelProgress
from knowgate.models.prompts.templates import load_packaged_templates
from knowgate.training.examples import answers_agree
from knowgate.types import Model, Question, Retriever

QuestionPart = Literal["fit", "calibration", "test"]
QUESTION_PARTS: tuple[QuestionPart, ...] = get_args(QuestionPart)
# Half to learn from, three tenths for the threshold, two tenths to measure: of a hundred, 50, 30 and 20.
PART_ROTATION: tuple[QuestionPart, ...] = ("fit", "calibration", "fit", "test", "fit",
                          "calibration", "fit", "calibration", "fit", "test")  # fmt: skip
MIN_QUESTIONS_TO_SPLIT = 20  # questions; fewer are all measured on, for nothing can be learnt or chosen
ROUNDS_FILE = "rounds.json"


@dataclass(frozen=True)
class LabelRound:
    """Questions that are labelled together; `name` is the folder of their label run."""

    name: str
    part: QuestionPart
    ids: tuple[str, ...]


@dataclass(frozen=True)
class LabelRounds:
    rounds: tuple[LabelRound, ...] = ()

    def runs(self, folder: Path, *parts: QuestionPart) -> list[Path]:
        """Folders of the label runs of these parts."""
        return [folder / one.name for one in self.rounds if one.part in parts]

    def plus(self, questions: Sequence[Question]) -> LabelRounds:
        """With a round more for each part that has new questions."""
        known = {key for one in self.rounds for key in one.ids}
        parts = split_into_parts(questions)
        fresh = {part: tuple(one.id for one in parts[part] if one.id not in known) for part in QUESTION_PARTS}
        added = [LabelRound(self._name(part), part, ids) for part, ids in fresh.items() if ids]
        return LabelRounds((*self.rounds, *added))

    def _name(self, part: QuestionPart) -> str:
        return f"{part}-{1 + sum(one.part == part for one in self.rounds)}"


def split_into_parts(questions: Sequence[Question]) -> Mapping[QuestionPart, list[Question]]:
    """Each part's questions. The first of a longer list fall into the parts they would fall into alone."""
    turn: tuple[QuestionPart, ...] = PART_ROTATION if len(questions) >= MIN_QUESTIONS_TO_SPLIT else ("test",)
    return {
        part: [one for place, one in enumerate(questions) if turn[place % len(turn)] == part] for part in QUESTION_PARTS
    }


def read_rounds(folder: Path) -> LabelRounds:
    file = folder / ROUNDS_FILE
    if not file.is_file():
        return LabelRounds()
    try:
        return read_record(LabelRounds, read_json(file), str(file))
    except BadInput as error:
        raise ArtifactError(f"{str(error).rstrip('.')}. Delete the folder '{folder}' and start again.") from None


def write_rounds(folder: Path, rounds: LabelRounds) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [{"name": one.name, "part": one.part, "ids": list(one.ids)} for one in rounds.rounds]
    write_json(folder / ROUNDS_FILE, {"rounds": lines})


LABEL_LAYERS = "mid,late,last"  # those that packaged gates read are among them


@dataclass(frozen=True)
class LabeledParts:
    """Label runs by part. key: of what they were made from."""

    folder: Path
    rounds: LabelRounds
    key: str

    def runs(self, *parts: QuestionPart) -> list[Path]:
        return self.rounds.runs(self.folder, *parts)


def label_parts(
    asked: FirstRunQuestions, out: Path, model: Model, retriever: Retriever, *, seed: int, tell: ProgressReporter
) -> LabeledParts:
    """Goes on where it was; questions that failed before are tried again."""
    made_from = (
        asked.source,
        model.fingerprint,
        retriever.fingerprint,
        load_packaged_templates("answer").fingerprint,
        seed,
        LABEL_LAYERS,
    )
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
            layers=LABEL_LAYERS,
            seed=seed,
            retry_failed=True,
            on_progress=_showing(tell, before, total),
        )
        before += len(one.ids)
    done = sum(error is None for one in rounds.rounds for error in RunFolder(folder / one.name).done().values())
    labelled = LabeledParts(folder, rounds, sha256_text(folder.name, str(total), str(done))[:16])
    return labelled if asked.has_gold else _agreed(labelled)


def _showing(tell: ProgressReporter, before: int, total: int) -> Callable[[LabelProgress], None]:
    def show(tally: LabelProgress) -> None:
        pace = f"{tally.fresh / tally.seconds:.2f} questions/s" if tally.seconds else ""
        tell.show("labelling", before + tally.done, total, "questions", pace)

    return show


# --- without gold answers -------------------------------------------------------------------------


def _agreed(labelled: LabeledParts) -> LabeledParts:
    for one in labelled.rounds.rounds:
        grade_by_agreement(RunFolder(labelled.folder / one.name), labelled.folder / AGREEMENT_FOLDER / one.name)
    return replace(labelled, folder=labelled.folder / AGREEMENT_FOLDER, key=f"{labelled.key} {AGREEMENT_FOLDER}")


def grade_by_agreement(run: RunFolder, out: Path) -> None:
    """The same run with other verdicts: the answer with passages is right, the other one where it says the same.

    What a gate is proven to lose on such rows is the share of answers that skipping changes. By any gold answer it
    loses no more: who says the same is as right.
    """
    settings = {key: value for key, value in run.settings().items() if key not in ("hash", "depth")}
    settings["grader"] = AGREEMENT_GRADER
    manifest = {key: value for key, value in run.manifest().items() if key not in ("version", "settings")}
    with atomic_folder(out) as folder:
        made = RunFolder(folder)
        made.start({**settings, "hash": hash_settings(settings)}, manifest)
        for shard in run.path.glob("*.safetensors"):
            shutil.copyfile(shard, folder / shard.name)
        made.append([_regraded(row) for row in run.rows()], {})


def _regraded(row: LabelRow) -> LabelRow:
    if row.error is not None or row.closed is None or row.open is None:
        return replace(row, grader=AGREEMENT_GRADER)
    same = answers_agree(row)
    closed, opened = replace(row.closed, correct=same), replace(row.open, correct=True)
    return replace(row, grader=AGREEMENT_GRADER, benefit=int(not same), closed=closed, open=opened)


def check_label_runs(runs: Sequence[Path]) -> None:
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
