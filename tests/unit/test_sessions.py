"""Which sessions a rank takes, whether clocks agree or not, and on whose behalf a run's calls are made."""

from __future__ import annotations

import asyncio
import runpy
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from client import session as session_module
from client.rank import RankClient
from client.session import Session, StepContext
from controller.config.config import Config
from controller.role_groups import admission
from controller.role_groups import cluster as cluster_module
from controller.role_groups import loop as loop_module
from controller.role_groups.admission import differing_keys, wait_until_free, with_chosen
from controller.role_groups.cluster import Cluster
from controller.role_groups.dataflow import FutureBatch
from controller.role_groups.futures import Promise
from nccl_transfer.transports import host_id
from rlhf.errors import ConfigError, DeadlineExceeded, InvalidRequest, Refused
from rlhf.v1 import common_pb2, worker_pb2
from services.runtime import sessions as sessions_module
from services.runtime.sessions import MOST_SESSIONS, Sessions
from settings.actor import ActorTable

HOUR_NS = 3600 * 10**9


def first_call(session: str, started: int, *, take_over: bool = False) -> common_pb2.Call:
    return common_pb2.Call(session=session, sequence=1, session_started_unix_ns=started, take_over=take_over)


Test = Callable[[Sessions, list[str]], Coroutine[Any, Any, None]]


def in_a_loop(test: Test) -> None:
    """Runs a test of a rank's session; the second argument names those that have ended."""

    async def main() -> None:
        ended: list[str] = []
        await test(Sessions(ended.append), ended)

    asyncio.run(main())


def test_a_younger_session_ends_one_whose_controller_is_not_there() -> None:
    async def test(sessions: Sessions, ended: list[str]) -> None:
        sessions.open(first_call("first", 1))
        sessions.open(first_call("second", 2))
        assert ([*sessions.names], ended) == (["second"], ["first"])

    in_a_loop(test)


def test_a_session_whose_controller_is_there_ends_only_where_it_is_taken_over() -> None:
    async def test(sessions: Sessions, ended: list[str]) -> None:
        sessions.open(first_call("first", 1))
        sessions.opened_stream("first")
        with pytest.raises(Refused, match=r"session 'first' is open on this rank"):
            sessions.open(first_call("second", 2))
        sessions.closed_stream("first")
        assert not sessions.is_connected("first")
        with pytest.raises(Refused, match=r"session 'first' is open on this rank"):
            sessions.open(first_call("second", 2))
        assert ([*sessions.names], ended) == (["first"], [])
        sessions.open(first_call("second", 2, take_over=True))
        assert ([*sessions.names], ended) == (["second"], ["first"])

    in_a_loop(test)


def test_a_session_that_was_ended_is_free_to_take_at_once() -> None:
    async def test(sessions: Sessions, ended: list[str]) -> None:
        sessions.open(first_call("first", 1))
        sessions.opened_stream("first")
        sessions.closed_stream("first")
        sessions.end("first")
        sessions.open(first_call("second", 2))
        assert ([*sessions.names], ended) == (["second"], ["first"])

    in_a_loop(test)


def test_a_session_from_the_future_is_refused_and_locks_nobody_out() -> None:
    async def test(sessions: Sessions, ended: list[str]) -> None:
        for started in (2**64 - 1, time.time_ns() + 2 * HOUR_NS):
            with pytest.raises(InvalidRequest, match="ahead of this host's clock"):
                sessions.open(first_call("future", started))
        sessions.open(first_call("next", time.time_ns()))
        assert sessions.names == {"next"}

    in_a_loop(test)


