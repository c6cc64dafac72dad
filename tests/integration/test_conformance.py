"""rlhf-conformance: servers that keep the contract pass, and one that breaks a rule is told that very rule."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from python_path import python_path

from conformance.cli import PROBES, read_rows
from conformance.findings import RuleResult
from conformance.reward import RULES, check_rules
from conformance.row_checks import MIB
from conformance.target import COUNT, VERDICTS, RewardTarget, Row
from integration import broken_rewards as broken
from integration.harness import ROOT, TIMEOUT_S, Processes, free_ports, is_listening, wait_until
from integration.node_reward import serving
from rlhf.errors import ConfigError
from rlhf.security import Security, adopted

pytestmark = pytest.mark.slow

DEADLINE_S = 4.0
ROWS = [Row(prompt=prompt, response=response, ground_truth=truth) for prompt, response, truth in PROBES]


def outcome(address: str, rows: list[Row] = ROWS) -> dict[RuleResult, list[str]]:
    """Rules by how they came out."""
    target = RewardTarget(address, DEADLINE_S, rows, num_rows=1500, max_bytes=5 * MIB)
    try:
        findings = check_rules(target)
    finally:
        target.close()
    assert [finding.rule for finding in findings] == list(RULES)
    assert all(finding.seen for finding in findings)
    assert all(finding.advice for finding in findings if finding.result is RuleResult.FAIL)
    return {result: [f.rule for f in findings if f.result is result] for result in RuleResult}


def outcome_of(reward: broken.Good) -> dict[RuleResult, list[str]]:
    with broken.served(reward) as address:
        return outcome(address)


@contextlib.contextmanager
def python_reward(directory: Path, *keys: str) -> Iterator[str]:
    """Our own reward with these lines in its table."""
    (port,) = free_ports(1)
    config = directory / "reward.toml"
    lines = ["[services.reward]", 'role = "reward"', f'address = "127.0.0.1:{port}"', *keys]
    config.write_text("\n".join([*lines, ""]))
    processes = Processes()
    with (directory / "reward.log").open("w") as log:
        processes.start("python", "-m", "services", "reward", "--config", str(config), stdout=log, stderr=log)
    address = f"127.0.0.1:{port}"
    try:
        wait_until(lambda: is_listening(address), TIMEOUT_S, "the reward")
        yield address
    finally:
        processes.kill()


@pytest.mark.parametrize(
    "function", ["exact_match", "toy_rewards:digit_mean_async", "toy_rewards:digit_mean_trl"]
)
def test_our_own_reward_keeps_all_rules(function: str, tmp_path: Path) -> None:
    with python_reward(tmp_path, f'function = "{function}"') as address:
        assert outcome(address)[RuleResult.PASS] == list(RULES)


def test_our_own_reward_that_asks_a_verifier_behind_http_keeps_all_rules(tmp_path: Path) -> None:
    pytest.importorskip("httpx")
    processes = Processes()
    try:
        server = processes.start("python", "examples/reward_http/server.py", "--port", "0")
        assert server.stdout is not None
        _, url = server.stdout.readline().split()
        with python_reward(tmp_path, 'kind = "http"', f'http.urls = ["{url}"]') as address:
            assert outcome(address)[RuleResult.PASS] == list(RULES)
    finally:
        processes.kill()


def test_a_function_over_groups_keeps_all_rules(
    plugins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", python_path(plugins))
    with python_reward(tmp_path, 'function = "rlhf_example.rewards:concise"') as address:
        assert outcome(address)[RuleResult.PASS] == list(RULES)


@pytest.mark.parametrize("reward", ["exact_match", "format", "shared"])
def test_the_node_reward_keeps_all_rules(reward: str, reward_node: Path) -> None:
    with serving(reward_node, reward) as address:
        assert outcome(address)[RuleResult.PASS] == list(RULES)


@pytest.mark.parametrize(
    "reward", [broken.Good, broken.OfTokens, broken.OfGroups], ids=lambda reward: reward.__name__
)
def test_a_server_of_another_make_keeps_all_rules(reward: type[broken.Good]) -> None:
    assert outcome_of(reward())[RuleResult.PASS] == list(RULES)


@pytest.mark.parametrize(
    ("reward", "rule"),
    [
        (broken.LosesARow, COUNT),
        (broken.ScoresNothing, COUNT),
        (broken.SaysNaN, VERDICTS),
        (broken.SaysInfinityOfAToken, VERDICTS),
        (broken.SaysNothing, VERDICTS),
        (broken.FailsWithoutACause, VERDICTS),
        (broken.Reverses, "row order"),
        (broken.ComparesRows, "row order"),
        (broken.NormalisesItsBatch, "row order"),
        (broken.ComparesGroups, "row order"),
        (broken.RoundsGroups, "groups"),
        (broken.WantsRows, "no rows"),
        (broken.WantsResponses, "empty strings"),
        (broken.WantsAscii, "unicode"),
        (broken.WantsNumbers, "metadata"),
        (broken.WantsFewRows, "many rows"),
        (broken.ShufflesLargeCalls, "many rows"),
        (broken.FailsOnLargeMessages, "large messages"),
        (broken.SharesRows, "concurrency"),
        (broken.AnswersAnything, "unknown method"),
        (broken.IgnoresTheBatch, "malformed request"),
        (broken.ReadsGarbage, "garbage"),
        (broken.FailsWhenHurried, "deadline"),
        (broken.StuckAfterDeadline, "deadline"),
        (broken.StuckAfterCancellation, "cancellation"),
        (broken.RemembersCancellation, "goes on"),
        (broken.IsNotServing, "health"),
        (broken.FailsToSayItsHealth, "health"),
        (broken.ScoresNoRow, "scores"),
        (broken.AnswersInJson, "reachable"),
        (broken.IsAnActor, "describe"),
        (broken.FailsToDescribe, "describe"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_the_one_rule_that_is_broken_is_told(reward: type[broken.Good], rule: str) -> None:
    assert outcome_of(reward())[RuleResult.FAIL] == [rule]


def test_a_server_that_is_sent_a_token_may_forbid_a_method_that_it_does_not_know() -> None:
    with adopted(Security(token="of class compute")):
        assert outcome_of(broken.ForbidsUnknownMethods())[RuleResult.FAIL] == []
    assert outcome_of(broken.ForbidsUnknownMethods())[RuleResult.FAIL] == ["unknown method"]


@pytest.mark.parametrize(
    ("reward", "rule"),
    [
        (broken.HasNoHealth, "health"),
        (broken.HasDefaultLimits, "large messages"),
        (broken.Wavers, "repeatable"),
        (broken.IsIndifferent, "row order"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_what_is_allowed_and_worth_knowing_is_a_warning(reward: type[broken.Good], rule: str) -> None:
    found = outcome_of(reward())
    assert (found[RuleResult.WARN], found[RuleResult.FAIL]) == ([rule], [])


def test_verdicts_that_waver_are_not_compared() -> None:
    assert outcome_of(broken.Wavers())[RuleResult.SKIP] == ["row order"]


def test_where_no_row_has_a_score_the_first_error_is_told_and_nothing_is_compared(tmp_path: Path) -> None:
    with broken.served(broken.ScoresNoRow()) as address:
        ran = command("--target", address, *SMALL, "--json", str(tmp_path / "found.json"))
    assert ran.returncode == 1
    report = json.loads((tmp_path / "found.json").read_text())
    found = {finding["rule"]: finding for finding in report["findings"]}
    assert "the model is not there" in found["scores"]["seen"]
    assert found["row order"]["result"] == "skip"


def test_where_nobody_listens_no_other_rule_is_checked() -> None:
    found = outcome(f"127.0.0.1:{free_ports(1)[0]}")
    assert found[RuleResult.FAIL] == ["reachable"]
    assert len(found[RuleResult.SKIP]) == len(RULES) - 1


SMALL = ("--many", "100", "--max-message", "5")


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "conformance", "reward", *arguments],
        capture_output=True, text=True, timeout=60, cwd=ROOT,
    )  # fmt: skip


def test_a_file_that_cannot_be_written_costs_no_findings() -> None:
    ran = command("--target", f"127.0.0.1:{free_ports(1)[0]}", *SMALL, "--json", "/dev/null/x/found.json")
    assert ran.returncode == 2
    assert "reachable" in ran.stdout
    assert ran.stderr == "error: /dev/null/x/found.json: Not a directory\n"


def test_the_command_prints_a_table_writes_json_and_exits_with_0_where_nothing_fails(tmp_path: Path) -> None:
    with broken.served(broken.HasNoHealth()) as address:
        ran = command("--target", address, *SMALL, "--json", str(tmp_path / "found.json"))
    assert ran.returncode == 0, ran.stderr
    assert "row order" in ran.stdout
    assert "1 warn, 0 fail" in ran.stdout
    report = json.loads((tmp_path / "found.json").read_text())
    assert (report["role"], report["target"], report["passed"]) == ("reward", address, True)
    assert [finding["rule"] for finding in report["findings"]] == list(RULES)


def test_the_command_exits_with_1_where_a_rule_is_broken() -> None:
    with broken.served(broken.IsNotServing()) as address:
        ran = command("--target", address, *SMALL)
    assert ran.returncode == 1
    assert "Set the health" in ran.stdout


def test_rows_of_ones_own_are_read_with_their_metadata(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "response": "b", "level": 3}\n\n{"ground_truth": "c"}\n')
    first, second = read_rows(path)
    assert (first.prompt, first.response, dict(first.metadata)) == ("a", "b", {"level": 3.0})
    assert second.ground_truth == "c"


@pytest.mark.parametrize("text", ["", '{"prompt": "a"}', "[]\n[]", "no json\n{}"])
def test_a_file_of_rows_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"rows\.jsonl"):
        read_rows(path)
