"""Options of a label run: what callers set, and the plan that it resolves to for a given model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from knowgate.core.options import Count, Options, Seed, WholeNumber
from knowgate.data.signals.samples import SEAKR_SAMPLES
from knowgate.errors import BadSetting
from knowgate.types import Model, Sampling, ServedModel, Signal, SignalRequest

DEFAULT_PASSAGES = 3  # passages taken from an index
DEFAULT_CANDIDATES = 20  # passages a reranker chooses from
NAMED_LAYERS = ("mid", "late", "last")
NO_LAYERS = "none"


class AnswerOptions(Options):
    """Options of letting an LLM answer questions, shared by `label` and `evaluate`."""

    index: Any = Field(
        None,
        description="Index folder, http:URL, search engine or retriever. Default: the contexts of the questions.",
    )
    rerank: Any = Field(
        None,
        description="Reranker that chooses the passages: folder made by `fit reranker`, cross-encoder, api:MODEL@URL, "
        "tei:URL.",
        json_schema_extra={"metavar": "DIR|SPEC"},
    )
    candidates: Count = Field(DEFAULT_CANDIDATES, description="With `rerank`: passages it chooses the `k` from.")
    k: Count | None = Field(
        None, description="Passages per question. Default: 3 from an index, else all contexts of a question."
    )
    limit: Count | None = Field(None, description="Use only the first questions, this many.")
    prompts: Path | None = Field(
        None,
        description="Prompt wording: free (answers at length), or your own TOML file.",
        json_schema_extra={"metavar": "free|FILE"},
    )
    runner: Any = Field(
        None,
        description="Where the LLM runs: local (this process), ray:local, ray (a running cluster) or ray:HOST:PORT; "
        "options follow a '?': 'ray:local?workers=2', 'ray?workers=8&gpus=0.5'. Needs the extra 'ray'.",
        json_schema_extra={"metavar": "local|ray[:ADDRESS]"},
    )


class LabelOptions(AnswerOptions):
    """Options of `label`."""

    closed_book: bool = Field(False, description="Retrieve nothing; only closed-book answers.")
    iterative: bool = Field(False, description="Also answer after up to 3 rounds of retrieval; for `fit adaptive`.")
    samples: WholeNumber = Field(30, description="Sampled answers per question, closed-book and open-book each.")
    open_samples: WholeNumber | None = Field(
        None, description="Sampled open-book answers, if not as many as `samples`; 0 saves most of the time."
    )
    temperature: float = Field(1.0, ge=0, le=100, allow_inf_nan=False, description="Sampling temperature.")
    top_p: float = Field(1.0, description="Sample from the most probable tokens that reach this share; 1: all tokens.")
    top_k: int = Field(0, description="Sample from this many most probable tokens; 0: all tokens.")
    max_tokens: Count = Field(32, description="Maximum length of an answer in tokens.")
    seed: Seed = Field(0, description="Random seed of the samples.")
    grade: str = Field(
        "contains", description="Grader: exact, contains, choice or judge. Multiple choice is graded by letter."
    )
    judge: Any = Field(None, description="Model that grades, with `grade` judge.")
    judge_prompt: Literal["implies", "contains"] = Field(
        "implies", description="Prompt of the judge: implies (with the question) or contains (without)."
    )
    mask: bool = Field(False, description="Also answer with gold answers in the passages replaced by MASK.")
    mask_samples: WholeNumber = Field(0, description="With `mask`: sampled answers to the masked passages.")
    layers: str | tuple[int, ...] = Field(
        "mid,late,last", description="Hidden states to record: mid, late, last, layer numbers, or none."
    )
    seakr: bool = Field(False, description="Also record how far apart the states of 20 sampled answers are (SeaKR).")
    lang: str | None = Field(None, description="Prompt language: en or zh. Default: detected.")
    retry_failed: bool = Field(False, description="Label questions again that failed before.")

    @field_validator("layers", mode="before")
    @classmethod
    def _accept_any_sequence(cls, value: Any) -> Any:
        return value if isinstance(value, str) else tuple(value)

    @model_validator(mode="after")
    def _check_combinations(self) -> LabelOptions:
        """Raise BadSetting for options that contradict each other."""
        shown = self.k or DEFAULT_PASSAGES
        if self.rerank is not None and self.closed_book:
            raise BadSetting("`rerank` and `closed_book` are mutually exclusive: closed_book=True retrieves nothing.")
        if self.rerank is not None and self.candidates < shown:
            raise BadSetting(f"candidates={self.candidates} is fewer than the passages to keep: k={shown}.")
        if self.mask_samples and not self.mask:
            raise BadSetting(f"mask_samples={self.mask_samples} needs masked passages: set mask=True.")
        return self

    def make_plan(self, model: Model) -> LabelPlan:
        """Resolve the options for a model."""
        same = {item.name: getattr(self, item.name) for item in fields(LabelPlan) if hasattr(self, item.name)}
        resolved = {
            "layers": resolve_layers(self.layers, model),
            "k": DEFAULT_PASSAGES if self.k is None and self.rerank is not None else self.k,
            "open_book": not self.closed_book,
            "seakr": SEAKR_SAMPLES if self.seakr else 0,
        }
        return LabelPlan(**{**same, **resolved})


@dataclass(frozen=True)
class LabelPlan:
    """What to generate and record for each question; part of the identity of a run.

    Attributes:
        layers: Layer numbers of the hidden states to record.
        k: Passages per question; None for all contexts of a question.
        seakr: Number of samples whose final states are compared (SeaKR); 0 for none.
        open_samples: Sampled open-book answers; None for as many as closed-book.
        candidates: Passages that a reranker chooses from; unused without one.
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
        """How answers are sampled."""
        return Sampling(self.temperature, self.top_p, self.top_k)


def count_shown_passages(k: int | None, retriever: str | None) -> int | None:
    """Return how many passages a run showed the LLM.

    Args:
        k: The `k` of the run.
        retriever: Fingerprint of its retriever; None if passages were the contexts of the questions.

    Returns:
        The number of passages; None for all contexts of a question.
    """
    return DEFAULT_PASSAGES if k is None and retriever is not None else k


def resolve_layers(layers: str | Sequence[int], model: Model) -> tuple[int, ...]:
    """Convert "mid,late,last", numbers or "none" to layer numbers; empty if the model has no hidden states."""
    words = layers.split(",") if isinstance(layers, str) else [str(number) for number in layers]
    names = [word.strip() for word in words if word.strip()]
    if names == [NO_LAYERS] or Signal.HIDDEN not in model.offers:
        return ()
    numbers = tuple(sorted({_resolve_layer(name, model.depth) for name in names}))
    if isinstance(model, ServedModel):
        model.check_request(SignalRequest(layers=numbers))  # fail before anything is generated
    return numbers


def named_layers(depth: int) -> dict[str, int]:
    """Return the layer numbers of mid, late and last for a model with this many hidden states."""
    return dict(zip(NAMED_LAYERS, (depth // 2, 3 * depth // 4, depth - 1), strict=True))


def _resolve_layer(name: str, depth: int) -> int:
    named = named_layers(depth)
    if name in named:
        return named[name]
    if not name.lstrip("-").isdigit():
        raise BadSetting(f"layers={name!r} is not a layer: use a number, {', '.join(NAMED_LAYERS)} or {NO_LAYERS}.")
    return int(name) % depth
