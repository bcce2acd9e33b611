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

from knowgate.datasets import load_questions
from knowgate.errors import BadInput, BadSetting
from knowgate.fitting.examples import FEWEST_GRADED, FEWEST_OF_A_KIND, Examples
from knowgate.fitting.fit_options import Wanted
from knowgate.fitting.fit_result import FitResult
from knowgate.fitting.networks import standardise
from knowgate.fitting.steps import PlainStep, WatchFit, unwatched
from knowgate.gates import CRITERIA, SELF, apply_head, apply_heads, hard_tree, soft_tree, to_probability
from knowgate.models import load_model
from knowgate.prompts import AnswerPrompts
from knowgate.signals import hidden_states
from knowgate.statistics import Bools, Floats, accuracy, auroc
from knowgate.types import Model, Question, Signal, Vector, Want

HELD_OUT = 5  # every fifth labelled question calibrates and measures its head
STRENGTH = 0.01  # scikit-learn's C. Of .0001 to 1 within .01 of the best on planted rows of 64 to 2,048 numbers a state
READ = 64  # questions read together
USUAL = "intent=bench:uar_gate_intent/train,knowledge=bench:uar_gate_knowledge/train,time=bench:uar_gate_time/train"
Tree = Literal["soft", "hard"]
Tensors = dict[str, NDArray[Any]]


def fit_uar(
    examples: Annotated[Examples, Wanted(target="known", weighs=True)],
    *,
    criteria: Annotated[str, "Labelled questions for intent, knowledge and time, as name=SPEC,..."] = USUAL,
    model: Annotated[str | None, "Model spec of the LLM that reads them. Default: as in the label run."] = None,
    watch: WatchFit = unwatched,
) -> FitResult:
    """Three heads from questions labelled by criterion, which the LLM reads now; the fourth from the label run."""
    questions = _questions(criteria)  # first: a wrong spec is said before a model is loaded for it
    llm = load_model(model or str(examples.settings["model"]))
    return fit_heads(examples, llm, questions, watch=watch)


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


def fit_heads(
    examples: Examples,
    model: Model,
    criteria: Mapping[str, Sequence[Question]],
    *,
    prompts: AnswerPrompts | None = None,
    tree: Tree = "soft",
    watch: WatchFit = unwatched,
) -> FitResult:
    """Four linear heads. `criteria` are the questions of intent, knowledge and time, read with `model` once."""
    from knowgate.fitting.probability import fit_calibration

    wording = prompts or AnswerPrompts()
    _check(examples, model, wording, criteria)
    layer = model.depth - 1
    own = hidden_states(examples.readings, layer, "pre")
    learnt = np.concatenate([examples.split.train, examples.split.dev])
    tensors = named(SELF, train_head(own[learnt], examples.needed[learnt], examples.weights_of(learnt)))
    calibrations, notes = [], []
    for name in CRITERIA:
        fits = [question for question in criteria[name] if model.fits([wording.closed(question)], 1)[0]]
        truth = np.array([_says_retrieve(question, name) for question in fits])
        _check_kinds(truth, name)
        features = read_states(model, fits, wording, layer, watch, f"reading {name}")
        held = np.arange(len(fits)) % HELD_OUT == 0
        tensors |= named(name, train_head(features[~held], truth[~held]))
        found = apply_head(tensors, name, features[held])
        calibrations.append(fit_calibration(found, truth[held]))
        notes.append(_note(name, truth[held], to_probability(found, calibrations[-1]), len(criteria[name]) - len(fits)))

    def raw(places: Sequence[int]) -> Floats:
        return apply_head(tensors, SELF, own[list(places)])

    notes.append(_whole(examples, own, tensors, calibrations, tree))
    options = {"layer": layer, "tree": tree, "calibrations": calibrations}
    return FitResult("uar", options, frozenset({Signal.HIDDEN}), Want(layers=(layer,)), tensors, raw, notes)


def read_states(
    model: Model, questions: Sequence[Question], prompts: AnswerPrompts, layer: int, watch: WatchFit, stage: str
) -> Vector:
    """The state at the last prompt token of each question, asked as it would be answered."""
    found: list[Vector] = []
    for start in range(0, len(questions), READ):
        asked = [prompts.closed(question) for question in questions[start : start + READ]]
        found += [reading.hidden[layer] for reading in model.read(asked, Want(layers=(layer,)))]
        watch(PlainStep(len(found), len(questions), stage=stage))
    return np.stack(found)


def train_head(features: Vector, truth: Bools, weights: Floats | None = None) -> Tensors:
    """One head: mean and scale of its states, and weights without a bias at the least penalised logistic loss."""
    from sklearn.linear_model import LogisticRegression
    from threadpoolctl import threadpool_limits

    tensors = standardise(features)
    x = (features - tensors["mean"]) / tensors["scale"]
    with threadpool_limits(1):  # so small that threads only wait for each other
        found = LogisticRegression(C=STRENGTH, fit_intercept=False, max_iter=500).fit(x, truth, weights)
    return {**tensors, "weight": found.coef_[0].astype(np.float32)}


def named(head: str, tensors: Tensors) -> Tensors:
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


def _check_kinds(truth: Bools, name: str) -> None:
    yes, no = int(truth.sum()), int((~truth).sum()) if len(truth) else 0
    if len(truth) < FEWEST_GRADED or min(yes, no) < FEWEST_OF_A_KIND:
        raise BadInput(
            f"uar: the criterion '{name}' has {yes} questions that ask for retrieval and {no} that do not; it needs "
            f"{FEWEST_GRADED} in all and {FEWEST_OF_A_KIND} of each kind."
        )


def _note(name: str, truth: Bools, needs: Floats, left_out: int) -> str:
    score, right = auroc(truth, needs), accuracy(truth, needs)
    shown = "not defined" if score is None else f"{score:.3f}"
    rest = f"; {left_out} too long for the context window left out" if left_out else ""
    return f"head {name}: AUROC {shown}, accuracy {right:.3f} on {len(truth)} held-out labelled questions{rest}"


def _whole(examples: Examples, own: Vector, tensors: Tensors, calibrations: list[dict[str, Any]], tree: Tree) -> str:
    """The measures of the card are the last head's; this is the tree's on the same questions."""
    from knowgate.fitting.probability import fit_calibration

    split, needed = examples.split, examples.needed
    calibration = fit_calibration(apply_head(tensors, SELF, own[split.calibration]), needed[split.calibration])
    unknown = to_probability(apply_head(tensors, SELF, own[split.test]), calibration)
    heads = apply_heads(tensors, calibrations, own[split.test], unknown)
    score = auroc(needed[split.test], (hard_tree if tree == "hard" else soft_tree)(heads))
    shown = "not defined" if score is None else f"{score:.3f}"
    return f"the measures above are those of the head self; the whole tree has AUROC {shown} on the same test split"
