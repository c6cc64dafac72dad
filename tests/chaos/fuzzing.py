"""Sends random calls (`shots`) to running services, many at a time, and collects the answers that no call may have.

A call that ended in a way that the contract does not allow is saved as a file, after those sent shortly before it;
`replay` sends them again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import uvloop
from chaos.moving import moved, place_of
from chaos.shots import Service, Shot, Shots
from google.rpc import status_pb2

from rlhf.contract import CHANNEL_OPTIONS
from rlhf.errors import STATUS_KEY
from rlhf.v1 import worker_pb2

ALLOWED = {
    "OK", "CANCELLED", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "FAILED_PRECONDITION", "ABORTED",
    "OUT_OF_RANGE", "RESOURCE_EXHAUSTED", "UNIMPLEMENTED", "DATA_LOSS",
}  # fmt: skip
"""Codes with which a random call may end. DATA_LOSS is an update that was not finite, and changed nothing."""

MOST_RESPONSES = 10
"""Responses of a stream that are read before the client cancels it."""
KEPT_SHOTS = 64
"""Calls that are saved before one that ended badly."""
MOST_BAD = 20
"""Bad answers after which no more calls are sent."""
OF_CLIENT = "Internal error from Core"
"""Message of grpc.aio to its own client for a stream whose deadline has passed before it began; no server sends it."""
LATEST_S = 30.0
"""Longest time in which gRPC ends a call after its deadline."""


@dataclass(frozen=True)
class Answer:
    """How a call ended.

    Attributes:
        code: Name of its gRPC code.
        said: Message of its status.
        responses: Its responses, serialized.
    """

    code: str
    said: str = ""
    responses: tuple[bytes, ...] = ()

    @staticmethod
    def failed(error: Any, responses: Sequence[bytes]) -> Answer:
        """Returns the answer of a call that ended with an error of grpc or grpc.aio."""
        code, said = error.code().name, error.details() or ""
        is_ours = any(key == STATUS_KEY for key, _ in error.trailing_metadata() or ())
        if code == "UNAVAILABLE" and is_ours:
            code = "NOT_FOUND"  # a rank that was named as the source of rows is not there, says one that is
        if said == OF_CLIENT:
            code = "DEADLINE_EXCEEDED"
        return Answer(code, said, tuple(responses))


@dataclass
class Results:
    """Outcome of random calls.

    Attributes:
        requests: Number of requests that were sent, those within Dispatch included.
        codes: Number of answers by code; of calls within Dispatch too.
        paths: Number of calls by path of their method, and how many of them ended well.
        bad: One line for each answer that is not allowed, with the file that has the call.
    """

    requests: int = 0
    codes: Counter[str] = field(default_factory=Counter)
    paths: dict[str, Counter[str]] = field(default_factory=dict)
    bad: list[str] = field(default_factory=list)

    def check(self) -> None:
        """Raises AssertionError if a call ended in a way that is not allowed."""
        assert not self.bad, "\n".join(self.bad)


class Fuzzer:
    """Sends random calls to services in the running event loop. An asynchronous context manager, which has the
    channels.

    Args:
        services: The services; calls are sent to each in turn.
        seed: Seed of all choices.
        directory: Where calls that ended badly are saved.
        at_once: Calls under way at a time.
        is_guest, longest_s: As for `Shots`.
    """

    def __init__(
        self,
        services: Sequence[Service],
        seed: int,
        directory: Path,
        *,
        at_once: int = 16,
        is_guest: bool = False,
        longest_s: float = 3.0,
    ) -> None:
        self.results = Results()
        self._services = {service.name: service for service in services}
        self._shots = [Shots(service, is_guest=is_guest, longest_s=longest_s) for service in services]
        self._seed, self._directory, self._at_once = seed, directory, at_once
        self._collectives = {service.name: asyncio.Lock() for service in services}
        self._recent: deque[tuple[int, Shot]] = deque(maxlen=KEPT_SHOTS)
        self._channels: dict[str, list[grpc.aio.Channel]] = {}
        self._opened = AsyncExitStack()

    async def __aenter__(self) -> Fuzzer:
        for name, service in self._services.items():
            self._channels[name] = [
                await self._opened.enter_async_context(grpc.aio.insecure_channel(address, CHANNEL_OPTIONS))
                for address in service.addresses
            ]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._opened.aclose()

    async def run(self, count: int, first: int = 0) -> None:
        """Sends the calls of numbers `first` to `first + count`; ends early after MOST_BAD bad answers."""
        numbers = iter(range(first, first + count))
        await asyncio.gather(*(self._work(numbers) for _ in range(self._at_once)))

    async def send(self, shot: Shot) -> list[Answer]:
        """Sends a call to its ranks and returns the answer of each."""
        channels = [self._channels[shot.service][rank] for rank in shot.ranks]
        if len(channels) == 1:
            return [await self._call(channels[0], shot)]
        return list(await asyncio.gather(*(self._call(channel, shot) for channel in channels)))

    async def _work(self, numbers: Iterator[int]) -> None:
        """Sends calls until no number is left."""
        for number in numbers:
            if len(self.results.bad) >= MOST_BAD:
                return
            shots = self._shots[number % len(self._shots)]
            shot = shots.draw(random.Random(f"{self._seed}/{number}"), number // len(self._shots))
            # Sessions replace each other, so several collective calls at once would all end before they compute.
            lock = self._collectives[shot.service] if len(shot.ranks) > 1 else contextlib.nullcontext()
            async with lock:
                self._recent.append((number, shot))
                self.results.requests += len(shot.messages) * len(shot.ranks)
                answers = await self.send(shot)
            for answer in answers:
                self._count(number, shot, answer)
                if answer.code == "OK" and not shot.streams:
                    shots.learn(shot.path, answer.responses[0])

    async def _call(self, channel: grpc.aio.Channel, shot: Shot) -> Answer:
        """Sends a call to one rank; reads no more than MOST_RESPONSES responses."""
        call: Any
        if shot.streams or len(shot.messages) != 1:
            call = channel.stream_stream(shot.path)(iter(shot.messages), timeout=shot.timeout_s)
        else:
            call = channel.unary_unary(shot.path)(shot.messages[0], timeout=shot.timeout_s)
        timer = None
        if shot.cancel_after_s is not None:
            timer = asyncio.get_running_loop().call_later(shot.cancel_after_s, call.cancel)
        responses: list[bytes] = []
        try:
            async with asyncio.timeout(shot.timeout_s + LATEST_S):
                if isinstance(call, grpc.aio.UnaryUnaryCall):
                    return Answer("OK", responses=(await call,))
                async for response in call:
                    responses.append(response)
                    if len(responses) == MOST_RESPONSES:
                        call.cancel()
        except grpc.aio.AioRpcError as error:
            return Answer.failed(error, responses)
        except asyncio.CancelledError:
            return Answer("CANCELLED", responses=tuple(responses))
        except TimeoutError:
            return Answer("HANGS", f"no end {LATEST_S:g} s after its deadline")
        finally:
            if timer is not None:
                timer.cancel()
        return Answer("OK", responses=tuple(responses))

    def _count(self, number: int, shot: Shot, answer: Answer) -> None:
        """Counts an answer; saves the call if the answer is not allowed."""
        ours = shot.path.startswith("/rlhf.")
        if "google.protobuf" in answer.said and not ours:
            return  # gRPC's own services say UNKNOWN to bytes that are no request
        answers = [answer]
        if shot.path.endswith("/Dispatch"):
            answers += map(dispatched, answer.responses)
        for each in answers:
            self.results.codes[each.code] += 1
            if each.code not in ALLOWED:
                path = self._save(number, shot, each)
                self.results.bad.append(f"call {number} of seed {self._seed}: {shot.path} of {shot.service} ended "
                                        f"{each.code}: {each.said[:500]}; saved as {path}")  # fmt: skip
        self.results.paths.setdefault(shot.path, Counter())[answer.code] += 1

    def _save(self, number: int, shot: Shot, answer: Answer) -> Path:
        """Writes a call, and before it those sent last, to a file; returns its path."""
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / f"{self._seed}-{number}.json"
        before = [each.to_json() for known, each in self._recent if known != number]
        places = {name: place_of(service) for name, service in self._services.items()}
        told = {
            "code": answer.code,
            "said": answer.said,
            "places": places,
            "call": shot.to_json(),
            "before": before,
        }
        path.write_text(json.dumps(told))
        return path


def send(services: Sequence[Service], seed: int, directory: Path, first: int, count: int) -> Results:
    """Sends calls and returns how they ended; arguments as for `Fuzzer` and `Fuzzer.run`. For a process of its own,
    with which its connections end: gRPC's client was seen to keep some after their channel was closed, until the next
    one was opened."""

    async def run() -> Results:
        async with Fuzzer(services, seed, directory, at_once=96) as fuzzer:
            await fuzzer.run(count, first)
            return fuzzer.results

    return uvloop.run(run())


def dispatched(response: bytes) -> Answer:
    """Returns the answer of a call that a message of Dispatch brought."""
    message = worker_pb2.DispatchResponse.FromString(response)
    if message.WhichOneof("result") == "response":
        return Answer("OK")
    status = status_pb2.Status.FromString(message.status)
    code = next(code.name for code in grpc.StatusCode if code.value[0] == status.code)
    return Answer("NOT_FOUND" if code == "UNAVAILABLE" else code, status.message)


async def replay(services: Sequence[Service], saved: str, directory: Path) -> Mapping[str, list[Answer]]:
    """Sends a saved call alone, and again after the calls that were sent shortly before it; returns the answers.

    Args:
        services: Services with the names that the file has.
        saved: Text of a file that a `Fuzzer` saved.
        directory: As for `Fuzzer`.
    """
    told = json.loads(saved)
    known = {service.name: service for service in services}
    *before, shot = (
        moved(each, told["places"][each.service], known[each.service])
        for each in map(Shot.from_json, (*told["before"], told["call"]))
    )
    async with Fuzzer(services, 0, directory) as fuzzer:
        alone = await fuzzer.send(shot)
        *_, last = await asyncio.gather(*(fuzzer.send(each) for each in (*before, shot)))
    return {"alone": alone, "after the others": last}
