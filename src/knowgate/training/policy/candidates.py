"""Gates and arbiters that a policy may use, and their out-of-fold predictions.

A gate is fitted once for each fold of the questions, without that fold, and then scores it. Judges are not fitted again
afterwards: the gate uses the judges of all folds. Finished predictions and trainings are stored in the work folder, so that
an interrupted fit continues where it stopped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from knowgate.core.files import sha256_text, write_bytes
from knowgate.data.signals.features import feature_matrix
from knowgate.errors import BadInput, BadSetting, UnsupportedSignal, WeightsError
from knowgate.gates.arbiters.abstention import RULES_ARBITER
from knowgate.gates.arbiters.arbitration import compute_beliefs
from knowgate.gates.artifacts.networks import apply_calibration, apply_network
from knowgate.gates.fusion import compute_margin, name_judge
from knowgate.gates.judges.encoder_judge import is_encoder_spec
from knowgate.retrieval.embeddings import DEFAULT_EMBEDDER
from knowgate.stats.metrics import BoolArray, FloatArray
from knowgate.training.arbiter import load_arbiter_fit_function, take_closed
from knowgate.training.arbiter_pairs import ArbiterResult, check_answer_pairs
from knowgate.training.classifiers import fit_linear, fit_platt_scaling
from knowgate.training.examples import MIN_ROWS_PER_CLASS, Examples, Target
from knowgate.training.fit_function import FitProgress, FitProgressCallback, FitResult, select_injected_arguments
from knowgate.training.fusion import fit_fusion
from knowgate.training.gate import list_fittable_gates, load_fit_function
from knowgate.training.judges.ensemble import plan_ensemble
from knowgate.training.judges.gain import make_gain_training, train_gain_judge
from knowgate.training.judges.training_options import AnswerJudgeFitOptions
from knowgate.training.policy.evidence import FOLDS, Evidence, PolicyOptions
from knowgate.training.policy.outcomes import ArbiterCandidate, GateCandidate
from knowgate.training.stack import fit_cross_fitted_judge
from knowgate.types import Signal, SignalRequest

LOGPROB_FEATURES = ("min", "mean")
JUDGE, GAIN_JUDGE = "judge", "judge (gain)"
JUDGES = FOLDS  # judges of an ensemble; each leaves out one fold
MAX_CPU_ROWS = 2_000  # with more rows, small judges take too long on a CPU to be tried unasked
# Half the epochs with half the batch make as many updates, and the lower three of MiniLM's six layers stay as they are. On 400
# train rows of the GPT-4 recording, one fold took 55 seconds of CPU time instead of 140 (docs/judges.md).
FAST_TRAINING = {"epochs": 2, "batch": 16, "frozen_layers": 3}


@dataclass(frozen=True)
class GateRecipe:
    """How to fit a gate.

    Attributes:
        name: Name of the gate in tables.
        gate: Name of the fit function; '' for a single log-probability feature.
        target: What the gate learns to predict, such as whether the LLM knows the answer.
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
    """How to fit an arbiter, which chooses between the closed-book and the open-book answer.

    Attributes:
        name: Mode of `fit_arbiter`, or `rules` for the arbiter that needs no training.
        options: Options of the fit.
        judge_calls: Calls of judge models per retrieved question.
    """

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
    """List the gates that can be fitted on these rows on this machine.

    Args:
        evidence: The label rows, and which signals and answers they have.
        options: Options of the policy; `base` is the model of a judge.
        has_gpu: Whether there is a GPU to fine-tune judges on.
    """
    features = [name for name in LOGPROB_FEATURES if name in evidence.features]
    recipes = [GateRecipe(f"logprob:{name}", "", options={"feature": name}) for name in features]
    fittable = list_fittable_gates()
    for recipe in DEFAULT_GATES:
        # Targets other than `known` need answers with passages.
        if recipe.gate in fittable and (evidence.has_both or recipe.target == "known"):
            recipes.append(recipe)
    if (base := choose_base(evidence, options, has_gpu)) is not None:
        fit_options = make_judge_options(base)
        recipes.append(GateRecipe(JUDGE, "judge", "known", fit_options, judge_calls=JUDGES, models=JUDGES))
        if learns_gain(evidence, base):
            recipes.append(GateRecipe(GAIN_JUDGE, "gain", "gain", fit_options, judge_calls=2 * JUDGES, models=JUDGES))
    return [recipe for recipe in recipes if has_both_classes(evidence, recipe.target)]


