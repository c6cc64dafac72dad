"""One rank of test_lora_ranks.py: trains adapters on its share of the rows and measures how far it is from plain
peft's numbers, which the test wrote down."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from integration.begun_early import is_step_begun_early_the_same
from integration.fsdp_main import micro_batches_of
from integration.three_d_main import HEAD, OPTIONS, Rows, distance, rows_of
from nccl_transfer.refs.mesh import Mesh
from services.compute.microbatch import MicroBatch
from services.engines.fsdp.engine import FSDPEngine
from services.engines.fsdp.lora import AdapterOptions, LoRAEngine
from services.engines.fully_shard import whole
from services.models.families import load_causal_lm

ADAPTERS = AdapterOptions(rank=4, alpha=6.0, seed=3)
CPU = torch.device("cpu")


def make_engine(directory: Path, dtype: torch.dtype, sequence_parallel: int) -> LoRAEngine:
    return LoRAEngine(
        load_causal_lm(directory, dtype),
        CPU,
        adapters=ADAPTERS,
        optimizer=OPTIONS,
        sequence_parallel=sequence_parallel,
    )


def log_probs(engine: FSDPEngine, micro_batches: list[MicroBatch]) -> list[Tensor]:
    return [output.log_probs_BR for output in engine.infer(micro_batches, HEAD)]


def reference_log_probs(engine: LoRAEngine, micro_batches: list[MicroBatch]) -> list[Tensor]:
    with engine.without_adapters():
        return log_probs(engine, micro_batches)


def gathered(engine: LoRAEngine, kind: str) -> dict[str, Tensor]:
    """Whole weights of the adapters, or their gradients."""
    adapters = {name: engine._parameters[name] for name in engine._trained_names}
    return {name: whole(getattr(p, kind) if kind == "grad" else p).clone() for name, p in adapters.items()}


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def same_bits(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(x, theirs[name]) for name, x in ours.items())


def run(directory: Path, reference: Path, dtype: torch.dtype, sequence_parallel: int, out: Path) -> dict:
    """Everything that ranks must get right, as distances from the reference or as whether bits are the same."""
    expected = json.loads((reference / "numbers.json").read_text())
    plain = FSDPEngine(load_causal_lm(directory, dtype), CPU, sequence_parallel=sequence_parallel)
    engine = make_engine(directory, dtype, sequence_parallel)
    rows: Rows = rows_of(Mesh(1, 1, engine.data_size), engine.data_rank)
    micro_batches = rows.micro_batches() if sequence_parallel == 1 else micro_batches_of(engine, rows)
    frozen = log_probs(plain, micro_batches)
    report: dict = {"num_micro_batches": len(micro_batches), "data_ranks": engine.data_size}
    report["new adapters change nothing"] = same(log_probs(engine, micro_batches), frozen)
    report["reference before"] = same(reference_log_probs(engine, micro_batches), frozen)
    report["seeded"] = same_bits(gathered(engine, "data"), load_file(reference / "first.safetensors"))
    steps = [engine.step(micro_batches, HEAD, rows.loss)]
    engine.save(out / "checkpoint")
    # At the first step those of A are zero, as B is.
    engine._accumulate_gradients(micro_batches, HEAD, rows.loss)
    gradients = gathered(engine, "grad")
    engine._drop_gradients()
    steps += [engine.step(micro_batches, HEAD, rows.loss) for _ in expected["loss"][1:]]
    report["distances"] = {
        "gradients": distance(gradients, load_file(reference / "gradients.safetensors")),
        "loss": max(abs(s.loss / n - 1) for s, n in zip(steps, expected["loss"], strict=True)),
        "norm": max(abs(s.grad_norm / n - 1) for s, n in zip(steps, expected["norm"], strict=True)),
    }
    report["step distances"] = {
        "adapters": distance(gathered(engine, "data"), load_file(reference / "adapters.safetensors")),
        "merged": distance(dict(engine.full_tensors()), load_file(reference / "merged.safetensors")),
    }
    report["reference after"] = same(reference_log_probs(engine, micro_batches), frozen)
    report["learned"] = not same(log_probs(engine, micro_batches), frozen)
    report["exported"] = engine.export(out / "export")
    fresh = make_engine(directory, dtype, sequence_parallel)
    fresh.load(out / "checkpoint")
    for _ in expected["loss"][1:]:
        fresh.step(micro_batches, HEAD, rows.loss)
    report["resumed"] = fresh.export(out / "resumed") == report["exported"]
    report["begun_early"] = is_step_begun_early_the_same(fresh, micro_batches, HEAD, rows.loss)
    return report


def main(out: Path, cases: dict[str, tuple[str, str, str]], sequence_parallel: int = 1) -> dict[str, dict]:
    reports = {}
    for name, (directory, reference, dtype) in cases.items():
        here = out / name
        here.mkdir(exist_ok=True)
        reports[name] = run(Path(directory), Path(reference), getattr(torch, dtype), sequence_parallel, here)
    return reports
