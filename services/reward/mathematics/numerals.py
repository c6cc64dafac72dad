"""Parses numbers: decimals, fractions, mixed numbers, scientific notation, and numerals with a base."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_EXPONENT = 400
"""Maximum absolute exponent of a number in scientific notation."""
MIN_ROUNDED_DECIMALS = 6
"""Minimum number of decimals of a number that may be a rounded one: 0.333333 equals 1/3."""

_SIGN = re.compile(r"([-+])\s*")
_DECIMAL = re.compile(r"\d+(?:\.(?P<decimals>\d*))?|\.(?P<only_decimals>\d+)", re.ASCII)
_SCIENTIFIC = re.compile(
    r"(?:(?P<mantissa>\d+(?:\.\d*)?|\.\d+)\s*(?:\\times|\\cdot|\*)\s*)?10\s*\^\s*"
    r"(?:\{\s*(?P<exponent>[-+]?\d{1,4})\s*\}|(?P<digit>\d)|\(\s*(?P<bracketed>-?\d{1,4})\s*\))",
    re.ASCII,
)
_PART = r"(?:\{([^{}]*)\}|(\d))"
_FRACTION = re.compile(rf"(?P<whole>\d+)?\s*\\frac\s*{_PART}\s*{_PART}", re.ASCII)
_SLASHED = re.compile(
    r"(?:(?P<whole>\d+)\s+)?(?P<over>\d+(?:\.\d+)?)\s*/\s*(?P<under>\d+(?:\.\d+)?)", re.ASCII
)

_NAMES = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
_BASES = {"sixteen": 16} | {name: base for base, name in enumerate(_NAMES, 2)}
_BASE = r"(?:\\text\s*\{)?\s*\(?\s*(?:base\s*)?\}?\s*\(?(?P<base>\d{1,2}|[a-z]+)\)?\s*\}?"
_BASED = re.compile(
    rf"\(?\s*(?P<digits>[0-9A-Z]+)\s*\)?\s*(?:_\s*\{{\s*{_BASE}\s*\}}|_\s*(?P<digit>\d)"
    r"|\\text\s*\{\s*\(?base\s*\}?\s*(?P<spoken>\d{1,2}|[a-z]+)\)?\s*\}?)",
    re.ASCII,
)


@dataclass(frozen=True)
class Number:
    """A number.

    Attributes:
        value: Exact value.
        decimals: Number of digits after the decimal point; None if it has none.
    """

    value: Fraction
    decimals: int | None = None


def read_number(text: str) -> Number | None:
    """Parses a normalised text as one number; returns None if it is anything else."""
    text = text.strip()
    if text.startswith("(") and text.endswith(")"):
        return read_number(text[1:-1])
    if match := _SIGN.match(text):
        number = read_number(text[match.end() :])
        return Number(-number.value, number.decimals) if number and match[1] == "-" else number
    if match := _DECIMAL.fullmatch(text):
        decimals = match["decimals"] or match["only_decimals"]
        return Number(_decimal(text), len(decimals) if decimals else None)
    if match := _SCIENTIFIC.fullmatch(text):
        exponent = int(match["exponent"] or match["digit"] or match["bracketed"])
        if abs(exponent) > MAX_EXPONENT:
            return None
        return Number(_decimal(match["mantissa"] or "1") * Fraction(10) ** exponent)
    if match := _FRACTION.fullmatch(text):
        over, under = (read_number(match[i] or match[i + 1] or "") for i in (2, 4))
        return _quotient(match["whole"], over, under)
    if match := _SLASHED.fullmatch(text):
        return _quotient(match["whole"], read_number(match["over"]), read_number(match["under"]))
    return None


def are_equal(left: Number, right: Number) -> bool:
    """Returns whether two numbers are equal, or one is the other rounded to `MIN_ROUNDED_DECIMALS` decimals or
    more."""
    if left.value == right.value:
        return True
    decimals = [number.decimals for number in (left, right) if number.decimals is not None]
    if not decimals or min(decimals) < MIN_ROUNDED_DECIMALS:
        return False
    return round(left.value, min(decimals)) == round(right.value, min(decimals))


def read_based(text: str) -> tuple[Fraction, int] | None:
    """Parses a numeral with a base, such as 1010_2; returns its value and its base, or None for any other text.

    Raises:
        ValueError: The base is unknown, or does not allow a digit of the numeral.
    """
    match = _BASED.fullmatch(text)
    if match is None:
        return None
    name, digits = match["base"] or match["digit"] or match["spoken"], match["digits"]
    base = int(name) if name.isdigit() else _BASES.get(name)
    if not any(digit.isdigit() for digit in digits) and not (base == 16 and len(digits) > 1):
        # A letter with an index.
        return None
    if base is None or not 2 <= base <= 36:
        raise ValueError(f"{text!r} names no base")
    return Fraction(int(digits, base)), base


def _decimal(text: str) -> Fraction:
    return Fraction(text.rstrip(".") if text != "." else "0")


def _quotient(whole: str | None, over: Number | None, under: Number | None) -> Number | None:
    if over is None or under is None or not under.value:
        return None
    return Number(int(whole or 0) + over.value / under.value)
