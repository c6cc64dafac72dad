"""The examples in docs/rewards.md are valid, and do what the page says."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from controller.config.config import load
from rlhf.v1 import reward_pb2
from services.reward.loaded import LoadedFunction
from services.reward.remote import json_row, read_answer
from settings.reward import RewardTable

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "rewards.md").read_text()


def blocks(language: str) -> list[str]:
    """Examples in a language, in the order of the page."""
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def test_each_kind_that_is_configured_by_a_table_has_a_valid_example() -> None:
    tables = [
        RewardTable.model_validate(table)
        for block in blocks("toml")
        for table in tomllib.loads(block)["services"].values()
    ]
    assert {table.kind for table in tables} == {"function", "model", "judge", "http"}


def test_the_sum_of_several_rewards_is_a_valid_config(tmp_path: Path) -> None:
    (block,) = [block for block in blocks("toml") if "[rewards." in block]
    tables = tomllib.loads((ROOT / "deploy" / "quickstart" / "quickstart.toml").read_text())
    given = tomllib.loads(block)
    del tables["services"]["reward"]
    for port, (name, table) in enumerate(given["services"].items(), 7300):
        tables["services"][name] = {**table, "address": f"127.0.0.1:{port}"}
    path = tmp_path / "config.toml"
    path.write_text(tomli_w.dumps({**tables, "rewards": given["rewards"]}))
    assert load(path).rewards == {"reward": {"math": 1.0, "form": 0.2}}


@pytest.mark.parametrize(
    ("response", "score"), [("it is 2", 1.0), ("it is 2" + "." * 60, 0.5), ("it is 3", 0.0)]
)
def test_the_function_scores_as_it_says(response: str, score: float) -> None:
    names: dict[str, Any] = {}
    exec(blocks("python")[0], names)
    function = LoadedFunction("brief", lambda *row: names["brief"](*row, limit=50))
    scored = function.score([reward_pb2.TextRow(response=response, ground_truth="2")])
    assert scored.scores[0].score == score
    assert scored.metrics == {"extra/characters": (len(response), 1)}


def test_requests_and_answers_of_a_verifier_are_those_of_the_page() -> None:
    request, answers = blocks("json")
    row = reward_pb2.TextRow(prompt="1+1=", response="2", ground_truth="2", response_tokens=2)
    row.metadata.update({"level": 3})
    assert json.loads(request) == {"rows": [json_row(row)]}
    read = [read_answer("http://x/", json.loads(line), 1) for line in answers.splitlines()]
    assert [each.scores[0].score for each in read] == [1, 1]
    assert [each.metrics for each in read] == [{}, {"extra/tests_passed": (7, 1)}]
