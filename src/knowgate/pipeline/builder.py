"""Build a pipeline from its options: model, gate, retriever, reranker, arbiter, rules and log."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

from knowgate.core.files import cache_dir, file_lock, sha256_text
from knowgate.data.runs.records import OWN_VERDICT
from knowgate.errors import BadSetting
from knowgate.gates import DEFAULT_GATE, default_gate, describe_text_only, is_text_only, load_gate
from knowgate.gates.arbiters import load_arbiter
from knowgate.gates.arbiters.abstention import RULES_ARBITER
from knowgate.gates.arbiters.arbitration import choose_answers
from knowgate.gates.artifacts.gate_folder import parse_fitted_spec, read_artifact
from knowgate.gates.calibration.deployment import describe_missing_calibration, describe_recorded_origin
from knowgate.gates.fitted_gate import FittedGate
from knowgate.gates.rules.rule_set import RuleSet, load_rules
from knowgate.gates.scoring import bind_gate
from knowgate.models import load_model
from knowgate.models.prompts.answers import AnswerPrompts, load_answer_prompts
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.pipeline.settings import DecisionOptions, PipelineOptions
from knowgate.pipeline.traffic_log import TrafficLog
from knowgate.retrieval import load_retriever
from knowgate.retrieval.dense import DenseRetriever, HybridRetriever
from knowgate.retrieval.engines.base import EngineRetriever
from knowgate.retrieval.engines.pgvector import PgvectorRetriever
from knowgate.retrieval.index import build_index
from knowgate.retrieval.rerankers import load_reranker
from knowgate.retrieval.rerankers.cross_encoder import CrossEncoderReranker, describe_llm_mismatch, is_aligned_reranker
from knowgate.types import AnswerPair, Completion, Gate, Passage, Question, Reading, Token
from knowgate.types.protocols import Arbiter, Model, PassageFilter, Reranker, Retriever

log = logging.getLogger(__name__)

PRESETS = ("cbdr",)
EXAMPLE_QUESTION = "What is the capital of France?"  # loads models
EXAMPLE_PASSAGE = Passage("1", "Paris is the capital of France.")
FIT_PROBE_ADVICE = "Fit a probe: fit('probe', runs, out=folder, target='known', balanced=True)."
DEFAULT_BETA = 0.95  # CBDR 4.3: above it the LLM answers without retrieval; 83.3 % of the questions are retrieved


def build_pipeline(
    settings: PipelineOptions, record: Path | None = None, *, retrieves: bool = True, model: Model | None = None
) -> AdaptiveRAG:
    """Build the pipeline that `knowgate ask` uses.

    Args:
        settings: Options, for example from `load_settings`.
        record: Folder to record the model's outputs in, for later use as the model `replay:FOLDER`.
        retrieves: False builds a pipeline that only decides; it needs no documents.
        model: Use this model instead of the one that the options name.

    Raises:
        BadSetting: Documents are missing, or options contradict each other.
    """
    settings = apply_preset(settings)
    if not retrieves:  # deciding needs nothing of what comes after a search
        unused = {"rerank": None, "rerank_margin": None, "second_look": None, "log": None, "log_drafts": False}
        settings = settings.replace(arbiter="none", **unused)
    # None stands for the default gate, which depends on the model.
    gate = None if settings.gate == DEFAULT_GATE else load_gate(settings.gate, plug_in=settings.plug_in)
    retriever = _build_required_retriever(settings, gate) if retrieves else None
    model = model or build_model(settings.model, record)
    prompts = load_answer_prompts(settings.prompts, settings.lang, model)
    if gate is None and is_text_only(model):
        log.warning(describe_text_only(model.name))
    rag = AdaptiveRAG(
        model,
        gate or default_gate(model, prompts.fingerprint),
        retriever,
        reranker=build_reranker(settings.rerank, model) if settings.rerank else None,
        threshold=settings.threshold,
        k=settings.k,
        second_look=load_second_look(settings.second_look, model, prompts) if settings.second_look else None,
        rerank_margin=settings.rerank_margin,
        prompts=prompts,
        max_tokens=settings.max_tokens,
        log=build_log(settings),
        arbiter=build_arbiter(settings),
        rules=build_rules(settings),
    )
    _warn_about_gate(rag, settings)
    return rag


def _build_required_retriever(settings: PipelineOptions, gate: Gate | None) -> Retriever | None:
    """Build the retriever. Only the gate 'never' can do without documents."""
    retriever = build_retriever(settings)
    if retriever is None and (gate is None or gate.name != "never"):
        raise BadSetting("there are no documents to retrieve from. Give `docs` or `index`, or use gate='never'.")
    return retriever


def _warn_about_gate(rag: AdaptiveRAG, settings: PipelineOptions) -> None:
    """Warn if the gate is not calibrated, or if it was fitted on imported answers."""
    if settings.threshold is None and (notice := describe_missing_calibration(rag.gate)):
        log.warning(notice)
    if not settings.plug_in and (notice := describe_recorded_origin(rag.gate)):
        _ = rag.bound_gate  # binding raises an error if another LLM gave these answers
        log.warning(notice)


def build_arbiter(settings: PipelineOptions) -> Arbiter | None:
    """Load the arbiter, which chooses between the answers with and without passages after retrieval.

    Returns:
        The arbiter that the settings name; None if they say 'none'. Default: the rules arbiter, which costs nothing.
    """
    if settings.arbiter is None:
        return RULES_ARBITER
    return None if settings.arbiter == "none" else load_arbiter(settings.arbiter, plug_in=settings.plug_in)


def build_rules(settings: DecisionOptions) -> RuleSet | None:
    """Load the rules that may decide instead of the gate, such as the one for small talk. None if they are turned off."""
    if settings.rules == "none":
        return None
    return load_rules(None if settings.rules == "packaged" else settings.rules)


def build_log(settings: PipelineOptions) -> TrafficLog | None:
    """Open the log of answered questions, or return None if not set."""
    if settings.log is None:
        if settings.log_drafts:
            raise BadSetting("`log_drafts` has no effect without a log. Set `log` too, or leave `log_drafts` out.")
        return None
    traffic_log = TrafficLog(settings.log, drafts=settings.log_drafts)
    traffic_log.store.scopes()  # raises at once if the log cannot be read
    return traffic_log


def build_reranker(spec: str, model: Model) -> Reranker:
    """Load a reranker. Warn if it was trained for another LLM."""
    if warning := describe_llm_mismatch(spec, model.name, model.fingerprint):
        log.warning(warning)
    return load_reranker(spec)


def load_second_look(folder: str, model: Model, prompts: AnswerPrompts) -> PassageFilter:
    """Load the second look: a judge that reads the passages after retrieval, and drops useless ones.

    Args:
        folder: Folder of a fitted kbm gate, whose judge is used.
        model: The answering LLM. If the judge was fine-tuned from this model, both share one copy of the weights.
        prompts: Prompts of the answers.
    """
    # `plug_in=True` accepts a gate that was fitted on another LLM.
    gate = bind_gate(load_gate(folder, plug_in=True), model, prompts)
    if gate.passage_filter is None:
        raise BadSetting(f"second_look='{folder}' cannot judge passages. Use a gate that `knowgate fit kbm` wrote.")
    return gate.passage_filter


def build_model(spec: str, record: Path | None = None) -> Model:
    """Load a model. If `record` names a folder, all outputs of the model are also written there."""
    model = load_model(spec)
    if record is None:
        return model
    from knowgate.models.replay import RecordingModel

    return RecordingModel(model, record)


def build_retriever(settings: PipelineOptions) -> Retriever | None:
    """Load the index, or build one from documents. None if neither is given."""
    if settings.docs and settings.index:
        raise BadSetting("`docs` and `index` are mutually exclusive: give only one of them.")
    if settings.index:
        return load_retriever(settings.index, settings.retriever)
    if settings.docs:
        return load_retriever(str(build_cached_index(settings.docs, settings.retriever or "bm25")))
    return None


def build_cached_index(docs: Path, kind: str) -> Path:
    """Build or update an index of documents in the cache, and return its folder."""
    key = sha256_text(str(docs.resolve()), kind)[:16]
    out = cache_dir() / "indexes" / f"{docs.resolve().name}-{key}"
    with file_lock(out.with_name(f"{out.name}.turn")):
        report = build_index(docs, out, kind=kind)
    if report.problems:
        log.warning("In '%s', %s", docs, report.summarize_problems())
    return out


# --- loading models before the first question -----------------------------------------------------


def load_gate_models(rag: AdaptiveRAG) -> None:
    """Load the models of gate and arbiter early, by scoring an example. The first request would be slow otherwise."""
    question = Question(EXAMPLE_QUESTION)
    draft = Completion("Paris", (Token("Paris", -0.1, entropy=0.1, margin=0.9),), n_tokens=1)
    with suppress(Exception):  # the first request reports the error
        if isinstance(rag.bound_gate, FittedGate):
            rag.bound_gate.score([question], [Reading(draft=draft)])
    with suppress(Exception):
        if rag.bound_arbiter is not None:
            # The answers differ, because an arbiter is not asked about answers that agree.
            choose_answers(rag.bound_arbiter, [AnswerPair(question, draft, Completion("Lyon"), (EXAMPLE_PASSAGE,))])


def load_search_models(rag: AdaptiveRAG) -> None:
    """Load the search models early, by using them on an example. Remote search engines are not called."""
    with suppress(Exception):  # the first search reports the error
        _load_retriever_model(rag.retriever)
    with suppress(Exception):
        if isinstance(rag.reranker, CrossEncoderReranker):
            rag.reranker.score([EXAMPLE_QUESTION], [[EXAMPLE_PASSAGE]])
    with suppress(Exception):
        if rag.second_look is not None:
            rag.second_look.are_useful([Question(EXAMPLE_QUESTION)], [[EXAMPLE_PASSAGE]])


def _load_retriever_model(retriever: Retriever | None) -> None:
    """Load the embedding model of a retriever, by using it on an example."""
    if isinstance(retriever, DenseRetriever | HybridRetriever):
        retriever.search([EXAMPLE_QUESTION], 1)
    elif isinstance(retriever, PgvectorRetriever) or (isinstance(retriever, EngineRetriever) and retriever.is_dense):
        retriever.embedder.embed([EXAMPLE_QUESTION])


# --- presets --------------------------------------------------------------------------------------


def apply_preset(settings: PipelineOptions) -> PipelineOptions:
    """Return the settings with a preset, such as 'cbdr', replaced by its options."""
    if settings.preset is None:
        if settings.beta is not None:
            raise BadSetting("`beta` has an effect only with preset='cbdr'. Set `threshold` instead.")
        return settings
    if settings.preset not in PRESETS:
        raise BadSetting(f"preset='{settings.preset}' is unknown. Use one of: {', '.join(PRESETS)}.")
    return _apply_cbdr(settings)


def _apply_cbdr(settings: PipelineOptions) -> PipelineOptions:
    """Return the settings of the preset 'cbdr': the LLM answers directly if its confidence is above `beta`.

    The gate is a probe of hidden states. `beta` applies to its own score, before calibration.
    """
    folder = _find_probe_folder(settings.gate)
    if settings.rerank is None or not is_aligned_reranker(settings.rerank):
        problem = f"rerank='{settings.rerank}' is not one" if settings.rerank else "`rerank` is missing"
        raise BadSetting(
            f"preset='cbdr' needs a reranker of knowgate, but {problem}. Make one: `knowgate fit reranker`."
        )
    if settings.beta is not None and settings.threshold is not None:
        raise BadSetting("`beta` and `threshold` (which is 1 - beta) are mutually exclusive: give only one of them.")
    beta = DEFAULT_BETA if settings.beta is None else settings.beta
    threshold = round(1 - beta, 12) if settings.threshold is None else settings.threshold
    return settings.replace(threshold=threshold, gate=f"{folder}{OWN_VERDICT}")


def _find_probe_folder(gate: str) -> str:
    """Return the folder of a fitted probe from a gate spec, such as 'my-probe'.

    Raises:
        BadSetting: The spec names another gate, or a probe that does not predict whether the LLM knows the answer.
    """
    spec = parse_fitted_spec(gate)
    manifest = read_artifact(spec.folder).manifest if spec else {}
    if spec is None or manifest["gate"] != "probe":
        raise BadSetting(
            f"preset='cbdr' needs the folder of a fitted gate of the kind 'probe', but gate='{gate}' is not one. "
            f"{FIT_PROBE_ADVICE}"
        )
    if manifest.get("target", "known") != "known":
        raise BadSetting(
            f"preset='cbdr' needs a probe with target='known', but gate='{gate}' has '{manifest['target']}'. {FIT_PROBE_ADVICE}"
        )
    return spec.folder
