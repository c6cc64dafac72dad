"""One rank of test_resharding.py: ranks that train by data parallelism generate together, on one mesh after the other,
and are compared with ranks that each have the whole model."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from allocations import allocations
from torch import Tensor

from integration.hybrid_main import (
    CPU,
    HEAD,
    NUM_TURNS,
    PROMPTS,
    SAMPLING,
    SEEDS,
    TOKEN_BUDGET,
    generation_part,
    loss,
    stopped,
    texts,
    training_log_probs,
    wrong_weights,
)
from nccl_transfer.refs.columns import Jagged
from nccl_transfer.refs.mesh import Mesh
from services.compute.splitting import split
from services.engines.agreement import PeerRankFailed
from services.engines.base import EngineSetup, OptimizerOptions, TrainEngine
from services.models.families import load_causal_lm
from services.roles.engine_factory import make_engine
from services.rollout.base import RolloutSetup
from services.rollout.factory import make_rollout
from services.rollout.hf import HFRollout
from services.weights.resharding import Resharding
from services.weights.wanted import WantedWeights
from settings import meshes
from settings.actor import ActorTable

ROUND_BYTES, TOGETHER_BYTES = 16384, 40000
"""So small that some tensors come in several buckets, and only few tensors together."""
OPTIONS = OptimizerOptions(lr=1e-2)


def lacking(engine: TrainEngine, mesh: Mesh, names: list[str], whole: dict[str, Tensor]) -> int:
    """Elements of the generation shards of this rank that are not in its memory, counted one by one."""
    _, part, _ = mesh.generation_position(dist.get_rank())
    padded, count = -(-engine.config.vocab_size // 64) * 64, 0
    held: dict[str, set[int]] = {}
    numbers = {name: torch.arange(1, x.numel() + 1).view(x.shape) for name, x in whole.items()}
    for name, shard in engine.local_shards():
        held.setdefault(name, set()).update(numbers[name][shard.box].flatten().tolist())
    for name in names:
        own = generation_part(name, numbers[name], part, mesh.generation_tensor, padded)
        count += len(set(own.flatten().tolist()) - {0} - held.get(name, set()))
    return count


def failed(weights: Resharding, rollout: HFRollout) -> str:
    """Error on this rank of a transition for which the last rank has no memory for its fourth tensor."""
    allocate, calls = WantedWeights._empty, 0

    def refuse(wanted: WantedWeights, name: str) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise MemoryError(name)
        return allocate(wanted, name)

    is_last = dist.get_rank() == dist.get_world_size() - 1
    with mock.patch.object(WantedWeights, "_empty", refuse) if is_last else nullcontext():
        try:
            rollout.load_weights(weights.rollout_weights())
        except (MemoryError, PeerRankFailed) as error:
            return type(error).__name__
    return "none"


def run(keys: dict[str, Any], directory: Path, out: Path) -> dict[str, Any]:
    """Generation and training in turns."""
    ranks = dist.get_world_size()
    table = ActorTable.model_validate(
        {"role": "actor", "address": "127.0.0.1:1", "model": directory, "ranks": ranks, "dtype": "float32"}
        | {"rollout_tokens": TOKEN_BUDGET, **keys}
    )
    generation = meshes.generation_sizes(table.generation_mesh, "")
    mesh = Mesh(1, 1, ranks, *generation, usual_order=True)
    engine = make_engine(table, EngineSetup(load_causal_lm, mesh, CPU, OPTIONS))
    dtype = getattr(torch, table.dtype)
    weights = Resharding(
        engine,
        directory,
        mesh,
        dtype=dtype,
        device=CPU,
        round_bytes=ROUND_BYTES,
        together_bytes=TOGETHER_BYTES,
    )
    rollout = make_rollout(table, RolloutSetup(weights, mesh, CPU))
    assert isinstance(rollout, HFRollout)
    prompts = Jagged(
        torch.tensor([token for prompt in PROMPTS for token in prompt]),
        np.array([len(prompt) for prompt in PROMPTS]),
    )
    report: dict[str, Any] = {"wrong": [], "parity": 0.0, "received": [], "lacking": [], "peak": []}
    report["texts"], report["whole texts"] = [], []
    for turn in range(NUM_TURNS):
        before = weights.received_bytes
        with allocations() as found:
            gathered = dict(weights.rollout_weights())
        report["received"].append(weights.received_bytes - before)
        shard_bytes = sum(x.nbytes for x in gathered.values())
        report["peak"].append((found.peak, shard_bytes))
        whole = {name: x.to(dtype) for name, x in engine.full_tensors()}
        mine = [x.nbytes for number, x in enumerate(whole.values()) if number % ranks == dist.get_rank()]
        report["merged"], report["merging"] = sum(mine), max(x.nbytes for x in whole.values())
        report["lacking"].append(lacking(engine, mesh, list(gathered), whole) * dtype.itemsize)
        report["wrong"] += wrong_weights(engine, mesh, gathered, whole)
        rollout.load_weights(gathered.items())
        del gathered
        made = rollout.generate(PROMPTS, SAMPLING, SEEDS)
        report["texts"].append(texts(made))
        plain = load_causal_lm(directory, dtype)
        plain.load_state_dict(whole)
        alone = HFRollout(plain, token_budget=TOKEN_BUDGET).generate(PROMPTS, SAMPLING, SEEDS)
        report["whole texts"].append(texts(alone))
        micro_batches = split(prompts, made.responses, token_budget=TOKEN_BUDGET, pad_id=0)
        trained = training_log_probs(engine, micro_batches, made.responses.lengths)
        difference = (trained.values - made.log_probs.values).abs().max()
        report["parity"] = max(report["parity"], float(difference))
        report["freed"] = (rollout.sleep(), shard_bytes)
        rollout.wake()
        if turn == 0:
            engine.save(out)
        engine.step(micro_batches, HEAD, loss)
    engine.load(out)
    report["failed"] = failed(weights, rollout)
    rollout.load_weights(weights.rollout_weights())
    report["reloaded texts"] = texts(rollout.generate(PROMPTS, SAMPLING, SEEDS))
    report["stopped"] = bool(stopped(rollout))
    return report


def main(plan: dict[Path, dict[str, Any]], out: Path) -> dict[str, dict[str, Any]]:
    return {
        f"{directory.name} {name}": run(keys, directory, out / f"{directory.name} {name}")
        for directory, cases in plan.items()
        for name, keys in cases.items()
    }
