"""Whether a server's hidden states are those a gate was fitted on: ten questions of the fit are kept with their states.

A served model has another fingerprint than the weights it serves, so nothing but its numbers can say that they are the
same. States of one layer lie close together whatever is asked (on the embedded model, two questions have a cosine of
.995), so the cosine alone says little: each state must also be nearer to that of its own question than to any other,
once what they have in common is taken away.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from knowgate.doors import parse_json
from knowgate.errors import ArtefactError, BadInput
from knowgate.gates.fitted.artefact import REFERENCE, Artefact
from knowgate.prompts import AnswerPrompts
from knowgate.types import Model, Question, Reading, Vector, Want

COUNT = 10  # questions
LEAST = 0.99  # cosine of every state with its reference
QUESTIONS = "questions"


@dataclass(frozen=True)
class Reference:
    """Questions of the fit, and by layer the state of each at the last token of its prompt."""

    questions: list[Question]
    states: Mapping[int, Vector]


@dataclass(frozen=True)
class Agreement:
    """cosine: the least of any state with its reference. nearest: questions whose states lie nearest to their own, in
    every layer; n: of how many."""

    cosine: float
    nearest: int
    n: int

    @property
    def holds(self) -> bool:
        return self.cosine >= LEAST and self.nearest == self.n


def reference_files(
    questions: Sequence[Question], readings: Sequence[Reading], layers: Sequence[int]
) -> dict[str, bytes]:
    """A file with ten questions, evenly spread over all of them, and their states; none where there are no states."""
    places = list(dict.fromkeys(np.linspace(0, len(questions) - 1, COUNT).astype(int).tolist())) if questions else []
    kept = [readings[place] for place in places]
    if not layers or not kept or any(layer not in reading.hidden for reading in kept for layer in layers):
        return {}
    asked = [
        {"text": one.text, "lang": one.lang, "choices": list(one.choices)} for one in (questions[p] for p in places)
    ]
    states = {str(layer): np.stack([reading.hidden[layer] for reading in kept]) for layer in layers}
    data = save({name: block.astype(np.float32) for name, block in states.items()}, {QUESTIONS: json.dumps(asked)})
    return {REFERENCE: data}


def read_reference(artefact: Artefact) -> Reference | None:
    """What was kept; None with gates of earlier versions, or of packed runs."""
    file = artefact.path / REFERENCE
    if not file.is_file():
        return None
    try:
        with safe_open(str(file), framework="np") as opened:
            states = {int(name): opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
            asked = parse_json((opened.metadata() or {})[QUESTIONS], REFERENCE)
        questions = [_question(one) for one in asked]
    except (SafetensorError, BadInput, KeyError, TypeError, ValueError, AttributeError):
        raise artefact.refusal(f"{REFERENCE} is broken") from None
    if not questions or any(block.ndim != 2 or len(block) != len(questions) for block in states.values()):
        raise artefact.refusal(f"{REFERENCE} is broken")
    return Reference(questions, states)


def _question(one: Mapping[str, Any]) -> Question:
    if not isinstance(one["text"], str) or not all(isinstance(choice, str) for choice in one["choices"]):
        raise ValueError("no question")
    return Question(one["text"], lang=one["lang"], choices=tuple(one["choices"]))


def check_agreement(artefact: Artefact, model: Model, prompts: AnswerPrompts, want: Want) -> str:
    """Refuse a server whose states are not those the gate was fitted on; else what is to be said of it."""
    made = artefact.manifest["model"]["name"]
    reference = read_reference(artefact)
    if reference is None or not set(want.layers) <= set(reference.states):
        raise ArtefactError(
            f"the gate '{artefact.path.name}' was fitted on {made} and holds no states to compare those of "
            f"{model.name} with. Fit it again with this version, or give --plug-in if you know that they agree."
        )
    asked = [prompts.closed(question) for question in reference.questions]
    found = model.read(asked, Want(layers=want.layers, resumable=False))
    measured = measure_agreement(reference, found, want.layers)
    if not measured.holds:
        raise ArtefactError(
            f"the gate '{artefact.path.name}' was fitted on {made}, and the hidden states of {model.name} are not "
            f"those: on {measured.n} prompts the least cosine is {measured.cosine:.4f} (at least {LEAST} is needed), "
            f"and {measured.nearest} of {measured.n} lie nearest to their own. Serve the same weights, name the "
            "server's layers in its order (vLLM's last one is that before the final norm), or fit on the server."
        )
    return f"fitted on {made}, whose states the server gives (least cosine {measured.cosine:.4f} on {measured.n})"


def measure_agreement(reference: Reference, found: Sequence[Reading], layers: Sequence[int]) -> Agreement:
    least, own = 1.0, np.ones(len(found), dtype=bool)
    for layer in layers:
        wanted, given = reference.states[layer], np.stack([reading.hidden[layer] for reading in found])
        if wanted.shape != given.shape:
            return Agreement(0.0, 0, len(found))
        least = min(least, float((_unit(wanted) * _unit(given)).sum(axis=1).min()))
        common = wanted.mean(axis=0)
        close = _unit(given - common) @ _unit(wanted - common).T
        own &= close.argmax(axis=1) == np.arange(len(found))
    return Agreement(least, int(own.sum()), len(found))


def _unit(rows: Vector) -> Vector:
    lengths = np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
    return (rows / np.where(lengths > 0, lengths, 1.0)).astype(np.float32)
