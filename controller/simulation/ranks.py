"""Simulated ranks: they take the place of the clients of a service's ranks, and answer after a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from controller.simulation.durations import Durations
from controller.simulation.rows import Shares, drawn_lengths, lengths_in, made_column, stored
from nccl_transfer.refs import wire
from nccl_transfer.refs.batch import Batch, LocalColumn
from nccl_transfer.refs.mesh import Mesh
from nccl_transfer.refs.protocols import get_protocol
from nccl_transfer.refs.shards import Endpoint
from rlhf.contract import Method
from rlhf.v1 import common_pb2, transfer_pb2, worker_pb2

EPOCH = 1


@dataclass
class RankWork:
    """Work of the ranks of all services so far.

    Attributes:
        seconds: CPU time of the simulation of ranks, which a real controller does not have.
        requests: Number of requests of calls.
        nbytes: Bytes of these requests.
        ends: Step of each call, and the time at which each rank ended it, by call id.
    """

    seconds: float = 0.0
    requests: int = 0
    nbytes: int = 0
    ends: dict[str, tuple[int, list[float]]] = field(default_factory=dict)


class SimulatedService:
    """A service whose ranks compute nothing.

    Args:
        names: Name of the service, and of further roles that its ranks serve.
        description: Its description.
        endpoints: Endpoints of its ranks.
        mesh: Mesh of its ranks.
        durations: Durations of calls.
        lengths: Distributions of the lengths of prompts and of responses.
        work: Counts what the ranks do.
    """

    def __init__(
        self,
        names: Sequence[str],
        description: worker_pb2.DescribeResponse,
        endpoints: Sequence[Endpoint],
        mesh: Mesh,
        durations: Durations,
        lengths: tuple[Shares, Shares],
        work: RankWork,
    ) -> None:
        self.names, self.description, self.endpoints, self.mesh = names, description, endpoints, mesh
        self.durations, self.work = durations, work
        self._prompts, self._responses = lengths
        self._version = 0
        self._state_id = f"{names[0]}/0"
        self._changed: set[str] = set()
        self._parsed: tuple[bytes, Any, Any] = b"", None, None
        self._collected: dict[str, frozenset[int]] = {}

    def request_of(self, method: Method, serialized: bytes) -> tuple[Any, np.ndarray | None]:
        """Returns a request, and the lengths of its responses; ranks of one part share both."""
        known, request, lengths = self._parsed
        if known is not serialized:
            request = method.parse(serialized)
            lengths = lengths_in(request.batch, "response_ids") if method.takes_rows else None
            self._parsed = serialized, request, lengths
        return request, lengths

    def seconds(self, method: str, call: common_pb2.Call, rank: int) -> float:
        """Returns the seconds that a rank takes for a call; for one of several chunks, an equal share of those of the
        whole."""
        found = (self.durations.seconds(name, method, call.step, call.ordinal, rank) for name in self.names)
        return max(found) / max(call.chunks, 1)

    def pause_s(self, method: str, call: common_pb2.Call) -> float:
        """Returns the seconds that the controller works before a call can begin; 0 for chunks after the first."""
        if call.chunk:
            return 0.0
        found = (self.durations.pauses.find(name, method, call.step, call.ordinal) for name in self.names)
        return max(seconds or 0.0 for seconds in found)

    def changed_by(self, method: str, request: Any) -> None:
        """Changes the state of the service as a call does, once for all ranks."""
        if request.call.call_id in self._changed:
            return
        if method.startswith("update_"):
            self._version += 1
            self._state_id = f"{self.names[0]}/{self._version}"
        elif method == "load_weights":
            self._version, self._state_id = request.transfer.policy_version, request.state_id
        else:
            return
        self._changed.add(request.call.call_id)

    def response(
        self, method: Method, request: Any, lengths: np.ndarray | None, rank: int, timing: common_pb2.Timing
    ) -> Any:
        """Returns the response of a rank to a call."""
        name = method.snake_name
        self.changed_by(name, request)
        outcome = common_pb2.Outcome(timing=timing, policy_version=self._version, state_id=self._state_id)
        response = method.response(outcome=outcome)  # type: ignore[call-arg]
        if rank not in self._collectors(method):
            return response
        if name == "compute_reward":
            rows = len(request.text_rows) or request.batch.rows
            for row in range(rows):
                response.scores.add(score=(row + request.call.step) % 5 / 4)
        elif method.outputs and method.takes_rows:
            batch = self._made(method, request, lengths, rank)
            response.batch.CopyFrom(wire.to_proto(batch))
        return response

    def _collectors(self, method: Method) -> frozenset[int]:
        """Returns the ranks whose rows the controller collects."""
        if method.name not in self._collected:
            protocol = get_protocol(method.spec.transfer_protocol)  # type: ignore[union-attr]
            self._collected[method.name] = frozenset(protocol.collect(self.mesh))
        return self._collected[method.name]

    def _made(self, method: Method, request: Any, lengths: np.ndarray | None, rank: int) -> Batch:
        """Returns the output columns of a rank; prompts and responses that it makes have lengths of the workload, and
        all responses have ended, also those of the maximum length, which a workload has by default."""
        call, rows = request.call, request.batch.rows
        if lengths is None:
            numbers = wire.row_numbers(request.batch)
            lengths = drawn_lengths(self._responses, numbers, (call.seed, call.step, call.ordinal))
        place = (call.step * 100 + call.ordinal) * 100 + call.chunk
        holder, first = self.endpoints[rank], 1000 * place + len(method.name)
        columns = {}
        for number, name in enumerate(method.outputs, start=first):
            if name == "response" and not getattr(request, "return_text", True):
                continue
            if name == "turn_end":
                if request.return_ends:
                    columns[name] = LocalColumn(self._ends(lengths, request.sampling.max_new_tokens))
                continue
            of_prompt = drawn_lengths(self._prompts, np.arange(rows), (call.seed, call.step))
            columns[name] = made_column(name, of_prompt if name == "prompt_ids" else lengths, holder, number)
        return Batch(rows, columns)

    def _ends(self, lengths: np.ndarray, most: int) -> list[str]:
        """Returns why responses of these lengths [rows] ended: "length" for those of `most` tokens, unless all of the
        workload have as many, as by default, of which none would be left to train on."""
        are_alike = all(length == most for length, _ in self._responses)
        return ["stop" if are_alike or length < most else "length" for length in lengths]


class SimulatedRank:
    """Stands for the `RankClient` of one rank; see there. The rank executes its calls one after another.

    Attributes:
        service: Name of the service.
        rank: Number of the rank.
        address: Address of the rank.
    """

    def __init__(self, service: SimulatedService, rank: int) -> None:
        self.service, self.rank = service.names[0], rank
        self.address = service.endpoints[rank].address
        self._service = service
        self._free_s = 0.0
        self._stored = 0

    def __str__(self) -> str:
        return f"{self.service} rank {self.rank} (simulated)"

    def start(self, method: Method, request: bytes, timeout_s: float) -> asyncio.Future[Any]:
        """Begins a call when the calls before it have ended, and the controller has done its work; returns a future of
        its response. Raises no error."""
        began, work = time.perf_counter(), self._service.work
        loop = asyncio.get_running_loop()
        parsed, lengths = self._service.request_of(method, request)
        now = loop.time()
        seconds = self._service.seconds(method.snake_name, parsed.call, self.rank)
        start = max(now + self._service.pause_s(method.snake_name, parsed.call), self._free_s)
        self._free_s = end = start + seconds
        timing = common_pb2.Timing(arrived_unix_s=now, queue_s=start - now, compute_s=seconds)
        answered: asyncio.Future[Any] = loop.create_future()

        def answer() -> None:
            before = time.perf_counter()
            if not answered.done():
                answered.set_result(self._service.response(method, parsed, lengths, self.rank, timing))
            work.seconds += time.perf_counter() - before

        loop.call_at(end, answer)
        work.requests += 1
        work.nbytes += len(request)
        work.ends.setdefault(parsed.call.call_id, (parsed.call.step, []))[1].append(end)
        work.seconds += time.perf_counter() - began
        return answered

    async def reach(self, method: Method, request: Any, timeout_s: float) -> Any:
        """Answers at once."""
        if method.name == "Describe":
            return self._service.description
        return method.response()

    async def call(self, method: Method, request: Any, timeout_s: float) -> Any:
        """Answers at once."""
        return method.response()

    async def put(self, request: transfer_pb2.PutRequest, timeout_s: float) -> transfer_pb2.PutResponse:
        """Stores rows at once."""
        began = time.perf_counter()
        self._stored += len(request.batch.columns)
        holder = self._service.endpoints[self.rank]
        answer = transfer_pb2.PutResponse(batch=stored(request.batch, holder, (1 << 40) + self._stored))
        self._service.work.seconds += time.perf_counter() - began
        return answer

    async def close(self) -> None:
        """Does nothing."""
