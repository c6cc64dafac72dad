"""What candidate and judge say to each other: frames of JSON, in which values are plain data and nothing else.

A frame is its length in bytes (4, big-endian) and that much JSON. In a value, null, booleans, small integers, floats,
text and lists stand for themselves; all else is an object of one key, its type: {"tuple": [...]}, {"set": [...]},
{"frozenset": [...]}, {"dict": [[key, value], ...]}, {"bytes": hex}, {"complex": [re, im]}, {"int": hex}.

This module runs in both sandboxes and imports the standard library only.
"""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Callable
from typing import Any

HEADER_BYTES = 4
MAX_DEPTH = 64
"""Values nested deeper than this are refused."""
_PLAIN_INT = 2**63
"""Integers from here on travel as hex: decimal digits take quadratic time, and Python limits them."""


class Malformed(Exception):
    """What was received is not what was agreed on."""


class TooLarge(Exception):
    """A frame is larger than allowed."""


def encode(value: object, depth: int = 0) -> Any:
    """A value as JSON's types.

    Subclasses become the type they are derived from: what they override does not travel.

    Raises:
        Malformed: The value, or something in it, is not plain data, or is nested too deep.
    """
    if depth > MAX_DEPTH:
        raise Malformed(f"nested deeper than {MAX_DEPTH}")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value) if -_PLAIN_INT <= value < _PLAIN_INT else {"int": hex(value)}
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, list):
        return [encode(item, depth + 1) for item in value]
    if isinstance(value, dict):
        items = [[encode(key, depth + 1), encode(item, depth + 1)] for key, item in value.items()]
        return {"dict": items}
    for kind in (tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [encode(item, depth + 1) for item in value]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    raise Malformed(f"{type(value).__name__} is not plain data")


def decode(data: Any, depth: int = 0) -> Any:
    """The value that `encode` made JSON's types of; trusts nothing.

    Raises:
        Malformed: It is not one.
    """
    if depth > MAX_DEPTH:
        raise Malformed(f"nested deeper than {MAX_DEPTH}")
    if data is None or isinstance(data, bool | int | float | str):
        return data
    if isinstance(data, list):
        return [decode(item, depth + 1) for item in data]
    if not isinstance(data, dict) or len(data) != 1:
        raise Malformed("an object of one key is expected")
    ((kind, content),) = data.items()
    if kind not in _DECODERS:
        raise Malformed(f"unknown type {kind!r}")
    try:
        return _DECODERS[kind](content, depth)
    except (TypeError, ValueError) as error:
        raise Malformed(f"{kind}: {error}") from None


def _items(content: Any, depth: int) -> list[Any]:
    if not isinstance(content, list):
        raise TypeError("a list is expected")
    return [decode(item, depth + 1) for item in content]


def _pairs(content: Any, depth: int) -> dict[Any, Any]:
    return {decode(key, depth + 1): decode(value, depth + 1) for key, value in content}


def _complex(content: Any, depth: int) -> complex:
    real, imaginary = content
    return complex(float(real), float(imaginary))


_DECODERS: dict[str, Callable[[Any, int], Any]] = {
    "tuple": lambda content, depth: tuple(_items(content, depth)),
    "set": lambda content, depth: set(_items(content, depth)),
    "frozenset": lambda content, depth: frozenset(_items(content, depth)),
    "dict": _pairs,
    "bytes": lambda content, depth: bytes.fromhex(content),
    "complex": _complex,
    "int": lambda content, depth: int(content, 16),
}


def pack(message: Any, limit: int) -> bytes:
    """A message as a frame.

    Raises:
        TooLarge: It has more than `limit` bytes.
    """
    payload = json.dumps(message).encode()
    if len(payload) > limit:
        raise TooLarge(f"{len(payload)} bytes, where {limit} are allowed")
    return len(payload).to_bytes(HEADER_BYTES, "big") + payload


def unpack(payload: bytes) -> Any:
    """The message of a frame.

    Raises:
        Malformed: It is not JSON, nests too deep, or has an object with a key twice.
    """
    try:
        return json.loads(payload, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"not JSON: {error}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice")
    return found


def send(fd: int, frame: bytes, deadline: float | None = None) -> None:
    """Writes a frame to a socket.

    Args:
        deadline: `time.monotonic()` to give up at; the socket must not block then. None: never.

    Raises:
        TimeoutError: The deadline passed.
        OSError: The other end is closed.
    """
    rest = memoryview(frame)
    while rest:
        if deadline is not None:
            _wait(select.POLLOUT, fd, deadline)
        try:
            rest = rest[os.write(fd, rest) :]
        except BlockingIOError:
            continue


def receive(fd: int, limit: int, deadline: float | None = None) -> bytes:
    """Reads the payload of one frame, and never holds more than `limit` bytes of it.

    Raises:
        TooLarge: Its header promises more than `limit` bytes.
        TimeoutError: The deadline passed; see `send`.
        EOFError: The other end closed.
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
        except ConnectionError:
            part = b""
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
