"""The source's side of the memfd transport; see `nccl_transfer.transports.memfd`."""

from __future__ import annotations

import logging
import os
import secrets
import selectors
import socket
import struct
import threading
import time

from nccl_transfer.store.arena import NONCE_BYTES
from nccl_transfer.store.store import TensorStore
from nccl_transfer.transports.base import Source

MAGIC = b"rlhfmem1"
ACCEPT_PAUSE_S = 0.1
HELLO = struct.Struct(f"<{len(MAGIC)}sQQ{NONCE_BYTES}s")  # magic, epoch, size of the arena in bytes, nonce
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class MemfdSource(Source):
    """Sends the file descriptor of a store's arena to processes of the same user and host.

    One thread serves an abstract Unix socket, so no file is left behind. Connections stay open: when a connection
    ends, its reader knows that this rank has ended.

    Args:
        store: Store whose arena is shared.

    Attributes:
        name: Name of the socket, which is the advert.
    """

    def __init__(self, store: TensorStore) -> None:
        self.name = f"rlhf-{secrets.token_hex(16)}"
        self._store = store
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"\0{self.name}")
        self._listener.listen(socket.SOMAXCONN)
        self._stop, stopped = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, args=(stopped,), name="arena-server", daemon=True)
        self._thread.start()

    def advert(self) -> bytes:
        return self.name.encode()

    def close(self) -> None:
        """Closes the socket and all connections; later reads from this rank raise ServiceLost."""
        self._stop.close()
        self._thread.join()

    def _serve(self, stopped: socket.socket) -> None:
        with selectors.DefaultSelector() as selector:
            for end in (self._listener, stopped):
                selector.register(end, selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in selector.select()]
                if stopped in ready:
                    break
                for end in ready:
                    if end is self._listener:
                        self._accept(selector)
                    else:
                        _disconnect(selector, end)
            for key in list(selector.get_map().values()):
                _disconnect(selector, key.fileobj)

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:  # for example without free descriptors: readers wait
            logging.warning("arena %s: %s", self.name, error)
            time.sleep(ACCEPT_PAUSE_S)
            return
        endpoint, reader = self._store.endpoint, self._store.reader
        if peer_uid(connection) != os.geteuid() or endpoint is None:
            connection.close()
            return
        hello = HELLO.pack(MAGIC, endpoint.epoch, reader.nbytes, reader.nonce)
        try:
            socket.send_fds(connection, [hello], [reader.fd])
        except OSError:  # the reader has left already
            connection.close()
            return
        selector.register(connection, selectors.EVENT_READ)


def _disconnect(selector: selectors.BaseSelector, connection: object) -> None:
    assert isinstance(connection, socket.socket)
    selector.unregister(connection)
    connection.close()


def peer_uid(connection: socket.socket) -> int:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(raw)[1]
