"""Messages of the tcp transport; see `nccl_transfer.transports.tcp`."""

from __future__ import annotations

import contextlib
import socket
import struct

MAX_REQUEST_BYTES = 64 << 20

MAGIC = b"rlhftcp1"
KEY_BYTES = 16
REQUEST = struct.Struct(f"<{len(MAGIC)}s{KEY_BYTES}sI")
"""Header of a request: MAGIC, key, and size in bytes of the serialized FetchRequest that follows."""
ADVERT = struct.Struct(f"<H{KEY_BYTES}s")
"""Advert of a rank: TCP port at the host of its address, and key."""
FRAME = struct.Struct("<II")
"""Header of a frame of the answer: kind, and size of the payload in bytes."""
DATA, END, ERROR = 1, 2, 3
"""Kinds of frames: bytes of the ranges, end of the answer, serialized google.rpc.Status."""


def disconnect(connection: socket.socket) -> None:
    """Ends a connection that another thread reads or writes; that thread gets an error, or the end, and closes it."""
    with contextlib.suppress(OSError):
        # Of the socket: with TLS, the method of the connection would take the encryption away under that thread.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
