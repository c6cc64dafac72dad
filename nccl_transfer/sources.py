"""Sources of a rank: by each of its transports, one that gives out the rows of its store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from nccl_transfer.store.store import TensorStore
from nccl_transfer.transports.base import Handler, Source, Transport
from rlhf.contract import Method, service_methods


class Sources:
    """The sources of several transports, which serve until `close`.

    Args:
        store: Store of the rank's shards.
        host: IP address on which the rank may listen.
        transports: The transports.
    """

    def __init__(self, store: TensorStore, host: str, transports: Sequence[Transport]) -> None:
        self._sources: dict[str, Source] = {}
        self._with_rpcs, self._others = ExitStack(), ExitStack()
        try:
            for transport in transports:
                source = self._sources[transport.name] = transport.source(store, host)
                (self._with_rpcs if source.service else self._others).callback(source.close)
        except BaseException:
            self.close()
            raise

    def adverts(self) -> dict[str, bytes]:
        """Returns the advert of each source, by name of the transport, for the rank's endpoint."""
        return {name: source.advert() for name, source in self._sources.items()}

    def services(self) -> list[Mapping[str, Method]]:
        """Returns the methods of the gRPC services of the sources, by name, each service once."""
        paths = dict.fromkeys(source.service for source in self._sources.values() if source.service)
        return [service_methods(path) for path in paths]

    def handlers(self) -> dict[str, Handler]:
        """Returns the handlers of all sources, by path of the RPC."""
        return {
            service_methods(source.service)[name].path: handler
            for source in self._sources.values()
            for name, handler in source.handlers().items()
        }

    def close_rpcs(self) -> None:
        """Closes the sources with RPCs, so that their streams end. Called in the event loop before the server stops.
        Idempotent."""
        self._with_rpcs.close()

    def close(self) -> None:
        """Closes all sources. Idempotent."""
        self._with_rpcs.close()
        self._others.close()
