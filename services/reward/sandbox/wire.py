"""The messages between the sandboxes and the service: plain data encoded as bytes, in frames over pipes.

A value is encoded as one byte for its type and then its content (sizes and counts: 4 bytes, big-endian):

    N, T, F             None, True, False
    f, c                a float, a complex number: 8 bytes (IEEE 754) each part
    i                   an integer: size, two's complement
    s, b                text as UTF-8, bytes: size, content
    l, t, S, Z, d       list, tuple, set, frozenset, dictionary: count, items (a dictionary's: key, value, key, ...)

A frame is the size of its payload (4 bytes) and the payload. This module runs in both sandboxes. It imports only
modules that load fast, because each program takes the start of two interpreters.
"""

from __future__ import annotations

import os
import select
import struct
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

HEADER_BYTES = 4
MAX_DEPTH = 64
"""Maximum depth to which values may be nested."""
_MOST_BYTES = 2**32 - 1
_CONTAINERS = {b"l": list, b"t": tuple, b"S": set, b"Z": frozenset}
_CONSTANTS = {b"N": None, b"T": True, b"F": False}


class Malformed(Exception):
    """A message that was received violates the format, or a value to be sent is not plain data."""


class TooLarge(Exception):
    """A frame that was received, or is to be sent, has more bytes than its limit allows."""


def encode(value: object) -> bytes:
    """Encodes a value. Instances of subclasses are encoded as the plain type, without calling overridden methods.

    Raises:
        Malformed: The value, or a part of it, is not plain data, or is nested deeper than `MAX_DEPTH`.
    """
    parts: list[bytes] = []
    _append(value, parts, 0)
    return b"".join(parts)


def _append(value: object, parts: list[bytes], depth: int) -> None:
    if depth > MAX_DEPTH:
        raise Malformed(f"nested deeper than {MAX_DEPTH}")
    if value is None or isinstance(value, bool):
        parts.append(b"N" if value is None else b"T" if value else b"F")
    elif isinstance(value, int):
        size = int.bit_length(value) // 8 + 1
        parts += (b"i", _size(size), int.to_bytes(value, size, "big", signed=True))
    elif isinstance(value, float):
        parts += (b"f", struct.pack(">d", value))
    elif isinstance(value, complex):
        parts += (b"c", struct.pack(">2d", value.real, value.imag))
    elif isinstance(value, str):
        content = str.encode(value, "utf-8", "surrogatepass")
        parts += (b"s", _size(len(content)), content)
    elif isinstance(value, bytes | bytearray):
        parts += (b"b", _size(len(value)), bytes(value))
    elif isinstance(value, dict):
        parts += (b"d", _size(len(value)))
        for key, item in value.items():
            _append(key, parts, depth + 1)
            _append(item, parts, depth + 1)
    elif isinstance(value, list | tuple | set | frozenset):
        tag = next(tag for tag, kind in _CONTAINERS.items() if isinstance(value, kind))
        items = list(value)
        parts += (tag, _size(len(items)))
        for item in items:
            _append(item, parts, depth + 1)
    else:
        raise Malformed(f"{type(value).__name__} is not plain data")


def _size(size: int) -> bytes:
    if size > _MOST_BYTES:
        raise Malformed(f"{size} bytes or items in one value")
    return size.to_bytes(4, "big")


def decode(data: bytes) -> Any:
    """Decodes a value from untrusted bytes.

    Raises:
        Malformed: The bytes are not one encoded value.
    """
    reader = _Reader(data)
    value = reader.value(0)
    if reader.place != len(data):
        raise Malformed("bytes after the value")
    return value


class _Reader:
    """Decodes values one after the other; `place` is the number of bytes read so far."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.place = 0

    def value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise Malformed(f"nested deeper than {MAX_DEPTH}")
        tag = self._take(1)
        if tag in _CONSTANTS:
            return _CONSTANTS[tag]
        if tag == b"i":
            return int.from_bytes(self._sized(), "big", signed=True)
        if tag == b"f":
            return struct.unpack(">d", self._take(8))[0]
        if tag == b"c":
            return complex(*struct.unpack(">2d", self._take(16)))
        if tag == b"b":
            return self._sized()
        try:
            if tag == b"s":
                return self._sized().decode("utf-8", "surrogatepass")
            if tag == b"d":
                return {self.value(depth + 1): self.value(depth + 1) for _ in range(self._count())}
            if tag in _CONTAINERS:
                return _CONTAINERS[tag]([self.value(depth + 1) for _ in range(self._count())])
        except (TypeError, ValueError) as error:
            raise Malformed(str(error)) from None
        raise Malformed(f"unknown type {tag!r}")

    def _count(self) -> int:
        """Reads a number of items. Raises Malformed if it exceeds the number of remaining bytes, since an item has at
        least one byte."""
        count = int.from_bytes(self._take(4), "big")
        if count > len(self._data) - self.place:
            raise Malformed(f"{count} items in {len(self._data) - self.place} bytes")
        return count

    def _sized(self) -> bytes:
        return self._take(int.from_bytes(self._take(4), "big"))

    def _take(self, size: int) -> bytes:
        part = self._data[self.place : self.place + size]
        if len(part) != size:
            raise Malformed("the value is cut off")
        self.place += size
        return part


def frame(payload: bytes, limit: int = _MOST_BYTES) -> bytes:
    """Returns a frame: the size of the payload, then the payload.

    Raises:
        TooLarge: The payload has more than `limit` bytes.
    """
    if len(payload) > limit:
        raise TooLarge(f"{len(payload)} bytes, where {limit} are allowed")
    return _size(len(payload)) + payload


def send(fd: int, framed: bytes, deadline: float | None = None) -> None:
    """Writes a frame to a pipe.

    Args:
        fd: Descriptor of the pipe.
        framed: The frame, from `frame`.
        deadline: Time at which the wait ends, on the clock of `time.monotonic`, in seconds, for a non-blocking pipe.
            Default: no deadline.

    Raises:
        TimeoutError: The deadline passed.
        OSError: The other end is closed.
    """
    rest = memoryview(framed)
    while rest:
        if deadline is not None:
            _wait(select.POLLOUT, fd, deadline)
        try:
            rest = rest[os.write(fd, rest) :]
        except BlockingIOError:
            continue


def receive(fd: int, limit: int, deadline: float | None = None) -> bytes:
    """Reads one frame and returns its payload. Arguments as in `send`.

    Raises:
        TooLarge: The header announces more than `limit` bytes; the payload is not read.
        TimeoutError: The deadline passed; see `send`.
        EOFError: The other end is closed.
    """
    size = int.from_bytes(_read(fd, HEADER_BYTES, deadline), "big")
    if size > limit:
        raise TooLarge(f"{size} bytes, where {limit} are allowed")
    return _read(fd, size, deadline)


def _read(fd: int, size: int, deadline: float | None) -> bytes:
    parts = []
    while size:
        if deadline is not None:
            _wait(select.POLLIN, fd, deadline)
        try:
            part = os.read(fd, min(size, 1 << 16))
        except BlockingIOError:
            continue
        if not part:
            raise EOFError("the other end closed")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _wait(event: int, fd: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(fd, event)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TimeoutError
