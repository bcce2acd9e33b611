"""Text to tokens and back, for models on this machine: label positions, chat turns and streamed text.

Plain Python, no torch. The tokenizer itself belongs to the backend.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from knowgate.errors import BadSetting
from knowgate.types import LabelPrompt

REPLACEMENT_CHARACTER = "\ufffd"  # what decoders write for an incomplete character
BYTE_TOKEN_PATTERN = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # tokenizers without a token for a character spell its bytes
TEXT_PLACEHOLDER = "KNOWGATE-TEXT"
# Contains line breaks and outer spaces, which some templates strip.
SPECIMEN_TEXT = f'\n {TEXT_PLACEHOLDER}: one, two?\n\n  three (3.5) - "four"\nfive\'s \n'
CLOCK_FUNCTION = "strftime_now"  # called by templates that print the date


# --- label prompts --------------------------------------------------------------------------------


@dataclass(frozen=True)
class LabelPromptTokens:
    """Token ids of a `LabelPrompt`.

    Args:
        ids: The tokens of the whole prompt.
        positions: Indices of the tokens after which a label is predicted.
        prefix: Number of leading tokens that many prompts share.
    """

    ids: list[int]
    positions: list[int]
    prefix: int = 0


class LocalTokenizer(Protocol):
    """The tokenizer and chat template of a model on this machine."""

    @property
    def has_template(self) -> bool: ...

    def tokenize(self, text: str, *, special: bool = False) -> list[int]: ...

    def tokenize_all(self, texts: Sequence[str], *, special: bool = False) -> list[list[int]]: ...

    def render(self, text: str) -> str: ...

    def check_length(self, n_tokens: int, max_tokens: int) -> None: ...


def encode_labels(tokenizer: LocalTokenizer, labels: Sequence[str]) -> list[int]:
    """Return the first token of each label.

    Raises:
        BadSetting: Two labels start with the same token, or a label is empty.
    """
    ids = [tokenizer.tokenize(label)[0] for label in labels if label]
    if len(ids) < len(labels) or len(set(ids)) < len(ids):
        raise BadSetting(f"the labels {', '.join(map(repr, labels))} do not begin with different tokens.")
    return ids


def encode_label_prompts(
    tokenizer: LocalTokenizer, prompts: Sequence[LabelPrompt], label_ids: Sequence[int]
) -> list[LabelPromptTokens]:
    """Tokenize label prompts so that every label stays a token of its own.

    The prefix and the parts of a prompt are tokenized separately, because some tokenizers merge 'Answer:' and 'true'
    into other tokens. All texts go to the tokenizer in one call, which uses all cores.

    Args:
        tokenizer: The model's tokenizer.
        prompts: The prompts.
        label_ids: The tokens that may begin the second and later parts.

    Raises:
        BadSetting: A chat prompt has several parts, or a part does not begin with a label token.
    """
    is_chat = [not prompt.raw and tokenizer.has_template for prompt in prompts]
    if any(chat and (len(prompt.parts) > 1 or prompt.prefix) for chat, prompt in zip(is_chat, prompts, strict=True)):
        raise BadSetting("a user turn has one label position, at its end; use raw=True for several.")
    prefixes = list({prompt.prefix for chat, prompt in zip(is_chat, prompts, strict=True) if not chat})
    prefix_ids = dict(zip(prefixes, tokenizer.tokenize_all(prefixes, special=True), strict=True))
    parts = [
        [tokenizer.render(prompt.parts[0])] if chat else list(prompt.parts)
        for chat, prompt in zip(is_chat, prompts, strict=True)
    ]
    part_ids = iter(tokenizer.tokenize_all([part for prompt_parts in parts for part in prompt_parts]))
    encoded = []
    for chat, prompt, prompt_parts in zip(is_chat, prompts, parts, strict=True):
        start = [] if chat else prefix_ids[prompt.prefix]
        encoded.append(_join_parts(start, [(part, next(part_ids)) for part in prompt_parts], label_ids))
        tokenizer.check_length(len(encoded[-1].ids), 1)
    return encoded


def _join_parts(
    prefix: list[int], parts: Sequence[tuple[str, list[int]]], label_ids: Sequence[int]
) -> LabelPromptTokens:
    """Concatenate a prefix and tokenized parts, recording the position at the end of each part."""
    ids, positions = list(prefix), list[int]()
    for number, (text, tokens) in enumerate(parts):
        if number and tokens[0] not in label_ids:
            raise BadSetting(f"the label at the start of '{text[:20]}' is not a single token; choose other labels.")
        ids += tokens
        positions.append(len(ids) - 1)
    return LabelPromptTokens(ids, positions, len(prefix))


# --- shared prefixes ------------------------------------------------------------------------------


def find_common_prefix(rows: Sequence[Sequence[int]]) -> list[int]:
    """Return the tokens that all rows begin with, excluding every row's last token.

    The last token is excluded because its logits still have to be computed.
    """
    prefix = list(min(rows, key=len)[:-1])
    for row in rows:
        prefix = prefix[: count_common_tokens(prefix, row)]
    return prefix


def count_common_tokens(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the common prefix of two token sequences."""
    for index, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return index
    return min(len(first), len(second))


