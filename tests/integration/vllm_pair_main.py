"""One rank of test_vllm_pair.py and of tests/gpu/test_vllm_on_two_gpus.py: two ranks that train with engine fsdp, and
generate together with vLLM, on another thread than the one that started it, as in a service."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from nccl_transfer.refs.columns import Jagged
from nccl_transfer.refs.mesh import Mesh
from services.compute.splitting import split
from services.engines.base import EngineSetup, TrainEngine
from services.engines.implementation import compute_dtype
from services.models.families import load_causal_lm
from services.roles.device import use_device
from services.roles.engine_factory import make_engine
from services.rollout.base import Generation, RolloutEngine, RolloutSetup, SamplingOptions
from services.rollout.factory import make_rollout
from services.rollout.sampling import row_seeds
from services.rollout.stops import StopStrings
from services.testing.engine_task import OPTIONS, TEMPERATURE, Task, log_probs
from services.testing.rollouts import same, spell
from services.weights.resharding import Resharding
from settings.actor import ActorTable

SAMPLING = SamplingOptions(max_new_tokens=24, temperature=TEMPERATURE)
COPIES = 4
"""Of each prompt, so that rows that wait find its prefix in the cache."""


def sample(rollout: RolloutEngine, prompts: list[list[int]], options: SamplingOptions) -> Generation:
    return rollout.generate(prompts, options, row_seeds(0, 1, "generate/0", np.arange(len(prompts))))


def report_on(task: Task, engine: TrainEngine, weights: Resharding, rollout: RolloutEngine) -> dict[str, Any]:
    prompts = [task.prompts.row(row).tolist() for row in range(task.prompts.rows)]
    report: dict[str, Any] = {"errors": [], "responses": []}
    for _ in range(3):
        task.step(engine)
        rollout.load_weights(weights.rollout_weights())
        made = sample(rollout, prompts, SAMPLING)
        responses = Jagged(made.responses.values.cpu(), made.responses.lengths)
        batch = split(task.prompts, responses, token_budget=96, pad_id=0, packed=engine.packs)
        errors = (made.log_probs.values.cpu() - log_probs(engine, batch, responses.lengths)).abs()
        report["errors"].append([float(errors.max()), float(errors.mean())])
        report["responses"].append(made.responses.values.tolist())
    rollout.sleep(keep_weights=False)
    rollout.wake()
    rollout.load_weights(weights.rollout_weights())
    report["is same after sleep"] = same(sample(rollout, prompts, SAMPLING), made)
    texts = {spell([made.responses.row(row).tolist()])[0][row % 8 + 1] for row in range(len(prompts))}
    stopping = replace(SAMPLING, stop=StopStrings(tuple(sorted(texts)), spell))
    # More rows than vLLM computes at a time.
    stopped = sample(rollout, prompts * COPIES, stopping)
    report["stopped"] = stopped.responses.values.tolist()
    return report


def main(directory: str, vocabulary: int, on_gpus: bool) -> dict[str, Any]:
    """Returns what a rank has generated, and how far its log-probabilities are from those of training.

    Args:
        directory, vocabulary: Directory and number of token ids of the model.
        on_gpus: Whether each rank computes on the GPU of its number.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ["LOCAL_RANK"] = str(rank)
    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    keys: dict[str, Any] = {
        "role": "actor",
        "address": "127.0.0.1:1",
        "model": directory,
        "ranks": size,
        "generation_mesh": f"1-{size}-1",
        "rollout_engine": "vllm",
        "vllm": {"kv_cache_gb": 0.25, "max_num_seqs": 4},
    }
    table = ActorTable.model_validate(keys)
    mesh, task = Mesh(1, 1, size, 1, size, usual_order=True), Task(Path(directory), vocabulary)
    engine = make_engine(table, EngineSetup(load_causal_lm, mesh, device, OPTIONS))
    weights = Resharding(engine, task.directory, mesh, dtype=compute_dtype(table), device=device)
    rollout = make_rollout(table, RolloutSetup(weights, mesh, device))

    def prepare() -> None:
        torch.set_num_threads(1)
        use_device(device)

    with ThreadPoolExecutor(1, initializer=prepare) as thread:
        return thread.submit(report_on, task, engine, weights, rollout).result()
