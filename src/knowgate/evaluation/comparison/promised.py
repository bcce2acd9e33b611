"""What is proven about the thresholds of the gates in an evaluation, and whether it holds on its questions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from knowgate.doors import read_text
from knowgate.gates import ALWAYS, FittedGate, folder_of, gate_name, load_gate
from knowgate.labels import passages_shown
from knowgate.runs import Trial
from knowgate.thresholds import CALIBRATED, Deployment, is_proven_alone, objections, promise
from knowgate.types import Gate


@dataclass(frozen=True)
class Promised:
    """A guarantee in words. holds: for the LLM, the passages and the answers of these questions, and for skipping
    with nobody choosing after retrieval.

    loss: what it allows. chosen_on: how many of these questions the threshold was chosen on.
    """

    words: str
    holds: bool
    loss: float = 0.0
    chosen_on: int = 0


def read_promises(
    trial: Trial, gates: Sequence[str | Gate], *, plug_in: bool = False, arbiter: str | None = None
) -> dict[str, Promised]:
    """The guarantees of the fitted gates among these, by the names that tables call them.

    arbiter: fingerprint of the one that is tried here; what was proven with one is held against it.
    """
    fitted = [gate for gate in gates if gate != "auto" and folder_of(gate) is not None]
    found = {
        gate_name(gate): _promised(trial, load_gate(gate, plug_in=plug_in) if isinstance(gate, str) else gate, arbiter)
        for gate in fitted
    }
    return {name: one for name, one in found.items() if one.words}


def _promised(trial: Trial, gate: Gate, arbiter: str | None) -> Promised:
    settings = trial.settings
    retriever = settings.get("retriever_fingerprint")
    used = Deployment(
        retriever=retriever,
        k=passages_shown(settings.get("k"), retriever),
        max_tokens=settings.get("max_tokens"),
        open_prompts=settings.get("open_prompts"),
        reranker=settings.get("reranker_fingerprint"),
        candidates=settings.get("candidates"),
        arbiter=None if is_proven_alone(gate) else arbiter,  # tables have every gate both ways
    )
    if not isinstance(gate, FittedGate):
        return Promised("", holds=False)
    holds = gate.threshold != ALWAYS and is_proven_alone(gate) and not objections(gate, used)
    file = gate.artefact.path / CALIBRATED
    chosen = set(read_text(file).split()) if file.is_file() else set()
    loss = float((gate.artefact.manifest.get("guarantee") or {}).get("epsilon", 0.0))
    return Promised(promise(gate, used), holds, loss, sum(str(key) in chosen for key in trial.question_keys))