def test_a_session_that_claims_a_start_after_the_youngest_is_taken_whatever_its_clock_says() -> None:
    async def test(sessions: Sessions, ended: list[str]) -> None:
        sessions.open(first_call("ahead", time.time_ns() + HOUR_NS // 2))
        behind = Session(started_unix_ns=time.time_ns() - HOUR_NS)
        behind.claim_after([sessions.started_unix_ns, 5])
        header = behind.header(behind.newest, "actor", "synchronize")
        header.sequence = 1
        sessions.open(header)
        assert sessions.names == {behind.name}
        # Ranks compare starts in microseconds.
        assert header.session_started_unix_ns // 1000 > (time.time_ns() + HOUR_NS // 2 - 60 * 10**9) // 1000

    in_a_loop(test)


def shared(test: Test) -> None:
    """Runs a test of the sessions of a rank that several may share."""

    async def main() -> None:
        ended: list[str] = []
        await test(Sessions(ended.append, is_shared=True), ended)

    asyncio.run(main())


def test_sessions_that_share_a_rank_do_not_end_each_other_whatever_their_starts() -> None:
    async def test(sessions: Sessions, ended: list[str]) -> None:
        for name, started, take_over in (("first", 5, False), ("older", 1, False), ("third", 9, True)):
            sessions.opened_stream(name)
            sessions.open(first_call(name, started, take_over=take_over))
        sessions.closed_stream("older")
        sessions.opened_stream("fourth")
        sessions.open(first_call("fourth", 9))
        assert sessions.names == {"first", "older", "third", "fourth"}
        assert (ended, sessions.holder, sessions.started_unix_ns) == ([], "", 9)
        sessions.end("first")
        assert ended == ["first"]
        with pytest.raises(Refused, match="session 'first' has ended"):
            sessions.check(first_call("first", 5))
        late = first_call("first", 5)
        late.sequence = 7
        with pytest.raises(Refused, match="session 'first' is not open here"):
            sessions.open(late)

    shared(test)


def test_a_session_of_a_shared_rank_without_a_stream_ends_when_another_one_opens() -> None:
    async def test(sessions: Sessions, ended: list[str]) -> None:
        sessions.opened_stream("held")
        sessions.open(first_call("held", 1))
        sessions.open(first_call("second", 2))
        assert not ended
        sessions.open(first_call("third", 3))
        assert (sessions.names, ended) == ({"held", "third"}, ["second"])

    shared(test)


def test_a_session_of_a_shared_rank_that_never_had_a_stream_ends_after_its_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody else may come for long, and meanwhile the rank could neither be offloaded nor load other weights."""
    monkeypatch.setattr(sessions_module, "SILENCE_S", 0.2)

    async def test(sessions: Sessions, ended: list[str]) -> None:
        sessions.open(first_call("silent", 1))
        sessions.opened_stream("held")
        sessions.open(first_call("held", 2))
        sessions.open(first_call("calls", 3))
        assert ended == ["silent"], "by the one that opens"
        began = time.monotonic()
        while time.monotonic() < began + 0.5:
            sessions.noticed("calls")
            await asyncio.sleep(0.01)
        assert sessions.names == {"held", "calls"}
        sessions.noticed("unknown")
        deadline = time.monotonic() + 10
        while "calls" in sessions.names:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        assert (sessions.names, ended) == ({"held"}, ["silent", "calls"])
        sessions.open(first_call("comes late", 4))
        sessions.opened_stream("comes late")
        await asyncio.sleep(0.4)
        assert sessions.names == {"held", "comes late"}

    shared(test)


def test_a_session_with_a_call_under_way_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "SILENCE_S", 0.05)

    async def main() -> None:
        ended, busy = asyncio.Event(), {"run"}
        sessions = Sessions(lambda name: ended.set(), is_shared=True, is_busy=busy.__contains__)
        sessions.open(first_call("run", 1))
        await asyncio.sleep(0.3)
        assert sessions.names == {"run"}
        busy.clear()
        await asyncio.wait_for(ended.wait(), 10)
        assert not sessions.names

    asyncio.run(main())


def test_a_session_of_a_rank_that_is_not_shared_stays_until_another_one_opens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It keeps nobody out, and may go on."""
    monkeypatch.setattr(sessions_module, "SILENCE_S", 0.02)

    async def test(sessions: Sessions, ended: list[str]) -> None:
        sessions.open(first_call("run", 1))
        await asyncio.sleep(0.2)
        assert ([*sessions.names], ended) == (["run"], [])

    in_a_loop(test)


def test_sessions_that_share_a_rank_are_bounded() -> None:
    async def test(sessions: Sessions, ended: list[str]) -> None:
        for number in range(MOST_SESSIONS):
            sessions.opened_stream(str(number))
            sessions.open(first_call(str(number), number))
        with pytest.raises(Refused, match="16 sessions share this service, the maximum; 'more' has to wait"):
            sessions.open(first_call("more", 99, take_over=True))
        assert not ended
        sessions.end("3")
        sessions.open(first_call("more", 99))

    shared(test)


def test_a_claim_is_later_by_a_microsecond_and_changes_the_start_of_no_run() -> None:
    session = Session(started_unix_ns=5000)
    session.claim_after([4000])
    assert session.claimed_unix_ns == 5000
    session.claim_after([9000, 7000])
    assert (session.claimed_unix_ns, session.started_unix_ns) == (10_000, 5000)
    session.claim_after([2**64 - 1])
    assert session.header(session.newest, "actor", "m").session_started_unix_ns == 2**64 - 1


def test_calls_of_two_open_steps_are_counted_for_each() -> None:
    session = Session(name="run", seed=7)
    first, second = session.begin_step(1), session.begin_step(2)
    headers = [session.header(step, "actor", "generate") for step in (second, first, second)]
    assert [(h.step, h.ordinal, h.seed) for h in headers] == [(2, 0, 7), (1, 0, 7), (2, 1, 7)]
    assert len({h.call_id for h in headers}) == 3


def test_rows_without_a_step_or_of_one_that_has_ended_belong_to_the_newest() -> None:
    session = Session()
    first, second = session.begin_step(1), session.begin_step(2)
    rows = FutureBatch.of(prompt=["a"])
    assert session.step_of(rows.step) is second
    assert session.step_of(rows.of_step(first).step) is first
    first.has_ended = True
    assert session.step_of(rows.of_step(first).step) is second


def test_a_number_begins_once() -> None:
    session = Session()
    session.begin_step(2)
    with pytest.raises(InvalidRequest, match="step 2 has begun"):
        session.begin_step(1)


def test_a_step_waits_for_its_calls_and_not_for_those_of_others() -> None:
    first, second = StepContext(1), StepContext(2)
    mine, other = Promise(), Promise()
    first.made(mine)
    second.made(other)
    mine.set_exception(InvalidRequest("it failed, and whoever wants its rows is told"))
    first.wait(timeout_s=5)
    assert not other.done()


def test_a_step_whose_call_does_not_end_is_an_error_that_names_it() -> None:
    step = StepContext(7)
    step.made(Promise())
    with pytest.raises(DeadlineExceeded, match=r"step 7: 1 call is under way after 0\.01 s"):
        step.wait(timeout_s=0.01)


class SlowToAdd(int):
    """A number that lets other threads run while it is added, as Python may do in any addition."""

    def __radd__(self, other: int) -> int:
        time.sleep(0)
        return other + int(self)


def test_bytes_counted_from_several_threads_are_all_counted() -> None:
    """The algorithm's thread and the loop's count the bytes of one step."""
    step, begin = StepContext(1), threading.Barrier(4)

    def count() -> None:
        begin.wait(5)
        for _ in range(500):
            step.count_bytes(SlowToAdd(3))

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert step.controller_bytes == 4 * 500 * 3


def test_closing_raises_nothing_and_takes_a_bounded_time_while_the_loop_is_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The user is to see the error that ended the run."""
    for module in (cluster_module, loop_module):
        monkeypatch.setattr(module, "CLOSE_S", 0.05, raising=False)
    config = cast(Any, SimpleNamespace(device_memory_gb=None))
    cluster, is_over = Cluster(config, Session()), threading.Event()

    async def block() -> None:
        is_over.wait(20)

    cluster._loop.start(block())
    began = time.monotonic()
    cluster.close()
    assert time.monotonic() - began < 2
    is_over.set()


def test_a_service_that_was_started_with_another_config_differs_in_those_keys() -> None:
    here = ActorTable(
        role="actor", address="127.0.0.1:1", model=Path("model"), threads=2, bind_host="0.0.0.0"
    )
    there = here.model_copy(
        update={"threads": 1, "bind_host": "", "pool": "gpus", "model": Path("other"), "role": "a:b"}
    )
    told = worker_pb2.DescribeResponse(table=there.model_dump_json(), working_directory=str(Path.cwd()))
    assert differing_keys(here, told) == [
        'model is "other" there and "model" here',
        "threads is 1 there and 2 here",
    ]


def test_paths_are_compared_from_where_they_are_relative_to() -> None:
    here = ActorTable(role="actor", address="127.0.0.1:1", model=Path("model"))
    there = here.model_copy(update={"model": Path("../model")})
    told = worker_pb2.DescribeResponse(table=there.model_dump_json())
    told.working_directory = str(Path.cwd() / "services")
    assert differing_keys(here, told) == []
    told.working_directory = "/elsewhere/services"
    assert differing_keys(here, told) == ['model is "../model" there and "model" here']
    told.table = here.model_dump_json()
    assert differing_keys(here, told) == [], "the same on another host"


def test_a_path_is_another_where_the_service_runs_on_this_host_in_another_directory() -> None:
    here = ActorTable(role="actor", address="127.0.0.1:1", model=Path("model"), output_roots=(Path("runs"),))
    told = worker_pb2.DescribeResponse(table=here.model_dump_json(), working_directory="/elsewhere")
    told.ranks.add().endpoint.host_id = host_id()
    assert differing_keys(here, told) == [
        f'model is "/elsewhere/model" there and "{Path.cwd()}/model" here',
        f'output_roots is ["/elsewhere/runs"] there and ["{Path.cwd()}/runs"] here',
    ]


def test_a_list_of_paths_is_compared_from_where_they_are_relative_to() -> None:
    here = ActorTable(role="actor", address="127.0.0.1:1", model=Path("model"), output_roots=(Path("runs"),))
    there = here.model_copy(update={"model": Path("../model"), "output_roots": (Path("../runs"),)})
    told = worker_pb2.DescribeResponse(table=there.model_dump_json())
    told.working_directory = str(Path.cwd() / "services")
    told.ranks.add().endpoint.host_id = host_id()
    assert differing_keys(here, told) == []


def test_a_config_keeps_what_services_measured_and_they_differ_in_nothing_from_it() -> None:
    tables = {
        name: {"role": name, "address": f"127.0.0.1:{port}", "model": "model"}
        for port, name in enumerate(("actor", "reference"), 1)
    }
    config = Config.model_validate({"services": tables, "data": {"train": "t.jsonl", "heldout": "h.jsonl"}})
    told = worker_pb2.DescribeResponse(matmul="onednn", table=config.services["actor"].model_dump_json())
    kept = with_chosen(config, {"actor": told, "reference": worker_pb2.DescribeResponse()})
    assert {name: table.matmul for name, table in kept.services.items()} == {
        "actor": "onednn",
        "reference": "auto",
    }
    assert differing_keys(kept.services["actor"], told) == []


def test_a_service_that_tells_nothing_of_its_config_is_taken_as_it_is() -> None:
    here = ActorTable(role="actor", address="127.0.0.1:1", model=Path("model"))
    assert differing_keys(here, worker_pb2.DescribeResponse()) == []


@pytest.mark.parametrize("table", ["model = 1", "[]", "[" * 10**5])
def test_a_service_whose_table_is_none_is_refused_by_its_address(table: str) -> None:
    """A reward in another language may take the field for a text of its own."""
    here = ActorTable(role="actor", address="127.0.0.1:1", model=Path("model"))
    with pytest.raises(
        ConfigError, match=r"127\.0\.0\.1:1 reports a table in Describe that is no JSON object"
    ):
        differing_keys(here, worker_pb2.DescribeResponse(table=table))


def test_a_path_that_is_no_text_there_is_a_difference() -> None:
    here = ActorTable(role="actor", address="127.0.0.1:1", model=Path("model"))
    told = worker_pb2.DescribeResponse(table=here.model_dump_json().replace('"model":"model"', '"model":5'))
    assert differing_keys(here, told) == ['model is 5 there and "model" here']


def test_a_run_claims_a_start_after_the_youngest_session_of_any_rank() -> None:
    """A session may have reached one rank of a service only."""
    ahead = time.time_ns() + HOUR_NS // 2
    told = {0: 5, 1: ahead}
    clients = [RankClient.__new__(RankClient) for _ in told]
    for rank, client in enumerate(clients):
        client.rank, client.service = rank, "actor"

    async def describe(client: RankClient) -> worker_pb2.DescribeResponse:
        return worker_pb2.DescribeResponse(session_started_unix_ns=told[client.rank])

    session = Session()
    groups: dict[str, Any] = {"actor": SimpleNamespace(clients=clients)}
    asyncio.run(wait_until_free(groups, session, describe))
    assert session.claimed_unix_ns > ahead


class Holder:
    """A rank whose session has a controller that is connected for a while, and then gone for a while."""

    def __init__(self, connected: int, gone: int) -> None:
        self.left = [(True, True)] * connected + [(True, False)] * gone

    async def describe(self, client: RankClient) -> worker_pb2.DescribeResponse:
        is_held, is_connected = self.left.pop(0) if self.left else (False, False)
        return worker_pb2.DescribeResponse(
            session="before" if is_held else "", session_is_connected=is_connected
        )


def wait_for(holder: Holder, session: Session, *, is_patient: bool) -> list[str]:
    """The lines that are said while a session waits for a rank."""
    client, said = RankClient.__new__(RankClient), list[str]()
    client.service, client.address = "actor", "127.0.0.1:1"
    groups: dict[str, Any] = {"actor": SimpleNamespace(clients=[client])}
    waiting = wait_until_free(groups, session, holder.describe, said.append, is_patient=is_patient)
    asyncio.run(waiting)
    return said


def test_a_resumed_run_waits_for_a_controller_that_may_have_died_and_says_so() -> None:
    (line,) = wait_for(Holder(connected=2, gone=2), Session(), is_patient=True)
    assert line.startswith("waiting up to 15 s for run before to leave services.actor")


def test_a_run_waits_for_the_session_of_a_dead_controller_alone() -> None:
    assert len(wait_for(Holder(connected=0, gone=2), Session(), is_patient=False)) == 1
    with pytest.raises(
        Refused, match=r"services.actor \(127.0.0.1:1\) is in use by run before; .*--take-over"
    ):
        wait_for(Holder(connected=1, gone=0), Session(), is_patient=False)
    assert wait_for(Holder(connected=1, gone=0), Session(take_over=True), is_patient=False) == []


def test_the_time_of_a_run_does_not_go_back_with_the_clock_of_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [1e9]
    monkeypatch.setattr(time, "time", lambda: clock[0])
    assert session_module.__file__
    session = runpy.run_path(session_module.__file__)["Session"]()
    before = session.now()
    clock[0] -= 3600
    assert before <= session.now() < before + 60
    assert before == pytest.approx(1e9, abs=60)


def test_what_a_rank_has_said_before_the_wait_for_another_does_not_count() -> None:
    holders = {"first": Holder(connected=0, gone=2), "second": Holder(connected=1, gone=1)}
    clients = []
    for address in holders:
        client = RankClient.__new__(RankClient)
        client.service, client.address = "actor", address
        clients.append(client)

    async def describe(client: RankClient) -> worker_pb2.DescribeResponse:
        return await holders[client.address].describe(client)

    groups: dict[str, Any] = {"actor": SimpleNamespace(clients=clients)}
    asyncio.run(wait_until_free(groups, Session(), describe))
    assert [holder.left for holder in holders.values()] == [[], []]


def test_a_resumed_run_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "GONE_WITHIN_S", 0.0)
    with pytest.raises(Refused, match="is in use by run before"):
        wait_for(Holder(connected=9, gone=9), Session(), is_patient=True)


def test_a_service_that_is_offloaded_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    client, counts = RankClient.__new__(RankClient), [2, 1]
    client.service, client.address = "reference", "127.0.0.1:1"
    groups: dict[str, Any] = {"reference": SimpleNamespace(clients=[client])}

    async def describe(client: RankClient) -> worker_pb2.DescribeResponse:
        return worker_pb2.DescribeResponse(is_shared=True, sessions=counts.pop(0) if counts else 0)

    asyncio.run(wait_until_free(groups, Session(), describe))
    assert counts == [1]
    asyncio.run(wait_until_free(groups, Session(), describe, alone=["reference"]))
    assert counts == []
    counts += [1, 1]
    monkeypatch.setattr(admission, "GONE_WITHIN_S", 0.0)
    with pytest.raises(
        Refused, match=r"services.reference .* is used by 1 other run\(s\), so it cannot be off"
    ):
        asyncio.run(wait_until_free(groups, Session(take_over=True), describe, alone=["reference"]))
