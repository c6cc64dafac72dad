"""Reward functions in the service: their exceptions are errors of the rows, with a traceback in the log."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from rlhf.errors import ConfigError
from rlhf.v1.reward_pb2 import TextRow
from services.reward.functions import BUILT_IN, find_function
from services.reward.loaded import LoadedFunction
from settings import reward


def divides(prompt: str, response: str, ground_truth: str, metadata: Mapping[str, Any]) -> float:
    return 1 / len(response)


def test_the_traceback_of_an_exception_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        mine = LoadedFunction("mine", divides)
        scores = [mine.score([TextRow(response=text)]).scores[0] for text in ("", "a", "")]
    line = divides.__code__.co_firstlineno + 1
    cause = f"mine raised ZeroDivisionError: division by zero (test_reward_functions.py:{line})"
    assert [score.error for score in scores] == [cause, "", cause]
    (record,) = caplog.records
    assert "in divides\n    return 1 / len(response)" in record.getMessage()


def test_an_exception_with_half_a_surrogate_pair_is_an_error_of_the_row() -> None:
    def fails(prompt: str, response: str, ground_truth: str, metadata: Mapping[str, Any]) -> float:
        raise ValueError(f"unknown answer {json.loads(response)}")

    (score,) = LoadedFunction("mine", fails).score([TextRow(response='"\\ud83d"')]).scores
    assert score.error.startswith(r"mine raised ValueError: unknown answer \ud83d (")


def test_the_error_names_the_line_of_the_function_also_where_a_library_raises() -> None:
    def fails(prompt: str, response: str, ground_truth: str, metadata: Mapping[str, Any]) -> float:
        return json.loads(response)

    (score,) = LoadedFunction("mine", fails).score([TextRow(response="{")]).scores
    line = fails.__code__.co_firstlineno + 1
    assert score.error.endswith(f" (test_reward_functions.py:{line})")


def test_a_function_that_calls_sys_exit_gives_its_row_an_error() -> None:
    def exits(prompt: str, response: str, ground_truth: str, metadata: Mapping[str, Any]) -> float:
        sys.exit("no key")

    (score,) = LoadedFunction("mine", exits).score([TextRow()]).scores
    assert score.error.startswith("mine raised SystemExit: no key (")


@pytest.mark.parametrize("truth", ["", " \n"])
def test_an_exact_match_with_nothing_is_an_error(truth: str) -> None:
    (score,) = LoadedFunction.load("exact_match", {}).score([TextRow(ground_truth=truth)]).scores
    assert score.error == "exact_match raised ValueError: the row has no ground truth"


def test_the_config_knows_the_functions() -> None:
    assert set(BUILT_IN) == reward.BUILT_IN


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("gsm9k", "neither module:function nor one of: environment, exact_match, format"),
        ("no_module:f", "'no_module:f' cannot be imported: ModuleNotFoundError"),
        ("os:name", "'os:name' is not callable"),
    ],
)
def test_a_function_that_cannot_be_found_is_an_error(name: str, cause: str) -> None:
    with pytest.raises(ConfigError, match=cause):
        find_function(name)
