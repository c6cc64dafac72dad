"""Assignment of this host's GPUs to services: the ranks of a service see the GPUs of its pool, in the pool's order."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from controller.config.config import Config
from controller.config.devices import Gpu, gpu_of
from rlhf.errors import ConfigError

VISIBLE, ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"
"""Environment variables of CUDA: ids of the GPUs that a process sees, and how their numbers are given."""


def visible_gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> list[str]:
    """Returns the ids of the GPUs that processes of this host may use: those in CUDA_VISIBLE_DEVICES if the variable is
    set, otherwise the indices of all GPUs of the host.

    Args:
        environment: Environment of this process.
        devices: Directory of the device files; NVIDIA's driver creates nvidiaN for each GPU.
    """
    count = sum(bool(re.fullmatch(r"nvidia\d+", each.name)) for each in devices.iterdir())
    given = environment.get(VISIBLE)
    if not count or given is None:
        return [str(number) for number in range(count)]
    return [each.strip() for each in given.split(",") if each.strip() not in ("", "-1")]


def gpus_by_service(
    config: Config, names: Sequence[str], visible: Sequence[str], host: str = ""
) -> dict[str, tuple[str, ...]]:
    """Returns the ids of the GPUs that all ranks of a service on this host see, by name of the service. The r-th rank
    here uses the r-th GPU, since torch, vLLM and DeepSpeed select the GPU with index LOCAL_RANK. The other GPUs of the
    pool follow, so that they stay visible for peer access. Omits services that compute on the CPU or whose devices are
    not GPUs.

    Args:
        config: Configuration of the run.
        names: Names of the services that are started on this host.
        visible: Ids of the GPUs of this host. Empty: services compute on the CPU.
        host: Name of this host in the config, whose GPUs alone are used. Empty: all GPUs are those of this host.

    Raises:
        ConfigError: A GPU is not on this host, or the GPUs of the services are on several hosts.
    """
    found: dict[str, tuple[str, ...]] = {}
    first: tuple[Gpu, str] | None = None
    for name in names if visible else ():
        for device, gpu in _gpus(config, name):
            if host and gpu.host not in ("", host):
                continue
            first = first or (gpu, f"{device} of services.{name}")
            if gpu.host != first[0].host:
                raise ConfigError(
                    f"services.{name}: {device} is on another host than {first[1]}, and "
                    "rlhf-deploy starts ranks on this host alone: name it by --host, and give each service the address "
                    "of its host (docs/cluster.md)"
                )
            if gpu.number >= len(visible):
                raise ConfigError(
                    f"services.{name}: there is no {device} on this host, which shows {len(visible)} GPU"
                    f"{'s' if len(visible) > 1 else ''} (gpu:0 to gpu:{len(visible) - 1}); or set "
                    f"services.{name}.device to cpu"
                )
            found[name] = (*found.get(name, ()), visible[gpu.number])
    return found


def gpu_variables(gpus: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables with which a process sees these GPUs, in this order; no variables if `gpus` is
    empty. Indices are those of `nvidia-smi`, unless `environment`, that of this process, sets their order already."""
    if not gpus:
        return {}
    order = {} if {VISIBLE, ORDER} & environment.keys() else {ORDER: "PCI_BUS_ID"}
    return {VISIBLE: ",".join(gpus), **order}


def _gpus(config: Config, name: str) -> list[tuple[str, Gpu]]:
    """Returns the GPUs of a service, each with its device name; an empty list if the service computes on the CPU."""
    table = config.services[name]
    if table.device == "cpu" or not table.needs_torch:
        return []
    return [(device, gpu) for device in config.device_order(name) if (gpu := gpu_of(device))]
