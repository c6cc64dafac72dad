"""Reward functions that check the final number of a response (GSM8K), its form, or its length. Their keyword
arguments are the `options` of the config."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

ANSWER_MARK = "####"
"""Mark before the final answer of a GSM8K solution (Cobbe et al. 2021)."""

MAX_NUMBER = 100
"""Maximum number of characters of a number, since reading takes quadratic time; no real answer is longer."""

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
_NUMBER = re.compile(
    rf"""
    (?: (?<![\w.,/)}}]) (?P<minus>-) )?         # 10-3 is no negative number
    (?: \$ (?P<late_minus>-)? )? (?<![\w.,/]) (?<!\d[eE][-+])
    (?: (?P<whole>\d+) [ ] (?P<over>\d+)/(?P<under>\d+)
      | (?P<decimal> {_DIGITS}(?:\.\d+)? | \.\d+ ) (?: \s?/\s?(?P<divisor>{_DIGITS}) )?
    )
    (?! [.,/]?\d | [eE][-+]?\d )                # neither 1.000.000 nor 3/4/2020 nor 1e3
    """,
    re.VERBOSE | re.ASCII,
)
_SPACED_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?: \d{3})+(?![\d/])", re.ASCII)
_THIN_SPACE = re.compile(
    r"(?<=\d)(?:\{,\}|\\,|[\N{NO-BREAK SPACE}\N{THIN SPACE}\N{NARROW NO-BREAK SPACE}])(?=\d{3}(?!\d))"
)
"""Matches separators of thousands other than a comma."""


def gsm8k(
    prompt: str, response: str, ground_truth: str, metadata: Mapping[str, Any], *, mode: str = "strict"
) -> float:
    """Returns 1 if the final number of the response equals that of the ground truth, else 0.

    Numbers are compared exactly: 1,234.50 equals 1234.5, and 1/2 equals 0.5. Currency signs and units are ignored:
    50% equals 50.

    Args:
        prompt, metadata: Not used.
        response: The response.
        ground_truth: A number, or a whole solution that ends with "#### number".
        mode: "strict" (default) takes the only number in the first line after the last "####" of the response;
            "flexible" takes the last number of the response.

    Raises:
        ValueError: The ground truth has no number, or the mode is unknown.
    """
    expected = last_number(_as_one_number(ground_truth.rpartition(ANSWER_MARK)[2]))
    if expected is None:
        raise ValueError(f"the ground truth has no number: {ground_truth[-80:]!r}")
    if mode == "strict":
        found = marked_number(response)
    elif mode == "flexible":
        found = last_number(response)
    else:
        raise ValueError(f"mode {mode!r} is neither strict nor flexible")
    return float(found == expected)


def marked_number(text: str) -> Fraction | None:
    """Returns the only number in the first non-empty line after the last "####"; None if there is none, or
    several."""
    _, mark, rest = text.rpartition(ANSWER_MARK)
    lines = rest.strip().splitlines()
    if not mark or not lines:
        return None
    numbers = _numbers(_as_one_number(lines[0]))
    return numbers[0] if len(numbers) == 1 else None


def _as_one_number(text: str) -> str:
    """Returns a text without the spaces inside its numbers, so that "- 5" becomes "-5" and "1 000" becomes "1000"."""
    text = re.sub(r"^\s*([-\N{MINUS SIGN}])\s+(?=[\d.$])", r"\1", text)
    return _SPACED_THOUSANDS.sub(lambda match: match[0].replace(" ", ""), text)


def last_number(text: str) -> Fraction | None:
    """Returns the last number in a text; None if there is none, or it cannot be read."""
    numbers = _numbers(text)
    return numbers[-1] if numbers else None


def _numbers(text: str) -> list[Fraction | None]:
    """Returns the numbers in a text, with None for each that is too long or is divided by zero."""
    text = _THIN_SPACE.sub("", text.replace("\N{MINUS SIGN}", "-"))
    return [_value(match) for match in _NUMBER.finditer(text)]


def _value(match: re.Match[str]) -> Fraction | None:
    if len(match.group()) > MAX_NUMBER:
        return None
    whole, over, under, decimal, divisor = match.group("whole", "over", "under", "decimal", "divisor")
    try:
        if whole:
            value = Fraction(whole) + Fraction(int(over), int(under))
        else:
            value = Fraction(decimal.replace(",", "")) / Fraction((divisor or "1").replace(",", ""))
    except ZeroDivisionError:
        return None
    return -value if match["minus"] or match["late_minus"] else value


def form(
    prompt: str,
    response: str,
    ground_truth: str,
    metadata: Mapping[str, Any],
    *,
    pattern: str = r"<think>.+?</think>\s*\S.*",
) -> float:
    """Returns 1 if the whole response, stripped of whitespace at both ends, matches a regular expression, else 0.

    Args:
        prompt, ground_truth, metadata: Not used.
        response: The response.
        pattern: The regular expression, in which a dot also matches newlines. Default: "<think>...</think>" and then
            an answer.
    """
    return float(re.fullmatch(pattern, response.strip(), re.DOTALL) is not None)


def length(
    prompt: str,
    response: str,
    ground_truth: str,
    metadata: Mapping[str, Any],
    *,
    limit: int = 1000,
    fade: int = 0,
) -> float:
    """Returns 1 for a response of at most `limit` characters; beyond, the score falls linearly to 0 over `fade`
    characters.

    Args:
        prompt, ground_truth, metadata: Not used.
        response: The response.
        limit: Number of characters. Default: 1000.
        fade: Number of characters. Default 0: a longer response scores 0.
    """
    excess = len(response) - limit
    return 1.0 if excess <= 0 else max(1.0 - excess / fade, 0.0) if fade else 0.0
