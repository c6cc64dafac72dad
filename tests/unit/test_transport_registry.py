"""Transports by name: ours, those of packages, and why one is not available."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from types import ModuleType

import pytest

from nccl_transfer import registry
from nccl_transfer.transports import MemfdReader, Reader, TcpReader
from nccl_transfer.transports.gpu.device import why_no_cuda
from rlhf.errors import ConfigError


class Carrier(TcpReader):
    """Somebody's own transport."""

    name = "carrier"


class Homing(Carrier):
    """One that lacks something here."""

    name = "homing"

    @classmethod
    def unavailable(cls) -> str | None:
        return "no pigeons"


@pytest.fixture(autouse=True)
def _fresh(monkeypatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))
    monkeypatch.setattr(registry, "_broken", {})
    yield
    registry._load_plug_ins.cache_clear()


@pytest.fixture
def install(monkeypatch):
    """Pretends that a package with entry points is installed."""
    module = ModuleType("pigeons")
    module.Carrier, module.Homing, module.Nothing = Carrier, Homing, object()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pigeons", module)

    def pretend(**values: str) -> None:
        points = [EntryPoint(name, value, registry.ENTRY_POINTS) for name, value in values.items()]
        monkeypatch.setattr(registry, "entry_points", lambda group: points)
        registry._load_plug_ins.cache_clear()

    return pretend


def kinds(made: list[Reader]) -> list[str]:
    return [transport.name for transport in made]


def test_transports_are_preferred_by_the_bytes_they_move_and_tcp_is_last(install) -> None:
    install()
    assert registry.names() == ["memfd", "cuda_ipc", "nccl", "tcp", "grpc"]
    install(carrier="pigeons:Carrier")
    assert registry.names() == ["memfd", "cuda_ipc", "nccl", "carrier", "tcp", "grpc"]


@pytest.mark.skipif(why_no_cuda() is None, reason="there is a GPU here")
def test_without_a_gpu_its_transports_say_what_is_missing(install) -> None:
    install()
    assert registry.unavailable() == {"cuda_ipc": why_no_cuda(), "nccl": why_no_cuda()}
    assert registry.available() == ["memfd", "tcp", "grpc"]
    assert kinds(registry.create_readers()) == ["memfd", "tcp", "grpc"]


def test_a_plug_in_is_made_where_it_is_asked_for_in_the_order_asked_for(install) -> None:
    install(carrier="pigeons:Carrier")
    assert kinds(registry.create_readers(["carrier", "memfd"])) == ["carrier", "memfd"]


def test_a_transport_that_is_not_available_says_why(install) -> None:
    install(homing="pigeons:Homing")
    assert registry.unavailable()["homing"] == "no pigeons"
    assert "homing" not in kinds(registry.create_readers())
    with pytest.raises(ConfigError, match="transport 'homing' is not available: no pigeons"):
        registry.create_readers(["homing"])


@pytest.mark.parametrize(
    ("value", "cause"),
    [
        ("no_such_module:X", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("pigeons:Missing", "AttributeError: module 'pigeons' has no attribute 'Missing'"),
        ("pigeons:Nothing", "TypeError: it is no subclass of Reader"),
        ("pigeons:Homing", "TypeError: it calls itself 'homing'"),
    ],
)
def test_a_plug_in_that_cannot_be_loaded_is_shown_with_its_cause(install, value: str, cause: str) -> None:
    install(carrier=value)
    assert registry.unavailable()["carrier"] == f"{value}: {cause}"
    with pytest.raises(ConfigError, match="transport 'carrier' is not available"):
        registry.create_readers(["carrier"])


def test_a_plug_in_cannot_take_the_name_of_another(install) -> None:
    class Impostor(Carrier):
        name = "memfd"

    with pytest.raises(ConfigError, match="a transport named 'memfd' exists already"):
        registry.register_transport(Impostor)
    assert kinds(registry.create_readers(["memfd"])) == [MemfdReader.name]


def test_an_unknown_name_lists_the_known_ones(install) -> None:
    install(carrier="pigeons:Carrier")
    with pytest.raises(
        ConfigError, match="unknown transport 'rdma'; known: memfd, cuda_ipc, nccl, carrier, tcp"
    ):
        registry.create_readers(["rdma"])
