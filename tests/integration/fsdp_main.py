"""One rank of test_fsdp.py: shards tiny models over all ranks and measures how far they are from plain torch's numbers,
which the test wrote down."""

import json
from pathlib import Path

import torch
from packed_rows import FEW, packed_distance
from safetensors.torch import load_file
from torch import Tensor

from integration.three_d_main import HEAD, NUM_STEPS, OPTIONS, distance, rows_of, rows_of_reference
from nccl_transfer.refs.mesh import Mesh
from services.compute.heads import value_head
from services.engines.fsdp.engine import FSDPEngine
from services.engines.fully_shard import whole
from services.models.families import load_causal_lm, load_value_model

CPU = torch.device("cpu")


def weights(engine: FSDPEngine) -> dict[str, Tensor]:
    """Without the further names of tied ones."""
    return {name: x.clone() for name, x in engine.full_tensors() if name in engine._parameters}


def run(directory: Path, reference: Path, dtype: torch.dtype) -> dict:
    """A policy, as distances from the reference."""
    engine = FSDPEngine(load_causal_lm(directory, dtype), CPU, optimizer=OPTIONS)
    expected = json.loads((reference / "numbers.json").read_text())
    rows = rows_of(Mesh(data=engine.data_size), engine.data_rank)
    micro_batches, log_probs = rows.micro_batches(packs=True), load_file(reference / "log_probs.safetensors")
    report: dict = {"num_micro_batches": len(micro_batches)}
    report["log_probs"] = max(
        float((m.collect(o.log_probs_BR) - rows_of_reference(log_probs, rows, m)).abs().max())
        for m, o in zip(micro_batches, engine.infer(micro_batches, HEAD), strict=True)
        if m.response_lengths.any()
    )
    engine._accumulate_gradients(micro_batches, HEAD, rows.loss)
    gradients = {name: whole(x.grad) for name, x in engine._parameters.items() if x.grad is not None}
    engine._drop_gradients()
    report["gradients"] = distance(gradients, load_file(reference / "gradients.safetensors"))
    if dtype == torch.float64:
        report["packed"] = max(packed_distance(engine, shapes) for shapes in FEW)
    steps = [engine.step(micro_batches, HEAD, rows.loss) for _ in range(NUM_STEPS)]
    report["loss"] = abs(steps[0].loss / expected["loss"][0] - 1)
    report["norms"] = max(abs(s.grad_norm / n - 1) for s, n in zip(steps, expected["norm"], strict=True))
    report["losses"] = max(abs(s.loss / n - 1) for s, n in zip(steps, expected["loss"], strict=True))
    report["weights"] = distance(weights(engine), load_file(reference / "weights.safetensors"))
    return report


def run_values(directory: Path, reference: Path) -> dict:
    """A value model: its weights after steps."""
    engine = FSDPEngine(load_value_model(directory, torch.float64), CPU, optimizer=OPTIONS)
    rows = rows_of(Mesh(data=engine.data_size), engine.data_rank)
    for _ in range(NUM_STEPS):
        engine.step(rows.micro_batches(packs=True), value_head, rows.value_loss)
    return {"weights": distance(weights(engine), load_file(reference / "weights.safetensors"))}


def main(cases: dict[str, tuple[str, str, str]]) -> dict[str, dict]:
    reports = {}
    for case, (directory, reference, dtype) in cases.items():
        paths = Path(directory), Path(reference)
        reports[case] = run_values(*paths) if dtype == "value" else run(*paths, getattr(torch, dtype))
    return reports
