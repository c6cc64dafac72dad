"""Bounds of texts, numbers and expression trees; larger ones are refused before any computation."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from services.reward.scorers.base import GaveUp

if TYPE_CHECKING:
    from sympy import Basic

MAX_LENGTH = 1000
"""Most characters of an answer."""
MAX_DEPTH = 20
"""Most brackets within brackets."""
MAX_DIGITS = 300
"""Most digits of a number in an answer."""
MAX_LOG10 = 5000.0
"""Most decimal digits of a number that SymPy computes."""
MAX_TERMS = 10_000
"""Most terms of a sum or product, and largest upper number of a binomial coefficient, which the parser computes."""


def check_text(text: str) -> None:
    """Raises GaveUp, with a cause of one word, for an answer that is too long, nested too deep, or has too long
    numbers."""
    if len(text) > MAX_LENGTH:
        raise GaveUp("too_long")
    depth = 0
    for bracket in re.findall(r"[{}()\[\]]", text):
        depth += 1 if bracket in "{([" else -1
        if depth > MAX_DEPTH:
            raise GaveUp("too_deep")
    if re.search(rf"\d{{{MAX_DIGITS}}}", text):
        raise GaveUp("too_large")
    for number, power in re.findall(r"\\binom\s*\{?\s*(\d+)\s*([!^])?", text):
        if power or int(number) > MAX_TERMS:
            raise GaveUp("too_large")


def check_tree(tree: Basic) -> None:
    """Raises GaveUp for an expression with a number of too many digits or a sum of too many terms."""
    if not log10_of(tree) <= MAX_LOG10:
        raise GaveUp("too_large")


def log10_of(tree: Basic) -> float:
    """An estimate of the decimal logarithm of the largest number in the computation of an expression; infinite where
    none is known. A symbol counts as 1."""
    from sympy import MatrixBase, Pow, binomial, exp, factorial
    from sympy.concrete.expr_with_intlimits import ExprWithIntLimits
    from sympy.concrete.expr_with_limits import ExprWithLimits
    from sympy.core.numbers import Number, NumberSymbol, Rational

    if isinstance(tree, Number):
        if isinstance(tree, Rational):
            return max(int(tree.p).bit_length(), int(tree.q).bit_length()) * math.log10(2)
        return abs(math.log10(abs(float(tree)))) if tree.is_finite and tree else 0.0
    if isinstance(tree, NumberSymbol):
        return math.log10(float(tree))
    if isinstance(tree, MatrixBase):
        return max((log10_of(part) for part in tree.flat()), default=0.0)
    sizes = [log10_of(part) for part in tree.args if hasattr(part, "args")]
    if isinstance(tree, Pow):
        base, exponent = sizes
        return max(base * _power_of_ten(exponent), *sizes)
    if isinstance(tree, exp):
        return math.log10(math.e) * _power_of_ten(sizes[0])
    if isinstance(tree, factorial | binomial):
        most = _power_of_ten(sizes[0])
        return most * (sizes[0] + 1)
    if isinstance(tree, ExprWithIntLimits) and _power_of_ten(max(sizes)) > MAX_TERMS:
        return math.inf
    if isinstance(tree, ExprWithLimits):
        return max(sizes)
    return sum(sizes)


def _power_of_ten(exponent: float) -> float:
    return 10.0**exponent if exponent < 300 else math.inf
