"""Compute the arithmetic that the routing rule `arithmetic` recognizes. LLMs often get it wrong: 17 x 23 came out as 349."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
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
INNER_SPACE = re.compile(r"(?<=[\d)+*/^(-])\s+(?=[\d(+*/^)-])")  # between numbers, operators and parentheses
LEADING_ZEROS = re.compile(r"(?<![\d.])0+(?=\d)")
EXPRESSION = re.compile(rf"[-+(]*(?:{NUMBER})(?:[-+*/^()]|{NUMBER})*")
OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def compute_arithmetic(question: str) -> str | None:
    """Compute the expression in a question such as "What is 17 x 23?".

    Returns:
        The result as text, or None if the question holds no single expression that can be computed exactly within the
        limits, for example because it divides by zero.
    """
    if len(question) > MAX_CHARACTERS or "%" in question:  # percentages are not computed
        return None
    text = OPERATOR_WORD.sub(lambda match: OPERATOR_WORDS[match[0]], question.lower())
    expressions = EXPRESSION.findall(INNER_SPACE.sub("", text))
    if len(expressions) != 1:
        return None
    # Python's own parser knows the precedence of operators. It accepts neither commas nor leading zeros in numbers.
    source = LEADING_ZEROS.sub("", expressions[0].replace(",", "").replace("^", "**"))
    try:
        return _format(_compute(ast.parse(source, mode="eval").body, source))
    except (ArithmeticError, ValueError, SyntaxError, LookupError, RecursionError, MemoryError):
        return None


def _compute(node: ast.expr, source: str) -> Fraction:
    """Compute the value of an arithmetic expression exactly, as a fraction.

    Args:
        node: The expression, parsed by Python.
        source: The text that was parsed. Numbers are read from it, because the parser rounds decimals.

    Raises:
        ValueError: The expression has something else than numbers and operators, or a number is too large.
        KeyError: The operator is unknown.
    """
    if isinstance(node, ast.Constant):
        value = Fraction(ast.get_source_segment(source, node) or "")
    elif isinstance(node, ast.UnaryOp):
        operand = _compute(node.operand, source)
        value = -operand if isinstance(node.op, ast.USub) else operand
    elif isinstance(node, ast.BinOp):
        operate = _raise_to_power if isinstance(node.op, ast.Pow) else OPERATIONS[type(node.op)]
        value = operate(_compute(node.left, source), _compute(node.right, source))
    else:
        raise ValueError("not arithmetic")
    if max(abs(value.numerator), value.denominator) >= 10**MAX_DIGITS:
        raise ValueError("the number has too many digits")
    return value


def _raise_to_power(base: Fraction, exponent: Fraction) -> Fraction:
    """Raise a number to a power. Large or fractional exponents raise ValueError."""
    if exponent.denominator != 1 or abs(exponent) > MAX_EXPONENT:
        raise ValueError("the exponent is too large or not a whole number")
    return base ** int(exponent)


def _format(value: Fraction) -> str:
    """Format a result: whole numbers exactly, others rounded to ten significant digits."""
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.{SIGNIFICANT_DIGITS}g}"
