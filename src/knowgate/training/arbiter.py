"""Fit an arbiter on label runs: train, calibrate, measure on held-out questions, and write its folder and card."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from knowgate.core.display import escape_markdown
from knowgate.core.files import check_replaceable
from knowgate.core.registry import load_target
from knowgate.core.validation import check_seed
from knowgate.data.runs.folder import RunsLike, resolve_run_paths
from knowgate.data.splits import Split
from knowgate.errors import BadSetting, UnknownName, require_extra
from knowgate.gates.arbiters import FITTED_ARBITERS, fitted_arbiter, load_arbiter
from knowgate.gates.arbiters import features as arbiter_features
from knowgate.gates.artifacts.gate_folder import SEEN_FILE, write_artifact
from knowgate.gates.artifacts.networks import apply_calibration, apply_network
from knowgate.stats.bootstrap import Bootstrap, Estimate, estimate_auroc, summarize_resamples
from knowgate.stats.metrics import BoolArray, FloatArray, weighted_mean
from knowgate.training import fit_function, model_card
from knowgate.training.arbiter_pairs import AnswerPairs, ArbiterResult, load_answer_pairs
from knowgate.training.classifiers import Tensors, check_finite, fit_linear, fit_platt_scaling
from knowgate.training.examples import list_seen_keys
from knowgate.training.judges.checkpoint import checkpoint_folder, delete_checkpoint
from knowgate.training.judges.ensemble import assign_folds
from knowgate.types import Vector


def fit_features_arbiter(pairs: AnswerPairs) -> ArbiterResult:
    """Fit an arbiter (it picks one of two answers) on cheap features.

    Two logistic regressions predict how probably the answers without and with passages are right.
    """
    names, features = pairs.features
    check_finite(features)
    tensors = _fit_sides(features, pairs)
    return ArbiterResult(
        "features",
        options={"features": names},
        needs=arbiter_features.get_required_signals(names),
        wants_passages=bool(arbiter_features.PASSAGE_FEATURES & set(names)),
        raw=functools.partial(_predict_right, tensors, features),
        tensors=tensors,
        is_calibrated=True,  # a logistic regression of about ten features on hundreds of rows is well calibrated
        notes=[f"uses {', '.join(names)}"],
    )


def _predict_right(tensors: Tensors, features: Vector, indices: Sequence[int]) -> FloatArray:
    """Predict how probably the closed-book (column 0) and open-book answers are right."""
    rows = features[list(indices)]
    columns = [apply_network(tensors, rows, f"{side}.") for side in arbiter_features.ANSWER_SIDES]
    return np.stack(columns, axis=1)


def _fit_sides(features: Vector, pairs: AnswerPairs) -> Tensors:
    """Fit a logistic regression for the closed-book answers, and one for the open-book answers."""
    split = pairs.split
    train = pairs.select_differing(np.concatenate([split.train, split.dev, split.calibration]))
    tensors: Tensors = {}
    for side, right in (("closed", pairs.closed_book_right), ("open", pairs.open_book_right)):
        fitted = fit_linear(features[train], right[train])
        tensors |= {f"{side}.{name}": block for name, block in fitted.items()}
    return tensors


AUTO_FOLDS = 5
# Trains an arbiter on pairs of answers. The second argument is the number of the fold that is left out; None for no fold.
FitPairs = Callable[[AnswerPairs, int | None], ArbiterResult]


def fit_rules_arbiter(pairs: AnswerPairs) -> ArbiterResult:
    """Return the fixed rules in the form of a trained arbiter. Nothing is learned."""

    def score(indices: Sequence[int]) -> FloatArray:
        return fitted_arbiter.estimate_by_rules([pairs.answers[index] for index in indices])

    return ArbiterResult(
        "fitted-rules", options={}, needs=frozenset(), wants_passages=False, raw=score, is_calibrated=True
    )


@dataclass(frozen=True)
class ArbiterComparison:
    """A comparison of a trained arbiter with fixed rules, on new questions.

    An arbiter chooses between the answers with and without passages.

    Attributes:
        mode: Mode of the trained arbiter.
        rules_right: Whether the answer that the rules choose is right, for each question.
        trained_right: Whether the answer that the trained arbiter chooses is right, for each question.
    """

    mode: str
    rules_right: BoolArray
    trained_right: BoolArray

    @property
    def is_trained_better(self) -> bool:
        """Whether the trained arbiter beats the rules by more than one standard error."""
        gain = self.trained_right.astype(float) - self.rules_right  # 1, 0 or -1 for each question
        standard_error = gain.std() / np.sqrt(len(gain))
        return bool(gain.mean() > standard_error)

    def describe(self) -> str:
        """Describe the accuracy of both arbiters and name the one in use."""
        rules, trained = self.rules_right.mean(), self.trained_right.mean()
        verdict = "so it is used" if self.is_trained_better else "so the rules, which cost nothing, are used"
        return (
            f"out of fold on {len(self.rules_right)} questions: rules {rules:.1%} right, {self.mode} {trained:.1%} "
            f"({100 * (trained - rules):+.1f} points), {verdict}"
        )


def compare_with_rules(pairs: AnswerPairs, mode: str, fit: FitPairs, seed: int = 0) -> ArbiterComparison:
    """Compare a trained arbiter with fixed rules by cross-validation. The test split is not used.

    Args:
        pairs: The pairs of answers.
        mode: Mode of the trained arbiter, for the description of the result.
        fit: Trains an arbiter. Its arguments are pairs whose test split is the fold to leave out, and the fold's number.
        seed: Seed of the folds.
    """
    split = pairs.split
    rows = np.sort(np.concatenate([split.train, split.dev, split.calibration]))
    texts = [pairs.answers[row].question.text for row in rows.tolist()]
    folds = assign_folds(texts, AUTO_FOLDS, seed)
    rules_beliefs = fitted_arbiter.estimate_by_rules(pairs.answers)
    trained_beliefs = np.zeros_like(rules_beliefs)
    for fold in range(AUTO_FOLDS):
        fold_rows = rows[folds == fold]
        fold_pairs = replace(pairs, split=_hold_out(split, fold_rows))
        trained_beliefs[fold_rows] = fit(fold_pairs, fold).raw(fold_rows.tolist())
    rules_right = _choose_right(pairs, prefer_closed_book(rules_beliefs))
    trained_right = _choose_right(pairs, prefer_closed_book(trained_beliefs))
    return ArbiterComparison(mode, rules_right[rows], trained_right[rows])


def _hold_out(split: Split, rows: NDArray[np.int64]) -> Split:
    """Return a split whose test part consists of these rows; they are removed from the other parts."""
    train = np.setdiff1d(split.train, rows)
    dev = np.setdiff1d(split.dev, rows)
    return Split(train, dev, np.setdiff1d(split.calibration, rows), test=rows)


def prefer_closed_book(beliefs: FloatArray) -> BoolArray:
    """Return for which rows the closed-book answer is more probably right.

    Args:
        beliefs: Probabilities that the closed-book answer (column 0) and the open-book answer (column 1) are right.
    """
    return np.asarray(beliefs[:, 0] > beliefs[:, 1])


def _choose_right(pairs: AnswerPairs, prefers_closed_book: BoolArray) -> BoolArray:
    """Return for which questions the chosen answer is right.

    `prefers_closed_book` marks the closed-book choices. If both answers are the same, the open-book one counts as chosen.
    """
    return np.where(prefers_closed_book & pairs.differ, pairs.closed_book_right, pairs.open_book_right)


AUTO_MODE = "auto"
ARBITER_MODES = (AUTO_MODE, "features", "lora")
ARBITER_METRIC_NAMES = {
    "auroc_closed": "AUROC of the closed-book answer being right",
    "auroc_open": "AUROC of the open-book answer being right",
    "accuracy": "accuracy of the chosen answer",
    "always": "accuracy of the open-book answer",
    "never": "accuracy of the closed-book answer",
    "oracle": "at least one of the two is right",
    "gain": "gain in accuracy over always giving the open-book answer",
    "takes_closed": "how often it chooses the closed-book answer",
}


def fit_arbiter(
    runs: RunsLike,
    *,
    out: str | Path,
    mode: str = AUTO_MODE,
    seed: int = 0,
    watch: fit_function.FitProgressCallback | None = None,
    command: str = "",
    **options: Any,
) -> fitted_arbiter.FittedArbiter:
    """Fit an arbiter, measure it on held-out questions and write its folder.

    After retrieval, an arbiter chooses between the answers with and without passages.

    Args:
        runs: One or more label runs.
        out: Folder of the arbiter.
        mode: "features" (cheap features of both answers), "lora" (a fine-tuned judge) or "auto" (fixed rules, unless a
            trained arbiter is better on questions that it did not see). "auto" tries `lora` if any options are given, else
            `features`.
        seed: Seed of split and training.
        watch: Callback that receives the progress.
        command: The command line that the model card shows.
        **options: Options of the mode; see `read_fit_options(load_arbiter_fit_function(mode))`.

    Returns:
        The arbiter, loaded from its folder.

    Raises:
        BadSetting: An option is unknown or has a value that is not allowed.
        BadInput: The label runs have too few pairs of answers.

    Example:
        >>> fit_arbiter("runs/train", out="my-arbiter")  # doctest: +SKIP
    """
    is_auto = mode == AUTO_MODE
    if is_auto:
        mode = "lora" if options else "features"
    function = load_arbiter_fit_function(mode)
    if not runs:
        raise BadSetting("an arbiter learns from recorded answers. Set `labels` to folders made by `knowgate label`.")
    folder = Path(out)
    check_seed(seed)
    check_replaceable(folder, fitted_arbiter.ARBITER_MANIFEST, fitted_arbiter.ARBITER_KIND)  # before the training
    fit_function.check_fit_options(f"arbiter (mode={mode})", function, options)
    with require_extra("fitting an arbiter", "train"):
        pairs = load_answer_pairs(resolve_run_paths(runs), seed)

        def train(pairs: AnswerPairs, fold: int | None = None) -> ArbiterResult:
            work = checkpoint_folder(folder) if fold is None else checkpoint_folder(folder) / f"fold-{fold}"
            result = fit_function.call_fit_function(function, pairs, options, seed=seed, work=work, watch=watch)
            return cast(ArbiterResult, result)

        result = _fit_better(pairs, mode, train, seed) if is_auto else train(pairs)
        save_arbiter(result, pairs, folder, command=command)
    delete_checkpoint(folder)
    return cast(fitted_arbiter.FittedArbiter, load_arbiter(str(folder)))


def _fit_better(pairs: AnswerPairs, mode: str, train: FitPairs, seed: int) -> ArbiterResult:
    """Train an arbiter if it beats fixed rules in a cross-validation. Otherwise return the rules.

    Args:
        pairs: The pairs of answers that the arbiter chooses between.
        mode: Mode of the trained arbiter, for the model card.
        train: Trains an arbiter on pairs of answers. Its second argument is the fold to leave out; None to leave out none.
        seed: Seed of the folds.
    """
    comparison = compare_with_rules(pairs, mode, train, seed)
    result = train(pairs, None) if comparison.is_trained_better else fit_rules_arbiter(pairs)
    return replace(result, notes=[comparison.describe(), *result.notes])


def load_arbiter_fit_function(mode: str) -> fit_function.FitFunction:
    """Load the training function of a mode of arbiter ("features" or "lora")."""
    if mode not in FITTED_ARBITERS:
        raise UnknownName("mode", mode, FITTED_ARBITERS)
    entry = FITTED_ARBITERS[mode]
    return cast(fit_function.FitFunction, load_target(entry.fit, f"fitting {mode}", entry.extra))


def save_arbiter(result: ArbiterResult, pairs: AnswerPairs, out: Path, *, command: str = "") -> None:
    """Calibrate a trained arbiter, measure it on the test split, and write its folder."""
    calibrations = _fit_calibrations(result, pairs)
    uncalibrated = result.raw(pairs.split.test.tolist()).T  # two rows: closed-book and open-book answers
    sides = zip(uncalibrated, arbiter_features.ANSWER_SIDES, strict=True)
    beliefs = [apply_calibration(values, calibrations[side]) for values, side in sides]
    metrics = _measure(np.stack(beliefs, axis=1), pairs)
    manifest = {
        **_build_manifest(result, pairs),
        "calibration": calibrations,
        "metrics": {name: asdict(estimate) for name, estimate in metrics.items()},
    }
    seen_keys = list_seen_keys(pairs.table.questions, pairs.split, result.uses_test_split)
    files = {**result.files, SEEN_FILE: ("\n".join(seen_keys) + "\n").encode()}
    card = render_arbiter_card(manifest, command)
    write_artifact(out, manifest, result.tensors, card, files, artifact_format=fitted_arbiter.ARBITER_FORMAT)


def _fit_calibrations(result: ArbiterResult, pairs: AnswerPairs) -> dict[str, dict[str, Any]]:
    """Fit the calibration of the probabilities of each side, 'closed' and 'open'."""
    if result.is_calibrated:
        return {side: {"kind": "none"} for side in arbiter_features.ANSWER_SIDES}
    rows = pairs.select_differing(pairs.split.calibration)
    predictions = result.raw(rows.tolist())
    return {
        "closed": fit_platt_scaling(predictions[:, 0], pairs.closed_book_right[rows]),
        "open": fit_platt_scaling(predictions[:, 1], pairs.open_book_right[rows]),
    }


def _measure(beliefs: FloatArray, pairs: AnswerPairs) -> dict[str, Estimate]:
    """Measure the choices of an arbiter on the test split.

    Args:
        beliefs: Calibrated probabilities that the closed-book answer, without passages (column 0), and the open-book
            answer (column 1) of each test question are right.
        pairs: The graded answers.

    Returns:
        The metrics that `ARBITER_METRIC_NAMES` explains, by name.
    """
    test = pairs.split.test
    closed_book_right, open_book_right = pairs.closed_book_right[test], pairs.open_book_right[test]
    prefers_closed_book = prefer_closed_book(beliefs) & pairs.differ[test]
    columns = {
        "accuracy": np.where(prefers_closed_book, closed_book_right, open_book_right),
        "always": open_book_right,  # right answers if always retrieving
        "never": closed_book_right,  # right answers if never retrieving
        "oracle": closed_book_right | open_book_right,  # right answers of a perfect arbiter
        "takes_closed": prefers_closed_book,
    }
    return {
        "auroc_closed": estimate_auroc(closed_book_right, beliefs[:, 0]),
        "auroc_open": estimate_auroc(open_book_right, beliefs[:, 1]),
        **_estimate_shares(columns),
    }


def _estimate_shares(columns: Mapping[str, BoolArray]) -> dict[str, Estimate]:
    """Estimate how often each measure is true, and the gain of the arbiter, with confidence intervals.

    The gain is "accuracy" minus "always" (always retrieving).

    Args:
        columns: For each measure, such as "accuracy", whether it is true of each question. Contains "accuracy" and "always".

    Returns:
        The estimate of each measure by name, and "gain". Empty if there are no questions.
    """
    n = len(columns["always"])
    if not n:
        return {}
    table = np.stack([column.astype(float) for column in columns.values()], axis=1)

    def compute_means(weights: Any) -> dict[str, FloatArray]:
        """Return the mean of each column in each bootstrap resample."""
        return dict(zip(columns, weighted_mean(weights, table).T, strict=True))

    (resampled,) = Bootstrap(n).apply([compute_means])
    resampled["gain"] = resampled["accuracy"] - resampled["always"]
    return {name: summarize_resamples(values) for name, values in resampled.items()}


def _build_manifest(result: ArbiterResult, pairs: AnswerPairs) -> dict[str, Any]:
    """Build the fields of the manifest about the arbiter and its training data."""
    left_out = [f"{count} rows were left out: {reason}" for reason, count in pairs.left_out.items() if count]
    return {
        "arbiter": result.arbiter,
        "options": dict(result.options),
        "needs": sorted(result.needs),
        "wants_passages": result.wants_passages,
        **model_card.describe_training_data(pairs.table, pairs.split),
        "base_rates": {"closed": float(pairs.closed_book_right.mean()), "open": float(pairs.open_book_right.mean())},
        "notes": [*result.notes, *left_out],
    }


def render_arbiter_card(manifest: Mapping[str, Any], command: str) -> str:
    """Render the model card, with training data, metrics and usage."""
    parts = [
        f"# {manifest['arbiter']} arbiter for {escape_markdown(manifest['model']['name'])}",
        f"A knowgate arbiter, fitted {manifest['created']}. After retrieval it estimates how probably the closed-book "
        "and the open-book answer are right; the more probable one is given.",
        model_card.format_usage(arbiter="THIS_FOLDER", gate="GATE", docs="FOLDER"),
        model_card.format_facts(_list_arbiter_facts(manifest)),
        "## Measured on the held-out test split\n\n"
        + model_card.format_metrics(manifest["metrics"], ARBITER_METRIC_NAMES),
    ]
    return model_card.join_card(parts, manifest["notes"], command)


def _list_arbiter_facts(manifest: Mapping[str, Any]) -> list[tuple[str, object]]:
    """List names and values of the card's table about training data and inputs."""
    rates = manifest["base_rates"]
    inputs = [*manifest["needs"], *(["passages"] if manifest["wants_passages"] else [])]
    return [
        *model_card.list_training_facts(manifest),
        ("questions", ", ".join(f"{name} {count}" for name, count in manifest["split"].items())),
        ("right", f"{rates['closed']:.0%} closed-book, {rates['open']:.0%} open-book"),
        ("needs", ", ".join(inputs) or "the two texts"),
    ]
