"""One rank of test_hybrid.py: generates on the ranks that train, on one pair of meshes after the other, and compares
with a whole model of plain transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoModelForCausalLM, PreTrainedModel

from nccl_transfer.refs.columns import Jagged
from nccl_transfer.refs.mesh import Mesh
from services.compute.heads import PolicyHead, PolicyOutput
from services.compute.jagged_rows import assemble
from services.compute.microbatch import MicroBatch
from services.compute.splitting import split
from services.engines.base import OptimizerOptions, TrainEngine
from services.engines.three_d.engine import ThreeDParallelEngine
from services.engines.three_d.gather_groups import Kind
from services.models.export import tensors_sha256
from services.rollout.base import Generation, GenerationStopped, SamplingOptions
from services.rollout.hf import HFRollout
from services.rollout.sampling import row_seeds
from services.rollout.sharded import ShardedDecoder

CPU = torch.device("cpu")
HEAD = PolicyHead()
PROMPTS = [[1, 10, 11], [1, 20], [1, 30, 31, 32, 33, 34], [1, 10, 11], [1, 40], [50], [5, 6, 7, 8]]
SAMPLING = SamplingOptions(max_new_tokens=9, eos_ids=(2, 3, 4))
SEEDS = row_seeds(17, step=0, call="generate", rows=np.arange(len(PROMPTS)))
TOKEN_BUDGET = 60
NUM_TURNS = 3
"""Of generation, with a step of training between each two."""


def generation_part(name: str, whole: Tensor, part: int, parts: int, padded: int) -> Tensor:
    """Part of a tensor that a rank must generate with, as laid out in memory: written by hand."""
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return whole.t().chunk(parts)[part]
    if "embed_tokens" in name or "lm_head" in name:
        rows = torch.cat([whole, whole.new_zeros(padded - len(whole), whole.shape[1])])
        return rows.chunk(parts)[part]
    if "layernorm" in name or name.endswith(("norm.weight", "o_proj.bias")):
        return whole
    return whole.chunk(parts)[part]


def wrong_weights(
    engine: TrainEngine, mesh: Mesh, weights: dict[str, Tensor], whole: dict[str, Tensor]
) -> list[str]:
    """Names of tensors that came wrong, or did not come, or should not have."""
    stage, part, _ = mesh.generation_position(dist.get_rank())
    tied = engine.config.tie_word_embeddings
    last, per_stage = mesh.generation_pipeline - 1, 4 // mesh.generation_pipeline
    expected = {n for n in whole if ".layers." in n and int(n.split(".")[2]) // per_stage == stage}
    if stage == 0:
        expected.add("model.embed_tokens.weight")
    if stage == last:
        expected |= {"model.norm.weight", "model.embed_tokens.weight" if tied else "lm_head.weight"}
    padded = -(-engine.config.vocab_size // 64) * 64
    wrong = expected ^ weights.keys()
    for name in expected & weights.keys():
        right = generation_part(name, whole[name], part, mesh.generation_tensor, padded)
        if not torch.equal(weights[name], right):
            wrong.add(name)
    return sorted(wrong)


def cut_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Of those that ranks have parts of: all but norms."""
    return sum(x.nbytes for name, x in tensors.items() if "norm" not in name)


def contained(engine: ThreeDParallelEngine, weights: dict[str, Tensor]) -> float:
    """Which share of the bytes that this rank trains is memory that it generates with."""
    ranges = [(x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()) for x in weights.values()]
    inside = total = 0
    for x in engine._kept.values():
        total += x.nbytes
        inside += x.nbytes * any(first <= x.data_ptr() < first + size for first, size in ranges)
    return inside / total


