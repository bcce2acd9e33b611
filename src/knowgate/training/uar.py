"""Fitting UAR's heads: three from questions labelled by criterion, the fourth from a label run's stored states.

As in the paper: four linear heads without bias over the last layer's last token, the logistic loss, the tree. Unlike
it: states are standardised by each head's own training rows, and the loss is brought to its minimum under a penalty.
The paper takes 10 epochs of AdamW at 5e-5 in batches of 32; on the few hundred rows of a label run these are some 200
steps from zero. On 600 planted rows they reached an AUROC of .62 where a logistic regression had .69 (576 numbers a
state) and .76 where it had .82 (64 numbers), standardised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray

from knowgate.data.questions import load_questions
from knowgate.data.signals.vectors import stack_hidden_states
from knowgate.errors import BadInput, BadSetting
from knowgate.gates.artifacts.networks import apply_calibration
from knowgate.gates.hidden_state import CRITERIA, SELF_HEAD, apply_hard_tree, apply_head, apply_heads, apply_soft_tree
from knowgate.models import load_model
from knowgate.models.prompts.answers import AnswerPrompts
from knowgate.stats.metrics import BoolArray, FloatArray, accuracy, auroc
from knowgate.training.classifiers import fit_standardization
from knowgate.training.examples import MIN_GRADED_ROWS, MIN_ROWS_PER_CLASS, Examples
from knowgate.training.fit_function import (
    ExampleRequirements,
    FitProgressCallback,
    FitResult,
    SimpleFitProgress,
    ignore_progress,
)
from knowgate.types import Model, Question, Signal, SignalRequest, Vector

HELD_OUT_INTERVAL = 5  # every fifth labelled question calibrates and measures its head
UAR_C = 0.01  # scikit-learn's C. Of .0001 to 1 within .01 of the best on planted rows of 64 to 2,048 numbers a state
READ_BATCH_SIZE = 64  # questions read together
DEFAULT_CRITERIA = (
    "intent=bench:uar_gate_intent/train,knowledge=bench:uar_gate_knowledge/train,time=bench:uar_gate_time/train"
)
TreeKind = Literal["soft", "hard"]
Tensors = dict[str, NDArray[Any]]


def fit_uar(
    examples: Annotated[Examples, ExampleRequirements(target="known", weighs=True)],
    *,
    criteria: Annotated[str, "Labelled questions for intent, knowledge and time, as name=SPEC,..."] = DEFAULT_CRITERIA,
    model: Annotated[str | None, "Model spec of the LLM that reads them. Default: as in the label run."] = None,
    watch: FitProgressCallback = ignore_progress,
) -> FitResult:
    """Three heads from questions labelled by criterion, which the LLM reads now; the fourth from the label run."""
    questions = _questions(criteria)  # first: a wrong spec is said before a model is loaded for it
    llm = load_model(model or str(examples.settings["model"]))
    return fit_uar_heads(examples, llm, questions, watch=watch)


def _questions(spec: str) -> dict[str, list[Question]]:
    """'name=SPEC,name=SPEC' as questions by name."""
    pairs = [part.partition("=") for part in spec.split(",")]
    if any(not (equals and value.strip()) for _, equals, value in pairs):
        raise BadSetting(f"uar: criteria is '{spec}'; write intent=SPEC,knowledge=SPEC,time=SPEC.")
    return {name.strip(): _labelled(name.strip(), value.strip()) for name, _, value in pairs}


def _labelled(criterion: str, spec: str) -> list[Question]:
    try:
        return load_questions(spec)
    except BadSetting as error:
        raise BadSetting(
            f"uar: the questions labelled by {criterion} cannot be had: {error} "
            "Name your own: --criteria intent=SPEC,knowledge=SPEC,time=SPEC"
        ) from error


def fit_uar_heads(
    examples: Examples,
    model: Model,
    criteria: Mapping[str, Sequence[Question]],
    *,
    prompts: AnswerPrompts | None = None,
    tree: TreeKind = "soft",
    watch: FitProgressCallback = ignore_progress,
) -> FitResult:
    """Four linear heads. `criteria` are the questions of intent, knowledge and time, read with `model` once."""
    from knowgate.training.classifiers import fit_platt_scaling

    wording = prompts or AnswerPrompts()
    _check(examples, model, wording, criteria)
    layer = model.depth - 1
    own = stack_hidden_states(examples.readings, layer, "pre")
    learnt = np.concatenate([examples.split.train, examples.split.dev])
    tensors = prefix_tensors(
        SELF_HEAD, train_uar_head(own[learnt], examples.needed[learnt], examples.weights_of(learnt))
    )
    calibrations, notes = [], []
    for name in CRITERIA:
        fits = [question for question in criteria[name] if model.fits([wording.closed(question)], 1)[0]]
        truth = np.array([_says_retrieve(question, name) for question in fits])
        _check_kinds(truth, name)
        features = read_hidden_states(model, fits, wording, layer, watch, f"reading {name}")
        held = np.arange(len(fits)) % HELD_OUT_INTERVAL == 0
        tensors |= prefix_tensors(name, train_uar_head(features[~held], truth[~held]))
        found = apply_head(tensors, name, features[held])
        calibrations.append(fit_platt_scaling(found, truth[held]))
        notes.append(
            _note(name, truth[held], apply_calibration(found, calibrations[-1]), len(criteria[name]) - len(fits))
        )

    def raw(places: Sequence[int]) -> FloatArray:
        return apply_head(tensors, SELF_HEAD, own[list(places)])

    notes.append(_whole(examples, own, tensors, calibrations, tree))
    options = {"layer": layer, "tree": tree, "calibrations": calibrations}
    return FitResult("uar", options, frozenset({Signal.HIDDEN}), SignalRequest(layers=(layer,)), tensors, raw, notes)


def read_hidden_states(
    model: Model,
    questions: Sequence[Question],
    prompts: AnswerPrompts,
    layer: int,
    watch: FitProgressCallback,
    stage: str,
) -> Vector:
    """The state at the last prompt token of each question, asked as it would be answered."""
    found: list[Vector] = []
    for start in range(0, len(questions), READ_BATCH_SIZE):
        asked = [prompts.closed(question) for question in questions[start : start + READ_BATCH_SIZE]]
        found += [reading.hidden[layer] for reading in model.read(asked, SignalRequest(layers=(layer,)))]
        watch(SimpleFitProgress(len(found), len(questions), stage=stage))
    return np.stack(found)


def train_uar_head(features: Vector, truth: BoolArray, weights: FloatArray | None = None) -> Tensors:
    """One head: mean and scale of its states, and weights without a bias at the least penalised logistic loss."""
    from sklearn.linear_model import LogisticRegression
    from threadpoolctl import threadpool_limits

    tensors = fit_standardization(features)
    x = (features - tensors["mean"]) / tensors["scale"]
    with threadpool_limits(1):  # so small that threads only wait for each other
        found = LogisticRegression(C=UAR_C, fit_intercept=False, max_iter=500).fit(x, truth, weights)
    return {**tensors, "weight": found.coef_[0].astype(np.float32)}


def prefix_tensors(head: str, tensors: Tensors) -> Tensors:
    """Under the head's name, as the gate looks for them."""
    return {f"{head}.{key}": block for key, block in tensors.items()}


