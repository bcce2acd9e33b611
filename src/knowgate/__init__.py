"""knowgate decides, question by question, whether an LLM already knows the answer or must retrieve.

The names below are the public ones. Importing knowgate loads no torch: backends load when they are used.
"""

from knowgate.errors import KnowgateError
from knowgate.gates import load_gate
from knowgate.models import load_model
from knowgate.pipeline import AdaptiveRAG
from knowgate.retrieval import load_retriever
from knowgate.retrieval.index import build_index
from knowgate.types import Answer, Decision, Passage, Question

__version__ = "0.1.0"
__all__ = [
    "AdaptiveRAG",
    "Answer",
    "Decision",
    "KnowgateError",
    "Passage",
    "Question",
    "build_index",
    "load_gate",
    "load_model",
    "load_retriever",
]
