"""knowgate decides, question by question, whether an LLM already knows the answer or must retrieve.

The names below are the public ones. Each is loaded when it is first used, so `import knowgate` costs next to nothing.
"""

from typing import TYPE_CHECKING

from knowgate.lazy import hand_on

if TYPE_CHECKING:
    from knowgate.errors import KnowgateError
    from knowgate.gates import default_gate, load_gate
    from knowgate.models import load_model
    from knowgate.pipeline import AdaptiveRAG
    from knowgate.retrieval import build_index, load_retriever
    from knowgate.types import Answer, Decision, Gate, Passage, Question
else:
    __getattr__, __dir__ = hand_on(__name__)

__version__ = "0.1.0"
__all__ = [
    "AdaptiveRAG",
    "Answer",
    "Decision",
    "Gate",
    "KnowgateError",
    "Passage",
    "Question",
    "build_index",
    "default_gate",
    "load_gate",
    "load_model",
    "load_retriever",
]
