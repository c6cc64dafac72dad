"""rlhf-conformance: checks a server against the contract, and gives advice for each rule that it breaks."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import click
from google.protobuf import json_format, struct_pb2
from rich.console import Console
from rich.table import Table
from rich.text import Text

from conformance.findings import Finding, RuleResult
from conformance.reward import check_rules
from conformance.row_checks import MIB
from conformance.target import RewardTarget, Row
from rlhf.errors import ConfigError
from settings.commands import Commands, address_given, write_file
from settings.security import security_option

STYLES = {
    RuleResult.PASS: "green",
    RuleResult.WARN: "yellow",
    RuleResult.FAIL: "bold red",
    RuleResult.SKIP: "dim",
}
PROBES = (
    ("1+1=", "2", "2"),
    ("1+2=", "4", "3"),
    ("2+2=", "It is 4, as far as I can tell.", "4"),
    ("Think first. 3+4=", "<think>3 and 4 make 7</think> 7", "7"),
    ("10/4=", "#### 2.5", "2.5"),
)
"""Prompt, response and ground truth of rows to which most rewards give different scores."""


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="rlhf-cluster")
def main() -> None:
    """Check a server against the contract."""


@main.command()
@click.option("--target", required=True, metavar="HOST:PORT", callback=address_given,
              help="The server.")  # fmt: skip
@click.option("--rows", type=click.Path(path_type=Path), metavar="FILE",
              help="JSONL rows to probe with: prompt, response, ground_truth, others. Default: sums.")  # fmt: skip
@click.option("--deadline", "deadline_s", type=click.FloatRange(0.1, 3600), default=10.0, show_default=True,
              metavar="N", help="Seconds that a call may take.")  # fmt: skip
@click.option("--many", "num_rows", type=click.IntRange(1, 1_000_000), default=4000, show_default=True,
              metavar="N", help="Rows of the largest call; lower it if a row is expensive to score.")  # fmt: skip
@click.option("--max-message", "max_mib", type=click.IntRange(1, 512), default=32, show_default=True,
              metavar="N", help="Size in MiB of the largest message.")  # fmt: skip
@click.option(
    "--json",
    "json_path",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Also write the findings to FILE.",
)
@security_option
def reward(
    target: str, rows: Path | None, deadline_s: float, num_rows: int, max_mib: int, json_path: Path | None
) -> None:
    """Check a reward that reads text.

    The exit code is 1 where a rule is broken.
    """
    probes = read_rows(rows) if rows else [Row(prompt=p, response=r, ground_truth=g) for p, r, g in PROBES]
    with contextlib.closing(RewardTarget(target, deadline_s, probes, num_rows, max_mib * MIB)) as checked:
        findings = check_rules(checked)
    failed = sum(finding.result is RuleResult.FAIL for finding in findings)
    Console().print(to_table(findings, f"reward at {target}"))
    if json_path:
        report = {"role": "reward", "target": target, "passed": not failed,
                  "findings": [finding.to_json() for finding in findings]}  # fmt: skip
        write_file(json_path, json.dumps(report, indent=2) + "\n")
    sys.exit(1 if failed else 0)


def read_rows(path: Path) -> list[Row]:
    """Reads the rows of a JSONL file; fields other than prompt, response and ground_truth are metadata.

    Raises:
        ConfigError: The file cannot be read, a line is not a valid row, or there are fewer than two rows.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
        rows = [_row(json.loads(line)) for line in lines if line.strip()]
    except OSError as error:
        raise ConfigError(f"--rows {path}: {error.strerror}") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"--rows {path}: not JSONL: {error.msg}: {error.doc[:40]!r}") from None
    except (ValueError, TypeError, AttributeError, json_format.ParseError) as error:
        raise ConfigError(f"--rows {path}: {error}") from error
    if len(rows) < 2:
        raise ConfigError(
            f"--rows {path}: {len(rows)} row{'s' * (len(rows) != 1)}; two are needed to see their order"
        )
    return rows


def _row(fields: dict[str, Any]) -> Row:
    texts: dict[str, Any] = {
        name: str(fields.pop(name, "")) for name in ("prompt", "response", "ground_truth")
    }
    return Row(**texts, metadata=json_format.ParseDict(fields, struct_pb2.Struct()))


def to_table(findings: list[Finding], title: str) -> Table:
    """Makes a table of the findings for the terminal, with the number of findings of each result below it."""
    # Text, for rich would read words in brackets, as of a server's error, as markup.
    table = Table(title=Text(title, style="table.title"), title_justify="left")
    for column in ("rule", "result", "what was seen", "what to do"):
        table.add_column(column, overflow="fold", no_wrap=column == "rule")
    for finding in findings:
        result = Text(finding.result, style=STYLES[finding.result])
        table.add_row(Text(finding.rule), result, Text(finding.seen), Text(finding.advice))
    counts = (f"{sum(f.result is result for f in findings)} {result}" for result in RuleResult)
    table.caption = ", ".join(counts)
    return table
