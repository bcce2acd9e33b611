"""`label`: questions and an LLM in, a label run out. What `knowgate label` calls; prints nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from knowgate.core.validation import check_integer, check_number, check_seed, expand_path
from knowgate.data.questions import QuestionSource, describe_data, resolve_questions
from knowgate.data.runs.folder import RunFolder
from knowgate.data.signals.samples import SEAKR_SAMPLES
from knowgate.errors import BadSetting
from knowgate.labels.grading import load_grader
from knowgate.labels.labeler import LabeledBatch, Labeler
from knowgate.labels.options import DEFAULT_CANDIDATES, DEFAULT_PASSAGES, LabelPlan, resolve_layers
from knowgate.labels.ray_runner import (
    connect_early,
    create_ray_runner,
    get_local_runner,
    is_remote_runner,
    require_name,
)
from knowgate.labels.run import LabelProgress, run_labeling
from knowgate.models import load_model, resolve_model
from knowgate.models.backend import check_sampling
from knowgate.models.prompts.answers import AnswerPrompts, load_answer_prompts
from knowgate.retrieval import as_retriever
from knowgate.retrieval.rerankers import as_reranker
from knowgate.retrieval.rerankers.cross_encoder import describe_llm_mismatch
from knowgate.types import Model, Question, Reranker, Retriever, Runner


@dataclass(frozen=True)
class LabelJobSpec:
    """Names of the LLM, the grader, the index and the reranker, with the plan and the wording as they are."""

    model: str
    grade: str
    judge: str | None
    judge_prompt: Literal["contains", "implies"]
    plan: LabelPlan
    prompts: AnswerPrompts
    index: str | None = None
    rerank: str | None = None

    def make(self, retriever: Retriever | None) -> LabelJob:
        judge = load_model(self.judge) if self.judge is not None else None
        grader = load_grader(self.grade, judge, self.judge_prompt)
        reranker = as_reranker(self.rerank) if self.rerank is not None else None
        made = Labeler(load_model(self.model), grader, self.plan, self.prompts, retriever, reranker)
        return LabelJob(made)


@dataclass(frozen=True)
class LabelJob:
    """A labeller on the machine where it works."""

    labeller: Labeler

    @property
    def identity(self) -> dict[str, str]:
        return identify_label_job(self.labeller)

    def __call__(self, questions: Sequence[Question]) -> LabeledBatch:
        return self.labeller.label(questions)


def identify_label_job(labeller: Labeler) -> dict[str, str]:
    """Which LLM, wording, index and reranker rows are made with."""
    parts = {"index": labeller.retriever, "reranker": labeller.reranker}
    told = {"model": labeller.model.fingerprint, "wording": labeller.prompts.fingerprint}
    return told | {name: part.fingerprint for name, part in parts.items() if part is not None}


log = logging.getLogger(__name__)
MAX_COUNT = 1_000_000  # samples, tokens or passages of one question
JUDGE_STYLES = ("implies", "contains")


def label(
    data: QuestionSource,
    *,
    out: str | Path,
    model: str | Model = "smollm",
    index: str | Path | Retriever | None = None,
    rerank: str | Path | Reranker | None = None,
    candidates: int = DEFAULT_CANDIDATES,
    samples: int = 30,
    open_samples: int | None = None,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    max_tokens: int = 32,
    grade: str = "contains",
    judge: str | Model | None = None,
    judge_prompt: str = "implies",
    mask: bool = False,
    mask_samples: int = 0,
    iterative: bool = False,
    k: int | None = None,
    layers: str | Sequence[int] = "mid,late,last",
    closed_book: bool = False,
    limit: int | None = None,
    seed: int = 0,
    seakr: bool = False,
    lang: str | None = None,
    prompts: str | Path | None = None,
    retry_failed: bool = False,
    runner: str | Runner | None = None,
    on_progress: Callable[[LabelProgress], None] = lambda tally: None,
) -> RunFolder:
    """Answer questions closed- and open-book, sample, grade, and keep it all in the folder `out`.

    A run that was interrupted goes on with the same call; one that is finished is given back as it is.

    data: 'jsonl:FILE', 'bench:NAME/SPLIT', 'hub:NAME?split=...', or a list of `Question` (with gold `answers`).
    index: index folder, http:URL or a retriever; without one, the passages are the questions' own `contexts`.
    rerank: folder, spec or reranker that chooses the k passages from so many `candidates`.
    samples: sampled answers per question and way of answering; open_samples: with passages, if not as many.
    temperature, top_p, top_k: how they are drawn; from all tokens unless top_p or top_k cut some off.
    grade: exact, contains, choice, or judge (an LLM, given as `judge`, with the prompt 'implies' or 'contains').
    mask: also answer with the gold answers in the passages replaced; mask_samples: sampled answers to that, too.
    closed_book: retrieve nothing.
    iterative: also answer after several rounds of retrieval from the index, up to 3.
    k: passages; 3 from an index, all of the questions' own, unless given.
    layers: hidden states to keep: mid, late, last, numbers, or 'none'. seakr: also how far apart samples end.
    prompts: 'free' (answers at length, with reasons) or a TOML file with your own wording; lang forces 'en' or 'zh'.
    runner: 'local', or a Ray cluster: 'ray:local?workers=2', 'ray:HOST:PORT?gpus=0.5'; model, index and judge by name.
    retry_failed: try questions again that failed before. on_progress: told how far the run is, batch by batch.

    Example:
        >>> run = label("jsonl:questions.jsonl", model="smollm", out="runs/mine", samples=10)  # doctest: +SKIP
    """
    _check_rerank(rerank, candidates, k, closed_book=closed_book)
    _check_counts(samples=(samples, 0), open_samples=(open_samples, 0), max_tokens=(max_tokens, 1), k=(k, 1))
    _check_counts(mask_samples=(mask_samples, 0))
    far = is_remote_runner(runner)
    if mask_samples and not mask:
        raise BadSetting("--mask-samples are answers to MASK passages: add --mask.")
    check_number(temperature, "the temperature", maximum=100)
    check_seed(seed)
    questions = resolve_questions(data, limit)
    llm = resolve_model(model)
    plan = LabelPlan(
        samples=samples,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        max_tokens=max_tokens,
        seed=seed,
        layers=resolve_layers(layers, llm),
        mask=mask,
        k=DEFAULT_PASSAGES if k is None and rerank is not None else k,
        open_book=not closed_book,
        seakr=SEAKR_SAMPLES if seakr else 0,
        open_samples=open_samples,
        candidates=candidates,
        mask_samples=mask_samples,
        iterative=iterative,
    )
    check_sampling(plan.sampling)
    style = _style(judge_prompt)
    grader = load_grader(grade, resolve_model(judge) if judge is not None else None, style)
    retriever = as_retriever(index) if index is not None else None
    wording = load_answer_prompts(Path(prompts) if prompts is not None else None, lang)
    folder = RunFolder(expand_path(out))
    labeller = Labeler(llm, grader, plan, wording, retriever, _reranker(rerank, llm))
    doing = get_local_runner(runner) if not far else None
    if far:
        recipe = LabelJobSpec(
            model=require_name("model", model) or "",
            grade=grade,
            judge=require_name("judge", judge),
            judge_prompt=style,
            plan=plan,
            prompts=wording,
            index=require_name("index", index),
            rerank=require_name("reranker", rerank),
        )
        doing = create_ray_runner(str(runner), recipe, labeller.failed, identify_label_job(labeller))
    with connect_early(doing, folder.path):
        run_labeling(
            folder,
            questions,
            labeller,
            data=describe_data(data),
            runner=doing,
            retry_failed=retry_failed,
            on_progress=on_progress,
        )
    return folder


def _check_rerank(rerank: object, candidates: int, k: int | None, *, closed_book: bool) -> None:
    if rerank is not None and closed_book:
        raise BadSetting("--closed-book retrieves nothing, so there is nothing to --rerank; leave one of them out.")
    if rerank is not None and candidates < (k or DEFAULT_PASSAGES):
        raise BadSetting(
            f"--candidates is {candidates}, fewer than the {k or DEFAULT_PASSAGES} passages to keep (--k)."
        )


def _reranker(given: str | Path | Reranker | None, llm: Model) -> Reranker | None:
    if given is None:
        return None
    if isinstance(given, str | Path) and (warning := describe_llm_mismatch(given, llm.name, llm.fingerprint)):
        log.warning(warning)
    return as_reranker(given)


def _check_counts(**counts: tuple[int | None, int]) -> None:
    """Each with the least it may be."""
    for name, (given, least) in counts.items():
        if given is not None:
            check_integer(given, name, minimum=least, maximum=MAX_COUNT)


def _style(word: str) -> Any:
    if word not in JUDGE_STYLES:
        raise BadSetting(f"--judge-prompt is '{word}'; allowed: {', '.join(JUDGE_STYLES)}.")
    return word
