"""Label the questions of a first run in three parts: to fit a gate, to choose its threshold, and to measure it.

Before the slow steps, say what the questions can prove and how long labeling will take.
"""

from __future__ import annotations

import itertools
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from knowgate.core.files import atomic_folder, sha256_text, write_json
from knowgate.core.schema import read_record
from knowgate.core.validation import read_json
from knowgate.data.runs.columns import AGREEMENT_GRADER
from knowgate.data.runs.folder import RunFolder, hash_settings
from knowgate.data.runs.rows import LabelRow
from knowgate.errors import ArtifactError, BadInput, ModelError
from knowgate.evaluation.first_run.options import ProgressReporter
from knowgate.evaluation.first_run.questions import FirstRunQuestions
from knowgate.gates.calibration.guarantee import compute_required_rows
from knowgate.labels.labeling import label
from knowgate.labels.run import LabelProgress
from knowgate.models.prompts.answers import load_answer_prompts
from knowgate.models.prompts.templates import load_packaged_templates
from knowgate.training.examples import answers_agree
from knowgate.types import Model, Question, Retriever

QuestionPart = Literal["fit", "calibration", "test"]
QUESTION_PARTS: tuple[QuestionPart, ...] = get_args(QuestionPart)
# Half to fit, three tenths to choose the threshold, two tenths to measure: of a hundred, 50, 30 and 20.
PART_ROTATION: tuple[QuestionPart, ...] = (
    *("fit", "calibration", "fit", "test", "fit"),
    *("calibration", "fit", "calibration", "fit", "test"),
)
MIN_QUESTIONS_TO_SPLIT = 20  # fewer are all used to measure, because nothing can be learned or chosen
ROUNDS_FILE = "rounds.json"
AGREEMENT_FOLDER = "agreed"  # subfolder of runs graded by agreement, which replace the runs beside it
LABEL_LAYERS = "mid,late,last"  # include those that packaged gates read


@dataclass(frozen=True)
class LabelRound:
    """Questions labeled together. Labeling records and grades answers with and without passages.

    Attributes:
        name: Folder of their label run, such as 'fit-1'.
        part: What the questions are used for: to fit a gate, to calibrate its threshold, or to test it.
        ids: Ids of the questions.
    """

    name: str
    part: QuestionPart
    ids: tuple[str, ...]


@dataclass(frozen=True)
class LabelRounds:
    """All rounds of labeling. The questions of each round get a label run of their own.

    Attributes:
        rounds: The rounds in order. A later run with more questions adds rounds.
    """

    rounds: tuple[LabelRound, ...] = ()

    @property
    def n_questions(self) -> int:
        """Number of questions in all rounds."""
        return sum(len(label_round.ids) for label_round in self.rounds)

    def add(self, questions: Sequence[Question]) -> LabelRounds:
        """Return these rounds, followed by new rounds for the questions that are in none of them."""
        labeled = {question_id for label_round in self.rounds for question_id in label_round.ids}
        added = []
        for part, members in split_into_parts(questions).items():
            new_ids = tuple(question.id for question in members if question.id not in labeled)
            number = 1 + sum(label_round.part == part for label_round in self.rounds)
            if new_ids:
                added.append(LabelRound(f"{part}-{number}", part, new_ids))
        return LabelRounds((*self.rounds, *added))


def split_into_parts(questions: Sequence[Question]) -> Mapping[QuestionPart, list[Question]]:
    """Split questions into the parts fit, calibration and test.

    Appending questions does not move earlier ones to other parts.
    """
    rotation: tuple[QuestionPart, ...] = PART_ROTATION if len(questions) >= MIN_QUESTIONS_TO_SPLIT else ("test",)
    parts: dict[QuestionPart, list[Question]] = {part: [] for part in QUESTION_PARTS}
    for question, part in zip(questions, itertools.cycle(rotation), strict=False):  # the rotation repeats
        parts[part].append(question)
    return parts


def read_rounds(folder: Path) -> LabelRounds:
    """Read the labeling rounds of a folder; empty if nothing was labeled there yet."""
    file = folder / ROUNDS_FILE
    if not file.is_file():
        return LabelRounds()
    try:
        return read_record(LabelRounds, read_json(file), str(file))
    except BadInput as error:
        raise ArtifactError(f"{str(error).rstrip('.')}. Delete the folder '{folder}' and start again.") from None


