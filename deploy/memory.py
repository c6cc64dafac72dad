"""Predicted memory of the services of a config: the table that `rlhf-deploy check` prints, and what does not fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.table import Table

from controller.config.config import Config
from controller.config.memory import GB, ServiceMemory, predict_services, sharing_services
from settings.memory.predict import Footprint, StageName

GPU_DRIVER = Path("/dev/nvidiactl")
"""Device file of NVIDIA's driver, which a host with GPUs has."""


@dataclass(frozen=True)
class MemoryReport:
    """Prediction for the services of a config.

    Attributes:
        on_gpu: Whether ranks compute on GPUs.
        services: Predicted memory by service.
        left_out: Reason why a service's memory is not predicted, by service.
        misfits: One line for each device, or host, on which services do not fit.
    """

    on_gpu: bool
    services: Mapping[str, ServiceMemory]
    left_out: Mapping[str, str]
    misfits: Sequence[str]


def predict_memory(
    config: Config, names: Sequence[str], device_bytes: int | None, ranks: Mapping[str, int] | None = None
) -> MemoryReport:
    """Predicts the memory of services. Reads the config.json of their model directories, and of this host what memory
    it has.

    Args:
        config: Configuration of the run.
        names: Names of the services.
        device_bytes: Memory of one GPU. None: services compute on GPUs of unknown memory where the host has a driver
            for them, else on the CPU. Services whose `device` is cpu always compute there.
        ranks: Number of ranks on this host, by name of the service. Default: all.
    """
    on_gpu = device_bytes is not None or GPU_DRIVER.exists()
    services, left_out = predict_services(config, names, lambda table: on_gpu and table.device != "cpu")
    if not on_gpu:
        misfits = _host_misfits(config, services, ranks or {}, psutil.virtual_memory().available)
    else:
        on_devices = {name: service for name, service in services.items() if service.on_gpu}
        misfits = [] if device_bytes is None else _device_misfits(config, on_devices, device_bytes)
    return MemoryReport(on_gpu, services, left_out, misfits)


def memory_table(report: MemoryReport) -> Table:
    """Returns the table of a report: a line for each service and stage, with the bytes of a rank on its device and
    beside it on the host, and the largest components."""
    where = "GB/GPU" if report.on_gpu else "GB/rank"
    table = Table(
        "service", "ranks", "stage", where, "host GB", "largest components", box=None, pad_edge=False
    )
    for name, service in report.services.items():
        heaviest, _ = service.largest
        for stage, footprint in service.stages.items():
            device, host = footprint.device_bytes, footprint.host_bytes
            if report.on_gpu and not service.on_gpu:
                device, host = 0, device + host
            is_first = stage == next(iter(service.stages))
            table.add_row(
                name if is_first else "",
                str(service.ranks) if is_first else "",
                stage,
                f"{device / GB:.2f}",
                f"{host / GB:.2f}",
                _components(footprint),
                style="bold" if stage == heaviest else None,
            )
    for name, why in report.left_out.items():
        table.add_row(name, "", "-", "", "", why)
    return table


def _components(footprint: Footprint) -> str:
    """Returns the three largest components with their GB, without those that round to 0."""
    largest = sorted(footprint.device.items(), key=lambda part: -part[1])[:3]
    return ", ".join(f"{name} {nbytes / GB:.2f}" for name, nbytes in largest if nbytes >= GB / 200)


def _device_misfits(config: Config, services: Mapping[str, ServiceMemory], device_bytes: int) -> list[str]:
    """Returns a line for each set of services that share a device and together need more than it has: what all hold
    between calls, and what the largest stage of one needs beyond that, since their calls take turns. Where memory takes
    turns too (`device_memory_gb`), the others have at worst only what stays on the device, except while services
    start."""
    lines = []
    for sharing in sharing_services(config, list(services)):
        needed, busiest, stage = max(
            _needs(services, sharing, takes_turns=config.device_memory_gb is not None)
        )
        if needed > device_bytes:
            others = [name for name in sharing if name != busiest]
            beside = f", with {', '.join(others)} on the same device," if others else ""
            lines.append(
                f"services.{busiest}: stage {stage}{beside} needs {needed / GB:.2f} GB on a device of "
                f"{device_bytes / GB:.2f} GB, {(needed - device_bytes) / GB:.2f} GB too much"
            )
    return lines


def _needs(
    services: Mapping[str, ServiceMemory], sharing: Sequence[str], *, takes_turns: bool
) -> Iterator[tuple[int, str, StageName]]:
    """Yields the bytes that services on the same device need together while one of them is in a stage, with the name of
    that service and the stage."""
    for name in sharing:
        others = [services[other] for other in sharing if other != name]
        for stage, footprint in services[name].stages.items():
            # Services are not offloaded before a session begins on all of them.
            is_alone = takes_turns and stage not in ("loading", "idle")
            beside = sum(other.stays if is_alone else other.idle for other in others)
            yield footprint.device_bytes + beside, name, stage


def _host_misfits(
    config: Config, services: Mapping[str, ServiceMemory], ranks: Mapping[str, int], available: int
) -> list[str]:
    """Returns a line if all ranks on the host together need more than its available memory."""
    needed = sum(ranks.get(name, service.ranks) * service.on_cpu for name, service in services.items())
    if needed <= available:
        return []
    may_use_gpus = [name for name in services if config.services[name].device != "cpu"]
    hint = (
        "; this host has no GPUs: for a check of a host with GPUs, on which "
        f"{', '.join(may_use_gpus)} would compute, give the memory of one with --device-memory-gb"
    )
    return [
        f"services {', '.join(services)}: all ranks together need {needed / GB:.2f} GB of host memory, of which "
        f"{available / GB:.2f} GB are available, {(needed - available) / GB:.2f} GB too little"
        f"{hint if may_use_gpus else ''}"
    ]