def loss(output: PolicyOutput, micro_batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    return -output.log_probs_BR[micro_batch.response_mask_BR].sum() / 50, {}


def training_log_probs(engine: TrainEngine, micro_batches: list[MicroBatch], lengths: np.ndarray) -> Any:
    outputs = engine.infer(micro_batches, HEAD)
    if not engine.sees_outputs:
        return None
    collected = [m.collect(o.log_probs_BR) for m, o in zip(micro_batches, outputs, strict=True)]
    return assemble([m.rows for m in micro_batches], collected, lengths)


def texts(generation: Generation) -> list[list[int]]:
    return [generation.responses.row(row).tolist() for row in range(len(PROMPTS))]


def run(mesh: Mesh, kind: Kind, sharded: bool, directory: Path, plain: PreTrainedModel) -> dict[str, Any]:
    """Generation and training in turns, as distances from one process.

    What one process generates in a turn with the whole model is computed by some ranks, of another turn by others.
    """
    options = OptimizerOptions(lr=1e-2)
    engine = ThreeDParallelEngine(
        directory,
        mesh,
        CPU,
        optimizer=options,
        transition=kind,
        generates_in_place=kind == "hybridflow" and not sharded,
        shards_over_data=sharded,
    )
    assert engine.transition is not None
    decoder = ShardedDecoder(directory, mesh, engine.transition, dtype=torch.float32, device=CPU)
    rollout = HFRollout(decoder, token_budget=TOKEN_BUDGET)
    prompts = Jagged(
        torch.tensor([token for prompt in PROMPTS for token in prompt]),
        np.array([len(prompt) for prompt in PROMPTS]),
    )
    plain_turn = dist.get_rank() % NUM_TURNS
    report: dict[str, Any] = {"wrong": [], "parity": 0.0, "texts": [], "whole": [], "plain_turn": plain_turn}
    for turn in range(NUM_TURNS):
        before = engine.transition.received.cut
        weights = dict(engine.rollout_weights())
        report["received"] = engine.transition.received.cut - before
        whole = {name: x.clone() for name, x in engine.full_tensors()}
        report["whole"].append(tensors_sha256(sorted(whole.items())))
        if turn == plain_turn:
            plain.load_state_dict(whole)
        report["wrong"] += wrong_weights(engine, mesh, weights, whole)
        report["contained"] = contained(engine, weights)
        report["generation_bytes"] = cut_bytes(weights)
        storages = [x.untyped_storage() for x in weights.values()]
        report["gathered_bytes"] = sum({x.data_ptr(): x.nbytes() for x in storages}.values())
        rollout.load_weights(weights.items())
        gathered = [StorageWeakRef(storage) for storage in storages]
        del weights, storages
        generation = rollout.generate(PROMPTS, SAMPLING, SEEDS)
        report["texts"].append(texts(generation))
        micro_batches = split(prompts, generation.responses, token_budget=TOKEN_BUDGET, pad_id=0)
        trained = training_log_probs(engine, micro_batches, generation.responses.lengths)
        if trained is not None:
            difference = (trained.values - generation.log_probs.values).abs().max()
            report["parity"] = max(report["parity"], float(difference))
        is_last = turn == NUM_TURNS - 1
        if is_last:
            report["stopped"] = stopped(rollout)
        report["freed"] = rollout.sleep()
        report["left"] = sum(not storage.expired() for storage in gathered)
        rollout.wake()
        if not is_last:
            engine.step(micro_batches, HEAD, loss)
    generation = HFRollout(plain, token_budget=TOKEN_BUDGET).generate(PROMPTS, SAMPLING, SEEDS)
    report["plain_texts"] = texts(generation)
    report["keeps_weights"] = rollout.keeps_weights
    report["trained"] = cut_bytes(engine._kept)
    return report


def stopped(rollout: HFRollout) -> str:
    """Error on this rank when rank 0 stops a generation, else empty."""
    asked = 0

    def should_stop() -> bool:
        nonlocal asked
        asked += 1
        return dist.get_rank() == 0 and asked == 2

    try:
        rollout.generate(PROMPTS, SAMPLING, SEEDS, should_stop=should_stop)
    except GenerationStopped as error:
        return str(error)
    return ""


def main(plan: dict[Path, list[tuple[tuple[int, ...], Any]]]) -> dict[str, dict[str, Any]]:
    reports = {}
    for directory, meshes in plan.items():
        plain = AutoModelForCausalLM.from_pretrained(directory)
        for sizes, way in meshes:
            kind, _, sharded = way.partition(" ")
            mesh = Mesh(*sizes, usual_order=kind != "hybridflow")
            reports[f"{directory.name} {mesh} {way}"] = run(mesh, kind, bool(sharded), directory, plain)
    return reports