def write_rounds(folder: Path, rounds: LabelRounds) -> None:
    """Write the rounds to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / ROUNDS_FILE, asdict(rounds))


@dataclass(frozen=True)
class LabeledParts:
    """Label runs (folders of graded answers) by part: fit, calibration and test.

    Attributes:
        folder: Folder that holds the label runs.
        rounds: The name, part and questions of each label run.
        key: Identifies the labels. Results that depend on the labels are computed again if the key changes.
    """

    folder: Path
    rounds: tuple[LabelRound, ...]
    key: str

    def runs(self, *parts: QuestionPart) -> list[Path]:
        """List the folders of the label runs of the given parts; of all parts if none is given."""
        return [self.folder / item.name for item in self.rounds if item.part in (parts or QUESTION_PARTS)]


def label_parts(
    questions: FirstRunQuestions,
    folder: Path,
    model: Model,
    retriever: Retriever,
    seed: int,
    reporter: ProgressReporter,
) -> LabeledParts:
    """Record and grade the LLM's answers with and without passages, in one label run per round.

    Calling again adds rounds for newly selected questions and continues an interrupted run.
    """
    all_rounds = read_rounds(folder).add(questions.selected)
    write_rounds(folder, all_rounds)
    # Earlier rounds may contain questions that are not selected now.
    by_id = {question.id: question for question in questions.available}
    settings = {"model": model, "index": retriever, "samples": 0, "layers": LABEL_LAYERS, "seed": seed}
    n_before = 0  # number of questions in earlier rounds

    def show(progress: LabelProgress) -> None:
        pace = f"{progress.fresh / progress.seconds:.2f} questions/s" if progress.seconds else ""
        reporter.show("labeling", n_before + progress.done, all_rounds.n_questions, "questions", pace)

    for label_round in all_rounds.rounds:
        members = [by_id[id] for id in label_round.ids]
        label(members, out=folder / label_round.name, **settings, retry_failed=True, on_progress=show)
        n_before += len(members)
    labeled = LabeledParts(folder, all_rounds.rounds, _make_label_key(folder, all_rounds))
    return labeled if questions.has_gold else _grade_by_agreement(labeled)


def _make_label_key(folder: Path, all_rounds: LabelRounds) -> str:
    """Make a key that changes if the number of questions or of successfully answered questions changes."""
    runs = [RunFolder(folder / label_round.name) for label_round in all_rounds.rounds]
    errors = [error for run in runs for error in run.done().values()]
    n_answered = errors.count(None)  # None means that no error occurred
    return sha256_text(folder.name, str(all_rounds.n_questions), str(n_answered))[:16]


def name_label_folder(questions: FirstRunQuestions, model: Model, retriever: Retriever, seed: int) -> str:
    """Return the name of the folder of labels, a hash of all that the answers depend on."""
    prompts = load_packaged_templates("answer").fingerprint
    inputs = (questions.source, model.fingerprint, retriever.fingerprint, prompts, seed, LABEL_LAYERS)
    return sha256_text(*map(str, inputs))[:8]


def count_labeled(questions: FirstRunQuestions, folder: Path) -> int:
    """Count the selected questions that an earlier run has labeled without an error."""
    runs = [
        RunFolder(folder / label_round.name)
        for label_round in read_rounds(folder).rounds
        if (folder / label_round.name).is_dir()
    ]
    done = {id for run in runs for id, error in run.done().items() if error is None}
    return len(done & {question.id for question in questions.selected})


def _grade_by_agreement(labeled: LabeledParts) -> LabeledParts:
    """Copy all label runs into a subfolder, and grade the copies without gold answers: see `grade_by_agreement`."""
    copies = labeled.folder / AGREEMENT_FOLDER
    for label_round in labeled.rounds:
        grade_by_agreement(RunFolder(labeled.folder / label_round.name), copies / label_round.name)
    # With a key of their own, results of the original grades are not reused for the copies.
    return replace(labeled, folder=copies, key=f"{labeled.key} {AGREEMENT_FOLDER}")


def grade_by_agreement(run: RunFolder, out: Path) -> None:
    """Copy a label run and grade it without gold answers.

    An answer without passages counts as right if the LLM gives the same answer with passages.
    """
    # Left out: 'depth', which is copied with the manifest below, and 'hash', which changes with the grader.
    settings = {key: value for key, value in run.settings().items() if key not in ("hash", "depth")}
    settings["grader"] = AGREEMENT_GRADER
    settings["hash"] = hash_settings(settings)
    # Left out: the version and the settings, which `start` writes.
    manifest = {key: value for key, value in run.manifest().items() if key not in ("version", "settings")}
    with atomic_folder(out) as folder:
        copy = RunFolder(folder)
        copy.start(settings, manifest)
        for shard in run.path.glob("*.safetensors"):
            shutil.copyfile(shard, folder / shard.name)
        copy.append([_regrade(row) for row in run.rows()], {})


def _regrade(row: LabelRow) -> LabelRow:
    """Grade the answer with passages as right. The answer without passages is right if it agrees with that answer."""
    if row.error is not None or row.closed is None or row.open is None:
        return replace(row, grader=AGREEMENT_GRADER)
    agree = answers_agree(row)
    return replace(
        row,
        grader=AGREEMENT_GRADER,
        closed=replace(row.closed, correct=agree),
        open=replace(row.open, correct=True),
        benefit=0 if agree else 1,  # if the answers differ, retrieval turns a wrong answer right
    )


def check_label_runs(runs: Sequence[Path]) -> None:
    """Raise BadInput if every question failed, or no passage was found for any of them."""
    rows = [row for run in runs for row in RunFolder(run).rows()]
    errors = [row.error for row in rows if row.error is not None]
    if rows and len(errors) == len(rows):
        raise BadInput(
            f"the LLM could not answer any of the {len(rows)} questions. The first error: {errors[0]} Fix it and start again."
        )
    if all(row.open is None for row in rows):
        raise BadInput(
            "no passage was found for any question. Check whether the questions are about these documents. To see them: "
            f"knowgate report {runs[0]}"
        )


RECOMMENDED_QUESTIONS = 240  # with that many, a trained gate can be proven on the held-out ones
MIN_POLICY_ROWS = 400  # graded rows for a policy: its held-out quarter can then prove a loss of 5 %, with answers lost
ANSWER_TOKENS = 32  # tokens of an answer while timing
CONFIDENCE = 0.95
PROOF_SHARE = 1 - PART_ROTATION.count("test") / len(PART_ROTATION)  # share of questions that may prove a threshold
POLICY_QUESTIONS = math.ceil(MIN_POLICY_ROWS / PROOF_SHARE)


def count_required_questions(max_loss: float) -> int:
    """Return the least number of questions that can prove a loss of at most `max_loss`."""
    # An untrained and a trained gate may both be tested, so each gets half of the allowed error probability.
    n_for_proof = compute_required_rows(max_loss, (1 - CONFIDENCE) / 2)
    # Only this share of the questions is used for the proof. The others are kept to measure the result.
    return max(MIN_QUESTIONS_TO_SPLIT, math.ceil(n_for_proof / PROOF_SHARE))


def report_plan(n_questions: int, max_loss: float, reporter: ProgressReporter) -> None:
    """Tell the user whether the number of questions is enough for a proof."""
    required = count_required_questions(max_loss)
    proposed = max(RECOMMENDED_QUESTIONS, required)
    claim = f"that skipping loses at most {100 * max_loss:g} % of the answers"
    if n_questions < required:
        reporter.warn(
            f"{n_questions} questions cannot prove {claim}: that takes {required} or more, better {proposed}. This run only "
            "measures; its settings will retrieve for every question."
        )
        return
    message = f"{n_questions} questions can prove {claim}, if few are lost."
    if n_questions < POLICY_QUESTIONS:
        message += f" {proposed} could prove it for a gate trained on them; {POLICY_QUESTIONS}, for a policy."
    reporter.say(message)


def report_label_time(
    questions: Sequence[Question], n_labeled: int, model: Model, retriever: Retriever, reporter: ProgressReporter
) -> None:
    """Time the last question and report how long labeling will take.

    If the LLM fails on it, the first question is timed.

    Args:
        questions: The questions to label.
        n_labeled: How many of them are labeled already.
        model: The LLM.
        retriever: Searches for passages.
        reporter: Receives the message.
    """
    n = len(questions) - n_labeled
    if n <= 0:
        return
    try:
        seconds = time_question(questions[-1], model, retriever)
    except ModelError:
        seconds = time_question(questions[0], model, retriever)
    rest = "Choosing a gate and the report take a minute more."
    if len(questions) >= POLICY_QUESTIONS:
        rest = "Fitting a policy takes some minutes more."
    reporter.say(f"Labeling {n} questions takes {format_duration(n * seconds)} ({seconds:.1f} s each). {rest}")


def time_question(question: Question, model: Model, retriever: Retriever) -> float:
    """Return the seconds for answering one question with and without passages."""
    prompts = load_answer_prompts(model=model)
    start = time.perf_counter()
    passages = retriever.search([question.text], 3)[0]
    for prompt in (prompts.closed(question), prompts.open(question, passages)):
        if model.fits([prompt], ANSWER_TOKENS)[0]:  # a prompt that is too long for the LLM is not timed
            model.generate([prompt], max_tokens=ANSWER_TOKENS)
    return time.perf_counter() - start


def format_duration(seconds: float) -> str:
    """Format a duration in words: 'less than a minute', 'about 5 minutes'."""
    if seconds < 60:
        return "less than a minute"
    if seconds < 5400:
        minutes = math.ceil(seconds / 60)
        return f"about {minutes} minutes" if minutes > 1 else "about a minute"
    return f"about {seconds / 3600:.1f} hours"
