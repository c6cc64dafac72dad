"""Reward functions in processes of their own: one that hangs or crashes costs its row only, and a verifier that does so
over a response has found it wrong."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from python_path import python_path

from rlhf.errors import CallCancelled, DeadlineExceeded
from rlhf.v1 import common_pb2, reward_pb2
from services.reward import fork_server
from services.reward.fork_server import Child
from services.reward.loaded import Scored
from services.reward.processes import ProcessScorer
from services.reward.worker import make_scorer
from services.runtime.worker import CallContext
from settings.reward import RewardTable

ROW_TIMEOUT_S = 1.0


def call(timeout_s: float = 60.0) -> CallContext:
    return CallContext(common_pb2.Call(call_id="c"), time.monotonic() + timeout_s)


def wait_until_ended(process: psutil.Process) -> None:
    deadline = time.monotonic() + 10
    with contextlib.suppress(psutil.NoSuchProcess):
        while process.status() != "zombie":
            assert time.monotonic() < deadline


def rows(*responses: str) -> list[reward_pb2.TextRow]:
    return [reward_pb2.TextRow(response=response) for response in responses]


@pytest.fixture(scope="module")
def path() -> Iterator[None]:
    """Processes find the functions below."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", python_path(Path(__file__).parent))
        patch.syspath_prepend(str(Path(__file__).parent))
        yield


@pytest.fixture(scope="module")
def scorer(path: None) -> Iterator[ProcessScorer]:
    scorer = ProcessScorer("hostile_verifiers:obey", {}, processes=2, row_timeout_s=ROW_TIMEOUT_S)
    yield scorer
    scorer.close()


@pytest.fixture(scope="module")
def verifier(path: None) -> Iterator[ProcessScorer]:
    """The same function, as a verifier that reads ground truths."""
    scorer = ProcessScorer("hostile_verifiers:verify", {}, processes=2, row_timeout_s=ROW_TIMEOUT_S)
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


def test_the_options_of_a_function_are_no_argument_of_its_processes(path: None) -> None:
    """Every user of the host can read arguments, and options may be secrets."""
    scorer = ProcessScorer(
        "hostile_verifiers:know", {"key": "a secret"}, processes=1, row_timeout_s=ROW_TIMEOUT_S
    )
    try:
        assert [verdict.score for verdict in scorer.score_texts(rows("a secret", "another"), call())] == [
            1,
            0,
        ]
        server = psutil.Process(scorer._server._process.pid)
        for process in (server, *server.children(recursive=True)):
            assert "a secret" not in " ".join(process.cmdline())
    finally:
        scorer.close()


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
    with contextlib.suppress(psutil.NoSuchProcess):
        wait_until_ended(psutil.Process(int(note.read_text())))


def test_closing_leaves_no_process(path: None) -> None:
    scorer = ProcessScorer("hostile_verifiers:obey", {}, processes=2, row_timeout_s=ROW_TIMEOUT_S)
    pids = [int(verdict.score) for verdict in scorer.score_texts(rows("pid", "pid"), call())]
    server = psutil.Process(pids[0]).ppid()
    scorer.close()
    assert not any(psutil.pid_exists(pid) for pid in (*pids, server))


@pytest.mark.parametrize(
    ("response", "cause"),
    [("hang", "timeout"), ("spin", "timeout"), ("crash", "crashed"), ("exit", "crashed"), ("raise", "failed"),
     ("eat memory", "failed"), ("give up", "too_difficult")],
)  # fmt: skip
def test_a_response_on_which_a_verifier_gives_up_is_wrong_and_counted_by_cause(
    response: str, cause: str, verifier: ProcessScorer
) -> None:
    first, given_up, last = verifier.score_texts(rows("a", response, "bb"), call())
    assert [verdict.score for verdict in (first, last)] == [1, 2]
    assert given_up.WhichOneof("verdict") == "score"
    assert given_up.score == 0
    assert verifier.metrics == {"gave_up": (1.0, 3.0), f"gave_up/{cause}": (1.0, 3.0)}


@pytest.mark.parametrize(
    ("truth", "cause"),
    [
        ("raise", "ValueError: no such answer"),
        ("crash", "killed by SIGSEGV"),
        ("hang", "took longer than 1 s"),
    ],
)
def test_a_ground_truth_that_cannot_be_read_is_an_error_of_its_row(
    truth: str, cause: str, verifier: ProcessScorer
) -> None:
    fine, failed = verifier.score_texts(
        [
            reward_pb2.TextRow(response="a"),
            reward_pb2.TextRow(response="a", ground_truth=truth),
        ],
        call(),
    )
    assert fine.score == 1
    assert cause in failed.error
    assert verifier.metrics == {"gave_up": (0.0, 2.0)}


def test_a_process_that_somebody_else_kills_is_an_error_of_its_row(verifier: ProcessScorer) -> None:
    (verdict,) = verifier.score_texts(rows("be killed"), call())
    assert "killed by SIGKILL" in verdict.error


def test_a_killed_process_is_replaced_by_a_fork_and_so_at_once(verifier: ProcessScorer) -> None:
    (before,) = verifier.score_texts(rows("pid"), call())
    server = psutil.Process(int(before.score)).ppid()
    verifier.score_texts(rows("crash", "crash"), call())
    (after,) = verifier.score_texts(rows("pid"), call())
    assert psutil.Process(int(after.score)).ppid() == server


