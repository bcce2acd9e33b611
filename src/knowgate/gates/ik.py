"""IK, "I know": a judge reads the question and the beginning of the LLM's own answer."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from knowgate.embedding import SentenceEmbedder, check_vectors
from knowgate.errors import ArtefactError, NotOffered
from knowgate.gates.calibration import Floats
from knowgate.gates.fitted import FittedGate
from knowgate.gates.judge import FOLDER, Judge, open_judge
from knowgate.gates.network import apply_network
from knowgate.prompts.judge import ik_text
from knowgate.text import render_choices
from knowgate.types import Embedder, Question, Reading, Vector

LABELS = ("Yes", "No")
PIECE = re.compile(r"[A-Za-z0-9]+|\S")


@dataclass(frozen=True)
class IkGate(FittedGate):
    """need = 1 - P(Yes) / (P(Yes) + P(No)) of a fine-tuned judge, given the question and the first T draft tokens.

    Mode `text`: a linear head over sentence embeddings of the question and of question + draft; for LLMs behind an API.

    Needs: draft (nothing with T = 0). Cost per question: one prefill of the judge (60 + T tokens), or two embeddings;
    the draft is not wasted when skipping.
    Reference: the IK paper, section 3.
    Example:
        >>> gate = IkGate.load("my-ik")  # doctest: +SKIP
    """

    embedder: Embedder | None = None

    def raw(self, questions: Sequence[Question], readings: Sequence[Reading]) -> Floats:
        options = self.artefact.options
        texts = drafts(readings) if options["tokens"] else [""] * len(questions)
        if options["mode"] == "text":
            return apply_network(self.artefact.tensors, features(self.encoder, questions, texts, options["tokens"]))
        return judged(self.judge, questions, texts, options["tokens"])

    @functools.cached_property
    def judge(self) -> Judge:
        return open_judge(self.artefact.path / FOLDER, self.artefact.options, "ik")

    @functools.cached_property
    def encoder(self) -> Embedder:
        options = self.artefact.options
        encoder = self.embedder or SentenceEmbedder(options["embedder"])
        if encoder.fingerprint != options["embedder_fingerprint"]:
            raise ArtefactError(
                f"the gate '{self.artefact.path.name}' was fitted with the embedding model {options['embedder']} "
                f"({options['embedder_fingerprint'][:12]}), not {encoder.fingerprint[:12]}. Fit it again."
            )
        return encoder


def drafts(readings: Sequence[Reading]) -> list[str]:
    """The text of each draft."""
    if any(reading.draft is None for reading in readings):
        raise NotOffered("the reading has no draft, which ik was fitted with. Use a backend that drafts answers.")
    return [reading.draft.text if reading.draft else "" for reading in readings]


def judged(judge: Judge, questions: Sequence[Question], texts: Sequence[str], tokens: int) -> Floats:
    """Uncalibrated needs from the fine-tuned judge."""
    pairs = zip(questions, texts, strict=True)
    cuts = [judge.encode(ik_text(question, judge.beginning(text, tokens))) for question, text in pairs]
    return 1 - judge.known(cuts)


def features(embedder: Embedder, questions: Sequence[Question], texts: Sequence[str], tokens: int) -> Vector:
    """Embeddings of the question and of question + draft, side by side."""
    alone = [render_choices(question) for question in questions]
    joined = [f"{query}\n{first_pieces(text, tokens)}" for query, text in zip(alone, texts, strict=True)]
    vectors = [check_vectors(embedder.embed(part), len(alone)) for part in (alone, joined)]
    return np.hstack(vectors).astype(np.float32)


def first_pieces(text: str, n: int) -> str:
    """The first n words or signs: what stands for tokens where the LLM's tokenizer is not at hand."""
    ends = [match.end() for match in PIECE.finditer(text)][:n]
    return text[: ends[-1]].strip() if ends else ""
