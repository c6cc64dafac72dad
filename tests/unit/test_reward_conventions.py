"""Reward functions of all accepted signatures, in the service and in processes; their further numbers as metrics; and
functions that wait."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from python_path import python_path
from unit import own_rewards

from rlhf.errors import CallCancelled, ConfigError, DeadlineExceeded
from rlhf.v1 import common_pb2, reward_pb2
from services.reward.conventions import ACCEPTED
from services.reward.functions import find_function
from services.reward.scorers.base import Scorer, row_score
from services.reward.scorers.extras import MAX_NAMES, extra_metrics
from services.reward.worker import make_scorer
from services.runtime.worker import CallContext
from settings.function_check import check_function
from settings.reward import RewardTable

TIMEOUT_S = 60.0
MODULE = "unit.own_rewards"


@pytest.fixture(scope="module", autouse=True)
def path() -> Iterator[None]:
    """Processes, too, find the functions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", python_path(Path(__file__).parent.parent))
        yield


def call(timeout_s: float = TIMEOUT_S) -> CallContext:
    return CallContext(common_pb2.Call(call_id="c"), time.monotonic() + timeout_s)


def table(function: str, **keys: Any) -> RewardTable:
    shared = {"role": "reward", "address": "127.0.0.1:1", "function": f"{MODULE}:{function}"}
    return RewardTable.model_validate({**shared, **keys})


def rows(*responses: str, **metadata: Sequence[Any]) -> list[reward_pb2.TextRow]:
    """Rows with ground truth "aa"; the metadata of each has one value of every list that is not None."""
    made = [reward_pb2.TextRow(prompt="p", response=text, ground_truth="aa") for text in responses]
    for name, values in metadata.items():
        for row, value in zip(made, values, strict=True):
            if value is not None:
                row.metadata.update({name: value})
    return made


def scored(
    settings: RewardTable, asked: Sequence[reward_pb2.TextRow]
) -> tuple[list[float | str], Mapping[str, tuple[float, float]]]:
    scorer = make_scorer(settings)
    try:
        found = scorer.score_texts(asked, call())
        return [each.error or each.score for each in found], dict(scorer.metrics)
    finally:
        scorer.close()


@pytest.fixture(params=[0, 2], ids=["in the service", "in processes"])
def processes(request: pytest.FixtureRequest) -> int:
    return request.param


def test_numbers_beside_the_score_become_metrics(processes: int) -> None:
    found, metrics = scored(table("rich", processes=processes), rows("a", "aa", "unscored", "aa"))
    assert found == [1, 2, f"{MODULE}:rich returned no score, only: acc", 2]
    assert metrics == {"extra/acc": (2.0, 3.0)}


def with_tokens(*counts: int) -> list[reward_pb2.TextRow]:
    """Rows of one group whose responses have these numbers of tokens."""
    return [
        reward_pb2.TextRow(prompt="p", response="a", ground_truth="aa", group=1, response_tokens=count)
        for count in counts
    ]


@pytest.mark.parametrize(
    ("function", "options", "expected"),
    [
        ("shortest", {}, [0, 1, 0]),
        ("verl_tokens", {"scale": 2.0}, [6, 2, 4]),
        ("trl_tokens", {}, [3, 1, 2]),
    ],
)
def test_a_function_that_asks_for_it_gets_the_number_of_tokens_of_the_response(
    processes: int, function: str, options: dict[str, Any], expected: list[float]
) -> None:
    settings = table(function, options=options, processes=processes if function != "trl_tokens" else 0)
    assert scored(settings, with_tokens(3, 1, 2))[0] == expected


def test_a_function_gives_a_score_per_token(processes: int) -> None:
    scorer = make_scorer(table("per_token", processes=processes, options={"penalty": 0.5}))
    try:
        (verdict,) = scorer.score_texts(with_tokens(3), call())
    finally:
        scorer.close()
    assert list(verdict.token_scores.scores) == [-0.5, -0.5, 1]


def test_an_array_with_a_number_per_token_is_as_good_as_a_list() -> None:
    found = make_scorer(table("array_per_token")).score_texts(with_tokens(3, 1), call())
    assert [list(each.token_scores.scores) for each in found] == [[0, 0, 1], [1]]


