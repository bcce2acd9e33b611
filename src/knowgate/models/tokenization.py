"""Convert text to tokens and back, for models that run in this process.

Covers label prompts, prefixes that prompts share, chat templates and streamed text. The backend provides the tokenizer
itself. This module does not need torch.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from knowgate.errors import BadSetting
from knowgate.types import Vector

REPLACEMENT_CHARACTER = "\ufffd"  # what decoders write for an incomplete character
BYTE_TOKEN_PATTERN = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # tokenizers without a token for a character spell its bytes
TEXT_PLACEHOLDER = "KNOWGATE-TEXT"  # stands for the message when a chat template is examined
# Message to test a chat template with. It contains line breaks and outer spaces, which some templates strip.
SPECIMEN_TEXT = f'\n {TEXT_PLACEHOLDER}: one, two?\n\n  three (3.5) - "four"\nfive\'s \n'
CLOCK_FUNCTION = "strftime_now"  # called by templates that print the date


# --- label prompts --------------------------------------------------------------------------------


@dataclass(frozen=True)
class LabelPromptTokens:
    """Token ids of a label prompt. The LLM predicts labels, such as 'true', inside it.

    Args:
        ids: The tokens of the whole prompt.
        positions: Indices of the tokens after which the LLM predicts a label.
        prefix: Number of tokens at the start of the prompt that many prompts share.
    """

    ids: list[int]
    positions: list[int]
    prefix: int = 0

    @property
    def columns(self) -> list[int]:
        """The label positions counted from the end, as in a batch with padding on the left."""
        return [position - len(self.ids) for position in self.positions]


def encode_labels(tokenize: Callable[[str], Sequence[int]], labels: Sequence[str]) -> list[int]:
    """Return the first token of each label, such as 'true' or 'false'.

    Args:
        tokenize: Returns the token ids of a text.
        labels: The labels.

    Raises:
        BadSetting: Two labels begin with the same token, or a label is empty.
    """
    first_tokens: list[int] = []
    for label in labels:
        tokens = tokenize(label) if label else ()
        if not tokens or tokens[0] in first_tokens:
            raise BadSetting(f"the labels {', '.join(map(repr, labels))} begin alike or are empty. Use other labels.")
        first_tokens.append(tokens[0])
    return first_tokens


def join_label_parts(
    prefix: Sequence[int], parts: Sequence[Sequence[int]], label_ids: Sequence[int]
) -> LabelPromptTokens:
    r"""Join the tokens of the parts of a label prompt, and note where each part ends.

    Every later part begins with a label, which answers the question before it. Example of parts: 'Is 1 odd?',
    ' true\nIs 2 odd?'. `label_ids` are the first tokens of the labels.

    Raises:
        BadSetting: A later part does not begin with a label.
    """
    ids = list(prefix)
    positions: list[int] = []
    for number, tokens in enumerate(parts):
        if number and (not tokens or tokens[0] not in label_ids):
            raise BadSetting(
                f"part {number + 1} of the prompt does not start with one of the labels. Choose other labels."
            )
        ids += tokens
        positions.append(len(ids) - 1)
    return LabelPromptTokens(ids, positions, len(prefix))


def split_positions(values: Vector, prompts: Sequence[LabelPromptTokens]) -> list[Vector]:
    """Split values for the label positions of all prompts into one array per prompt.

    Args:
        values: One row per label position. The positions of the first prompt come first.
        prompts: The prompts.
    """
    if not prompts:
        return []
    ends = np.cumsum([len(prompt.positions) for prompt in prompts])
    return [rows.copy() for rows in np.split(values, ends[:-1])]


# --- shared prefixes ------------------------------------------------------------------------------


def find_common_prefix(rows: Sequence[Sequence[int]]) -> list[int]:
    """Return the tokens that all prompts begin with.

    The last token of a prompt never counts as shared.
    """
    shared = os.path.commonprefix([list(row) for row in rows])  # noqa: RUF071 - these are tokens, not paths
    return list(shared)[: min(map(len, rows)) - 1]


def count_common_tokens(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the common prefix of two token sequences."""
    return len(os.path.commonprefix([list(first), list(second)]))  # noqa: RUF071 - these are tokens, not paths


# --- chat turns -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class TurnTemplate:
    """The text that a model's chat template puts before and after a user message.

    Args:
        before: Text before the message.
        after: Text after the message, up to where the answer begins.
        special: Special tokens such as '<|im_end|>'. They are escaped if they occur in the message.
        chat: Whether the model has a chat template. Without one, messages are not escaped, and the tokenizer itself adds
            the special tokens at the start of a text.
    """

    before: str
    after: str
    special: tuple[str, ...]
    chat: bool

    def render(self, text: str) -> str:
        """Return the message inside the chat template."""
        message = escape_special_tokens(text, self.special) if self.chat else text
        return f"{self.before}{message}{self.after}"


