"""One rank of test_engine_ranks.py: trains tiny models on its share of the rows and writes down what it saw."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from integration.begun_early import is_step_begun_early_the_same
from nccl_transfer.refs.columns import Jagged
from services.compute.heads import Head, PolicyHead, PolicyOutput, value_head
from services.compute.jagged_rows import assemble
from services.compute.microbatch import MicroBatch
from services.compute.splitting import split
from services.engines import offload
from services.engines.agreement import PeerRankFailed
from services.engines.base import NonFiniteGradient, OptimizerOptions
from services.engines.fsdp.engine import FSDPEngine
from services.models.export import tensors_sha256
from services.models.value_model import ValueModel

NUM_ROWS = 10
# Rank 0 of two gets 8 rows, rank 1 gets 2: they need different numbers of micro-batches.
FIRST_ROWS_OF_RANK = {1: [0, NUM_ROWS], 2: [0, 8, NUM_ROWS]}
TOKEN_BUDGET = 24
OPTIONS = OptimizerOptions(lr=1e-2, max_grad_norm=0.1)
Loss = Callable[..., tuple[Tensor, dict[str, Tensor]]]


def make_model(*, tied: bool) -> LlamaForCausalLM:
    """61 tokens, so that the rows of the embedding do not divide by two ranks."""
    torch.manual_seed(7)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=61,
            hidden_size=32,
            intermediate_size=47,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            initializer_range=0.25,
            tie_word_embeddings=tied,
        )
    ).eval()


def make_columns(first: int, last: int) -> tuple[Jagged[Tensor], Jagged[Tensor], Jagged[Tensor], int]:
    """Prompts, responses and advantages of rows first to last, and the response tokens of all rows."""
    generator = np.random.default_rng(3)
    lengths = generator.integers(1, 9, (2, NUM_ROWS)).astype(np.int64)

    def column(lengths: np.ndarray, values: np.ndarray) -> Jagged[Tensor]:
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        return Jagged(torch.from_numpy(values[offsets[first] : offsets[last]]), lengths[first:last])

    num_tokens = int(lengths[1].sum())
    prompts = column(lengths[0], generator.integers(0, 61, lengths[0].sum()))
    responses = column(lengths[1], generator.integers(0, 61, num_tokens))
    return (
        prompts,
        responses,
        column(lengths[1], generator.normal(size=num_tokens).astype(np.float32)),
        num_tokens,
    )


def run(name: str, engine: FSDPEngine, head: Head, out: Path, other_checkpoint: Path) -> dict:
    """Two steps and everything around them; tensors go to files, numbers are returned."""
    first, last = FIRST_ROWS_OF_RANK[engine.data_size][engine.data_rank :][:2]
    prompts, responses, advantages, num_tokens = make_columns(first, last)
    micro_batches = split(prompts, responses, token_budget=TOKEN_BUDGET, pad_id=0, packed=name == "kept")

    def per_token(output: PolicyOutput | Tensor) -> Tensor:
        return output.log_probs_BR if isinstance(output, PolicyOutput) else output

    def loss_fn(output: PolicyOutput | Tensor, micro_batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        error_BR = per_token(output) - micro_batch.spread(advantages)
        return error_BR[micro_batch.response_mask_BR].square().sum() / num_tokens, {}

    def poisoned_on_the_last_rank(output, micro_batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        is_last = engine.data_rank == engine.data_size - 1
        return loss_fn(output, micro_batch)[0] * (float("nan") if is_last else 1), {}

    def step(loss: Loss = loss_fn) -> dict:
        result = engine.step(micro_batches, head, loss)
        return {"loss": result.loss, "grad_norm": result.grad_norm}

    def infer() -> Tensor:
        outputs = engine.infer(micro_batches, head)
        collected = [m.collect(per_token(output)) for m, output in zip(micro_batches, outputs, strict=True)]
        return assemble([m.rows for m in micro_batches], collected, responses.lengths).values

    initial, inferred = engine.snapshot(), infer()
    save_file({"values": inferred}, out / f"{name}-inferred-{engine.data_rank}.safetensors")
    report: dict = {"num_micro_batches": len(micro_batches), "steps": [step()]}
    engine.save(out / f"{name}-checkpoint")
    save_file(
        {key: x.clone() for key, x in engine.full_tensors()},
        out / f"{name}-step1-{engine.data_rank}.safetensors",
    )
    before = engine.snapshot()
    try:
        step(poisoned_on_the_last_rank)
    except NonFiniteGradient as error:
        report["refused"] = str(error)
    after = engine.snapshot()
    report["unmoved"] = all(torch.equal(x, after.tensors[key]) for key, x in before.tensors.items())
    report["steps"].append(step())
    report["exported"] = engine.export(out / f"{name}-export")
    report["gathered"] = tensors_sha256(engine.full_tensors())
    save_file(
        {key: x.clone() for key, x in engine.full_tensors()}, out / f"{name}-{engine.data_rank}.safetensors"
    )
    engine.restore(before)
    engine.load(out / f"{name}-checkpoint")
    step()
    report["reloaded"] = engine.export(out / f"{name}-reloaded")
    if (other_checkpoint / f"{name}-checkpoint").exists():
        engine.load(other_checkpoint / f"{name}-checkpoint")
        step()
        save_file({key: x.clone() for key, x in engine.full_tensors()}, out / f"{name}-resharded.safetensors")
    report["begun_early"] = is_step_begun_early_the_same(engine, micro_batches, head, loss_fn)
    report["moved"] = not torch.equal(infer(), inferred)
    engine.restore(initial)
    report["restored"] = torch.equal(infer(), inferred)
    return report


def failed_export(engine: FSDPEngine, out: Path) -> str:
    """Error on this rank when rank 0 cannot write."""
    (out / "file").touch()
    try:
        engine.export(out / "file" / "export")
    except (OSError, PeerRankFailed) as error:
        return type(error).__name__
    return "none"


def moved_without_memory(engine: FSDPEngine, step: str) -> str:
    """Error on this rank of a move to host memory or back when the last rank has no memory for it."""

    def refuse(*arguments: object) -> None:
        raise MemoryError(step)

    move = engine._leave_device if step == "_allocate" else engine.onload
    is_last = engine.data_rank == engine.data_size - 1
    with mock.patch.object(offload, step, refuse) if is_last else nullcontext():
        try:
            move()
        except (MemoryError, PeerRankFailed) as error:
            return type(error).__name__
    return "none"


def offloaded_without_memory(engine: FSDPEngine) -> dict:
    """Errors of failed moves, and whether the engine is where it was after each of them."""
    state = engine.snapshot()
    report: dict = {
        "left": moved_without_memory(engine, "_allocate"),
        "stays": not engine._offloader._offloaded,
    }
    engine._leave_device()
    report["came back"] = moved_without_memory(engine, "_grow")
    report["stays"] &= not any(x.untyped_storage().nbytes() for x in engine._resident() if x.numel())
    engine.onload()
    after = engine.snapshot()
    report["stays"] &= all(torch.equal(x, after.tensors[key]) for key, x in state.tensors.items())
    return report


def main(out: Path, other_checkpoint: Path) -> dict[str, dict]:
    cpu, policy = torch.device("cpu"), PolicyHead(temperature=0.7)
    value_model = ValueModel(make_model(tied=False).model).eval()
    torch.nn.init.normal_(value_model.value_head.weight)
    reports = {}
    for name, model, head, reshard_after_forward in (
        ("policy", make_model(tied=False), policy, True),
        ("kept", make_model(tied=False), policy, False),
        ("tied", make_model(tied=True), policy, True),
        ("value", value_model, value_head, True),
    ):
        engine = FSDPEngine(
            model,
            cpu,
            optimizer=OPTIONS,
            reshard_after_forward=reshard_after_forward,
            activation_checkpointing=name == "tied",
        )
        # First: what numpy has looked at, for a hash, torch no longer frees on CPU.
        offloaded = offloaded_without_memory(engine)
        reports[name] = {
            **run(name, engine, head, out, other_checkpoint),
            "offloaded": offloaded,
        }
        reports[name]["failed_export"] = failed_export(engine, out)
    return reports
