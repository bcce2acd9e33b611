"""`label`: questions and an LLM in, a label run out. What `knowgate label` calls; prints nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from knowgate.datasets import Data, data_name, gather_questions
from knowgate.doors import check_seed, check_whole, check_within, user_path
from knowgate.errors import BadSetting
from knowgate.labels.grading import load_grader
from knowgate.labels.labeller import Labeller
from knowgate.labels.layers import layer_numbers
from knowgate.labels.plan import CANDIDATES, FOUND, Plan
from knowgate.labels.recipe import LabelRecipe, identity
from knowgate.labels.running import far_runner, is_far, joined, named, near_runner
from knowgate.labels.session import Tally, label_run
from knowgate.models import as_model, check_sampling
from knowgate.prompts import load_answer_prompts
from knowgate.rerank import as_reranker, other_llm
from knowgate.retrieval import as_retriever
from knowgate.runs import RunFolder
from knowgate.signals import SAMPLES
from knowgate.types import Model, Reranker, Retriever, Runner

log = logging.getLogger(__name__)
MOST = 1_000_000  # samples, tokens or passages of one question
STYLES = ("implies", "contains")


def label(
    data: Data,
    *,
    out: str | Path,
    model: str | Model = "smollm",
    index: str | Path | Retriever | None = None,
    rerank: str | Path | Reranker | None = None,
    candidates: int = CANDIDATES,
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
    on_progress: Callable[[Tally], None] = lambda tally: None,
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
    far = is_far(runner)
    if mask_samples and not mask:
        raise BadSetting("--mask-samples are answers to MASK passages: add --mask.")
    check_within(temperature, "the temperature", most=100)
    check_seed(seed)
    questions = gather_questions(data, limit)
    llm = as_model(model)
    plan = Plan(
        samples=samples,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        max_tokens=max_tokens,
        seed=seed,
        layers=layer_numbers(layers, llm),
        mask=mask,
        k=FOUND if k is None and rerank is not None else k,
        open_book=not closed_book,
        seakr=SAMPLES if seakr else 0,
        open_samples=open_samples,
        candidates=candidates,
        mask_samples=mask_samples,
        iterative=iterative,
    )
    check_sampling(plan.sampling)
    style = _style(judge_prompt)
    grader = load_grader(grade, as_model(judge) if judge is not None else None, style)
    retriever = as_retriever(index) if index is not None else None
    wording = load_answer_prompts(Path(prompts) if prompts is not None else None, lang)
    folder = RunFolder(user_path(out))
    labeller = Labeller(llm, grader, plan, wording, retriever, _reranker(rerank, llm))
    doing = near_runner(runner) if not far else None
    if far:
        recipe = LabelRecipe(
            model=named("model", model) or "",
            grade=grade,
            judge=named("judge", judge),
            judge_prompt=style,
            plan=plan,
            prompts=wording,
            index=named("index", index),
            rerank=named("reranker", rerank),
        )
        doing = far_runner(str(runner), recipe, labeller.failed, identity(labeller))
    with joined(doing, folder.path):
        label_run(
            folder,
            questions,
            labeller,
            data=data_name(data),
            runner=doing,
            retry_failed=retry_failed,
            on_progress=on_progress,
        )
    return folder


def _check_rerank(rerank: object, candidates: int, k: int | None, *, closed_book: bool) -> None:
    if rerank is not None and closed_book:
        raise BadSetting("--closed-book retrieves nothing, so there is nothing to --rerank; leave one of them out.")
    if rerank is not None and candidates < (k or FOUND):
        raise BadSetting(f"--candidates is {candidates}, fewer than the {k or FOUND} passages to keep (--k).")


def _reranker(given: str | Path | Reranker | None, llm: Model) -> Reranker | None:
    if given is None:
        return None
    if isinstance(given, str | Path) and (warning := other_llm(given, llm.name, llm.fingerprint)):
        log.warning(warning)
    return as_reranker(given)


def _check_counts(**counts: tuple[int | None, int]) -> None:
    """Each with the least it may be."""
    for name, (given, least) in counts.items():
        if given is not None:
            check_whole(given, name, least=least, most=MOST)


def _style(word: str) -> Any:
    if word not in STYLES:
        raise BadSetting(f"--judge-prompt is '{word}'; allowed: {', '.join(STYLES)}.")
    return word
