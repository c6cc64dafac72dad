"""Registry of transports by name: built-in ones and those of installed packages."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points

from nccl_transfer.transports.base import Reader
from nccl_transfer.transports.gpu.cuda_ipc import CudaIpcReader
from nccl_transfer.transports.gpu.nccl import NcclReader
from nccl_transfer.transports.grpc_stream import GrpcReader
from nccl_transfer.transports.memfd import MemfdReader
from nccl_transfer.transports.tcp import TcpReader
from rlhf.errors import ConfigError
from rlhf.security import current

ENTRY_POINTS = "rlhf_cluster.transports"
"""Entry-point group in which installed packages declare transports, as NAME = "module:TransportClass"."""

PLAIN = (NcclReader.name,)
"""Transports that move rows in plaintext also where this process has certificates; see `is_allowed`."""

_registry: dict[str, type[Reader]] = {}
_broken: dict[str, str] = {}


def register_transport(transport: type[Reader]) -> None:
    """Registers a transport class under its `name`.

    Raises:
        ConfigError: A transport of this name is registered already.
    """
    if transport.name in _registry:
        raise ConfigError(f"a transport named {transport.name!r} exists already")
    _registry[transport.name] = transport


for _transport in (MemfdReader, CudaIpcReader, NcclReader, TcpReader, GrpcReader):
    register_transport(_transport)


def names() -> list[str]:
    """Returns the names of all known transports, unavailable ones included, in order of preference: in order
    of registration, but tcp and grpc, which reach every rank, last."""
    _load_plug_ins()
    last = (TcpReader.name, GrpcReader.name)
    return sorted({**_registry, **_broken}, key=lambda name: last.index(name) if name in last else -1)


def unavailable() -> dict[str, str]:
    """Returns the transports that this process cannot use, as a dict from name to the reason."""
    reasons = {}
    for name in names():
        reason = _broken[name] if name in _broken else _registry[name].unavailable()
        if reason is not None:
            reasons[name] = reason
    return reasons


def available() -> list[str]:
    """Returns the names of the transports that this process can use, in order of preference."""
    reasons = unavailable()
    return [name for name in names() if name not in reasons]


def is_allowed(name: str, wanted: Sequence[str]) -> bool:
    """Whether rows may be read and sent by a transport: by those of PLAIN, where this process has certificates, only if
    `wanted`, the transports that are configured by name, contains it."""
    return name in wanted or name not in PLAIN or current().certificates is None


def create_readers(wanted: Sequence[str] = ()) -> list[Reader]:
    """Creates the named transports, in the order given. Default: all that are available and allowed, in order of
    preference.

    Raises:
        ConfigError: A name is unknown (the message lists the known names), or a transport is not available (the
            message gives the reason).
    """
    reasons = unavailable()
    for name in wanted:
        if name not in names():
            raise ConfigError(f"unknown transport {name!r}; known: {', '.join(names())}")
        if name in reasons:
            raise ConfigError(f"transport {name!r} is not available: {reasons[name]}")
    chosen = wanted or [name for name in available() if is_allowed(name, wanted)]
    return [_registry[name]() for name in chosen]


@functools.cache
def _load_plug_ins() -> None:
    for entry_point in entry_points(group=ENTRY_POINTS):
        _load(entry_point)


def _load(entry_point: EntryPoint) -> None:
    """Registers the transport of an entry point. Raises nothing: if it cannot be loaded, `unavailable` gives the
    cause."""
    try:
        transport = entry_point.load()
        if not (isinstance(transport, type) and issubclass(transport, Reader)):
            raise TypeError("it is no subclass of Reader")
        if transport.name != entry_point.name:
            raise TypeError(f"it calls itself {transport.name!r}")
        register_transport(transport)
    except Exception as error:  # noqa: BLE001 - becomes the reason
        _broken[entry_point.name] = f"{entry_point.value}: {type(error).__name__}: {error}"