def list_stack_recipes(evidence: Evidence, options: PolicyOptions, *, has_gpu: bool) -> list[GateRecipe]:
    """List the stacks to try: gates that combine the fusion with fine-tuned judges. Empty if no judge is fine-tuned."""
    if choose_base(evidence, options, has_gpu) is None:
        return []
    targets: list[Target] = ["known", "gain"] if evidence.has_both else ["known"]
    targets = [target for target in targets if has_both_classes(evidence, target)]
    n_models = JUDGES + 1  # the judges and the fusion
    return [GateRecipe(f"stack ({target})", "stack", target, judge_calls=JUDGES, models=n_models) for target in targets]


def list_arbiter_recipes(evidence: Evidence, options: PolicyOptions, *, has_gpu: bool) -> list[ArbiterRecipe]:
    """List the arbiters that can be used with these rows on this machine; empty without open-book answers."""
    if not evidence.has_both:
        return []
    recipes = [ArbiterRecipe("rules"), ArbiterRecipe("features")]
    base = choose_base(evidence, options, has_gpu)
    if base is not None and not is_encoder_spec(base):  # the arbiter `lora` needs a causal model
        recipes.append(ArbiterRecipe("lora", {"base": base}, judge_calls=2.0))
    return recipes


def make_judge_options(base: str) -> dict[str, Any]:
    """Return the options of a judge that is fitted once for each fold.

    The base `small` is trained with fewer epochs than by default, because it is trained so often.
    """
    return {"base": base, **(FAST_TRAINING if base == "small" else {})}


def choose_base(evidence: Evidence, options: PolicyOptions, has_gpu: bool) -> str | None:
    """Return the model to fine-tune as a judge, or None if no judge is tried.

    It is the one that the user chose. By default it is the LLM on a GPU if it is local, and otherwise the small encoder: on
    a GPU, or on a CPU if the rows have nothing but texts and are few enough.
    """
    if options.base is not None:
        return None if options.base == "none" else options.base
    model = str(evidence.table.settings["model"])
    if has_gpu and (model == "smollm" or model.startswith(("hf:", "gguf:"))):
        return model
    has_signals = evidence.has_logprobs or evidence.has_states
    return "small" if has_gpu or (len(evidence.table) <= MAX_CPU_ROWS and not has_signals) else None


def learns_gain(evidence: Evidence, base: str) -> bool:
    """Return whether judges also learn whether an answer with passages would be right.

    That doubles their training, which takes too long for the encoders that a CPU can train.
    """
    return evidence.has_both and not is_encoder_spec(base) and has_both_classes(evidence, "gain")


def has_both_classes(evidence: Evidence, target: Target) -> bool:
    """Return whether there are enough questions of both classes to fit and to calibrate a gate."""
    needed = evidence.list_needed(target)[evidence.fit_rows]
    return min(int(needed.sum()), int((~needed).sum())) >= 2 * MIN_ROWS_PER_CLASS  # once to fit, once to calibrate


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
    """Fit a gate on the train, dev and calibration rows of examples.

    A fusion gets the embedder that all fits of this evidence share. Its options name the default embedder, which is the
    same model, because a loaded gate cannot share it.
    """
    if not recipe.gate:
        return fit_single_feature(examples, str(recipe.options["feature"]))
    function = load_fit_function(recipe.gate)
    injected = select_injected_arguments(function, {"seed": evidence.seed, "work": work, "watch": watch})
    if recipe.gate != "fusion":
        return cast(FitResult, function(examples, **injected, **recipe.options))
    result: FitResult = function(examples, **recipe.options, embedder=evidence.embedder)
    embedder = {"embedder": DEFAULT_EMBEDDER} if "embedder" in result.options else {}
    return replace(result, options={**result.options, **embedder})


def fit_single_feature(examples: Examples, feature: str) -> FitResult:
    """Fit a gate that reads one feature of the draft, such as its smallest token probability.

    The result is a gate of the type 'fusion', a classifier of several features, that has only this feature.
    """
    values = feature_matrix([feature], examples.questions, examples.readings)  # questions x 1
    rows = np.concatenate([examples.split.train, examples.split.dev])
    classifier = fit_linear(values[rows], examples.needed[rows])

    def compute_scores(indices: Sequence[int]) -> FloatArray:  # uncalibrated needs of these examples
        return apply_network(classifier, values[list(indices)])

    # 'cheap' means no sampled answers and no extra passes; 'early' would decide at the first token of the draft.
    options = {"features": [feature], "probes": [], "cheap": True, "early": False}
    request = SignalRequest(draft_tokens=int(examples.settings.get("max_tokens", 32)))  # as long as the recorded drafts
    tensors = {f"fusion.{name}": value for name, value in classifier.items()}
    return FitResult("fusion", options, frozenset({Signal.LOGPROBS}), request, tensors, raw=compute_scores)


