"""Time-sharing of device memory: tracks which services are on their devices, and which of them have to be offloaded
before a call that does not fit.

Calls that share a device are executed in the order in which they enter it, so this state is known when a call enters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from controller.config.config import Config
from controller.config.memory import GB, ServiceMemory, predict_services
from rlhf.errors import ConfigError
from settings.memory.predict import StageName

OFFLOAD, ONLOAD = "offload", "onload"
NEEDS_NOTHING = ("synchronize", "profile")
"""Methods that need no weights on the device."""
BEGINS = "begin_session"
"""Method that onloads a service by itself. The session may not have begun on other services yet, which then cannot be
offloaded to make room."""
IDLE: tuple[StageName, ...] = ("idle",)
STAGES: Mapping[str, tuple[StageName, ...]] = MappingProxyType(
    {
        "generate_sequences": ("transition", "generation"),
        "update_actor": ("update",),
        "prepare_update": ("update",),
        "update_supervised": ("update",),
        "update_critic": ("update",),
        "update_reward": ("update",),
        **dict.fromkeys(("onload", "verify_weights", "describe_weights", "send_weights"), IDLE),
        **dict.fromkeys(("save_checkpoint", "load_checkpoint"), IDLE),
    }
)
"""Stages of the memory predictor that a call passes through, by Python name of the method; `forward` for others."""


@dataclass(frozen=True)
class Demand:
    """Memory of a service on each of its devices, in bytes.

    Attributes:
        devices: Names of the devices that its ranks take.
        held: Bytes between calls.
        stays: Bytes that stay there while the service is offloaded; `held` for one that does not move.
        stages: Bytes during each stage. A stage that is missing needs the largest of them, and where there are none,
            the whole device.
    """

    devices: frozenset[str]
    held: int
    stays: int
    stages: Mapping[str, int]

    def during(self, method: str, device_bytes: int) -> int:
        """Returns the bytes that a call of a method needs, those that are held included. `device_bytes`: memory of a
        device."""
        largest = max(self.stages.values(), default=device_bytes)
        return max(self.stages.get(stage, largest) for stage in STAGES.get(method, ("forward",)))


@dataclass(frozen=True)
class Moves:
    """Calls to make before another one.

    Attributes:
        offload: Services to offload, in order.
        onload: Whether the service that is called has to be onloaded after that.
    """

    offload: tuple[str, ...] = ()
    onload: bool = False


NO_MOVES = Moves()


class Residency:
    """Tracks which services are on their devices and which are offloaded, in the order of calls. At first none is
    offloaded.

    Args:
        demands: Memory of each service that has any, by name; other services need none.
        device_bytes: Memory of each device, in bytes.
    """

    def __init__(self, demands: Mapping[str, Demand], device_bytes: int) -> None:
        self._demands = demands
        self._device_bytes = device_bytes
        self._away: set[str] = set()
        # In the order of their last calls.
        self._used = dict.fromkeys(demands)

    @property
    def moving(self) -> frozenset[str]:
        """Names of the services that calls may have to offload: those on a device where some call does not fit while
        all other services stay."""
        return frozenset(
            name
            for name, demand in self._demands.items()
            if demand.held > demand.stays and any(map(self._is_tight, demand.devices))
        )

    def before(self, service: str, method: str) -> Moves:
        """Returns the moves that the next call in the order of calls requires, and records them as done. Other services
        on its devices are offloaded, the least recently called first, until the call fits or no service is left to
        offload.

        Args:
            service: Name of the service that is called.
            method: Python name of the method.
        """
        own = self._demands.get(service)
        if own is None or method in NEEDS_NOTHING:
            return NO_MOVES
        if method == OFFLOAD:
            self._away.add(service)
            return NO_MOVES
        del self._used[service]
        self._used[service] = None
        was_away = service in self._away
        self._away.discard(service)
        if method == BEGINS:
            return NO_MOVES
        needed = own.during(method, self._device_bytes)
        moved = []
        for other in list(self._used):
            if other != service and self._can_make_room(other, own.devices, service, needed):
                self._away.add(other)
                moved.append(other)
        return Moves(tuple(moved), was_away and method != ONLOAD)

    def held(self, device: str, but: str = "") -> int:
        """Returns the bytes that all services except `but` hold on a device between calls."""
        return sum(
            demand.stays if name in self._away else demand.held
            for name, demand in self._demands.items()
            if device in demand.devices and name != but
        )

    def _is_tight(self, device: str) -> bool:
        sharing = [each for each in self._demands.values() if device in each.devices]
        held = sum(each.held for each in sharing)
        most = max(max(each.stages.values(), default=self._device_bytes) - each.held for each in sharing)
        return len(sharing) > 1 and held + most > self._device_bytes

    def _can_make_room(self, other: str, devices: frozenset[str], service: str, needed: int) -> bool:
        """Returns whether `service`, which needs `needed` bytes, does not fit on a device where memory is freed by
        offloading `other`."""
        demand = self._demands[other]
        if other in self._away or demand.held <= demand.stays:
            return False
        return any(
            self.held(device, but=service) + needed > self._device_bytes
            for device in devices & demand.devices
        )


def residency_of(config: Config) -> Residency | None:
    """Returns the residency of the services of a config, with no service offloaded; None if `device_memory_gb` is not
    set. A service whose model memory cannot be predicted requires a whole device, so it shares no device.

    Raises:
        ConfigError: A model cannot be divided over its mesh.
    """
    if config.device_memory_gb is None:
        return None
    device_bytes = int(config.device_memory_gb * GB)
    names = [name for name, table in config.services.items() if table.model_directory and not table.external]
    try:
        predicted, left_out = predict_services(config, names, lambda table: table.device != "cpu")
    except ValueError as error:
        raise ConfigError(f"device_memory_gb: the memory of a service cannot be predicted: {error}") from None
    demands = {name: _demand(config, name, memory) for name, memory in predicted.items()}
    unknown = {name: Demand(config.rank_devices(name), device_bytes, 0, {}) for name in left_out}
    return Residency({**demands, **unknown}, device_bytes)


def _demand(config: Config, name: str, memory: ServiceMemory) -> Demand:
    stages = {stage: footprint.device_bytes for stage, footprint in memory.stages.items()}
    return Demand(config.rank_devices(name), memory.idle, memory.stays, stages)
