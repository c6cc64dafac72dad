"""Draws random calls to a running service, from the descriptors of every RPC that its ranks serve.

A call is valid, valid but for one or two fields at any depth, or has random values throughout; of some calls the bytes
are cut or changed. Calls refer to rows and name sessions that earlier calls made, and that may be gone since.
"""

from __future__ import annotations

import base64
import random
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from chaos.nasty import MAX_UINT64, Nasty
from chaos.valid_requests import ALL_ROLES, Valid
from google.protobuf import message_factory
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from nccl_transfer.refs import wire
from rlhf.contract import SERVICES, group_methods
from rlhf.v1 import common_pb2, transfer_pb2, worker_pb2

HOUR_NS = 3600 * 10**9
NAMES = {
    "surrogate": ("ppo", "gspo", "cispo", "none", "os:system", "", "a:b:c"),
    "value_loss": ("clipped", "none", "os:system", "", ":"),
    "aggregation": ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "none", ""),
    "kl_loss_estimator": ("k1", "k2", "k3", "k1+", "k3+", "none", ""),
    "rollout_correction": ("truncate", "mask", "taper", "none", "all", ""),
    "rollout_correction_level": ("token", "sequence", "none", ""),
    "loss": ("bradley_terry", "cost", "none", ""),
    "name": ("prompt_ids", "response_ids", "log_probs", "ref_log_probs", "rollout_log_probs", "advantages", "values",
             "returns", "prompt", "response", "text", "chosen", "rejected", "chosen_sign", "group", "metadata",
             "pretrain_text", "rewards", "", "x" * 300),
}  # fmt: skip
"""Values of fields of text that name something: of this project, of nobody, or of a module that no request may name."""


@dataclass(frozen=True)
class Rpc:
    """A method that ranks serve, ours or gRPC's."""

    path: str
    request: type[Any]
    streams: bool


def rpcs(role: str) -> list[Rpc]:
    """Returns all methods that a rank of a role serves, from the descriptors."""
    own = [
        Rpc(method.path, method.request, method.streams or method.takes_stream)
        for name in (role, "worker", "transfer")
        for method in SERVICES[name].values()
    ]
    foreign = [
        Rpc(f"/{service.full_name}/{method.name}", message_factory.GetMessageClass(method.input_type), True)
        for module in (health_pb2, reflection_pb2)
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    ]
    return own + foreign


@dataclass(frozen=True)
class Service:
    """A running service that is sent random calls.

    Attributes:
        name: Its name; no two services of one test share it.
        role: Its role.
        addresses: Address of each rank.
        epoch: Its epoch.
        root: Directory below which it may write.
        valid: Valid requests (`valid_requests`).
    """

    name: str
    role: str
    addresses: tuple[str, ...]
    epoch: int
    root: Path
    valid: Valid = field(repr=False)


@dataclass(frozen=True)
class Shot:
    """One call, the same to some ranks of a service.

    Attributes:
        service: Name of the service.
        ranks: The ranks.
        path: gRPC path of the method.
        messages: Requests, serialized; a unary method takes the first.
        streams: Whether the method takes or returns a stream.
        timeout_s: Deadline of the call.
        cancel_after_s: When the client cancels it; None for never.
    """

    service: str
    ranks: tuple[int, ...]
    path: str
    messages: tuple[bytes, ...]
    streams: bool
    timeout_s: float
    cancel_after_s: float | None

    def to_json(self) -> dict[str, Any]:
        """Returns the call as JSON, messages in base64."""
        return {**asdict(self), "messages": [base64.b64encode(each).decode() for each in self.messages]}

    @staticmethod
    def from_json(told: Mapping[str, Any]) -> Shot:
        """Returns the call that `to_json` wrote."""
        messages = tuple(base64.b64decode(each) for each in told["messages"])
        return Shot(**{**told, "messages": messages, "ranks": tuple(told["ranks"])})


