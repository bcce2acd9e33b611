"""Rules that need no training: an answer with passages that says it cannot tell gives way to the answer from memory.

Knows how LLMs abstain, in English and Chinese; not whether an answer is right. An answer abstains by how it begins, so
that long answers can be streamed once their beginning is known.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from knowgate.core.files import sha256_text
from knowgate.core.text import join_tokens, normalize
from knowgate.core.validation import expand_path, read_text
from knowgate.errors import BadInput, BadSetting
from knowgate.types import AnswerPair, Arbiter, Belief

# Characters within which an answer abstains. Of the recorded answers of Llama-3.1-8B (2,970 train rows of
# gate_llama3_8b) those that say so later mostly go on to answer; within 80, 151 abstain, 13 of them are right.
ABSTENTION_WINDOW = 80
ABSTENTION_ANSWERS = ("none", "unknown", "n/a", "null", "not applicable", "无", "未知")  # nothing else is said
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
NEUTRAL_BELIEF = 0.5  # how probably an answer is right of which the rules know nothing


@dataclass(frozen=True)
class RulesArbiter(Arbiter):
    """Takes the answer from memory where the answer with passages abstains and the one from memory does not.

    Costs nothing: no model is asked. By default it goes by drafts that the gate has read anyhow.
    words: text file with one phrase a line, in the place of the packaged ones (English and Chinese).
    make_drafts: also answer from memory where the gate reads no whole draft.
    """

    words: str = ""
    make_drafts: bool = False

    @property
    def name(self) -> str:
        return "rules"

    @functools.cached_property
    def fingerprint(self) -> str:
        return sha256_text("rules", str(ABSTENTION_WINDOW), *ABSTENTION_ANSWERS, *self.phrases)[:16]

    @property
    def makes_drafts(self) -> bool:
        return self.make_drafts

    @functools.cached_property
    def phrases(self) -> tuple[str, ...]:
        """What an answer that abstains says, each as words between spaces."""
        said = _read(self.words) if self.words else (*ENGLISH_PHRASES, *CHINESE_PHRASES)
        return tuple(join_tokens(phrase) for phrase in said)

    def abstains(self, answer: str) -> bool:
        """An answer that says it cannot tell, or nothing at all."""
        text = normalize(answer)
        if not text or text in NORMALIZED_ABSTENTIONS:
            return True
        beginning = join_tokens(answer[:ABSTENTION_WINDOW])
        return any(phrase in beginning for phrase in self.phrases)

    def estimate(self, answers: Sequence[AnswerPair]) -> list[Belief]:
        return [self._belief(both) for both in answers]

    def _belief(self, both: AnswerPair) -> Belief:
        if self.abstains(both.open.text) and not self.abstains(both.closed.text):
            return Belief(NEUTRAL_BELIEF, 0.0, ABSTENTION_REASON)
        return Belief(NEUTRAL_BELIEF, NEUTRAL_BELIEF)

    def accepts_beginning(self, beginning: str) -> bool:
        return len(beginning) >= ABSTENTION_WINDOW and not self.abstains(beginning)


NORMALIZED_ABSTENTIONS = frozenset(map(normalize, ABSTENTION_ANSWERS))
RULES_ARBITER = RulesArbiter()  # on by default


def _read(file: str) -> list[str]:
    path = expand_path(file)
    try:
        phrases = [line.strip() for line in read_text(path).splitlines()]
    except (OSError, BadInput) as error:
        raise BadSetting(f"the phrases of the rules cannot be read from '{file}': {error}.") from None
    kept = [phrase for phrase in phrases if normalize(phrase)]
    if not kept:
        raise BadSetting(f"'{file}' holds no phrase: write one a line, as 'not mentioned'.")
    return kept
