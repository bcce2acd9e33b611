"""From settings to the parts of a pipeline."""

from __future__ import annotations

import codecs
import logging
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

from knowgate.cli.config import Settings
from knowgate.cli.preset import with_preset
from knowgate.errors import BadInput, BadSetting
from knowgate.files import cache_dir, sha256_text
from knowgate.gates import DEFAULT, default_gate, load_gate
from knowgate.models import load_model
from knowgate.pipeline import AdaptiveRAG
from knowgate.prompts import load_templates, packaged
from knowgate.prompts.answer import AnswerPrompts
from knowgate.rerank import load_reranker
from knowgate.rerank.manifest import is_aligned, read_manifest
from knowgate.retrieval import load_retriever
from knowgate.retrieval.index import build_index
from knowgate.types import Model, Reranker, Retriever, SecondLook

log = logging.getLogger(__name__)


def build_pipeline(settings: Settings, record: Path | None = None, *, retrieves: bool = True) -> AdaptiveRAG:
    """Everything `ask` needs; `decide` retrieves nothing and so needs no documents."""
    settings = with_preset(settings)
    chosen = None if settings.gate == DEFAULT else load_gate(settings.gate, plug_in=settings.plug_in)
    retriever = build_retriever(settings) if retrieves else None
    if retrieves and retriever is None and (chosen is None or chosen.name != "never"):
        raise BadSetting("give the documents to retrieve from: --docs FOLDER or --index DIR (or --gate never).")
    model, prompts = build_model(settings.model, record), build_prompts(settings)
    return AdaptiveRAG(
        model,
        chosen or default_gate(model, prompts.fingerprint),
        retriever,
        reranker=build_reranker(settings, model) if settings.rerank and retrieves else None,
        threshold=settings.threshold,
        second_look=load_second_look(settings.second_look) if settings.second_look and retrieves else None,
        rerank_margin=settings.rerank_margin if retrieves else None,
        k=settings.k,
        prompts=prompts,
        max_tokens=settings.max_tokens,
    )


def build_reranker(settings: Settings, model: Model) -> Reranker:
    """A reranker aligned to another LLM still ranks, but not for this one: say so."""
    spec = str(settings.rerank)
    reranker = load_reranker(spec)
    if is_aligned(spec) and (made := read_manifest(spec)["aligned_to"])["model_fingerprint"] != model.fingerprint:
        log.warning("The reranker '%s' was aligned to %s, not to %s.", spec, made["model"], model.name)
    return reranker


def load_second_look(folder: str) -> SecondLook:
    """A fitted gate that can also judge passages: kbm."""
    gate = load_gate(folder, plug_in=True)
    if not hasattr(gate, "useful"):
        raise BadSetting(f"the gate '{gate.name}' cannot judge passages; --second-look takes a fitted kbm gate.")
    return gate  # type: ignore[return-value]


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


def read_arguments(questions: list[str] | None) -> Iterable[str]:
    """Questions from the arguments, else one per line from standard input. What is wrong at once is said at once."""
    if questions:
        return [_checked(question) for question in questions]
    if sys.stdin is None or sys.stdin.isatty():
        raise BadInput("no question given: write it as an argument, or pipe questions in, one per line.")
    lines = _lines(sys.stdin.buffer)
    first = next(lines)  # says that nothing came in before a model is loaded for it
    return chain([first], lines)


def _lines(lines: Iterable[bytes]) -> Iterator[str]:
    found = False
    for number, line in enumerate(lines, start=1):
        text = _decoded(line.removeprefix(codecs.BOM_UTF8) if number == 1 else line, number).strip()
        if text:
            found = True
            yield text
    if not found:
        raise BadInput("no question came in on standard input: write one per line.")


def _decoded(line: bytes, number: int) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError:
        raise BadInput(f"line {number} of standard input is not UTF-8 text: convert it, as with iconv.") from None


def _checked(text: str) -> str:
    """Not empty, and whole characters: bytes that are not UTF-8 arrive as halves."""
    if not text.strip():
        raise BadInput("the question is empty: ask something.")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise BadInput(f"the question is not UTF-8 text: {text[:60]!a}. Type it in a UTF-8 terminal.") from None
    return text
