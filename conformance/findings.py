"""Findings of checks, one per rule, and the exceptions by which a check says that its rule does not hold."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum


class RuleResult(StrEnum):
    """Result of the check of a rule."""

    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of the check of one rule, with what was seen.

    Attributes:
        rule: Name of the rule.
        result: pass, warn or fail; skip where the check could not be made.
        seen: Observation, in a sentence.
        advice: Remedy; "" where none is needed.
    """

    rule: str
    result: RuleResult
    seen: str
    advice: str = ""

    def to_json(self) -> dict[str, str]:
        return asdict(self)


class Unmet(Exception):
    """Base class of exceptions that a check raises where it cannot confirm its rule.

    Attributes:
        result: Result of the finding that the exception becomes.
        seen: Observation, in a sentence.
        advice: Remedy, in a sentence.
        rule: Name of the broken rule, where it is not the rule that the check is for.
    """

    result = RuleResult.FAIL

    def __init__(self, seen: str, advice: str, rule: str = "") -> None:
        super().__init__(seen)
        self.seen = seen
        self.advice = advice
        self.rule = rule


class Violation(Unmet):
    """Raised where the server breaks the contract."""


class Caution(Unmet):
    """Raised where the server does something that the contract allows, but that limits runs."""

    result = RuleResult.WARN


class Undecided(Unmet):
    """Raised where the check cannot tell whether the rule holds."""

    result = RuleResult.SKIP
