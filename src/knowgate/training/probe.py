"""Fitting the probe: one hidden state in, need out. From a label run's stored states; no LLM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray

from knowgate.data.signals.vectors import stack_hidden_states
from knowgate.data.splits import fingerprint_text
from knowgate.errors import BadSetting
from knowgate.gates.artifacts.networks import apply_network
from knowgate.labels.options import NAMED_LAYERS, named_layers
from knowgate.stats.metrics import BoolArray, FloatArray
from knowgate.training.classifiers import Tensors, check_finite, fit_best_linear, fit_linear, fit_mlp
from knowgate.training.examples import Examples, map_questions_to_needs
from knowgate.training.fit_function import ExampleRequirements, FitResult
from knowgate.types import Signal, SignalRequest, Vector

BALANCED_SIZES = {"train": 1_000, "dev": 300, "test": 500}  # of each kind; the calibration split stays as it is


@dataclass(frozen=True)
class BalancedExamples:
    """Examples with even splits, and how many of each kind they have, in words."""

    examples: Examples
    notes: list[str]


def balance_examples(examples: Examples, seed: int) -> BalancedExamples:
    """The paper's numbers of each kind where the run has them, else as many as the rarer kind."""
    if examples.target != "known":
        raise BadSetting(
            f"--balanced makes CBDR's probe of what the LLM knows; this fit learns '{examples.target}'. "
            "Add --target known."
        )
    parts = {
        name: draw_balanced(getattr(examples.split, name), examples.needed, most, seed)
        for name, most in BALANCED_SIZES.items()
    }
    counts = {name: len(places) // 2 for name, places in parts.items()}
    said = ", ".join(f"{name} {count} + {count}" for name, count in counts.items())
    short = [f"{most} + {most} for {name}" for name, most in BALANCED_SIZES.items() if counts[name] < most]
    lacking = f"; the runs are too small for the paper's {', '.join(short)}" if short else ""
    return BalancedExamples(replace(examples, split=replace(examples.split, **parts)), [f"balanced: {said}{lacking}"])


def draw_balanced(places: NDArray[np.int64], needed: BoolArray, most: int, seed: int) -> NDArray[np.int64]:
    """Equally many of both kinds, `most` of each at most, drawn by the seed, in the order of the rows."""
    kinds = [places[needed[places]], places[~needed[places]]]
    size = min(most, *map(len, kinds))
    rng = np.random.default_rng(seed)
    return np.sort(np.concatenate([rng.choice(kind, size, replace=False) for kind in kinds])).astype(np.int64)


def pick_layer(examples: Examples, layer: str) -> int:
    """'mid' (CBDR 3.1: entry floor(len / 2) of the hidden states, embeddings included), 'late', 'last' or a number."""
    kept = sorted(examples.readings[0].hidden)
    if not kept:
        raise BadSetting("the label runs hold no hidden states. Label again with --layers mid,late,last.")
    if layer in NAMED_LAYERS:
        return _named(examples, layer, kept)
    if layer.lstrip("-").isdigit() and int(layer) in kept:
        return int(layer)
    raise BadSetting(f"--layer is '{layer}'; the label runs have {_listed(kept)} (or: mid, late, last).")


def _named(examples: Examples, layer: str, kept: Sequence[int]) -> int:
    """The layer of this name, which must be among the kept ones."""
    found = {named_layers(depth)[layer] for depth in infer_depths(examples, kept)}
    if not found:
        raise BadSetting(
            f"the label runs do not say how deep the LLM is, so nobody knows which layer is '{layer}'. "
            f"Name one by its number: --layer {kept[0]} (they have {_listed(kept)})."
        )
    there = sorted(found & set(kept))
    if len(there) != 1:
        raise BadSetting(
            f"'{layer}' is layer {' or '.join(map(str, sorted(found)))} of this LLM; the label runs have "
            f"{_listed(kept)}. Use one of those, or label again with --layers {layer}."
        )
    return there[0]


def infer_depths(examples: Examples, kept: Sequence[int]) -> list[int]:
    """How many hidden states the LLM has: as the run says, or, of older runs, all that their layers can mean.

    A run labelled with SeaKR names the middle layer. Else the kept ones must be the named ones of one network.
    """
    if examples.settings.get("depth"):
        return [int(examples.settings["depth"])]
    middle = int(examples.settings.get("seakr_layer") or kept[0])
    possible = [2 * middle, 2 * middle + 1]
    if examples.settings.get("seakr_layer"):
        return possible
    return [depth for depth in possible if len(kept) > 1 and set(kept) <= set(named_layers(depth).values())]


def _listed(kept: Sequence[int]) -> str:
    return ", ".join(map(str, kept))


ProbePosition = Literal["pre", "post"]
ProbeKind = Literal["mlp", "linear"]
DRAFT_TOKENS = 32  # what `label` drafts; the state after the draft is that of its last token


def fit_probe(
    examples: Annotated[Examples, ExampleRequirements(weighs=True)],
    *,
    layer: Annotated[str, "The layer whose state it reads: mid, late, last or a number."] = "mid",
    position: Annotated[ProbePosition, "pre (before the answer) or post (after the draft)."] = "pre",
    kind: Annotated[ProbeKind, "mlp (the paper's network) or linear."] = "mlp",
    balanced: Annotated[
        bool, f"As many known as unknown questions, up to CBDR's {BALANCED_SIZES['train']:,} of each."
    ] = False,
    seed: int = 0,
) -> FitResult:
    """CBDR's network, or a logistic regression, on the state of one layer before the answer or after the draft."""
    number = pick_layer(examples, layer)
    features = stack_hidden_states(examples.readings, number, position)
    check_finite(features)
    even = balance_examples(examples, seed) if balanced else None
    tensors = train_probe(features, even.examples if even else examples, kind, in_full=balanced)

    def raw(places: Sequence[int]) -> FloatArray:
        return apply_network(tensors, features[list(places)])

    drafted = position == "post"
    want = SignalRequest(layers=(number,), draft_tokens=DRAFT_TOKENS if drafted else 0, after_draft=drafted)
    options = {"layer": number, "position": position, "kind": kind, **({"balanced": True} if balanced else {})}
    notes = _balance_notes(even, raw) if even else []
    return FitResult("probe", options, frozenset({Signal.HIDDEN}), want, tensors, raw, notes)


def _balance_notes(even: BalancedExamples, raw: Callable[[Sequence[int]], FloatArray]) -> list[str]:
    """How many of each kind there were, and how often the raw verdict is right where half of them are known."""
    test = even.examples.split.test
    if not len(test):
        return even.notes
    right = float(((raw(test.tolist()) > 0.5) == even.examples.needed[test]).mean())
    return [*even.notes, f"its raw verdict is right for {right:.1%} of the balanced test questions (majority 50.0%)"]


def train_probe(features: Vector, examples: Examples, kind: ProbeKind, *, in_full: bool = False) -> Tensors:
    split, needed = examples.split, examples.needed
    parts = features[split.train], needed[split.train], features[split.dev], needed[split.dev]
    weights = examples.weights_of(split.train)
    return fit_mlp(*parts, weights, in_full=in_full) if kind == "mlp" else fit_best_linear(*parts, weights)


def predict_out_of_fold(
    features: Vector, needed: BoolArray, texts: Sequence[str], strength: float, weights: FloatArray | None = None
) -> FloatArray:
    """Needs of training rows by linear probes that did not see their questions: what a second stage may learn from."""
    fold = stratify_folds(texts, needed)
    needs = np.empty(len(needed))
    for number in np.unique(fold):
        outside = fold == number
        counts = None if weights is None else weights[~outside]
        tensors = fit_linear(features[~outside], needed[~outside], strength, counts)
        needs[outside] = apply_network(tensors, features[outside])
    return needs


def stratify_folds(texts: Sequence[str], needed: BoolArray, count: int = 5) -> NDArray[np.int64]:
    """A number for each row: equal questions share a fold, and each fold has its share of both kinds."""
    kinds = map_questions_to_needs(texts, needed)
    number = {key: place % count for place, key in enumerate(sorted(kinds, key=lambda key: kinds[key]))}
    return np.array([number[fingerprint_text(text)] for text in texts])
