"""Fitting the probe: one hidden state in, need out. From a label run's stored states; no LLM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray

from knowgate.fitting.balance import SIZES, Balanced, balance
from knowgate.fitting.examples import Examples, verdicts
from knowgate.fitting.fit_options import Wanted
from knowgate.fitting.fit_result import FitResult
from knowgate.fitting.layers import pick_layer
from knowgate.fitting.networks import Tensors, best_linear, check_finite, fit_linear, fit_mlp
from knowgate.gates import apply_network
from knowgate.runs import seen_key
from knowgate.signals import hidden_states
from knowgate.statistics import Bools, Floats
from knowgate.types import Signal, Vector, Want

Position = Literal["pre", "post"]
Kind = Literal["mlp", "linear"]
DRAFT_TOKENS = 32  # what `label` drafts; the state after the draft is that of its last token


def fit_probe(
    examples: Annotated[Examples, Wanted(weighs=True)],
    *,
    layer: Annotated[str, "The layer whose state it reads: mid, late, last or a number."] = "mid",
    position: Annotated[Position, "pre (before the answer) or post (after the draft)."] = "pre",
    kind: Annotated[Kind, "mlp (the paper's network) or linear."] = "mlp",
    balanced: Annotated[bool, f"As many known as unknown questions, up to CBDR's {SIZES['train']:,} of each."] = False,
    seed: int = 0,
) -> FitResult:
    """CBDR's network, or a logistic regression, on the state of one layer before the answer or after the draft."""
    number = pick_layer(examples, layer)
    features = hidden_states(examples.readings, number, position)
    check_finite(features)
    even = balance(examples, seed) if balanced else None
    tensors = train(features, even.examples if even else examples, kind, in_full=balanced)

    def raw(places: Sequence[int]) -> Floats:
        return apply_network(tensors, features[list(places)])

    drafted = position == "post"
    want = Want(layers=(number,), draft_tokens=DRAFT_TOKENS if drafted else 0, after_draft=drafted)
    options = {"layer": number, "position": position, "kind": kind, **({"balanced": True} if balanced else {})}
    notes = _balance_notes(even, raw) if even else []
    return FitResult("probe", options, frozenset({Signal.HIDDEN}), want, tensors, raw, notes)


def _balance_notes(even: Balanced, raw: Callable[[Sequence[int]], Floats]) -> list[str]:
    """How many of each kind there were, and how often the raw verdict is right where half of them are known."""
    test = even.examples.split.test
    if not len(test):
        return even.notes
    right = float(((raw(test.tolist()) > 0.5) == even.examples.needed[test]).mean())
    return [*even.notes, f"its raw verdict is right for {right:.1%} of the balanced test questions (majority 50.0%)"]


def train(features: Vector, examples: Examples, kind: Kind, *, in_full: bool = False) -> Tensors:
    split, needed = examples.split, examples.needed
    parts = features[split.train], needed[split.train], features[split.dev], needed[split.dev]
    weights = examples.weights_of(split.train)
    return fit_mlp(*parts, weights, in_full=in_full) if kind == "mlp" else best_linear(*parts, weights)


def out_of_fold(
    features: Vector, needed: Bools, texts: Sequence[str], strength: float, weights: Floats | None = None
) -> Floats:
    """Needs of training rows by linear probes that did not see their questions: what a second stage may learn from."""
    fold = folds(texts, needed)
    needs = np.empty(len(needed))
    for number in np.unique(fold):
        outside = fold == number
        counts = None if weights is None else weights[~outside]
        tensors = fit_linear(features[~outside], needed[~outside], strength, counts)
        needs[outside] = apply_network(tensors, features[outside])
    return needs


def folds(texts: Sequence[str], needed: Bools, count: int = 5) -> NDArray[np.int64]:
    """A number for each row: equal questions share a fold, and each fold has its share of both kinds."""
    kinds = verdicts(texts, needed)
    number = {key: place % count for place, key in enumerate(sorted(kinds, key=lambda key: kinds[key]))}
    return np.array([number[seen_key(text)] for text in texts])
