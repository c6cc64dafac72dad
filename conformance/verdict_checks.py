"""Checks of verdicts: one per row, valid, repeatable, and independent of the other rows."""

from __future__ import annotations

from conformance.findings import Caution, Undecided, Violation
from conformance.target import RewardTarget, are_equal, are_equal_by_unit, excerpt, has_score

LARGE_GROUP = (1 << 63) + (1 << 53) + 1
"""A number of a group that neither a signed integer nor a double can hold."""


def check_invariants(target: RewardTarget) -> str:
    """Checks that a request with the probe rows gets exactly one valid verdict per row, else raises Violation. Returns
    the text for the report."""
    target.score(target.rows)
    return "in every answer"


def check_scores(target: RewardTarget) -> str:
    """Checks that at least one probe row gets a score rather than an error."""
    verdicts = target.score(target.rows)
    scored = sum(map(has_score, verdicts))
    if not scored:
        raise Violation(
            f"none of the {len(verdicts)} probe rows got a score; the first: {excerpt(verdicts[0].error)}",
            "Give rows that your reward can score: --rows FILE. If these should be: look at the error.",
        )
    return f"{scored} of {len(verdicts)} probe rows got a score"


def check_repeatable(target: RewardTarget) -> str:
    """Checks that the same rows get equal verdicts twice, up to rounding, else raises Caution. Sets
    `target.is_repeatable`."""
    first, second = (target.score_units(target.units) for _ in range(2))
    target.is_repeatable = are_equal_by_unit(first, second)
    if not target.is_repeatable:
        raise Caution(
            "the same rows got other verdicts the second time",
            "Runs of one seed will differ. Where that is not meant, take away the randomness.",
        )
    return "the same rows got the same verdicts twice"


def check_order(target: RewardTarget) -> str:
    """Checks that a verdict depends only on its row or, for a server that scores groups, on the rows of its group. If
    so, sets `target.alone`, with which later checks compare their verdicts."""
    if not target.is_repeatable:
        raise Undecided("verdicts do not repeat, so they cannot be compared", "")
    units, one = target.units, "group" if target.scores_groups else "row"
    alone = [target.score_units([unit])[0] for unit in units]
    together, reverse = target.score_units(units), target.score_units(units[::-1])
    if not any(has_score(verdict) for verdicts in (*alone, *together) for verdict in verdicts):
        raise Undecided("no probe row got a score, so there is nothing to compare", "")
    if not are_equal_by_unit(reverse, together[::-1]):
        raise Violation(
            f"a {one}'s verdict depends on where in the request it stands",
            f"Give verdict i to row i, and score each {one} by itself.",
        )
    if not are_equal_by_unit(together, alone):
        raise Violation(
            f"a {one}'s verdict depends on the other {one}s of the request",
            f"Score each {one} by itself: runs send {one}s in other batches, and normalise rewards themselves.",
        )
    if all(are_equal(alone[0][:1], [verdict]) for verdicts in alone for verdict in verdicts):
        raise Caution(
            f"all {len(alone)} probe {one}s got the same verdict, so their order cannot be checked",
            "Give rows to which your reward gives different scores: --rows FILE.",
        )
    target.alone = alone
    return f"{len(alone)} {one}s got the same verdicts alone, together and in reverse"


def check_groups(target: RewardTarget) -> str:
    """Checks that a server that scores groups gives the same verdicts when the groups have other numbers, which use
    all 64 bits. Holds for a server that scores rows."""
    if not target.scores_groups:
        return "it scores rows, not groups: no row tells its group"
    if not target.alone:
        raise Undecided("verdicts on groups cannot be compared", "")
    units = target.units
    numbered = target.unit_verdicts(target.start(target.request_of(units, LARGE_GROUP)), units)
    if not are_equal_by_unit(numbered, target.alone):
        raise Violation(
            f"groups with numbers from {LARGE_GROUP} got other verdicts",
            "Tell groups apart by all 64 bits of TextRow.group, and use the number for nothing else.",
        )
    return (
        f"{len(units)} groups of 1 to {max(map(len, units))} rows got the same verdicts under other numbers"
    )
