"""Fit UAR's four heads: three on questions labeled by criterion, the fourth on a label run's hidden states.

As in the paper: four linear heads without bias over the last layer's last token, the logistic loss, the decision tree.
Unlike it: states are standardized by each head's own training rows, and the regularized loss is minimized exactly. The
paper takes 10 epochs of AdamW at 5e-5 in batches of 32; on the few hundred rows of a label run these are some 200 steps
from zero. On 600 planted rows they reached an AUROC of .62 where a logistic regression had .69 (576 numbers a state)
and .76 where it had .82 (64 numbers), standardized.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from knowgate.data.questions import load_questions
from knowgate.data.runs.records import check_same_llm
from knowgate.data.signals.vectors import stack_hidden_states
from knowgate.errors import BadInput, BadSetting
from knowgate.gates.artifacts.networks import apply_calibration
from knowgate.gates.hidden_state import CRITERIA, SELF_HEAD, apply_head, apply_heads, apply_soft_tree
from knowgate.models import load_model
from knowgate.models.prompts.answers import AnswerPrompts
from knowgate.stats.metrics import BoolArray, FloatArray, accuracy, auroc
from knowgate.training import fit_function
from knowgate.training.classifiers import Tensors, fit_logistic, fit_platt_scaling, fit_standardization
from knowgate.training.examples import MIN_GRADED_ROWS, MIN_ROWS_PER_CLASS, Examples
from knowgate.types import Model, Question, Signal, SignalRequest, Vector

HELD_OUT_INTERVAL = 5  # every fifth labeled question calibrates and measures its head
UAR_C = 0.01  # scikit-learn's C. Of .0001 to 1 within .01 of the best on planted rows of 64 to 2,048 numbers a state
READ_BATCH_SIZE = 64
DEFAULT_CRITERIA = (
    "intent=bench:uar_gate_intent/train,knowledge=bench:uar_gate_knowledge/train,time=bench:uar_gate_time/train"
)


def fit_uar(
    examples: Annotated[Examples, fit_function.ExampleRequirements(target="known")],
    *,
    criteria: Annotated[
        str, "Labeled questions for each criterion: intent=SPEC,knowledge=SPEC,time=SPEC."
    ] = DEFAULT_CRITERIA,
    model: Annotated[str | None, "LLM that reads these questions. Default: the LLM of the label run."] = None,
    watch: fit_function.FitProgressCallback = fit_function.ignore_progress,
) -> fit_function.FitResult:
    """Fit the UAR gate: four classifiers on hidden states of the LLM, combined by a decision tree.

    Three of them learn from questions that are labeled by a criterion, such as whether the answer changes with time. The
    LLM reads these questions now. The fourth learns from the label run whether the LLM knows the answer.
    """
    questions = _load_criteria(criteria)  # a wrong spec is reported before a model is loaded
    llm = load_model(model or str(examples.settings["model"]))
    return fit_uar_heads(examples, llm, questions, watch=watch)


def _load_criteria(spec: str) -> dict[str, list[Question]]:
    """Load the labeled questions of each criterion from a spec such as 'intent=SPEC,knowledge=SPEC,time=SPEC'."""
    pairs = [part.partition("=") for part in spec.split(",")]
    if any(not (equals and value.strip()) for _, equals, value in pairs):
        raise BadSetting(f"uar: criteria='{spec}' is not valid. Write intent=SPEC,knowledge=SPEC,time=SPEC.")
    return {name.strip(): _load_criterion(name.strip(), value.strip()) for name, _, value in pairs}


def _load_criterion(criterion: str, spec: str) -> list[Question]:
    try:
        return load_questions(spec)
    except BadSetting as error:
        raise BadSetting(
            f"uar: the questions labeled by {criterion} cannot be loaded: {error} Name your own with `criteria`: "
            "intent=SPEC,knowledge=SPEC,time=SPEC"
        ) from error


def fit_uar_heads(
    examples: Examples,
    model: Model,
    criteria: Mapping[str, Sequence[Question]],
    *,
    watch: fit_function.FitProgressCallback = fit_function.ignore_progress,
) -> fit_function.FitResult:
    """Train the four linear classifiers (heads) of the UAR paper on hidden states of the LLM.

    Three heads predict whether a question needs retrieval by its intent, by the knowledge it asks for and by whether the
    answer changes with time. The fourth, 'self', predicts whether the LLM does not know the answer.

    Args:
        examples: Label runs of the same model, with the last layer's states. The head 'self' is trained on them.
        model: The LLM, which reads the questions of `criteria` now.
        criteria: Labeled questions for each of the three criteria 'intent', 'knowledge' and 'time'.
        watch: Called with the progress.
    """
    prompts = AnswerPrompts()
    _check_inputs(examples, model, prompts, criteria)
    reader = StateReader(model, prompts, watch)
    states = stack_hidden_states(examples.readings, reader.layer, "pre")
    train = np.concatenate([examples.split.train, examples.split.dev])
    self_head = train_uar_head(states[train], examples.needed[train])
    tensors = prefix_tensors(SELF_HEAD, self_head)
    calibrations, notes = [], []
    for name in CRITERIA:
        head = _fit_criterion(name, criteria[name], reader)
        tensors |= head.tensors
        calibrations.append(head.calibration)
        notes.append(head.note)

    def raw(indices: Sequence[int]) -> FloatArray:
        return apply_head(tensors, SELF_HEAD, states[list(indices)])

    notes.append(_measure_tree(examples, states, tensors, calibrations))
    options = {"layer": reader.layer, "tree": "soft", "calibrations": calibrations}
    request = SignalRequest(layers=(reader.layer,))
    return fit_function.FitResult("uar", options, frozenset({Signal.HIDDEN}), request, tensors, raw, notes)


@dataclass(frozen=True)
class StateReader:
    """Reads the hidden state of the LLM's last layer at the last prompt token of questions."""

    model: Model
    prompts: AnswerPrompts
    watch: fit_function.FitProgressCallback

    @property
    def layer(self) -> int:
        """The last layer."""
        return self.model.depth - 1

    def fits(self, question: Question) -> bool:
        """Return whether a question fits the context window."""
        return self.model.fits([self.prompts.closed(question)], 1)[0]

    def read(self, questions: Sequence[Question], stage: str) -> Vector:
        """Return the hidden state of each question; `stage` names this work in the progress."""
        states: list[Vector] = []
        request = SignalRequest(layers=(self.layer,))
        for start in range(0, len(questions), READ_BATCH_SIZE):
            prompts = [self.prompts.closed(question) for question in questions[start : start + READ_BATCH_SIZE]]
            states += [reading.hidden[self.layer] for reading in self.model.read(prompts, request)]
            self.watch(fit_function.FitProgress(len(states), len(questions), stage=stage))
        return np.stack(states)