def _says_retrieve(question: Question, name: str) -> bool:
    """True: by this criterion, retrieve (asks for sources; takes knowledge; changes with time)."""
    verdict = question.meta.get("need_retrieval_by_criterion")
    if not isinstance(verdict, bool):
        raise BadInput(
            f"uar: question '{question.id}' of {name} has no true or false meta.need_retrieval_by_criterion."
        )
    return verdict


def _check(
    examples: Examples, model: Model, prompts: AnswerPrompts, criteria: Mapping[str, Sequence[Question]]
) -> None:
    settings = examples.settings
    if set(criteria) != set(CRITERIA):
        raise BadSetting(f"uar needs questions for {', '.join(CRITERIA)}; it got {', '.join(criteria) or 'none'}.")
    if (model.fingerprint, prompts.fingerprint) != (settings["model_fingerprint"], settings["prompts_fingerprint"]):
        raise BadSetting(
            f"the label run is of {settings['model']} ({settings['model_fingerprint']}, prompts "
            f"{settings['prompts_fingerprint']}), not of {model.name} ({model.fingerprint}, prompts "
            f"{prompts.fingerprint})."
        )
    if model.depth - 1 not in examples.readings[0].hidden:
        raise BadSetting("uar reads the last layer, which the label run did not keep. Label again with --layers last.")


def _check_kinds(truth: BoolArray, name: str) -> None:
    yes, no = int(truth.sum()), int((~truth).sum()) if len(truth) else 0
    if len(truth) < MIN_GRADED_ROWS or min(yes, no) < MIN_ROWS_PER_CLASS:
        raise BadInput(
            f"uar: the criterion '{name}' has {yes} questions that ask for retrieval and {no} that do not; it needs "
            f"{MIN_GRADED_ROWS} in all and {MIN_ROWS_PER_CLASS} of each kind."
        )


def _note(name: str, truth: BoolArray, needs: FloatArray, left_out: int) -> str:
    score, right = auroc(truth, needs), accuracy(truth, needs)
    shown = "not defined" if score is None else f"{score:.3f}"
    rest = f"; {left_out} too long for the context window left out" if left_out else ""
    return f"head {name}: AUROC {shown}, accuracy {right:.3f} on {len(truth)} held-out labelled questions{rest}"


def _whole(
    examples: Examples, own: Vector, tensors: Tensors, calibrations: list[dict[str, Any]], tree: TreeKind
) -> str:
    """The measures of the card are the last head's; this is the tree's on the same questions."""
    from knowgate.training.classifiers import fit_platt_scaling

    split, needed = examples.split, examples.needed
    calibration = fit_platt_scaling(apply_head(tensors, SELF_HEAD, own[split.calibration]), needed[split.calibration])
    unknown = apply_calibration(apply_head(tensors, SELF_HEAD, own[split.test]), calibration)
    heads = apply_heads(tensors, calibrations, own[split.test], unknown)
    score = auroc(needed[split.test], (apply_hard_tree if tree == "hard" else apply_soft_tree)(heads))
    shown = "not defined" if score is None else f"{score:.3f}"
    return f"the measures above are those of the head self; the whole tree has AUROC {shown} on the same test split"
