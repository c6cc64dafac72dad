"""Rewards over groups: a function sees all responses to a prompt, whatever the ranks, and an error of a group is the
error of each of its rows."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from python_path import python_path
from unit.test_data_rewards import Group, column_of, reward_of, rewards

from controller.role_groups.balance import by_groups
from controller.role_groups.dataflow import FutureBatch
from controller.role_groups.verdicts import text_rows
from controller.training.scoring import with_groups
from nccl_transfer.refs.batch import Batch
from nccl_transfer.refs.mesh import Mesh
from nccl_transfer.refs.protocols import WholeGroups, get_protocol
from rlhf.errors import ConfigError, RewardFailed
from rlhf.v1 import common_pb2, reward_pb2
from services.reward.functions import find_function
from services.reward.processes import ProcessScorer
from services.reward.worker import FunctionScorer, make_scorer
from services.runtime.worker import CallContext
from settings.reward import RewardTable

ROW_TIMEOUT_S = 1.0
groups_of_rows = st.lists(st.integers(0, 6), max_size=30)


def call() -> CallContext:
    return CallContext(common_pb2.Call(call_id="c"), time.monotonic() + 60.0)


def row(group: int | None, response: str = "a", prompt: str = "p", truth: str = "") -> reward_pb2.TextRow:
    return reward_pb2.TextRow(prompt=prompt, response=response, ground_truth=truth, group=group)


def scores(found: Sequence[reward_pb2.RowScore]) -> list[float | str]:
    return [each.error or each.score for each in found]


@pytest.fixture(scope="module", autouse=True)
def path() -> Iterator[None]:
    """Processes, too, find the functions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", python_path(Path(__file__).parent))
        patch.syspath_prepend(str(Path(__file__).parent))
        yield


@pytest.fixture(scope="module", params=["in the service", "in processes"])
def scorer(request: pytest.FixtureRequest, path: None) -> Iterator[Any]:
    """A scorer of the function `obey` of `group_functions`."""
    name = "group_functions:obey"
    scorer = (
        FunctionScorer(name, {})
        if request.param == "in the service"
        else ProcessScorer(name, {}, processes=2, row_timeout_s=ROW_TIMEOUT_S)
    )
    yield scorer
    scorer.close()


def test_the_rows_of_a_group_are_scored_at_once_wherever_they_stand(path: None) -> None:
    table = RewardTable(
        role="reward", address="127.0.0.1:1", function="group_functions:place", options={"of": 10}
    )
    scorer = make_scorer(table)
    numbers = [7, 2**64 - 1, 7, None, 2**64 - 1, 7, None]
    found = scorer.score_texts([row(number) for number in numbers], call())
    assert scorer.scores_groups
    assert scores(found) == [30, 20, 31, 10, 21, 32, 10]


def test_an_attribute_declares_a_function_as_the_decorator_does(path: None) -> None:
    scorer = FunctionScorer("group_functions:row_of_attribute", {})
    assert scores(scorer.score_texts([row(1), row(1), row(2)], call())) == [2, 2, 1]


def test_a_function_of_rows_scores_no_groups() -> None:
    scorer = FunctionScorer("exact_match", {})
    assert not scorer.scores_groups
    assert scores(scorer.score_texts([row(1, "2", truth="2"), row(1, "3", truth="2")], call())) == [1, 0]


def test_the_examples_reward_what_is_right_and_brief_or_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples" / "plugins"))
    concise = find_function("rlhf_example.rewards:concise", {"bonus": 0.4})
    responses = ["it is 12", "= 12", "12 or so", "", "12\n12"]
    assert concise("", responses, "12", {}) == pytest.approx([0.8, 1, 0, 0, 0.6 + 0.4 * 4 / 5])
    assert concise("", ["a", "b"], "12", {}) == [0, 0]
    shared = find_function("rlhf_example.rewards:shared")
    assert shared("", ["12", " 12 ", "3", "4"], "12", {}) == [0.5, 0.5, 0, 0]
    assert shared("", ["3", "4"], "12", {}) == [0, 0]


def test_options_of_a_function_over_groups_are_checked(path: None) -> None:
    with pytest.raises(ConfigError, match="takes none named off, only: of"):
        find_function("group_functions:place", {"off": 1})


def test_a_function_over_groups_may_score_tokens(scorer: Any) -> None:
    found = scorer.score_texts([row(1, "ab", "of tokens"), row(1, "", "of tokens")], call())
    assert [list(each.token_scores.scores) for each in found] == [[0.5, 0.5], []]


@pytest.mark.parametrize(
    ("prompt", "cause"),
    [
        ("too few", "group_functions:obey returned 1 scores for 2 responses"),
        ("a number", "returned float, not a sequence with one score per response"),
        ("a text", "returned str, not a sequence"),
        ("by name", "returned dict, not a sequence"),
        ("nothing", "returned NoneType, not a sequence"),
    ],
)
def test_a_wrong_number_of_scores_is_the_error_of_every_row_of_the_group(
    prompt: str, cause: str, scorer: Any
) -> None:
    rows = [row(1, "bb"), row(2, "x", prompt), row(1, "ccc"), row(2, "y", prompt)]
    first, second, third, last = scores(scorer.score_texts(rows, call()))
    assert (first, third) == (2, 3)
    assert second == last
    assert cause in str(second)


