"""Gates and arbiters that a policy may use, and their out-of-fold predictions.

A gate is fitted once for each fold of the questions, without that fold, and then scores it. Finished predictions are
stored in the work folder, so that an interrupted fit continues where it stopped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from knowgate.core.files import sha256_text
from knowgate.data.signals.features import feature_matrix
from knowgate.errors import BadInput, BadSetting, UnsupportedSignal, WeightsError
from knowgate.gates.arbiters.abstention import RULES_ARBITER
from knowgate.gates.arbiters.arbitration import compute_beliefs
from knowgate.gates.artifacts.networks import apply_calibration, apply_network
from knowgate.gates.fusion import compute_margin, name_judge
from knowgate.gates.judges.encoder_judge import is_encoder_spec
from knowgate.retrieval.embeddings import DEFAULT_EMBEDDER
from knowgate.stats.metrics import BoolArray, FloatArray
from knowgate.training.arbiter import load_arbiter_fit_function
from knowgate.training.arbiter_pairs import ArbiterResult, check_answer_pairs
from knowgate.training.classifiers import fit_linear, fit_platt_scaling
from knowgate.training.examples import MIN_ROWS_PER_CLASS, Examples, Target
from knowgate.training.fit_function import FitProgress, FitProgressCallback, FitResult, select_injected_arguments
from knowgate.training.fusion import fit_fusion
from knowgate.training.gate import list_fittable_gates, load_fit_function
from knowgate.training.policy.evidence import FOLDS, Evidence, PolicyOptions
from knowgate.training.policy.outcomes import ArbiterCandidate, GateCandidate
from knowgate.types import Signal, SignalRequest

LOGPROB_FEATURES = ("min", "mean")
JUDGE, STACK_JUDGES = "judge", 4
# Half the epochs with half the batch make as many updates, and the lower three of MiniLM's six layers stay as they are. On 400
# train rows of the GPT-4 recording, one fold took 55 seconds of CPU time instead of 140 (docs/judges.md).
FAST_TRAINING = {"epochs": 2, "batch": 16, "frozen_layers": 3}


@dataclass(frozen=True)
class GateRecipe:
    """How to fit a gate.

    Attributes:
        name: What tables call it.
        gate: Name of the fit function; '' for a single log-probability feature.
        target: What it learns.
        options: Options of the fit function.
        judge_calls: Calls of judge models per question.
        models: Number of trained models.
        reads_draft: Whether the gate reads the closed-book answer.
    """

    name: str
    gate: str
    target: Target = "known"
    options: Mapping[str, Any] = field(default_factory=dict)
    judge_calls: float = 0.0
    models: int = 1
    reads_draft: bool = True


@dataclass(frozen=True)
class ArbiterRecipe:
    """How to fit an arbiter: the mode of `fit_arbiter` and its options. `rules` is not fitted."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    judge_calls: float = 0.0


DEFAULT_GATES = (
    GateRecipe("fusion", "fusion", options={"cheap": True}),
    GateRecipe("fusion (benefit)", "fusion", "benefit", {"cheap": True}),
    GateRecipe("fusion (gain)", "fusion", "gain", {"cheap": True}),
    GateRecipe("question", "question", reads_draft=False),
)


def list_gate_recipes(evidence: Evidence, options: PolicyOptions, *, has_gpu: bool) -> list[GateRecipe]:
    """List the gates that can be fitted on these rows on this machine."""
    recipes = [
        GateRecipe(f"logprob:{name}", "", options={"feature": name})
        for name in LOGPROB_FEATURES
        if name in evidence.features
    ]
    fittable = list_fittable_gates()
    recipes += [
        recipe
        for recipe in DEFAULT_GATES
        if recipe.gate in fittable and (evidence.has_both or recipe.target == "known")
    ]
    if (base := choose_base(evidence, options, has_gpu)) is not None:
        recipes.append(GateRecipe(JUDGE, "judge", options=make_judge_options(base), judge_calls=1.0))
    return [recipe for recipe in recipes if has_both_classes(evidence, recipe.target)]


def list_stack_recipes(evidence: Evidence, options: PolicyOptions, *, has_gpu: bool) -> list[GateRecipe]:
    """List the gates that combine the fusion with a fine-tuned judge; empty if no judge is fine-tuned."""
    if (base := choose_base(evidence, options, has_gpu)) is None:
        return []
    targets: list[Target] = ["known", "gain"] if evidence.has_both else ["known"]
    return [
        GateRecipe(f"stack ({target})", "stack", target, {"base": base, "cheap": True}, STACK_JUDGES, STACK_JUDGES + 1)
        for target in targets
        if has_both_classes(evidence, target)
    ]


