r"""Parses units of measure, currencies, degrees and percentages at the end of an answer (currencies also before
it)."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Unit:
    """A unit of measure, such as km/h.

    Attributes:
        factor: Size of the unit in its base units: 1000/3600 for km/h.
        dimensions: Base units with their powers, sorted: (("m", 1), ("s", -1)) for km/h.
    """

    factor: Fraction
    dimensions: tuple[tuple[str, int], ...]


def _table() -> dict[str, tuple[str, Fraction]]:
    """Returns (base unit, size in base units) by name of the unit."""
    rows = """
        m: m meter metre | mm 1/1000 millimeter millimetre | cm 1/100 centimeter centimetre | dm 1/10 decimeter
         | km 1000 kilometer kilometre | in 254/10000 inch | ft 3048/10000 foot feet | yd 9144/10000 yard
         | mi 1609344/1000 mile
        g: g gram gm | mg 1/1000 milligram | kg 1000 kilogram | lb 45359237/100000 pound | oz 45359237/1600000 ounce
        s: s sec second | ms 1/1000 millisecond | min 60 minute | h 3600 hr hour | day 86400 | week 604800
        month: month
        year: yr year | decade 10 | century 100 centurie
        dollar: dollar USD buck | cent 1/100 penny pennie
        euro: euro EUR
        sterling: GBP
        yen: yen JPY
        rupee: rupee Rs INR
        percent: percent percentage pct
        degree: degree deg
        C: celsius
        F: fahrenheit
        N: N newton
        J: J joule
        W: W watt
        V: V volt
        A: A amp ampere
        K: K kelvin
        Pa: Pa pascal
        Hz: Hz hertz
        mol: mol mole
    """
    found = {}
    for row in rows.strip().replace("\n         |", " |").splitlines():
        base, _, names = row.strip().partition(":")
        for group in names.split("|"):
            words = group.split()
            sizes = [word for word in words if word[0].isdigit()]
            size = Fraction(sizes[0]) if sizes else Fraction(1)
            found |= {word: (base, size) for word in words if not word[0].isdigit()}
    return found


_UNITS = _table()
_PER_LITRE = {
    "l": 1,
    "L": 1,
    "liter": 1,
    "litre": 1,
    "ml": 1000,
    "mL": 1000,
    "milliliter": 1000,
    "millilitre": 1000,
}
_SHORT = {"mph": "mile/hour", "kmh": "km/h", "kph": "km/h", "kmph": "km/h", "inches": "inch", "cc": "cm^3"}
_PREFIXES = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_TOKEN = re.compile(r"\s*(?:(?P<name>[A-Za-z]+)\.?|(?P<power>\^\s*\{?\s*(-?\d)\s*\}?)|(?P<sign>/|\\cdot|\*))")

_SIGNS = {r"\$": "dollar", "€": "euro", "£": "GBP", "¥": "yen", "₹": "rupee"}
_SIGN = r"\\\$|[€£¥₹]"
_CURRENCY_FIRST = re.compile(rf"(?P<minus>-?)\s*(?:US\s*)?(?P<sign>{_SIGN})\s*(?P<number>\S.*)")
_CURRENCY_LAST = re.compile(rf"(?P<number>.*\d)\s*(?P<sign>{_SIGN})")
_PERCENT = re.compile(r"(?P<number>.*[\d})])\s*%")
_DEGREES = re.compile(r"(?P<number>.*[\w})])\s*\^\\circ\s*(?:(?:\\text\s*\{\s*)?(?P<scale>[CF])\s*\}?)?")
_TEXT = r"\\text\s*\{[^{}]*\}(?:\s*\^\s*(?:\{\s*-?\d\s*\}|\d))?"
_TEXT_LAST = re.compile(rf"(?P<number>.*?\S)\s*(?P<unit>{_TEXT}(?:\s*(?:/|\\cdot)?\s*{_TEXT})*)")
_RATIO_LAST = re.compile(
    r"(?P<number>.*\S)\s*\\frac\s*\{\s*\\text\s*\{(?P<over>[^{}]*)\}\s*\}\s*\{\s*\\text\s*\{(?P<under>[^{}]*)\}\s*\}"
)
_WORDS_LAST = re.compile(r"(?P<number>.*[\d})])\s+(?P<unit>[A-Za-z]{2}[A-Za-z]*(?:[ ./^]+\w+)*)")
_OPEN_END = re.compile(
    r"(?:[-+*/=<>,^_(\[|]|\\(?:cdot|times|div|le|ge|ne|in|cup|cap|pm|sqrt|frac|sin|cos|tan|log|ln))\s*$"
)
_NO_UNITS = frozenset({"and", "or", "pi", "mod", "if", "for", "sin", "cos", "tan", "log", "ln"})


def split_unit(text: str) -> tuple[str, Unit | None]:
    r"""Splits an answer into its text without the unit, and the unit, or None. Removes other words at its end too:
    5\text{ apples} becomes 5."""
    if match := _CURRENCY_FIRST.fullmatch(text):
        return match["minus"] + split_unit(match["number"])[0], parse_unit(_SIGNS[match["sign"]])
    if match := _CURRENCY_LAST.fullmatch(text):
        return match["number"], parse_unit(_SIGNS[match["sign"]])
    if match := _PERCENT.fullmatch(text):
        return match["number"], parse_unit("percent")
    if not is_trigonometric(text) and (match := _DEGREES.fullmatch(text)):
        return match["number"].replace(r"^\circ", ""), parse_unit(
            {"C": "celsius", "F": "fahrenheit"}.get(match["scale"], "degree")
        )
    for number, words, is_sure in _last_words(text):
        if _OPEN_END.search(number):
            continue
        unit = parse_unit(words) or parse_unit(words.split()[0] if words.split() else "")
        if unit or is_sure or all(len(word) > 2 for word in words.split()):
            return number, unit
    return text, None


def _last_words(text: str) -> list[tuple[str, str, bool]]:
    """Finds words at the end of an answer; returns no or one tuple of the text before them, the words, and whether
    they are certainly no mathematics."""
    if match := _RATIO_LAST.fullmatch(text):
        return [(match["number"], f"{match['over']}/{match['under']}", True)]
    if match := _TEXT_LAST.fullmatch(text):
        return [(match["number"], re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", match["unit"]).strip(), True)]
    match = _WORDS_LAST.fullmatch(text)
    if match and not _NO_UNITS & set(re.findall(r"[a-z]+", match["unit"])):
        return [(match["number"], match["unit"], False)]
    return []


def is_trigonometric(text: str) -> bool:
    """Returns whether a text contains a trigonometric function, so that degrees belong to its argument and are no
    unit."""
    return re.search(r"(?:sin|cos|tan|cot|sec|csc)(?![a-z])", text) is not None


def parse_unit(text: str) -> Unit | None:
    """Parses a unit in words, such as "square cm" or "km per hour"; returns None if they are no unit."""
    factor, powers, sign, prefix = Fraction(1), Counter[str](), 1, 1
    last: tuple[dict[str, int], Fraction, int] | None = None
    place, text = 0, text.strip()
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            return None
        place = match.end()
        name = match["name"]
        if name in _SHORT:
            text, place = f"{_SHORT[name]} {text[place:]}".strip(), 0
        elif name == "per" or match["sign"] == "/":
            sign = -1
        elif name and name.lower() in _PREFIXES:
            prefix = _PREFIXES[name.lower()]
        elif name:
            known = _find(name)
            if known is None:
                return None
            dimensions, size = known
            last = (dimensions, size, sign)
            factor *= size ** (sign * prefix)
            powers.update({base: power * sign * prefix for base, power in dimensions.items()})
            prefix = 1
        elif match["power"]:
            if last is None:
                return None
            more = int(match[3]) - 1
            factor *= last[1] ** (last[2] * more)
            powers.update({base: power * last[2] * more for base, power in last[0].items()})
    kept = tuple(sorted((base, power) for base, power in powers.items() if power))
    return Unit(factor, kept) if kept else None


def _find(name: str) -> tuple[dict[str, int], Fraction] | None:
    for word in (name, name.lower(), name.lower().removesuffix("s")):
        if word in _PER_LITRE:
            return {"m": 3}, Fraction(1, 1000 * _PER_LITRE[word])
        if word in _UNITS:
            base, size = _UNITS[word]
            return {base: 1}, size
    return None
