"""Extraction of the answer from a response."""

from __future__ import annotations

import re

MAX_SEARCHED = 4000
"""Number of characters, at the end of a response without a box, that are searched for an answer."""

_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![A-Za-z])\s*")
_FORMULA = (
    r"\$\$(?P<display>[^$]+)\$\$"
    # As in Pandoc: no space inside the dollars and no digit after them, so that "$5 and $6" is no formula.
    r"|(?<![\\$])\$(?!\s)(?P<inline>(?:[^$\n\\]|\\.)+?)(?<!\s)\$(?!\d)"
    r"|\\\[(?P<bracket>.+?)\\\]|\\\((?P<parenthesis>.+?)\\\)"
)
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
_NUMBER = (
    r"(?P<number>(?<![\w.,/)}])[-+\N{MINUS SIGN}]?"
    rf"(?:{_DIGITS}(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+|\s?/\s?{_DIGITS})?%?)"
)
_CANDIDATE = re.compile(rf"{_FORMULA}|{_NUMBER}", re.DOTALL)
_ANNOUNCED = re.compile(r"answer", re.IGNORECASE)
_ANNOUNCED_WITHIN = 100


def last_answer(text: str) -> str | None:
    r"""Returns the answer in a response: the content of the last \boxed{...}, as in MATH (Hendrycks et al. 2021),
    \fbox or \framebox. Without a box, returns the first formula or number after the last word "answer" that has one
    close after it, or else the last formula or number.

    Returns None if there is no answer, or if the last box is not closed.
    """
    boxes = list(_BOX.finditer(text))
    if boxes:
        return _boxed(text, boxes[-1].end())
    end = text[-MAX_SEARCHED:]
    for announced in reversed(list(_ANNOUNCED.finditer(end))):
        found = _CANDIDATE.search(end, announced.end())
        if found and found.start() <= announced.end() + _ANNOUNCED_WITHIN:
            return _content(found)
    candidates = list(_CANDIDATE.finditer(end))
    return _content(candidates[-1]) if candidates else None


def _boxed(text: str, start: int) -> str | None:
    """Returns the content of a box whose command ends at `start`: a group in braces, or else one word. None if the
    braces are not closed, or no word follows."""
    if text[start : start + 1] != "{":
        word = re.match(r"[^\s$]+", text[start:])
        return word[0] if word else None
    depth = 0
    for match in re.finditer(r"\\.|[{}]", text[start:], re.DOTALL):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return text[start + 1 : start + match.start()]
    return None


def _content(match: re.Match[str]) -> str:
    return next(group for group in match.groups() if group is not None)
