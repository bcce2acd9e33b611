"""Rules for a topic: match questions whose embedding is similar to that of example questions.

A match costs one embedding of the question, about 10 to 30 ms on a CPU with the default embedder `minilm`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import numpy as np

from knowgate.errors import BadSetting
from knowgate.types import Embedder, Vector

DEFAULT_EMBEDDER = "minilm"
RuleAction = Literal["retrieve", "skip"]


@dataclass(frozen=True)
class RuleMatch:
    """The decision of a rule for a question that it matches.

    Attributes:
        rule: Name of the rule.
        action: Whether to retrieve or to skip retrieval.
        reason: Explanation for the user.
    """

    rule: str
    action: RuleAction
    reason: str

    @property
    def retrieve(self) -> bool:
        """Whether the rule decides to retrieve."""
        return self.action == "retrieve"


@dataclass(frozen=True)
class TopicRule:
    """A rule that applies to questions about the topic of its examples.

    Attributes:
        name: Name of the topic.
        action: "retrieve" or "skip".
        examples: Typical questions of the topic.
        similarity: Minimum cosine similarity to the mean of the examples for a question to match.
        embedder: Spec of the embedding model.
        reason: Explanation for the user.
    """

    name: str
    action: RuleAction
    examples: tuple[str, ...]
    similarity: float = 0.5
    embedder: str = DEFAULT_EMBEDDER
    reason: str = ""
    is_small_talk: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Raise BadSetting if the examples or the similarity are wrong."""
        if not self.examples:
            raise BadSetting(f"the topic rule '{self.name}' has no example questions. Add some: examples = ['...'].")
        if not -1 <= self.similarity <= 1:
            raise BadSetting(
                f"topic rule '{self.name}' has similarity = {self.similarity:g}. Use a value from -1 to 1."
            )

    @cached_property
    def model(self) -> Embedder:
        """The embedding model; its weights are loaded at the first question."""
        from knowgate.retrieval.embeddings import load_embedder

        return load_embedder(self.embedder)

    @cached_property
    def center(self) -> Vector:
        """The mean embedding of the examples, scaled to length 1."""
        mean = self.model.embed(self.examples).mean(axis=0)
        return np.asarray(mean / max(float(np.linalg.norm(mean)), 1e-12))

    def matches(self, text: str, budget: object) -> bool:
        """Return whether a question is similar enough to the examples. Only pattern rules have a time `budget`."""
        return bool(text.strip()) and float(self.model.embed([text])[0] @ self.center) >= self.similarity

    @property
    def match(self) -> RuleMatch:
        """The decision for questions that match."""
        return RuleMatch(self.name, self.action, self.reason or f"the question is about the topic '{self.name}'")

    def to_toml(self) -> str:
        """Return the rule as an entry of a rules file."""
        fields = {"name": self.name, "action": self.action, "embedder": self.embedder}
        lines = ["[[topic]]"]
        lines += [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in fields.items()]
        lines += [f"similarity = {self.similarity:g}", "examples = ["]
        lines += [f"  {json.dumps(example, ensure_ascii=False)}," for example in self.examples]
        return "\n".join([*lines, "]", ""])
