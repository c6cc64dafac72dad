"""The table of rlhf-conformance shows what a server has said as it is."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from conformance.cli import to_table
from conformance.findings import Finding, RuleResult


def test_words_in_brackets_are_text_and_no_markup() -> None:
    """Errors of a server may have any, such as those of a template of Llama."""
    findings = [
        Finding(
            "one verdict per row", RuleResult.FAIL, "the error is: no [reward] before [/INST]", "See [docs]."
        ),
        Finding("[red]a rule", RuleResult.PASS, "all [/] right"),
    ]
    screen = Console(file=StringIO(), width=200)
    screen.print(to_table(findings, "reward at [fe80::1]:7101"))
    shown = screen.file.getvalue()  # type: ignore[attr-defined]
    for text in ("[fe80::1]:7101", "no [reward] before [/INST]", "See [docs].", "all [/] right", "1 fail"):
        assert text in shown