@pytest.mark.parametrize(
    ("verdict", "expected"),
    [
        (np.asarray([0.5, 1.0]), [0.5, 1.0]),
        (np.asarray([0.5]), 0.5),
        (torch.tensor([0.5]), 0.5),
        (np.float32(0.5), 0.5),
        (torch.tensor(0.5), 0.5),
    ],
)
def test_an_array_of_one_number_is_a_score_where_tokens_are_not_asked_for(
    verdict: Any, expected: float | list[float]
) -> None:
    """As a model of one output returns it."""
    found = row_score(verdict)
    assert (list(found.token_scores.scores) if isinstance(expected, list) else found.score) == expected


@pytest.mark.parametrize("verdict", [np.ones((2, 2)), np.asarray(["a", "b"]), np.asarray([1.0, np.nan])])
def test_an_array_that_is_no_scores_is_an_error(verdict: Any) -> None:
    assert row_score(verdict).error


def test_a_row_without_the_number_of_tokens_that_a_function_asks_for_is_an_error() -> None:
    found, _ = scored(table("verl_tokens"), rows("a"))
    assert found == [f"{MODULE}:verl_tokens needs response_tokens, which the row does not have"]


def test_the_number_of_tokens_is_no_option() -> None:
    with pytest.raises(ConfigError, match="takes none named response_tokens, only: scale"):
        make_scorer(table("verl_tokens", options={"response_tokens": 3}))


def test_a_reward_of_verl_gives_its_numbers_too(processes: int) -> None:
    settings = table("compute_score", processes=processes, options={"scale": 3.0})
    assert scored(settings, rows("a", "aa")) == ([0, 3], {"extra/acc": (1.0, 2.0)})


def test_metrics_are_those_of_the_last_call(processes: int) -> None:
    scorer = make_scorer(table("rich", processes=processes))
    try:
        for response, expected in (("aa", 1.0), ("a", 0.0)):
            scorer.score_texts(rows(response), call())
            assert scorer.metrics == {"extra/acc": (expected, 1.0)}
    finally:
        scorer.close()


def test_numbers_of_a_name_per_row_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    found, metrics = scored(table("many"), rows(*(f"name {i}" for i in range(200))))
    assert found == [1] * 200
    assert list(metrics) == [f"extra/name {i}" for i in range(MAX_NAMES)]
    assert "numbers of more than 64 names; left out: extra/name 100" in caplog.text


def test_only_finite_numbers_are_metrics() -> None:
    np: Any = pytest.importorskip("numpy")
    numbers = {
        "a": np.float32(0.5),
        "b": np.bool_(True),
        "c": 10**400,
        "d": np.ones(2),
        5: 1,
        "e": None,
        "f": "1",
    }
    assert extra_metrics([numbers, {"a": 1, "\ud83d": 1, "g": float("inf")}]) == {
        "extra/a": (1.5, 2.0),
        "extra/b": (1.0, 1.0),
        "extra/\\ud83d": (1.0, 1.0),
    }


def test_a_reward_of_trl_sees_all_rows_of_a_call_at_once() -> None:
    assert scored(table("trl"), rows("a", "aaa"))[0] == [0.25, 0.75]
    assert scored(table("trl"), [])[0] == []


def test_a_reward_of_trl_gets_one_row_at_a_time_in_processes() -> None:
    assert scored(table("trl", processes=2), rows("a", "aaa"))[0] == [1, 1]


def test_a_reward_of_trl_gets_the_columns_that_it_names(processes: int) -> None:
    settings = table("trl_columns", processes=processes, options={"bonus": 10})
    asked = rows("a", "aa", "aa", level=[1, 2, None], other=["x", None, None])
    found, _ = scored(settings, asked)
    alone = f"{MODULE}:trl_columns needs level; the rows have completions, ground_truth, prompts"
    assert found == [11, 13, alone if processes else "score is not a number: None"]


def test_a_reward_of_trl_that_reads_conversations_without_a_declaration_is_told_how_to_get_them() -> None:
    found, _ = scored(table("trl_undeclared"), rows("a"))
    assert re.fullmatch(
        rf"{MODULE}:trl_undeclared raised TypeError: string indices must be integers, not 'str'; completions are "
        r"texts; for lists of messages, .* set trl_undeclared\.conversational = True \(own_rewards\.py:\d+\)",
        str(found[0]),
    ), found


