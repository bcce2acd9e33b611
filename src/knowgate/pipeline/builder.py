"""From settings to the parts of a pipeline."""

from __future__ import annotations

import logging
from pathlib import Path

from knowgate.core.files import cache_dir, file_lock, sha256_text
from knowgate.errors import BadSetting
from knowgate.gates import DEFAULT_GATE, default_gate, load_gate
from knowgate.gates.arbiters import load_arbiter
from knowgate.gates.arbiters.abstention import RULES_ARBITER
from knowgate.gates.artifacts.gate_folder import parse_fitted_spec, read_artifact
from knowgate.gates.rules.rule_set import RuleSet, load_rules
from knowgate.gates.scoring import bind_gate
from knowgate.models import load_model
from knowgate.models.prompts.answers import AnswerPrompts, load_answer_prompts
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.pipeline.settings import Settings
from knowgate.pipeline.traffic_log import TrafficLog
from knowgate.retrieval import load_retriever
from knowgate.retrieval.index import build_index
from knowgate.retrieval.rerankers import load_reranker
from knowgate.retrieval.rerankers.cross_encoder import describe_llm_mismatch, is_aligned_reranker
from knowgate.types import Arbiter, Model, PassageFilter, Reranker, Retriever

PRESETS = ("cbdr",)
FIT_PROBE_COMMAND = "knowgate fit probe --target known --balanced --labels RUN --out DIR"
DEFAULT_BETA = 0.95  # CBDR 4.3: answers directly above it; keeps 83.3 % of the retrievals in the paper


def apply_preset(settings: Settings) -> Settings:
    """The settings a preset stands for; without one, they stay as they are."""
    if settings.preset is None:
        if settings.beta is not None:
            raise BadSetting("--beta belongs to --preset cbdr; other gates take --threshold.")
        return settings
    if settings.preset not in PRESETS:
        raise BadSetting(f"--preset is '{settings.preset}'; allowed: {', '.join(PRESETS)}.")
    return _cbdr(settings)


def _cbdr(settings: Settings) -> Settings:
    """Probe, beta, aligned reranker, top k: where Conf, the probe's raw softmax, is above beta, the LLM answers
    directly. The calibrated need would not do: beta belongs to the score of a probe trained on balanced classes."""
    folder = _probe(settings.gate)
    if settings.rerank is None or not is_aligned_reranker(settings.rerank):
        given = f"is '{settings.rerank}'" if settings.rerank else "is missing"
        raise BadSetting(
            f"--preset cbdr takes an aligned reranker; --rerank {given}. "
            "Make one: knowgate prefer, then knowgate fit reranker --pref PREF --out DIR"
        )
    if settings.beta is not None and settings.threshold is not None:
        raise BadSetting("give --beta or --threshold (which is 1 - beta), not both.")
    beta = DEFAULT_BETA if settings.beta is None else settings.beta
    if not 0 <= beta <= 1:
        raise BadSetting(f"--beta is {beta}; it must be between 0 and 1.")
    threshold = round(1 - beta, 12) if settings.threshold is None else settings.threshold
    return settings.model_copy(update={"threshold": threshold, "gate": f"{folder},verdict=own"})


def _probe(gate: str) -> str:
    """The folder of a probe of knowing."""
    spec = parse_fitted_spec(gate)
    made = read_artifact(spec.folder).manifest if spec else {}
    if spec is None or made["gate"] != "probe":
        raise BadSetting(f"--preset cbdr decides by a fitted probe; --gate is '{gate}'. Fit one: {FIT_PROBE_COMMAND}")
    if made.get("target", "known") != "known":
        raise BadSetting(
            f"--preset cbdr takes a probe of whether the LLM knows; '{gate}' was fitted on '{made['target']}'. "
            f"Fit one: {FIT_PROBE_COMMAND}"
        )
    return spec.folder


log = logging.getLogger(__name__)


def build_pipeline(
    settings: Settings, record: Path | None = None, *, retrieves: bool = True, model: Model | None = None
) -> AdaptiveRAG:
    """Everything `ask` needs; `decide` retrieves nothing and so needs no documents. model: instead of the settings'."""
    settings = apply_preset(settings)
    chosen = None if settings.gate == DEFAULT_GATE else load_gate(settings.gate, plug_in=settings.plug_in)
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
        return RULES_ARBITER
    return None if settings.arbiter == "none" else load_arbiter(settings.arbiter, plug_in=settings.plug_in)


def build_rules(settings: Settings) -> RuleSet | None:
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
    if warning := describe_llm_mismatch(spec, model.name, model.fingerprint):
        log.warning(warning)
    return load_reranker(spec)


def load_second_look(folder: str, model: Model, prompts: AnswerPrompts) -> PassageFilter:
    """A fitted gate that can also judge passages: kbm. Bound to the LLM, whose weights it may share."""
    gate = bind_gate(load_gate(folder, plug_in=True), model, prompts)
    if gate.second_look is None:
        raise BadSetting(f"the gate '{gate.name}' cannot judge passages; --second-look takes a fitted kbm gate.")
    return gate.second_look


def build_model(spec: str, record: Path | None = None) -> Model:
    model = load_model(spec)
    if record is None:
        return model
    from knowgate.models.replay import RecordingModel

    return RecordingModel(model, record)


def build_prompts(settings: Settings) -> AnswerPrompts:
    return load_answer_prompts(settings.prompts, settings.lang)


def build_retriever(settings: Settings) -> Retriever | None:
    if settings.docs and settings.index:
        raise BadSetting("give either --docs or --index, not both.")
    if settings.index:
        return load_retriever(settings.index, settings.retriever)
    if settings.docs:
        return load_retriever(str(build_cached_index(settings.docs, settings.retriever or "bm25")))
    return None


def build_cached_index(docs: Path, kind: str) -> Path:
    """An index of a folder, kept in the cache and brought up to date when documents changed.

    Processes that want the same one at the same time, workers of a server say, take turns.
    """
    key = sha256_text(str(docs.resolve()), kind)[:16]
    out = cache_dir() / "indexes" / f"{docs.resolve().name}-{key}"
    with file_lock(out.with_name(f"{out.name}.turn")):
        report = build_index(docs, out, kind=kind)
    if report.problems:
        log.warning("Of the documents in '%s' %s", docs, report.summarize_problems())
    return out
