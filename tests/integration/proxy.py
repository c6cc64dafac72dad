"""A TCP proxy in front of a rank, whose connections a test can cut."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator


class Proxy:
    """Passes bytes on between its address and another, on an event loop of its own.

    Attributes:
        address: Where it listens.
        connections: How many it has accepted.
    """

    def __init__(self, upstream: str) -> None:
        self.address = ""
        self.connections = 0
        self._host, _, port = upstream.rpartition(":")
        self._port = int(port)
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)

    def cut(self) -> None:
        """Resets every connection; new ones are taken as before."""
        self._loop.call_soon_threadsafe(self._abort)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._server.close)
        self._loop.call_soon_threadsafe(self._abort)
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def _abort(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        up_reader, up_writer = await asyncio.open_connection(self._host, self._port)
        both = {writer, up_writer}
        self._writers |= both
        await asyncio.gather(_pass(reader, up_writer), _pass(up_reader, writer))
        self._writers -= both


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.transport.abort()


@contextlib.contextmanager
def proxy(upstream: str) -> Iterator[Proxy]:
    """A proxy for as long as the context lasts."""
    made = Proxy(upstream)
    try:
        yield made
    finally:
        made.close()
