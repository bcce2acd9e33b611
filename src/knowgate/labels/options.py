"""Which hidden states a run keeps: words such as 'mid,late' to layer numbers of the model at hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from knowgate.errors import BadSetting
from knowgate.types import Model, Sampling, ServedModel, Signal, SignalRequest

NAMED_LAYERS = ("mid", "late", "last")
NO_LAYERS = "none"


def resolve_layers(layers: str | Sequence[int], model: Model) -> tuple[int, ...]:
    """Layer numbers of 'mid,late,last', of figures, or of 'none'; none where the backend has no hidden states."""
    words = layers.split(",") if isinstance(layers, str) else [str(number) for number in layers]
    asked = [word.strip() for word in words if word.strip()]
    if asked == [NO_LAYERS] or Signal.HIDDEN not in model.offers:
        return ()
    numbers = tuple(sorted({_number(word, model.depth) for word in asked}))
    if isinstance(model, ServedModel):
        model.check_request(SignalRequest(layers=numbers))  # before anything is asked
    return numbers


def named_layers(depth: int) -> dict[str, int]:
    """What mid, late and last are in a network of so many hidden states, embeddings included."""
    return dict(zip(NAMED_LAYERS, (depth // 2, 3 * depth // 4, depth - 1), strict=True))


def _number(word: str, depth: int) -> int:
    named = named_layers(depth)
    if word in named:
        return named[word]
    if not word.lstrip("-").isdigit():
        raise BadSetting(f"--layers: '{word}' is neither a number nor one of {', '.join(NAMED_LAYERS)}, {NO_LAYERS}.")
    return int(word) % depth


DEFAULT_PASSAGES = 3  # passages taken from an index, unless the plan says how many
DEFAULT_CANDIDATES = 20  # passages a reranker chooses from, as in `ask`


@dataclass(frozen=True)
class LabelPlan:
    """How to label. `layers` are indices of the hidden-state tuple; k: passages, None for all of a data set's own.

    seakr: samples whose end states are compared (SeaKR's uncertainty; they are among `samples` where there are enough).
    open_samples: sampled answers with passages; None for as many as without. mask_samples: with MASK passages.
    candidates: passages a reranker chooses from; without one, they count for nothing.
    iterative: also answer after several rounds of retrieval.
    """

    samples: int = 30
    temperature: float = 1.0
    max_tokens: int = 32
    seed: int = 0
    layers: tuple[int, ...] = ()
    mask: bool = False
    k: int | None = None
    open_book: bool = True
    seakr: int = 0
    open_samples: int | None = None
    candidates: int = DEFAULT_CANDIDATES
    mask_samples: int = 0
    iterative: bool = False
    top_p: float = 1.0
    top_k: int = 0

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_p, self.top_k)


def count_shown_passages(k: int | None, retriever: str | None) -> int | None:
    """How many passages the LLM was shown in a run with this k and retriever fingerprint; None: the data's own, all."""
    return DEFAULT_PASSAGES if k is None and retriever is not None else k