@dataclass(frozen=True)
class CriterionHead:
    """A trained classifier of one criterion, with its calibration and a note on its quality for the model card."""

    tensors: Tensors
    calibration: dict[str, Any]
    note: str


def _fit_criterion(name: str, questions: Sequence[Question], reader: StateReader) -> CriterionHead:
    usable = [question for question in questions if reader.fits(question)]
    truth = np.array([_read_verdict(question, name) for question in usable])
    _check_classes(truth, name)
    states = reader.read(usable, f"reading {name}")
    held_out = np.arange(len(usable)) % HELD_OUT_INTERVAL == 0
    tensors = prefix_tensors(name, train_uar_head(states[~held_out], truth[~held_out]))
    scores = apply_head(tensors, name, states[held_out])
    calibration = fit_platt_scaling(scores, truth[held_out])
    needs = apply_calibration(scores, calibration)
    note = _describe_head(name, truth[held_out], needs, len(questions) - len(usable))
    return CriterionHead(tensors, calibration, note)


def train_uar_head(features: Vector, truth: BoolArray) -> Tensors:
    """Train one classifier (head) of the UAR gate: a logistic regression without bias on standardized states."""
    tensors = fit_standardization(features)
    standardized = (features - tensors["mean"]) / tensors["scale"]
    fitted = fit_logistic(standardized, truth, C=UAR_C, fit_intercept=False)
    return {**tensors, "weight": fitted.coef_[0].astype(np.float32)}


