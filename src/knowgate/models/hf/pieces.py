"""Text that grows token by token: what of it is certain by now.

A token need not be whole characters (a Chinese character is often three tokens), and spaces at both ends of an
answer are cut off. Whatever a later token may still change is held back, so that the pieces join to the text
that all tokens give together.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

BROKEN = "\ufffd"  # what a decoder writes for the beginning of a character
BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # a token of tokenizers that spell rare characters in bytes


@dataclass
class GrowingText:
    """The text of one answer. `given`: characters of it that were handed out.

    Tokens are decoded a few at a time: those since `settled`, after those since `before` that were settled just
    before them, because how a token is written (its leading space) may depend on its neighbour.
    """

    tokenizer: Any
    given: int = 0
    before: int = 0
    settled: int = 0
    waiting: str = field(default="", repr=False)  # settled text that may prove to be the end's spaces

    def take(self, tokens: Sequence[int]) -> str:
        """The next piece, from all tokens so far; '' where nothing more is certain."""
        if _cleans(self.tokenizer) or self._ends_in_byte(tokens[self.settled :]):
            return ""
        text = self._decode(tokens[self.before :])
        known = self._decode(tokens[self.before : self.settled])
        if len(text) <= len(known) or text.endswith(BROKEN):
            return ""
        self.before, self.settled = self.settled, len(tokens)
        return self._hand_out(text[len(known) :])

    def finish(self, text: str) -> str:
        """The rest, once the whole text is known."""
        return text[self.given :]

    def _hand_out(self, text: str) -> str:
        """Spaces wait for what comes after them; before the first word they are dropped."""
        ready = self.waiting + text
        if not self.given:
            ready = ready.lstrip()
        piece = ready.rstrip()
        self.waiting = ready[len(piece) :]
        self.given += len(piece)
        return piece

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def _ends_in_byte(self, tokens: Sequence[int]) -> bool:
        """A run of bytes is written anew, all of it, when it ends in half a character. Special tokens do not end it."""
        names = self.tokenizer.convert_ids_to_tokens(list(tokens))
        if not any(map(BYTE.fullmatch, names)):
            return False
        written = [name for token, name in zip(tokens, names, strict=True) if not self._is_special(token)]
        return BYTE.fullmatch(written[-1]) is not None

    def _is_special(self, token: int) -> bool:
        return self._decode([token]) != str(self.tokenizer.decode([token]))


def _cleans(tokenizer: Any) -> bool:
    """Whether decoding moves spaces afterwards ("do n't" -> "don't"): then nothing is certain before the end.

    transformers does not do it for BPE, whatever the tokenizer's settings say.
    """
    if not tokenizer.clean_up_tokenization_spaces:
        return False
    core = getattr(tokenizer, "backend_tokenizer", None)
    return type(getattr(core, "model", None)).__name__ != "BPE"
