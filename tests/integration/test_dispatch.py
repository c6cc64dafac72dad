"""Calls over one stream: what they promise is what calls by themselves promise."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import signal
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from google.rpc import status_pb2

from client import stream
from client.rank import RankClient
from integration.harness import POLICY_LOSS, Service
from integration.test_server import training_rows
from nccl_transfer.refs.batch import Batch
from rlhf.contract import SERVICES, group_methods
from rlhf.errors import (
    CallCancelled,
    DeadlineExceeded,
    InvalidRequest,
    PeerFailed,
    Restarted,
    RlhfError,
    from_status,
)
from rlhf.v1 import actor_pb2, worker_pb2

TIMEOUT_S = 60.0
SYNCHRONIZE = SERVICES["worker"]["Synchronize"]
DISPATCH = SERVICES["worker"]["Dispatch"]
PROMPTS = Batch.of(prompt=["10+20=", "31+4=", "5+66=", "7+8="])
SAMPLING = actor_pb2.Sampling(temperature=1.0, max_new_tokens=4)
UPDATE: dict[str, Any] = {"loss": POLICY_LOSS, "temperature": 1.0}
LONG = actor_pb2.Sampling(temperature=50.0, max_new_tokens=56)


@contextlib.asynccontextmanager
async def clients(service: Service) -> AsyncIterator[list[RankClient]]:
    made = [
        RankClient(service.name, rank, address, is_ours=True, session=service.session)
        for rank, address in enumerate(service.addresses)
    ]
    try:
        yield made
    finally:
        for client in made:
            await client.close()


async def dispatch(
    made: list[RankClient], service: Service, name: str, timeout_s: float = TIMEOUT_S, **given: Any
) -> list[Any]:
    """Answer of each rank: a response or an error."""
    method = group_methods(service.description.role)[name]
    requests = service.requests(name, given.pop("batch", None), **given)
    pairs = zip(made, requests, strict=True)
    calls = [client.start(method, request, timeout_s) for client, request in pairs]
    return await asyncio.gather(*calls, return_exceptions=True)


def test_a_call_over_a_stream_makes_what_a_call_by_itself_makes(actor: Service) -> None:
    async def over_a_stream() -> list[Any]:
        async with clients(actor) as made:
            return await dispatch(made, actor, "generate_sequences", batch=PROMPTS, sampling=SAMPLING)

    streamed = actor.made(asyncio.run(over_a_stream()))
    alone = actor.rows("generate_sequences", PROMPTS, sampling=SAMPLING)
    for column in ("response_ids", "rollout_log_probs"):
        one, other = actor.values(streamed, column), actor.values(alone, column)
        np.testing.assert_array_equal(one.values, other.values)
        np.testing.assert_array_equal(one.lengths, other.lengths)


def test_answers_come_as_calls_end_and_not_as_they_began(actor: Service) -> None:
    async def main() -> None:
        async with clients(actor) as made:
            header = actor.header()
            long = asyncio.ensure_future(
                dispatch(made, actor, "generate_sequences", batch=PROMPTS, sampling=LONG, header=header)
            )
            stale = await dispatch(made, actor, "synchronize", header=actor.header(epoch=1))
            assert [type(answer) for answer in stale] == [Restarted, Restarted]
            assert not long.done()
            await asyncio.to_thread(actor.cancel, header.call_id)
            assert all(isinstance(answer, CallCancelled | PeerFailed) for answer in await long)

    asyncio.run(main())


def test_an_error_over_a_stream_is_the_error_of_the_call_by_itself(actor: Service) -> None:
    async def over_a_stream() -> list[Any]:
        async with clients(actor) as made:
            return await dispatch(made, actor, "generate_sequences", batch=PROMPTS)

    alone = actor.start("generate_sequences", PROMPTS).outcomes()
    for rank, (streamed, other) in enumerate(zip(asyncio.run(over_a_stream()), alone, strict=True)):
        assert type(streamed) is type(other) is InvalidRequest
        where = f"actor rank {rank} ({actor.addresses[rank]}) GenerateSequences: "
        assert str(streamed) == where + str(other).partition("GenerateSequences: ")[2]
        assert "services/actor/worker.py" in streamed.remote_traceback


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"method": "/rlhf.v1.WorkerService/Describe", "timeout_s": 1.0}, "no method .*Describe"),
        ({"method": SYNCHRONIZE.path}, "timeout_s is 0; it must be above 0"),
        (
            {"method": SYNCHRONIZE.path, "timeout_s": math.nan},
            "timeout_s is nan; it must be above 0 and finite",
        ),
        (
            {"method": SYNCHRONIZE.path, "timeout_s": math.inf},
            "timeout_s is inf; it must be above 0 and finite",
        ),
        (
            {"method": SYNCHRONIZE.path, "timeout_s": 1.0, "request": b"\xff"},
            "the request is no SynchronizeRequest",
        ),
    ],
)
def test_a_message_that_is_no_call_is_refused_and_the_stream_goes_on(
    actor: Service, fields: dict[str, Any], said: str
) -> None:
    async def main() -> None:
        async with clients(actor) as made:
            stream = made[0]._callable(DISPATCH)()

            async def read() -> worker_pb2.DispatchResponse:
                return worker_pb2.DispatchResponse.FromString(await stream.read())

            await stream.write(worker_pb2.DispatchRequest(number=7, **fields))
            answer = await read()
            assert (answer.number, answer.WhichOneof("result")) == (7, "status")
            with pytest.raises(InvalidRequest, match=said):
                raise from_status(status_pb2.Status.FromString(answer.status), "actor rank 0")
            (request, *_) = actor.requests("synchronize")
            path, body = SYNCHRONIZE.path, request.SerializeToString()
            await stream.write(worker_pb2.DispatchRequest(number=8, method=path, request=body, timeout_s=5))
            assert (await read()).WhichOneof("result") == "response"
            stream.cancel()

    asyncio.run(main())


def test_a_stopped_rank_ends_a_call_at_its_deadline_and_answers_again_later(
    lone_actor: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "OUTCOME_S", 0.5)
    pid = lone_actor.description.ranks[0].pid

    async def main() -> list[Any]:
        async with clients(lone_actor) as made:
            await dispatch(made, lone_actor, "synchronize")
            os.kill(pid, signal.SIGSTOP)
            try:
                first = await dispatch(made, lone_actor, "synchronize", timeout_s=1.0)
            finally:
                os.kill(pid, signal.SIGCONT)
            return first + await dispatch(made, lone_actor, "synchronize")

    late, answered = asyncio.run(main())
    assert isinstance(late, DeadlineExceeded)
    assert "Synchronize: no answer within 1 s" in str(late)
    assert not isinstance(answered, RlhfError)


def test_an_update_of_one_long_mini_batch_says_at_its_deadline_that_it_gets_on_and_is_not_lost(
    lone_actor: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "OUTCOME_S", 1.0)
    (version,) = lone_actor.versions
    one_step = {**UPDATE, "schedule": actor_pb2.Schedule(epochs=1, mini_batches=1)}

    async def main() -> list[Any]:
        async with clients(lone_actor) as made:
            await dispatch(made, lone_actor, "synchronize")
            rows = training_rows(2500)
            late = await dispatch(made, lone_actor, "update_actor", 1.0, batch=rows, **one_step)
            return late + await dispatch(made, lone_actor, "update_actor", batch=training_rows(), **one_step)

    late, after = asyncio.run(main())
    assert isinstance(late, DeadlineExceeded)
    assert re.search(
        r"UpdateActor: .*ran past its deadline and is still running; .* the last 0\.\d s ago", str(late)
    ), late
    assert after.outcome.policy_version == version + 2
