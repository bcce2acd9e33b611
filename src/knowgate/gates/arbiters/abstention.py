"""The `rules` arbiter: if the answer with passages says that it cannot tell (abstains), the closed-book answer is used.

Abstentions are recognized by English and Chinese phrases at the start of an answer. A long answer can therefore be
streamed as soon as its start is known.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from knowgate.core.files import sha256_text
from knowgate.core.text import contains_tokens, cut_answer, join_tokens, normalize, tokenize
from knowgate.core.validation import expand_path, read_text
from knowgate.errors import BadInput, BadSetting
from knowgate.types import AnswerPair, Arbiter, Belief

# Number of characters in which an abstention is looked for. Among the recorded answers of Llama-3.1-8B (2,970 training
# rows of gate_llama3_8b), those with a phrase later on mostly go on to answer; within 80 characters 151 abstain, of
# which 13 are right.
ABSTENTION_WINDOW = 80
ABSTENTION_ANSWERS = ("none", "unknown", "n/a", "null", "not applicable", "无", "未知")  # complete answers
ENGLISH_PHRASES = (
    "not available", "not mentioned", "not specified", "not provided", "not stated", "not given", "not known",
    "not clear", "unclear", "not explicitly stated", "not explicitly mentioned", "not in the text",
    "not in the passage", "not in the passages", "not in the context", "not in the provided", "not in the given",
    "not found", "not enough information", "not possible to", "no information", "no answer", "no mention",
    "does not mention", "does not say", "does not provide", "does not specify", "does not state", "does not contain",
    "doesn't mention", "doesn't say", "doesn't provide", "do not mention", "do not provide", "do not contain",
    "cannot answer", "cannot be answered", "cannot be determined", "cannot determine", "cannot provide", "cannot find",
    "can't answer", "can't determine", "can't find", "unable to",
    "I don't know", "I do not know", "insufficient information",
)  # fmt: skip
CHINESE_PHRASES = (
    "不知道", "不清楚", "不确定", "未提及", "未提到", "未说明", "未给出", "未提供", "没有提及", "没有提到",
    "没有说明", "没有给出", "没有提供", "没有相关", "没有找到", "没有信息", "无法确定", "无法回答", "无法得知",
    "没有答案", "无法判断", "无法找到", "不能确定", "信息不足",
)  # fmt: skip
ABSTENTION_REASON = "the answer with passages says it cannot tell"
OPEN_BOOK_REASON = "it is replaced only if it alone says that it cannot tell"
NEUTRAL_BELIEF = 0.5  # probability of an answer that is not judged


@dataclass(frozen=True)
class RulesArbiter(Arbiter):
    """Uses the answer without passages if only the answer with passages abstains.

    To abstain means to say "I cannot tell" or the like. No model is called.

    Attributes:
        words: Text file with one abstention phrase per line. Default: the packaged English and Chinese phrases.
        make_drafts: Whether to generate the closed-book answer for questions without a complete draft.
    """

    words: str = ""
    make_drafts: bool = False

    @property
    def name(self) -> str:
        """Name of the arbiter."""
        return "rules"

    @functools.cached_property
    def fingerprint(self) -> str:
        """Fingerprint of the phrases."""
        return sha256_text("rules", str(ABSTENTION_WINDOW), *ABSTENTION_ANSWERS, *self.phrases)[:16]

    @property
    def makes_drafts(self) -> bool:
        """Whether a closed-book answer is generated if the gate has no complete draft."""
        return self.make_drafts

    @functools.cached_property
    def phrases(self) -> tuple[str, ...]:
        """The normalized abstention phrases. Spaces around them make only whole words match."""
        phrases = _read_phrases(self.words) if self.words else (*ENGLISH_PHRASES, *CHINESE_PHRASES)
        return tuple(join_tokens(phrase) for phrase in phrases)

    def abstains(self, answer: str) -> bool:
        """Return whether an answer says "I do not know" or the like.

        Only the start of the answer is searched for phrases.
        """
        text = normalize(cut_answer(answer))
        if not text or text in NORMALIZED_ABSTENTIONS:
            return True
        start = join_tokens(answer[:ABSTENTION_WINDOW])
        return any(phrase in start for phrase in self.phrases)

    def estimate(self, answers: Sequence[AnswerPair]) -> list[Belief]:
        """Prefer the answer without passages if only the answer with passages says that it does not know.

        Otherwise, both answers get the same probability, which means to use the answer with passages.
        """
        beliefs = []
        for pair in answers:
            if self.abstains(pair.open.text) and not self.abstains(pair.closed.text):
                beliefs.append(Belief(closed=NEUTRAL_BELIEF, open=0.0, reason=ABSTENTION_REASON))
            else:
                beliefs.append(Belief(closed=NEUTRAL_BELIEF, open=NEUTRAL_BELIEF, reason=OPEN_BOOK_REASON))
        return beliefs

    def accepts_beginning(self, beginning: str) -> bool:
        """Return whether an answer with this beginning cannot be an abstention.

        Such an answer can be streamed at once. Only the window is read, because this is called for each piece of text.
        """
        return len(beginning) >= ABSTENTION_WINDOW and not self.abstains(beginning[:ABSTENTION_WINDOW])


NORMALIZED_ABSTENTIONS = frozenset(map(normalize, ABSTENTION_ANSWERS))
RULES_ARBITER = RulesArbiter()  # the default arbiter


def answers_agree(first: str, second: str) -> bool:
    """Return whether one answer contains the words of the other, in the same order."""
    first_tokens = tokenize(cut_answer(first))
    second_tokens = tokenize(cut_answer(second))
    return contains_tokens(first_tokens, second_tokens) or contains_tokens(second_tokens, first_tokens)


def answers_differ(closed_book_answer: str, open_book_answer: str) -> bool:
    """Return whether the answers without and with passages differ.

    Two answers such as "I don't know" are equal, whatever their words. A closed-book answer of this kind differs from
    every other answer. The server's audits, `calibrate` and `replay` use this comparison, so that the measured share of
    changed answers can be compared with the bound that `calibrate` records.
    """
    if RULES_ARBITER.abstains(closed_book_answer):
        return not RULES_ARBITER.abstains(open_book_answer)
    return not answers_agree(closed_book_answer, open_book_answer)


def _read_phrases(file: str) -> list[str]:
    """Read abstention phrases such as 'not mentioned' from a text file, one per line.

    Raises:
        BadSetting: The file cannot be read, or it contains no phrase.
    """
    try:
        lines = [line.strip() for line in read_text(expand_path(file)).splitlines()]
    except (OSError, BadInput) as error:
        raise BadSetting(f"cannot read the abstention phrases in the file '{file}': {error}.") from None
    phrases = [line for line in lines if normalize(line)]
    if not phrases:
        raise BadSetting(
            f"the file '{file}' contains no abstention phrases. Write one phrase per line, such as 'not mentioned'."
        )
    return phrases
