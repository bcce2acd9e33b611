"""From settings to the parts of a pipeline."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from knowgate.cli.config import Settings
from knowgate.errors import BadInput, BadSetting
from knowgate.files import cache_dir, sha256_text
from knowgate.gates import load_gate
from knowgate.models import load_model
from knowgate.pipeline import AdaptiveRAG
from knowgate.prompts import load_templates, packaged
from knowgate.prompts.answer import AnswerPrompts
from knowgate.rerank import load_reranker
from knowgate.retrieval import load_retriever
from knowgate.retrieval.index import build_index
from knowgate.types import Model, Retriever


def build_pipeline(settings: Settings, record: Path | None = None, *, retrieves: bool = True) -> AdaptiveRAG:
    """Everything `ask` needs; `decide` retrieves nothing and so needs no documents."""
    gate = load_gate(settings.gate)
    retriever = build_retriever(settings) if retrieves else None
    if retrieves and retriever is None and gate.name != "never":
        raise BadSetting("give the documents to retrieve from: --docs FOLDER or --index DIR (or --gate never).")
    return AdaptiveRAG(
        build_model(settings.model, record),
        gate,
        retriever,
        reranker=load_reranker(settings.rerank) if settings.rerank and retrieves else None,
        threshold=settings.threshold,
        k=settings.k,
        prompts=build_prompts(settings),
        max_tokens=settings.max_tokens,
    )


def build_model(spec: str, record: Path | None = None) -> Model:
    model = load_model(spec)
    if record is None:
        return model
    from knowgate.models.replay import RecordingModel

    return RecordingModel(model, record)


def build_prompts(settings: Settings) -> AnswerPrompts:
    templates = load_templates(settings.prompts, like="answer") if settings.prompts else packaged("answer")
    return AnswerPrompts(templates, settings.lang)


def build_retriever(settings: Settings) -> Retriever | None:
    if settings.docs and settings.index:
        raise BadSetting("give either --docs or --index, not both.")
    if settings.index:
        return load_retriever(settings.index, settings.retriever)
    if settings.docs:
        return load_retriever(str(cached_index(settings.docs, settings.retriever or "bm25")))
    return None


def cached_index(docs: Path, kind: str) -> Path:
    """An index of a folder, kept in the cache and brought up to date when documents changed."""
    key = sha256_text(str(docs.resolve()), kind)[:16]
    out = cache_dir() / "indexes" / f"{docs.resolve().name}-{key}"
    build_index(docs, out, kind=kind)
    return out


def read_arguments(questions: list[str] | None) -> Iterator[str]:
    """Questions from the arguments, else one per line from standard input."""
    if questions:
        yield from questions
        return
    if sys.stdin.isatty():
        raise BadInput("no question given: write it as an argument, or pipe questions in, one per line.")
    yield from _lines(sys.stdin)


def _lines(lines: Iterable[str]) -> Iterator[str]:
    found = False
    for line in lines:
        if line.strip():
            found = True
            yield line.strip()
    if not found:
        raise BadInput("no question came in on standard input: write one per line.")