def test_a_service_that_stands_still_finds_no_response_wrong_by_that(
    verifier: ProcessScorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one of a container that is paused, whose verifier stands still too."""
    score = Child.score

    def stand_still(child: psutil.Process) -> None:
        child.suspend()
        time.sleep(2 * ROW_TIMEOUT_S)
        child.resume()

    async def score_beside(self: Child, rows: Sequence[reward_pb2.TextRow]) -> Scored:
        asyncio.get_running_loop().call_later(0.1, stand_still, psutil.Process(self._pid))
        return await score(self, rows)

    monkeypatch.setattr(Child, "score", score_beside)
    (verdict,) = verifier.score_texts(rows("take a moment"), call())
    assert verdict.score == len("take a moment")
    assert verifier.metrics == {"gave_up": (0.0, 1.0)}


def test_where_the_fork_server_is_killed_a_row_fails_and_then_there_is_another(path: None) -> None:
    scorer = ProcessScorer("hostile_verifiers:obey", {}, processes=1, row_timeout_s=ROW_TIMEOUT_S)
    try:
        (verdict,) = scorer.score_texts(rows("pid"), call())
        process = psutil.Process(int(verdict.score))
        os.kill(process.ppid(), signal.SIGKILL)
        wait_until_ended(process)
        failed = [verdict for verdict in scorer.score_texts(rows("a", "a", "a"), call()) if verdict.error]
        assert failed
        assert [verdict.score for verdict in scorer.score_texts(rows("a"), call())] == [1]
    finally:
        scorer.close()


@contextlib.contextmanager
def stopped(process: psutil.Process) -> Iterator[None]:
    """A block in which a process answers nothing."""
    process.suspend()
    try:
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()


def fork_server_of(scorer: ProcessScorer) -> psutil.Process:
    (verdict,) = scorer.score_texts(rows("pid"), call())
    parent = psutil.Process(int(verdict.score)).parent()
    assert parent is not None
    return parent


@pytest.fixture
def impatient(path: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessScorer]:
    """A verifier in two processes, whose fork server has 0.3 s for an answer."""
    monkeypatch.setattr(fork_server, "ANSWER_TIMEOUT_S", 0.3)
    scorer = ProcessScorer("hostile_verifiers:verify", {}, processes=2, row_timeout_s=10.0)
    yield scorer
    scorer.close()


def test_a_row_whose_process_ends_with_the_fork_server_is_an_error_and_no_zero(
    impatient: ProcessScorer,
) -> None:
    with stopped(fork_server_of(impatient)):
        lost, unborn = impatient.score_texts(rows("take a while", "a"), call())
    assert "killed by SIGKILL" in lost.error
    assert "did not start in time" in unborn.error
    assert impatient.metrics == {"gave_up": (0.0, 2.0)}
    assert [verdict.score for verdict in impatient.score_texts(rows("a", "bb", "ccc"), call())] == [1, 2, 3]


def test_an_answer_of_the_fork_server_that_is_late_is_not_taken_for_the_next_one(
    impatient: ProcessScorer,
) -> None:
    server = fork_server_of(impatient)
    with stopped(server):
        (verdict,) = impatient.score_texts(rows("crash"), call())
    assert "killed by SIGKILL" in verdict.error
    for _ in range(2):
        crashed, right = impatient.score_texts(rows("crash", "a"), call())
        assert (crashed.WhichOneof("verdict"), crashed.score, right.score) == ("score", 0, 1)
        assert impatient.metrics["gave_up/crashed"] == (1.0, 2.0)


def test_a_fork_that_nobody_waits_for_any_more_leaves_no_process(path: None) -> None:
    scorer = ProcessScorer("hostile_verifiers:obey", {}, processes=1, row_timeout_s=ROW_TIMEOUT_S)
    try:
        server = fork_server_of(scorer)
        scorer.score_texts(rows("crash"), call())
        with stopped(server), pytest.raises(DeadlineExceeded):
            scorer.score_texts(rows("a"), call(timeout_s=0.3))
        assert [verdict.score for verdict in scorer.score_texts(rows("a"), call())] == [1]
        assert fork_server_of(scorer) == server
        # The server may still be ending the fork that nobody waits for when it has answered the next command.
        deadline = time.monotonic() + ROW_TIMEOUT_S
        while len(server.children()) > 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(server.children()) == 1
    finally:
        scorer.close()


def test_mathematics_is_scored_by_as_many_processes_as_there_are_cores() -> None:
    pytest.importorskip("math_verify")
    scorer = make_scorer(RewardTable(role="reward", address="127.0.0.1:1", function="math"))
    try:
        assert scorer.kind() == f"function math, {len(os.sched_getaffinity(0))} processes"
    finally:
        scorer.close()


@pytest.mark.parametrize("name", ["hostile_verifiers:obey", "exact_match"])
def test_metadata_that_json_has_no_word_for_is_an_error_of_its_row(name: str, path: None) -> None:
    scorer = make_scorer(
        RewardTable(role="reward", address="127.0.0.1:1", function=name, processes=int(":" in name))
    )
    fine, broken = reward_pb2.TextRow(response="a", ground_truth="a"), reward_pb2.TextRow(response="a")
    broken.metadata.update({"level": float("nan")})
    try:
        verdicts = scorer.score_texts([fine, broken, fine], call())
    finally:
        scorer.close()
    assert [verdicts[0].score, verdicts[2].score] == [1, 1]
    assert "the row's metadata cannot be read" in verdicts[1].error
