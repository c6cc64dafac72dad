"""Rewards that check answers: what is judged right and wrong."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rlhf.errors import ConfigError
from services.reward.conventions import convention_of
from services.reward.functions import BUILT_IN, find_function, score_range
from settings.reward_options import OPTIONS

GSM8K = Path(__file__).parents[1] / "data" / "gsm8k_answers.jsonl"


def score(name: str, response: str, ground_truth: str = "", /, **options: Any) -> Any:
    return find_function(name, options)("", response, ground_truth, {})


@pytest.fixture(scope="module")
def gsm8k_answers() -> list[str]:
    return [json.loads(line)["answer"] for line in GSM8K.read_text("utf-8").splitlines()]


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
    ("#### 1{,}000", "1000", 1),
    (r"#### 1\,000", "1000", 1),
    ("#### 1 000", "1000", 1),
    ("#### 1 000 000", "1,000,000", 1),
    ("#### 1\N{NARROW NO-BREAK SPACE}000", "1000", 1),
    ("#### 1000", "1 000", 1),
    ("#### 1 00", "100", 0),
    ("#### 12 1000", "121000", 0),
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
    ("#### - 5", "-5", 1),
    ("#### -5", "- 5", 1),
    ("#### - 5", "5", 0),
    ("#### 10 - 5", "-5", 0),
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
    ("It is 1{,}000 km", "1000", 1),
    ("3 200 g bags", "200", 1),
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


def test_the_config_knows_the_options_and_their_defaults() -> None:
    assert OPTIONS.keys() == BUILT_IN.keys()
    for name, kind in OPTIONS.items():
        by_name = inspect.signature(BUILT_IN[name]).parameters.values()
        taken = {each.name: each.default for each in by_name if each.kind is each.KEYWORD_ONLY}
        assert kind().model_dump() == taken


def half(prompt: str, response: str, ground_truth: str, metadata: Mapping[str, Any]) -> float:
    return 0.5


def test_functions_state_the_range_of_their_scores_or_it_is_not_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert {score_range(name) for name in BUILT_IN if name != "environment"} == {(0.0, 1.0)}
    assert score_range("environment") is None
    monkeypatch.setitem(BUILT_IN, "half", half)
    assert score_range("half") is None
    monkeypatch.setattr(half, "score_range", (0.5, 0.5), raising=False)
    assert score_range("half") == (0.5, 0.5)


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
        (compute_score, {}, {"score": 1.0, "seen": ("math", {"index": 7.0})}),
        (own_parameters, {"scale": 2.0}, [2.0, 1.0, 7.0]),
        (takes_anything, {}, 1.0),
    ],
)
def test_a_reward_of_verl_is_called_by_its_own_parameter_names(
    function: Any, options: Mapping[str, Any], expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BUILT_IN, "theirs", function)
    assert convention_of(function) == "verl"
    assert find_function("theirs", options)("prompt", "a", "a", METADATA) == expected
