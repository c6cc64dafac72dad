"""Reports of a load test: tables, a self-contained page, and two results side by side."""

import copy
import json
from io import StringIO
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from rich.console import Console

from loadtest import compare, page, table
from loadtest.cli import main
from loadtest.histogram import Histogram
from rlhf.errors import ConfigError


def step(level: float, factor: float = 1.0) -> dict[str, Any]:
    latency = Histogram()
    for number in range(1, 101):
        latency.add(number * factor / 1e4)
    summary = latency.summary()
    return {
        "level": level, "window_s": 10.0, "sent": 100, "sent_per_s": level, "ended": 100, "answered": 98,
        "throughput_per_s": level * 0.98, "rows_per_s": level, "errors": {"UNAVAILABLE": 2},
        "causes": {"UNAVAILABLE": "gone <away>"}, "latency_s": summary, "server_s": {"queue": summary},
        "rest_s": summary, "expected_queue_s": 0.005, "lag_s": summary, "busy": 0.2,
        "warnings": ["the tester fell behind"], "overrun": False, "sustained": True, "testers_limit": False,
        "timeline": [{"start_s": 0.0, "answered_per_s": 9.0, "errors": 0, "p50_s": 0.005, "p99_s": None},
                     {"start_s": 1.0, "answered_per_s": 9.5, "errors": 2, "p50_s": 0.005, "p99_s": 0.01}],
        "curve": latency.curve(), "histogram": latency.encoded(),
        "objectives": [{"objective": "errors=0", "measured": 2, "met": False}],
    }  # fmt: skip


def result(*steps: dict[str, Any]) -> dict[str, Any]:
    at = {"level": 20.0, "throughput": 19.6, "latency_s": 0.005, "sustained": True}
    names = ("vocabulary", "data", "duration_s", "warmup_s", "drain_s", "timeout_s", "connections", "seed")
    return {
        "format": 1, "started_unix_s": 0.0, "interrupted": False,
        "settings": {"role": "reward", "target": "127.0.0.1:1", "method": "ComputeReward", "arrivals": "poisson",
                     "rows": 1, "prompt": {"least": 1, "most": 2}, "response": {"least": 1, "most": 2},
                     **dict.fromkeys(names, 1)},
        "service": {"method": "/rlhf.v1.RewardService/ComputeReward", "ranks": 1},
        "tester": {"python": "3.11"}, "steps": list(steps),
        "knee": at if len(steps) > 1 else None, "capacity": at if len(steps) > 1 else None,
    }  # fmt: skip


def shown(renderable: Any) -> str:
    screen = Console(file=StringIO(), width=200)
    screen.print(renderable)
    return screen.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("levels", [(10.0,), (10.0, 20.0, 40.0)])
def test_the_page_is_well_formed_loads_nothing_and_escapes(levels: tuple[float, ...]) -> None:
    told = result(*map(step, levels))
    told["settings"]["target"] = "<script>"
    html = page.render(told)
    tree = ElementTree.fromstring(html.removeprefix("<!DOCTYPE html>\n"))
    assert not list(tree.iter("script"))
    assert "http" not in html
    assert len(list(tree.iter("svg"))) == (5 if len(levels) > 1 else 3)


def test_the_page_marks_the_knee() -> None:
    assert ">knee</text>" in page.render(result(step(10), step(20)))
    assert ">knee</text>" not in page.render(result(step(10)))


def test_a_step_without_an_answer_can_be_shown() -> None:
    silent = {
        **step(10),
        "latency_s": {},
        "server_s": {},
        "rest_s": {},
        "expected_queue_s": None,
        "curve": [],
        "timeline": [],
    }
    assert "does not say where its time goes" in shown(table.report(result(silent)))
    ElementTree.fromstring(page.render(result(silent)).removeprefix("<!DOCTYPE html>\n"))


