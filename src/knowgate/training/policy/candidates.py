"""Gates and arbiters that a policy may use, and their out-of-fold predictions.

A gate is fitted once for each fold of the questions, without that fold, and then scores it. Judges are not fitted again
afterwards: the gate uses the judges of all folds. Finished predictions and trainings are stored in the work folder, so that
an interrupted fit continues where it stopped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from knowgate.core.files import sha256_text, write_bytes
from knowgate.data.signals.features import feature_matrix
from knowgate.errors import BadInput, BadSetting, UnsupportedSignal, WeightsError
from knowgate.gates.arbiters import ARBITER_FOLDER
from knowgate.gates.arbiters.abstention import RULES_ARBITER
from knowgate.gates.arbiters.arbitration import compute_beliefs
from knowgate.gates.artifacts.networks import apply_calibration
from knowgate.gates.fusion import compute_log_odds, name_judge
from knowgate.gates.judges.encoder_judge import is_encoder_spec
from knowgate.stats.metrics import BoolArray, FloatArray
from knowgate.training.arbiter import load_arbiter_fit_function, prefer_closed_book, save_arbiter
from knowgate.training.arbiter_pairs import AnswerPairs, ArbiterResult, check_answer_pairs
from knowgate.training.classifiers import fit_linear, fit_platt_scaling, make_scorer
from knowgate.training.examples import MIN_ROWS_PER_CLASS, Examples, Target
from knowgate.training.fit_function import (
    FitFunction,
    FitProgress,
    FitProgressCallback,
    FitResult,
    call_fit_function,
)
from knowgate.training.fusion import fit_fusion
from knowgate.training.gate import list_fittable_gates, load_fit_function
from knowgate.training.judges.ensemble import plan_ensemble
from knowgate.training.judges.gain import make_gain_training, train_gain_judge
from knowgate.training.judges.training_options import AnswerJudgeFitOptions
from knowgate.training.policy.evidence import FOLDS, HELD_OUT, Evidence, PolicyOptions
from knowgate.training.policy.folder import make_constant_result
from knowgate.training.policy.outcomes import CONSTANT_GATES, ArbiterCandidate, GateCandidate
from knowgate.training.stack import fit_cross_fitted_judge, stack_judges
from knowgate.types import Signal, SignalRequest, Vector

LOGPROB_FEATURES = ("min", "mean")
JUDGE, GAIN_JUDGE = "judge", "judge (gain)"
N_JUDGES = FOLDS  # size of an ensemble of judges, each of which leaves out one fold
SINGLE_FEATURE = ""  # in the place of the name of a fit function
MAX_CPU_ROWS = 2_000  # with more rows, small judges take too long on a CPU to be tried unasked
# Half the epochs with half the batch size make as many updates, and the lower three of MiniLM's six layers are not trained.
# On 400 train rows of the GPT-4 recording, one fold took 55 seconds of CPU time instead of 140 (docs/judges.md).
FAST_TRAINING = {"epochs": 2, "batch": 16, "frozen_layers": 3}


@dataclass(frozen=True)
class GateRecipe:
    """How to fit one of the gates that a policy may use.

    Attributes:
        name: Name of the gate in tables.
        fit_name: Name of the fit function, as in `knowgate fit NAME`. `SINGLE_FEATURE` for a gate on a single feature, a
            log-probability of the draft.
        target: What the gate learns to predict, such as whether the LLM knows the answer.
        options: Options of the fit function.
        models: Number of trained models that the gate runs.
        reads_draft: Whether the gate reads the closed-book answer (without passages).
    """

    name: str
    fit_name: str
    target: Target = "known"
    options: Mapping[str, Any] = field(default_factory=dict)
    models: int = 1
    reads_draft: bool = True


DEFAULT_GATES = (
    GateRecipe("fusion", "fusion", options={"cheap": True}),
    GateRecipe("fusion (benefit)", "fusion", "benefit", {"cheap": True}),
    GateRecipe("fusion (gain)", "fusion", "gain", {"cheap": True}),
    GateRecipe("question", "question", reads_draft=False),
)


def list_gate_recipes(evidence: Evidence, base: str | None) -> list[GateRecipe]:
    """List the gates that can be fitted on these rows.

    Args:
        evidence: The label rows, and which signals and answers they have.
        base: Model that judges are fine-tuned from; None to fine-tune no judge.
    """
    features = [name for name in LOGPROB_FEATURES if name in evidence.features]
    recipes = [GateRecipe(f"logprob:{name}", SINGLE_FEATURE, options={"feature": name}) for name in features]
    fittable = list_fittable_gates()
    recipes += [recipe for recipe in DEFAULT_GATES if recipe.fit_name in fittable]
    if base is not None:
        recipes += list_judge_recipes(base, learns_gain(evidence, base))
    if not evidence.has_both_answers:  # Other targets need answers with passages.
        recipes = [recipe for recipe in recipes if recipe.target == "known"]
    return [recipe for recipe in recipes if has_both_classes(evidence, recipe.target)]


def list_judge_recipes(base: str, with_gain: bool) -> list[GateRecipe]:
    """List the gates with judges: judges alone, and stacks, which combine the judges with all other signals."""
    options = make_judge_options(base)
    recipes = [GateRecipe(JUDGE, fit_name="judge", target="known", options=options, models=N_JUDGES)]
    if with_gain:
        recipes.append(GateRecipe(GAIN_JUDGE, fit_name="gain", target="gain", options=options, models=N_JUDGES))
    stack_models = N_JUDGES + 1  # the judges, and the regression that combines them
    recipes.append(GateRecipe("stack (known)", fit_name="stack", target="known", models=stack_models))
    recipes.append(GateRecipe("stack (gain)", fit_name="stack", target="gain", models=stack_models))
    return recipes


def list_arbiters(evidence: Evidence, base: str | None) -> dict[str, dict[str, Any]]:
    """Return the options of each arbiter to try, by name."""
    if not evidence.has_both_answers:
        return {}
    arbiters: dict[str, dict[str, Any]] = {"rules": {}, "features": {}}
    if base is not None and not is_encoder_spec(base):  # the arbiter `lora` needs a causal model
        arbiters["lora"] = {"base": base}
    return arbiters


def make_judge_options(base: str) -> dict[str, Any]:
    """Return the options of a judge. The base `small` gets fewer epochs than by default."""
    return {"base": base, **(FAST_TRAINING if base == "small" else {})}


def choose_base(evidence: Evidence, options: PolicyOptions, has_gpu: bool) -> str | None:
    """Return the spec of the judge's base model, or None to try no judge.

    Without the option `base`, the choice depends on the LLM, on the GPU, and on the number of rows and their signals.
    """
    if options.base is not None:
        return None if options.base == "none" else options.base
    model = str(evidence.table.settings["model"])
    if has_gpu and (model == "smollm" or model.startswith(("hf:", "gguf:"))):
        return model
    has_signals = evidence.has_logprobs or evidence.has_states
    # Without a GPU, judges are slow. They are tried only on few rows, and only if there are no signals for faster gates.
    is_worth_trying = has_gpu or (len(evidence.table) <= MAX_CPU_ROWS and not has_signals)
    return "small" if is_worth_trying else None


def learns_gain(evidence: Evidence, base: str) -> bool:
    """Return whether judges learn a second task, for the target 'gain': whether the answer with passages is right.

    It doubles the training time, so encoders, which are often trained without a GPU, do not learn it.
    """
    return evidence.has_both_answers and not is_encoder_spec(base) and has_both_classes(evidence, "gain")


def has_both_classes(evidence: Evidence, target: Target) -> bool:
    """Return whether both classes have enough questions to fit and calibrate a gate."""
    needed = evidence.list_needed(target)[evidence.fit_rows]
    return min(int(needed.sum()), int((~needed).sum())) >= 2 * MIN_ROWS_PER_CLASS  # once to fit, once to calibrate


def detect_gpu() -> bool:
    """Return whether a GPU is available for training."""
    try:
        import torch
    except ModuleNotFoundError:
        return False
    return bool(torch.cuda.is_available())


# --- fits -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CandidateFitter:
    """Fits the gates and arbiters that a policy may use.

    Attributes:
        evidence: The graded questions.
        base: Model that judges are fine-tuned from; None to fine-tune no judge.
        work: Working folder for checkpoints and intermediate results.
        watch: Called with the progress.
    """

    evidence: Evidence
    base: str | None
    work: Path
    watch: FitProgressCallback

    @cached_property
    def recipes(self) -> dict[str, GateRecipe]:
        """The gates to try, by name."""
        return {recipe.name: recipe for recipe in list_gate_recipes(self.evidence, self.base)}

    @cached_property
    def gates(self) -> list[GateCandidate]:
        """The gates to choose from, with the need for retrieval that each predicts in a cross-validation."""
        tried: list[GateCandidate] = []
        for recipe in self.recipes.values():
            if recipe.fit_name == "stack" and JUDGE not in [gate.name for gate in tried]:
                continue  # the judge could not be trained, so there is nothing to stack
            with self.report_failure(recipe.name):
                tried.append(GateCandidate(recipe.name, self._cross_fit(recipe), recipe.reads_draft, recipe.models))
        return tried

    @cached_property
    def arbiters(self) -> list[ArbiterCandidate]:
        """The arbiters to choose from, with the answers that each prefers in a cross-validation."""
        tried: list[ArbiterCandidate] = []
        for name in list_arbiters(self.evidence, self.base):
            with self.report_failure(name):
                n_models = 0 if name == "rules" else 1
                tried.append(ArbiterCandidate(name, self._cross_fit_arbiter(name), n_models))
        return tried

    @contextmanager
    def report_failure(self, name: str) -> Iterator[None]:
        """Turn an error inside the `with` body into a message, so that the search goes on without this candidate."""
        try:
            yield
        except (BadInput, BadSetting, UnsupportedSignal, WeightsError) as error:
            self.watch(FitProgress(0, 1, "folds", name, f"{name} was left out: {error}", is_milestone=True))

    def _cross_fit(self, recipe: GateRecipe) -> FloatArray:
        """Predict the need for retrieval of each row by cross-validation.

        Predictions that an interrupted fit has stored are used again.
        """
        if recipe.name in (JUDGE, GAIN_JUDGE):  # the judges score each row with one that was not trained on it
            examples = self.evidence.make_examples(recipe.target, test_fold=HELD_OUT)
            return score_calibrated(self.judges[recipe.target], examples, self.evidence.fit_rows)
        if recipe.fit_name == "stack":  # not stored, because the key of the file does not depend on the judges
            return self._score_folds(recipe)
        file = self.work / f"needs-{self._make_key(recipe)}.json"
        if file.is_file():
            return np.array(json.loads(file.read_text(encoding="utf-8")))
        needs = self._score_folds(recipe)
        write_bytes(file, json.dumps(needs.tolist()).encode())
        return needs

    def _score_folds(self, recipe: GateRecipe) -> FloatArray:
        """Predict the need for retrieval of each question by cross-validation.

        Each fold is scored by a gate that was fitted on all other folds.

        Returns:
            The calibrated needs, from 0 to 1, of all questions that are not held out.
        """
        needs = np.full(len(self.evidence.table), np.nan)
        for fold in range(FOLDS):
            self.watch(FitProgress(fold, FOLDS, "folds", f"trying {recipe.name}"))
            examples = self.evidence.make_examples(recipe.target, fold)
            gate = self._fit_recipe(recipe, examples, self.work / f"{self._make_key(recipe)}-{fold}")
            rows_of_fold = examples.split.test
            needs[rows_of_fold] = score_calibrated(gate, examples, rows_of_fold)
        return needs[self.evidence.fit_rows]

    @cached_property
    def _judge_margins(self) -> dict[str, Vector]:
        """The judge's log-odds for each row, by the judge's name in a stack (a gate that combines judges with signals)."""
        judge_scores = self.judges["known"].raw(range(len(self.evidence.table)))
        return {name_judge(0): compute_log_odds(judge_scores)}  # these stacks have a single judge

    def _fit_recipe(self, recipe: GateRecipe, examples: Examples, work: Path) -> FitResult:
        """Fit the gate of a recipe. A stack is fitted as a fusion that has the judges' log-odds as further signals."""
        if recipe.fit_name == SINGLE_FEATURE:
            return fit_single_feature(examples, str(recipe.options["feature"]))
        if recipe.fit_name == "fusion":
            return fit_fusion(examples, **recipe.options, embedder=self.evidence.embedder)
        if recipe.fit_name == "stack":
            return fit_fusion(examples, cheap=True, judge_margins=self._judge_margins, embedder=self.evidence.embedder)
        return cast(FitResult, self._call(load_fit_function(recipe.fit_name), examples, recipe.options, work))

    def _call(self, function: FitFunction, data: Examples | AnswerPairs, options: Mapping[str, Any], work: Path) -> Any:
        """Call the fit function of a gate or an arbiter."""
        return call_fit_function(function, data, options, seed=self.evidence.seed, work=work, watch=self.watch)

    def fit_gate(self, name: str) -> tuple[FitResult, Examples]:
        """Fit the chosen gate on all rows that are not held out, and return it with its training data.

        Judges were already trained for the cross-validation and are used again.
        """
        if name in CONSTANT_GATES:
            return make_constant_result(), self.evidence.make_examples("known", test_fold=HELD_OUT)
        recipe = self.recipes[name]
        examples = self.evidence.make_examples(recipe.target, test_fold=HELD_OUT)
        if recipe.fit_name == "stack":
            return stack_judges(examples, [self.judges["known"]], cheap=True, work=self.work / "final"), examples
        if recipe.name in (JUDGE, GAIN_JUDGE):
            return self.judges[recipe.target], examples
        self.report(f"fitting {name} on all {len(self.evidence.fit_rows)} questions")
        return self._fit_recipe(recipe, examples, self.work / "final"), examples

    def report(self, words: str) -> None:
        """Report a milestone."""
        self.watch(FitProgress(0, 1, "steps", "policy", words, is_milestone=True))

    @cached_property
    def judges(self) -> dict[Target, FitResult]:
        """The fitted judges by target: always `known`, and `gain` if the judges learn it (see `learns_gain`).

        Each judge is trained without one fold and scores the rows of this fold.
        """
        recipe = self.recipes[JUDGE]
        options = AnswerJudgeFitOptions(**recipe.options)
        examples = self.evidence.make_examples("known", test_fold=HELD_OUT)
        rows, seed = self.evidence.fit_rows, self.evidence.seed
        work = self.work / f"judges-{self._make_key(recipe)}"
        if not learns_gain(self.evidence, str(options.base)):
            judge = fit_cross_fitted_judge(
                examples, options, N_JUDGES, rows=rows, seed=seed, work=work, watch=self.watch
            )
            return {"known": judge}
        texts = [question.text for question in examples.questions]
        training = make_gain_training(options, seed)
        members = plan_ensemble(examples.split, training, folds=N_JUDGES, texts=texts, rows=rows)
        return train_gain_judge(examples, options, members, work=work, watch=self.watch)

    def _make_key(self, recipe: GateRecipe) -> str:
        """Return a hash of everything that a gate's scores depend on. It names the file with the stored scores."""
        table, options = self.evidence.table, json.dumps(dict(recipe.options), sort_keys=True)
        grades = "".join(map(str, self.evidence.list_needed(recipe.target).astype(int)))
        settings = [recipe.fit_name, recipe.target, options, str(self.evidence.seed)]
        return sha256_text(table.settings["data_fingerprint"], *table.ids.tolist(), grades, *settings)[:16]

    # --- arbiters ---------------------------------------------------------------------------------

    def _cross_fit_arbiter(self, name: str) -> BoolArray:
        """Return for which rows an arbiter prefers the answer without passages, by cross-validation."""
        if name == "rules":  # not fitted, so no folds are needed
            return self.choose_by_rules()[self.evidence.fit_rows]
        prefers_closed_book = np.zeros(len(self.evidence.table), dtype=bool)
        for fold in range(FOLDS):
            self.watch(FitProgress(fold, FOLDS, "folds", f"trying arbiter {name}"))
            pairs = self.evidence.make_pairs(fold)
            prefers_closed_book[pairs.split.test] = choose_closed_book(self._fit_arbiter(name, fold), pairs)
        return prefers_closed_book[self.evidence.fit_rows]

    def _fit_arbiter(self, name: str, test_fold: int) -> ArbiterResult:
        """Fit an arbiter on all folds except one. Held-out rows, which test the policy, are in none of the folds.

        Args:
            name: Name of the arbiter.
            test_fold: Number of the fold to leave out; `HELD_OUT` to fit on all folds.
        """
        pairs = self.evidence.make_pairs(test_fold)
        check_answer_pairs(pairs)
        options = list_arbiters(self.evidence, self.base)[name]
        work = self.work / f"arbiter-{name}-{test_fold}"
        return cast(ArbiterResult, self._call(load_arbiter_fit_function(name), pairs, options, work))

    def choose_by_rules(self) -> BoolArray:
        """Return for each row (held out or not) whether the arbiter `rules` prefers the answer without passages."""
        beliefs = compute_beliefs(RULES_ARBITER, self.evidence.make_pairs(HELD_OUT).answers)  # pairs of all rows
        return np.array([belief is not None and belief.prefers_closed for belief in beliefs], dtype=bool)

    def fit_arbiter(self, name: str, command: str) -> tuple[BoolArray | None, Path | None]:
        """Fit an arbiter on all rows that are not held out, and write its folder.

        Args:
            name: Name of the arbiter; '' for none.
            command: The command line that its model card shows.

        Returns:
            For which held-out rows the arbiter chooses the closed-book answer, and its folder. Both are None without an
            arbiter. The folder is None for the arbiter `rules`, which is not fitted.
        """
        if not name:
            return None, None
        if name == "rules":
            return self.choose_by_rules()[self.evidence.held_out], None
        result = self._fit_arbiter(name, test_fold=HELD_OUT)
        pairs = self.evidence.make_pairs(test_fold=HELD_OUT)
        folder = self.work / ARBITER_FOLDER
        save_arbiter(result, pairs, folder, command=command)
        return choose_closed_book(result, pairs), folder