# --- chat turns -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class TurnTemplate:
    """The text that a chat template puts around a user message.

    Args:
        before: Text before the message.
        after: Text after the message, up to where the answer begins.
        special: Special tokens, which are escaped inside the message.
        chat: False for models without a chat template: the message stands alone, and the tokenizer adds its own
            beginning.
    """

    before: str
    after: str
    special: tuple[str, ...]
    chat: bool

    def render(self, text: str) -> str:
        """Return the whole turn for a message."""
        return f"{self.before}{escape_special_tokens(text, self.special) if self.chat else text}{self.after}"


def extract_turn_template(render: Callable[[str], str], special: Sequence[str], *, chat: bool) -> TurnTemplate:
    """Find out what a model's `render` puts around a message.

    Raises:
        BadSetting: The chat template does not contain the message exactly once.
    """
    before, placeholder, after = render(TEXT_PLACEHOLDER).partition(TEXT_PLACEHOLDER)
    if not placeholder or TEXT_PLACEHOLDER in after:
        raise BadSetting("the chat template does not contain the user message exactly once.")
    return TurnTemplate(before, after, tuple(special), chat)


def extract_plain_turn_template(
    render: Callable[[str], str], special: Sequence[str], template: str
) -> TurnTemplate | None:
    """Return a template that can replace `render` for plain text, or None if `render` depends on the text."""
    try:
        turn = extract_turn_template(render, special, chat=True)
    except BadSetting:
        return None
    return turn if CLOCK_FUNCTION not in template and turn.render(SPECIMEN_TEXT) == render(SPECIMEN_TEXT) else None


def is_plain_text(text: str) -> bool:
    """Return whether the text has no brackets or bars, so no template can find markup in it."""
    return not any(character in text for character in "<>{}[]|")


def escape_special_tokens(text: str, special_tokens: Sequence[str]) -> str:
    """Insert a space into every special token, so that user text cannot end its turn."""
    for token in special_tokens:
        text = text.replace(token, f"{token[:1]} {token[1:]}") if len(token) > 1 else text
    return text


# --- streamed text --------------------------------------------------------------------------------


@dataclass
class IncrementalDecoder:
    """Decodes the tokens of one answer while they are generated.

    A token need not hold whole characters, and spaces at both ends of an answer are stripped. So text that a later
    token may still change is held back, and the emitted pieces join to the decoded answer.

    Only a few tokens are decoded at a time: those after `settled`, preceded by those after `context`, because a
    token's leading space may depend on its neighbor.

    Args:
        tokenizer: A transformers tokenizer, or an object with the same decoding methods.
        emitted: Number of characters returned so far.
        context: Index of the first token decoded as context.
        settled: Number of tokens whose text is final.
        trailing_space: Final whitespace that is emitted only if more text follows.
    """

    tokenizer: Any
    emitted: int = 0
    context: int = 0
    settled: int = 0
    trailing_space: str = field(default="", repr=False)

    def take(self, tokens: Sequence[int]) -> str:
        """Return the text that became final, given all tokens so far; it may be empty."""
        if _rewrites_spaces(self.tokenizer) or self._ends_in_byte(tokens[self.settled :]):
            return ""
        text = self._decode(tokens[self.context :])
        settled_text = self._decode(tokens[self.context : self.settled])
        if len(text) <= len(settled_text) or text.endswith(REPLACEMENT_CHARACTER):
            return ""
        self.context, self.settled = self.settled, len(tokens)
        return self._emit(text[len(settled_text) :])

    def finish(self, text: str) -> str:
        """Return what has not been emitted of the complete answer `text`."""
        return text[self.emitted :]

    def _emit(self, text: str) -> str:
        """Return the text without trailing spaces; leading spaces of the answer are dropped."""
        pending = self.trailing_space + text
        if not self.emitted:
            pending = pending.lstrip()
        piece = pending.rstrip()
        self.trailing_space = pending[len(piece) :]
        self.emitted += len(piece)
        return piece

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def _ends_in_byte(self, tokens: Sequence[int]) -> bool:
        """Return whether the last visible token is a byte, whose text later bytes may change."""
        names = self.tokenizer.convert_ids_to_tokens(list(tokens))
        if not any(map(BYTE_TOKEN_PATTERN.fullmatch, names)):
            return False
        visible = [name for token, name in zip(tokens, names, strict=True) if not self._is_special(token)]
        return BYTE_TOKEN_PATTERN.fullmatch(visible[-1]) is not None

    def _is_special(self, token: int) -> bool:
        return self._decode([token]) != str(self.tokenizer.decode([token]))


def _rewrites_spaces(tokenizer: Any) -> bool:
    """Return whether decoding moves spaces afterwards ("do n't" -> "don't"), so no text is final before the end.

    transformers does not do this for BPE, whatever the tokenizer's settings say.
    """
    if not tokenizer.clean_up_tokenization_spaces:
        return False
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return type(getattr(backend, "model", None)).__name__ != "BPE"
