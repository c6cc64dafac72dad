"""Grades programs as another user: rows come on standard input, verdicts go to standard output, as JSON."""

from __future__ import annotations

import json
import sys

from services.reward.sandbox.grader import Grader
from services.reward.sandbox.program import read_row
from settings.reward import SandboxTable


def main() -> None:
    given = json.load(sys.stdin)
    grader = Grader(SandboxTable.model_validate(given["table"]))
    rows = {
        name: read_row("", code, "", {"tests": tests}, "all") for name, (code, tests) in given["rows"].items()
    }
    verdicts = {name: grader.submit(row) for name, row in rows.items()}
    json.dump(
        {name: [verdict.result().reasons, verdict.result().fault] for name, verdict in verdicts.items()},
        sys.stdout,
    )
    grader.close()


if __name__ == "__main__":
    main()
