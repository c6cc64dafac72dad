"""Figures say which code they are of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.report import write_json


@pytest.mark.parametrize(("after", "warns"), [("abc", False), ("def", True), ("abc-dirty", True)])
def test_code_that_changed_while_it_was_measured_is_told(
    after: str, warns: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = {"before": {"commit": "abc"}, "after": {"commit": after}, "seconds": 1.0}
    write_json(tmp_path / "figures.json", figures)
    assert json.loads((tmp_path / "figures.json").read_text()) == figures
    assert (f"was abc before and {after} after" in capsys.readouterr().err) == warns
