"""Limits on texts, numbers and expression trees, which are checked before any computation."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from services.reward.scorers.base import GaveUp

if TYPE_CHECKING:
    from sympy import Basic

MAX_LENGTH = 1000
"""Maximum number of characters of an answer."""
MAX_DEPTH = 20
"""Maximum depth to which brackets may be nested."""
MAX_DIGITS = 300
"""Number of consecutive digits from which on a number in an answer is too large."""
MAX_LOG10 = 5000.0
"""Maximum decimal logarithm, that is number of digits, of a number that SymPy may compute."""
MAX_TERMS = 10_000
"""Maximum number of terms of a sum or product, and maximum upper number of a binomial coefficient, since the parser
computes them."""


def check_text(text: str) -> None:
    """Checks the limits that need no parsing.

    Raises:
        GaveUp: The answer is too long ("too_long"), nested too deep ("too_deep"), or has too large numbers
            ("too_large").
    """
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
    """Checks that an expression is small enough to compute with.

    Raises:
        GaveUp: A number in its computation has too many digits, or a sum too many terms.
    """
    if not log10_of(tree) <= MAX_LOG10:
        raise GaveUp("too_large")


def log10_of(tree: Basic) -> float:
    """Estimates the decimal logarithm of the largest number in the computation of an expression, with 1 for each
    symbol. Returns infinity if there is no bound."""
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
