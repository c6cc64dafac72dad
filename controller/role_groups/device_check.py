"""Checks that the ranks of running services are on the GPUs that the pools of the config say, by the UUIDs that they
report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from controller.config.config import Config
from rlhf.errors import ConfigError
from rlhf.v1 import worker_pb2

HINT = "rlhf-deploy gives ranks the GPUs of their pool where these are named gpu:N (docs/gpus.md)"


class _Holder(NamedTuple):
    """A rank on a GPU; `device` is its name in the config, empty where the config names none."""

    service: str
    rank: int
    uuid: str
    device: str

    def __str__(self) -> str:
        return f"services.{self.service} rank {self.rank}"


def check_devices(config: Config, services: Mapping[str, worker_pb2.DescribeResponse]) -> None:
    """Checks the GPUs of all ranks that report a UUID; ranks on CPUs pass.

    Args:
        config: Configuration of the run.
        services: Descriptions of the services, by name.

    Raises:
        ConfigError: Two ranks of a service are on one GPU, or ranks of two services whose pools share no device; or a
            device that is shared by name is two GPUs.
    """
    on_gpu: dict[str, list[_Holder]] = {}
    by_name: dict[str, _Holder] = {}
    for name, description in services.items():
        devices = config.device_order(name) if config.is_placed(name) else ()
        for rank, info in enumerate(description.ranks):
            if not info.device_uuid:
                continue
            this = _Holder(name, rank, info.device_uuid, devices[rank] if rank < len(devices) else "")
            for other in on_gpu.setdefault(this.uuid, []):
                _check_may_share(config, other, this)
            on_gpu[this.uuid].append(this)
            first = by_name.setdefault(this.device, this) if this.device else this
            if first.uuid != this.uuid:
                raise ConfigError(
                    f"device {this.device} is {first.uuid} for {first} and {this.uuid} for {this}; {HINT}"
                )


def _check_may_share(config: Config, one: _Holder, other: _Holder) -> None:
    """Raises ConfigError where two ranks that are on one GPU may not be."""
    if one.service == other.service:
        raise ConfigError(f"{one} and rank {other.rank} are on one GPU, {one.uuid}; each rank needs its own")
    if not (one.device and other.device):
        return
    if not config.devices_of(one.service) & config.devices_of(other.service):
        raise ConfigError(
            f"{one} and {other} are on one GPU, {one.uuid}, and their pools share no device: {one.device} and "
            f"{other.device}; {HINT}"
        )