def test_what_a_function_raises_is_the_error_of_every_row_of_the_group(scorer: Any) -> None:
    found = scores(scorer.score_texts([row(1, "a"), row(1, "raise"), row(2, "bb")], call()))
    assert found[0] == found[1]
    assert str(found[0]).startswith(
        "group_functions:obey raised ValueError: no such answer (group_functions.py:"
    )
    assert found[2] == 2


def test_a_score_that_is_not_finite_is_the_error_of_its_row(scorer: Any) -> None:
    bad, good = scorer.score_texts([row(1, "a", "not finite"), row(1, "b", "not finite")], call())
    assert ("not finite" in bad.error, good.score) == (True, 1.0)


def test_rows_of_a_group_that_differ_in_the_prompt_are_errors(scorer: Any) -> None:
    found = scores(scorer.score_texts([row(1, "a", "p"), row(1, "a", "q", "3"), row(2)], call()))
    assert found == ["the rows of group 1 differ in prompt, ground_truth"] * 2 + [1]


@pytest.mark.parametrize(("response", "cause"), [("hang", "took longer than 1 s"), ("crash", "SIGSEGV")])
def test_a_group_that_hangs_or_crashes_is_an_error_and_the_others_are_scored(
    response: str, cause: str, path: None
) -> None:
    scorer = ProcessScorer("group_functions:obey", {}, processes=2, row_timeout_s=ROW_TIMEOUT_S)
    try:
        rows = [row(1, "a"), row(1, response), row(2, "bb"), row(3, "ccc"), row(2, "dddd")]
        found = scores(scorer.score_texts(rows, call()))
        assert found[2:] == [2, 3, 4]
        assert found[0] == found[1]
        assert cause in str(found[0])
        assert scores(scorer.score_texts([row(1, "a")], call())) == [1]
    finally:
        scorer.close()


@given(groups_of_rows)
def test_rows_are_ordered_by_groups_and_keep_their_order_within(numbers: list[int]) -> None:
    order, sizes = by_groups(np.array(numbers, np.int64))
    expected = [[i for i, each in enumerate(numbers) if each == number] for number in dict.fromkeys(numbers)]
    assert order.tolist() == [index for group in expected for index in group]
    assert sizes.tolist() == list(map(len, expected))


@given(st.lists(st.integers(1, 5), max_size=12), st.integers(1, 5))
def test_ranks_get_whole_groups_and_as_many_as_the_protocol_gives_rows(sizes: list[int], ranks: int) -> None:
    protocol, mesh = get_protocol("DP_PROTO"), Mesh(data=ranks)
    whole, rows = WholeGroups(protocol, np.array(sizes, np.int64)), sum(sizes)
    dealt = whole.distribute(rows, mesh)
    ends = np.cumsum([0, *sizes])
    for mine, groups in zip(dealt, protocol.distribute(len(sizes), mesh), strict=True):
        assert mine.tolist() == [index for g in groups for index in range(ends[g], ends[g + 1])]
    outputs = Batch.of(x=np.arange(rows))
    assert whole.restore(outputs, rows, mesh) is outputs


def test_with_more_ranks_than_groups_some_get_no_rows() -> None:
    whole = WholeGroups(get_protocol("DP_PROTO"), np.array([3, 2]))
    assert [each.tolist() for each in whole.distribute(5, Mesh(data=4))] == [[0, 1, 2], [3, 4], [], []]


def test_a_batch_has_its_own_groups_or_those_of_its_prompts_or_one_for_each_row() -> None:
    number = np.array([4, 4])
    batch = FutureBatch.of(response=["a", "b"], prompt_number=number)
    assert column_of(with_groups(batch), "group").values.tolist() == [4, 4]
    own = batch | FutureBatch.of(group=np.array([8, 9]))
    assert column_of(with_groups(own), "group").values.tolist() == [8, 9]
    lone = column_of(with_groups(FutureBatch.of(response=["a", "b"])), "group").values
    assert [each.group for each in text_rows(Batch.of(response=["a", "b"], group=lone))] == [2**63, 2**63 + 1]


def test_a_group_with_a_row_that_failed_is_sent_again_whole() -> None:
    answers = iter([None, 7.0])
    group = Group(lambda text: next(answers) if text == "c1" else float(len(text)))
    group.scores_groups = True
    batch = FutureBatch.of(response=["ab", "c1", "def22", "4"], prompt_number=np.array([5, 3, 5, 3]))
    assert rewards(reward_of({"a": group}, {"all": {"a": 1.0}}, "retry").score(batch)) == [2, 7, 5, 1]
    assert group.asked == [["ab", "c1", "def22", "4"], ["c1", "4"]]


def test_a_row_that_fails_when_its_group_is_sent_again_is_an_error_though_it_was_scored_before() -> None:
    answers = iter([1.0, None, None])
    group = Group(lambda text: next(answers) if text == "4" else None if text == "c1" else 2.0)
    group.scores_groups = True
    batch = FutureBatch.of(response=["ab", "c1", "4"], prompt_number=np.array([5, 3, 3]))
    with pytest.raises(RewardFailed, match="2 of 3 rows could not be scored"):
        reward_of({"a": group}, {"all": {"a": 1.0}}, "retry").score(batch)
