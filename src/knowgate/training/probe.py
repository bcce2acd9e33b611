"""Fit the probe: a classifier of one recorded hidden state. The LLM is not needed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray

from knowgate.data.signals.vectors import stack_hidden_states
from knowgate.data.splits import fingerprint_text
from knowgate.errors import BadSetting
from knowgate.gates.artifacts.networks import apply_network
from knowgate.labels.options import NAMED_LAYERS, named_layers
from knowgate.stats.metrics import BoolArray, FloatArray
from knowgate.training import classifiers
from knowgate.training.examples import Examples, map_questions_to_needs
from knowgate.training.fit_function import ExampleRequirements, FitResult
from knowgate.types import Signal, SignalRequest

log = logging.getLogger(__name__)
DRAFT_TOKENS = 32  # length of the drafts in label runs; the state after the draft is that of its last token
BALANCED_SIZES = {"train": 1_000, "dev": 300, "test": 500}  # questions of each class; CBDR section 4.1
MIN_KNOWN_ROWS = 300  # training questions of each class below which the raw confidence is not to be trusted


def fit_probe(
    examples: Annotated[Examples, ExampleRequirements()],
    *,
    layer: Annotated[str, "Layer whose hidden state the probe reads: mid, late, last or a number."] = "mid",
    position: Annotated[
        Literal["pre", "post"], "Where the probe reads: pre (before the answer) or post (after the draft answer)."
    ] = "pre",
    kind: Annotated[
        Literal["mlp", "linear"], "Kind of classifier: mlp (the network of the CBDR paper) or linear."
    ] = "mlp",
    balanced: Annotated[
        bool, f"Train on equally many known and unknown questions, up to {BALANCED_SIZES['train']:,} each."
    ] = False,
    seed: int = 0,
) -> FitResult:
    """Train a classifier (probe) of hidden states to predict the need for retrieval."""
    number = pick_layer(examples, layer)
    features = stack_hidden_states(examples.readings, number, position)
    classifiers.check_finite(features)
    training_examples = balance_examples(examples, seed) if balanced else examples
    train, dev = classifiers.select_train_and_dev(features, training_examples)
    if kind == "mlp":
        tensors = classifiers.fit_mlp(train, dev, by_accuracy=balanced)
    else:
        tensors = classifiers.tune_linear(train, dev).tensors
    score_rows = classifiers.make_scorer(tensors, features)
    options: dict[str, Any] = {"layer": number, "position": position, "kind": kind}
    notes = []
    if balanced:
        options["balanced"] = True
        notes = describe_balance(training_examples, score_rows)
    request = SignalRequest(layers=(number,))
    if position == "post":
        request = replace(request, draft_tokens=DRAFT_TOKENS, after_draft=True)
    return FitResult("probe", options, frozenset({Signal.HIDDEN}), request, tensors, score_rows, notes)


def predict_out_of_fold(rows: classifiers.LabeledFeatures, texts: Sequence[str], strength: float) -> FloatArray:
    """Score each row by cross-validation with a linear classifier.

    Args:
        rows: Training data.
        texts: The question of each row. Equal questions are held out together.
        strength: scikit-learn's C, the inverse of regularization.
    """
    folds = stratify_folds(texts, rows.needed)
    needs = np.empty(len(rows.needed))
    for fold in np.unique(folds):
        held_out = folds == fold
        tensors = classifiers.fit_linear(rows.features[~held_out], rows.needed[~held_out], strength)
        needs[held_out] = apply_network(tensors, rows.features[held_out])
    return needs


def stratify_folds(texts: Sequence[str], needed: BoolArray, count: int = 5) -> NDArray[np.int64]:
    """Return the fold of each row, for cross-validation.

    Equal questions share a fold, and folds have similar shares of both classes.
    """
    needs = map_questions_to_needs(texts, needed)  # fingerprint of each distinct question -> whether it needs retrieval
    by_class = sorted(needs, key=lambda key: needs[key])
    # Dealing the sorted questions out in turn gives every fold its share of both classes.
    fold_of_question = {key: index % count for index, key in enumerate(by_class)}
    return np.array([fold_of_question[fingerprint_text(text)] for text in texts])


# --- balanced classes -----------------------------------------------------------------------------


def balance_examples(examples: Examples, seed: int) -> Examples:
    """Draw equally many known and unknown questions, as in the CBDR paper.

    The calibration split stays the same.
    """
    if examples.target != "known":
        raise BadSetting(
            f"balanced=True works only with target='known', not with target='{examples.target}'. Change `target`, or leave "
            "`balanced` out."
        )
    split, needed = examples.split, examples.needed
    drawn = {name: draw_balanced(getattr(split, name), needed, size, seed) for name, size in BALANCED_SIZES.items()}
    return replace(examples, split=replace(split, **drawn))


def draw_balanced(indices: NDArray[np.int64], needed: BoolArray, limit: int, seed: int) -> NDArray[np.int64]:
    """Draw equally many rows of both classes, at most `limit` of each."""
    unknown = indices[needed[indices]]
    known = indices[~needed[indices]]
    size = min(limit, len(unknown), len(known))
    rng = np.random.default_rng(seed)
    drawn = [rng.choice(rows, size, replace=False) for rows in (unknown, known)]
    return np.sort(np.concatenate(drawn)).astype(np.int64)


def describe_balance(examples: Examples, score_rows: Callable[[Sequence[int]], FloatArray]) -> list[str]:
    """Return notes for the model card of a balanced probe.

    A balanced probe was trained on as many known as unknown questions.

    Args:
        examples: The balanced examples.
        score_rows: Returns the raw scores of the questions with the given indices.
    """
    # Half of the questions are known.
    counts = {name: len(getattr(examples.split, name)) // 2 for name in BALANCED_SIZES}
    notes = [_describe_sizes(counts)]
    if counts["train"] < MIN_KNOWN_ROWS:
        notes.append(
            f"only {counts['train']} training questions of each class: with fewer than {MIN_KNOWN_ROWS}, the raw "
            "confidence mostly reflects overfitting, so a fixed beta such as 0.95 means little. Label more questions, or use "
            "the calibrated need"
        )
        log.warning("the balanced probe has %s", notes[-1])
    test = examples.split.test
    if len(test):
        predicted = score_rows(test.tolist()) > 0.5
        accuracy = float((predicted == examples.needed[test]).mean())
        notes.append(f"its raw verdict is right for {accuracy:.1%} of the balanced test questions (majority 50.0%)")
    return notes


def _describe_sizes(counts: Mapping[str, int]) -> str:
    """Describe the sizes of the balanced splits, and which of them are smaller than in the paper.

    `counts` is the number of known questions in each split. There are as many unknown questions.
    """
    note = "balanced: " + ", ".join(f"{name} {count} + {count}" for name, count in counts.items())
    short = [f"{size} + {size} for {name}" for name, size in BALANCED_SIZES.items() if counts[name] < size]
    return f"{note}; the runs are too small for the paper's {', '.join(short)}" if short else note


# --- layers ---------------------------------------------------------------------------------------


def pick_layer(examples: Examples, layer: str) -> int:
    """Return the number of a layer that the label runs recorded.

    Args:
        examples: The label rows with their recorded hidden states.
        layer: A number, or a name: 'mid' (the middle of all hidden states, as in CBDR 3.1), 'late' or 'last'.
    """
    recorded = sorted(examples.readings[0].hidden)
    if not recorded:
        raise BadSetting("the recorded answers contain no hidden states. Label again with layers='mid,late,last'.")
    number = _resolve_layer(layer, examples.settings)
    if number in recorded:
        return number
    raise BadSetting(
        f"the label runs (recorded answers) have no hidden states of layer='{layer}'. Use one of these layers: "
        f"{', '.join(map(str, recorded))}. Or label again with layers='{layer}'."
    )


def _resolve_layer(layer: str, settings: Mapping[str, Any]) -> int:
    """Return the number of a layer from a number or a name such as 'mid'.

    Returns:
        The number; -1 if the name is unknown, or if the label runs do not say which layer has this name.
    """
    if layer.isdigit():
        return int(layer)
    if layer in NAMED_LAYERS and settings.get("depth"):
        return named_layers(int(settings["depth"]))[layer]
    # Older label runs do not record the depth. If they have SeaKR's signal, they record the number of the middle layer.
    if layer == "mid" and settings.get("seakr_layer"):
        return int(settings["seakr_layer"])
    return -1