def prefix_tensors(head: str, tensors: Tensors) -> Tensors:
    """Prefix the names of tensors with the head's name, as the gate expects them."""
    return {f"{head}.{key}": block for key, block in tensors.items()}


def _read_verdict(question: Question, criterion: str) -> bool:
    """Return whether the criterion asks for retrieval (wants sources, needs knowledge, or changes with time)."""
    verdict = question.meta.get("need_retrieval_by_criterion")
    if not isinstance(verdict, bool):
        raise BadInput(
            f"uar: question '{question.id}' of the criterion '{criterion}' has no label. Set "
            "meta.need_retrieval_by_criterion to true or false."
        )
    return verdict


def _check_inputs(
    examples: Examples, model: Model, prompts: AnswerPrompts, criteria: Mapping[str, Sequence[Question]]
) -> None:
    settings = examples.settings
    if set(criteria) != set(CRITERIA):
        raise BadSetting(
            f"uar needs questions for the criteria {', '.join(CRITERIA)}, but got {', '.join(criteria) or 'none'}."
        )
    check_same_llm("the label run", settings, model, prompts.fingerprint)
    if model.depth - 1 not in examples.readings[0].hidden:
        raise BadSetting(
            "uar needs hidden states of the last layer, but the label run has none. Label again with layers='last'."
        )


def _check_classes(truth: BoolArray, criterion: str) -> None:
    positive, negative = int(truth.sum()), int((~truth).sum()) if len(truth) else 0
    if len(truth) < MIN_GRADED_ROWS or min(positive, negative) < MIN_ROWS_PER_CLASS:
        raise BadInput(
            f"uar needs at least {MIN_GRADED_ROWS} questions for the criterion '{criterion}', {MIN_ROWS_PER_CLASS} of "
            f"each kind. It has {positive} that need retrieval and {negative} that do not. Add more questions."
        )


def _describe_head(name: str, truth: BoolArray, needs: FloatArray, n_left_out: int) -> str:
    left_out = f"; {n_left_out} too long for the context window left out" if n_left_out else ""
    score = _format_auroc(auroc(truth, needs))
    quality = f"AUROC {score}, accuracy {accuracy(truth, needs):.3f}"
    return f"head {name}: {quality} on {len(truth)} held-out labeled questions{left_out}"


def _measure_tree(examples: Examples, states: Vector, tensors: Tensors, calibrations: list[dict[str, Any]]) -> str:
    """Measure on the test split the decision tree that combines all four heads, and describe the result for the card.

    The other metrics of the card are those of the head 'self' alone, which predicts whether the LLM knows the answer.

    Args:
        examples: The label rows.
        states: Hidden state of each row.
        tensors: Weights of all heads.
        calibrations: Calibrations of the other three heads.
    """
    split, needed = examples.split, examples.needed
    scores = apply_head(tensors, SELF_HEAD, states[split.calibration])
    calibration = fit_platt_scaling(scores, needed[split.calibration])
    unknown = apply_calibration(apply_head(tensors, SELF_HEAD, states[split.test]), calibration)
    heads = apply_heads(tensors, calibrations, states[split.test], unknown)
    score = _format_auroc(auroc(needed[split.test], apply_soft_tree(heads)))
    return f"the metrics are those of the head self; the whole tree has AUROC {score} on the same test split"


def _format_auroc(score: float | None) -> str:
    return "not defined" if score is None else f"{score:.3f}"
