"""Parses answers without algebra: numbers, units, words, and lists of elements, with or without brackets."""

from __future__ import annotations

import re
from dataclasses import dataclass

from services.reward.mathematics.clean import cleaned
from services.reward.mathematics.numerals import Number, read_based, read_number
from services.reward.mathematics.units import Unit, is_trigonometric, split_unit


@dataclass(frozen=True)
class Answer:
    r"""A parsed answer.

    Attributes:
        whole: Normalised text of the answer, from `clean.cleaned`.
        text: `whole` without the name and the unit.
        name: Variable of which the answer gives the value or bounds, such as x in x = 2; "" if there is none.
        word: The answer in lower case if it is words and no mathematics, else "".
        unit: Unit of measure; None if there is none.
        base: Base of a numeral such as 1010_2; None if it has none.
        number: Value of an answer that is one number; else None.
        brackets: "{}" of a set, those of a tuple or interval, as in "[)", "," for a list without brackets, or "" if
            the answer is no list.
        elements: Elements of the list; empty if the answer is no list.
    """

    whole: str
    text: str = ""
    name: str = ""
    word: str = ""
    unit: Unit | None = None
    base: int | None = None
    number: Number | None = None
    brackets: str = ""
    elements: tuple[Answer, ...] = ()


_WORD = re.compile(r"\(?\s*(?:\\text\s*\{\s*)?\(?\s*([A-Za-z][A-Za-z' -]*?)\s*\)?\s*(?:\}\s*)?\)?\.?")
_NAME = re.compile(
    r"(?P<name>[A-Za-z](?:_(?:\w|\{\w+\}))?(?:\([A-Za-z]\))?|\\[a-z]+|\\text\s*\{[^{}]*\}"
    r"|\(\s*[A-Za-z](?:\s*,\s*[A-Za-z])+\s*\))\s*=(?P<rest>[^=<>]+)"
)
_MEMBER = re.compile(r"(?P<name>[A-Za-z])\s*\\in(?![A-Za-z])(?P<rest>.+)")
_BUILDER = re.compile(r"\\\{\s*(?P<name>[A-Za-z])\s*(?:\\mid(?![A-Za-z])|:|\|)(?P<rest>.+)\\\}")
_RELATION = re.compile(r"(<|>|\\le(?![A-Za-z])|\\ge(?![A-Za-z])|\\ne(?![A-Za-z]))")
_OR = re.compile(r"\\text\s*\{\s*or\s*\}|(?<![A-Za-z\\])or(?![A-Za-z])|\\lor(?![A-Za-z])")
_AND_OR = re.compile(r",?\s*(?:\\text\s*\{\s*(?:and|or)\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z]))")
_DEGREES = re.compile(r"(\d+(?:\.\d+)?|\([^()]*\)|[A-Za-z])\s*\^\\circ")
_BASED_INSIDE = re.compile(r"(?<![\w\\])(\d+)\s*_\s*(?:\{\s*\d+\s*\}|\d)")
_VARIABLE = re.compile(r"[A-Za-z]|\\theta")
_MIRRORED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le", r"\ne": r"\ne"}
_NO_LOW, _NO_HIGH = r"(-\infty", r"\infty)"
_EMPTY = frozenset({r"\emptyset", r"\{\}", r"\{ \}", r"\{\emptyset\}"})


def read(text: str) -> Answer:
    """Parses the text of an answer, without a box around it.

    Raises:
        ValueError: A numeral has an unknown base, or digits that its base does not allow.
    """
    return _read(cleaned(text))


def _read(whole: str) -> Answer:
    # Up to three letters may be a product.
    if (match := _WORD.fullmatch(whole)) and re.search(r"\(|\\text|[A-Za-z]{4}", whole):
        return Answer(whole, match[1], word=match[1].lower())
    if whole in _EMPTY:
        return Answer(whole, whole, brackets="{}")
    name, text = "", whole
    if inequality := _interval(whole):
        name, text = inequality
    elif match := _NAME.fullmatch(whole):
        name, text = re.sub(r"\s", "", match["name"]), match["rest"].strip()
        name = "" if name.startswith(r"\text") else name
    based = read_based(text)
    text, unit = (text, None) if based else split_unit(text)
    based = based or read_based(text)
    if based:
        return Answer(whole, text, name, unit=unit, base=based[1], number=Number(based[0]))
    if is_trigonometric(text):
        text = _DEGREES.sub(r"(\1\\cdot\\frac{\\pi}{180})", text)
    text = _BASED_INSIDE.sub(_value, text).strip()
    number = read_number(text)
    brackets, parts = ("", []) if number else _split(text)
    elements = tuple(_read(cleaned(part)) for part in parts)
    return Answer(whole, text, name, "", unit, None, number, brackets, elements)


