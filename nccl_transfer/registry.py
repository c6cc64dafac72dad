"""Transports by name: built-in ones, those of installed packages, and objects named as "module:object"."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from nccl_transfer.transports.base import DEVICE_TO_DEVICE, HOST_TO_HOST, Reader, Transport
from nccl_transfer.transports.gpu.cuda_ipc import CudaIpcTransport
from nccl_transfer.transports.gpu.nccl import NcclTransport
from nccl_transfer.transports.grpc_stream import GrpcTransport
from nccl_transfer.transports.memfd import MemfdTransport
from nccl_transfer.transports.tcp import TcpTransport
from rlhf.errors import ConfigError
from rlhf.plugins import PluginError, find_plugin, plugin_names
from rlhf.security import current

GROUP = "rlhf_cluster.transports"
"""Entry-point group in which installed packages declare transports, as NAME = "module:object" of a `Transport`."""

MEMORY = MemfdTransport()
FIRST: Mapping[str, Transport] = {
    transport.name: transport for transport in (MEMORY, CudaIpcTransport(), NcclTransport())
}
LAST: Mapping[str, Transport] = {transport.name: transport for transport in (TcpTransport(), GrpcTransport())}
"""Transports that reach every rank; they come last in the order of preference."""
BUILT_IN = {**FIRST, **LAST}


def names() -> list[str]:
    """Returns the names of all known transports, including unavailable ones, in order of preference. Transports of
    installed packages come before those in LAST."""
    plug_ins = [name for name in plugin_names(GROUP) if name not in BUILT_IN]
    return [*FIRST, *plug_ins, *LAST]


@functools.cache
def find_transport(name: str) -> Transport:
    """Returns a transport.

    Args:
        name: Name of a built-in transport or of an entry point, or "module:object".

    Raises:
        PluginError: There is no such transport (the message lists the known names), or it cannot be imported, is no
            Transport, or has a name other than that of its entry point or that of another transport.
    """
    transport = find_plugin(GROUP, name, Transport, BUILT_IN)  # pyright: ignore[reportAbstractUsage]
    if ":" not in name and transport.name != name:
        raise PluginError(
            f"entry point {name!r} of {GROUP} declares a transport of another name, {transport.name!r}"
        )
    if BUILT_IN.get(transport.name, transport) is not transport:
        raise PluginError(f"{name!r} has the name of a transport of this project, {transport.name!r}")
    return transport


def unavailable(*, on_gpu: bool = False) -> dict[str, str]:
    """Returns the transports that this process cannot use, as a dict from name to the reason.

    Args:
        on_gpu: Whether this process computes on a GPU; else it uses no transport that needs one, and no CUDA.
    """
    return {name: reason for name in names() if (reason := _why_unavailable(name, on_gpu)) is not None}


def available(*, on_gpu: bool = False) -> list[str]:
    """Returns the names of the transports that this process can use, in order of preference; `on_gpu` as for
    `unavailable`."""
    return [name for name in names() if _why_unavailable(name, on_gpu) is None]


def is_allowed(transport: Transport, wanted: Sequence[Transport]) -> bool:
    """Whether rows may be read and given out by a transport: where this process has certificates, only if it is secure
    or among `wanted`, the transports that are configured by name."""
    return transport.is_secure or transport in wanted or current().certificates is None


def find_transports(wanted: Sequence[str] = (), *, on_gpu: bool = False) -> list[Transport]:
    """Returns the named transports, in the order given. Default: all that are available and allowed, in order of
    preference. `on_gpu` as for `unavailable`.

    Raises:
        ConfigError: A name is unknown (the message lists the known names), or a transport is not available (the
            message gives the reason).
    """
    chosen = []
    for name in wanted:
        try:
            transport = find_transport(name)
        except PluginError as error:
            raise PluginError(f"transport {error}") from error
        if reason := _why_unusable(transport, on_gpu):
            raise ConfigError(f"transport {name!r} is not available: {reason}")
        chosen.append(transport)
    found = map(find_transport, available(on_gpu=on_gpu))
    return chosen or [each for each in found if is_allowed(each, ())]


def served_transports(wanted: Sequence[str] = (), *, on_gpu: bool = False) -> list[Transport]:
    """Returns the transports by which a rank gives out its rows: all that are available and allowed, and those of
    `wanted`, the names of the configuration. `on_gpu` as for `unavailable`. Raises as `find_transports`."""
    named = find_transports(wanted, on_gpu=on_gpu) if wanted else []
    every = [each for each in map(find_transport, available(on_gpu=on_gpu)) if is_allowed(each, named)]
    return [*every, *(transport for transport in named if transport not in every)]


def create_readers(wanted: Sequence[str] = (), *, on_gpu: bool = False) -> list[Reader]:
    """Creates the readers of `find_transports(wanted, on_gpu=on_gpu)` that the fetcher uses: from host memory into
    host memory, or from one GPU into another.

    Raises:
        ConfigError: A named transport covers neither way, or `find_transports` raised it.
    """
    found, readers = find_transports(wanted, on_gpu=on_gpu), []
    for transport in found:
        if transport.routes & {HOST_TO_HOST, DEVICE_TO_DEVICE}:
            reader = transport.reader()
            reader.routes = transport.routes
            readers.append(reader)
        elif wanted:
            raise ConfigError(
                f"transport {transport.name!r} has no route from host memory to host memory, nor from GPU to GPU"
            )
    return readers


def memory_reader() -> Reader:
    """Creates a reader that maps memory of other ranks of this host, which relays need."""
    return MEMORY.reader()


def _why_unavailable(name: str, on_gpu: bool) -> str | None:
    return _cause_of_absence(name) or _why_unusable(find_transport(name), on_gpu)


def _why_unusable(transport: Transport, on_gpu: bool) -> str | None:
    """Returns the reason why a transport cannot be used here, or None if it can."""
    if transport.needs_gpu and not on_gpu:
        return transport.unavailable() or "this process does not compute on a GPU"
    return transport.unavailable()


@functools.cache
def _cause_of_absence(name: str) -> str | None:
    """Returns the reason why a transport cannot be found, or None if it can."""
    try:
        find_transport(name)
    except PluginError as error:
        return str(error)
    return None
