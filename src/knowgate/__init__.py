"""knowgate decides, question by question, whether an LLM already knows the answer or must retrieve.

The names below are the public ones. Each is loaded when it is first used, so `import knowgate` costs next to nothing.

    import knowgate as kg

    run = kg.label("jsonl:questions.jsonl", out="run")            # what does the LLM know?
    gate = kg.fit("fusion", run, out="my-gate", cheap=True)       # learn to tell
    calibration = kg.calibrate(gate, other_run, max_loss=0.02)    # choose its threshold, with a guarantee
    kg.evaluate([calibration.gate, "logprob:mean"], third_run)    # prove it
    rag = kg.AdaptiveRAG(kg.load_model("smollm"), calibration.gate, kg.load_retriever("index"))
    rag.answer("Who wrote Faust?")
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from knowgate.core import VERSION

if TYPE_CHECKING:
    from knowgate.data.questions import load_questions
    from knowgate.data.runs.folder import RunFolder, open_run
    from knowgate.errors import KnowgateError
    from knowgate.evaluation.gate_comparison import Evaluation
    from knowgate.evaluation.gate_evaluation import evaluate
    from knowgate.evaluation.report.report_folder import write_report
    from knowgate.gates import default_gate, load_gate
    from knowgate.gates.arbiters import load_arbiter
    from knowgate.gates.arbiters.fitted_arbiter import FittedArbiter
    from knowgate.gates.calibration.threshold_calibration import Calibration, calibrate
    from knowgate.gates.fitted_gate import FittedGate
    from knowgate.gates.rules.rule_set import load_rules
    from knowgate.labels.labeling import label
    from knowgate.models import load_model
    from knowgate.models.backend import Backend
    from knowgate.pipeline.adaptive_rag import AdaptiveRAG
    from knowgate.pipeline.answer_json import answer_record, decision_record
    from knowgate.pipeline.builder import build_pipeline
    from knowgate.pipeline.settings import PipelineOptions, load_settings
    from knowgate.pipeline.traffic_log import TrafficLog
    from knowgate.retrieval import load_retriever
    from knowgate.retrieval.index import build_index
    from knowgate.training.arbiter import fit_arbiter
    from knowgate.training.gate import fit
    from knowgate.training.policy.search import FittedPolicy, fit_policy
    from knowgate.types import (
        Answer,
        AnswerEvent,
        AnswerPair,
        Arbiter,
        ArbiterChoice,
        Belief,
        Completion,
        Decision,
        DecisionEvent,
        DecisionNote,
        Gate,
        Model,
        Passage,
        PassagesEvent,
        Question,
        Reading,
        Reranker,
        Retriever,
        Sampling,
        Signal,
        SignalRequest,
        TextEvent,
    )

# The module each public name is loaded from when it is first used. A test compares this with the imports above.
_MODULES = {
    "knowgate.data.questions": ["load_questions"],
    "knowgate.data.runs.folder": ["RunFolder", "open_run"],
    "knowgate.errors": ["KnowgateError"],
    "knowgate.evaluation.gate_comparison": ["Evaluation"],
    "knowgate.evaluation.gate_evaluation": ["evaluate"],
    "knowgate.evaluation.report.report_folder": ["write_report"],
    "knowgate.gates": ["default_gate", "load_gate"],
    "knowgate.gates.arbiters": ["load_arbiter"],
    "knowgate.gates.arbiters.fitted_arbiter": ["FittedArbiter"],
    "knowgate.gates.calibration.threshold_calibration": ["Calibration", "calibrate"],
    "knowgate.gates.fitted_gate": ["FittedGate"],
    "knowgate.gates.rules.rule_set": ["load_rules"],
    "knowgate.labels.labeling": ["label"],
    "knowgate.models": ["load_model"],
    "knowgate.models.backend": ["Backend"],
    "knowgate.pipeline.adaptive_rag": ["AdaptiveRAG"],
    "knowgate.pipeline.answer_json": ["answer_record", "decision_record"],
    "knowgate.pipeline.builder": ["build_pipeline"],
    "knowgate.pipeline.settings": ["PipelineOptions", "load_settings"],
    "knowgate.pipeline.traffic_log": ["TrafficLog"],
    "knowgate.retrieval": ["load_retriever"],
    "knowgate.retrieval.index": ["build_index"],
    "knowgate.training.arbiter": ["fit_arbiter"],
    "knowgate.training.gate": ["fit"],
    "knowgate.training.policy.search": ["FittedPolicy", "fit_policy"],
    "knowgate.types": [
        "Answer", "AnswerEvent", "AnswerPair", "Arbiter", "ArbiterChoice", "Belief", "Completion", "Decision",
        "DecisionEvent", "DecisionNote", "Gate", "Model", "Passage", "PassagesEvent", "Question", "Reading", "Reranker",
        "Retriever", "Sampling", "Signal", "SignalRequest", "TextEvent",
    ],
}  # fmt: skip
_HOMES = {name: module for module, names in _MODULES.items() for name in names}
# Names of version 0.1 and what they are called now. They warn, and go away in 0.4.
_RENAMED = {
    "BothAnswers": "AnswerPair",
    "Choice": "ArbiterChoice",
    "Note": "DecisionNote",
    "Want": "SignalRequest",
    "Settings": "PipelineOptions",
}

__version__ = VERSION
__all__ = [
    "AdaptiveRAG", "Answer", "AnswerEvent", "AnswerPair", "Arbiter", "ArbiterChoice", "Backend", "Belief",
    "Calibration", "Completion", "Decision", "DecisionEvent", "DecisionNote", "Evaluation", "FittedArbiter",
    "FittedGate", "FittedPolicy", "Gate", "KnowgateError", "Model", "Passage", "PassagesEvent", "PipelineOptions",
    "Question", "Reading", "Reranker", "Retriever", "RunFolder", "Sampling", "Signal", "SignalRequest", "TextEvent",
    "TrafficLog", "answer_record", "build_index", "build_pipeline", "calibrate", "decision_record", "default_gate",
    "evaluate", "fit", "fit_arbiter", "fit_policy", "label", "load_arbiter", "load_gate", "load_model",
    "load_questions", "load_retriever", "load_rules", "load_settings", "open_run", "write_report",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import a public name on first use; Python calls this function for names that the module does not have yet."""
    if name in _RENAMED:
        import warnings

        warnings.warn(f"knowgate.{name} is now knowgate.{_RENAMED[name]}", DeprecationWarning, stacklevel=2)
        return __getattr__(_RENAMED[name])
    if name not in _HOMES:
        raise AttributeError(f"module 'knowgate' has no attribute '{name}'")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
