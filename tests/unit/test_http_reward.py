"""Rewards behind HTTP: requests, answers, and endpoints that are busy, slow or wrong."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import itertools
import json
import logging
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from unit.http_endpoint import Endpoint, Reply, serving

from deploy.certificates import write_certificates
from rlhf.errors import CallCancelled, ConfigError, DeadlineExceeded, RewardFailed
from rlhf.v1 import common_pb2, reward_pb2
from services.reward import json_client
from services.reward.json_client import JsonClient, retry_after_s, shown_url
from services.reward.remote import RemoteScorer, read_answer
from services.reward.worker import make_scorer
from services.runtime.worker import CallContext
from settings.endpoints import HttpTable
from settings.reward import RewardTable

pytest.importorskip("httpx")

SERVER = Path(__file__).parent.parent.parent / "examples" / "reward_http" / "server.py"
TIMEOUT_S = 30.0


def lengths(number: int, body: Any) -> Reply:
    """Scores each response by its length."""
    return 200, {}, {"scores": [len(row["response"]) for row in body["rows"]]}


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with serving() as endpoint:
        endpoint.answer = lengths
        yield endpoint


def table(*endpoints: Endpoint, **keys: Any) -> HttpTable:
    urls = [f"{each.url}/score" for each in endpoints]
    return HttpTable.model_validate({"urls": urls, "backoff_s": 0.01, **keys})


def call(timeout_s: float = TIMEOUT_S) -> CallContext:
    return CallContext(common_pb2.Call(call_id="c"), time.monotonic() + timeout_s)


def rows(*responses: str) -> list[reward_pb2.TextRow]:
    return [reward_pb2.TextRow(prompt="1+1=", response=text, ground_truth="2") for text in responses]


@contextlib.contextmanager
def scorer_of(settings: HttpTable) -> Iterator[RemoteScorer]:
    scorer = RemoteScorer(settings)
    try:
        yield scorer
    finally:
        scorer.close()


def scored(
    settings: HttpTable, *responses: str, context: CallContext | None = None
) -> list[reward_pb2.RowScore]:
    with scorer_of(settings) as scorer:
        return scorer.score_texts(rows(*responses), context or call())


def verdicts(scores: list[reward_pb2.RowScore]) -> list[float | str]:
    return [score.error or score.score for score in scores]


def test_rows_are_sent_in_batches_and_scores_come_in_row_order(endpoint: Endpoint) -> None:
    def late(number: int, body: Any) -> Reply:
        time.sleep(0.05 * (3 - number % 3))
        return lengths(number, body)

    endpoint.answer = late
    found = scored(table(endpoint, batch_rows=3), *("x" * i for i in range(1, 11)))
    assert verdicts(found) == list(range(1, 11))
    assert sorted(len(body["rows"]) for _, _, body in endpoint.requests) == [1, 3, 3, 3]


def test_a_request_has_the_fields_of_each_row(endpoint: Endpoint) -> None:
    (row,) = rows('2 "\U0001f600"\n')
    row.metadata.update({"level": 3, "tests": [{"input": "a"}]})
    counted = [reward_pb2.TextRow(response="", response_tokens=count) for count in (0, 5)]
    with scorer_of(table(endpoint)) as scorer:
        scorer.score_texts([row, *counted], call())
    ((path, headers, body),) = endpoint.requests
    assert path == "/v1/score"
    assert headers["Content-Type"] == "application/json"
    sent = {
        "prompt": "1+1=",
        "response": '2 "\U0001f600"\n',
        "ground_truth": "2",
        "metadata": {"level": 3, "tests": [{"input": "a"}]},
    }
    empty = {"prompt": "", "response": "", "ground_truth": "", "metadata": {}}
    assert body == {"rows": [sent, {**empty, "response_tokens": 0}, {**empty, "response_tokens": 5}]}


def test_no_rows_are_no_request(endpoint: Endpoint) -> None:
    assert scored(table(endpoint)) == []
    assert endpoint.requests == []


def test_no_more_requests_are_under_way_than_allowed(endpoint: Endpoint) -> None:
    def late(number: int, body: Any) -> Reply:
        time.sleep(0.05)
        return lengths(number, body)

    endpoint.answer = late
    scored(table(endpoint, batch_rows=1, concurrency=3), *"abcdefghijkl")
    assert endpoint.most == 3
    assert len(endpoint.requests) == 12


def test_results_carry_metrics_whose_mean_is_over_the_rows_that_have_them(endpoint: Endpoint) -> None:
    endpoint.answer = lambda number, body: (
        200,
        {},
        {
            "results": [
                {"score": 1, "metrics": {"acc": True, "steps": 3, "note": "text", "nan": float("nan")}},
                {"score": 0.5, "metrics": {"acc": False, "score": 9}},
                {"score": None, "error": "no tests", "metrics": {"acc": 1}},
                {"score": [0.25, -1], "other": "key"},
            ]
        },
    )
    with scorer_of(table(endpoint)) as scorer:
        found = scorer.score_texts(rows(*"abcd"), call())
        assert scorer.metrics == {"extra/acc": (1.0, 2.0), "extra/steps": (3.0, 1.0)}
    assert verdicts(found[:2]) == [1, 0.5]
    assert found[2].error == f"{endpoint.url}/score: results[2]: no tests"
    assert list(found[3].token_scores.scores) == [0.25, -1.0]


@pytest.mark.parametrize(
    ("value", "cause"),
    [
        (None, "no score (null)"),
        ("1.0", "score is not a number: '1.0'"),
        ([1.0, "2"], "score is not a number"),
        ([1.0, None], "score is not a number"),
        ({"score": 1}, "score is not a number"),
        (float("nan"), "score is not finite: nan"),
        (float("inf"), "score is not finite"),
        (10**400, "score is not a number: 1000"),
        ([0.0] * 200 + [float("nan")], "score is not finite: [0.0, 0.0"),
    ],
)
def test_what_is_no_score_is_an_error_of_its_row_that_names_address_and_place(
    value: Any, cause: str, endpoint: Endpoint
) -> None:
    endpoint.answer = lambda number, body: (200, {}, {"scores": [1, value, 2]})
    first, bad, last = scored(table(endpoint), *"abc")
    assert bad.error.startswith(f"{endpoint.url}/score: scores[1]: {cause}")
    assert len(bad.error) < 400
    assert [first.score, last.score] == [1, 2]


@pytest.mark.parametrize(
    ("result", "cause"),
    [
        (1.0, 'no object with "score": 1.0'),
        ({"metrics": {}}, 'no object with "score"'),
        ({"score": 1, "metrics": [1]}, '"metrics" is no object: [1]'),
        ({"score": 1, "error": "timeout"}, "timeout"),
        ({"score": 1, "error": {}}, "{}"),
        ({"score": None}, "no score (null)"),
    ],
)
def test_a_result_that_is_malformed_is_an_error_of_its_row(result: Any, cause: str) -> None:
    read = read_answer("http://x/score", {"results": [{"score": 1}, result]}, 2)
    assert read.scores[0].score == 1
    assert read.scores[1].error.startswith(f"http://x/score: results[1]: {cause}")


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        ({"scores": [1, 2]}, "2 scores for 3 rows"),
        ({"results": []}, "0 results for 3 rows"),
        ({"scores": 1}, '"scores" is no list: 1'),
        ({"scores": [1, 2, 3], "results": []}, "no object with either"),
        ([1, 2, 3], "no object with either"),
        ({}, "no object with either"),
        (None, "no object with either"),
    ],
)
def test_an_answer_that_has_not_one_element_per_row_is_an_error_of_every_row(
    content: Any, cause: str, endpoint: Endpoint
) -> None:
    endpoint.answer = lambda number, body: (200, {}, content)
    found = scored(table(endpoint), *"abc")
    assert {score.error.partition(": ")[0] for score in found} == {f"{endpoint.url}/score"}
    assert all(cause in score.error for score in found)
    assert len(endpoint.requests) == 1


@pytest.mark.parametrize("text", ["<html>", "[" * 100_000, "\xff", "", '{"scores": [1,'])
def test_an_answer_that_is_no_json_is_an_error_of_its_rows_only(text: str, endpoint: Endpoint) -> None:
    endpoint.answer = lambda number, body: (
        (200, {}, text) if body["rows"][0]["response"] == "bad" else lengths(number, body)
    )
    good, bad = scored(table(endpoint, batch_rows=1), "a", "bad")
    assert good.score == 1
    assert "the answer is not valid JSON" in bad.error
    assert len(bad.error) < 400


@pytest.mark.parametrize("code", [408, 429, 500, 503])
def test_an_endpoint_that_is_busy_is_asked_again(code: int, endpoint: Endpoint) -> None:
    endpoint.answer = lambda number, body: lengths(number, body) if number == 2 else (code, {}, "busy")
    assert verdicts(scored(table(endpoint), "a", "bb")) == [1, 2]
    assert len(endpoint.requests) == 3


def test_waits_grow_and_are_at_least_what_the_endpoint_asks_for(endpoint: Endpoint) -> None:
    times: list[float] = []

    def answer(number: int, body: Any) -> Reply:
        times.append(time.monotonic())
        if number == 3:
            return lengths(number, body)
        return 503, {"Retry-After": "1"} if number == 2 else {}, ""

    endpoint.answer = answer
    assert verdicts(scored(table(endpoint, backoff_s=0.1), "a")) == [1]
    first, second, third = (later - earlier for earlier, later in itertools.pairwise(times))
    assert first >= 0.1
    assert second >= 0.2
    assert third >= 1.0


def test_an_endpoint_that_stays_busy_is_an_error_after_all_tries(endpoint: Endpoint) -> None:
    endpoint.answer = lambda number, body: (503, {}, "busy")
    assert verdicts(scored(table(endpoint, retries=2), "a")) == [
        f"{endpoint.url}/score: HTTP 503, after 3 tries"
    ]


def test_a_retry_asks_the_next_address(endpoint: Endpoint) -> None:
    with serving() as other:
        other.answer = lambda number, body: (500, {}, "broken")
        found = scored(table(other, endpoint, batch_rows=1, retries=1), *"abcd")
    assert verdicts(found) == [1] * 4
    assert len(endpoint.requests) == 4
    assert other.requests


def test_a_wait_that_is_too_long_is_an_error_at_once(endpoint: Endpoint) -> None:
    endpoint.answer = lambda number, body: (429, {"Retry-After": "86400"}, "busy")
    (verdict,) = scored(table(endpoint), "a", context=call(5.0))
    assert "HTTP 429 with Retry-After 86400 s; the longest allowed is 60 s" in verdict.error


def test_a_retry_after_is_a_number_of_seconds_or_a_date() -> None:
    assert retry_after_s("7") == 7
    assert retry_after_s("9" * 400) == float("inf")
    assert 25 < retry_after_s(formatdate(time.time() + 30, usegmt=True)) <= 31
    assert [retry_after_s(text) for text in ("", "soon", formatdate(0, usegmt=True))] == [0, 0, 0]


def test_a_wrong_request_is_not_sent_again(endpoint: Endpoint) -> None:
    endpoint.answer = lambda number, body: (422, {}, "rows[0]: no such task")
    (verdict,) = scored(table(endpoint), "a")
    assert verdict.error == f"{endpoint.url}/score: HTTP 422: 'rows[0]: no such task'"
    assert len(endpoint.requests) == 1


def test_a_redirect_is_an_error_that_names_its_target_and_nobody_follows_it(endpoint: Endpoint) -> None:
    with serving() as other:
        target = f"{other.url}/other?key=secret"
        endpoint.answer = lambda number, body: (307, {"Location": target}, "")
        (verdict,) = scored(table(endpoint), "a")
        assert other.requests == []
    assert f"HTTP 307 redirects to {other.url}/other; redirects are not followed" in verdict.error
    assert "secret" not in verdict.error


@pytest.mark.parametrize(
    ("location", "target"), [("http://[", "an address that cannot be read"), ("//x/y", "http://x/y")]
)
def test_a_redirect_to_an_odd_place_is_an_error_too(location: str, target: str, endpoint: Endpoint) -> None:
    endpoint.answer = lambda number, body: (302, {"Location": location}, "")
    (verdict,) = scored(table(endpoint), "a")
    assert f"HTTP 302 redirects to {target}; " in verdict.error


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip"])
def test_an_encoding_that_may_grow_without_bound_is_refused(encoding: str, endpoint: Endpoint) -> None:
    endpoint.answer = lambda number, body: (200, {"Content-Encoding": encoding}, {"scores": [1]})
    (verdict,) = scored(table(endpoint), "a")
    assert f"the answer has Content-Encoding '{encoding}', which was not asked for" in verdict.error


def test_a_packed_answer_is_unpacked_up_to_the_limit(endpoint: Endpoint) -> None:
    handler: Any = endpoint.server.RequestHandlerClass
    content = {"a": gzip.compress(b'{"scores": [1]}'), "bb": gzip.compress(b" " * (64 << 20))}

    def packed(self: Any) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        answer = content[body["rows"][0]["response"]]
        self.send_response(200)
        self.send_header("content-encoding", "gzip")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    handler.do_POST = packed
    good, bad = scored(table(endpoint, batch_rows=1), "a", "bb")
    assert good.score == 1
    assert bad.error == f"{endpoint.url}/score: the answer has more than {32 << 20} bytes"


def test_an_endpoint_that_hangs_is_given_up_after_each_time_limit(endpoint: Endpoint) -> None:
    released = threading.Event()

    def answer(number: int, body: Any) -> Reply:
        released.wait(TIMEOUT_S)
        return lengths(number, body)

    endpoint.answer = answer
    started = time.monotonic()
    (verdict,) = scored(table(endpoint, request_timeout_s=0.2, retries=1), "a")
    released.set()
    assert verdict.error == f"{endpoint.url}/score: no answer within 0.2 s, after 2 tries"
    assert time.monotonic() - started < 10


def test_an_answer_that_trickles_is_given_up_too(endpoint: Endpoint) -> None:
    released = threading.Event()
    handler: Any = endpoint.server.RequestHandlerClass

    def trickle(self: Any) -> None:
        self.send_response(200)
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            while not released.wait(0.02):
                self.wfile.write(b" ")

    handler.do_POST = trickle
    (verdict,) = scored(table(endpoint, request_timeout_s=0.3, retries=0), "a")
    released.set()
    assert "no answer within 0.3 s, after 1 tries" in verdict.error


def test_nobody_listening_is_an_error_of_every_row() -> None:
    settings = HttpTable(urls=["http://127.0.0.1:9/score"], retries=1, backoff_s=0.01)
    found = scored(settings, "a", "b")
    assert all("http://127.0.0.1:9/score cannot be reached: ConnectError" in each.error for each in found)
    assert all("after 2 tries" in each.error for each in found)


def test_an_answer_beyond_the_limit_is_an_error_and_is_not_read_to_its_end(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_client, "MAX_ANSWER_BYTES", 1 << 16)
    endpoint.answer = lambda number, body: (200, {}, {"scores": [1], "padding": "x" * (32 << 20)})

    async def ask() -> None:
        client = JsonClient([endpoint.url], HttpTable(), {})
        try:
            await client.post({})
        finally:
            await client.close()

    with pytest.raises(RewardFailed, match=f"^{endpoint.url}: the answer has more than 65536 bytes$"):
        asyncio.run(ask())
    assert len(endpoint.requests) == 1


def test_a_call_past_its_deadline_or_cancelled_ends_while_the_endpoint_thinks(endpoint: Endpoint) -> None:
    released, asked = threading.Event(), threading.Event()

    def answer(number: int, body: Any) -> Reply:
        asked.set()
        released.wait(TIMEOUT_S)
        return lengths(number, body)

    endpoint.answer = answer
    started = time.monotonic()
    with scorer_of(table(endpoint)) as scorer:
        with pytest.raises(DeadlineExceeded):
            scorer.score_texts(rows("a"), call(0.3))
        asked.clear()
        context = call()
        canceller = threading.Thread(
            target=lambda: (asked.wait(TIMEOUT_S), setattr(context, "cancelled", True))
        )
        canceller.start()
        with pytest.raises(CallCancelled):
            scorer.score_texts(rows("a"), context)
        canceller.join()
        released.set()
        endpoint.answer = lengths
        assert verdicts(scorer.score_texts(rows("abc"), call())) == [3]
    assert time.monotonic() - started < 10


def test_headers_come_from_the_environment_and_appear_nowhere_else(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("VERIFIER_AUTHORIZATION", "Bearer secret-1")
    monkeypatch.setenv("TENANT", "tenant-7")
    endpoint.answer = lambda number, body: (401, {}, f"not {endpoint.requests[number][1]}")
    variables = {"Authorization": "VERIFIER_AUTHORIZATION", "X-Tenant": "TENANT"}
    settings = table(endpoint, header_variables=variables)
    with caplog.at_level(logging.DEBUG), scorer_of(settings) as scorer:
        (refused,) = scorer.score_texts(rows("a"), call())
        endpoint.answer = lambda number, body: (200, {}, {"scores": ["secret-1"]})
        (no_number,) = scorer.score_texts(rows("a"), call())
        shown = scorer.kind()
    _, headers, _ = endpoint.requests[0]
    assert (headers["Authorization"], headers["X-Tenant"]) == ("Bearer secret-1", "tenant-7")
    assert "HTTP 401" in refused.error
    assert "***" in refused.error
    assert "***" in no_number.error
    told = "\n".join([refused.error, no_number.error, shown, caplog.text, settings.model_dump_json()])
    assert "secret-1" not in told
    assert "tenant-7" not in told


KEY = "sk-" + "0123456789abcdef" * 3
FILL = "x" * (200 - 20)


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        (200, {"scores": [FILL + KEY]}),
        (200, {"scores": [["'" + FILL + KEY]]}),
        (200, {FILL + KEY: 1}),
        (200, [[{"a": [FILL + KEY]}]]),
        (200, {"results": [{"score": None, "error": FILL + KEY}]}),
        (200, {"results": [{"score": 1, "metrics": FILL + KEY}]}),
        (200, FILL + KEY),
        (200, "x" * 780 + KEY),
        (200, "<" + KEY),
        (422, FILL + KEY),
        (422, json.dumps({"detail": FILL + KEY})),
    ],
)
def test_a_header_that_an_answer_repeats_is_redacted_before_the_answer_is_cut(
    code: int, answer: Any, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERIFIER_AUTHORIZATION", f"Bearer {KEY}")
    endpoint.answer = lambda number, body: (code, {}, answer)
    (verdict,) = scored(table(endpoint, header_variables={"Authorization": "VERIFIER_AUTHORIZATION"}), "a")
    assert verdict.error
    assert KEY[:8] not in verdict.error


@pytest.mark.parametrize("key", ["quote'\"slash/back\\slash-1", "a/b\\c"])
@pytest.mark.parametrize("code", [200, 422])
def test_a_header_with_characters_that_are_escaped_is_redacted_too(
    key: str, code: int, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERIFIER_AUTHORIZATION", key)
    settings = table(endpoint, header_variables={"Authorization": "VERIFIER_AUTHORIZATION"})
    for answer in ({"scores": [key]}, json.dumps({"a": key})[:-1], json.dumps(key).replace("/", "\\/") + ","):
        endpoint.answer = lambda number, body, answer=answer: (code, {}, answer)
        (verdict,) = scored(settings, "a")
        assert "***" in verdict.error
        assert "slash" not in verdict.error


def test_the_target_of_a_redirect_is_redacted_before_it_is_cut(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERIFIER_AUTHORIZATION", KEY)
    endpoint.answer = lambda number, body: (307, {"Location": f"/{FILL[30:]}{KEY}"}, "")
    (verdict,) = scored(table(endpoint, header_variables={"Authorization": "VERIFIER_AUTHORIZATION"}), "a")
    assert "redirects to" in verdict.error
    assert KEY[:8] not in verdict.error


def test_names_of_metrics_are_redacted_and_words_of_the_format_are_read_as_they_are(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERIFIER_AUTHORIZATION", KEY)
    monkeypatch.setenv("MODE", "score")
    endpoint.answer = lambda number, body: (
        200,
        {},
        {"results": [{"score": 0.5, "metrics": {f"echo {KEY}": 1}}]},
    )
    variables = {"Authorization": "VERIFIER_AUTHORIZATION", "X-Mode": "MODE"}
    with scorer_of(table(endpoint, header_variables=variables)) as scorer:
        assert verdicts(scorer.score_texts(rows("a"), call())) == [0.5]
        assert scorer.metrics == {"extra/echo ***": (1.0, 1.0)}


@pytest.mark.parametrize("value", [None, "", " \n", "two\nlines", "caf\xe9"])
def test_a_header_without_a_usable_value_is_told_before_any_row(
    value: str | None, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VERIFIER_AUTHORIZATION", raising=False)
    if value is not None:
        monkeypatch.setenv("VERIFIER_AUTHORIZATION", value)
    with pytest.raises(ConfigError, match=r"http\.header_variables\.Authorization: .*VERIFIER_AUTHORIZATION"):
        RemoteScorer(table(endpoint, header_variables={"Authorization": "VERIFIER_AUTHORIZATION"}))


@pytest.mark.parametrize(
    ("keys", "cause"),
    [
        ({"urls": ["127.0.0.1:8000"]}, "not an http:// or https:// address"),
        ({"urls": ["http://"]}, "not an http:// or https:// address"),
        ({"urls": ["ftp://x/score"]}, "not an http:// or https:// address"),
        ({"urls": ["http://x:99999/"]}, "not an http:// or https:// address"),
        ({"urls": ["http://x/a b"]}, "not an http:// or https:// address"),
        ({"urls": ["http://x/#part"]}, "not an http:// or https:// address"),
        ({"urls": ["http://x/", "https://me:secret@x/"]}, "a user or password is not allowed"),
        ({"header_variables": {"A B": "X"}}, "'A B' is not a name of a header"),
        ({"header_variables": {"Host": "X"}}, "Host is set by the request itself"),
        ({"header_variables": {"X-A": "X", "x-a": "Y"}}, "x-a is given twice"),
        ({"header_variables": {"Authorization": "Bearer secret"}}, "name of an environment variable"),
        ({"batch_rows": 0}, "greater than or equal to 1"),
    ],
)
def test_a_table_that_cannot_work_is_refused_without_a_secret(keys: dict[str, Any], cause: str) -> None:
    with pytest.raises(ValidationError) as refused:
        HttpTable.model_validate(keys)
    (mistake,) = refused.value.errors()
    assert cause in mistake["msg"]
    assert "secret" not in mistake["msg"]


def test_an_address_is_shown_without_what_may_be_secret() -> None:
    assert shown_url("https://me:pw@host:1/a/b?key=1#c") == "https://host:1/a/b"


def test_kind_http_needs_an_address_and_makes_its_scorer(endpoint: Endpoint) -> None:
    keys: dict[str, Any] = {"role": "reward", "address": "127.0.0.1:1", "kind": "http"}
    with pytest.raises(ValidationError, match=r"kind http needs http\.urls"):
        RewardTable.model_validate(keys)
    scorer = make_scorer(RewardTable.model_validate({**keys, "http": table(endpoint).model_dump()}))
    try:
        assert scorer.kind() == f"http {endpoint.url}/score"
        assert verdicts(scorer.score_texts(rows("ab"), call())) == [2]
    finally:
        scorer.close()


def test_a_function_that_is_an_address_is_told_the_kind_that_asks_one() -> None:
    with pytest.raises(ValidationError, match=r"is an address; kind = .http. asks one, given in http\.urls"):
        RewardTable(role="reward", address="127.0.0.1:1", function="http://x/score")


def test_certificates_are_verified(
    endpoint: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_certificates(tmp_path / "certificates", [], 1)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "certificates/service.pem", tmp_path / "certificates/service.key")
    endpoint.server.socket = context.wrap_socket(endpoint.server.socket, server_side=True)
    url = f"https://127.0.0.1:{endpoint.server.server_port}/score"
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    (verdict,) = scored(HttpTable(urls=[url], retries=0), "a")
    assert "cannot be reached: ConnectError" in verdict.error
    assert "certificate verify failed" in verdict.error
    assert endpoint.requests == []
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "certificates/ca.pem"))
    assert verdicts(scored(HttpTable(urls=[url], retries=0), "a")) == [1]


def test_a_certificate_file_that_is_not_there_is_told_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/no/such.pem")
    with pytest.raises(ConfigError, match="an HTTP client cannot be made"):
        JsonClient(["https://x/"], HttpTable(), {})


@contextlib.contextmanager
def example(**environment: str) -> Iterator[str]:
    """The address of the example's server, which runs."""
    process = subprocess.Popen(
        [sys.executable, str(SERVER), "--port", "0"], env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[1]
    finally:
        process.kill()
        process.communicate()


def test_the_example_scores_rows_and_counts_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERIFIER_AUTHORIZATION", "Bearer key-1")
    asked = [*rows("2", " 2\n", "33"), reward_pb2.TextRow(response="2")]
    with example(VERIFIER_KEY="key-1") as url:
        settings = HttpTable(
            urls=[url], batch_rows=2, header_variables={"Authorization": "VERIFIER_AUTHORIZATION"}
        )
        with scorer_of(settings) as scorer:
            found = scorer.score_texts(asked, call())
            assert scorer.metrics == {"extra/characters": (4.0, 3.0)}
        (refused,) = scored(HttpTable(urls=[url]), "2")
    assert [score.score for score in found[:3]] == [1, 1, 0]
    assert found[3].error == f"{url}: results[1]: the row has no ground truth"
    assert "HTTP 401" in refused.error


@pytest.mark.parametrize(
    ("body", "code"), [(b"{}", 400), (b"<", 400), (b'{"rows": 1}', 400), (b'{"rows": [1]}', 200)]
)
def test_the_example_answers_what_is_no_request(body: bytes, code: int) -> None:
    import httpx

    with example() as url:
        answer = httpx.post(url, content=body, timeout=TIMEOUT_S, trust_env=False)
    assert answer.status_code == code
    assert json.loads(answer.content)
