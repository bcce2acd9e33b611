"""Fit UAR's four heads: three on questions labeled by criterion, the fourth on a label run's hidden states.

As in the paper: four linear heads without bias over the last layer's last token, the logistic loss, the decision tree.
Unlike it: states are standardized by each head's own training rows, and the regularized loss is minimized exactly. The
paper takes 10 epochs of AdamW at 5e-5 in batches of 32; on the few hundred rows of a label run these are some 200 steps
from zero. On 600 planted rows they reached an AUROC of .62 where a logistic regression had .69 (576 numbers a state)
and .76 where it had .82 (64 numbers), standardized.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np

from knowgate.core import split_batches
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
from knowgate.training.examples import MIN_ROWS_PER_CLASS, Examples, require_both_classes
from knowgate.types import Model, Prompt, Question, Signal, SignalRequest, Vector

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
    """Fit the UAR gate (unified active retrieval), a decision tree of four classifiers of hidden states.

    Three of them learn from labeled question sets, the fourth from the label runs.
    """
    # A wrong spec is reported before a model is loaded.
    questions = {name: load_questions(spec) for name, spec in _parse_criteria(criteria).items()}
    llm = load_model(model or str(examples.settings["model"]))
    return fit_uar_heads(examples, llm, questions, watch=watch)


def _parse_criteria(criteria: str) -> dict[str, str]:
    """Parse the option `criteria` into one question set per criterion."""
    specs = {}
    for part in criteria.split(","):
        name, _, spec = part.partition("=")
        specs[name.strip()] = spec.strip()
    if not all(specs.values()):
        raise BadSetting(f"criteria='{criteria}' is not valid. Write intent=jsonl:FILE,knowledge=...,time=...")
    return specs


def fit_uar_heads(
    examples: Examples,
    model: Model,
    criteria: Mapping[str, Sequence[Question]],
    *,
    watch: fit_function.FitProgressCallback = fit_function.ignore_progress,
) -> fit_function.FitResult:
    """Train the four linear classifiers (heads) of the UAR paper on hidden states before the answer.

    The head 'self' predicts which answers the LLM does not know. One head for each of the three criteria predicts whether a
    question needs retrieval by this criterion.

    Args:
        examples: Label runs of the same model, with the last layer's states. The head 'self' is trained on them.
        model: The LLM, which reads the questions of `criteria` now.
        criteria: Labeled questions for each of the three criteria 'intent', 'knowledge' and 'time'.
        watch: Called with the progress.
    """
    answer_prompts = AnswerPrompts()
    _check_inputs(examples, model, answer_prompts, criteria)
    layer = model.depth - 1
    states = stack_hidden_states(examples.readings, layer, "pre")
    train = np.concatenate([examples.split.train, examples.split.dev])
    tensors = prefix_tensors(SELF_HEAD, train_uar_head(states[train], examples.needed[train]))
    calibrations = []
    notes = []
    for name in CRITERIA:
        head = _fit_criterion(name, criteria[name], model, answer_prompts, watch)
        tensors |= head.tensors
        calibrations.append(head.calibration)
        notes.append(head.note)

    def score_rows(indices: Sequence[int]) -> FloatArray:
        return apply_head(tensors, SELF_HEAD, states[list(indices)])

    notes.append(_measure_tree(examples, states, tensors, calibrations))
    options = {"layer": layer, "tree": "soft", "calibrations": calibrations}
    request = SignalRequest(layers=(layer,))
    return fit_function.FitResult("uar", options, frozenset({Signal.HIDDEN}), request, tensors, score_rows, notes)


class CriterionHead(NamedTuple):
    """A trained classifier of one criterion, its calibration, and a note on its quality."""

    tensors: Tensors
    calibration: dict[str, Any]
    note: str


def _fit_criterion(
    name: str,
    questions: Sequence[Question],
    model: Model,
    answer_prompts: AnswerPrompts,
    watch: fit_function.FitProgressCallback,
) -> CriterionHead:
    """Train and calibrate the classifier of one criterion on labeled questions.

    Questions that do not fit into the context window are left out.
    """
    prompts = [answer_prompts.closed(question) for question in questions]
    usable = np.flatnonzero(model.fits(prompts, max_tokens=1)).tolist()
    truth = _read_verdicts([questions[i] for i in usable], name)  # whether each question needs retrieval
    states = _read_states(model, [prompts[i] for i in usable], f"reading {name}", watch)
    held_out = np.arange(len(usable)) % HELD_OUT_INTERVAL == 0
    tensors = prefix_tensors(name, train_uar_head(states[~held_out], truth[~held_out]))
    scores = apply_head(tensors, name, states[held_out])
    calibration = fit_platt_scaling(scores, truth[held_out])
    needs = apply_calibration(scores, calibration)
    note = _describe_head(name, truth[held_out], needs, n_left_out=len(prompts) - len(usable))
    return CriterionHead(tensors, calibration, note)


def _read_states(
    model: Model, prompts: Sequence[Prompt], stage: str, watch: fit_function.FitProgressCallback
) -> Vector:
    """Return the hidden state at the end of each prompt, from the last layer."""
    layer = model.depth - 1
    states: list[Vector] = []
    for batch in split_batches(prompts, READ_BATCH_SIZE):
        states += [reading.hidden[layer] for reading in model.read(batch, SignalRequest(layers=(layer,)))]
        watch(fit_function.FitProgress(len(states), len(prompts), stage=stage))
    return np.stack(states)


def train_uar_head(features: Vector, truth: BoolArray) -> Tensors:
    """Train one classifier of the UAR gate, a logistic regression without bias."""
    tensors = fit_standardization(features)
    standardized = (features - tensors["mean"]) / tensors["scale"]
    fitted = fit_logistic(standardized, truth, C=UAR_C, fit_intercept=False)
    return {**tensors, "weight": fitted.coef_[0].astype(np.float32)}


def prefix_tensors(head: str, tensors: Tensors) -> Tensors:
    """Prefix the names of tensors with the head's name, as the gate expects them."""
    return {f"{head}.{key}": block for key, block in tensors.items()}


