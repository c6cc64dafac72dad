"""Grades programs as another user: rows come on standard input, verdicts go to standard output, as JSON."""

from __future__ import annotations

import json
import sys

from services.reward.sandbox.grader import Grader
from services.reward.sandbox.program import read_row
from settings.reward import SandboxTable


def main() -> None:
    given = json.load(sys.stdin)
    graders = {
        wall_time_s: Grader(SandboxTable.model_validate({**given["table"], "wall_time_s": wall_time_s}))
        for wall_time_s in {row[-1] for row in given["rows"].values()}
    }
    verdicts = {
        name: graders[wall_time_s].submit(read_row("", code, "", {"tests": tests}, "all"))
        for name, (code, tests, wall_time_s) in given["rows"].items()
    }
    json.dump(
        {name: [verdict.result().reasons, verdict.result().fault] for name, verdict in verdicts.items()},
        sys.stdout,
    )
    for grader in graders.values():
        grader.close()


if __name__ == "__main__":
    main()
