"""Parses and compares expressions by math-verify and SymPy."""

from __future__ import annotations

import functools
import logging
from typing import Any

from math_verify import parser, verify
from math_verify.parser import LatexExtractionConfig, NormalizationConfig
from sympy import Derivative, Expr, Float, I, Limit
from sympy.concrete.expr_with_limits import ExprWithLimits
from sympy.core.function import AppliedUndef

from services.reward.mathematics import bounds

# Below errors they log that they have no time-out, and each answer that they cannot read.
logging.getLogger("math_verify").setLevel(logging.ERROR)
logging.getLogger("latex2sympy2_extended").setLevel(logging.ERROR)

DIGITS = 30
CLEARLY = 1e-3
"""Relative difference above which two values differ by more than rounding."""
_POINTS = (0.7390851, 1.4513692, 0.5671433, 1.8019377)
_SLOW = (ExprWithLimits, Derivative, Limit, AppliedUndef)
"""Classes of expressions whose evaluation takes long or is impossible."""

_AS_CLEANED = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="last", equations=False
)
_ONLY_BOX = (LatexExtractionConfig(boxed_match_priority=0, normalization_config=_AS_CLEANED),)


@functools.lru_cache(maxsize=1024)
def read(text: str) -> tuple:
    """Parses a normalised answer into SymPy expressions; returns an empty tuple if it cannot be parsed. The last
    1,024 results are cached.

    Raises:
        GaveUp: An expression is too large to compute with.
    """
    found = parser.parse(rf"\boxed{{{text}}}", _ONLY_BOX, fallback_mode="no_fallback", parsing_timeout=0)
    for tree in found:
        bounds.check_tree(tree)
    return tuple(map(_with_imaginary_unit, found))


def _with_imaginary_unit(tree: Any) -> Any:
    """Returns an expression with the variable i, as which the parser reads it, replaced by the imaginary unit. A tree
    that is no Expr, such as a set or an equation, is returned as it is."""
    for symbol in tree.free_symbols:
        if symbol.name == "i" and isinstance(tree, Expr):
            return tree.subs(symbol, I)
    return tree


def _differ_at_a_point(left: Any, right: Any) -> bool:
    """Returns whether two expressions have clearly different values at one point. This takes much less time than a
    search for a transformation of one into the other. False if they cannot be evaluated."""
    trees = (left, right)
    if not all(isinstance(tree, Expr) and not tree.is_Symbol and not tree.has(*_SLOW) for tree in trees):
        return False
    names = sorted({symbol.name for tree in trees for symbol in tree.free_symbols})
    if not names:
        return False
    points = {name: Float(_POINTS[place % len(_POINTS)] + place) for place, name in enumerate(names)}
    values = []
    for tree in trees:
        value = tree.evalf(DIGITS, subs={symbol: points[symbol.name] for symbol in tree.free_symbols})
        if not value.is_number or not value.is_finite:
            return False
        try:
            values.append(complex(value))
        except OverflowError:
            return False
    one, other = values
    return abs(one - other) > CLEARLY * max(1.0, abs(one), abs(other))


def are_equal(truth: str, answer: str) -> bool:
    """Returns whether two normalised answers are equal as expressions, equations, inequalities or sets. Raises as
    `read` does."""
    expected, found = list(read(truth)), list(read(answer))
    if len(expected) == len(found) == 1 and _differ_at_a_point(expected[0], found[0]):
        return False
    return bool(verify(expected, found, allow_set_relation_comp=True, timeout_seconds=0))