def _read_verdicts(questions: Sequence[Question], criterion: str) -> BoolArray:
    """Return for each question whether its label says that it needs retrieval.

    Raises:
        BadInput: A question has no label, or there are too few questions of one kind.
    """
    verdicts = [question.meta.get("need_retrieval_by_criterion") for question in questions]
    for question, verdict in zip(questions, verdicts, strict=True):
        if not isinstance(verdict, bool):
            raise BadInput(
                f"question '{question.id}' has no label for the criterion '{criterion}' of gate 'uar'. Set "
                "meta.need_retrieval_by_criterion to true or false."
            )
    truth = np.array(verdicts, dtype=bool)
    what = (f"questions that need retrieval by '{criterion}'", "questions that do not")
    require_both_classes(truth, MIN_ROWS_PER_CLASS, what, "Add more questions.")
    return truth


def _check_inputs(
    examples: Examples, model: Model, prompts: AnswerPrompts, criteria: Mapping[str, Sequence[Question]]
) -> None:
    """Raise BadSetting if questions of a criterion or hidden states are missing, or the label run has another LLM.

    `criteria` holds the training questions of each criterion, by its name.
    """
    if set(criteria) != set(CRITERIA):
        raise BadSetting(
            f"the gate 'uar' needs question sets for {', '.join(CRITERIA)}. `criteria` has: {', '.join(criteria) or 'none'}."
        )
    check_same_llm("the label run", examples.settings, model, prompts.fingerprint)
    if model.depth - 1 not in examples.readings[0].hidden:
        raise BadSetting(
            "the gate 'uar' needs hidden states of the last layer, but the label run has none. Label again with layers='last'."
        )


def _describe_head(name: str, truth: BoolArray, needs: FloatArray, n_left_out: int) -> str:
    """Describe the quality of one classifier (head) for the model card.

    Args:
        name: Name of the head.
        truth: Whether each held-out question needs retrieval.
        needs: Need for retrieval that the head predicts for it.
        n_left_out: Number of questions that are too long for the LLM.
    """
    left_out = f"; {n_left_out} too long for the context window left out" if n_left_out else ""
    score = _format_auroc(auroc(truth, needs))
    quality = f"AUROC {score}, accuracy {accuracy(truth, needs):.3f}"
    return f"head {name}: {quality} on {len(truth)} held-out labeled questions{left_out}"


def _measure_tree(examples: Examples, states: Vector, tensors: Tensors, calibrations: list[dict[str, Any]]) -> str:
    """Measure the AUROC of the whole UAR gate (a tree of four classifiers, called heads) on the test split.

    Args:
        examples: The label rows.
        states: Hidden state of each row.
        tensors: Weights of all heads.
        calibrations: Calibrations of the three heads for `CRITERIA`. The head 'self' is calibrated here.

    Returns:
        A note for the model card.
    """
    split, needed = examples.split, examples.needed
    self_scores = apply_head(tensors, SELF_HEAD, states)
    calibration = fit_platt_scaling(self_scores[split.calibration], needed[split.calibration])
    unknown = apply_calibration(self_scores[split.test], calibration)
    heads = apply_heads(tensors, calibrations, states[split.test], unknown)
    score = _format_auroc(auroc(needed[split.test], apply_soft_tree(heads)))
    return f"the metrics are those of the head 'self' alone; the whole tree has AUROC {score} on the same test split"


def _format_auroc(score: float | None) -> str:
    return "not defined" if score is None else f"{score:.3f}"
