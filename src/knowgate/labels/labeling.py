"""The function `label`: questions and an LLM in, a label run out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from knowgate.core.options import with_options
from knowgate.core.validation import expand_path
from knowgate.data.questions import QuestionSource, describe_data, resolve_questions
from knowgate.data.runs.folder import RunFolder
from knowgate.labels.grading import load_graders
from knowgate.labels.labeler import LabeledBatch, Labeler
from knowgate.labels.options import LabelOptions, LabelPlan
from knowgate.labels.ray_runner import connect_early, create_ray_runner, is_remote_runner, require_name
from knowgate.labels.run import LabelProgress, run_labeling
from knowgate.models import load_model, resolve_model
from knowgate.models.backend import check_sampling
from knowgate.models.prompts.answers import AnswerPrompts, load_answer_prompts
from knowgate.retrieval import as_retriever
from knowgate.retrieval.rerankers import as_reranker
from knowgate.retrieval.rerankers.cross_encoder import describe_llm_mismatch
from knowgate.types import Model, Question, Reranker, Retriever, Runner

log = logging.getLogger(__name__)


@with_options(LabelOptions)
def label(
    data: QuestionSource,
    *,
    out: str | Path,
    model: str | Model = "smollm",
    on_progress: Callable[[LabelProgress], None] = lambda progress: None,
    options: LabelOptions,
) -> RunFolder:
    """Record what an LLM knows: let it answer questions without and with passages, and grade the answers.

    Answers, samples, grades and hidden states are written to a run folder. Call `label` again with the same arguments
    to continue an interrupted run. A finished run is returned unchanged.

    Args:
        data: 'jsonl:FILE', 'bench:NAME/SPLIT', 'hub:NAME?split=...', or a list of `Question` with gold `answers`.
        out: Folder of the run.
        model: The LLM that answers: a model spec such as 'smollm', or a model object.
        on_progress: Called with the progress after every batch.
        options: Further options; each field of `LabelOptions` can be given as a keyword argument.

    Returns:
        The run folder.

    Raises:
        BadSetting: An option cannot be used, or the folder holds a run with other settings.
        BadInput: The data holds no questions.

    Example:
        >>> run = label("jsonl:questions.jsonl", model="smollm", out="runs/mine", samples=10)  # doctest: +SKIP
    """
    is_remote = is_remote_runner(options.runner)
    questions = resolve_questions(data, options.limit)
    llm = resolve_model(model)
    labeler = _build_labeler(llm, options)
    folder = RunFolder(expand_path(out))
    runner: Runner | None = None if isinstance(options.runner, str) else options.runner
    if is_remote:
        spec = _make_job_spec(model, options, labeler)
        runner = create_ray_runner(options.runner, spec, labeler.make_failed_batch, identify_label_job(labeler))
    with connect_early(runner, folder.path):
        run_labeling(
            folder,
            questions,
            labeler,
            data=describe_data(data),
            runner=runner,
            retry_failed=options.retry_failed,
            on_progress=on_progress,
        )
    return folder


def _build_labeler(llm: Model, options: LabelOptions) -> Labeler:
    """Load the judge, prompts, retriever and reranker that the options name, and build the labeler."""
    plan = options.make_plan(llm)
    check_sampling(plan.sampling)
    judge = resolve_model(options.judge) if options.judge is not None else None
    grader, second_grader = load_graders(options.grade, judge, options.judge_prompt)
    return Labeler(
        llm,
        grader,
        plan,
        load_answer_prompts(options.prompts, options.lang, llm),
        as_retriever(options.index) if options.index is not None else None,
        _load_reranker(options.rerank, llm),
        second_grader=second_grader,
    )


def _load_reranker(reranker: str | Path | Reranker | None, llm: Model) -> Reranker | None:
    """Load the reranker; log a warning if it was trained for another LLM."""
    if reranker is None:
        return None
    if isinstance(reranker, str | Path) and (warning := describe_llm_mismatch(reranker, llm.name, llm.fingerprint)):
        log.warning(warning)
    return as_reranker(reranker)


# --- labeling on other machines -------------------------------------------------------------------


@dataclass(frozen=True)
class LabelJobSpec:
    """Description of a label job that can be sent to other machines, which load everything by name.

    Attributes:
        model: Spec of the LLM that answers.
        grade: Names of one or two graders, separated by a comma.
        judge: Spec of the LLM that grades; None if no grader is a judge.
        judge_prompt: What the judge is asked: does the answer contain, or imply, the gold answer?
        plan: What to generate and record for each question.
        prompts: Wording of the answer prompts.
        index: Path or spec of the index to search; None to use the contexts of the questions.
        rerank: Path or spec of the reranker; None for none.
    """

    model: str
    grade: str
    judge: str | None
    judge_prompt: Literal["contains", "implies"]
    plan: LabelPlan
    prompts: AnswerPrompts
    index: str | None = None
    rerank: str | None = None

    def create(self, retriever: Retriever | None) -> LabelJob:
        """Load the model, judge and reranker on this machine, and create the job."""
        judge = load_model(self.judge) if self.judge is not None else None
        grader, second_grader = load_graders(self.grade, judge, self.judge_prompt)
        reranker = as_reranker(self.rerank) if self.rerank is not None else None
        model = load_model(self.model)
        labeler = Labeler(model, grader, self.plan, self.prompts, retriever, reranker, second_grader=second_grader)
        return LabelJob(labeler)


@dataclass(frozen=True)
class LabelJob:
    """A label job on a worker machine; calling it labels a batch of questions."""

    labeler: Labeler

    @property
    def identity(self) -> dict[str, str]:
        """Fingerprints of the model, prompts, index and reranker that this machine has loaded."""
        return identify_label_job(self.labeler)

    def __call__(self, questions: Sequence[Question]) -> LabeledBatch:
        return self.labeler.label(questions)


def identify_label_job(labeler: Labeler) -> dict[str, str]:
    """Return the fingerprints of the model, prompts, index and reranker, to compare them across machines."""
    identity = {"model": labeler.model.fingerprint, "wording": labeler.prompts.fingerprint}
    optional = {"index": labeler.retriever, "reranker": labeler.reranker}
    return identity | {name: part.fingerprint for name, part in optional.items() if part is not None}


def _make_job_spec(model: str | Model, options: LabelOptions, labeler: Labeler) -> LabelJobSpec:
    """Describe the label job by names; raises BadSetting for objects that cannot be sent to other machines."""
    return LabelJobSpec(
        model=require_name("model", model) or "",
        grade=options.grade,
        judge=require_name("judge", options.judge),
        judge_prompt=options.judge_prompt,
        plan=labeler.plan,
        prompts=labeler.prompts,
        index=require_name("index", options.index),
        rerank=require_name("reranker", options.rerank),
    )
