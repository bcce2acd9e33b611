"""Fit the gain gate: one judge learns whether the LLM's answer is right and whether an open-book answer would be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from knowgate.core.options import Count, option, with_options
from knowgate.errors import BadSetting
from knowgate.gates.answer_judge import GAIN_PROMPTS
from knowgate.gates.judges import AnswerJudge, compute_gain_needs
from knowgate.gates.judges.encoder_judge import is_encoder_spec
from knowgate.stats.metrics import FloatArray
from knowgate.training.examples import OPEN_BOOK_TARGETS, Examples, Target
from knowgate.training.fit_function import ExampleRequirements, FitProgressCallback, FitResult, ignore_progress
from knowgate.training.judges import answer_judge
from knowgate.training.judges.answer_judge import AnswerEncoder
from knowgate.training.judges.ensemble import EnsembleMember, fit_judge
from knowgate.training.judges.trainable_models import TrainingExample, make_answer_judge_spec
from knowgate.training.judges.training_options import AnswerJudgeFitOptions, JudgeTrainingOptions

if TYPE_CHECKING:
    from knowgate.models.tokenization import LabelPromptTokens

# One adapter learns two tasks. The rate lies between that of judges and that of arbiters, whose training diverged at the
# rate of judges.
GAIN_LEARNING_RATE = 7e-5


class GainOptions(AnswerJudgeFitOptions):
    """Options of `fit("gain", ...)`."""

    tokens: Count = option(64, "Maximum answer tokens that the judge reads, at least 1.")
    learning_rate: float | None = option(
        None, "Highest learning rate. Default: 7e-5, or 1e-5 with `full`, or 3e-5 for mpnet.", gt=0
    )


@with_options(GainOptions)
def fit_gain(
    examples: Annotated[Examples, ExampleRequirements(target="gain", reads_states=False, two_heads=True)],
    *,
    options: GainOptions,
    seed: int = 0,
    work: Path,
    watch: FitProgressCallback = ignore_progress,
) -> FitResult:
    """Fit the gain gate: a fine-tuned judge predicts whether retrieval would improve the answer."""
    if examples.target not in OPEN_BOOK_TARGETS:
        raise BadSetting(
            f"target='{examples.target}' does not work with the gate 'gain' (predicts whether retrieval helps). Leave `target` "
            "out, or fit the gate 'judge'."
        )
    members = answer_judge.plan_answer_ensemble(examples, options, make_gain_training(options, seed))
    return train_gain_judge(examples, options, members, work=work, watch=watch)["gain"]


def make_gain_training(options: AnswerJudgeFitOptions, seed: int) -> JudgeTrainingOptions:
    """Return the hyperparameters of a gain judge.

    A gain judge learns two tasks: to predict right answers without passages and right answers with passages. With LoRA,
    the default learning rate is therefore lower than for a judge with one task.
    """
    uses_lora = not (options.full or is_encoder_spec(options.base or ""))
    if options.learning_rate is None and uses_lora:
        options = options.replace(learning_rate=GAIN_LEARNING_RATE)
    return answer_judge.make_default_training(options, seed)


def train_gain_judge(
    examples: Examples,
    options: AnswerJudgeFitOptions,
    members: Sequence[EnsembleMember],
    *,
    work: Path,
    watch: FitProgressCallback = ignore_progress,
) -> dict[Target, FitResult]:
    """Train judges to predict whether the answers without and with passages are right.

    Args:
        examples: The label rows.
        options: Base and hyperparameters.
        members: The models to train, each with its hyperparameters and rows. Several models form an ensemble.
        work: Folder for checkpoints.
        watch: Called with the progress.

    Returns:
        Two gates with the same judges. `gain`: retrieves if passages make a right answer more probable. `known`: retrieves
        if the LLM's own answer is probably wrong, whatever passages would change.
    """
    task = answer_judge.make_answer_task(examples, options)
    spec = make_answer_judge_spec("judge", task.base or str(examples.settings["model"]), task.bits)
    encoders = [AnswerEncoder(replace(task, gate=prompt), examples) for prompt in GAIN_PROMPTS]
    closed_book, open_book = encoders
    make_examples = partial(_make_gain_examples, encoders)
    fitted = fit_judge(spec, members, make_examples, work=work, watch=watch)

    def encode_both(judge: AnswerJudge, indices: Sequence[int]) -> list[LabelPromptTokens]:
        return [*closed_book.encode(judge, indices), *open_book.encode(judge, indices)]

    def predict(encoder: AnswerEncoder, indices: Sequence[int]) -> FloatArray:
        return fitted.predict_known(encoder.encode(fitted.judge, indices), indices)

    def score_known(indices: Sequence[int]) -> FloatArray:
        return 1 - predict(closed_book, indices)

    def score_gain(indices: Sequence[int]) -> FloatArray:
        return compute_gain_needs(predict(closed_book, indices), predict(open_book, indices))

    result = answer_judge.make_judge_result("gain", fitted, encode_both, examples, task.tokens, score_gain)
    return {"gain": result, "known": replace(result, gate="judge", raw=score_known)}


def _make_gain_examples(
    encoders: Sequence[AnswerEncoder], judge: AnswerJudge, indices: Sequence[int]
) -> list[TrainingExample]:
    """Make training examples about the answer without passages of each row, and the answer with passages if it has one.

    Args:
        encoders: Make the prompts about the answer without passages (closed-book) and with passages (open-book). Both
            prompts show the answer without passages.
        judge: The judge, whose tokenizer is used.
        indices: Indices of the rows.
    """
    closed_book, open_book = encoders
    table = closed_book.examples.table
    with_passages = [index for index in indices if table.rows[index].open is not None]  # rows with an open-book answer
    prompts = [*closed_book.encode(judge, indices), *open_book.encode(judge, with_passages)]
    is_right = [*table.closed_book_right[list(indices)], *table.retrieved_right[with_passages]]
    return [TrainingExample(prompt, (float(right),)) for prompt, right in zip(prompts, is_right, strict=True)]
