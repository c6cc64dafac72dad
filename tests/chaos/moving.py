"""Changes calls that were saved from services of an earlier start to calls of services of this one: their epochs,
addresses, directories and times."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from chaos.shots import HOUR_NS, Service, Shot, rpcs
from google.protobuf.message import DecodeError, Message

from rlhf.v1 import worker_pb2


def place_of(service: Service) -> dict[str, Any]:
    """Returns what requests to a service depend on beside its role, as JSON: epoch, addresses, directory, time."""
    return {
        "epoch": service.epoch,
        "addresses": list(service.addresses),
        "root": str(service.root),
        "unix_ns": time.time_ns(),
    }


def moved(shot: Shot, place: Mapping[str, Any], service: Service) -> Shot:
    """Returns a call for a service that has taken the place of the one that it was sent to. Messages that cannot be
    parsed, or would not be the same bytes again, stay as they are.

    Args:
        shot: The call.
        place: Where it was sent, as `place_of` has returned it.
        service: Where it will be sent.
    """
    addresses = dict(zip(place["addresses"], service.addresses, strict=True))
    later_ns = time.time_ns() - place["unix_ns"]

    def change(name: str, value: Any) -> Any:
        if name in ("epoch", "communicator_epoch") and value in (place["epoch"], place["epoch"] - 1):
            return value - place["epoch"] + service.epoch
        if name == "session_started_unix_ns" and abs(value - place["unix_ns"]) <= HOUR_NS:
            return value + later_ns
        if name == "address":
            return addresses.get(value, value)
        return value.replace(place["root"], str(service.root)) if isinstance(value, str) else value

    kinds = {rpc.path: rpc.request for rpc in rpcs(service.role)}
    return replace(shot, messages=tuple(_rewritten(each, kinds, shot.path, change) for each in shot.messages))


def _rewritten(data: bytes, kinds: Mapping[str, Any], path: str, change: Callable[[str, Any], Any]) -> bytes:
    """Returns a serialized request of the method `path` in which each field has the value that `change` returns for its
    name and value."""
    if path not in kinds:
        return data
    try:
        message = kinds[path].FromString(data)
    except DecodeError:
        return data
    if message.SerializeToString() != data:
        return data
    if isinstance(message, worker_pb2.DispatchRequest):
        message.request = _rewritten(message.request, kinds, message.method, change)
    _change(message, change)
    return message.SerializeToString()


def _change(message: Message, change: Callable[[str, Any], Any]) -> None:
    """Sets each field of a message, at any depth, to the value that `change` returns for its name and value."""
    for each, value in message.ListFields():
        if each.message_type and each.message_type.GetOptions().map_entry:
            continue
        values = list(value) if each.is_repeated else [value]
        if each.message_type:
            for inner in values:
                _change(inner, change)
        elif each.is_repeated:
            getattr(message, each.name)[:] = [change(each.name, inner) for inner in values]
        else:
            setattr(message, each.name, change(each.name, value))
