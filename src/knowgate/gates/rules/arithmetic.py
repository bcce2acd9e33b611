"""Compute the arithmetic that the routing rule `arithmetic` recognizes. LLMs often get it wrong: 17 x 23 came out as 349."""

from __future__ import annotations

import re
from fractions import Fraction

ARITHMETIC_RULE = "arithmetic"
MAX_CHARACTERS = 200
MAX_EXPONENT = 64
MAX_DIGITS = 40  # of a number in the question, and of an intermediate result
SIGNIFICANT_DIGITS = 10  # of a result that is not a whole number
OPERATOR_WORDS = {
    "plus": "+", "minus": "-", "times": "*", "multiplied by": "*", "divided by": "/", "to the power of": "^",
    "加上": "+", "加": "+", "减去": "-", "减": "-", "乘以": "*", "乘": "*", "除以": "/", "×": "*", "÷": "/", "x": "*",
}  # fmt: skip
OPERATOR_WORD = re.compile("|".join(sorted(map(re.escape, OPERATOR_WORDS), key=len, reverse=True)))
NUMBER = r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?"  # with or without commas between thousands
EXPRESSION = re.compile(rf"[-+(]*(?:{NUMBER})(?:[-+*/^()]|{NUMBER})*")
TOKEN = re.compile(rf"{NUMBER}|[-+*/^()]")


def compute_arithmetic(question: str) -> str | None:
    """Compute the expression in a question such as "What is 17 x 23?".

    Returns:
        The result as text, or None if the question holds no single expression that can be computed exactly within the
        limits, for example because it divides by zero.
    """
    if len(question) > MAX_CHARACTERS or "%" in question:  # percentages are not computed
        return None
    text = OPERATOR_WORD.sub(lambda match: OPERATOR_WORDS[match[0]], question.lower())
    without_spaces = re.sub(r"(?<=[\d)+*/^(-])\s+(?=[\d(+*/^)-])", "", text)  # between numbers and operators only
    expressions = EXPRESSION.findall(without_spaces)
    if len(expressions) != 1:
        return None
    try:
        return _format(_Parser(TOKEN.findall(expressions[0])).parse())
    except (ArithmeticError, ValueError, IndexError):
        return None


class _Parser:
    """Parses and computes a list of tokens by precedence: sums, products, signs, powers, parentheses."""

    def __init__(self, tokens: list[str]):
        self._tokens = tokens[::-1]  # the next token is the last of this list, so that pop() takes it

    def parse(self) -> Fraction:
        """Compute the whole expression; raise ValueError if tokens are left after its end."""
        value = self._sum()
        if self._tokens:
            raise ValueError("there is more text after the expression")
        return value

    def _next_is(self, operators: str) -> bool:
        return bool(self._tokens) and self._tokens[-1] in operators

    def _sum(self) -> Fraction:
        value = self._product()
        while self._next_is("+-"):
            sign = 1 if self._tokens.pop() == "+" else -1
            value += sign * self._product()
        return value

    def _product(self) -> Fraction:
        value = self._signed()
        while self._next_is("*/"):
            operator, factor = self._tokens.pop(), self._signed()
            value = value * factor if operator == "*" else value / factor
        return _check_size(value)

    def _signed(self) -> Fraction:
        if self._next_is("+-"):
            return self._signed() if self._tokens.pop() == "+" else -self._signed()
        base = self._operand()
        if not self._next_is("^"):
            return base
        self._tokens.pop()
        exponent = self._signed()
        if exponent.denominator != 1 or abs(exponent) > MAX_EXPONENT:
            raise ValueError("the exponent is too large or not a whole number")
        return _check_size(base ** int(exponent))

    def _operand(self) -> Fraction:
        token = self._tokens.pop()
        if token == "(":
            value = self._sum()
            if self._tokens.pop() != ")":
                raise ValueError("a parenthesis is not closed")
            return value
        return _check_size(Fraction(token.replace(",", "")))


def _check_size(value: Fraction) -> Fraction:
    """Raise ValueError if a number has too many digits to be computed quickly."""
    if max(abs(value.numerator), value.denominator) >= 10**MAX_DIGITS:
        raise ValueError("the number has too many digits")
    return value


def _format(value: Fraction) -> str:
    """Format a result: whole numbers exactly, others rounded to ten significant digits."""
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.{SIGNIFICANT_DIGITS}g}"