class Shots:
    """Draws calls to one service.

    Args:
        service: The service.
        is_guest: Whether the calls leave the session that is there alone: none says that it takes over.
        longest_s: Longest deadline of a call.
    """

    def __init__(self, service: Service, *, is_guest: bool = False, longest_s: float = 3.0) -> None:
        self.service = service
        self._is_guest, self._longest_s = is_guest, longest_s
        self._rpcs = rpcs(service.role)
        self._methods = group_methods(service.role)
        self._batches: deque[common_pb2.Batch] = deque(maxlen=32)
        self._session, self._youngest = "none yet", 0

    def learn(self, path: str, response: bytes) -> None:
        """Keeps the rows that a response refers to, for later calls."""
        method = next((m for name in (self.service.role, "worker", "transfer") for m in SERVICES[name].values()
                       if m.path == path), None)  # fmt: skip
        if method is not None and "batch" in method.response.DESCRIPTOR.fields_by_name:  # pyright: ignore[reportAttributeAccessIssue]
            batch = method.response.FromString(response).batch  # pyright: ignore[reportAttributeAccessIssue]
            if batch.shards:
                self._batches.append(batch)

    def draw(self, chance: random.Random, number: int) -> Shot:
        """Returns the call of a number; `chance` makes all choices."""
        drawn = Nasty(chance, self._fields())
        rpc = self._rpcs[number % len(self._rpcs)]
        everyone = tuple(range(len(self.service.addresses)))
        ranks: tuple[int, ...] = (chance.choice(everyone),)
        if rpc.path.endswith("/Dispatch"):
            messages = [self._dispatched(chance, drawn) for _ in range(chance.randint(1, 5))]
        elif chance.random() < 0.5:
            path, message = self._valid(chance, drawn)
            rpc = next(each for each in self._rpcs if each.path == path)
            messages = [message.SerializeToString()]
            ranks = everyone if chance.random() < 0.8 else ranks
        else:
            messages = [
                drawn.message(rpc.request).SerializeToString() for _ in range(chance.choice((1, 1, 1, 0, 3)))
            ]
        if chance.random() < 0.1:
            messages = [drawn.noise(each) for each in messages]
        return Shot(
            self.service.name, ranks, rpc.path, tuple(messages), rpc.streams,
            timeout_s=min(_rarely(chance, 0.001, (0.3, 1.0, 3.0)), self._longest_s),
            cancel_after_s=_rarely(chance, 0.01, (None,)),
        )  # fmt: skip

    def _valid(self, chance: random.Random, drawn: Nasty) -> tuple[str, Any]:
        """Returns the path of a method and a request, which is valid or has one or two fields changed."""
        if chance.random() < 0.2:
            path, request = self._transfer(chance)
        else:
            own = [name for name in self.service.valid if name not in ALL_ROLES]
            name = chance.choice(own if chance.random() < 0.8 else list(ALL_ROLES))
            method, (batch, options) = self._methods[name], self.service.valid[name]
            if "directory" in options:
                options = {**options, "directory": str(self.service.root / options["directory"])}
            path, request = method.path, method.request(call=self._header(chance), **options)
            if batch is not None:
                is_known = self._batches and chance.random() < 0.4
                request.batch.CopyFrom(chance.choice(self._batches) if is_known else wire.to_proto(batch))
        return path, drawn.spoilt(request) if chance.random() < 0.8 else request

    def _transfer(self, chance: random.Random) -> tuple[str, Any]:
        """Returns a valid Put or Fetch."""
        if not self._batches or chance.random() < 0.5:
            rows = next(batch for batch, _ in self.service.valid.values() if batch is not None)
            put = transfer_pb2.PutRequest(session=self._session, step=1, batch=wire.to_proto(rows))
            return SERVICES["transfer"]["Put"].path, put
        shards = chance.choice(self._batches).shards
        ranges = [transfer_pb2.ByteRange(shard=shard.id, nbytes=shard.nbytes) for shard in shards]
        fetch = transfer_pb2.FetchRequest(epoch=self.service.epoch, ranges=ranges, chunk_bytes=1 << 16)
        return SERVICES["transfer"]["Fetch"].path, fetch

    def _header(self, chance: random.Random) -> common_pb2.Call:
        """Returns the header of an unordered call, which only a service of one rank takes, or of the first call of a
        new session."""
        call_id = chance.choice(("again", uuid.UUID(int=chance.getrandbits(128)).hex, uuid.uuid4().hex))
        given = {"call_id": call_id, "epoch": self.service.epoch, "seed": 1, "step": 1}
        if len(self.service.addresses) == 1 and chance.random() < 0.7:
            return common_pb2.Call(**given)
        self._session, started = uuid.uuid4().hex, self._start(max(time.time_ns(), self._youngest + 1000))
        return common_pb2.Call(
            **given,
            session=self._session,
            sequence=1,
            session_started_unix_ns=started,
            take_over=not self._is_guest,
        )

    def _start(self, started: int) -> int:
        """Returns the start of a session, and remembers it if ranks may have taken it for the youngest."""
        if started < time.time_ns() + HOUR_NS:
            self._youngest = max(self._youngest, started)
        return started

    def _dispatched(self, chance: random.Random, drawn: Nasty) -> bytes:
        """Returns a message of Dispatch with a call in it, or with something else."""
        message = drawn.message(worker_pb2.DispatchRequest)
        if chance.random() < 0.4:
            message.timeout_s = 0.3
            message.method, inner = self._valid(chance, drawn)
            message.request = inner.SerializeToString()
        elif chance.random() < 0.6:
            method = chance.choice(
                [m for name in (self.service.role, "worker") for m in SERVICES[name].values()]
            )
            inner = drawn.message(method.request).SerializeToString()
            message.method, message.request = (
                method.path,
                inner if chance.random() < 0.8 else drawn.noise(inner),
            )
        return message.SerializeToString()

    def _fields(self) -> dict[str, Callable[[random.Random], Any]]:
        """Returns how fields of some names are drawn."""
        now, epoch, root = time.time_ns(), self.service.epoch, self.service.root
        fields: dict[str, Callable[[random.Random], Any]] = {
            "call_id": lambda c: _rarely(c, "i" * (1 << 20), ("", "again", "again and again", uuid.uuid4().hex)),
            "session": lambda c: _rarely(c, "s" * 100_000, ("", "stranger", self._session, f"s{c.random()}")),
            "sequence": lambda c: c.choice((0, 1, 1, 1, 2, 3, 7, MAX_UINT64)),
            "epoch": lambda c: c.choice((0, epoch, epoch, epoch, epoch - 1, MAX_UINT64)),
            "session_started_unix_ns": lambda c: self._start(
                c.choice((0, 1, now, self._youngest, now + HOUR_NS // 2, now + HOUR_NS - 10**9, MAX_UINT64))
            ),
            "directory": lambda c: c.choice((
                "", "/", "../../etc", str(root), f"{root}/../../x", f"{root}/made", "\0", f"{root}/{'d' * 5_000}",
                f"{root}/{'d/' * 3_000}", "/proc/self/mem/x", "~/x",
            )),
            "timeout_s": lambda c: c.choice((0.05, 0.3, 0.0, -1.0, float("nan"), float("inf"), 1e300)),
            "interval_s": lambda c: c.choice((0.0, 0.05, -1.0, float("nan"), float("inf"), 1e300)),
            "take_over": lambda c: not self._is_guest and c.random() < 0.5,
            "method": lambda c: c.choice((*(rpc.path for rpc in self._rpcs), "", "/no/Method", "x" * 9_000)),
            "address": lambda c: c.choice(
                (*self.service.addresses, "", "127.0.0.1:1", "127.0.0.1:99999999", "a:b:c", "unix:/tmp/no")
            ),
        }  # fmt: skip
        if self._batches:
            shard = self._batches[-1].shards[0].id
            fields["shard"] = lambda c: c.choice((0, 0, 1, shard, shard, MAX_UINT64 >> 32))
        for name, values in NAMES.items():
            fields[name] = lambda c, values=values: c.choice(values)
        return fields


def _rarely(chance: random.Random, value: Any, others: Sequence[Any]) -> Any:
    """Returns the value in one of 12 cases, else one of the others."""
    return value if chance.random() < 1 / 12 else chance.choice(others)
