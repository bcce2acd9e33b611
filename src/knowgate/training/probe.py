"""Fit the probe: a classifier of one recorded hidden state. The LLM is not needed."""

from __future__ import annotations

import logging
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
from knowgate.training.classifiers import (
    LabeledFeatures,
    Tensors,
    check_finite,
    fit_linear,
    fit_mlp,
    select_train_and_dev,
    tune_linear,
)
from knowgate.training.examples import Examples, map_questions_to_needs
from knowgate.training.fit_function import ExampleRequirements, FitResult
from knowgate.types import Signal, SignalRequest, Vector

log = logging.getLogger(__name__)
ProbePosition = Literal["pre", "post"]
ProbeKind = Literal["mlp", "linear"]
DRAFT_TOKENS = 32  # length of the drafts in label runs; the state after the draft is that of its last token
BALANCED_SIZES = {"train": 1_000, "dev": 300, "test": 500}  # questions of each class; CBDR section 4.1
MIN_KNOWN_ROWS = 300  # training questions of each class below which the raw confidence is not to be trusted


def fit_probe(
    examples: Annotated[Examples, ExampleRequirements()],
    *,
    layer: Annotated[str, "Layer whose hidden state the probe reads: mid, late, last or a number."] = "mid",
    position: Annotated[
        ProbePosition, "Where the probe reads: pre (before the answer) or post (after the draft answer)."
    ] = "pre",
    kind: Annotated[ProbeKind, "Kind of classifier: mlp (the network of the CBDR paper) or linear."] = "mlp",
    balanced: Annotated[
        bool, f"Train on equally many known and unknown questions, up to {BALANCED_SIZES['train']:,} each."
    ] = False,
    seed: int = 0,
) -> FitResult:
    """Train a classifier (probe) that predicts from a hidden state of the LLM whether a question needs retrieval."""
    number = pick_layer(examples, layer)
    features = stack_hidden_states(examples.readings, number, position)
    check_finite(features)
    even = balance_examples(examples, seed) if balanced else None
    tensors = train_probe(features, even.examples if even else examples, kind, by_accuracy=balanced)

    def raw(indices: Sequence[int]) -> FloatArray:
        return apply_network(tensors, features[list(indices)])

    reads_draft = position == "post"
    request = SignalRequest(layers=(number,), draft_tokens=DRAFT_TOKENS if reads_draft else 0, after_draft=reads_draft)
    options = {"layer": number, "position": position, "kind": kind, **({"balanced": True} if balanced else {})}
    notes = _describe_balance(even, raw) if even else []
    return FitResult("probe", options, frozenset({Signal.HIDDEN}), request, tensors, raw, notes)


def train_probe(features: Vector, examples: Examples, kind: ProbeKind, *, by_accuracy: bool = False) -> Tensors:
    """Train a neural network ('mlp') or a logistic regression on the train split, tuned on the dev split."""
    train, dev = select_train_and_dev(features, examples)
    return fit_mlp(train, dev, by_accuracy=by_accuracy) if kind == "mlp" else tune_linear(train, dev).tensors


def predict_out_of_fold(rows: LabeledFeatures, texts: Sequence[str], strength: float) -> FloatArray:
    """Score each row with a linear classifier that was not trained on its question (cross-validation)."""
    folds = stratify_folds(texts, rows.needed)
    needs = np.empty(len(rows.needed))
    for fold in np.unique(folds):
        held_out = folds == fold
        tensors = fit_linear(rows.features[~held_out], rows.needed[~held_out], strength)
        needs[held_out] = apply_network(tensors, rows.features[held_out])
    return needs


def stratify_folds(texts: Sequence[str], needed: BoolArray, count: int = 5) -> NDArray[np.int64]:
    """Return the number of each row's fold; equal questions share a fold, and both classes are spread evenly."""
    needs = map_questions_to_needs(texts, needed)
    by_class = sorted(needs, key=lambda key: needs[key])
    # Dealing the sorted questions out in turn gives every fold its share of both classes.
    fold = {key: index % count for index, key in enumerate(by_class)}
    return np.array([fold[fingerprint_text(text)] for text in texts])


# --- balanced classes -----------------------------------------------------------------------------


@dataclass(frozen=True)
class BalancedExamples:
    """Examples with the same number of both classes in each split, and notes on their sizes."""

    examples: Examples
    notes: list[str]


