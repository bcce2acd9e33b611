"""Fit a judge of answers: a causal model or a small encoder learns whether the LLM's answer is right.

The judge gate for black-box LLMs and IK's fine-tuned mode share this code; they differ in the question that is asked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np

from knowgate.core.options import option, with_options
from knowgate.data.signals.vectors import draft_texts
from knowgate.errors import BadInput, BadSetting
from knowgate.gates import load_fitted_gate
from knowgate.gates.judges import AnswerJudge, encode_answers
from knowgate.gates.judges.encoder_judge import is_encoder_spec
from knowgate.gates.offline_scoring import mark_seen_rows
from knowgate.stats.metrics import FloatArray
from knowgate.training.examples import OPEN_BOOK_TARGETS, Examples, describe_useless_answers
from knowgate.training.fit_function import ExampleRequirements, FitProgressCallback, FitResult, ignore_progress
from knowgate.training.judges.ensemble import EnsembleMember, FittedJudge, fit_judge, plan_ensemble
from knowgate.training.judges.trainable_models import TrainingExample, make_answer_judge_spec
from knowgate.training.judges.training_options import AnswerJudgeFitOptions, JudgeTrainingOptions
from knowgate.types import Signal, SignalRequest

if TYPE_CHECKING:
    from knowgate.models.tokenization import LabelPromptTokens

# Makes the prompts of a judge for the rows with the given indices.
PromptEncoder = Callable[[AnswerJudge, Sequence[int]], "list[LabelPromptTokens]"]
ENCODER_LEARNING_RATE, ENCODER_LEARNING_RATES = 1e-4, {"mpnet": 3e-5}  # peak rates used in the measurements
COST_SAMPLE_SIZE = 200  # rows whose prompts are counted
MAX_EXAMPLE_TOKENS = 512  # answers are short, and the longest example determines the memory of a batch
GOLD_LABEL_WEIGHT = 0.5  # weight of the grade in a soft label; the rest is the teacher's probability


class JudgeGateOptions(AnswerJudgeFitOptions):
    """Options of `fit("judge", ...)`."""

    both: bool = option(False, "Also learn from the answers with passages.")
    teacher: str | None = option(None, "Folder of a fitted judge that the new one imitates (distillation).")


@with_options(JudgeGateOptions)
def fit_answer_judge(
    examples: Annotated[Examples, ExampleRequirements(target="known", reads_states=False)],
    *,
    options: JudgeGateOptions,
    seed: int = 0,
    work: Path,
    watch: FitProgressCallback = ignore_progress,
) -> FitResult:
    """Fit the judge gate: a fine-tuned model predicts whether the LLM's answer is right.

    A teacher (another judge) gives additional labels.
    """
    task = make_answer_task(examples, options, open_book=options.both)
    training = make_default_training(options, seed)
    members = plan_answer_ensemble(examples, options, training)
    teacher_notes = []
    if options.teacher:
        trained_rows = {row for member in members for row in member.train}
        task = replace(task, labels=make_soft_labels(examples, options.teacher, trained_rows))
        teacher_notes = [describe_teacher(examples, options.teacher, trained_rows)]
    result = train_answer_judge(task, examples, members, work=work, watch=watch)
    return replace(result, notes=[*teacher_notes, *result.notes])


@dataclass(frozen=True)
class AnswerTask:
    """What a judge of answers is trained to do.

    Attributes:
        gate: "judge" or "ik", which determines the wording of its prompt.
        tokens: Maximum number of answer tokens that it reads; 0 for the question alone.
        base: Model to fine-tune; None for the answering LLM.
        bits: Bits per weight of the base, 4 or 8; 0 for its default precision.
        labels: Probability that each closed-book answer is right; None for the grades (1 for right, 0 for wrong).
        open_book: Whether to learn from the open-book answers (with passages), too, not only from the closed-book
            answers.
    """

    gate: str
    tokens: int
    base: str | None = None
    bits: int = 0
    labels: FloatArray | None = None
    open_book: bool = False


def train_answer_judge(
    task: AnswerTask,
    examples: Examples,
    members: Sequence[EnsembleMember],
    *,
    work: Path,
    watch: FitProgressCallback = ignore_progress,
) -> FitResult:
    """Fine-tune a judge that predicts whether an answer is right.

    Args:
        task: Base model, prompt and labels.
        examples: The training data.
        members: The models to train, each with its hyperparameters and rows. Several models form an ensemble.
        work: Folder for checkpoints.
        watch: Called with the progress.
    """
    spec = make_answer_judge_spec(task.gate, task.base or str(examples.settings["model"]), task.bits)
    encoder = AnswerEncoder(task, examples)
    fitted = fit_judge(spec, members, encoder.make_examples, work=work, watch=watch)

    def score_rows(indices: Sequence[int]) -> FloatArray:
        prompts = encoder.encode(fitted.judge, indices)
        return 1 - fitted.predict_known(prompts, indices)

    return make_judge_result(task.gate, fitted, encoder.encode, examples, task.tokens, score_rows)


def make_judge_result(
    gate: str,
    fitted: FittedJudge,
    encode: PromptEncoder,
    examples: Examples,
    tokens: int,
    score_rows: Callable[[Sequence[int]], FloatArray],
) -> FitResult:
    """Make the fit result of a gate with a judge (it predicts whether answers are right).

    Args:
        gate: Name of the gate.
        fitted: The trained judge.
        encode: Makes all prompts with which the gate asks the judge about the rows with the given indices.
        examples: The training data.
        tokens: Maximum number of answer tokens that the judge reads; 0 for the question alone.
        score_rows: Returns the uncalibrated need for retrieval of the rows with the given indices.
    """
    n_rows = len(examples.rows)
    return FitResult(
        gate,
        options={"tokens": tokens, **fitted.options},
        needs=frozenset({Signal.DRAFT}) if tokens else frozenset(),
        request=SignalRequest(draft_tokens=tokens),
        tensors={},
        raw=score_rows,
        notes=[*fitted.notes, describe_cost(fitted, encode, n_rows)],
        files=fitted.files,
        uses_test_split=len(fitted.seen) == n_rows,
    )


@dataclass(frozen=True)
class AnswerEncoder:
    """Encodes questions and answers as prompts of a judge.

    Attributes:
        task: Which prompt to use and how much of an answer to show.
        examples: The label rows with questions and answers.
    """

    task: AnswerTask
    examples: Examples

    @functools.cached_property
    def drafts(self) -> list[str]:
        """The closed-book answer of each row; empty texts if the judge reads the question alone."""
        return draft_texts(self.examples.readings) if self.task.tokens else [""] * len(self.examples.rows)

    def encode(self, judge: AnswerJudge, indices: Sequence[int]) -> list[LabelPromptTokens]:
        """Encode the closed-book answers of the rows with the given indices."""
        questions = [self.examples.questions[index] for index in indices]
        drafts = [self.drafts[index] for index in indices]
        return encode_answers(self.task.gate, judge, questions, drafts, self.task.tokens)

    def make_examples(self, judge: AnswerJudge, indices: Sequence[int]) -> list[TrainingExample]:
        """Make a training example of each closed-book answer. `open_book` adds the open-book answers."""
        labels = make_hard_labels(self.examples) if self.task.labels is None else self.task.labels
        targets = [(float(labels[index]),) for index in indices]
        made = list(map(TrainingExample, self.encode(judge, indices), targets))
        if self.task.open_book:
            made += self._make_open_book_examples(judge, indices)
        return made

    def _make_open_book_examples(self, judge: AnswerJudge, indices: Sequence[int]) -> list[TrainingExample]:
        """Make a training example of each graded answer with passages.

        Answers equal to the closed-book answer (without passages) are left out.
        """
        made = []
        for index in indices:
            closed_book, open_book = self.examples.rows[index].closed, self.examples.rows[index].open
            is_repeated = closed_book is not None and open_book is not None and closed_book.text == open_book.text
            if open_book is not None and open_book.correct is not None and not is_repeated:
                question = self.examples.questions[index]
                [prompt] = encode_answers(self.task.gate, judge, [question], [open_book.text], self.task.tokens)
                made.append(TrainingExample(prompt, (float(open_book.correct),)))
        return made


# --- hyperparameters and checks -------------------------------------------------------------------


def make_default_training(options: AnswerJudgeFitOptions, seed: int) -> JudgeTrainingOptions:
    """Return the hyperparameters of the options. Defaults differ between causal models and encoders."""
    base = options.base or ""
    is_encoder = is_encoder_spec(base)
    epochs = options.epochs or (4 if is_encoder else 2)
    rate = options.learning_rate
    if rate is None and is_encoder:
        rate = ENCODER_LEARNING_RATES.get(base, ENCODER_LEARNING_RATE)
    training = make_answer_training(epochs, options.batch, rate, full=options.full or is_encoder, seed=seed)
    return replace(training, frozen_layers=options.frozen_layers)


def make_answer_training(
    epochs: int, batch: int, rate: float | None, *, full: bool = False, seed: int = 0
) -> JudgeTrainingOptions:
    """Return the hyperparameters of a judge that reads answers.

    Args:
        epochs: Passes over the training examples.
        batch: Examples per update.
        rate: Highest learning rate; None for the default.
        full: Train all weights instead of a LoRA adapter.
        seed: Seed of the training.
    """
    return JudgeTrainingOptions(
        epochs,
        batch,
        rate=rate,
        max_tokens=MAX_EXAMPLE_TOKENS,
        full=full,
        seed=seed,
        whole_vocabulary=False,
        schedule="one-cycle",
        weight_decay=0.01,
        checks=2,
        patience=2,
        window=8,
    )


def plan_answer_ensemble(
    examples: Examples, options: AnswerJudgeFitOptions, training: JudgeTrainingOptions
) -> list[EnsembleMember]:
    """Plan the trainings of an ensemble: one per seed or, with `folds`, one per fold of the questions."""
    texts = [question.text for question in examples.questions]
    return plan_ensemble(examples.split, training, options.seeds, options.folds, texts)


def make_answer_task(examples: Examples, options: AnswerJudgeFitOptions, *, open_book: bool = False) -> AnswerTask:
    """Define the task of a judge: predict whether an answer is right, from its first tokens.

    The judge reads at most as many tokens of an answer as were recorded.

    Args:
        examples: Questions with recorded and graded answers.
        options: Options of the judge.
        open_book: Whether the judge learns from answers with passages, too, not only from answers without passages.

    Raises:
        BadSetting: `bits` is set, but quantized weights cannot be used here.
        BadInput: The recorded answers contain nothing to judge.
    """
    _check_bits(options)
    tokens = min(options.tokens, int(examples.settings.get("max_tokens", options.tokens)))
    problem = describe_useless_answers(draft_texts(examples.readings))
    if tokens and problem:
        raise BadInput(
            f"the judge (predicts whether answers are right) cannot learn from these answers. {problem} Or set tokens=0: the "
            "judge then reads only the question."
        )
    if open_book and not any(row.open is not None and row.open.correct is not None for row in examples.rows):
        raise BadInput(
            "both=True needs graded answers with passages, but no question has one. Run `knowgate label` with `index`, or "
            "leave `both` out."
        )
    return AnswerTask("judge", tokens, options.base, options.bits, open_book=open_book)


def _check_bits(options: AnswerJudgeFitOptions) -> None:
    """Raise BadSetting if quantized weights (`bits`) cannot be used here."""
    if not options.bits:
        return
    if options.full or is_encoder_spec(options.base or ""):
        raise BadSetting(
            f"bits={options.bits} (quantized weights) works only with LoRA on a decoder-only `base` model. Leave `bits` out."
        )
    from knowgate.models.hf.loader import check_bits

    check_bits(options.bits)


def describe_cost(fitted: FittedJudge, encode: PromptEncoder, n_rows: int) -> str:
    """Describe the mean number of tokens a judge reads per question.

    Args:
        fitted: The judge.
        encode: Makes the judge's prompts for the rows with the given indices.
        n_rows: Number of rows.
    """
    indices = list(range(0, n_rows, max(1, n_rows // COST_SAMPLE_SIZE)))
    mean = sum(len(prompt.ids) for prompt in encode(fitted.judge, indices)) / len(indices)
    times = f", read {len(fitted.members)} times" if len(fitted.members) > 1 else ""
    return f"cost per question: {mean:.0f} tokens of the judge{times}"


# --- labels ---------------------------------------------------------------------------------------


def make_hard_labels(examples: Examples) -> FloatArray:
    """Return the grades as probabilities: 1 for a right answer, 0 for a wrong one."""
    return (~examples.needed).astype(np.float64)


def make_soft_labels(examples: Examples, teacher: str, indices: Iterable[int]) -> FloatArray:
    """Return labels for a judge that learns from another judge, the teacher.

    A soft label is the mean of the grade and the teacher's probability.

    Args:
        examples: The training data.
        teacher: Folder of the teacher.
        indices: Rows that get soft labels. All other rows, such as the rows for early stopping, keep their grades as labels.

    Raises:
        BadSetting: The teacher predicts something else, or needs more than the texts of question and answer.
    """
    gate, labels = load_fitted_gate(teacher), make_hard_labels(examples)
    if gate.artifact.manifest.get("target") in OPEN_BOOK_TARGETS or gate.needs - {Signal.DRAFT}:
        raise BadSetting(
            f"the gate in teacher='{teacher}' does not predict from texts alone whether answers are right. Use a gate 'judge' "
            "or 'ik' that was fitted with target='known'."
        )
    rows = sorted(indices)
    # A need is the probability that an answer is wrong.
    needs = gate.score([examples.questions[i] for i in rows], [examples.readings[i] for i in rows])
    labels[rows] = GOLD_LABEL_WEIGHT * labels[rows] + (1 - GOLD_LABEL_WEIGHT) * (1 - np.array(needs))
    return labels


def describe_teacher(examples: Examples, teacher: str, indices: Collection[int]) -> str:
    """Describe the teacher of a judge for the model card.

    A judge learns the teacher's predictions together with the grades.

    Args:
        examples: The training data.
        teacher: Folder of the teacher.
        indices: Rows that were labeled by the teacher.
    """
    note = f"distilled from the gate '{Path(teacher).name}': its probability and the grade count half each"
    n_seen = int(mark_seen_rows(examples.table.subset(sorted(indices)), teacher).sum())
    if n_seen:
        note += (
            f"; the teacher was itself trained on {n_seen} of these {len(indices)} rows and adds less to their labels"
        )
    return note