@pytest.mark.parametrize("function", ["trl_messages", "trl_declared"])
def test_a_reward_of_trl_that_reads_conversations_gets_messages(function: str, processes: int) -> None:
    assert scored(table(function, processes=processes), rows("a", "aaa"))[0] == [1, 3]


def test_a_column_that_no_row_has_is_an_error_of_every_row() -> None:
    found, _ = scored(table("trl_columns"), rows("a", "aa", answer=["1", "2"]))
    assert (
        found
        == [f"{MODULE}:trl_columns needs level; the rows have answer, completions, ground_truth, prompts"] * 2
    )


def test_a_wrong_number_of_scores_of_a_batch_is_an_error_of_every_row() -> None:
    found, _ = scored(table("trl_short"), rows("a", "b"))
    assert found == [f"{MODULE}:trl_short returned 1 scores for 2 responses"] * 2


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("async_compute_score", ([0, 1], {"extra/waited": (2.0, 2.0)})),
        ("trl_async", ([1, 1], {})),
        ("instance", ([0.25, 0.25], {})),
        ("slow_group", ([2, 2], {})),
        ("named_like_trl", ([2, 2], {})),
    ],
)
def test_functions_that_wait_are_awaited(function: str, expected: Any, processes: int) -> None:
    asked = rows("a", "aa")
    for row in asked:
        row.group = 7
    assert scored(table(function, processes=processes), asked) == expected


@pytest.fixture
def slow() -> Iterator[Scorer]:
    """The scorer of a function that waits, with at most four rows at a time and half a second for each."""
    own_rewards.most = own_rewards.cancelled = 0
    own_rewards.loops.clear()
    scorer = make_scorer(table("slow", concurrency=4, row_timeout_s=0.5))
    yield scorer
    scorer.close()
    assert own_rewards.under_way == 0


def test_rows_wait_side_by_side_up_to_the_limit(slow: Scorer) -> None:
    delays = [f"0.0{1 + i % 9}" for i in range(12)]
    for _ in range(2):
        assert [each.score for each in slow.score_texts(rows(*delays), call())] == [float(x) for x in delays]
    assert own_rewards.most == 4
    assert len(own_rewards.loops) == 1
    assert slow.kind() == f"async function {MODULE}:slow"


def test_a_row_that_takes_too_long_is_cancelled_and_costs_no_other_row_its_score(slow: Scorer) -> None:
    found = slow.score_texts(rows("60", "0.01", "fail", "0.02"), call())
    assert [each.error.partition(" (")[0] or each.score for each in found] == [
        f"{MODULE}:slow took longer than 0.5 s",
        0.01,
        f"{MODULE}:slow raised TimeoutError: its own",
        0.02,
    ]
    assert own_rewards.cancelled == 1


def test_a_function_that_raises_cancelled_error_costs_only_its_row() -> None:
    scorer = make_scorer(table("stubborn", concurrency=1, row_timeout_s=TIMEOUT_S))
    try:
        found = scorer.score_texts(rows("0", "cancelled", "0"), call())
    finally:
        scorer.close()
    assert [each.error or each.score for each in found] == [
        1.0,
        f"{MODULE}:stubborn raised CancelledError",
        1.0,
    ]


def test_a_coroutine_that_ignores_its_end_holds_up_neither_its_row_nor_its_call() -> None:
    scorer = make_scorer(table("stubborn", concurrency=2, row_timeout_s=0.2))
    started = time.monotonic()
    try:
        found = scorer.score_texts(rows("8", "0"), call())
        assert [each.error or each.score for each in found] == [
            f"{MODULE}:stubborn took longer than 0.2 s",
            1.0,
        ]
    finally:
        scorer.close()
    scorer = make_scorer(table("stubborn", concurrency=2, row_timeout_s=TIMEOUT_S))
    try:
        with pytest.raises(DeadlineExceeded):
            scorer.score_texts(rows("8", "8"), call(0.2))
    finally:
        scorer.close()
    assert time.monotonic() - started < 6


