"""Comparison of an answer with the ground truth."""

from __future__ import annotations

import re
from fractions import Fraction

from services.reward.mathematics.answers import Answer
from services.reward.mathematics.numerals import Number, are_equal

ONE = Fraction(1)


def is_right(truth: Answer, answer: Answer, scale: Fraction = ONE) -> bool:
    """Returns whether an answer equals the ground truth as mathematics, or is the same number rounded
    (`numerals.are_equal`).

    Args:
        truth: The ground truth.
        answer: The answer.
        scale: Factor by which the answer's numbers are multiplied, for elements of a list whose unit differs from the
            ground truth's. Default: 1.

    Raises:
        GaveUp: The answer is too large to compute with.
    """
    if truth.whole == answer.whole and scale == 1:
        return True
    if truth.word or answer.word:
        return (truth.word or truth.text.lower()) == (answer.word or answer.text.lower())
    if truth.name and answer.name and truth.name != answer.name:
        return _equal_by_algebra(truth.whole, answer.whole)
    if _is_equation(truth) or _is_equation(answer):
        return _equal_by_algebra(truth.whole, answer.whole)
    if truth.base and (truth.base, truth.number) != (answer.base, answer.number):
        return False
    if truth.unit and answer.unit:
        if truth.unit.dimensions != answer.unit.dimensions:
            return False
        scale *= answer.unit.factor / truth.unit.factor
    if truth.number and answer.number:
        return are_equal(truth.number, _scaled(answer.number, scale))
    if truth.brackets or answer.brackets:
        return _are_equal_lists(truth, answer, scale)
    return _equal_by_algebra(_in_radians(truth, answer), _times(_in_radians(answer, truth), scale))


def _are_equal_lists(truth: Answer, answer: Answer, scale: Fraction) -> bool:
    brackets = {truth.brackets, answer.brackets}
    inner = (_only_element(truth, answer), _only_element(answer, truth))
    if inner != (truth, answer):
        return is_right(*inner, scale)
    are_two_kinds = len(brackets) == 2 and not brackets & {",", ""}
    if are_two_kinds and ("{}" in brackets or len(truth.elements) == 2):
        return False
    left, right = (each.elements if each.brackets else (each,) for each in (truth, answer))
    if brackets <= {"{}", ",", ""}:
        return _each_is_in(left, right, scale) and _each_is_in(right, left, 1 / scale)
    if len(left) != len(right) or brackets & {"{}", ""}:
        return "" in brackets and _equal_by_algebra(truth.text, _times(answer.text, scale))
    return all(is_right(one, other, scale) for one, other in zip(left, right, strict=True))


def _only_element(answer: Answer, other: Answer) -> Answer:
    """Returns the element of an answer that is a set of one element if `other` is no set, since a solution equals the
    set of it; else returns the answer."""
    is_lone = answer.brackets == "{}" and len(answer.elements) == 1 and other.brackets != "{}"
    return answer.elements[0] if is_lone else answer


def _each_is_in(some: tuple[Answer, ...], others: tuple[Answer, ...], scale: Fraction) -> bool:
    return all(any(is_right(one, other, scale) for other in others) for one in some)


def _is_equation(answer: Answer) -> bool:
    """Returns whether an answer is an equation other than a name and its value, such as x = 2."""
    return not answer.brackets and re.search(r"(?<![<>!])=", answer.text) is not None


def _equal_by_algebra(truth: str, answer: str) -> bool:
    # Imported here: it takes a second, and most answers are numbers.
    from services.reward.mathematics import symbolic

    return symbolic.are_equal(truth, answer)


def _in_radians(angle: Answer, other: Answer) -> str:
    """Returns the text of an answer, converted from degrees to radians if `other` contains pi and has no unit."""
    is_degree = angle.unit is not None and angle.unit.dimensions == (("degree", 1),)
    is_radian = other.unit is None and r"\pi" in other.text
    return rf"({angle.text})\cdot\frac{{\pi}}{{180}}" if is_degree and is_radian else angle.text


def _scaled(number: Number, scale: Fraction) -> Number:
    return number if scale == 1 else Number(number.value * scale)


def _times(text: str, scale: Fraction) -> str:
    return text if scale == 1 else rf"({text})\cdot\frac{{{scale.numerator}}}{{{scale.denominator}}}"
