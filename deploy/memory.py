"""Predicted memory of the services of a config: the table that `rlhf-deploy check` prints, and what does not fit."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.table import Table

from controller.config.config import Config
from settings.memory.predict import Footprint, StageName, predict
from settings.memory.services import NotPredicted, service_use
from settings.memory.use import ModelUse, RowSizes
from settings.service import ServiceTable

GPU_DRIVER = Path("/dev/nvidiactl")
"""Device file of NVIDIA's driver, which a host with GPUs has."""
GB = 1e9


@dataclass(frozen=True)
class ServiceMemory:
    """Predicted memory of one service.

    Attributes:
        ranks: Number of ranks.
        rows: Rows that it is predicted for.
        stages: Footprint of the rank that needs most, by stage.
    """

    ranks: int
    rows: RowSizes
    stages: Mapping[StageName, Footprint]

    @property
    def idle(self) -> int:
        """Bytes on the device between calls."""
        return self.stages["idle"].device_bytes

    @property
    def largest(self) -> tuple[StageName, int]:
        """The stage that needs most on the device, and its bytes."""
        name = max(self.stages, key=lambda stage: self.stages[stage].device_bytes)
        return name, self.stages[name].device_bytes

    @property
    def on_cpu(self) -> int:
        """Bytes of a rank in host memory where the device is a CPU, in the stage that needs most."""
        return max(each.device_bytes + each.host_bytes for each in self.stages.values())


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


def predict_memory(config: Config, names: Sequence[str], device_bytes: int | None) -> MemoryReport:
    """Predicts the memory of services. Reads the config.json of their model directories, and of this host what memory
    it has.

    Args:
        config: Configuration of the run.
        names: Names of the services.
        device_bytes: Memory of one GPU. None: services compute on GPUs of unknown memory where the host has a driver
            for them, else on the CPU.
    """
    on_gpu = device_bytes is not None or GPU_DRIVER.exists()
    uses, left_out = dict[str, ModelUse](), dict[str, str]()
    for name in names:
        try:
            uses[name] = service_use(config.services[name], on_gpu=on_gpu, truncates=config.rollout.truncates)
        except NotPredicted as error:
            left_out[name] = str(error)
    sizes = row_sizes(config, [use.shape.positions for use in uses.values()])
    services = {}
    for name, use in uses.items():
        table = config.services[name]
        rows = replace(sizes, mini_batches=_mini_batches(config, table))
        services[name] = ServiceMemory(use.ranks, rows, predict(use, rows))
    if not on_gpu:
        misfits = _host_misfits(services, _available_bytes())
    else:
        misfits = [] if device_bytes is None else _device_misfits(config, services, device_bytes)
    return MemoryReport(on_gpu, services, left_out, misfits)


def row_sizes(config: Config, positions: Sequence[int]) -> RowSizes:
    """Returns the longest rows that a config allows: with `data.max_prompt_tokens`, or without it up to the smallest
    limit of the services on a row, and the positions of their models."""
    response = config.rollout.max_response_tokens
    limits = [most for table in config.services.values() for most in table.row_limits.values()]
    limits += [most for most in positions if most]
    most = max(1, min(limits) - response) if limits else 1
    prompt = min(most, config.data.max_prompt_tokens or most)
    return RowSizes(prompt, response, config.rows_per_step)


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


def _mini_batches(config: Config, table: ServiceTable) -> int:
    """Returns the optimizer steps of an update of a service."""
    epochs = config.algorithm.critic_epochs if table.role == "critic" else config.algorithm.epochs
    return epochs * config.mini_batches(config.rows_per_step)


def _device_misfits(config: Config, services: Mapping[str, ServiceMemory], device_bytes: int) -> list[str]:
    """Returns a line for each set of services that share a device and together need more than it has: what all hold
    between calls, and what the largest stage of one needs beyond that, since their calls take turns."""
    lines = []
    for sharing in _sharing(config, list(services)):
        idle = sum(services[name].idle for name in sharing)
        busiest = max(sharing, key=lambda name: services[name].largest[1] - services[name].idle)
        stage, largest = services[busiest].largest
        needed = idle + largest - services[busiest].idle
        if needed > device_bytes:
            others = [name for name in sharing if name != busiest]
            beside = f", with {', '.join(others)} on the same device," if others else ""
            lines.append(
                f"services.{busiest}: stage {stage}{beside} needs {needed / GB:.2f} GB on a device of "
                f"{device_bytes / GB:.2f} GB, {(needed - device_bytes) / GB:.2f} GB too much"
            )
    return lines


def _sharing(config: Config, names: Sequence[str]) -> list[tuple[str, ...]]:
    """Returns the sets of services that share a device, each once."""
    devices = {device for name in names for device in config.devices_of(name)}
    sets = {tuple(name for name in names if device in config.devices_of(name)) for device in devices}
    return sorted(sets)


def _host_misfits(services: Mapping[str, ServiceMemory], available: int) -> list[str]:
    """Returns a line if all ranks together need more than the host's available memory."""
    needed = sum(service.ranks * service.on_cpu for service in services.values())
    if needed <= available:
        return []
    return [
        f"services {', '.join(services)}: all ranks together need {needed / GB:.2f} GB of host memory, of which "
        f"{available / GB:.2f} GB are available, {(needed - available) / GB:.2f} GB too little"
    ]


def _available_bytes() -> int:
    """Returns the available memory of this host, in bytes."""
    found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    assert found is not None, "Linux reports it"
    return int(found[1]) * 1024
