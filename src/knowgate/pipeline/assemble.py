"""From settings to the parts of a pipeline."""

from __future__ import annotations

import logging
from pathlib import Path

from knowgate.arbiters import RULES, load_arbiter
from knowgate.errors import BadSetting
from knowgate.files import cache_dir, locked, sha256_text
from knowgate.gates import DEFAULT, bind_gate, default_gate, load_gate
from knowgate.models import load_model
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.pipeline.presets import with_preset
from knowgate.pipeline.settings import Settings
from knowgate.pipeline.traffic import TrafficLog
from knowgate.prompts import AnswerPrompts, load_answer_prompts
from knowgate.rerank import load_reranker, other_llm
from knowgate.retrieval import build_index, load_retriever
from knowgate.rules import RuleBook, load_rules
from knowgate.types import Arbiter, Model, Reranker, Retriever, SecondLook

log = logging.getLogger(__name__)


def build_pipeline(
    settings: Settings, record: Path | None = None, *, retrieves: bool = True, model: Model | None = None
) -> AdaptiveRAG:
    """Everything `ask` needs; `decide` retrieves nothing and so needs no documents. model: instead of the settings'."""
    settings = with_preset(settings)
    chosen = None if settings.gate == DEFAULT else load_gate(settings.gate, plug_in=settings.plug_in)
    retriever = build_retriever(settings) if retrieves else None
    if retrieves and retriever is None and (chosen is None or chosen.name != "never"):
        raise BadSetting("give the documents to retrieve from: --docs FOLDER or --index DIR (or --gate never).")
    model, prompts = model or build_model(settings.model, record), build_prompts(settings)
    return AdaptiveRAG(
        model,
        chosen or default_gate(model, prompts.fingerprint),
        retriever,
        reranker=build_reranker(settings, model) if settings.rerank and retrieves else None,
        threshold=settings.threshold,
        second_look=load_second_look(settings.second_look, model, prompts)
        if settings.second_look and retrieves
        else None,
        rerank_margin=settings.rerank_margin if retrieves else None,
        k=settings.k,
        prompts=prompts,
        max_tokens=settings.max_tokens,
        log=build_log(settings) if retrieves else None,
        arbiter=build_arbiter(settings) if retrieves else None,
        rules=build_rules(settings),
    )


def build_arbiter(settings: Settings) -> Arbiter | None:
    """The rules are on unless told otherwise; they cost nothing."""
    if settings.arbiter is None:
        return RULES
    return None if settings.arbiter == "none" else load_arbiter(settings.arbiter, plug_in=settings.plug_in)


def build_rules(settings: Settings) -> RuleBook | None:
    """Those that come with knowgate, unless told otherwise."""
    if settings.rules == "none":
        return None
    return load_rules(None if settings.rules == "packaged" else settings.rules)


def build_log(settings: Settings) -> TrafficLog | None:
    """Looked into before anything is answered: a file that is no log is said at once."""
    if settings.log is None:
        if settings.log_drafts:
            raise BadSetting("--log-drafts needs --log FILE.")
        return None
    found = TrafficLog(settings.log, drafts=settings.log_drafts)
    found.store.scopes()
    return found


def build_reranker(settings: Settings, model: Model) -> Reranker:
    """A reranker aligned to another LLM still ranks, but not for this one: say so."""
    spec = str(settings.rerank)
    if warning := other_llm(spec, model.name, model.fingerprint):
        log.warning(warning)
    return load_reranker(spec)


def load_second_look(folder: str, model: Model, prompts: AnswerPrompts) -> SecondLook:
    """A fitted gate that can also judge passages: kbm. Bound to the LLM, whose weights it may share."""
    gate = bind_gate(load_gate(folder, plug_in=True), model, prompts)
    if gate.second_look is None:
        raise BadSetting(f"the gate '{gate.name}' cannot judge passages; --second-look takes a fitted kbm gate.")
    return gate.second_look


def build_model(spec: str, record: Path | None = None) -> Model:
    model = load_model(spec)
    if record is None:
        return model
    from knowgate.models import RecordingModel

    return RecordingModel(model, record)


def build_prompts(settings: Settings) -> AnswerPrompts:
    return load_answer_prompts(settings.prompts, settings.lang)


def build_retriever(settings: Settings) -> Retriever | None:
    if settings.docs and settings.index:
        raise BadSetting("give either --docs or --index, not both.")
    if settings.index:
        return load_retriever(settings.index, settings.retriever)
    if settings.docs:
        return load_retriever(str(cached_index(settings.docs, settings.retriever or "bm25")))
    return None


def cached_index(docs: Path, kind: str) -> Path:
    """An index of a folder, kept in the cache and brought up to date when documents changed.

    Processes that want the same one at the same time, workers of a server say, take turns.
    """
    key = sha256_text(str(docs.resolve()), kind)[:16]
    out = cache_dir() / "indexes" / f"{docs.resolve().name}-{key}"
    with locked(out.with_name(f"{out.name}.turn")):
        report = build_index(docs, out, kind=kind)
    if report.problems:
        log.warning("Of the documents in '%s' %s", docs, report.missed)
    return out
