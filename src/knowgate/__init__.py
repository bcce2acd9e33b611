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

from typing import TYPE_CHECKING

from knowgate.lazy import hand_on
from knowgate.version import VERSION

if TYPE_CHECKING:
    from knowgate.arbiters import FittedArbiter, load_arbiter
    from knowgate.datasets import load_questions
    from knowgate.errors import KnowgateError
    from knowgate.evaluation import Evaluation, evaluate
    from knowgate.fitting import fit, fit_arbiter
    from knowgate.gates import FittedGate, default_gate, load_gate
    from knowgate.labels import label
    from knowgate.models import Backend, load_model
    from knowgate.pipeline import (
        AdaptiveRAG,
        Settings,
        TrafficLog,
        answer_record,
        build_pipeline,
        decision_record,
        load_settings,
    )
    from knowgate.report import write_report
    from knowgate.retrieval import build_index, load_retriever
    from knowgate.runs import RunFolder, open_run
    from knowgate.thresholds import Calibration, calibrate
    from knowgate.types import (
        Answer,
        AnswerEvent,
        Arbiter,
        Belief,
        BothAnswers,
        Choice,
        Completion,
        Decision,
        DecisionEvent,
        Gate,
        Note,
        Passage,
        PassagesEvent,
        Question,
        Reading,
        Sampling,
        Signal,
        TextEvent,
        Want,
    )
else:
    __getattr__, __dir__ = hand_on(__name__)

__version__ = VERSION
__all__ = [
    "AdaptiveRAG",
    "Answer",
    "AnswerEvent",
    "Arbiter",
    "Backend",
    "Belief",
    "BothAnswers",
    "Calibration",
    "Choice",
    "Completion",
    "Decision",
    "DecisionEvent",
    "Evaluation",
    "FittedArbiter",
    "FittedGate",
    "Gate",
    "KnowgateError",
    "Note",
    "Passage",
    "PassagesEvent",
    "Question",
    "Reading",
    "RunFolder",
    "Sampling",
    "Settings",
    "Signal",
    "TextEvent",
    "TrafficLog",
    "Want",
    "answer_record",
    "build_index",
    "build_pipeline",
    "calibrate",
    "decision_record",
    "default_gate",
    "evaluate",
    "fit",
    "fit_arbiter",
    "label",
    "load_arbiter",
    "load_gate",
    "load_model",
    "load_questions",
    "load_retriever",
    "load_settings",
    "open_run",
    "write_report",
]
