"""Tokens of a prompt and the places in them where a label is expected. Plain numbers; no torch.

Knows tokenisation in place: text up to a label and the label itself are tokenised apart, because some tokenizers
merge 'Answer:' and 'true' into other tokens when they stand together.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from knowgate.errors import BadSetting
from knowgate.types import LabelPrompt


@dataclass(frozen=True)
class LabelPromptTokens:
    """A tokenised prompt: from the positions `marks` labels are predicted; `prefix` tokens are shared by many."""

    ids: list[int]
    positions: list[int]
    prefix: int = 0


class LocalTokenizer(Protocol):
    """A model on this machine, whose tokenizer and chat template are at hand."""

    @property
    def has_template(self) -> bool: ...

    def tokenize(self, text: str, *, special: bool = False) -> list[int]: ...

    def tokenize_all(self, texts: Sequence[str], *, special: bool = False) -> list[list[int]]: ...

    def render(self, text: str) -> str: ...

    def check_length(self, n_tokens: int, room: int) -> None: ...


def encode_labels(model: LocalTokenizer, labels: Sequence[str]) -> list[int]:
    """First token of each label as it stands in place; labels that begin alike cannot be told apart."""
    ids = [model.tokenize(label)[0] for label in labels if label]
    if len(ids) < len(labels) or len(set(ids)) < len(ids):
        raise BadSetting(f"the labels {', '.join(map(repr, labels))} do not begin with different tokens.")
    return ids


def encode_label_prompts(
    model: LocalTokenizer, prompts: Sequence[LabelPrompt], labels: Sequence[int]
) -> list[LabelPromptTokens]:
    """Token ids of the prefix and of each part, tokenised apart; `labels` are the tokens that may begin a part.

    The texts of all prompts go to the tokenizer together: it takes many on as many cores as there are.
    """
    chats = [not prompt.raw and model.has_template for prompt in prompts]
    if any(chat and (len(prompt.parts) > 1 or prompt.prefix) for chat, prompt in zip(chats, prompts, strict=True)):
        raise BadSetting("a user turn has one label position, at its end; use raw=True for several.")
    beginnings = list({prompt.prefix for chat, prompt in zip(chats, prompts, strict=True) if not chat})
    begun = dict(zip(beginnings, model.tokenize_all(beginnings, special=True), strict=True))
    parts = [
        [model.render(prompt.parts[0])] if chat else list(prompt.parts)
        for chat, prompt in zip(chats, prompts, strict=True)
    ]
    pieces = iter(model.tokenize_all([part for some in parts for part in some]))
    cut = []
    for chat, prompt, some in zip(chats, prompts, parts, strict=True):
        ids = [] if chat else begun[prompt.prefix]
        cut.append(_joined(ids, [(part, next(pieces)) for part in some], labels))
        model.check_length(len(cut[-1].ids), 1)
    return cut


def _joined(prefix: list[int], parts: Sequence[tuple[str, list[int]]], labels: Sequence[int]) -> LabelPromptTokens:
    """The prompt that begins like this and goes on with these parts, each a text and its tokens."""
    ids, marks = list(prefix), list[int]()
    for number, (part, piece) in enumerate(parts):
        if number and piece[0] not in labels:
            raise BadSetting(f"the label at the start of '{part[:20]}' is not one token in place; choose other labels.")
        ids += piece
        marks.append(len(ids) - 1)
    return LabelPromptTokens(ids, marks, len(prefix))


TEXT_PLACEHOLDER = "KNOWGATE-TEXT"  # stands for the text while a template is read off
SPECIMEN_TEXT = (
    f'\n {TEXT_PLACEHOLDER}: one, two?\n\n  three (3.5) - "four"\nfive\'s \n'  # lines, and blanks that might be cut off
)
CLOCK_FUNCTION = "strftime_now"  # templates that tell the date


@dataclass(frozen=True)
class TurnTemplate:
    """What stands before and after the text of a user turn. special: tokens that end turns. chat: there is a template;
    without one the text stands bare, and the tokenizer adds its own beginning."""

    before: str
    after: str
    special: tuple[str, ...]
    chat: bool

    def render(self, text: str) -> str:
        return f"{self.before}{escape_special_tokens(text, self.special) if self.chat else text}{self.after}"


def extract_turn_template(render: Callable[[str], str], special: Sequence[str], *, chat: bool) -> TurnTemplate:
    """The turn that a model's own `render` makes."""
    before, found, after = render(TEXT_PLACEHOLDER).partition(TEXT_PLACEHOLDER)
    if not found or TEXT_PLACEHOLDER in after:
        raise BadSetting("the chat template does not give back the text of a turn as it is, once.")
    return TurnTemplate(before, after, tuple(special), chat)


def extract_plain_turn_template(
    render: Callable[[str], str], special: Sequence[str], template: str
) -> TurnTemplate | None:
    """The turn of every plain text, where the template puts the same words around any; else None."""
    try:
        turn = extract_turn_template(render, special, chat=True)
    except BadSetting:
        return None
    return turn if CLOCK_FUNCTION not in template and turn.render(SPECIMEN_TEXT) == render(SPECIMEN_TEXT) else None


def is_plain_text(text: str) -> bool:
    """Whether no template could see more in it than text: marks, thoughts, calls of tools."""
    return not any(sign in text for sign in "<>{}[]|")


def escape_special_tokens(content: str, special_tokens: Sequence[str]) -> str:
    """What somebody wrote, without tokens that end the turn: a space inside makes them text."""
    for token in special_tokens:
        content = content.replace(token, f"{token[:1]} {token[1:]}") if len(token) > 1 else content
    return content


REPLACEMENT_CHARACTER = "\ufffd"  # what a decoder writes for the beginning of a character
BYTE_TOKEN_PATTERN = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # a token of tokenizers that spell rare characters in bytes


@dataclass
class IncrementalDecoder:
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
        if len(text) <= len(known) or text.endswith(REPLACEMENT_CHARACTER):
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
        if not any(map(BYTE_TOKEN_PATTERN.fullmatch, names)):
            return False
        written = [name for token, name in zip(tokens, names, strict=True) if not self._is_special(token)]
        return BYTE_TOKEN_PATTERN.fullmatch(written[-1]) is not None

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