def cross_fit_gate(recipe: GateRecipe, evidence: Evidence, work: Path, watch: FitProgressCallback) -> GateCandidate:
    """Score each row that the policy is chosen on with a gate that was fitted without the row's fold.

    The scores are stored in `work`, so that an interrupted fit does not compute them again.

    Raises:
        BadInput, BadSetting, UnsupportedSignal: The rows do not have what the gate learns from.
    """
    key = _make_key(evidence, recipe)
    file = work / f"needs-{key}.json"
    if file.is_file():
        needs = np.array(json.loads(file.read_text(encoding="utf-8")))
    else:
        scores = np.full(len(evidence.table), np.nan)
        for fold in range(FOLDS):
            watch(FitProgress(fold, FOLDS, "folds", f"trying {recipe.name}"))
            examples = evidence.make_examples(recipe.target, fold)
            result = fit_recipe(recipe, examples, evidence, work / f"{key}-{fold}", watch)
            scores[examples.split.test] = score_calibrated(result, examples, examples.split.test)
        needs = scores[evidence.fit_rows]
        write_bytes(file, json.dumps(needs.tolist()).encode())
    watch(FitProgress(FOLDS, FOLDS, "folds", f"trying {recipe.name}"))
    return make_candidate(recipe, needs)


def make_candidate(recipe: GateRecipe, needs: FloatArray) -> GateCandidate:
    """Make a candidate from the costs of a recipe and the needs that its gate predicts."""
    return GateCandidate(recipe.name, needs, recipe.reads_draft, judge_calls=recipe.judge_calls, models=recipe.models)


def fit_judges(
    recipe: GateRecipe, evidence: Evidence, work: Path, watch: FitProgressCallback
) -> dict[Target, FitResult]:
    """Train judges, each without one fold of the rows that the policy is chosen on, and return the gates that use them.

    Each of these rows is scored by the judge that did not learn from it; the held-out rows are scored by all judges, as
    questions are in use.

    Args:
        recipe: The gate `judge`, whose options name the base.
        evidence: The rows.
        work: Folder for checkpoints.
        watch: Called with the progress.

    Returns:
        The gates, by what they predict: `known`, and `gain` if the judges learn it.
    """
    examples, options = evidence.make_examples("known", -1), AnswerJudgeFitOptions(**recipe.options)
    work = work / f"judges-{_make_key(evidence, recipe)}"
    if not learns_gain(evidence, str(options.base)):
        rows, seed = evidence.fit_rows, evidence.seed
        judge = fit_cross_fitted_judge(examples, options, JUDGES, rows=rows, seed=seed, work=work, watch=watch)
        return {"known": judge}
    texts = [question.text for question in examples.questions]
    training = make_gain_training(options, evidence.seed)
    members = plan_ensemble(examples.split, training, folds=JUDGES, texts=texts, rows=evidence.fit_rows)
    return train_gain_judge(examples, options, members, work=work, watch=watch)


def score_with_judges(recipe: GateRecipe, evidence: Evidence, result: FitResult) -> GateCandidate:
    """Score each row that the policy is chosen on with the judge that did not learn from it."""
    examples = evidence.make_examples(recipe.target, -1)
    return make_candidate(recipe, score_calibrated(result, examples, evidence.fit_rows))


def cross_fit_stack(
    recipe: GateRecipe, evidence: Evidence, judge: FitResult, watch: FitProgressCallback
) -> GateCandidate:
    """Score each row that the policy is chosen on with a stack, i.e. a fusion that also reads the judges' score.

    Args:
        recipe: The stack.
        evidence: The rows.
        judge: The cross-fitted judges, so trying a stack trains none.
        watch: Called with the progress.
    """
    margins = {name_judge(0): compute_margin(judge.raw(range(len(evidence.table))))}
    needs = np.full(len(evidence.table), np.nan)
    for fold in range(FOLDS):
        watch(FitProgress(fold, FOLDS, "folds", f"trying {recipe.name}"))
        examples = evidence.make_examples(recipe.target, fold)
        result = fit_fusion(examples, cheap=True, margins=margins, embedder=evidence.embedder)
        needs[examples.split.test] = score_calibrated(result, examples, examples.split.test)
    return make_candidate(recipe, needs[evidence.fit_rows])


