r"""Normalisation of the notation of answers: Unicode, spaces, fonts and sizes of LaTeX, separators of thousands."""

from __future__ import annotations

import re
import unicodedata

_SYMBOLS = str.maketrans(
    {
        "\N{MINUS SIGN}": "-", "\N{EN DASH}": "-", "\N{EM DASH}": "-", "\N{HYPHEN}": "-",
        "\N{NON-BREAKING HYPHEN}": "-", "\N{NO-BREAK SPACE}": " ",
        "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ", "÷": "/", "±": r"\pm ", "∞": r"\infty ",
        "≤": r"\le ", "⩽": r"\le ", "≥": r"\ge ", "⩾": r"\ge ", "≠": r"\ne ", "∈": r"\in ", "∪": r"\cup ",
        "∩": r"\cap ", "∅": r"\emptyset ", "°": r"^\circ ", "π": r"\pi ", "θ": r"\theta ", "α": r"\alpha ",
        "β": r"\beta ", "λ": r"\lambda ", "ℝ": r"\mathbb{R}", "¢": r"\text{ cents}",
    }
)  # fmt: skip
_SUPERSCRIPT, _SUBSCRIPT = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "₀₁₂₃₄₅₆₇₈₉"
_LOWERED = str.maketrans(_SUPERSCRIPT + _SUBSCRIPT, "0123456789+-n0123456789")

_MULTIPLES = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_GROUPS = r"(?<![\d.,])\d{1,3}(?:%s\d{3})+(?![\d/])"
_SPACED_THOUSANDS = re.compile(_GROUPS % " ")
_COMMA_THOUSANDS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?![\d,])")

_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (rf"[{_SUPERSCRIPT}]+", lambda match: f"^{{{match[0].translate(_LOWERED)}}}"),
        (rf"[{_SUBSCRIPT}]+", lambda match: f"_{{{match[0].translate(_LOWERED)}}}"),
        (r"(\d+)\s*\N{FRACTION SLASH}\s*(\d+)", r"\\frac{\1}{\2}"),
        (r"√\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+(?:\.\d+)?|[A-Za-z]))",
         lambda match: rf"\sqrt{{{next(group for group in match.groups() if group is not None)}}}"),
        (r"(?<!\\)\$", ""),
        (r"\\(?:left|right)\.", ""),
        (r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|limits)(?![A-Za-z])", ""),
        (r"(?<=\d)(?:\{,\}|,\\!|\\!,|\\,)\s*(?=\d{3}(?!\d))", ""),
        (r"\\!", ""),
        (r"(?<!\\)\\[,;:> \n]|~|\\(?:quad|qquad|enspace|thinspace|medspace|thickspace)(?![A-Za-z])|\s+", " "),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\[dt]binom(?![A-Za-z])", r"\\binom"),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"\\(?:leqslant|leq)(?![A-Za-z])", r"\\le "),
        (r"\\(?:geqslant|geq)(?![A-Za-z])", r"\\ge "),
        (r"\\neq(?![A-Za-z])", r"\\ne "),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\\varnothing(?![A-Za-z])", r"\\emptyset "),
        (r"\\(?:mathrm|mathbf|mathit|mathsf|textrm|textbf|textit|textsf|textnormal|mbox)\s*\{", r"\\text{"),
        (r"\\text\s*\{\s*\}", ""),
        (r"\\text\s*\{\s*(\\?[$%€£¥₹]|[-\d.,/ ]+)\s*\}", r"\1"),
        (r"\\text\s*\{([0-9A-Z]+)\}(?=\s*_)", r"\1"),
        (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))|\\degree(?![A-Za-z])", r"^\\circ "),
        (r"\\%", "%"),
        (r"(?<![\\A-Za-z}^_])\{\s*([-+])\s*\}", r"\1"),
        (rf"(?:\\text\s*\{{\s*|\s)({'|'.join(_MULTIPLES)})(?![A-Za-z])([^{{}}]*\}})?",
         lambda match: rf"\times 10^{{{_MULTIPLES[match[1]]}}}" + (rf"\text{{{match[2]}" if match[2] else "")),
        # 1.5e3, but not 3e, e3 or a numeral like 1E3_{16}
        (r"(?<![\w\\.])(\d+(?:\.\d*)?|\.\d+)[eE]([-+]?\d+)(?![\w.])", r"\1 \\times 10^{\2}"),
        (r" {2,}", " "),
    )
]  # fmt: skip


def cleaned(text: str) -> str:
    """Returns an answer in normalised notation. Callers limit `text` first (`bounds.check_text`), since the time may
    grow faster than its length."""
    text = "".join(map(_fraction, text)).translate(_SYMBOLS)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = _SPACED_THOUSANDS.sub(lambda match: match[0].replace(" ", ""), text)
    if not re.search(r"[(\[]|\\\{", text):
        # In brackets a comma separates elements.
        text = _COMMA_THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)
    return _without_wrapping(text)


def _fraction(character: str) -> str:
    if not unicodedata.decomposition(character).startswith("<fraction>"):
        return character
    over, _, under = unicodedata.normalize("NFKC", character).partition("\N{FRACTION SLASH}")
    return rf"\frac{{{over}}}{{{under}}}" if under else character


def _without_wrapping(text: str) -> str:
    r"""Strips an answer until nothing changes: spaces at its ends, the characters ".,;:" and a LaTeX line break `\\` at
    its end, a leading "=" or "+", and a pair of braces {} around the whole."""
    while True:
        stripped = (
            text.strip().rstrip(" .,;:").removesuffix("\\\\").removeprefix("=").removeprefix("+").strip()
        )
        if stripped.startswith("{") and _closing(stripped) == len(stripped) - 1:
            stripped = stripped[1:-1]
        if stripped == text:
            return text
        text = stripped


def _closing(text: str) -> int:
    """Returns the index of the brace that closes the first brace; -1 if none does."""
    depth = 0
    for match in re.finditer(r"\\.|[{}]", text):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return match.start()
    return -1
