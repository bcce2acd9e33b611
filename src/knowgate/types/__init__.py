"""Records and protocols that all packages share, and the base class of gates."""

from knowgate.types.gate import Gate, GateScores
from knowgate.types.protocols import (
    AnswerPair,
    Arbiter,
    Belief,
    Embedder,
    Model,
    ModelIdentity,
    PassageFilter,
    Reranker,
    Result,
    Retriever,
    Runner,
    ScoringModel,
    ServedModel,
    TextStream,
    TokenizingModel,
    ToolCallingModel,
)
from knowgate.types.records import (
    SYNTHETIC_KEY,
    Answer,
    AnswerEvent,
    ArbiterChoice,
    Completion,
    Decision,
    DecisionEvent,
    DecisionNote,
    LabelPrompt,
    Neighbor,
    Passage,
    PassagesEvent,
    Prompt,
    Question,
    Reading,
    Sampling,
    Signal,
    SignalRequest,
    StreamEvent,
    TextEvent,
    Token,
    Vector,
)

__all__ = [
    "Answer", "AnswerEvent", "Arbiter", "Belief", "AnswerPair", "ArbiterChoice", "Completion", "Decision",
    "DecisionEvent", "Embedder", "StreamEvent", "Gate", "LabelPrompt", "ServedModel", "Model", "ModelIdentity",
    "Neighbor", "DecisionNote", "Passage", "PassagesEvent", "Prompt", "Question", "Reading", "Reranker", "Result",
    "Retriever", "Runner", "SYNTHETIC_KEY", "Sampling", "GateScores", "ScoringModel", "ToolCallingModel",
    "PassageFilter", "Signal", "TextEvent", "TextStream", "Token", "TokenizingModel", "Vector", "SignalRequest",
]  # fmt: skip
