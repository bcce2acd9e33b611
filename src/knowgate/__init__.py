"""knowgate decides, question by question, whether an LLM already knows the answer or must retrieve.

The names below are the public ones. Importing knowgate loads no torch: backends load when they are used.
"""

from typing import TYPE_CHECKING, Any

from knowgate.errors import KnowgateError
from knowgate.gates import default_gate, load_gate
from knowgate.models import load_model
from knowgate.pipeline import AdaptiveRAG
from knowgate.retrieval import load_retriever
from knowgate.types import Answer, Decision, Passage, Question

if TYPE_CHECKING:
    from knowgate.retrieval.index import build_index

__version__ = "0.1.0"
__all__ = [
    "AdaptiveRAG",
    "Answer",
    "Decision",
    "KnowgateError",
    "Passage",
    "Question",
    "build_index",
    "default_gate",
    "load_gate",
    "load_model",
    "load_retriever",
]


def __getattr__(name: str) -> Any:
    """`build_index` on first use: reading documents is a quarter of the import time, and few programs index."""
    if name == "build_index":
        from knowgate.retrieval.index import build_index

        return build_index
    raise AttributeError(f"module 'knowgate' has no attribute '{name}'")
