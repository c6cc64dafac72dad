"""Reward functions that score all responses to a prompt at once, and the groups of the rows of a request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, TypeVar

from rlhf.v1 import reward_pb2

GroupFunction = Callable[
    [str, Sequence[str], str, Mapping[str, Any]], Sequence[float] | Sequence[Sequence[float]]
]
"""Maps (prompt, responses, ground truth, metadata) to one score per response, or to one list per response with a score
per token of it."""

F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R")


def over_groups(function: F) -> F:
    """Decorator that declares a reward function as a `GroupFunction`, by its attribute `over_groups`."""
    function.over_groups = True  # type: ignore[attr-defined]
    return function


def groups_of(rows: Sequence[reward_pb2.TextRow]) -> list[list[int]]:
    """Returns the indices of the rows of each group, ascending; groups in the order of their first rows. A group is the
    rows with the same number in field `group`; a row without this field is a group of its own."""
    groups: dict[object, list[int]] = {}
    for index, row in enumerate(rows):
        key = row.group if row.HasField("group") else ("row", index)
        groups.setdefault(key, []).append(index)
    return list(groups.values())


def in_row_order(groups: Sequence[Sequence[int]], results: Sequence[Sequence[R]]) -> list[R]:
    """Returns one result per row, in row order.

    Args:
        groups: Indices of the rows of each group, from `groups_of`.
        results: One result per row of each group.
    """
    pairs = [pair for each in zip(groups, results, strict=True) for pair in zip(*each, strict=True)]
    return [result for _, result in sorted(pairs, key=itemgetter(0))]


def group_fault(rows: Sequence[reward_pb2.TextRow]) -> str:
    """Returns those of "prompt", "ground_truth" and "metadata" in which the rows of a group differ, separated by
    commas; "" where the rows agree."""
    first, names = rows[0], ("prompt", "ground_truth", "metadata")
    return ", ".join(
        name for name in names if any(getattr(row, name) != getattr(first, name) for row in rows[1:])
    )
