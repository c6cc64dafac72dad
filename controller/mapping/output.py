"""A plan as a config file that rlhf-deploy and rlhf-controller take."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from controller.config.config import Config
from controller.foresight import arena_mb_needed
from controller.mapping.layouts import Option
from controller.mapping.problem import Problem
from controller.mapping.search import MappedPlan, Pool
from settings.memory.use import ModelUse
from settings.strict import validate

GIB = 1 << 30
PLACED = (
    "pool",
    "ranks",
    "engine",
    "engine_options",
    "mesh",
    "generation_mesh",
    "shards_over_data",
    "activation_checkpointing",
    "sequence_parallel",
    "zero",
)
"""Keys of a service's table that a plan sets, or leaves out."""


def in_order(problem: Problem, plan: MappedPlan) -> list[Pool]:
    """Returns the pools in the order of their devices: aligned blocks never cross machines."""
    return sorted(plan.pools, key=lambda pool: (pool.kind, -problem.devices[pool.kind].alignment(pool.count)))


def device_names(problem: Problem, plan: MappedPlan) -> dict[Pool, list[str]]:
    """Returns the names of the devices of each pool, "KIND/MACHINE/gpu:NUMBER", or "KIND/MACHINE/cpu:NUMBER"."""
    taken = [0] * len(problem.devices)
    names = {}
    for pool in in_order(problem, plan):
        group = problem.devices[pool.kind]
        numbers = range(taken[pool.kind], taken[pool.kind] + pool.count)
        what = "gpu" if group.on_gpu else "cpu"
        names[pool] = [
            f"{group.name}/{n // group.per_machine}/{what}:{n % group.per_machine}" for n in numbers
        ]
        taken[pool.kind] += pool.count
    return names


def pool_name(problem: Problem, pool: Pool) -> str:
    """Returns the name of a pool: its models, joined."""
    return "+".join(problem.models[number].name for number in pool.models)


def planned_config(
    given: Mapping[str, Any], problem: Problem, plan: MappedPlan
) -> tuple[dict[str, Any], Config]:
    """Returns the tables of a config with its services placed by a plan, and the valid configuration that they make;
    see `planned_tables`. Arenas that are too small for the rows of a rank are made larger.

    Raises:
        ConfigError: The configuration is invalid.
    """
    tables = planned_tables(given, problem, plan)
    config = validate(Config, tables, "of the plan")
    calls = [call for model in problem.models for call in model.calls]
    generated = sum(call.rows for call in calls if call.kind == "generation")
    further = max(0, generated - config.rows_per_step), 0
    needed = arena_mb_needed(config, problem.workload.prompts.longest, further)
    for name, megabytes in needed.items():
        if megabytes > config.services[name].arena_mb:
            tables["services"][name]["arena_mb"] = megabytes
    return tables, validate(Config, tables, "of the plan")


def planned_tables(given: Mapping[str, Any], problem: Problem, plan: MappedPlan) -> dict[str, Any]:
    """Returns the tables of a config with its services placed by a plan.

    Args:
        given: Tables of the config that the problem was made from.
        problem: The problem.
        plan: Its plan.
    """
    tables = copy.deepcopy(dict(given))
    for table in tables["services"].values():
        table.pop("pool", None)
    # A plan fits without turns, and services that receive weights take none.
    is_receiving = any(model.receives for model in problem.models)
    for key in ("placement", "devices", *(("device_memory_gb",) if is_receiving else ())):
        tables.pop(key, None)
    tables["pools"] = {}
    for pool, names in device_names(problem, plan).items():
        pool_id = pool_name(problem, pool)
        tables["pools"][pool_id] = names
        for number, option in zip(pool.models, pool.options, strict=True):
            service = problem.models[number].name
            tables["services"][service] = _placed(tables["services"][service], pool_id, option)
    return tables


def _placed(given: Mapping[str, Any], pool: str, option: Option) -> dict[str, Any]:
    use = option.use
    table = {key: value for key, value in given.items() if key not in PLACED}
    table |= {"pool": pool, "ranks": use.ranks}
    if given["role"] == "reward":
        return table
    if use.engine == "none":
        mesh = {"mesh": joined(use.mesh)} if use.mesh[:2] != (1, 1) else {}
        return table | mesh | _generating(table, use)
    table["engine"] = use.engine
    if "sequence_parallel" in given:
        table["micro_batch_tokens"] = use.micro_batch_tokens
    if use.engine == "3d":
        table["mesh"] = joined(use.mesh)
    if use.shards_over_data:
        table["shards_over_data"] = True
    if use.activation_checkpointing:
        table["activation_checkpointing"] = True
    if use.rollout is not None:
        table |= _generating(table, use)
    return table


def _generating(table: Mapping[str, Any], use: ModelUse) -> dict[str, Any]:
    rollout = use.rollout_engine
    keys: dict[str, Any] = {}
    if use.engine == "3d":
        keys["generation_mesh"] = generation_mesh(use)
    if not rollout.generates:
        return keys
    if rollout.engine == "hf":
        keys["rollout_tokens"] = rollout.cache_tokens
    elif rollout.engine == "vllm":
        keys["vllm"] = {**table.get("vllm", {}), "kv_cache_gb": rollout.cache_bytes / GIB}
    return keys


def generation_mesh(use: ModelUse) -> str:
    """Returns the mesh pg-tg-dg-d of an actor."""
    rollout, (pipeline, tensor, data) = use.rollout_engine, use.mesh
    micro = pipeline * tensor // (rollout.pipeline * rollout.tensor)
    return joined((rollout.pipeline, rollout.tensor, micro, data))


def joined(sizes: Sequence[int]) -> str:
    """Returns sizes as "1-2-4"."""
    return "-".join(map(str, sizes))