def list_arbiter_recipes(evidence: Evidence, options: PolicyOptions, *, has_gpu: bool) -> list[ArbiterRecipe]:
    """List the arbiters that can be used with these rows on this machine; empty without open-book answers."""
    if not evidence.has_both:
        return []
    recipes = [ArbiterRecipe("rules"), ArbiterRecipe("features")]
    base = choose_base(evidence, options, has_gpu)
    if base is not None and not is_encoder_spec(base):
        recipes.append(ArbiterRecipe("lora", {"base": base}, judge_calls=2.0))
    return recipes


def make_judge_options(base: str) -> dict[str, Any]:
    """Return the options of a judge that is fitted once for each fold: `small` is trained faster than by default."""
    return {"base": base, **(FAST_TRAINING if base == "small" else {})}


def choose_base(evidence: Evidence, options: PolicyOptions, has_gpu: bool) -> str | None:
    """Return the model to fine-tune as a judge; None if fine-tuning would take too long on this machine."""
    if options.base is not None:
        return options.base
    if not has_gpu:
        return None
    model = str(evidence.table.settings["model"])
    is_local = model == "smollm" or model.startswith(("hf:", "gguf:"))
    return model if is_local else "small"


def has_both_classes(evidence: Evidence, target: Target) -> bool:
    """Return whether there are enough questions of both classes to fit and to calibrate a gate."""
    needed = evidence.list_needed(target)[evidence.fit_rows]
    return min(int(needed.sum()), int((~needed).sum())) >= 2 * MIN_ROWS_PER_CLASS


def detect_gpu() -> bool:
    """Return whether a GPU is available for training."""
    try:
        import torch
    except ModuleNotFoundError:
        return False
    return bool(torch.cuda.is_available())


# --- gates ----------------------------------------------------------------------------------------


def fit_recipe(
    recipe: GateRecipe, examples: Examples, evidence: Evidence, work: Path, watch: FitProgressCallback
) -> FitResult:
    """Fit a gate on the train, dev and calibration rows of examples."""
    if not recipe.gate:
        return fit_single_feature(examples, str(recipe.options["feature"]))
    function = load_fit_function(recipe.gate)
    injected = select_injected_arguments(function, {"seed": evidence.seed, "work": work, "watch": watch})
    if recipe.gate != "fusion":
        result: FitResult = function(examples, **injected, **recipe.options)
        return result
    result = function(examples, **recipe.options, embedder=evidence.embedder)
    is_text = "embedder" in result.options
    return replace(result, options={**result.options, "embedder": DEFAULT_EMBEDDER}) if is_text else result


def fit_single_feature(examples: Examples, feature: str) -> FitResult:
    """Fit a fusion gate that reads one feature of the draft, such as its smallest token probability."""
    values = feature_matrix([feature], examples.questions, examples.readings)
    rows = np.concatenate([examples.split.train, examples.split.dev])
    head = fit_linear(values[rows], examples.needed[rows])

    def raw(indices: Sequence[int]) -> FloatArray:
        return apply_network(head, values[list(indices)])

    options = {"features": [feature], "probes": [], "cheap": True, "early": False}
    request = SignalRequest(draft_tokens=_count_draft_tokens(examples))
    tensors = {f"fusion.{name}": value for name, value in head.items()}
    return FitResult("fusion", options, frozenset({Signal.LOGPROBS}), request, tensors, raw)


def cross_fit_gate(recipe: GateRecipe, evidence: Evidence, work: Path, watch: FitProgressCallback) -> GateCandidate:
    """Return a gate with out-of-fold needs of the rows that the policy is chosen on.

    Raises:
        BadInput, BadSetting, UnsupportedSignal: The rows do not have what the gate learns from.
    """
    key = _make_key(evidence, recipe)
    file = work / f"needs-{key}.json"
    needs = _read_numbers(file)
    if needs is None:
        scores = np.full(len(evidence.table), np.nan)
        for fold in range(FOLDS):
            watch(FitProgress(fold, FOLDS, "folds", f"trying {recipe.name}"))
            examples = evidence.make_examples(recipe.target, fold)
            result = fit_recipe(recipe, examples, evidence, work / f"{key}-{fold}", watch)
            scores[examples.split.test] = score_calibrated(result, examples, examples.split.test)
        needs = scores[evidence.fit_rows]
        _write_numbers(file, needs)
    watch(FitProgress(FOLDS, FOLDS, "folds", f"trying {recipe.name}"))
    return make_candidate(recipe, needs)


def make_candidate(recipe: GateRecipe, needs: FloatArray) -> GateCandidate:
    """Return a gate with its out-of-fold needs and costs."""
    return GateCandidate(recipe.name, needs, recipe.reads_draft, judge_calls=recipe.judge_calls, models=recipe.models)


