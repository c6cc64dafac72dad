"""Findings of checks, one per rule, and the exceptions that a check raises where its rule does not hold."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum


class RuleResult(StrEnum):
    """How a rule came out."""

    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class Finding:
    """How one rule came out.

    Attributes:
        rule: Name of the rule.
        result: pass, warn, fail; skip where the rule could not be decided.
        seen: What was seen, in a sentence.
        advice: What to do; empty where there is nothing to do.
    """

    rule: str
    result: RuleResult
    seen: str
    advice: str = ""

    def to_json(self) -> dict[str, str]:
        return asdict(self)


class Unmet(Exception):
    """A rule that does not hold.

    Attributes:
        rule: The rule, where it is another than the one that is being checked.
    """

    result = RuleResult.FAIL

    def __init__(self, seen: str, advice: str, rule: str = "") -> None:
        super().__init__(seen)
        self.seen = seen
        self.advice = advice
        self.rule = rule


class Violation(Unmet):
    """The contract is broken."""


class Caution(Unmet):
    """Allowed, but the user will want to know."""

    result = RuleResult.WARN


class Undecided(Unmet):
    """Nothing can be said."""

    result = RuleResult.SKIP
