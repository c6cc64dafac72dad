"""One rank of test_drift.py: generates and learns in turns, at a learning rate of 0, and writes down every turn."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nccl_transfer.refs.columns import Jagged
from nccl_transfer.refs.mesh import Mesh
from services.actor.parity import rollout_parity
from services.compute.heads import PolicyHead, PolicyOutput
from services.compute.jagged_rows import assemble
from services.compute.microbatch import MicroBatch
from services.compute.splitting import split
from services.engines.base import OptimizerOptions
from services.engines.three_d.engine import ThreeDParallelEngine
from services.rollout.base import RolloutEngine, SamplingOptions
from services.rollout.hf import HFRollout
from services.rollout.sampling import row_seeds
from services.rollout.sharded import ShardedDecoder
from settings.engines import VllmTable

CPU = torch.device("cpu")
NUM_ITERATIONS = 10
PROMPTS = [[1, 10, 11], [1, 20], [1, 30, 31, 32, 33, 34], [1, 10, 11], [1, 40], [50], [5, 6, 7, 8]]
SAMPLING = SamplingOptions(max_new_tokens=12, eos_ids=(2, 3, 4), temperature=1.3)
HEAD = PolicyHead(SAMPLING.temperature)
TOKEN_BUDGET = 80


def make_rollout(kind: str, directory: Path, mesh: Mesh, engine: ThreeDParallelEngine) -> RolloutEngine:
    """As the actor makes it."""
    assert engine.transition is not None
    if kind == "hf":
        decoder = ShardedDecoder(directory, mesh, engine.transition, dtype=torch.float32, device=CPU)
        return HFRollout(decoder, token_budget=TOKEN_BUDGET)
    # Seconds of import, and not installed everywhere.
    from services.rollout.vllm import VLLMRollout

    return VLLMRollout(
        directory,
        dtype=torch.float32,
        table=VllmTable(kv_cache_gb=0.25),
        identity=f"rlhf-drift-{os.getppid()}",
        layouts=engine.transition.layouts,
        tensor_parallel=mesh.generation_tensor,
    )


def iterate(
    engine: ThreeDParallelEngine, rollout: RolloutEngine, prompts: list[list[int]], seeds: np.ndarray
) -> dict[str, Any]:
    """One iteration of training: what was generated, how far the training engine is from it, and a step on it."""
    rollout.load_weights(engine.rollout_weights())
    generation = rollout.generate(prompts, SAMPLING, seeds)
    ids = Jagged(
        torch.tensor([token for prompt in prompts for token in prompt]),
        np.array([len(prompt) for prompt in prompts]),
    )
    micro_batches = split(ids, generation.responses, token_budget=TOKEN_BUDGET, pad_id=0)
    outputs = engine.infer(micro_batches, HEAD)
    collected = [m.collect(o.log_probs_BR) for m, o in zip(micro_batches, outputs, strict=True)]
    trained = assemble([m.rows for m in micro_batches], collected, generation.responses.lengths)
    parity = rollout_parity(generation.log_probs.values, trained.values)
    step = engine.step(micro_batches, HEAD, loss)
    return {
        "tokens": generation.responses.values.tolist(),
        "log_probs": generation.log_probs.values.tolist(),
        "parity": [parity.max_abs, parity.sum_abs, parity.sum_kl],
        "grad_norm": step.grad_norm,
    }


def loss(output: PolicyOutput, micro_batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    return -output.log_probs_BR[micro_batch.response_mask_BR].sum() / 50, {}


def main(directory: Path, kind: str, sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    mesh = Mesh(*sizes)
    engine = ThreeDParallelEngine(
        directory,
        mesh,
        CPU,
        optimizer=OptimizerOptions(lr=0.0),
        transition="hybridflow",
        generates_in_place=kind == "hf",
    )
    rollout = make_rollout(kind, directory, mesh, engine)
    # The rows of this rank's training replica.
    rows = np.arange(engine.data_rank, len(PROMPTS), engine.data_size)
    prompts, seeds = [PROMPTS[row] for row in rows], row_seeds(17, step=0, call="generate", rows=rows)
    return [iterate(engine, rollout, prompts, seeds) for _ in range(NUM_ITERATIONS)]
