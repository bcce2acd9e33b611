"""The function `label`: questions and an LLM in, a label run out."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from knowgate.core.options import with_options
from knowgate.core.validation import expand_path
from knowgate.data.questions import QuestionSource, describe_data, resolve_questions
from knowgate.data.runs.folder import RunFolder
from knowgate.labels.grading import load_graders
from knowgate.labels.labeler import Labeler
from knowgate.labels.options import LabelOptions
from knowgate.labels.ray_runner import connect_early, create_ray_runner, is_remote_runner, require_name
from knowgate.labels.run import LabelProgress, run_labeling
from knowgate.models import load_model, resolve_model
from knowgate.models.prompts.answers import AnswerPrompts, load_answer_prompts
from knowgate.retrieval import as_retriever
from knowgate.retrieval.rerankers import as_reranker
from knowgate.retrieval.rerankers.cross_encoder import describe_llm_mismatch
from knowgate.types import Model, Reranker, Retriever, Runner

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
    """Let an LLM answer questions with and without passages, and grade the answers.

    Everything is written to a run folder. Call `label` again with the same arguments to continue an interrupted run.

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
    is_remote = is_remote_runner(options.runner)  # raises an error for an unknown runner, before anything is loaded
    questions = resolve_questions(data, options.limit)
    llm = resolve_model(model)
    prompts = load_answer_prompts(options.prompts, options.lang, llm)
    retriever = as_retriever(options.index) if options.index is not None else None
    labeler = build_labeler(llm, options, prompts, retriever)
    folder = RunFolder(expand_path(out))
    runner: Runner | None = None if isinstance(options.runner, str) else options.runner
    if is_remote:
        spec = _make_job_spec(model, options, prompts)
        runner = create_ray_runner(options.runner, spec, labeler.make_failed_batch, labeler.identity)
    with connect_early(runner, folder.path):
        run_labeling(folder, questions, labeler, data=describe_data(data), runner=runner, on_progress=on_progress)
    return folder


def build_labeler(llm: Model, options: LabelOptions, prompts: AnswerPrompts, retriever: Retriever | None) -> Labeler:
    """Load the judge and the reranker, and build the labeler."""
    judge = resolve_model(options.judge) if options.judge is not None else None
    grader, second_grader = load_graders(options.grade, judge, options.judge_prompt)
    reranker = _load_reranker(options.rerank, llm)
    return Labeler(llm, grader, options, prompts, retriever, reranker, second_grader=second_grader)


def _load_reranker(reranker: str | Path | Reranker | None, llm: Model) -> Reranker | None:
    """Load the reranker, and warn if it was trained for another LLM."""
    if reranker is None:
        return None
    if isinstance(reranker, str | Path) and (warning := describe_llm_mismatch(reranker, llm.name, llm.fingerprint)):
        log.warning(warning)
    return as_reranker(reranker)


# --- labeling on other machines -------------------------------------------------------------------


@dataclass(frozen=True)
class LabelJobSpec:
    """Description of a label job that other machines can run. Models and indexes are given by name.

    Attributes:
        model: Spec of the LLM that answers.
        options: Options of the label run, in which the index, the judge and the reranker are specs or paths.
        prompts: Wording of the answer prompts.
    """

    model: str
    options: LabelOptions
    prompts: AnswerPrompts

    @property
    def index(self) -> str | None:
        """The index that is searched; None to use the contexts of the questions."""
        return require_name("index", self.options.index)

    def create(self, retriever: Retriever | None) -> Labeler:
        """Load the model, judge and reranker on this machine, and create the labeler."""
        return build_labeler(load_model(self.model), self.options, self.prompts, retriever)


def _make_job_spec(model: str | Model, options: LabelOptions, prompts: AnswerPrompts) -> LabelJobSpec:
    """Describe the label job by names, to send it to other machines."""
    named = options.replace(
        runner=None,
        prompts=None,
        judge=require_name("judge", options.judge),
        index=require_name("index", options.index),
        rerank=require_name("reranker", options.rerank),
    )
    return LabelJobSpec(require_name("model", model) or "", named, prompts)
