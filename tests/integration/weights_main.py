"""One rank of test_weights.py: the weights that each engine sends from several ranks, against those that it exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from nccl_transfer.refs.mesh import Mesh
from services.engines.base import EngineSetup, OptimizerOptions
from services.models.families import load_causal_lm
from services.models.loading import repeated_names
from services.roles.engine_factory import make_engine
from services.testing.engine_task import Task
from services.testing.weights import covered
from settings.actor import ActorTable

OPTIONS = OptimizerOptions(lr=1e-2)


def check(case: dict[str, Any], mesh: Mesh, models: Path, out: Path) -> dict[str, Any]:
    """Trains one step and compares; returns names of wrong shards, of tensors that no rank holds whole, and the least
    and most ranks that hold an element, for each tensor that is held differently."""
    keys = {"role": "actor", "address": "127.0.0.1:1", "dtype": "bfloat16", "ranks": dist.get_world_size()}
    table = ActorTable.model_validate({**keys, **case["keys"], "model": models / case["model"]})
    options = OPTIONS if case["trained"] else None
    engine = make_engine(table, EngineSetup(load_causal_lm, mesh, torch.device("cpu"), options))
    if case["trained"]:
        Task(table.model, 61).step(engine)
    engine.export(out)
    exported = load_file(out / "model.safetensors")
    for name in repeated_names(load_causal_lm(table.model, on_meta=True)):
        exported[name] = exported["model.embed_tokens.weight"]
    counts = {name: torch.zeros_like(x, dtype=torch.int64) for name, x in exported.items()}
    # Twice: all ranks yield the same shards at every call.
    places = [
        [(name, shard.offsets, shard.tensor.shape) for name, shard in engine.weight_shards()]
        for _ in range(2)
    ]
    wrong = covered(engine.weight_shards(), exported, counts)
    for each in counts.values():
        dist.all_reduce(each)
    held = sorted({int(count) for each in counts.values() for count in each.unique()})
    dist.barrier()
    return {"wrong": wrong, "held": held, "same": places[0] == places[1]}


def main(cases: dict[str, dict[str, Any]], models: Path, out: Path) -> dict[str, Any]:
    """Checks all cases that have as many ranks as there are; returns what was found of each, by name."""
    found = {}
    for name, case in cases.items():
        mesh = Mesh(*case.get("mesh", (1, 1, dist.get_world_size())))
        found[name] = check(case, mesh, models, out / name)
    return found
