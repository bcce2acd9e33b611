"""Parse what data files record about an answer: its grade, log-probabilities, passages, tokens and seconds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from knowgate.core.validation import format_value
from knowgate.data.questions.records import extract_text, find_field
from knowgate.errors import BadInput, ModelError
from knowgate.models.openai.responses import parse_logprobs
from knowgate.types import Passage, Token

RIGHT_WORDS = frozenset({"true", "yes", "1", "right", "correct", "pass", "passed", "thumbs_up", "up", "positive", "👍"})
WRONG_WORDS = frozenset(
    {"false", "no", "0", "-1", "wrong", "incorrect", "fail", "failed", "thumbs_down", "down", "negative", "👎"}
)
PROMPT_TOKEN_FIELDS = ("prompt_tokens", "input_tokens", "promptTokens", "input")
ANSWER_TOKEN_FIELDS = ("completion_tokens", "output_tokens", "completionTokens", "output")
PASSAGE_TEXT_FIELDS = ("text", "content", "page_content", "document.content", "body", "snippet")
PASSAGE_TITLE_FIELDS = ("title", "metadata.title", "name")


def get_field(meta: Mapping[str, Any], extra: Mapping[str, Any], key: str) -> Any:
    """Return a recorded field of a question; None if it is missing.

    Args:
        meta: The `meta` of the question, which is searched first.
        extra: Other fields at the top level of its record.
        key: Name or dotted path, such as 'correct.nor' or 'meta.correct.nor'.
    """
    value = find_field(meta, key)
    return find_field({**extra, "meta": meta}, key) if value is None else value


def parse_grade(value: Any, pass_score: float | None, where: str) -> bool | None:
    """Parse a recorded grade.

    Args:
        value: A boolean, 0 or 1, a word such as 'correct' or 'thumbs_down', or a score. None means not graded.
        pass_score: Scores of at least this value are right; None if the grades are not scores.
        where: The field and the question, for errors.

    Raises:
        BadInput: The value is not a grade, or it is a score and `pass_score` is not given.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        word = value.strip().lower()
        if not word:
            return None
        if pass_score is None and word in RIGHT_WORDS | WRONG_WORDS:
            return word in RIGHT_WORDS
    try:
        score = float(value)
    except (TypeError, ValueError):
        score = math.nan
    if math.isnan(score):
        raise BadInput(f"{where} is {format_value(value)}, which is not a grade. Write true, false, 0, 1 or a score.")
    if pass_score is not None:
        return score >= pass_score
    if score not in (-1, 0, 1):
        raise BadInput(f"{where} is the score {score:g}. Set `pass_score`: scores of at least that value are right.")
    return score == 1


def parse_tokens(value: Any, where: str) -> tuple[Token, ...] | None:
    """Parse recorded log-probabilities of an answer.

    Args:
        value: The field `logprobs` of an OpenAI response, a list of objects with `token`, `logprob` and the most
            probable tokens (`top_logprobs` or `top`), or a list of log-probabilities. None means not recorded.
        where: The field and the question, for errors.

    Raises:
        BadInput: The value has another format.
    """
    if value is None:
        return None
    try:
        content = [_make_chat_token(item) for item in value] if isinstance(value, list) else None
        tokens = parse_logprobs(value if content is None else {"content": content})
    except (ModelError, KeyError, TypeError, ValueError):
        tokens = None
    if tokens is None:
        raise BadInput(
            f"{where} is {format_value(value)}, not a list of log-probabilities. Write one object per token: "
            '{"token": "Paris", "logprob": -0.1}'
        )
    return tuple(item.as_token() for item in tokens) or None


def _make_chat_token(item: Any) -> dict[str, Any]:
    """Convert a token to the format of chat responses; a bare number is a token without text."""
    if not isinstance(item, Mapping):
        return {"token": "", "logprob": item}
    top = item.get("top_logprobs") or item.get("top") or ()
    pairs = top.items() if isinstance(top, Mapping) else top
    listed = [pair if isinstance(pair, Mapping) else {"token": pair[0], "logprob": pair[1]} for pair in pairs]
    return {"token": item.get("token", ""), "logprob": item["logprob"], "top_logprobs": listed}


def parse_passages(value: Any) -> tuple[Passage, ...]:
    """Parse recorded passages: a text, or a list of texts or of objects with a text and perhaps `id` and `title`.

    Entries without a text are left out.
    """
    items = value if isinstance(value, list) else [] if value is None else [value]
    passages = [_parse_passage(item, number) for number, item in enumerate(items)]
    return tuple(passage for passage in passages if passage.text.strip())


def _parse_passage(item: Any, number: int) -> Passage:
    if not isinstance(item, Mapping):
        return Passage(str(number), item if isinstance(item, str) else "")
    texts = (extract_text(find_field(item, name)) for name in PASSAGE_TEXT_FIELDS)
    titles = (extract_text(find_field(item, name)) for name in PASSAGE_TITLE_FIELDS)
    return Passage(str(item.get("id", number)), next(filter(None, texts), ""), next(filter(None, titles), ""))


def parse_token_counts(value: Any, where: str) -> tuple[int | None, int | None]:
    """Parse how many tokens an answer took.

    Args:
        value: The number of generated tokens, or an object such as OpenAI's `usage`. None means not recorded.
        where: The field and the question, for errors.

    Returns:
        The number of prompt tokens and of generated tokens; None where unknown.
    """
    if not isinstance(value, Mapping):
        return None, _parse_count(value, where)
    prompt, answer = (
        next((value[name] for name in names if value.get(name) is not None), None)
        for names in (PROMPT_TOKEN_FIELDS, ANSWER_TOKEN_FIELDS)
    )
    return _parse_count(prompt, where), _parse_count(answer, where)


def _parse_count(value: Any, where: str) -> int | None:
    number = parse_amount(value, where)
    return None if number is None else round(number)


def parse_amount(value: Any, where: str) -> float | None:
    """Parse a number of at least 0; None and empty texts mean not recorded. Raises BadInput for other values."""
    if value is None or value == "":
        return None
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise BadInput(f"{where} is {format_value(value)}, not a number of at least 0. Correct it, or remove it.")
    return number
