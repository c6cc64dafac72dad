"""Requests that no caller means: of random values by type, and valid ones with something wrong in them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from google.protobuf import message_factory, struct_pb2
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

MAX_UINT64 = 2**64 - 1
INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, MAX_UINT64),
}
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, math.nan, math.inf, -math.inf, 1e308, -1e308, 5e-324, 1e-9, 3e9)
TEXTS = (
    "", "a", "\0", "1+1=", "../../etc/passwd", "/etc/cron.d/x", "~root", "%s%n", "\u202e\U0001f600" * 40,
    "x" * 300, "x" * 5_000,
)  # fmt: skip
ADDRESSES = ("", "127.0.0.1:1", "127.0.0.1:99999999", "a:b:c", "unix:/tmp/none", "[::1]:1", ":", "127.0.0.1")
KEYS = ("clip_low", "clip_high", "dual_clip", "value_clip", "x", "", "__class__")
MAX_DEPTH = 6


@dataclass
class Nasty:
    """Draws requests.

    Args:
        chance: Of all that is drawn.
        by_name: Draws most values of fields of these names, which are no messages.
    """

    chance: random.Random
    by_name: dict[str, Callable[[random.Random], Any]] = field(default_factory=dict)

    def message(self, kind: type[Any], depth: int = 0) -> Any:
        """A message of a type, each field set or not by chance."""
        message = kind()
        for each in kind.DESCRIPTOR.fields:
            if self.chance.random() < 0.7:
                self._set(message, each, depth)
        return message

    def spoilt(self, message: Any) -> Any:
        """A copy with one or two things wrong, at any depth."""
        copy = type(message).FromString(message.SerializeToString())
        for _ in range(self.chance.choice((1, 1, 2))):
            self._spoil(copy)
        return copy

    def noise(self, request: bytes) -> bytes:
        """Bytes that are no request, or hardly."""
        cut = self.chance.randrange(len(request) + 1)
        return self.chance.choice((
            self.chance.randbytes(self.chance.choice((1, 9, 100, 5_000))),
            request[:cut] + self.chance.randbytes(3) + request[cut:],
            request[:cut],
            b"\x0a\xff\xff\xff\xff\x7f" + request,
            b"\x0b" * 500,
        ))  # fmt: skip

    def _spoil(self, message: Message) -> None:
        if not message.DESCRIPTOR.fields:
            return None
        each: Any = self.chance.choice(list(message.DESCRIPTOR.fields))
        inner = [value for of, value in message.ListFields() if of.message_type and not _is_map(of)]
        if inner and self.chance.random() < 0.75:
            value: Any = self.chance.choice(inner)
            if isinstance(value, Message):
                return self._spoil(value)
            if len(value) and self.chance.random() < 0.8:
                return self._spoil(self.chance.choice(value))
        if self.chance.random() < 0.15:
            message.ClearField(each.name)
        else:
            self._set(message, each, 1)
        return None

    def _set(self, message: Any, each: FieldDescriptor, depth: int) -> None:
        if _is_map(each) or depth > MAX_DEPTH:
            return
        if not each.is_repeated:
            if each.message_type:
                getattr(message, each.name).CopyFrom(self._value(each, depth))
            else:
                setattr(message, each.name, self._value(each, depth))
            return
        is_long = each.message_type or each.cpp_type == FieldDescriptor.CPPTYPE_STRING
        count = self.chance.choice((0, 1, 1, 2, 3) if is_long else (0, 1, 3, 2_000))
        given = [self._value(each, depth) for _ in range(min(count, 3))]
        message.ClearField(each.name)
        if given:
            getattr(message, each.name).extend(given[n % len(given)] for n in range(count))

    def _value(self, each: FieldDescriptor, depth: int) -> Any:
        kind = each.cpp_type
        if each.message_type and each.message_type.full_name == "google.protobuf.Struct":
            return self._struct()
        if each.message_type:
            return self.message(message_factory.GetMessageClass(each.message_type), depth + 1)
        if each.name in self.by_name and self.chance.random() < 0.85:
            return self.by_name[each.name](self.chance)
        if kind in INTEGERS:
            return self._integer(*INTEGERS[kind])
        if each.enum_type:
            return self.chance.choice((*(value.number for value in each.enum_type.values), 77, -1, 2**31 - 1))
        if kind == FieldDescriptor.CPPTYPE_BOOL:
            return self.chance.random() < 0.5
        if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
            return self.chance.choice(FLOATS)
        if each.type == FieldDescriptor.TYPE_BYTES and self.chance.random() < 0.02:
            return bytes(1 << 18)
        if each.type == FieldDescriptor.TYPE_BYTES:
            return self.chance.choice((b"", b"\0", b"\xff" * 9, bytes(64), self.chance.randbytes(1_000)))
        if self.chance.random() < 0.02:
            return "y" * (1 << 18)
        return self.chance.choice(ADDRESSES if each.name == "address" else TEXTS)

    def _struct(self) -> struct_pb2.Struct:
        """Values of JSON, also of no JSON: numbers that are none, and values of no kind."""
        struct = struct_pb2.Struct()
        for key in self.chance.sample(KEYS, self.chance.randrange(4)):
            value = struct.fields[key]
            match self.chance.randrange(5):
                case 0:
                    value.number_value = self.chance.choice(FLOATS)
                case 1:
                    value.string_value = self.chance.choice(TEXTS)
                case 2:
                    value.bool_value = True
                case 3:
                    value.list_value.values.add().struct_value.fields["x"].null_value = struct_pb2.NULL_VALUE
        return struct

    def _integer(self, lowest: int, highest: int) -> int:
        some = (0, 1, 2, 3, 8, -1, 127, 1 << 16, 1 << 31, 1 << 33, 1 << 62, lowest, highest, highest - 1)
        fitting: Sequence[int] = [number for number in some if lowest <= number <= highest]
        return self.chance.choice((*fitting, self.chance.randint(lowest, highest)))


def _is_map(each: FieldDescriptor) -> bool:
    return bool(each.message_type and each.message_type.GetOptions().map_entry)
