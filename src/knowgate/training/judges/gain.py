"""Fit the gain gate: one judge learns whether the LLM's answer is right and whether an open-book answer would be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from knowgate.core.options import Count, option, with_options
from knowgate.errors import BadSetting
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

# Two tasks in one adapter: the rate lies between the judge's and the arbiter's, which diverged at the judge's.
GAIN_LEARNING_RATE = 7e-5
GAIN_PROMPTS = ("judge", "search")


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

    LoRA learns two tasks here, so the default learning rate is lower than for a judge of one.
    """
    if options.learning_rate is None and not (options.full or is_encoder_spec(options.base or "")):
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
        members: The trainings to run, one per member of the ensemble.
        work: Folder for checkpoints.
        watch: Called with the progress.

    Returns:
        `gain`: the gate that retrieves if passages make a right answer more probable. `known`: a judge gate, which reads
        only whether the LLM's own answer is right.
    """
    task = answer_judge.make_answer_task(examples, options)
    spec = make_answer_judge_spec("judge", task.base or str(examples.settings["model"]), task.bits)
    encoders = [AnswerEncoder(replace(task, gate=prompt), examples) for prompt in GAIN_PROMPTS]
    judge_encoder, search_encoder = encoders
    make_examples = partial(_make_gain_examples, encoders)
    fitted = fit_judge(spec, members, make_examples, work=work, watch=watch)

    def encode_both(judge: AnswerJudge, indices: Sequence[int]) -> list[LabelPromptTokens]:
        return [*judge_encoder.encode(judge, indices), *search_encoder.encode(judge, indices)]

    def predict(encoder: AnswerEncoder, indices: Sequence[int]) -> FloatArray:
        return fitted.predict_known(encoder.encode(fitted.judge, indices), indices)

    def score_known(indices: Sequence[int]) -> FloatArray:
        return 1 - predict(judge_encoder, indices)

    def score_gain(indices: Sequence[int]) -> FloatArray:
        return compute_gain_needs(predict(judge_encoder, indices), predict(search_encoder, indices))

    result = answer_judge.make_judge_result("gain", fitted, encode_both, examples, task.tokens, score_gain)
    return {"gain": result, "known": replace(result, gate="judge", raw=score_known)}


def _make_gain_examples(
    encoders: Sequence[AnswerEncoder], judge: AnswerJudge, indices: Sequence[int]
) -> list[TrainingExample]:
    """Make one or two training examples per row.

    'judge' asks about the answer without passages, 'search' about an answer with passages.

    Args:
        encoders: Make the prompts 'judge' and 'search'.
        judge: The judge, whose tokenizer is used.
        indices: Indices of the rows.
    """
    judge_encoder, search_encoder = encoders
    table = judge_encoder.examples.table
    with_passages = [index for index in indices if table.rows[index].open is not None]  # rows with an open-book answer
    prompts = [*judge_encoder.encode(judge, indices), *search_encoder.encode(judge, with_passages)]
    is_right = [*table.closed_book_right[list(indices)], *table.always_right[with_passages]]
    return [TrainingExample(prompt, (float(right),)) for prompt, right in zip(prompts, is_right, strict=True)]
