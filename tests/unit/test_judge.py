"""The judge: what it is asked, how what it says is read, and what an endpoint that is busy, slow or wrong comes to."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError
from unit.http_endpoint import Endpoint, Reply, serving

from rlhf.errors import CallCancelled, ConfigError, DeadlineExceeded, RewardFailed
from rlhf.v1 import common_pb2, reward_pb2
from services.reward.judge import JudgeScorer, fill, read_completion, read_score
from services.runtime.worker import CallContext
from settings.endpoints import JudgeTable

pytest.importorskip("httpx")


def completion(said: Any, reason: str = "stop") -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", "content": said}, "finish_reason": reason}]}


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    """An OpenAI-compatible server."""
    with serving() as endpoint:
        endpoint.answer = lambda number, body: (200, {}, completion("Score: 7"))
        yield endpoint


def table(endpoint: Endpoint, **keys: Any) -> JudgeTable:
    return JudgeTable.model_validate({"url": endpoint.url, "model": "judge-1", "backoff_s": 0.01, **keys})


def call(timeout_s: float = 30.0) -> CallContext:
    return CallContext(common_pb2.Call(call_id="c"), time.monotonic() + timeout_s)


def judged(
    judge: JudgeTable, *responses: str, context: CallContext | None = None
) -> list[reward_pb2.RowScore]:
    scorer = JudgeScorer(judge)
    rows = [reward_pb2.TextRow(prompt="1+1=", response=text, ground_truth="2") for text in responses]
    try:
        return scorer.score_texts(rows, context or call())
    finally:
        scorer.close()


def test_the_judge_is_asked_by_the_rubric_for_each_row(endpoint: Endpoint) -> None:
    rubric = "{prompt} is {ground_truth}? {response} {other} {}"
    judge = table(endpoint, rubric=rubric, temperature=0.5, max_tokens=9)
    (verdict,) = judged(judge, "{prompt}")
    assert verdict.score == 7
    ((path, headers, body),) = endpoint.requests
    assert path == "/v1/chat/completions"
    assert "Authorization" not in {name.title() for name in headers}
    assert body == {
        "model": "judge-1",
        "messages": [{"role": "user", "content": "1+1= is 2? {prompt} {other} {}"}],
        "temperature": 0.5,
        "max_tokens": 9,
    }


def test_verdicts_come_in_row_order_however_late_the_judge_says_them(endpoint: Endpoint) -> None:
    def answer(number: int, body: Any) -> Reply:
        score = int(body["messages"][0]["content"])
        time.sleep(0.05 * (score % 3))
        return 200, {}, completion(f"Score: {score}")

    endpoint.answer = answer
    verdicts = judged(table(endpoint, rubric="{response}", highest=99), *(str(i) for i in range(20)))
    assert [verdict.score for verdict in verdicts] == list(range(20))


def test_no_more_requests_are_under_way_than_allowed(endpoint: Endpoint) -> None:
    def answer(number: int, body: Any) -> Reply:
        time.sleep(0.05)
        return 200, {}, completion("Score: 1")

    endpoint.answer = answer
    judged(table(endpoint, concurrency=3), *["a"] * 12)
    assert endpoint.most == 3
    assert len(endpoint.requests) == 12


@pytest.mark.parametrize("code", [408, 429, 500, 503])
def test_an_endpoint_that_is_busy_is_asked_again(code: int, endpoint: Endpoint) -> None:
    endpoint.answer = lambda number, body: (
        (200, {}, completion("Score: 3")) if number == 2 else (code, {}, "busy")
    )
    (verdict,) = judged(table(endpoint), "a")
    assert verdict.score == 3
    assert len(endpoint.requests) == 3


def test_an_endpoint_that_stays_busy_is_an_error_of_the_row_after_all_tries(endpoint: Endpoint) -> None:
    endpoint.answer = lambda number, body: (503, {}, "busy")
    (verdict,) = judged(table(endpoint, retries=2), "a")
    assert verdict.error == f"judge judge-1: {endpoint.url}/chat/completions: HTTP 503, after 3 tries"
    assert len(endpoint.requests) == 3


@pytest.mark.parametrize("seconds", ["86400", "9" * 400])
def test_an_endpoint_that_asks_for_a_long_wait_is_an_error_of_the_row_at_once(
    seconds: str, endpoint: Endpoint
) -> None:
    endpoint.answer = lambda number, body: (429, {"Retry-After": seconds}, "busy")
    (verdict,) = judged(table(endpoint), "a", context=call(timeout_s=5.0))
    assert "HTTP 429 with Retry-After" in verdict.error
    assert "the longest allowed is 60 s" in verdict.error
    assert len(endpoint.requests) == 1


def test_waits_grow_and_are_at_least_what_the_endpoint_asks_for(endpoint: Endpoint) -> None:
    times: list[float] = []

    def answer(number: int, body: Any) -> Reply:
        times.append(time.monotonic())
        if number == 3:
            return 200, {}, completion("Score: 3")
        return 429, {"Retry-After": "1"} if number == 2 else {}, ""

    endpoint.answer = answer
    judged(table(endpoint, backoff_s=0.1), "a")
    first, second, third = (later - earlier for earlier, later in itertools.pairwise(times))
    assert first >= 0.1
    assert second >= 0.2
    assert third >= 1.0


def test_a_wrong_request_is_not_sent_again(endpoint: Endpoint) -> None:
    endpoint.answer = lambda number, body: (404, {}, "no model judge-1")
    (verdict,) = judged(table(endpoint), "a")
    assert "HTTP 404: 'no model judge-1'" in verdict.error
    assert len(endpoint.requests) == 1


def test_nobody_listening_is_an_error_of_the_row() -> None:
    (verdict,) = judged(
        JudgeTable(url="http://127.0.0.1:9/v1", model="judge-1", retries=1, backoff_s=0.01), "a"
    )
    assert "http://127.0.0.1:9/v1/chat/completions cannot be reached" in verdict.error
    assert "after 2 tries" in verdict.error


def test_a_request_that_takes_too_long_is_given_up(endpoint: Endpoint) -> None:
    released = threading.Event()

    def answer(number: int, body: Any) -> Reply:
        released.wait(10)
        return 200, {}, completion("Score: 1")

    endpoint.answer = answer
    (verdict,) = judged(table(endpoint, request_timeout_s=0.2, retries=1), "a")
    released.set()
    assert "no answer within 0.2 s, after 2 tries" in verdict.error


def test_a_call_past_its_deadline_ends_while_the_judge_thinks(endpoint: Endpoint) -> None:
    released = threading.Event()

    def answer(number: int, body: Any) -> Reply:
        released.wait(10)
        return 200, {}, completion("Score: 1")

    endpoint.answer = answer
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        judged(table(endpoint), "a", context=call(timeout_s=0.3))
    assert time.monotonic() - started < 5
    released.set()


def test_a_call_that_was_cancelled_asks_nobody(endpoint: Endpoint) -> None:
    context = call()
    context.cancelled = True
    with pytest.raises(CallCancelled):
        judged(table(endpoint), "a", context=context)
    assert endpoint.requests == []


def test_the_key_of_the_environment_is_sent_and_never_told(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret-1")
    endpoint.answer = lambda number, body: (401, {}, "not you")
    (verdict,) = judged(table(endpoint, api_key_variable="JUDGE_KEY"), "a")
    ((_, headers, _),) = endpoint.requests
    assert {name.title(): value for name, value in headers.items()}["Authorization"] == "Bearer secret-1"
    assert "secret-1" not in verdict.error


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"url": ""}, "judge.url"),
        ({"model": ""}, "judge.model"),
        ({"api_key_variable": "NO_SUCH"}, "NO_SUCH"),
    ],
)
def test_what_is_missing_is_told_before_any_row(keys: dict[str, str], named: str, endpoint: Endpoint) -> None:
    with pytest.raises(ConfigError, match=named):
        JudgeScorer(table(endpoint, **keys))


@pytest.mark.parametrize(
    "keys",
    [
        {"rubric": "no place"},
        {"url": "127.0.0.1:8000"},
        {"url": "http://me:secret@127.0.0.1"},
        {"verdict_pattern": "("},
        {"verdict_pattern": "a"},
        {"lowest": 5.0, "highest": 1.0},
    ],
)
def test_a_table_that_cannot_work_is_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        JudgeTable.model_validate(keys)


@pytest.mark.parametrize(
    ("said", "score"),
    [
        ("Score: 7", 7),
        ("It is right.\n\n**Score: 7.5**", 7.5),
        ("score: 0\n", 0),
        ("Score: 4\nIndeed:\nScore: 4.0", 4),
        ("**Score:** 10.", 10),
        ("- Score: **6**", 6),
        ("(Score: 2)", 2),
        ("`Score: 7`", 7),
        ("Score: 0.5  \r\n", 0.5),
    ],
)
def test_a_score_is_read_from_its_line(said: str, score: float) -> None:
    assert read_score(said, JudgeTable()) == score


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        ("", "no score"),
        ("I would give it seven.", "no score"),
        ("Score: 7/10", "no score"),
        ("Score: high", "no score"),
        ("The answer says Score: 10, which is bold.", "no score"),
        ("Score: 3\nOr rather:\nScore: 7", "several scores: 3, 7"),
        ("Score: 11", "not between 0 and 10"),
        ("Score: -1", "not between 0 and 10"),
        ("Score: .5", "no score"),
        ("Score: -.5", "no score"),
        ("Score: \u22125", "no score"),
        ("Score: - 5", "no score"),
        ("Score: 8%", "no score"),
    ],
)
def test_what_is_no_single_score_within_bounds_fails_loudly(said: str, cause: str) -> None:
    with pytest.raises(RewardFailed, match=cause):
        read_score(said, JudgeTable())


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        ({}, "not a chat completion"),
        ({"choices": []}, "not a chat completion"),
        ([], "not a chat completion"),
        (None, "not a chat completion"),
        (completion(None), "no text"),
        (completion("Score: 1", "length"), "cut off"),
    ],
)
def test_an_answer_that_is_no_completion_fails_loudly(answer: Any, cause: str) -> None:
    with pytest.raises(RewardFailed, match=cause):
        read_completion(answer)


def test_an_answer_that_is_no_json_is_an_error_of_its_row_only(endpoint: Endpoint) -> None:
    endpoint.answer = lambda number, body: (
        (200, {}, "<html>") if "bad" in body["messages"][0]["content"] else (200, {}, completion("Score: 2"))
    )
    good, bad, other = judged(table(endpoint, rubric="{response}"), "a", "bad", "b")
    assert "not valid JSON: '<html>'" in bad.error
    assert [good.score, other.score] == [2, 2]


@pytest.mark.parametrize(
    ("headers", "reply", "cause"),
    [
        ({"Content-Encoding": "gzip"}, "not gzip", "cannot be read: DecodingError"),
        ({}, "[" * 100_000, "not valid JSON"),
    ],
)
def test_an_answer_that_cannot_be_read_is_an_error_of_its_row_only(
    headers: dict[str, str], reply: str, cause: str, endpoint: Endpoint
) -> None:
    endpoint.answer = lambda number, body: (
        (200, headers, reply)
        if "bad" in body["messages"][0]["content"]
        else (200, {}, completion("Score: 2"))
    )
    good, bad = judged(table(endpoint, rubric="{response}", retries=0), "a", "bad")
    assert cause in bad.error
    assert good.score == 2


def test_texts_of_a_row_are_put_in_once() -> None:
    row = reward_pb2.TextRow(prompt="{response}", response="{ground_truth}", ground_truth="{prompt}")
    assert fill("{prompt}|{response}|{ground_truth}", row) == "{response}|{ground_truth}|{prompt}"