def fit_single_feature(examples: Examples, feature: str) -> FitResult:
    """Fit a fusion gate with a single feature of the draft, such as its smallest token probability."""
    values = feature_matrix([feature], examples.questions, examples.readings)  # questions x 1
    rows = np.concatenate([examples.split.train, examples.split.dev])
    classifier = fit_linear(values[rows], examples.needed[rows])
    # Options of a fusion gate. It is cheap, as it needs no sampled answers, but not early, as it reads the whole draft.
    options = {"features": [feature], "probes": [], "cheap": True, "early": False}
    request = SignalRequest(draft_tokens=int(examples.settings.get("max_tokens", 32)))  # as long as the recorded drafts
    tensors = {f"fusion.{name}": value for name, value in classifier.items()}
    score_rows = make_scorer(classifier, values)
    return FitResult("fusion", options, frozenset({Signal.LOGPROBS}), request, tensors, score_rows)


def score_calibrated(result: FitResult, examples: Examples, rows: NDArray[np.int64]) -> FloatArray:
    """Return the need for retrieval (0 to 1) of the rows, calibrated on the calibration part of the split."""
    calibration_rows = examples.split.calibration
    calibration = fit_platt_scaling(result.raw(calibration_rows.tolist()), examples.needed[calibration_rows])
    return apply_calibration(result.raw(rows.tolist()), calibration)


def choose_closed_book(result: ArbiterResult, pairs: AnswerPairs) -> BoolArray:
    """Return for which test rows an arbiter chooses the answer without passages, never if both answers agree."""
    test = pairs.split.test
    return np.asarray(prefer_closed_book(result.raw(test.tolist())) & pairs.differ[test])
