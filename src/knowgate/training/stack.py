"""Fit the stack: a fusion that takes the scores of judges as further signals.

The judges are cross-fitted: the train and dev rows are divided into folds, and each judge learns from all folds but
one. So a train row is scored by the judge that was not trained on it. No judge learns from the calibration and test rows,
so all judges score them, as they score new questions later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from knowgate.core.options import Options, option, with_options
from knowgate.errors import BadSetting
from knowgate.gates.fusion import compute_log_odds, name_judge
from knowgate.training.examples import Examples
from knowgate.training.fit_function import ExampleRequirements, FitProgressCallback, FitResult, ignore_progress
from knowgate.training.fusion import fit_fusion
from knowgate.training.gate_artifact import save_fitted
from knowgate.training.judges import answer_judge
from knowgate.training.judges.ensemble import plan_ensemble
from knowgate.training.judges.training_options import ANY_BASE_HELP, AnswerJudgeFitOptions

MAX_JUDGES = 4


class StackOptions(Options):
    """Options of `fit("stack", ...)`."""

    judges: int = option(MAX_JUDGES, "Number of judges; each leaves out one fold of the rows.", ge=2, le=MAX_JUDGES)
    base: str | None = option(None, ANY_BASE_HELP)
    cheap: bool = option(False, "Use cheap signals only: no sampled answers, no extra passes.")


@with_options(StackOptions)
def fit_stack(
    examples: Annotated[Examples, ExampleRequirements(two_heads=True)],
    *,
    options: StackOptions,
    seed: int = 0,
    work: Path,
    watch: FitProgressCallback = ignore_progress,
) -> FitResult:
    """Fine-tune small judges of the LLM's answer, and combine them with all other signals."""
    judge_options = AnswerJudgeFitOptions(base=options.base)
    judge = fit_cross_fitted_judge(examples, judge_options, options.judges, seed=seed, work=work, watch=watch)
    return stack_judges(examples, [judge], cheap=options.cheap, work=work)


def fit_cross_fitted_judge(
    examples: Examples,
    options: AnswerJudgeFitOptions,
    judges: int,
    *,
    rows: NDArray[np.int64] | None = None,
    seed: int = 0,
    work: Path,
    watch: FitProgressCallback = ignore_progress,
) -> FitResult:
    """Fine-tune an ensemble of judges (they predict whether the LLM's answer is right).

    Each judge is trained without one fold.

    Args:
        examples: The training data. The judges learn whether the closed-book answer is right, whatever the target is.
        options: Base and hyperparameters of the judges.
        judges: Number of judges, which is the number of folds.
        rows: Indices of the rows to learn from. Default: the train and dev rows.
        seed: Seed of folds and training.
        work: Folder for checkpoints.
        watch: Called with the progress.
    """
    known = select_known_target(examples)
    task = answer_judge.make_answer_task(known, options)
    if rows is None:
        rows = np.sort(np.concatenate([known.split.train, known.split.dev]))
    texts = [question.text for question in known.questions]
    training = answer_judge.make_default_training(options, seed)
    members = plan_ensemble(known.split, training, folds=judges, texts=texts, rows=rows)
    return answer_judge.train_answer_judge(task, known, members, work=work, watch=watch)


def stack_judges(examples: Examples, judges: Sequence[FitResult], *, cheap: bool = False, work: Path) -> FitResult:
    """Combine the scores of judges with all other signals in one gate.

    A judge predicts whether the LLM's answer is right.

    Args:
        examples: The training data.
        judges: One to four fitted judges or IK gates. Their scores of train rows must come from models that were not
            trained on these rows. Otherwise, the combined gate would trust the judges too much.
        cheap: Leave out signals that need sampled answers or extra passes of the LLM.
        work: Folder in which the folders of the judges are prepared.

    Raises:
        BadSetting: There is no judge, or there are too many.
    """
    if not 1 <= len(judges) <= MAX_JUDGES:
        raise BadSetting(f"a stack (gate made of judges) takes 1 to {MAX_JUDGES} judges, not {len(judges)}.")
    indices = range(len(examples.rows))
    margins = {name_judge(number): compute_log_odds(judge.raw(indices)) for number, judge in enumerate(judges)}
    fusion = fit_fusion(examples, cheap=cheap, judge_margins=margins)
    known = select_known_target(examples)
    files: dict[str, bytes] = {}
    for name, judge in zip(margins, judges, strict=True):
        judge_files = _write_judge(judge, known, work / name)
        files |= {f"{name}/{path}": content for path, content in judge_files.items()}
        fusion = replace(
            fusion,
            needs=fusion.needs | judge.needs,
            request=fusion.request | judge.request,
            notes=[*fusion.notes, *judge.notes],
        )
    return replace(
        fusion,
        gate="stack",
        options={**fusion.options, "judges": len(judges)},
        files=files,
        uses_test_split=any(judge.uses_test_split for judge in judges),
    )


def select_known_target(examples: Examples) -> Examples:
    """Return the examples with the target 'known' (the LLM knows the answer).

    Examples with the target 'agree' are returned unchanged, because they have no gold answers.
    """
    if examples.target in ("known", "agree"):
        return examples
    return replace(examples, needed=~examples.table.closed_book_right.astype(bool), target="known")


def _write_judge(judge: FitResult, examples: Examples, folder: Path) -> dict[str, bytes]:
    """Write a judge as a gate folder, and return the files by path."""
    save_fitted(judge, examples, folder, keep_questions=False)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
