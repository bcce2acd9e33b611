"""The gates, chosen by a string such as 'logprob:mean'. To add one: a file here and a line in the table.

From outside the package: an entry point in the group 'knowgate.gates'. Importing this loads none of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from knowgate.errors import BadSetting
from knowgate.gates.fitted.artefact import is_artefact, read_artefact
from knowgate.gates.fitted.spec import MADE, Verdict, fitted_spec, refuse_folder
from knowgate.lazy import hand_on
from knowgate.registry import Entry, parse_options, plugins, resolve, split_spec
from knowgate.types import Gate

if TYPE_CHECKING:
    from knowgate.gates.adaptive import CLASSES, apply_classes
    from knowgate.gates.dhicl import DhiclGate, Sign
    from knowgate.gates.fitted.agreement import reference_files
    from knowgate.gates.fitted.answers import (
        ANSWER_LABELS,
        ANSWER_PROMPTS,
        AnswerJudge,
        answer_cuts,
        gain_needs,
        open_answer_judge,
    )
    from knowgate.gates.fitted.artefact import (
        ALWAYS,
        CARD,
        KIND,
        MANIFEST,
        REFERENCE,
        SEEN,
        Artefact,
        Tensors,
        revise_artefact,
        unusable,
        write_artefact,
    )
    from knowgate.gates.fitted.base import MIDDLE, FittedGate
    from knowgate.gates.fitted.distance import far_share, far_words, measure_ground, read_off, what_it_reads
    from knowgate.gates.fitted.judge import (
        ADAPTER_FOLDER,
        ADAPTER_SUFFIXES,
        Judge,
        JudgeOptions,
        adapter_digest,
        adapter_folders,
        checked_adapters,
        is_adapter,
        open_base,
        open_judge,
        whole_judge,
    )
    from knowgate.gates.fitted.llama_judge import GGUF_NAME, TOKENIZER_NAME, CheckedPrompt, GgufOptions, LlamaJudge
    from knowgate.gates.fitted.manifest import CalibrationRecord, Measured, ModelName, RunName, check_calibration
    from knowgate.gates.fitted.network import apply_network, expect_network
    from knowgate.gates.fitted.overview import retrieval_rule
    from knowgate.gates.fitted.pair_judge import (
        ENCODER_NAMES,
        PairEncoder,
        PairJudge,
        encoder_source,
        is_encoder,
        open_pairs,
        padded,
    )
    from knowgate.gates.fitted.probability import to_probability
    from knowgate.gates.fitted.tensors import ExpectedTensors
    from knowgate.gates.fusion import TEXT_SIGNAL, draft_embeddings
    from knowgate.gates.held import at_threshold
    from knowgate.gates.kbm import (
        KBM_HEADS,
        KBM_LABELS,
        PASSAGE_LESSONS,
        encode_kbm_answer,
        kbm_confidence,
        kbm_text_with_passages,
    )
    from knowgate.gates.live import bind_gate, read_questions
    from knowgate.gates.offers import check_offers
    from knowgate.gates.outside import blamed
    from knowgate.gates.probe import ProbeGate
    from knowgate.gates.prompt import PromptGate
    from knowgate.gates.recorded import (
        GateScores,
        RunIdentity,
        check_unseen,
        folder_of,
        gate_name,
        is_told,
        record_scores,
        score_gate,
        score_gates,
        seen_by,
        verdict_of,
        without_seen,
    )
    from knowgate.gates.scoring import check_count, measure_distances, score_both, score_questions
    from knowgate.gates.standard import default_gate, markdown_table
    from knowgate.gates.uar import CRITERIA, SELF, apply_head, apply_heads, hard_tree, soft_tree
else:
    __getattr__, __dir__ = hand_on(__name__)
__all__ = [
    "ADAPTER_FOLDER",
    "ADAPTER_SUFFIXES",
    "ALWAYS",
    "ANSWER_LABELS",
    "ANSWER_PROMPTS",
    "AnswerJudge",
    "Artefact",
    "CARD",
    "CLASSES",
    "CRITERIA",
    "CalibrationRecord",
    "CheckedPrompt",
    "DEFAULT",
    "DhiclGate",
    "ENCODER_NAMES",
    "ExpectedTensors",
    "FITTED",
    "FittedGate",
    "GATES",
    "GGUF_NAME",
    "GateScores",
    "GgufOptions",
    "Judge",
    "JudgeOptions",
    "KBM_HEADS",
    "KBM_LABELS",
    "KIND",
    "LlamaJudge",
    "MANIFEST",
    "MIDDLE",
    "Measured",
    "ModelName",
    "PACKAGED",
    "PASSAGE_LESSONS",
    "PLAIN",
    "PairEncoder",
    "PairJudge",
    "ProbeGate",
    "PromptGate",
    "REFERENCE",
    "RunIdentity",
    "RunName",
    "SEEN",
    "SELF",
    "Sign",
    "TEXT_SIGNAL",
    "TOKENIZER_NAME",
    "Tensors",
    "adapter_digest",
    "adapter_folders",
    "answer_cuts",
    "apply_classes",
    "apply_head",
    "apply_heads",
    "apply_network",
    "at_threshold",
    "bind_gate",
    "blamed",
    "check_calibration",
    "check_named",
    "check_count",
    "check_offers",
    "check_unseen",
    "checked_adapters",
    "default_gate",
    "draft_embeddings",
    "encode_kbm_answer",
    "encoder_source",
    "expect_network",
    "far_share",
    "far_words",
    "fitted_spec",
    "folder_of",
    "gain_needs",
    "gate_name",
    "hard_tree",
    "is_adapter",
    "is_artefact",
    "is_encoder",
    "is_told",
    "kbm_confidence",
    "kbm_text_with_passages",
    "load_fitted",
    "load_gate",
    "markdown_table",
    "measure_distances",
    "measure_ground",
    "open_answer_judge",
    "open_base",
    "open_judge",
    "open_pairs",
    "padded",
    "read_artefact",
    "read_off",
    "read_questions",
    "record_scores",
    "reference_files",
    "retrieval_rule",
    "revise_artefact",
    "score_both",
    "score_gate",
    "score_gates",
    "score_questions",
    "seen_by",
    "soft_tree",
    "to_probability",
    "unusable",
    "verdict_of",
    "what_it_reads",
    "whole_judge",
    "without_seen",
    "write_artefact",
]

DEFAULT = "default"  # a gate that comes with knowgate and was fitted on the LLM at hand; else PLAIN
PLAIN = "logprob:first"
PACKAGED = Path(__file__).parent / "packaged"
GATES = {
    "always": Entry("knowgate.gates.always:AlwaysGate", "retrieve for every question", cost="nothing"),
    "never": Entry("knowgate.gates.never:NeverGate", "never retrieve", cost="nothing"),
    "random": Entry(
        "knowgate.gates.random:RandomGate", "retrieve for a random share: the line to beat", cost="nothing"
    ),
    "prompt": Entry(
        "knowgate.gates.prompt:PromptGate",
        "ask the LLM whether it can answer",
        needs="labels",
        cost="one prefill of 120 tokens",
        paper="Kadavath et al. 2022; DH-ICL 2.1",
    ),
    "logprob": Entry(
        "knowgate.gates.logprob:LogprobGate",
        "how probable the drafted answer is: first, mean, min, entropy, margin",
        needs="logprobs",
        cost="none when skipping",
        paper="AdaRAGUE 2025",
    ),
    "flare": Entry(
        "knowgate.gates.flare:FlareGate",
        "the least probable token of the draft is below theta",
        needs="logprobs",
        cost="none when skipping",
        paper="Jiang et al. 2023",
    ),
    "dhicl": Entry(
        "knowgate.gates.dhicl:DhiclGate",
        "similar logged questions, shown to the LLM with what it knew, make it expect not to know",
        needs="labels",
        cost="one prefill of 600 tokens",
        extra="local",
        paper="Lv et al. 2025 (DH-ICL)",
    ),
    "skr": Entry(
        "knowgate.gates.skr:SkrGate",
        "retrieval helped the nearest logged questions more often than it hurt",
        cost="one embedding, one search",
        extra="local",
        paper="Wang et al. 2023 (SKR)",
    ),
    "seakr": Entry(
        "knowgate.gates.seakr:SeakrGate",
        "20 sampled answers end in hidden states that lie far apart",
        needs="hidden, samples",
        cost="20 sampled answers",
        paper="Yao et al. 2025 (SeaKR)",
    ),
    "selfrag": Entry(
        "knowgate.gates.selfrag:SelfragGate",
        "the LLM's own token [Retrieval] beats [No Retrieval]; for models trained with them",
        needs="labels",
        cost="one prefill of the question",
        paper="Asai et al. 2024 (Self-RAG)",
    ),
}

# gates that must be fitted first, each with the function that does it; a folder made by `knowgate fit` names one
FITTED = {
    "probe": Entry(
        "knowgate.gates.probe:ProbeGate",
        "a network reads a middle-layer hidden state as not knowing",
        needs="hidden",
        cost="none when skipping",
        extra="train",
        paper="CBDR 2025",
        fit="knowgate.fitting.probe:fit_probe",
    ),
    "uar": Entry(
        "knowgate.gates.uar:UarGate",
        "sources are asked for, or it takes knowledge that changes with time or that the LLM lacks",
        needs="hidden",
        cost="none when skipping",
        extra="train",
        paper="Cheng et al. 2024 (UAR)",
        fit="knowgate.fitting.uar:fit_uar",
    ),
    "adaptive": Entry(
        "knowgate.gates.adaptive:AdaptiveGate",
        "the question looks like those that took one or several rounds of retrieval",
        cost="one embedding",
        extra="train",
        paper="Jeong et al. 2024 (Adaptive-RAG)",
        fit="knowgate.fitting.adaptive:fit_adaptive",
    ),
    "ik": Entry(
        "knowgate.gates.ik:IkGate",
        "a fine-tuned judge of question and draft (or a head over their embeddings) says No",
        needs="draft",
        cost="one prefill of the judge of 100 tokens",
        extra="train",
        paper="IK 2025",
        fit="knowgate.fitting.judges.ik:fit_ik",
    ),
    "judge": Entry(
        "knowgate.gates.judge:JudgeGate",
        "a small fine-tuned judge says that the LLM's answer is wrong; for LLMs of which only text comes back",
        needs="draft",
        cost="one prefill of the judge of 70 tokens",
        extra="train",
        paper="ours",
        fit="knowgate.fitting.judges.answer:fit_answer",
    ),
    "gain": Entry(
        "knowgate.gates.gain:GainGate",
        "the same judge, asked twice, expects documents to be right where the LLM's answer is not",
        needs="draft",
        cost="two prefills of the judge of 70 tokens",
        extra="train",
        paper="ours",
        fit="knowgate.fitting.judges.gain:fit_gain",
    ),
    "kbm": Entry(
        "knowgate.gates.kbm:KbmGate",
        "a fine-tuned judge of the question denies mastery or certainty; also a second look at passages",
        cost="one or two prefills of the judge of 90 tokens",
        extra="train",
        paper="Zhang et al. 2024 (KBM)",
        fit="knowgate.fitting.judges.kbm:fit_kbm",
    ),
    "fusion": Entry(
        "knowgate.gates.fusion:FusionGate",
        "all signals of the pass, weighed together, say retrieval will help",
        needs="as fitted",
        cost="as fitted",
        extra="train",
        paper="ours",
        fit="knowgate.fitting.fusion:fit_fusion",
    ),
}


def load_gate(spec: str, *, plug_in: bool = False) -> Gate:
    """The gate a spec names: 'logprob', 'logprob:mean', 'random:rate=0.3,seed=1', or the folder of a fitted gate,
    with ',verdict=own' behind it where its raw score shall decide.

    plug_in: let a fitted gate decide for another LLM than it was fitted on.
    """
    if (fitted := fitted_spec(spec)) is not None:
        return load_fitted(fitted.folder, plug_in=plug_in, verdict=fitted.verdict)
    name, options = split_spec(spec)
    if name in FITTED:
        raise BadSetting(
            f"gate '{name}' must be fitted first: knowgate fit {name} --labels RUN --out DIR; then use --gate DIR."
        )
    check_named(spec)
    cls = _checked(name, resolve(GATES, "gate", name, "knowgate.gates", also=MADE))
    return cls(**parse_options(cls, options, f"gate '{name}'"))


def check_named(spec: str) -> None:
    """Refuse the folder of something else, unless a gate is called like it."""
    name, _ = split_spec(spec)
    if name not in GATES and name not in plugins("knowgate.gates"):
        refuse_folder(spec)


def load_fitted(folder: str, *, plug_in: bool = False, verdict: Verdict = "need") -> FittedGate:
    """A gate that `knowgate fit` made. verdict: 'own' decides by the raw score at 0.5, not by the calibrated need."""
    artefact = read_artefact(folder)
    name = str(artefact.manifest["gate"]).split(":")[0]
    cls: Any = _checked(name, resolve(FITTED, "fitted gate", name, "knowgate.fitted_gates"))
    gate: FittedGate = cls.opened(artefact, plug_in, verdict=verdict)
    return gate


def _checked(name: str, cls: object) -> type[Gate]:
    """What an entry point of another package names may be anything."""
    if not (isinstance(cls, type) and issubclass(cls, Gate)):
        raise BadSetting(f"gate '{name}' is {cls!r}, which is no knowgate.Gate: let it be a class that inherits it.")
    return cls