def _value(match: re.Match[str]) -> str:
    based = read_based(match[0])
    assert based is not None
    return str(based[0])


def _interval(text: str) -> tuple[str, str] | None:
    r"""Converts bounds on a variable, or its membership in a set, to (variable, set): 3 < x \le 4 to (x, (3,4]),
    x \in S to (x, S). Bounds joined by "or" give the union of their sets, and a set in builder notation that of its
    condition. Returns None for any other text."""
    if match := _BUILDER.fullmatch(text):
        return _interval(match["rest"].strip())
    if match := _MEMBER.fullmatch(text):
        return match["name"], match["rest"].strip()
    names, sets = set(), []
    for part in _OR.split(text):
        found = _one_interval(part)
        if found is None:
            return None
        names.add(found[0])
        sets.append(found[1])
    return (names.pop(), r"\cup ".join(sets)) if len(names) == 1 else None


def _one_interval(text: str) -> tuple[str, str] | None:
    parts = [part.strip() for part in _RELATION.split(text)]
    sides, signs = parts[::2], parts[1::2]
    names = [side for side in sides if _VARIABLE.fullmatch(side)]
    if len(names) != 1 or not all(sides) or re.search(r"[,=]", "".join(sides)):
        return None
    if signs == [r"\ne"]:
        (bound,) = (side for side in sides if side not in names)
        return names[0], rf"(-\infty,{bound})\cup ({bound},\infty)"
    if len(sides) not in (2, 3) or (len(sides) == 3 and sides[1] not in names) or r"\ne" in signs:
        return None
    low, high = [], []
    for left, sign, right in zip(sides[:-1], signs, sides[1:], strict=True):
        bound, sign = (left, sign) if right in names else (right, _MIRRORED[sign])
        if sign in ("<", r"\le"):
            low.append(f"{'(' if sign == '<' else '['}{bound}")
        else:
            high.append(f"{bound}{')' if sign == '>' else ']'}")
    if len(low) > 1 or len(high) > 1:
        return None
    return names[0], f"{(low or [_NO_LOW])[0]},{(high or [_NO_HIGH])[0]}"


def _split(text: str) -> tuple[str, list[str]]:
    r"""Splits a list into its brackets ("," if it has none) and the parts between its commas; returns ("", []) if the
    text is no list. A part with \pm becomes two parts."""
    inner, brackets = _unbracketed(text)
    parts = [each for part in _at_commas(_AND_OR.sub(",", inner)) for each in _signed(part)]
    if not all(parts) or (len(parts) < 2 and brackets != "{}"):
        return "", []
    return brackets or ",", parts


def _signed(text: str) -> list[str]:
    if text.count(r"\pm") != 1:
        return [text]
    return [text.replace(r"\pm", sign).strip().removeprefix("+").strip() for sign in "+-"]


def _unbracketed(text: str) -> tuple[str, str]:
    """Returns the content of a text in brackets, and the brackets; if no brackets enclose the whole text, returns it
    and ""."""
    match = re.match(r"[(\[]|\\\{", text)
    if match is None:
        return text, ""
    depth = 0
    for bracket in re.finditer(r"\\?[{}]|[()\[\]]", text):
        depth += 1 if bracket[0][-1] in "{([" else -1
        if depth == 0:
            if bracket.end() < len(text) or (match[0] == r"\{") != (bracket[0] == r"\}"):
                return text, ""
            return text[match.end() : bracket.start()].strip(), match[0][-1] + bracket[0][-1]
    return text, ""


def _at_commas(text: str) -> list[str]:
    """Splits a text at the commas and semicolons outside of brackets."""
    parts, depth, start = [], 0, 0
    for match in re.finditer(r"[(){}\[\],;]", text):
        if match[0] in ",;":
            if depth == 0:
                parts.append(text[start : match.start()].strip())
                start = match.end()
        else:
            depth += 1 if match[0] in "{([" else -1
    return [*parts, text[start:].strip()]
