"""Transports by name: ours, those of packages, and why one is not available."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint, EntryPoints
from types import ModuleType

import pytest

from nccl_transfer import registry
from nccl_transfer.devices.cupy_cuda import why_no_cuda
from nccl_transfer.transports import Reader
from nccl_transfer.transports.base import HOST_TO_DEVICE
from nccl_transfer.transports.tcp import TcpReader, TcpTransport
from rlhf import plugins
from rlhf.errors import ConfigError

Install = Callable[..., None]


class CarrierReader(TcpReader):
    name = "carrier"


class Carrier(TcpTransport):
    """Somebody's own transport."""

    name = "carrier"
    is_secure = False

    def reader(self) -> CarrierReader:
        return CarrierReader()


class Homing(Carrier):
    """One that lacks something here."""

    name = "homing"

    def unavailable(self) -> str | None:
        return "no pigeons"


class Impostor(Carrier):
    """One that takes the name of another."""

    name = "memfd"


class ToDevices(Carrier):
    """One that covers no way to host memory."""

    routes = frozenset({HOST_TO_DEVICE})


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    forget()
    yield
    forget()


def forget() -> None:
    registry.find_transport.cache_clear()
    registry._cause_of_absence.cache_clear()


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Pretends that a package with entry points is installed."""
    module = ModuleType("pigeons")
    for made in (Carrier(), Homing(), Impostor(), ToDevices()):
        setattr(module, type(made).__name__.lower(), made)
    module.nothing = object()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pigeons", module)

    def pretend(**values: str) -> None:
        points = EntryPoints(EntryPoint(name, value, registry.GROUP) for name, value in values.items())
        monkeypatch.setattr(plugins, "entry_points", lambda **wanted: points.select(**wanted))
        forget()

    return pretend


def kinds(made: list[Reader]) -> list[str]:
    return [reader.name for reader in made]


def test_transports_are_preferred_by_the_bytes_they_move_and_tcp_is_last(install: Install) -> None:
    install()
    assert registry.names() == ["memfd", "cuda_ipc", "nccl", "tcp", "grpc"]
    install(carrier="pigeons:carrier")
    assert registry.names() == ["memfd", "cuda_ipc", "nccl", "carrier", "tcp", "grpc"]


@pytest.mark.skipif(why_no_cuda() is None, reason="there is a GPU here")
def test_without_a_gpu_its_transports_say_what_is_missing(install: Install) -> None:
    install()
    assert registry.unavailable() == {"cuda_ipc": why_no_cuda(), "nccl": why_no_cuda()}
    assert registry.available() == ["memfd", "tcp", "grpc"]
    assert kinds(registry.create_readers()) == ["memfd", "tcp", "grpc"]
    assert [transport.name for transport in registry.served_transports()] == ["memfd", "tcp", "grpc"]


def test_a_plug_in_is_made_where_it_is_asked_for_in_the_order_asked_for(install: Install) -> None:
    install(carrier="pigeons:carrier")
    assert kinds(registry.create_readers(["carrier", "memfd"])) == ["carrier", "memfd"]
    assert kinds(registry.create_readers(["tcp", "pigeons:carrier"])) == ["tcp", "carrier"]


def test_a_rank_serves_by_all_transports_and_by_those_that_only_its_configuration_names(
    install: Install,
) -> None:
    install()
    served = registry.served_transports(["pigeons:carrier"])
    assert [transport.name for transport in served] == [*registry.available(), "carrier"]
    install(carrier="pigeons:carrier")
    served = registry.served_transports(["pigeons:carrier", "tcp"])
    assert [transport.name for transport in served] == registry.available()


def test_a_transport_that_is_not_available_says_why(install: Install) -> None:
    install(homing="pigeons:homing")
    assert registry.unavailable()["homing"] == "no pigeons"
    assert "homing" not in kinds(registry.create_readers())
    with pytest.raises(ConfigError, match="transport 'homing' is not available: no pigeons"):
        registry.create_readers(["homing"])


@pytest.mark.parametrize(
    ("value", "cause"),
    [
        ("no_such_module:x", "'no_such_module:x' cannot be imported: ModuleNotFoundError: No module named"),
        ("pigeons:missing", "'pigeons:missing' cannot be imported: AttributeError: module 'pigeons' has no"),
        ("pigeons:nothing", "'pigeons:nothing' is of type object, not Transport"),
        (
            "pigeons:homing",
            "entry point 'carrier' of rlhf_cluster.transports declares a transport of another name",
        ),
    ],
)
def test_a_plug_in_that_cannot_be_loaded_is_shown_with_its_cause(
    install: Install, value: str, cause: str
) -> None:
    install(carrier=value)
    assert registry.unavailable()["carrier"].startswith(cause)
    assert "carrier" not in kinds(registry.create_readers())
    with pytest.raises(ConfigError, match=cause):
        registry.create_readers(["carrier"])


def test_a_plug_in_cannot_take_the_name_of_another(install: Install) -> None:
    install(memfd="pigeons:impostor")
    assert kinds(registry.create_readers(["memfd"])) == ["memfd"]
    with pytest.raises(
        ConfigError, match="'pigeons:impostor' has the name of a transport of this project, 'memfd'"
    ):
        registry.create_readers(["pigeons:impostor"])


def test_a_transport_without_a_way_to_host_memory_is_no_reader_of_a_service(install: Install) -> None:
    install(carrier="pigeons:todevices")
    assert "carrier" not in kinds(registry.create_readers())
    with pytest.raises(ConfigError, match="transport 'carrier' has no route from host memory to host memory"):
        registry.create_readers(["carrier"])


def test_an_unknown_name_lists_the_known_ones(install: Install) -> None:
    install(carrier="pigeons:carrier")
    with pytest.raises(
        ConfigError,
        match="transport 'rdma' is unknown; known: carrier, cuda_ipc, grpc, memfd, nccl, tcp, or module:",
    ):
        registry.create_readers(["rdma"])
