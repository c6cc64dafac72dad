r"""The reward function `math`: whether the answer in a response equals the ground truth as mathematics.

A response's answer is extracted (`extract`), normalised (`clean`) and parsed (`answers`). Numbers, units, lists,
intervals and words are compared exactly (`compare`); math-verify compares all other answers (`symbolic`), because it
ignores units, bases and kinds of brackets. Answers that are too large to compute with raise GaveUp first (`bounds`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from services.reward.mathematics import answers, bounds, compare
from services.reward.mathematics.extract import last_answer
from services.reward.scorers.base import GaveUp


def math(prompt: str, response: str, ground_truth: str, metadata: Mapping[str, Any]) -> float:
    r"""Returns 1 if the response's answer equals the ground truth as mathematics, else 0. Needs the extra `math` of
    the package.

    Args:
        prompt, metadata: Not used.
        response: The response; `extract.last_answer` finds its answer.
        ground_truth: LaTeX or a plain expression, with or without \boxed{...} or $...$ around it.

    Raises:
        ValueError: The ground truth cannot be read.
        GaveUp: The response's answer is too long, nested too deep, or too large to compute with.
    """
    truth = read_truth(ground_truth)
    found = last_answer(response)
    if not found or not found.strip():
        return 0.0
    bounds.check_text(found)
    try:
        answer = answers.read(found)
        bounds.check_text(answer.whole)
        return float(compare.is_right(truth, answer))
    except ValueError:
        # The answer is no mathematics.
        return 0.0


@functools.lru_cache(maxsize=1024)
def read_truth(ground_truth: str) -> answers.Answer:
    """Parses a ground truth. The last 1,024 results are cached.

    Raises:
        ValueError: The ground truth cannot be parsed, is too large, or is not mathematics.
    """
    marked = "\\boxed" in ground_truth or "\\fbox" in ground_truth or ground_truth.strip().startswith("$")
    found = last_answer(ground_truth) if marked else ground_truth
    try:
        bounds.check_text(found or "")
        truth = answers.read(found or "")
        is_read = truth.whole and (truth.word or truth.number or truth.brackets or _is_algebra(truth.text))
    except (GaveUp, ValueError) as error:
        raise ValueError(f"the ground truth cannot be read: {error}: {ground_truth[:80]!r}") from error
    if not is_read:
        raise ValueError(f"the ground truth is not mathematics: {ground_truth[:80]!r}")
    return truth


def warm_up() -> None:
    """Parses an expression, which loads the parser, so that forked processes need not load it."""
    _is_algebra(r"\frac{x+1}{2}")


math.read_truth = read_truth  # type: ignore[attr-defined]
math.warm_up = warm_up  # type: ignore[attr-defined]
math.required_module = "math_verify"  # type: ignore[attr-defined]


def _is_algebra(text: str) -> bool:
    # Imported here: it takes a second, and most answers are numbers.
    from services.reward.mathematics import symbolic

    return bool(symbolic.read(text))