def extract_turn_template(render: Callable[[str], str], special: Sequence[str], *, chat: bool) -> TurnTemplate:
    """Find out what text a chat template puts before and after a message.

    Args:
        render: Applies the model's chat template to a message.
        special: The model's special tokens.
        chat: Whether the model has a chat template.

    Raises:
        BadSetting: The rendered template does not contain the message exactly once.
    """
    before, placeholder, after = render(TEXT_PLACEHOLDER).partition(TEXT_PLACEHOLDER)
    if not placeholder or TEXT_PLACEHOLDER in after:
        raise BadSetting("the model's chat template does not contain the user message exactly once. Use another model.")
    return TurnTemplate(before, after, tuple(special), chat)


def extract_fast_template(render: Callable[[str], str], special: Sequence[str], template: str) -> TurnTemplate | None:
    """Find the fixed texts that a chat template puts around a message. Adding them is faster than rendering the template.

    They suit only messages for which `is_plain_text` is true, because a template may change markup in messages.

    Args:
        render: Applies the chat template to a message.
        special: The model's special tokens.
        template: Source of the chat template.

    Returns:
        The two texts. None if the template changes plain messages or prints the current date.
    """
    try:
        turn = extract_turn_template(render, special, chat=True)
    except BadSetting:
        return None
    prints_date = CLOCK_FUNCTION in template
    changes_message = turn.render(SPECIMEN_TEXT) != render(SPECIMEN_TEXT)
    return None if prints_date or changes_message else turn


def is_plain_text(text: str) -> bool:
    """Return whether the text has no brackets, braces or bars, so that a chat template cannot find markup in it."""
    return not any(character in text for character in "<>{}[]|")


def escape_special_tokens(text: str, special_tokens: Sequence[str]) -> str:
    """Insert a space into every special token in a text.

    So user text cannot end its own chat message.
    """
    for token in special_tokens:
        if len(token) > 1:
            text = text.replace(token, f"{token[0]} {token[1:]}")
    return text


# --- decoding --------------------------------------------------------------------------------


def decode_all(tokenizer: Any, rows: Sequence[Sequence[int]]) -> list[str]:
    """Return the texts of many answers, without special tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or _rewrites_spaces(tokenizer):
        return [str(tokenizer.decode(row, skip_special_tokens=True)) for row in rows]
    return list(backend.decode_batch(rows, skip_special_tokens=True))


@dataclass
class IncrementalDecoder:
    """Decodes the tokens of one answer to text while they are generated.

    A token may end inside a character. Then its text is held back until later tokens complete the character.

    Args:
        tokenizer: A transformers tokenizer, or an object with the same decoding methods.
        emitted: Number of characters returned so far.
    """

    tokenizer: Any
    emitted: int = 0

    def take(self, tokens: Sequence[int]) -> str:
        """Return the text that was added to the answer since the last call.

        Args:
            tokens: All tokens of the answer so far.

        Returns:
            The new text, or '' while later tokens may still change it.
        """
        # Later tokens may still change the spaces, or complete the character.
        if _rewrites_spaces(self.tokenizer) or self._ends_in_byte(tokens):
            return ""
        text = self._decode(tokens)
        if text.endswith(REPLACEMENT_CHARACTER):  # it stands for a character that is still incomplete
            return ""
        piece = text.strip()[self.emitted :]
        self.emitted += len(piece)
        return piece

    def finish(self, text: str) -> str:
        """Return the part of the complete answer `text` that `take` has not returned yet."""
        return text[self.emitted :]

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def _ends_in_byte(self, tokens: Sequence[int]) -> bool:
        """Return whether the last visible token stands for a single byte, such as '<0xE4>'."""
        for token in reversed(tokens):
            [name] = self.tokenizer.convert_ids_to_tokens([token])
            if BYTE_TOKEN_PATTERN.fullmatch(name):
                return True
            if self._decode([token]):  # the token is visible
                return False
        return False


def _rewrites_spaces(tokenizer: Any) -> bool:
    """Return whether the tokenizer removes spaces from decoded text.

    Example: "do n't" becomes "don't".
    """
    if not tokenizer.clean_up_tokenization_spaces:
        return False
    backend = getattr(tokenizer, "backend_tokenizer", None)
    # transformers ignores the setting for BPE tokenizers.
    return type(getattr(backend, "model", None)).__name__ != "BPE"
