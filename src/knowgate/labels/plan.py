"""How to label: what a run is asked for. Knows nothing of how it is done."""

from __future__ import annotations

from dataclasses import dataclass

from knowgate.types import Sampling

FOUND = 3  # passages taken from an index, unless the plan says how many
CANDIDATES = 20  # passages a reranker chooses from, as in `ask`


@dataclass(frozen=True)
class Plan:
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
    candidates: int = CANDIDATES
    mask_samples: int = 0
    iterative: bool = False
    top_p: float = 1.0
    top_k: int = 0

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_p, self.top_k)


def passages_shown(k: int | None, retriever: str | None) -> int | None:
    """How many passages the LLM was shown in a run with this k and retriever fingerprint; None: the data's own, all."""
    return FOUND if k is None and retriever is not None else k
