"""Checks of verdicts: one per row, valid, repeatable, and independent of the other rows."""

from __future__ import annotations

from conformance.findings import Caution, Undecided, Violation
from conformance.target import RewardTarget, are_equal, has_score


def check_invariants(target: RewardTarget) -> str:
    target.score(target.rows)
    return "in every answer"


def check_scores(target: RewardTarget) -> str:
    verdicts = target.score(target.rows)
    scored = sum(map(has_score, verdicts))
    if not scored:
        raise Violation(
            f"none of the {len(verdicts)} probe rows got a score; the first: {verdicts[0].error[:120]}",
            "Give rows that your reward can score: --rows FILE. If these should be: look at the error.",
        )
    return f"{scored} of {len(verdicts)} probe rows got a score"


def check_repeatable(target: RewardTarget) -> str:
    target.is_repeatable = are_equal(target.score(target.rows), target.score(target.rows))
    if not target.is_repeatable:
        raise Caution(
            "the same rows got other verdicts the second time",
            "Runs of one seed will differ. Where that is not meant, take away the randomness.",
        )
    return "the same rows got the same verdicts twice"


def check_order(target: RewardTarget) -> str:
    if not target.is_repeatable:
        raise Undecided("verdicts do not repeat, so they cannot be compared", "")
    alone = [target.score([row])[0] for row in target.rows]
    together, reverse = target.score(target.rows), target.score(target.rows[::-1])
    if not any(map(has_score, (*alone, *together))):
        raise Undecided("no probe row got a score, so there is nothing to compare", "")
    if not are_equal(reverse, together[::-1]):
        raise Violation(
            "a row's verdict depends on where in the request it stands",
            "Give verdict i to row i, and score each row by itself.",
        )
    if not are_equal(together, alone):
        raise Violation(
            "a row's verdict depends on the other rows of the request",
            "Score each row by itself: runs send rows in other batches, and normalise rewards themselves.",
        )
    if all(are_equal(alone[:1], [verdict]) for verdict in alone):
        raise Caution(
            f"all {len(alone)} probe rows got the same verdict, so their order cannot be checked",
            "Give rows to which your reward gives different scores: --rows FILE.",
        )
    target.alone = alone
    return f"{len(alone)} rows got the same verdicts alone, together and in reverse"