def test_the_terminal_tells_errors_warnings_objectives_and_the_knee() -> None:
    text = shown(table.report(result(step(10), step(20))))
    for told in (
        "UNAVAILABLE x 2: gone <away>",
        "the tester fell behind",
        "errors=0: MISSED",
        "knee: 20 calls/s",
    ):
        assert told in text


def test_an_address_in_brackets_is_shown_as_it_is() -> None:
    measured = result(step(10))
    measured["settings"]["target"] = "[fe80::1]:7101"
    assert "at [fe80::1]:7101" in shown(table.report(measured))


def test_differences_are_of_the_levels_that_both_have() -> None:
    before, after = result(step(10), step(20)), result(step(20, factor=1.5), step(40))
    found = compare.differences(before, after)
    assert {difference.level for difference in found} == {20}
    changes = {difference.name: difference.change for difference in found}
    assert changes["p99"] == pytest.approx(0.5, abs=0.002)
    assert changes["answered/s"] == 0
    assert changes["service: queue, mean"] == pytest.approx(0.5, abs=0.002)


def test_settings_that_differ_are_told() -> None:
    before, after = result(step(10)), copy.deepcopy(result(step(10)))
    after["settings"]["rows"] = 8
    after["settings"]["target"] = "127.0.0.1:2"
    assert compare.differing_settings(before, after) == ["rows: 1 and 8"]


@pytest.mark.parametrize("content", ["{", "[]", '{"format": 99, "steps": []}', '{"format": 1}'])
def test_what_is_no_result_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match="--compare"):
        compare.read(path)


def test_files_without_a_level_in_common_are_not_compared(tmp_path: Path) -> None:
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, levels in zip(paths, ([10, 20], [40]), strict=True):
        path.write_text(json.dumps(result(*map(step, levels))))
    ran = CliRunner().invoke(main, ["--compare", *map(str, paths)])
    assert ran.exit_code != 0
    assert "no level is in both: 10, 20 against 40" in ran.output


def test_a_ramp_that_ends_at_its_capacity_is_told_to_end_there() -> None:
    ended, passed = result(step(10), step(20)), result(step(10), step(20))
    for each, level in ((ended, 20), (passed, 10)):
        each["capacity"] = {**each["capacity"], "level": level}
    shown = [table.capacity_text(each, closed=False) for each in (ended, passed)]
    assert shown[0].startswith("at least, the ramp ends here: 20 calls/s")
    assert shown[1].startswith("10 calls/s")


def test_the_command_compares_two_files(tmp_path: Path) -> None:
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, factor in zip(paths, (1.0, 2.0), strict=True):
        path.write_text(json.dumps(result(step(10, factor))))
    ran = CliRunner().invoke(main, ["--compare", *map(str, paths)])
    assert ran.exit_code == 0
    assert "+100" in ran.output


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (["reward", "--method", "Check"], "must be given"),
        (["reward", "--target", "a:1", "--method", "Check", "--rate", "1", "--concurrency", "1"], "exclude"),
        (["reward", "--target", "a:1", "--method", "Check", "--closed"], "--closed"),
        (["reward", "--target", "a:1", "--method", "Check", "--slo", "p99"], "--slo"),
        (["actor", "--target", "a:1", "--method", "UpdateActor"], "changes the service"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_code_2(arguments: list[str], cause: str) -> None:
    ran = CliRunner().invoke(main, arguments)
    assert ran.exit_code == 2
    assert cause in ran.output
    assert ran.output.count("\n") == 1


def test_names_in_a_result_are_shown_as_they_are(tmp_path: Path) -> None:
    """Also those that rich would read as markup; results may come from elsewhere."""
    told = result({**step(10), "server_s": {"[/]": step(10)["latency_s"]}})
    path = tmp_path / "result.json"
    path.write_text(json.dumps(told))
    ran = CliRunner().invoke(main, ["--compare", str(path), str(path)])
    assert ran.exit_code == 0, ran.output
    assert "service: [/], mean" in ran.stdout