def test_rows_are_cancelled_with_their_call() -> None:
    own_rewards.cancelled = 0
    scorer = make_scorer(table("slow", concurrency=4, row_timeout_s=TIMEOUT_S))
    try:
        with pytest.raises(DeadlineExceeded):
            scorer.score_texts(rows("60", "60"), call(0.2))
        assert own_rewards.cancelled == 2
        context = call()
        threading.Timer(0.2, lambda: setattr(context, "cancelled", True)).start()
        with pytest.raises(CallCancelled):
            scorer.score_texts(rows(*["60"] * 6), context)
        assert own_rewards.cancelled == 6
        assert [each.score for each in scorer.score_texts(rows("0.01"), call())] == [0.01]
    finally:
        scorer.close()


REFUSED = [
    ("one_argument", "too many positional arguments"),
    ("five_arguments", "missing a required argument: 'tokenizer'"),
    ("verl_and_more", "missing a required argument: 'tokenizer'"),
    ("trl_ids", "there is no completion_ids here"),
    ("by_name_alone", "missing a required(?: keyword-only)? argument: 'weight'"),
]


@pytest.mark.parametrize(("function", "cause"), REFUSED)
def test_a_function_that_no_convention_can_call_is_refused_with_those_there_are(
    function: str, cause: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        find_function(f"{MODULE}:{function}")
    assert f"function: {MODULE}:{function}(" in str(refused.value)
    assert re.search(f"cannot be called: {cause}", str(refused.value))
    assert ACCEPTED in str(refused.value)


def test_the_check_before_a_run_refuses_it_too() -> None:
    with pytest.raises(
        ConfigError, match=r"^services\.reward\.function: .*one_argument\(response.*like TRL's"
    ):
        check_function("reward", table("one_argument"))
    check_function("reward", table("trl"))


LOOKS_AT_ARGUMENTS = """
from pathlib import Path

Path(__file__).with_name("arguments").write_bytes(Path("/proc/self/cmdline").read_bytes())


def score(prompt, response, ground_truth, metadata, *, key):
    return 0.0
"""


def test_the_options_are_no_argument_of_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every user of the host can read arguments, and options may be secrets."""
    (tmp_path / "looks_at_arguments.py").write_text(LOOKS_AT_ARGUMENTS)
    monkeypatch.setenv("PYTHONPATH", python_path(tmp_path))
    reward = {"role": "reward", "address": "127.0.0.1:1", "startup_timeout_s": 30.0}
    options: dict[str, str | int | float | bool] = {"key": "a secret"}
    check_function("reward", RewardTable(**reward, function="looks_at_arguments:score", options=options))
    assert b"a secret" not in (tmp_path / "arguments").read_bytes()
    with pytest.raises(ConfigError, match="takes none named kye"):
        check_function(
            "reward", RewardTable(**reward, function="looks_at_arguments:score", options={"kye": 1})
        )


STARTS_A_SERVER = """
import subprocess
from pathlib import Path

server = subprocess.Popen(["sleep", "600"])
Path(__file__).with_name("pid").write_text(str(server.pid))


def score(prompt, response, ground_truth, metadata):
    return 0.0
"""


def test_the_check_neither_waits_for_processes_that_the_module_starts_nor_leaves_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have its output, which a check that reads it to its end would wait for."""
    (tmp_path / "with_server.py").write_text(STARTS_A_SERVER)
    monkeypatch.setenv("PYTHONPATH", python_path(tmp_path))
    reward = {"role": "reward", "address": "127.0.0.1:1", "startup_timeout_s": 30.0}
    check_function("reward", RewardTable(**reward, function="with_server:score"))
    deadline = time.monotonic() + 20
    while is_running(int((tmp_path / "pid").read_text())):
        assert time.monotonic() < deadline, "the server is left behind"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    """Whether a process has not ended; a kill takes a moment."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def test_an_option_may_be_a_parameter_that_is_passed_by_name_alone() -> None:
    assert scored(table("by_name_alone", options={"weight": 2}), rows("a"))[0] == [2]


def test_an_option_that_the_convention_passes_itself_is_refused() -> None:
    with pytest.raises(ConfigError, match="takes none named extra_info, only: scale"):
        find_function(f"{MODULE}:compute_score", {"extra_info": 1})


def test_a_function_without_a_signature_is_not_checked() -> None:
    assert find_function("builtins:max")("a", "b", "c", "d") == "d"