def cross_fit_stack(
    recipe: GateRecipe, evidence: Evidence, judge_needs: FloatArray, watch: FitProgressCallback
) -> GateCandidate:
    """Return a stack with out-of-fold needs, made from the out-of-fold needs of the judge.

    No further judge is trained, so that trying a stack is cheap. If the stack is chosen, its judges are trained then.
    """
    scores = np.full(len(evidence.table), 0.5)
    scores[evidence.fit_rows] = judge_needs
    margins = {name_judge(0): compute_margin(scores)}
    needs = np.full(len(evidence.table), np.nan)
    for fold in range(FOLDS):
        watch(FitProgress(fold, FOLDS, "folds", f"trying {recipe.name}"))
        examples = evidence.make_examples(recipe.target, fold)
        result = fit_fusion(examples, cheap=True, margins=margins, embedder=evidence.embedder)
        needs[examples.split.test] = score_calibrated(result, examples, examples.split.test)
    return make_candidate(recipe, needs[evidence.fit_rows])


def score_calibrated(result: FitResult, examples: Examples, rows: Any) -> FloatArray:
    """Return the calibrated needs of rows; the calibration split calibrates."""
    calibration = fit_platt_scaling(
        result.raw(examples.split.calibration.tolist()), examples.needed[examples.split.calibration]
    )
    return apply_calibration(result.raw(rows.tolist()), calibration)


# --- arbiters -------------------------------------------------------------------------------------


def cross_fit_arbiter(
    recipe: ArbiterRecipe, evidence: Evidence, work: Path, watch: FitProgressCallback
) -> ArbiterCandidate:
    """Return an arbiter with out-of-fold choices for the rows that the policy is chosen on."""
    takes_closed = np.zeros(len(evidence.table), dtype=bool)
    if recipe.name == "rules":
        takes_closed = choose_by_rules(evidence)
        return ArbiterCandidate("rules", takes_closed[evidence.fit_rows])
    for fold in range(FOLDS):
        watch(FitProgress(fold, FOLDS, "folds", f"trying arbiter {recipe.name}"))
        pairs = evidence.make_pairs(fold)
        result = fit_arbiter_recipe(recipe, evidence, fold, work, watch)
        takes_closed[pairs.split.test] = choose_closed(result, pairs.differ, pairs.split.test)
    return ArbiterCandidate(recipe.name, takes_closed[evidence.fit_rows], recipe.judge_calls, models=1)


def fit_arbiter_recipe(
    recipe: ArbiterRecipe, evidence: Evidence, fold: int, work: Path, watch: FitProgressCallback
) -> ArbiterResult:
    """Fit an arbiter without one fold (-1: only without the held-out rows)."""
    function = load_arbiter_fit_function(recipe.name)
    folder = work / f"arbiter-{recipe.name}-{fold}"
    injected = select_injected_arguments(function, {"seed": evidence.seed, "work": folder, "watch": watch})
    pairs = evidence.make_pairs(fold)
    check_answer_pairs(pairs)
    result: ArbiterResult = function(pairs, **injected, **recipe.options)
    return result


def choose_closed(result: ArbiterResult, differ: BoolArray, rows: Any) -> BoolArray:
    """Return for which rows a fitted arbiter gives the closed-book answer."""
    beliefs = result.raw(rows.tolist())
    chosen: BoolArray = (beliefs[:, 0] > beliefs[:, 1]) & differ[rows]
    return chosen


def choose_by_rules(evidence: Evidence) -> BoolArray:
    """Return for which rows the rules arbiter gives the closed-book answer."""
    beliefs = compute_beliefs(RULES_ARBITER, evidence.make_pairs(-1).answers)
    return np.array([belief is not None and belief.prefers_closed for belief in beliefs], dtype=bool)


# --- work folder ----------------------------------------------------------------------------------


def try_candidates(
    recipes: Sequence[Any], cross_fit: Callable[[Any], Any], watch: FitProgressCallback
) -> Iterator[Any]:
    """Yield the cross-fitted candidate of each recipe.

    Recipes that these rows do not support, or whose weights cannot be downloaded, are reported and skipped.
    """
    for recipe in recipes:
        try:
            yield cross_fit(recipe)
        except (BadInput, BadSetting, UnsupportedSignal, WeightsError) as error:
            watch(FitProgress(0, 1, "folds", recipe.name, f"{recipe.name} was left out: {error}", True))


def _make_key(evidence: Evidence, recipe: GateRecipe) -> str:
    """Return a hash of the rows, the recipe and the seed."""
    settings = evidence.table.settings
    parts = [recipe.gate, recipe.target, json.dumps(dict(recipe.options), sort_keys=True), str(evidence.seed)]
    grades = "".join(map(str, evidence.list_needed(recipe.target).astype(int)))
    return sha256_text(settings["data_fingerprint"], *evidence.table.keys, grades, *parts)[:16]


def _read_numbers(file: Path) -> FloatArray | None:
    """Read stored needs; None if there are none."""
    return np.array(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else None


def _write_numbers(file: Path, values: FloatArray) -> None:
    """Store needs for a later continuation."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".part")
    partial.write_text(json.dumps(values.tolist()), encoding="utf-8", newline="\n")
    partial.replace(file)


def _count_draft_tokens(examples: Examples) -> int:
    """Return the length of the recorded drafts in tokens."""
    return int(examples.settings.get("max_tokens", 32))
