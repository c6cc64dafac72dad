"""Predicted memory of the services of a configuration, and of those that share a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from controller.config.config import Config
from settings.memory.predict import Footprint, StageName, predict, staying_bytes
from settings.memory.services import NotPredicted, service_use
from settings.memory.use import ModelUse, RowSizes
from settings.service import ServiceTable

GB = 1e9


@dataclass(frozen=True)
class ServiceMemory:
    """Predicted memory of one service.

    Attributes:
        ranks: Number of ranks.
        rows: Rows that it is predicted for.
        stages: Footprint of the rank that needs most, by stage.
        stays: Bytes that stay on the device of a rank while the service is offloaded.
        on_gpu: Whether its ranks compute on GPUs.
    """

    ranks: int
    rows: RowSizes
    stages: Mapping[StageName, Footprint]
    stays: int
    on_gpu: bool = True

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


def predict_services(
    config: Config, names: Sequence[str], is_on_gpu: Callable[[ServiceTable], bool]
) -> tuple[dict[str, ServiceMemory], dict[str, str]]:
    """Predicts the memory of services. Reads the config.json of their model directories.

    Args:
        config: Configuration of the run.
        names: Names of the services.
        is_on_gpu: Returns whether the ranks of a service compute on GPUs.

    Returns:
        Predicted memory by service, and the reason why it is not predicted by the name of each other service.

    Raises:
        ValueError: A model cannot be divided over its mesh.
    """
    uses, left_out = dict[str, ModelUse](), dict[str, str]()
    for name in names:
        table = config.services[name]
        try:
            uses[name] = service_use(
                table,
                on_gpu=is_on_gpu(table),
                truncates=config.rollout.truncates,
                generates=name not in config.generators,
            )
        except NotPredicted as error:
            left_out[name] = str(error)
    sizes = row_sizes(config, [use.shape.positions for use in uses.values()])
    services = {}
    for name, use in uses.items():
        rows = replace(sizes, mini_batches=steps_of_update(config, config.services[name]))
        stages = predict(use, rows)
        stays = staying_bytes(use, stages["idle"])
        services[name] = ServiceMemory(use.ranks, rows, stages, stays, use.on_gpu)
    return services, left_out


def row_sizes(config: Config, positions: Sequence[int]) -> RowSizes:
    """Returns the longest rows that a config allows: with `data.max_prompt_tokens`, or without it up to the smallest
    limit of the services on a row, and the positions of their models."""
    response = config.rollout.max_response_tokens
    limits = [most for table in config.services.values() for most in table.row_limits.values()]
    limits += [most for most in positions if most]
    most = max(1, min(limits) - response) if limits else 1
    prompt = min(most, config.data.max_prompt_tokens or most)
    return RowSizes(prompt, response, config.rows_per_step)


def sharing_services(config: Config, names: Sequence[str]) -> list[tuple[str, ...]]:
    """Returns the sets of services whose ranks share a device, each once."""
    taken = {name: config.rank_devices(name) for name in names}
    sets = {
        tuple(name for name in names if device in taken[name]) for each in taken.values() for device in each
    }
    return sorted(sets)


def steps_of_update(config: Config, table: ServiceTable) -> int:
    """Returns the optimizer steps of an update of a service."""
    epochs = config.algorithm.critic_epochs if table.role == "critic" else config.algorithm.epochs
    return epochs * config.mini_batches(config.rows_per_step)
