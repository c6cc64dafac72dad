"""Rewards that check answers: what is judged right and wrong, and that one that hangs or crashes costs its row only."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlhf.errors import CallCancelled, ConfigError, DeadlineExceeded
from rlhf.v1 import common_pb2, reward_pb2
from services.reward.functions import BUILT_IN, find_function, is_verl
from services.reward.processes import ProcessScorer
from services.worker import CallContext

GSM8K_TEST = Path(__file__).parents[3] / "shared" / "data" / "gsm8k_test.jsonl"
ROW_TIMEOUT_S = 1.0


def score(name: str, response: str, ground_truth: str = "", /, **options: Any) -> Any:
    return find_function(name, options)("", response, ground_truth, {})


@pytest.fixture(scope="module")
def gsm8k_answers() -> list[str]:
    if not GSM8K_TEST.is_file():
        pytest.skip("the GSM8K test rows are not here")
    answers = [json.loads(line)["answer"] for line in GSM8K_TEST.read_text().splitlines()]
    assert len(answers) == 1319
    return answers


@pytest.mark.parametrize("mode", ["strict", "flexible"])
def test_every_ground_truth_of_gsm8k_is_right_against_itself(mode: str, gsm8k_answers: list[str]) -> None:
    for answer in gsm8k_answers:
        final = answer.rpartition("####")[2].strip()
        assert score("gsm8k", answer, answer, mode=mode) == 1, answer
        assert score("gsm8k", answer, final, mode=mode) == 1, answer
        assert score("gsm8k", f"#### {final}", answer, mode=mode) == 1, answer


@pytest.mark.parametrize("mode", ["strict", "flexible"])
def test_no_ground_truth_of_gsm8k_is_right_with_its_number_changed(
    mode: str, gsm8k_answers: list[str]
) -> None:
    for answer in gsm8k_answers:
        solution, _, final = answer.rpartition("####")
        changed = f"{solution}#### {int(final.replace(',', '')) + 1}"
        assert score("gsm8k", changed, answer, mode=mode) == 0, changed


STRICT_CASES: list[tuple[str, str, float]] = [
    # the number
    ("#### 18", "18", 1),
    ("#### 19", "18", 0),
    ("#### 180", "18", 0),
    ("#### 8", "18", 0),
    ("#### 018", "18", 1),
    ("####18", "18", 1),
    ("#### 18.", "18", 1),
    ("####\n18", "18", 1),
    # extra text
    ("2 x 9 = 18\n#### 18", "18", 1),
    ("2 x 9 = 18\n#### 17", "18", 0),
    ("#### 17\nNo:\n#### 18", "18", 1),
    ("#### 18\nNo:\n#### 17", "18", 0),
    ("#### 18\nThat took 3 steps.", "18", 1),
    ("The answer is 18", "18", 0),
    ("#### The answer is 18", "18", 1),
    ("#### 18 or 19", "18", 0),
    ("####", "18", 0),
    ("", "18", 0),
    ("#### eighteen", "18", 0),
    ("### 18", "18", 0),
    # commas
    ("#### 1,234", "1234", 1),
    ("#### 1234", "1,234", 1),
    ("#### 1,234,567", "1234567", 1),
    ("#### 1,23", "123", 0),
    ("#### 1.234", "1234", 0),
    ("#### 1.234.567", "1234567", 0),
    # units
    ("#### 18 eggs", "18", 1),
    ("#### 18kg", "18", 1),
    ("#### 18 km/h", "18", 1),
    ("#### 18", "18 eggs", 1),
    ("#### 18 m2", "18", 1),
    # dollars and percent
    ("#### $18", "18", 1),
    ("#### $18.00", "18", 1),
    ("#### $1,234.50", "1234.5", 1),
    ("#### US$18", "18", 1),
    ("#### 18 dollars", "$18", 1),
    ("#### $18.50", "18", 0),
    ("#### 50%", "50", 1),
    ("#### 50%", "0.5", 0),
    ("#### 12.5 %", "12.5", 1),
    # decimals
    ("#### 18.0", "18", 1),
    ("#### .5", "0.5", 1),
    ("#### 0.3333", "1/3", 0),
    ("#### 0.1", "0.10", 1),
    ("#### 18.01", "18", 0),
    # fractions
    ("#### 1/2", "0.5", 1),
    ("#### 2/4", "1/2", 1),
    ("#### 1 1/2", "1.5", 1),
    ("#### 1/3", "0.33", 0),
    ("#### 1/0", "0", 0),
    ("#### 3/4/2020", "0.75", 0),
    # negative numbers
    ("#### -5", "-5", 1),
    ("#### \N{MINUS SIGN}5", "-5", 1),
    ("#### -$5", "-5", 1),
    ("#### $-5", "-5", 1),
    ("#### 5", "-5", 0),
    ("#### -5", "5", 0),
    ("#### -1/2", "-0.5", 1),
    ("#### -0", "0", 1),
    # too long to be one
    ("#### " + "9" * 5000, "9", 0),
    ("#### 1e3", "1000", 0),
]

FLEXIBLE_CASES = [
    ("#### 18", "18", 1),
    ("The answer is 18.", "18", 1),
    ("The answer is 18!", "18", 1),
    ("So 2 x 9 = 18", "18", 1),
    ("18, I am sure. Or 19?", "18", 0),
    ("It is **18**.", "18", 1),
    (r"It is \boxed{18}.", "18", 1),
    ("It is $1,234.", "1234", 1),
    ("10-3", "3", 1),
    ("10 - 3 = 7", "7", 1),
    ("x=-7", "-7", 1),
    ("It is 7 below: -7 degrees", "-7", 1),
    ("twenty", "20", 0),
    ("", "20", 0),
]


@pytest.mark.parametrize(("response", "truth", "expected"), STRICT_CASES)
def test_gsm8k_judges_the_number_after_the_mark(response: str, truth: str, expected: float) -> None:
    assert score("gsm8k", response, truth) == expected


@pytest.mark.parametrize(("response", "truth", "expected"), FLEXIBLE_CASES)
def test_gsm8k_judges_the_last_number_when_asked_to_be_flexible(
    response: str, truth: str, expected: float
) -> None:
    assert score("gsm8k", response, truth, mode="flexible") == expected


@pytest.mark.parametrize("truth", ["", "eggs", "####"])
def test_gsm8k_without_a_number_to_compare_with_is_an_error_and_no_zero(truth: str) -> None:
    with pytest.raises(ValueError, match="no number"):
        score("gsm8k", "#### 1", truth)


def test_an_unknown_mode_of_gsm8k_is_an_error() -> None:
    with pytest.raises(ValueError, match="neither strict nor flexible"):
        score("gsm8k", "#### 1", "1", mode="lenient")


MATH_CASES = [
    (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", 1),
    (r"The answer is $\frac12$.", "0.5", 1),
    (r"\boxed{1/3}", r"\frac{1}{3}", 1),
    (r"\boxed{\frac{1}{3}}", r"\frac{1}{4}", 0),
    (r"\boxed{x^2+2x+1}", "(x+1)^2", 1),
    (r"\boxed{x^2+2x-1}", "(x+1)^2", 0),
    (r"\boxed{2\sqrt{2}}", r"\sqrt{8}", 1),
    (r"\boxed{\{1,2,3\}}", r"\{3,2,1\}", 1),
    (r"\boxed{(1,2)}", "(2,1)", 0),
    (r"\boxed{-3}", "-3", 1),
    (r"\boxed{3}", "-3", 0),
    (r"\boxed{1,234}", "1234", 1),
    (r"\boxed{50\%}", r"50\%", 1),
    (r"\boxed{12\text{ cm}}", "12", 1),
    ("\\boxed{3}\n\nNo, that is wrong.\n\n\\boxed{4}", "4", 1),
    (r"\boxed{42}", r"\boxed{42}", 1),
    (r"\boxed{3}, or rather \boxed{4}", "4", 1),
    (r"\boxed{3}, or rather \boxed{4}", "3", 0),
    (r"\boxed{\frac{1}{\sqrt{4}}} is it", "0.5", 1),
    (r"\boxed{42", "43", 0),
    ("I do not know", "42", 0),
    ("", "42", 0),
]


@pytest.mark.parametrize(("response", "truth", "expected"), MATH_CASES)
def test_math_judges_what_is_equal_as_mathematics(response: str, truth: str, expected: float) -> None:
    pytest.importorskip("math_verify")
    assert score("math", response, truth) == expected


def test_format_wants_the_whole_response() -> None:
    assert score("format", " <think>a\nb</think> c\n") == 1
    assert score("format", "well: <think>a</think> c") == 0
    assert score("format", "<think>a</think>") == 0
    assert score("format", "A: 1", pattern=r"A: \d") == 1
    assert score("format", "A: 12", pattern=r"A: \d") == 0


@pytest.mark.parametrize(
    ("characters", "options", "expected"),
    [
        (1000, {}, 1.0),
        (1001, {}, 0.0),
        (10, {"limit": 10, "fade": 10}, 1.0),
        (15, {"limit": 10, "fade": 10}, 0.5),
        (20, {"limit": 10, "fade": 10}, 0.0),
        (50, {"limit": 10, "fade": 10}, 0.0),
    ],
)
def test_length_is_free_up_to_a_limit(characters: int, options: dict[str, int], expected: float) -> None:
    assert score("length", "x" * characters, **options) == pytest.approx(expected)


def test_an_option_that_a_function_does_not_take_is_refused_with_those_it_takes() -> None:
    with pytest.raises(ConfigError, match="gsm8k takes none named modus, only: mode"):
        find_function("gsm8k", {"modus": "strict"})


def test_an_unknown_function_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=", ".join(sorted(BUILT_IN))):
        find_function("gsm9k")


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> Any:
    """As a user of verl has it."""
    return {"score": float(solution_str == ground_truth), "seen": (data_source, extra_info)}


def own_parameters(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any, *, scale: float = 1.0
) -> Any:
    return [scale, float(data_source == "math"), float(extra_info["index"])]


def takes_anything(solution_str: str, **rest: Any) -> float:
    return float(sorted(rest) == ["data_source", "extra_info", "ground_truth"])


METADATA = {"data_source": "math", "extra_info": {"index": 7.0}}


@pytest.mark.parametrize(
    ("function", "options", "expected"),
    [
        (compute_score, {}, 1.0),
        (own_parameters, {"scale": 2.0}, [2.0, 1.0, 7.0]),
        (takes_anything, {}, 1.0),
    ],
)
def test_a_reward_of_verl_is_called_by_its_own_parameter_names(
    function: Any, options: Mapping[str, Any], expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BUILT_IN, "theirs", function)
    assert is_verl(function)
    assert find_function("theirs", options)("prompt", "a", "a", METADATA) == expected


def call(timeout_s: float = 60.0) -> CallContext:
    return CallContext(common_pb2.Call(call_id="c"), time.monotonic() + timeout_s)


def rows(*responses: str) -> list[reward_pb2.TextRow]:
    return [reward_pb2.TextRow(response=response) for response in responses]


@pytest.fixture
def scorer(monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessScorer]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    scorer = ProcessScorer("hostile_verifiers:obey", {}, processes=2, row_timeout_s=ROW_TIMEOUT_S)
    yield scorer
    scorer.close()


@pytest.mark.parametrize(
    ("response", "cause"),
    [
        ("hang", "took longer than 1 s"),
        ("crash", "killed by SIGSEGV"),
        ("exit", "exit code 3"),
        ("raise", "ValueError: no such answer"),
        ("eat memory", "MemoryError"),
    ],
)
def test_a_verifier_that_fails_costs_its_row_only_and_the_pool_goes_on(
    response: str, cause: str, scorer: ProcessScorer
) -> None:
    for _ in range(2):
        first, failed, *others = scorer.score_texts(rows("a", response, "bb", "ccc", "dddd"), call())
        assert cause in failed.error
        assert [verdict.score for verdict in (first, *others)] == [1, 2, 3, 4]


def test_many_hanging_verifiers_are_killed_side_by_side(scorer: ProcessScorer) -> None:
    scorer.score_texts(rows("a", "a"), call())
    started = time.monotonic()
    verdicts = scorer.score_texts(rows("hang", "hang"), call())
    assert all(verdict.error for verdict in verdicts)
    assert time.monotonic() - started < 2 * ROW_TIMEOUT_S


def test_what_a_verifier_prints_is_no_verdict_and_there_is_nothing_to_read(scorer: ProcessScorer) -> None:
    assert [verdict.score for verdict in scorer.score_texts(rows("talk", "a"), call())] == [0, 1]


def test_a_large_row_gets_through(scorer: ProcessScorer) -> None:
    (verdict,) = scorer.score_texts(rows("x" * (5 << 20)), call())
    assert verdict.score == 5 << 20


def test_a_call_past_its_deadline_ends_and_kills_what_still_runs(scorer: ProcessScorer) -> None:
    (pid,) = (int(verdict.score) for verdict in scorer.score_texts(rows("pid"), call()))
    with pytest.raises(DeadlineExceeded):
        scorer.score_texts(rows("hang", "hang"), call(timeout_s=0.3))
    assert not psutil.pid_exists(pid)
    assert [verdict.score for verdict in scorer.score_texts(rows("a"), call())] == [1]


def test_a_call_that_was_cancelled_ends(scorer: ProcessScorer) -> None:
    context = call()
    context.cancelled = True
    with pytest.raises(CallCancelled):
        scorer.score_texts(rows("a"), context)


def test_what_a_verifier_has_started_ends_with_it(scorer: ProcessScorer, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    (row,) = rows("leave a child")
    row.metadata.update({"note": str(note)})
    (verdict,) = scorer.score_texts([row], call())
    assert "took longer" in verdict.error
    deadline = time.monotonic() + 10
    while (
        psutil.pid_exists(int(note.read_text()))
        and psutil.Process(int(note.read_text())).status() != "zombie"
    ):
        assert time.monotonic() < deadline


def test_closing_leaves_no_process(scorer: ProcessScorer) -> None:
    pids = [int(verdict.score) for verdict in scorer.score_texts(rows("pid", "pid"), call())]
    scorer.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_math_that_would_never_end_costs_its_row_only(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("math_verify")
    scorer = ProcessScorer("math", {}, processes=1, row_timeout_s=3.0)
    texts = [("$9^{9^{9^{9^{9}}}}$", "3"), ("$4$", "4")]
    try:
        asked = [reward_pb2.TextRow(response=response, ground_truth=truth) for response, truth in texts]
        endless, plain = scorer.score_texts(asked, call())
    finally:
        scorer.close()
    assert "took longer than 3 s" in endless.error
    assert plain.score == 1
