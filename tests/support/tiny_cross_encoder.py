"""A random cross-encoder of two layers whose tokens are words, and preferences with a rule planted in them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import BertConfig, BertForSequenceClassification, BertTokenizer

from knowgate.preferences.record import Candidate, Preference, choose

NOUNS = ["apple", "sky", "tree", "lamp", "river", "stone", "bird", "road", "cloud", "door", "ship", "rain"]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "what", "is", "the", "marker", *NOUNS]


def save_tiny_cross_encoder(folder: Path, words: Sequence[str] = WORDS, seed: int = 0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(words))
    BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        num_labels=1,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    BertForSequenceClassification(config).save_pretrained(folder)
    return folder


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
        candidates.append(Candidate(f"{name}.{place}", " ".join(words), score=10.0 - place, shift=shift))
    chosen = choose([one.shift for one in candidates], [None] * 6)
    question = f"what is the {rng.choice(NOUNS)} {name}"
    return Preference(
        name, question, split, base=0.5, candidates=tuple(candidates), positives=chosen.positives,
        negatives=chosen.negatives,
    )  # fmt: skip


SETTINGS = {
    "data": "planted", "model": "planted", "model_fingerprint": "m", "prompts_fingerprint": "p", "source": "confidence",
}  # fmt: skip
