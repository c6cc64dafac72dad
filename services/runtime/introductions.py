"""Endpoints to which this rank may connect: those of its own service, and those that the controllers of sessions have
introduced (WorkerService.Introduce)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from nccl_transfer.refs.shards import Endpoint
from nccl_transfer.refs.wire_ranks import endpoint_from_proto
from rlhf.addresses import check_address
from rlhf.errors import InvalidRequest
from rlhf.v1 import common_pb2

MOST_ENDPOINTS = 1 << 16
"""Maximum number of endpoints that a session may introduce to one rank."""
MOST_BYTES = 1024
"""Maximum size of a serialized endpoint; those of ranks have about 200 bytes."""


class Introductions:
    """Endpoints that the calls of each session may name: those of this rank's own service, and those that the session
    has introduced, one per address: a later endpoint at the same address replaces it. `check` refuses all others.

    Args:
        own: Returns the endpoints of this rank's service, as its ranks exchanged them; an element is None if unknown.
        check_adverts: Raises ValueError if an endpoint cannot have these adverts, by name of the transport.
        forget: Called with each endpoint that no session has introduced any more and that is not of this rank's own
            service.
    """

    def __init__(
        self,
        own: Callable[[], Iterable[Endpoint | None]],
        check_adverts: Callable[[Mapping[str, bytes]], None],
        forget: Callable[[Endpoint], None],
    ) -> None:
        self._own = own
        self._forget = forget
        self._check_adverts = check_adverts
        self._sessions: dict[str, dict[str, Endpoint]] = {}

    def add(self, session: str, endpoints: Sequence[common_pb2.Endpoint]) -> None:
        """Allows the calls of a session to name these endpoints. If this raises, none of them is added.

        Raises:
            InvalidRequest: An endpoint, which the message names, is invalid, or the session has too many.
        """
        known = self._sessions.get(session, {})
        added = {endpoint.address: endpoint for endpoint in endpoints}
        if (count := len(known.keys() | added)) > MOST_ENDPOINTS:
            raise InvalidRequest(
                f"session {session!r} has {count} endpoints with these; at most {MOST_ENDPOINTS} are allowed"
            )
        for endpoint in added.values():
            self._check(endpoint)
        new = {address: endpoint_from_proto(endpoint) for address, endpoint in added.items()}
        self._sessions[session] = known | new
        self._forget_unnamed(known[address] for address in known.keys() & new.keys())

    def forget(self, session: str) -> None:
        """Removes all endpoints of a session."""
        self._forget_unnamed(self._sessions.pop(session, {}).values())

    def _forget_unnamed(self, endpoints: Iterable[Endpoint]) -> None:
        """Calls `forget` with those of these endpoints that no session may name any more."""
        left = [e for e in endpoints if all(known.get(e.address) != e for known in self._sessions.values())]
        own = {e.address: e for e in self._own() if e is not None} if left else {}
        for endpoint in left:
            if own.get(endpoint.address) != endpoint:
                self._forget(endpoint)

    def check(self, session: str, endpoints: Iterable[common_pb2.Endpoint]) -> None:
        """Raises InvalidRequest if one of these endpoints neither was introduced by the session nor belongs to this
        rank's own service. The message names the first such endpoint."""
        known = self._sessions.get(session, {})
        strangers = [e for e in map(endpoint_from_proto, endpoints) if known.get(e.address) != e]
        own = {e.address: e for e in self._own() if e is not None} if strangers else {}
        for stranger in strangers:
            if own.get(stranger.address) != stranger:
                is_known = stranger.address in {**known, **own}
                hint = "; a different endpoint with this address is known" if is_known else ""
                raise InvalidRequest(
                    f"session {session!r} has not introduced the endpoint {stranger} to this rank "
                    f"(WorkerService.Introduce){hint}"
                )

    def _check(self, endpoint: common_pb2.Endpoint) -> None:
        """Raises InvalidRequest if an endpoint is invalid, for example if its port is."""
        where = f"endpoint {endpoint.address[:100]!r}"
        if endpoint.ByteSize() > MOST_BYTES:
            raise InvalidRequest(f"{where} has {endpoint.ByteSize()} bytes; at most {MOST_BYTES} are allowed")
        try:
            check_address(endpoint.address)
        except ValueError as error:
            raise InvalidRequest(f"{where}: address: {error}") from None
        try:
            self._check_adverts(endpoint.adverts)
        except ValueError as error:
            raise InvalidRequest(f"{where}: adverts: {error}") from None
