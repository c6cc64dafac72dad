"""Writes scalars to a TensorBoard event file.

tensorboardX imports torch where that is installed (1,204 modules), which a controller must not, and the usual
writers write from a thread of their own, in which a full disk goes unseen; the format is small enough to write
it here. A file is a sequence of TFRecords (length, its checksum, data, its checksum), each of which holds one
`tensorflow.Event` message:

    message Event   { double wall_time = 1; int64 step = 2; string file_version = 3; Summary summary = 5; }
    message Summary { message Value { string tag = 1; float simple_value = 2; } repeated Value value = 1; }
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from controller.tracking.run_directory import AppendFile

DIRECTORY = "tensorboard"
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types of protobuf


class EventFile:
    """Writer of one event file in `run_dir/tensorboard/`; each step is on the disk when `log` returns. Continues the
    newest event file that is there."""

    def __init__(self, run_dir: Path) -> None:
        found = event_files(run_dir)
        name = found[-1].name if found else f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}"
        version = record(_wall_time(time.time()) + _bytes(3, b"brain.Event:2"))
        self._file = AppendFile(run_dir, f"{DIRECTORY}/{name}", b"" if found else version)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Appends the scalars of a step, by name. Raises RlhfError where writing fails."""
        self._file.append(record(scalar_event(time.time(), step, scalars)))

    def close(self) -> None:
        """Closes the file; may be called again."""
        self._file.close()


def event_files(run_dir: Path) -> list[Path]:
    """Returns the paths of the event files of a run, oldest first."""
    return sorted((run_dir / DIRECTORY).glob("events.out.tfevents.*"))


def scalar_event(unix_s: float, step: int, scalars: Mapping[str, float]) -> bytes:
    """Returns a serialized `tensorflow.Event` with scalars, which the format stores as float32."""
    values = b"".join(_bytes(1, _bytes(1, tag.encode()) + _float(2, value)) for tag, value in scalars.items())
    return _wall_time(unix_s) + _key(2, _VARINT) + _varint(step) + _bytes(5, values)


def record(data: bytes) -> bytes:
    """Returns `data` framed as a TFRecord."""
    length = struct.pack("<Q", len(data))
    return b"".join((length, _masked_crc(length), data, _masked_crc(data)))


def crc32c(data: bytes) -> int:
    """Returns the CRC-32C of `data` (Castagnoli; RFC 3720, appendix B.4)."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC_TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def _crc_entry(byte: int) -> int:
    for _ in range(8):
        byte = (byte >> 1) ^ (0x82F63B78 if byte & 1 else 0)
    return byte


_CRC_TABLE = [_crc_entry(byte) for byte in range(256)]


def _masked_crc(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _wall_time(unix_s: float) -> bytes:
    return _key(1, _FIXED64) + struct.pack("<d", unix_s)


def _float(field: int, value: float) -> bytes:
    with np.errstate(over="ignore"):
        return _key(field, _FIXED32) + np.array(value, dtype="<f4").tobytes()


def _bytes(field: int, data: bytes) -> bytes:
    return _key(field, _BYTES) + _varint(len(data)) + data


def _key(field: int, wire_type: int) -> bytes:
    return _varint(field << 3 | wire_type)


def _varint(number: int) -> bytes:
    assert number >= 0, number
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
