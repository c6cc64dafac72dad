"""The rules of a reward server, one check each, in order: calls that may harm the server come last."""

from __future__ import annotations

from collections.abc import Callable

from conformance.call_checks import (
    check_cancellation,
    check_concurrency,
    check_deadline,
    check_garbage,
    check_goes_on,
    check_malformed,
    check_unknown_method,
)
from conformance.findings import Finding, RuleResult, Unmet
from conformance.row_checks import (
    check_empty_strings,
    check_large_messages,
    check_many_rows,
    check_metadata,
    check_no_rows,
    check_unicode,
)
from conformance.service_checks import check_describe, check_health, check_reachable
from conformance.target import COUNT, VERDICTS, RewardTarget
from conformance.verdict_checks import (
    check_groups,
    check_invariants,
    check_order,
    check_repeatable,
    check_scores,
)

Check = Callable[[RewardTarget], str]
"""Function that checks a rule: it returns a sentence where the rule holds, and raises Unmet where it does not."""

RULES: dict[str, Check] = {
    "reachable": check_reachable,
    "describe": check_describe,
    "health": check_health,
    COUNT: check_invariants,
    VERDICTS: check_invariants,
    "scores": check_scores,
    "repeatable": check_repeatable,
    "row order": check_order,
    "groups": check_groups,
    "no rows": check_no_rows,
    "empty strings": check_empty_strings,
    "unicode": check_unicode,
    "metadata": check_metadata,
    "many rows": check_many_rows,
    "large messages": check_large_messages,
    "concurrency": check_concurrency,
    "unknown method": check_unknown_method,
    "malformed request": check_malformed,
    "garbage": check_garbage,
    "deadline": check_deadline,
    "cancellation": check_cancellation,
    "goes on": check_goes_on,
}
"""Checks by name of their rule."""
STOPS = ("reachable", "describe")
"""Names of the rules without which no other rule can be checked."""


def check_rules(target: RewardTarget) -> list[Finding]:
    """Checks all rules on the server; returns one finding per rule, in the order of `RULES`. A rule whose check finds a
    different rule broken, such as too few verdicts, is skipped; so are all later rules once a rule of `STOPS` is
    broken or the server no longer responds."""
    found: dict[str, Finding] = {}
    stopped = ""
    for rule, check in RULES.items():
        if stopped:
            found.setdefault(rule, Finding(rule, RuleResult.SKIP, f"not checked: see {stopped!r}"))
            continue
        try:
            found.setdefault(rule, Finding(rule, RuleResult.PASS, check(target)))
        except Unmet as unmet:
            broken = unmet.rule or rule
            found[broken] = Finding(broken, unmet.result, unmet.seen, unmet.advice)
            found.setdefault(rule, Finding(rule, RuleResult.SKIP, f"not checked: see {broken!r}"))
            is_over = rule in STOPS or not target.is_alive()
            stopped = rule if is_over and unmet.result is not RuleResult.WARN else ""
    return [found[rule] for rule in RULES]
