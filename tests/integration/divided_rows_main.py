"""One rank of test_divided_rows.py and of tests/gpu/test_two_gpus.py: engine fsdp in bfloat16 on ranks that shard the
tokens of each row, or have rows of their own, and how far it is from plain transformers in float32."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from services.compute.microbatch import MicroBatch
from services.compute.splitting import split
from services.engines.fsdp.engine import FSDPEngine
from services.engines.fully_shard import whole
from services.models.families import load_causal_lm
from services.testing.engine_task import HEAD, OPTIONS, Task, log_probs, same_bits


def micro_batches_of(engine: FSDPEngine, task: Task) -> list[MicroBatch]:
    """Returns the rows of a rank: all, or its share of them."""
    rows = torch.arange(engine.data_rank, task.prompts.rows, engine.data_size).numpy()
    return split(
        task.prompts,
        task.responses,
        token_budget=96,
        pad_id=0,
        rows=rows,
        packed=True,
        ranks=engine.sequence_ranks,
    )


def largest_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Returns the largest norm of the difference between two tensors of a name, over that of the expected one."""
    return max(float((x.cpu() - expected[name]).norm() / expected[name].norm()) for name, x in found.items())


def report_on(directory: Path, vocabulary: int, device: torch.device, sequence_parallel: int) -> dict:
    task = Task(directory, vocabulary)
    engine = FSDPEngine(
        load_causal_lm(directory),
        device,
        optimizer=OPTIONS,
        compute_dtype=torch.bfloat16,
        activation_checkpointing=True,
        sequence_parallel=sequence_parallel,
    )
    micro_batches, report = micro_batches_of(engine, task), {}
    if engine.data_size == 1:
        errors = (log_probs(engine, micro_batches, task.responses.lengths) - task.expected.log_probs).abs()
        report["log_probs"] = [float(errors.max()), float(errors.mean())]
    engine._accumulate_gradients(micro_batches, HEAD, task.loss)
    gradients = {name: whole(x.grad) for name, x in engine._parameters.items() if x.grad is not None}
    report["gradients"] = largest_error(gradients, task.expected.gradients)
    engine._drop_gradients()
    start = engine.snapshot()
    loss = engine.step(micro_batches, HEAD, task.loss).loss
    report["loss"] = abs(loss / task.expected.loss - 1)
    end = engine.snapshot()
    engine.restore(start)
    repeated = engine.step(micro_batches, HEAD, task.loss).loss
    report["repeats"] = repeated == loss and same_bits(engine.snapshot(), end)
    return report


def main(models: dict[str, tuple[str, int]], on_gpus: bool) -> dict[str, dict]:
    """Returns a report by model, and by whether rows are divided over the ranks.

    Args:
        models: Directory and number of token ids of each model, by name.
        on_gpus: Whether each rank computes on the GPU of its number.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    return {
        f"{name}, {'divided' if sequence_parallel > 1 else 'own'} rows": report_on(
            Path(directory), vocabulary, device, sequence_parallel
        )
        for name, (directory, vocabulary) in models.items()
        for sequence_parallel in (1, size)
    }
