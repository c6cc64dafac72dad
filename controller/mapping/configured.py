"""Problems and plans of configurations: the models of a config's services, and the plan that a config describes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from controller.config.config import Config
from controller.mapping.dataflow import Call
from controller.mapping.devices import DeviceGroup
from controller.mapping.layouts import Option, call_times, memory, service_times
from controller.mapping.mapper import on
from controller.mapping.problem import Model, Problem
from controller.mapping.search import MappedPlan, Pool
from controller.mapping.simulate import Site, rows_together
from controller.mapping.workload import Workload
from reports.units import counted
from rlhf.errors import ConfigError
from settings.memory.generation import cache_bytes_per_token
from settings.memory.services import NotPredicted, service_use
from settings.reward import RewardTable


@dataclass(frozen=True)
class ConfiguredModels:
    """The models of a config.

    Attributes:
        models: Services with a model, which are placed.
        left_out: Services that take no devices, with the reason.
    """

    models: tuple[Model, ...]
    left_out: Mapping[str, str]


def models_of(config: Config, dataflow: Sequence[Call]) -> ConfiguredModels:
    """Returns the models of a config's services, each with its calls of a dataflow. Reads the config.json of their
    directories.

    Raises:
        ConfigError: The memory of a service with a model cannot be predicted; the text says why.
    """
    models, left_out = [], {}
    for name, table in config.services.items():
        served = {name} | {role for role, host in config.also_served.items() if host == name}
        calls = tuple(call for call in dataflow if call.service in served)
        if isinstance(table, RewardTable) and table.kind != "model":
            left_out[name] = f"kind {table.kind} needs no device of these"
            continue
        if not table.needs_torch or table.external:
            left_out[name] = "external" if table.external else f"role {table.role} has no model"
            continue
        try:
            use = service_use(
                table,
                on_gpu=True,
                truncates=config.rollout.truncates,
                generates=name not in config.generators,
            )
        except NotPredicted as error:
            raise ConfigError(f"services.{name}: {error}") from None
        models.append(Model(name, use, calls, table.role == "critic"))
    if not models:
        raise ConfigError("services: no service has a model, so there is nothing to place")
    return ConfiguredModels(tuple(models), left_out)


def placeable(model: Model) -> Model:
    """Returns a model in the engine that the search chooses meshes for: 3d, but fsdp for adapters and for mixtures of
    experts, and for rewards the one that they have: whole, or fsdp where they are sharded or learn. A rollout service
    has none. Plans have no sequence parallelism, so the token budget of a rank is that of a whole group."""
    use = model.use
    use = replace(use, micro_batch_tokens=use.token_budget, sequence_parallel=1)
    if use.engine == "none":
        return model
    if use.shape.head == "score":
        engine = "whole" if use.engine == "whole" else "fsdp"
        return replace(model, use=replace(use, engine=engine, offload_optimizer=False))
    if use.adapters is not None or use.shape.experts is not None:
        # Plans have no generation mesh for fsdp.
        rollout = use.rollout and replace(use.rollout, pipeline=1, tensor=1)
        return replace(model, use=replace(use, rollout=rollout))
    return replace(model, use=replace(use, engine="3d", offload_optimizer=False))


def described_plan(config: Config, problem: Problem, group: DeviceGroup) -> MappedPlan:
    """Returns the plan that a config describes, on devices of one kind. Services whose pools share a device are
    colocated.

    Raises:
        ConfigError: The config has more devices than there are.
    """
    pools, total = [], 0
    for models, count in _sharing(config, problem.models):
        total += count
        site = Site(group, group.alignment(count))
        options = tuple(
            described_option(on(problem.models[number], group), site, problem.workload) for number in models
        )
        pools.append(Pool(tuple(models), 0, count, options))
    if total > group.count:
        raise ConfigError(
            f"services are on {counted(total, 'device')}, more than the {group.count} that are given"
        )
    return MappedPlan(tuple(pools), problem.ahead)


def described_option(model: Model, site: Site, workload: Workload) -> Option:
    """Returns the costs of a model in the layout that its use describes."""
    use = model.use
    idle, extra = memory(use, model.rows(workload))
    times = service_times(model, use, site, workload, _together(model, workload))
    return Option(tuple(times), idle, extra, use)


def described_calls(
    config: Config, problem: Problem, group: DeviceGroup
) -> dict[tuple[str, str], list[float]]:
    """Returns the seconds of each call of a step in the plan that a config describes, on devices of one kind: by
    service and method, in the order of the step. Raises ConfigError as `described_plan`."""
    found: dict[tuple[str, str], list[float]] = {}
    for pool in described_plan(config, problem, group).pools:
        site = Site(group, group.alignment(pool.count))
        for number in pool.models:
            model = on(problem.models[number], group)
            times = described_times(model, site, problem.workload)
            for call, seconds in zip(model.calls, times, strict=True):
                method = call.method
                if call.kind == "sync":
                    method = "send_weights" if model.use.learns else "load_weights"
                found.setdefault((call.service, method), []).append(seconds)
    return found


def described_times(model: Model, site: Site, workload: Workload) -> list[float]:
    """Returns the seconds of each of a model's calls, in order, in the layout that its use describes."""
    return call_times(model, model.use, site, workload, _together(model, workload))


def _together(model: Model, workload: Workload) -> int:
    """Returns the rows that a generation replica has in its KV cache; 0 for other roles than actors."""
    use, rows, rollout = model.use, model.rows(workload), model.use.rollout
    if rollout is None:
        return 0
    length, most = rows.prompt_tokens + rows.response_tokens, rollout.cache_tokens
    if rollout.engine != "hf":
        most = rollout.cache_bytes // cache_bytes_per_token(use.shape, rollout.tensor, use.itemsize)
    generated = max((call.rows for call in model.calls if call.kind == "generation"), default=workload.rows)
    return max(1, min(most // length, rows_together(use, generated, 1)))


def _sharing(config: Config, models: Sequence[Model]) -> list[tuple[list[int], int]]:
    """Returns the sets of models whose pools are connected by shared devices, each with its number of devices."""
    found: list[tuple[list[int], frozenset[str]]] = []
    for number, model in enumerate(models):
        devices = config.devices_of(model.name)
        joined = [each for each in found if each[1] & devices]
        found = [each for each in found if not each[1] & devices]
        members = sorted([number, *(one for numbers, _ in joined for one in numbers)])
        found.append((members, devices.union(*(each[1] for each in joined))))
    return [(members, len(devices)) for members, devices in found]
