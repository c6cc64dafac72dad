"""Calls to all ranks of a service at once: sent in sequence, cancelled together, blamed on the rank at fault."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import grpc

from client.outage import is_silence
from client.rank import WORKER, RankClient
from client.session import MAX_UINT64, NEXT_START_NS
from rlhf.contract import Method
from rlhf.errors import CallCancelled, DeadlineExceeded, PeerFailed, RlhfError, ServiceLost
from rlhf.v1 import common_pb2, worker_pb2

SETTLE_S = 2.0
"""Time, in seconds, to wait for the other ranks' responses after one rank has failed, since the rank that caused the
failure may be the last to respond. Also the timeout of the Cancel RPC."""


class FanOut:
    """Sends each call to all ranks of one service. The ranks execute calls in the order of their sequence numbers.

    Args:
        clients: One client per rank, in rank order.
        epoch: Epoch of the service, which identifies its current start; sent in the header of every call.

    Attributes:
        service: Name of the service in the config.
        state_id: Id of the state of weights and optimizer after the last call that was answered, as in Outcome; empty
            before the first, and where the ranks report none or different ones.
    """

    def __init__(self, clients: Sequence[RankClient], epoch: int) -> None:
        self.clients = list(clients)
        self._epoch = epoch
        self.service = clients[0].service
        self.state_id = ""
        self._sent = self._known = self._renewals = 0
        self._due: dict[str, float] = {}
        """Deadline of each call without an answer, in the event loop's time, by call id."""

    def renew(self, clients: Sequence[RankClient], epoch: int) -> None:
        """Goes on with the ranks of the service that was started again, or on which the session begins again: `clients`
        and `epoch` as of the class. The next call is their first; calls under way belong to the ranks before."""
        self.clients[:] = clients
        self._epoch, self._sent, self._known, self.state_id = epoch, 0, 0, ""
        self._renewals += 1

    def address(self, header: common_pb2.Call, started_unix_ns: int, *, beside: bool = False) -> None:
        """Sets sequence number, epoch and start of the session in `header`, which must be that of the next call passed
        to `send`.

        Args:
            started_unix_ns: Start of the session, Unix time in nanoseconds. After `renew` it is later in the header, so
                that ranks do not take a call from before, with a higher sequence number, for a later one.
            beside: As for `send`.
        """
        header.sequence, header.epoch = 0 if beside else self._sent + 1, self._epoch
        header.session_started_unix_ns = min(started_unix_ns + NEXT_START_NS * self._renewals, MAX_UINT64)

    async def send(
        self,
        method: Method,
        call_id: str,
        requests: Sequence[bytes],
        timeout_s: float,
        was_sent: Callable[[], None],
        *,
        beside: bool = False,
    ) -> list[Any]:
        """Sends each rank its request and returns the responses, in rank order.

        Args:
            call_id: Id of the call, as in its header; `cancel` takes it.
            requests: One serialized request per rank, whose header `address` has filled in.
            timeout_s: Timeout of the call, in seconds, counted from the latest deadline among the calls that are
                still without an answer, since they are executed first.
            was_sent: Called once, after all requests have been handed to gRPC.
            beside: Whether the ranks execute the call concurrently with ordered calls: its timeout then begins now.

        Raises:
            RlhfError: A rank failed, and every rank was asked to cancel the call, as also where this coroutine is
                cancelled. Of several ranks' errors, ServiceLost comes first, then a rank's own failure,
                DeadlineExceeded, and last PeerFailed and CallCancelled.
        """
        clock = asyncio.get_running_loop().time
        now = clock()
        sequence = 0
        if not beside:
            timeout_s += max([now, *self._due.values()]) - now
            self._due[call_id] = now + timeout_s
            self._sent = sequence = self._sent + 1
        calls: list[asyncio.Future[Any]] = []
        try:
            for client, request in zip(self.clients, requests, strict=True):
                calls.append(client.start(method, request, timeout_s))
            was_sent()
            failure = await self._settled(call_id, calls, timeout_s)
        except BaseException:
            await self.cancel(call_id)
            raise
        finally:
            self._due.pop(call_id, None)
            for call in calls:
                call.cancel()
        if failure is None:
            responses = [call.result() for call in calls]
            self._note_state(sequence, responses)
            return responses
        error = _culprit(calls, failure.late)
        if failure.silent and isinstance(error, DeadlineExceeded | PeerFailed | CallCancelled):
            is_late = isinstance(error, DeadlineExceeded) or clock() >= now + timeout_s
            within = f" within {timeout_s:g} s" if is_late else ""
            raise DeadlineExceeded(
                f"{failure.silent[0]} {method.name}: no answer{within}, and none to Cancel: its process is stopped or "
                "stuck"
            ).of_call(self.service) from error
        raise error

    async def cancel(self, call_id: str) -> list[RankClient]:
        """Asks every rank to cancel a call. Returns the clients of the silent ranks, none where all respond: those
        that did not respond within `SETTLE_S` or answered no HTTP/2 ping. Other errors are ignored."""
        request = worker_pb2.CancelRequest(call_id=call_id)
        cancels = (client.call(WORKER["Cancel"], request, SETTLE_S) for client in self.clients)
        answers = await asyncio.gather(*cancels, return_exceptions=True)
        answered = zip(self.clients, answers, strict=True)
        return [client for client, answer in answered if _is_silent(answer)]

    async def reach_all(self, method: Method, request: Any, timeout_s: float) -> list[Any]:
        """Makes an idempotent unary call to every rank with `RankClient.reach`, which retries it where a connection
        breaks, and returns the responses in rank order. Raises the first RlhfError of a rank."""
        return await asyncio.gather(*(client.reach(method, request, timeout_s) for client in self.clients))

    def _note_state(self, sequence: int, responses: Sequence[Any]) -> None:
        """Sets `state_id` from the responses to a call, unless those to a later call were there before."""
        if sequence > self._known:
            ids = {response.outcome.state_id for response in responses}
            self._known, self.state_id = sequence, ids.pop() if len(ids) == 1 else ""

    async def _settled(
        self, call_id: str, calls: Sequence[asyncio.Future[Any]], timeout_s: float
    ) -> _Failure | None:
        """Waits for the responses of all ranks; after the first failure or the deadline, cancels the call and waits
        for the others, `SETTLE_S` after a failure. Returns None where every rank succeeded."""
        silent: list[RankClient] = []
        done, pending = await asyncio.wait(calls, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        if pending and not any(call.exception() for call in done):
            # Past the deadline. A rank that answers Cancel reports the outcome of the call; one that does not is stuck.
            silent = await self.cancel(call_id)
            done, pending = await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
        if not any(call.exception() for call in done):
            return None
        silent = silent or await self.cancel(call_id)
        await asyncio.wait(calls, timeout=SETTLE_S)
        return _Failure(silent, pending)


def blame(error: BaseException) -> int:
    """Returns a sort key that chooses which of several ranks' errors is raised, lowest first: 0 ServiceLost, 1 another
    RlhfError, 2 DeadlineExceeded, 3 PeerFailed or CallCancelled, 4 no RlhfError."""
    if isinstance(error, ServiceLost):
        return 0
    if isinstance(error, PeerFailed | CallCancelled):
        return 3
    if isinstance(error, DeadlineExceeded):
        return 2
    return 1 if isinstance(error, RlhfError) else 4


@dataclass(frozen=True)
class _Failure:
    """The failure of a call on some rank: further facts for the choice of the error to raise.

    Attributes:
        silent: Clients of the ranks that did not respond to Cancel either.
        late: Futures of the per-rank calls that were pending when the first one failed.
    """

    silent: Sequence[RankClient]
    late: Set[asyncio.Future[Any]]


def _culprit(calls: Sequence[asyncio.Future[Any]], late: Set[asyncio.Future[Any]]) -> BaseException:
    """Returns the error of the calls with the lowest `blame`. Ties go to calls that are not in `late`, then to the
    lowest rank."""
    in_order = sorted(calls, key=lambda call: call in late)
    ended = [call for call in in_order if call.done() and not call.cancelled()]
    return min((error for call in ended if (error := call.exception())), key=blame)


def _is_silent(answer: Any) -> bool:
    """Whether `answer`, the result of a Cancel RPC, says that the rank missed its deadline or answered no ping of its
    connection."""
    if isinstance(answer, ServiceLost) and isinstance(answer.__cause__, grpc.RpcError):
        return is_silence(answer.__cause__)
    return isinstance(answer, DeadlineExceeded)
