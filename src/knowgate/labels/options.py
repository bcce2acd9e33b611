"""Options of a label run, and the layer numbers that they mean for a given model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import field_validator, model_validator

from knowgate.core.options import Count, Options, Seed, WholeNumber, option
from knowgate.errors import BadSetting
from knowgate.types import Model, Sampling, ServedModel, Signal, SignalRequest

DEFAULT_PASSAGES = 3  # passages taken from an index
DEFAULT_CANDIDATES = 20  # passages a reranker chooses from
NAMED_LAYERS = ("mid", "late", "last")
NO_LAYERS = "none"


class AnswerOptions(Options):
    """Options for the answers of an LLM, shared by `label` and `evaluate`."""

    index: Any = option(
        None,
        "Where passages are searched: an index folder, http:URL, a search engine or a retriever. Default: no search; "
        "the `contexts` that come with each question are used.",
    )
    rerank: Any = option(
        None,
        "Reranker that sorts the found passages and keeps the best `k`: a folder made by `fit reranker`, a "
        "cross-encoder, api:MODEL@URL or tei:URL.",
        metavar="DIR|SPEC",
    )
    candidates: Count = option(
        DEFAULT_CANDIDATES, "Number of passages that the reranker chooses from. Used only with `rerank`."
    )
    k: Count | None = option(
        None,
        "Number of passages shown to the LLM per question. Default: 3 with an index, otherwise all `contexts` of the "
        "question.",
    )
    limit: Count | None = option(None, "Maximum number of questions. The first ones are used. Default: all.")
    prompts: Path | None = option(
        None,
        "Wording of the prompts: `free` (the LLM answers in full sentences) or your own TOML file. Default: prompts "
        "that ask for short answers.",
        metavar="free|FILE",
    )
    runner: Any = option(
        None,
        "Where the LLM runs: `local` (in this process), `ray:local` (Ray workers on this machine), `ray` (a Ray "
        "cluster that is already running) or ray:HOST:PORT. Worker options follow a '?': 'ray:local?workers=2', "
        "'ray?workers=8&gpus=0.5'. Ray needs the extra 'ray'. Default: local.",
        metavar="local|ray[:ADDRESS]",
    )


class LabelOptions(AnswerOptions):
    """Options of `label`."""

    closed_book: bool = option(
        False, "Record only closed-book answers (from memory). No passages are searched or shown."
    )
    iterative: bool = option(
        False, "Also record the answer after up to 3 rounds of retrieval. `fit adaptive` learns from it."
    )
    samples: WholeNumber = option(
        30, "Number of sampled answers per question, drawn once without passages and once with passages."
    )
    open_samples: WholeNumber | None = option(
        None,
        "Number of sampled answers with passages (open-book). 0 makes the run much faster. Default: the same as `samples`.",
    )
    temperature: float = option(1.0, "Temperature of sampled answers.", ge=0, le=100, allow_inf_nan=False)
    top_p: float = option(
        1.0,
        "Nucleus sampling: sample only from the most probable tokens whose probabilities add up to this value. 1 "
        "allows all tokens.",
    )
    top_k: int = option(0, "Sample only from this many of the most probable tokens. 0 allows all tokens.")
    max_tokens: Count = option(32, "Maximum length of an answer in tokens.")
    seed: Seed = option(0, "Random seed of the samples.")
    grade: str = option(
        "contains",
        "How answers are graded: `exact` (equals a gold answer), `contains` (contains one), `choice` (right letter) "
        "or `judge` (another LLM decides). Multiple-choice questions are always graded by letter. 'contains,judge' "
        "also stores the verdicts of a second grader; `evaluate` can use them instead.",
    )
    judge: Any = option(None, "LLM that grades answers. Required if `grade` is `judge`. Example: openai:MODEL@URL")
    judge_prompt: Literal["implies", "contains"] = option(
        "implies",
        "What the judge is asked: `implies` (does the answer imply the gold answer, given the question?) or "
        "`contains` (does the answer contain the gold answer? The question is not shown).",
    )
    mask: bool = option(
        False, "Also record an answer with masked passages, in which the word MASK replaces every gold answer."
    )
    mask_samples: WholeNumber = option(0, "Number of sampled answers with masked passages. Needs `mask`.")
    layers: str | tuple[int, ...] = option(
        "mid,late,last",
        "Layers of the LLM whose hidden states are recorded, separated by commas: mid, late, last or layer numbers. "
        "`none` records no hidden states.",
    )
    seakr: bool = option(
        False, "Also record how much the hidden states of 20 sampled answers differ, which the gate `seakr` reads."
    )
    lang: str | None = option(None, "Language of the prompts: `en` or `zh`. Default: the language of each question.")
    retry_failed: bool = option(False, "When continuing a run, label failed questions again.")

    @field_validator("layers", mode="before")
    @classmethod
    def _accept_any_sequence(cls, value: Any) -> Any:
        """Accept layer numbers in a list or another sequence, not only in a tuple."""
        return value if isinstance(value, str) else tuple(value)

    @model_validator(mode="after")
    def _check_combinations(self) -> LabelOptions:
        """Raise BadSetting for contradicting options."""
        shown = self.k or DEFAULT_PASSAGES
        if self.rerank is not None and self.closed_book:
            raise BadSetting(
                "`rerank` and `closed_book` are mutually exclusive. Use one of them: without passages there is nothing to "
                "rerank."
            )
        if self.rerank is not None and self.candidates < shown:
            raise BadSetting(
                f"candidates={self.candidates} is less than k={shown}, the number of passages to keep. Increase "
                "`candidates`, or lower `k`."
            )
        if self.mask_samples and not self.mask:
            raise BadSetting(
                f"mask_samples={self.mask_samples} needs masked passages, but `mask` is off. Set mask=True."
            )
        return self

    @property
    def sampling(self) -> Sampling:
        """Temperature, top-p and top-k of sampled answers."""
        return Sampling(self.temperature, self.top_p, self.top_k)


def count_shown_passages(k: int | None, retriever: str | None) -> int | None:
    """Return how many passages per question the LLM saw. Searches of an index have a default number.

    Args:
        k: The option `k` of the run; None if it was not set.
        retriever: Fingerprint of the searched index; None if the passages were the contexts of the questions.

    Returns:
        The number of passages; None for all contexts of a question.
    """
    return DEFAULT_PASSAGES if k is None and retriever is not None else k


def resolve_layers(layers: str | Sequence[int], model: Model) -> tuple[int, ...]:
    """Convert layer names ("mid,late,last"), numbers or "none" to sorted layer numbers."""
    words = layers.split(",") if isinstance(layers, str) else [str(number) for number in layers]
    names = [word.strip() for word in words if word.strip()]
    if names == [NO_LAYERS] or Signal.HIDDEN not in model.offers:
        return ()
    numbers = tuple(sorted({_resolve_layer(name, model.depth) for name in names}))
    if isinstance(model, ServedModel):
        model.check_request(SignalRequest(layers=numbers))  # fail before anything is generated
    return numbers


def named_layers(depth: int) -> dict[str, int]:
    """Return the layer numbers that mid, late and last mean in a model with `depth` layers."""
    return dict(zip(NAMED_LAYERS, (depth // 2, 3 * depth // 4, depth - 1), strict=True))


def _resolve_layer(name: str, depth: int) -> int:
    """Return the layer number of a name (mid, late, last) or number. Negative numbers count from the end."""
    named = named_layers(depth)
    if name in named:
        return named[name]
    if not name.lstrip("-").isdigit():
        message = f"layers={name!r} does not name a layer. Use layer numbers, {', '.join(NAMED_LAYERS)} or {NO_LAYERS}."
        raise BadSetting(message)
    return int(name) % depth  # negative numbers count from the last layer