def score_calibrated(result: FitResult, examples: Examples, rows: Any) -> FloatArray:
    """Return the calibrated need for retrieval of each row; Platt scaling is fitted on the calibration split."""
    held_back = examples.split.calibration
    calibration = fit_platt_scaling(result.raw(held_back.tolist()), examples.needed[held_back])
    return apply_calibration(result.raw(rows.tolist()), calibration)


# --- arbiters -------------------------------------------------------------------------------------


def cross_fit_arbiter(
    recipe: ArbiterRecipe, evidence: Evidence, work: Path, watch: FitProgressCallback
) -> ArbiterCandidate:
    """Let an arbiter choose between the answers of each row that the policy is chosen on, fitted without the row's fold."""
    if recipe.name == "rules":  # not fitted, so no folds are needed
        return ArbiterCandidate("rules", choose_by_rules(evidence)[evidence.fit_rows])
    takes_closed = np.zeros(len(evidence.table), dtype=bool)
    for fold in range(FOLDS):
        watch(FitProgress(fold, FOLDS, "folds", f"trying arbiter {recipe.name}"))
        pairs = evidence.make_pairs(fold)
        result = fit_arbiter_recipe(recipe, evidence, fold, work, watch)
        takes_closed[pairs.split.test] = choose_closed(result, pairs.differ, pairs.split.test)
    return ArbiterCandidate(recipe.name, takes_closed[evidence.fit_rows], recipe.judge_calls, models=1)


def fit_arbiter_recipe(
    recipe: ArbiterRecipe, evidence: Evidence, fold: int, work: Path, watch: FitProgressCallback
) -> ArbiterResult:
    """Fit an arbiter on all folds except `fold`; -1 fits it on all folds. The held-out rows are never used."""
    function = load_arbiter_fit_function(recipe.name)
    folder = work / f"arbiter-{recipe.name}-{fold}"
    injected = select_injected_arguments(function, {"seed": evidence.seed, "work": folder, "watch": watch})
    pairs = evidence.make_pairs(fold)
    check_answer_pairs(pairs)
    return cast(ArbiterResult, function(pairs, **injected, **recipe.options))


def choose_closed(result: ArbiterResult, differ: BoolArray, rows: Any) -> BoolArray:
    """Return for which rows a fitted arbiter chooses the closed-book answer.

    Args:
        result: The fitted arbiter. Its `raw` returns the probabilities that the closed-book answer (column 0) and the
            open-book answer (column 1) are right.
        differ: For all rows, whether the two answers differ. If not, there is nothing to choose.
        rows: Numbers of the rows to choose for.
    """
    return np.asarray(take_closed(result.raw(rows.tolist())) & differ[rows])


def choose_by_rules(evidence: Evidence) -> BoolArray:
    """Return for which rows the arbiter `rules`, which needs no training, chooses the closed-book answer."""
    beliefs = compute_beliefs(RULES_ARBITER, evidence.make_pairs(-1).answers)
    return np.array([belief is not None and belief.prefers_closed for belief in beliefs], dtype=bool)


# --- work folder ----------------------------------------------------------------------------------


def try_candidates(
    recipes: Sequence[Any], cross_fit: Callable[[Any], Any], watch: FitProgressCallback
) -> Iterator[Any]:
    """Yield the candidate of each recipe, as `cross_fit` makes it.

    Recipes that cannot be fitted on these rows, or whose weights cannot be downloaded, are reported and skipped.
    """
    for recipe in recipes:
        try:
            yield cross_fit(recipe)
        except (BadInput, BadSetting, UnsupportedSignal, WeightsError) as error:
            watch(FitProgress(0, 1, "folds", recipe.name, f"{recipe.name} was left out: {error}", True))


def _make_key(evidence: Evidence, recipe: GateRecipe) -> str:
    """Return a hash of all that the scores of a gate depend on: rows, grades, recipe and seed.

    It is part of the name of the file that stores the scores, so that they are reused only if nothing has changed.
    """
    parts = [recipe.gate, recipe.target, json.dumps(dict(recipe.options), sort_keys=True), str(evidence.seed)]
    grades = "".join(map(str, evidence.list_needed(recipe.target).astype(int)))
    return sha256_text(evidence.table.settings["data_fingerprint"], *evidence.table.ids.tolist(), grades, *parts)[:16]
