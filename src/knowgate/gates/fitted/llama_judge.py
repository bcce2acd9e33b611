"""A judge of answers that llama.cpp runs: the same question, the same tokens, a quarter of the memory, and no torch.

Made by `knowgate export-judge`. Before it is used it is asked what it was asked when it was written: a llama.cpp that
counts wrongly is found out.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from knowgate.errors import ModelError
from knowgate.gates.fitted.probability import Floats
from knowgate.models import LlamaCpp, MarkedTokens, Turn
from knowgate.typed import Share, read_record

# not tokenizer.json: transformers, opening the GGUF file, would take that for its tokenizer and miss the chat template
GGUF_NAME, TOKENIZER_NAME = "judge.gguf", "judge-tokenizer.json"
TRIED = 2  # prompts at every start; all of them when it is written
FAR = 0.1  # of a probability; q8_0 moves it by some thousandths, wrong arithmetic by tenths


@dataclass(frozen=True)
class CheckedPrompt:
    """A prompt in tokens, and what the judge said to it before it was written: P(known)."""

    ids: tuple[int, ...]
    known: Share


@dataclass(frozen=True, kw_only=True)
class GgufOptions:
    """What a gate says of a judge in a GGUF file. pair: the tokens its two labels begin with."""

    kind: str
    turn: Turn
    pair: tuple[int, int]
    checks: tuple[CheckedPrompt, ...] = ()


@dataclass(frozen=True)
class LlamaJudge:
    """Trainings of one judge, each in a file of its own; their verdicts are averaged."""

    voices: tuple[LlamaCpp, ...]
    options: GgufOptions

    def pose(self, question: str, answer: str | None, text: str) -> MarkedTokens:
        turn = self.options.turn
        ids = self.voices[0].tokenise(turn.render(text), special=not turn.chat)
        return MarkedTokens(ids, [len(ids) - 1])

    def beginning(self, text: str, n_tokens: int) -> str:
        """The first tokens of a text."""
        return self.voices[0].decode(self.voices[0].tokenise(text.strip())[:n_tokens]).strip()

    def votes(self, cuts: Sequence[MarkedTokens]) -> list[Floats]:
        """What each training says."""
        pair = self.options.pair
        return [np.array([voice.first_of_two(cut.ids, pair) for cut in cuts]) for voice in self.voices]

    def known(self, cuts: Sequence[MarkedTokens]) -> Floats:
        mean: Floats = np.mean(self.votes(cuts), axis=0)
        return mean

    def off_by(self, most: int | None = None) -> float:
        """How far it is at most from what it said before it was written; most: prompts to try, all by default."""
        checks = self.options.checks[:most]
        asked = [MarkedTokens(list(check.ids), [len(check.ids) - 1]) for check in checks]
        told = np.array([check.known for check in checks])
        return float(np.abs(self.known(asked) - told).max()) if asked else 0.0


@functools.lru_cache(maxsize=2)
def _opened(folders: tuple[Path, ...], digests: tuple[str, ...], options: GgufOptions) -> LlamaJudge:
    judge = LlamaJudge(tuple(LlamaCpp(each / GGUF_NAME, each / TOKENIZER_NAME) for each in folders), options)
    if (off := judge.off_by(TRIED)) > FAR:
        raise ModelError(
            f"the judge in '{folders[0].parent}' says something else under this llama.cpp than when it was written: a "
            f"probability is off by {off:.2f}. Use another release of xllamacpp, or the gate it was exported from."
        )
    return judge


def open_llama_judge(folders: tuple[Path, ...], digests: tuple[str, ...], options: Mapping[str, Any]) -> LlamaJudge:
    """The judge in these folders, found to count as it should; the digests tell whether it is still the same."""
    return _opened(folders, digests, read_record(GgufOptions, options, "options.gguf", others=True))
