"""Resource pools and the services on them as objects (HybridFlow, section 4), for configurations made in Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from controller.config.algorithm import AlgorithmTable
from controller.config.checkpoint import CheckpointTable
from controller.config.config import Config, as_config
from controller.config.data import DataTable
from controller.config.rollout import RolloutTable
from controller.config.run import RunTable
from rlhf.errors import ConfigError
from settings.service import ServiceTable
from settings.strict import Strict

EMPTY: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class ResourcePool:
    """A set of devices, as `[pools]` of a config file has them. Calls of services whose pools share a device run one
    at a time, in call order; all others run at the same time. Pools may overlap.

    Attributes:
        name: Name of the pool.
        devices: Names of its devices, at least one per rank of each of its services; rank r takes number r. gpu:N is
            GPU N of the host; another name only tells whether two pools share the device.
    """

    name: str
    devices: Sequence[str]

    def place(self, **services: ServiceTable) -> PlacedServices:
        """Places services on the pool, given as NAME=TABLE, and returns them for `make_config`. Services are colocated
        if they are placed on the same pool."""
        return PlacedServices(self, services)


@dataclass(frozen=True)
class PlacedServices:
    """Services on a resource pool.

    Attributes:
        pool: The pool.
        services: Tables of the services, by name.
    """

    pool: ResourcePool
    services: Mapping[str, ServiceTable]


def make_config(
    *placed: PlacedServices,
    data: DataTable,
    run: RunTable | None = None,
    rollout: RolloutTable | None = None,
    algorithm: AlgorithmTable | None = None,
    checkpoint: CheckpointTable | None = None,
    rewards: Mapping[str, Mapping[str, float]] = EMPTY,
    services: Mapping[str, ServiceTable] = EMPTY,
) -> Config:
    """Makes the configuration of a run from services on pools and the other tables of a config file.

    Args:
        placed: Services on their pools, from `ResourcePool.place`.
        data, run, rollout, algorithm, checkpoint: The tables of these names. Default: their defaults.
        rewards: Weight of each service by the name of the reward, as in `[rewards]`. Default: none.
        services: Further services by name, each on devices of its own. Default: none.

    Raises:
        ConfigError: The configuration is invalid, as for a config file; or two services have
            one name, or two pools of one name have different devices.
    """
    pools: dict[str, list[str]] = {}
    tables = {name: _given(table) for name, table in services.items()}
    for each in placed:
        devices = list(each.pool.devices)
        if pools.setdefault(each.pool.name, devices) != devices:
            raise ConfigError(f"pools.{each.pool.name}: there are two pools of this name")
        for name, table in each.services.items():
            if name in tables:
                raise ConfigError(f"services.{name}: there are two services of this name")
            tables[name] = {**_given(table), "pool": each.pool.name}
    given = {
        "data": data,
        "run": run,
        "rollout": rollout,
        "algorithm": algorithm,
        "checkpoint": checkpoint,
    }
    others = {name: _given(table) for name, table in given.items() if table is not None}
    return as_config(
        {**others, "pools": pools, "rewards": {k: dict(v) for k, v in rewards.items()}, "services": tables}
    )


def _given(table: Strict) -> dict[str, Any]:
    """Returns the keys of a table that were given, without defaults: an algorithm has defaults of its own."""
    return table.model_dump(exclude_unset=True)