def balance_examples(examples: Examples, seed: int) -> BalancedExamples:
    """Draw equally many known and unknown questions for each split, as in the CBDR paper.

    The numbers are those of the paper, or lower if the rarer class has fewer questions. The calibration split stays as it
    is. A note for the card warns if there are too few training questions for a fixed threshold.
    """
    if examples.target != "known":
        raise BadSetting(
            f"balanced=True needs target='known', but this fit has target='{examples.target}'. Use target='known', or "
            "leave `balanced` out."
        )
    split = examples.split
    drawn = {
        name: draw_balanced(getattr(split, name), examples.needed, size, seed) for name, size in BALANCED_SIZES.items()
    }
    counts = {name: len(indices) // 2 for name, indices in drawn.items()}
    sizes = ", ".join(f"{name} {count} + {count}" for name, count in counts.items())
    short = [f"{size} + {size} for {name}" for name, size in BALANCED_SIZES.items() if counts[name] < size]
    notes = [f"balanced: {sizes}" + (f"; the runs are too small for the paper's {', '.join(short)}" if short else "")]
    if counts["train"] < MIN_KNOWN_ROWS:
        notes.append(
            f"only {counts['train']} training questions of each class: below {MIN_KNOWN_ROWS} the raw confidence shows "
            "how far the probe overfits, so a fixed beta such as 0.95 means little. Label more questions, or use the "
            "calibrated need"
        )
        log.warning("the balanced probe has %s", notes[-1])
    return BalancedExamples(replace(examples, split=replace(split, **drawn)), notes)


def draw_balanced(indices: NDArray[np.int64], needed: BoolArray, limit: int, seed: int) -> NDArray[np.int64]:
    """Draw equally many rows of both classes, at most `limit` of each; return their indices in order."""
    classes = [indices[needed[indices]], indices[~needed[indices]]]
    size = min(limit, *map(len, classes))
    rng = np.random.default_rng(seed)
    return np.sort(np.concatenate([rng.choice(rows, size, replace=False) for rows in classes])).astype(np.int64)


def _describe_balance(even: BalancedExamples, raw: Callable[[Sequence[int]], FloatArray]) -> list[str]:
    """Return notes on the balanced examples: their numbers, and how often a raw score above 0.5 is right on the test."""
    test = even.examples.split.test
    if not len(test):
        return even.notes
    predicted = raw(test.tolist()) > 0.5
    accuracy = float((predicted == even.examples.needed[test]).mean())
    return [*even.notes, f"its raw verdict is right for {accuracy:.1%} of the balanced test questions (majority 50.0%)"]


# --- layers ---------------------------------------------------------------------------------------


def pick_layer(examples: Examples, layer: str) -> int:
    """Return the number of a layer that the label runs recorded.

    Args:
        examples: The label rows with their recorded hidden states.
        layer: A number, or a name: 'mid' (the middle of all hidden states, as in CBDR 3.1), 'late' or 'last'.
    """
    recorded = sorted(examples.readings[0].hidden)
    if not recorded:
        raise BadSetting("the label runs contain no hidden states. Label again with layers='mid,late,last'.")
    if layer in NAMED_LAYERS:
        return _resolve_named_layer(examples, layer, recorded)
    if layer.lstrip("-").isdigit() and int(layer) in recorded:
        return int(layer)
    raise BadSetting(
        f"the label runs have no hidden states of layer='{layer}'. Use one of these: {_join(recorded)}, mid, late or last."
    )


def _resolve_named_layer(examples: Examples, layer: str, recorded: Sequence[int]) -> int:
    candidates = {named_layers(depth)[layer] for depth in infer_depths(examples, recorded)}
    if not candidates:
        raise BadSetting(
            f"the label runs do not say how many layers the LLM has, so layer='{layer}' is unknown. Give the number "
            f"of a recorded layer: {_join(recorded)}."
        )
    available = sorted(candidates & set(recorded))
    if len(available) != 1:
        raise BadSetting(
            f"layer='{layer}' means layer {' or '.join(map(str, sorted(candidates)))} of this LLM, but the label runs "
            f"have only {_join(recorded)}. Use one of these, or label again with layers='{layer}'."
        )
    return available[0]


def infer_depths(examples: Examples, recorded: Sequence[int]) -> list[int]:
    """Return how many hidden states per token the LLM may have: all numbers that the label runs allow.

    New label runs store the number. For older ones it is derived from the number of the middle layer, which the settings
    of SeaKR contain. Otherwise the first recorded layer may be the middle one, if all recorded layers are the named layers
    (mid, late, last) of one network.
    """
    settings = examples.settings
    if settings.get("depth"):
        return [int(settings["depth"])]
    middle = int(settings.get("seakr_layer") or recorded[0])
    possible = [2 * middle, 2 * middle + 1]  # the middle layer is half of the depth, rounded down
    if settings.get("seakr_layer"):
        return possible
    return [depth for depth in possible if len(recorded) > 1 and set(recorded) <= set(named_layers(depth).values())]


def _join(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
