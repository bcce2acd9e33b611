"""Preferences with a rule planted in them: passages with the marker raise the LLM's confidence."""

from __future__ import annotations

import numpy as np

from knowgate.data.preferences import CandidatePassage, Preference, select_passages
from tests.support.tiny_models import NOUNS


def planted_preferences(n: int, split: str = "train", seed: int = 0) -> list[Preference]:
    """Of six candidates two hold the marker: only they raise the LLM's confidence."""
    rng = np.random.default_rng(seed)
    return [_planted(f"{split}-{place}", split, rng) for place in range(n)]


def _planted(name: str, split: str, rng: np.random.Generator) -> Preference:
    helping = set(rng.permutation(6)[:2].tolist())
    candidates = []
    for place in range(6):
        words = [str(word) for word in rng.choice(NOUNS, 4)]
        if place in helping:
            words[int(rng.integers(4))] = "marker"
        shift = (0.3 if place in helping else -0.2) + 0.01 * float(rng.standard_normal())
        candidates.append(CandidatePassage(f"{name}.{place}", " ".join(words), score=10.0 - place, shift=shift))
    chosen = select_passages([one.shift for one in candidates], [None] * 6)
    question = f"what is the {rng.choice(NOUNS)} {name}"
    return Preference(
        name, question, split, base=0.5, candidates=tuple(candidates), positives=chosen.positives,
        negatives=chosen.negatives,
    )  # fmt: skip


SETTINGS = {
    "data": "planted", "model": "planted", "model_fingerprint": "m", "prompts_fingerprint": "p", "source": "confidence",
}  # fmt: skip
