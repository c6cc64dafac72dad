"""One rank of test_fsdp.py: shards tiny models over all ranks and measures how far they are from plain torch's numbers,
which the test wrote down."""

import json
from pathlib import Path

import numpy as np
import torch
from packed_rows import FEW, packed_distance
from safetensors.torch import load_file
from torch import Tensor

from integration.three_d_main import HEAD, NUM_STEPS, OPTIONS, Rows, distance, rows_of, rows_of_reference
from nccl_transfer.refs.mesh import Mesh
from services.compute.heads import value_head
from services.compute.microbatch import MicroBatch
from services.compute.splitting import split
from services.engines.fsdp.engine import FSDPEngine
from services.engines.fully_shard import whole
from services.models.families import load_causal_lm, load_value_model

CPU = torch.device("cpu")


def weights(engine: FSDPEngine) -> dict[str, Tensor]:
    """Without the further names of tied ones."""
    return {name: x.clone() for name, x in engine.full_tensors() if name in engine._parameters}


def micro_batches_of(engine: FSDPEngine, rows: Rows) -> list[MicroBatch]:
    """Every second row packed; with sequence parallelism all of them, half of the rows in one micro-batch."""
    if engine.sequence_ranks is None:
        return rows.micro_batches(packs=True)
    found = []
    for first in range(2):
        few = np.arange(first, rows.prompts.rows, 2)
        found += split(
            rows.prompts,
            rows.responses,
            token_budget=(20, 60)[first],
            pad_id=0,
            rows=few,
            packed=True,
            ranks=engine.sequence_ranks,
        )
    return found


def run(directory: Path, reference: Path, dtype: torch.dtype, sequence_parallel: int) -> dict:
    """A policy, as distances from the reference."""
    engine = FSDPEngine(
        load_causal_lm(directory, dtype), CPU, optimizer=OPTIONS, sequence_parallel=sequence_parallel
    )
    expected = json.loads((reference / "numbers.json").read_text())
    rows = rows_of(Mesh(data=engine.data_size), engine.data_rank)
    micro_batches, log_probs = micro_batches_of(engine, rows), load_file(reference / "log_probs.safetensors")
    report: dict = {"num_micro_batches": len(micro_batches), "data": [engine.data_rank, engine.data_size]}
    report["log_probs"] = max(
        float((m.collect(o.log_probs_BR) - rows_of_reference(log_probs, rows, m)).abs().max())
        for m, o in zip(micro_batches, engine.infer(micro_batches, HEAD), strict=True)
        if m.response_mask_BR.any()
    )
    engine._accumulate_gradients(micro_batches, HEAD, rows.loss)
    gradients = {name: whole(x.grad) for name, x in engine._parameters.items() if x.grad is not None}
    engine._drop_gradients()
    report["gradients"] = distance(gradients, load_file(reference / "gradients.safetensors"))
    if dtype == torch.float64 and engine.sequence_ranks is None:
        report["packed"] = max(packed_distance(engine, shapes) for shapes in FEW)
    steps = [engine.step(micro_batches, HEAD, rows.loss) for _ in range(NUM_STEPS)]
    report["loss"] = abs(steps[0].loss / expected["loss"][0] - 1)
    report["norms"] = max(abs(s.grad_norm / n - 1) for s, n in zip(steps, expected["norm"], strict=True))
    report["losses"] = max(abs(s.loss / n - 1) for s, n in zip(steps, expected["loss"], strict=True))
    report["weights"] = distance(weights(engine), load_file(reference / "weights.safetensors"))
    return report


def run_values(directory: Path, reference: Path, sequence_parallel: int) -> dict:
    """A value model: its weights after steps."""
    model = load_value_model(directory, torch.float64)
    engine = FSDPEngine(model, CPU, optimizer=OPTIONS, sequence_parallel=sequence_parallel)
    rows = rows_of(Mesh(data=engine.data_size), engine.data_rank)
    for _ in range(NUM_STEPS):
        engine.step(micro_batches_of(engine, rows), value_head, rows.value_loss)
    return {"weights": distance(weights(engine), load_file(reference / "weights.safetensors"))}


def main(cases: dict[str, tuple[str, str, str]], sequence_parallel: int = 1) -> dict[str, dict]:
    reports = {}
    for case, (directory, reference, dtype) in cases.items():
        paths = Path(directory), Path(reference)
        if dtype == "value":
            reports[case] = run_values(*paths, sequence_parallel)
        else:
            reports[case] = run(*paths, getattr(torch, dtype), sequence_parallel)
    return reports
