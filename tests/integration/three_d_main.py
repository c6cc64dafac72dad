"""One rank of test_three_d.py: puts tiny models on one mesh after the other and measures how far they are from plain
torch's numbers, which the test wrote down."""

import json
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from packed_rows import FEW, packed_distance
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from integration.begun_early import is_step_begun_early_the_same
from nccl_transfer.refs.columns import Jagged
from nccl_transfer.refs.mesh import Mesh
from services.compute.heads import PolicyHead, PolicyOutput, value_head
from services.compute.microbatch import MicroBatch
from services.compute.splitting import split
from services.engines.agreement import PeerRankFailed
from services.engines.base import NonFiniteGradient, OptimizerOptions, Snapshot
from services.engines.three_d.engine import ThreeDParallelEngine

NUM_ROWS = 11
VOCABULARY = 61
"""Divides by no number of ranks."""
TOKEN_BUDGET = 30
TEMPERATURE = 1.7
ENTROPY_WEIGHT = 0.05
NUM_STEPS = 3
HEAD = PolicyHead(temperature=TEMPERATURE, entropy_gradient=True)
OPTIONS = OptimizerOptions(lr=1e-2, weight_decay=0.1, max_grad_norm=0.5, warmup_steps=2)
CUT_BY_ROWS = ("o_proj.weight", "down_proj.weight")
CUT_BY_COLUMNS = tuple(
    f"{name}_proj.{kind}" for name in ("q", "k", "v", "gate", "up") for kind in ("weight", "bias")
)


class Rows:
    """Prompts, responses and advantages of unequal lengths; one response is empty."""

    def __init__(self, first: int = 0, last: int = NUM_ROWS) -> None:
        generator = np.random.default_rng(3)
        lengths = generator.integers(1, 9, (2, NUM_ROWS)).astype(np.int64)
        lengths[1, 2] = 0
        self.num_tokens = int(lengths[1].sum())
        self._part = slice(first, last)
        self.prompts = self._column(generator.integers(3, VOCABULARY, lengths[0].sum()), lengths[0])
        self.responses = self._column(generator.integers(3, VOCABULARY, self.num_tokens), lengths[1])
        self.advantages = self._column(generator.normal(size=self.num_tokens), lengths[1])

    def _column(self, values: np.ndarray, lengths: np.ndarray) -> Jagged[Tensor]:
        rows = np.split(values, np.cumsum(lengths)[:-1])[self._part]
        return Jagged(torch.from_numpy(np.concatenate(rows)), lengths[self._part])

    def micro_batches(self, *, packs: bool = False) -> list[MicroBatch]:
        """Padded; where the engine packs, every second row is packed."""
        return [
            micro_batch
            for first in range(2)
            for micro_batch in split(
                self.prompts,
                self.responses,
                token_budget=TOKEN_BUDGET,
                pad_id=0,
                rows=np.arange(first, self.prompts.rows, 2),
                packed=packs and first == 0,
            )
        ]

    def loss(self, output: PolicyOutput, micro_batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        advantages = micro_batch.spread(self.advantages).to(output.log_probs_BR.dtype)
        per_token = advantages * output.log_probs_BR + ENTROPY_WEIGHT * output.entropy_BR
        share = -per_token[micro_batch.response_mask_BR].sum() / self.num_tokens
        return share, {"tokens": micro_batch.response_mask_BR.sum()}

    def value_loss(self, values_BR: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        error_BR = values_BR - micro_batch.spread(self.advantages)
        return error_BR[micro_batch.response_mask_BR].square().sum() / self.num_tokens, {}


def rows_of(mesh: Mesh, data_index: int) -> Rows:
    """Unequal shares: the first data rank has four rows more than an even deal would give it."""
    bounds = np.linspace(0, NUM_ROWS, mesh.data + 1).round().astype(int)
    if mesh.data > 1:
        bounds[1:-1] = np.minimum(bounds[1:-1] + 4, NUM_ROWS - mesh.data + np.arange(1, mesh.data))
    return Rows(int(bounds[data_index]), int(bounds[data_index + 1]))


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest relative norm of a difference over all tensors."""
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    return max(float((x - theirs[name]).norm() / theirs[name].norm()) for name, x in ours.items())


def expected_part(name: str, whole: Tensor, part: int, parts: int) -> Tensor:
    """Part of a tensor that a rank must have: written down by hand."""
    if name.endswith(CUT_BY_ROWS):
        return whole.chunk(parts, dim=1)[part]
    if name.endswith(CUT_BY_COLUMNS):
        return whole.chunk(parts, dim=0)[part]
    if "embed_tokens" in name or "lm_head" in name:
        rows = 64 // parts
        return whole[part * rows : (part + 1) * rows]
    return whole


def expected_shard(name: str, part: Tensor, mesh: Mesh, data_index: int) -> Tensor:
    """Shard of a part that a data rank must have: some of the rows that weights are kept in."""
    dim = 1 if name.endswith(CUT_BY_ROWS) else 0
    is_padded = "embed_tokens" in name or "lm_head" in name
    rows = -(-(64 // mesh.tensor if is_padded else part.shape[dim]) // mesh.data)
    first, last = (min(index * rows, part.shape[dim]) for index in (data_index, data_index + 1))
    return part.narrow(dim, first, last - first)


def wrong_parts(
    engine: ThreeDParallelEngine, mesh: Mesh, sharded: bool, model: dict[str, Tensor], tied: bool
) -> list[str]:
    """Names of tensors of which this rank has not what is its own, or the wrong ones."""
    stage, part, data_index = mesh.position(dist.get_rank())
    per_stage = 4 // mesh.pipeline
    names = {name for name in model if ".layers." in name and int(name.split(".")[2]) // per_stage == stage}
    if stage == 0:
        names.add("model.embed_tokens.weight")
    if stage == mesh.pipeline - 1:
        names |= {"model.norm.weight", "model.embed_tokens.weight" if tied else "lm_head.weight"}
    shards = engine.shards({f"weight.{name}": x for name, x in engine._kept.items()})
    kept = {name.removeprefix("weight."): shard.tensor for name, shard in shards.items()}
    wrong = names ^ kept.keys()
    for name in names & kept.keys():
        expected = expected_part(name, model[name], part, mesh.tensor)
        if sharded:
            expected = expected_shard(name, expected, mesh, data_index)
        if not torch.equal(kept[name], expected):
            wrong.add(name)
    return sorted(wrong)


def refused(engine: ThreeDParallelEngine, micro_batches: list[MicroBatch], rows: Rows) -> list[str]:
    """Errors of steps whose loss is not finite or fails on the last data rank, and tensors that moved."""
    is_last = engine.data_rank == engine.data_size - 1

    def not_finite(output: PolicyOutput, micro_batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        loss, counts = rows.loss(output, micro_batch)
        return loss * (torch.nan if is_last else 1), counts

    def failing(output: PolicyOutput, micro_batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        if is_last:
            raise KeyError("advantages")
        return rows.loss(output, micro_batch)

    raised, before = [], engine.snapshot()
    for loss_fn in (not_finite, failing):
        try:
            engine.step(micro_batches, HEAD, loss_fn)
        except (NonFiniteGradient, KeyError, PeerRankFailed) as error:
            raised.append(type(error).__name__)
    after = engine.snapshot()
    moved = [name for name, x in before.tensors.items() if not torch.equal(x, after.tensors[name])]
    return raised + moved


def read_back(engine: ThreeDParallelEngine, kept: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in engine._gather(kept, engine._stage.layouts, engine._kept_dtype)}


def run(
    mesh: Mesh,
    sharded: bool,
    directory: Path,
    reference: Path,
    dtype: torch.dtype,
    out: Path,
    earlier: Path | None,
) -> dict:
    """Everything a mesh must get right, as distances from the reference."""
    engine = ThreeDParallelEngine(
        directory, mesh, torch.device("cpu"), dtype=dtype, optimizer=OPTIONS, shards_over_data=sharded
    )
    plain = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    model, tied = plain.state_dict(), bool(plain.config.tie_word_embeddings)
    expected = json.loads((reference / "numbers.json").read_text())
    rows = rows_of(mesh, engine.data_rank)
    micro_batches = rows.micro_batches(packs=engine.packs)
    report: dict = {
        "wrong_parts": wrong_parts(engine, mesh, sharded, model, tied),
        "num_micro_batches": len(micro_batches),
    }
    report["wrong_whole"] = [name for name, x in engine.full_tensors() if not torch.equal(x, model[name])]

    inferred = engine.infer(micro_batches, HEAD)
    report["data"] = [engine.data_rank, engine.data_size]
    report["sees_outputs"], report["num_outputs"] = engine.sees_outputs, len(inferred)
    log_probs = load_file(reference / "log_probs.safetensors")
    report["log_probs"] = max(
        (float((m.collect(o.log_probs_BR) - rows_of_reference(log_probs, rows, m)).abs().max())
         for m, o in zip(micro_batches, inferred, strict=False) if m.response_mask_BR.any()),
        default=0.0,
    )  # fmt: skip

    initial = engine.snapshot()
    if dtype == torch.float64:
        report["packed"] = max(packed_distance(engine, shapes) for shapes in FEW)
    report["refused"] = refused(engine, micro_batches, rows)
    loss, _ = engine._accumulate_gradients(micro_batches, HEAD, rows.loss)
    gradients = read_back(engine, {name: x.grad for name, x in engine._kept.items() if x.grad is not None})
    engine._drop_gradients()
    report["loss"] = abs(loss / expected["loss"][0] - 1)
    report["gradients"] = distance(gradients, load_file(reference / "gradients.safetensors"))
    steps = [engine.step(micro_batches, HEAD, rows.loss) for _ in range(1)]
    engine.save(out / "checkpoint", {"policy_version": 1})
    steps += [engine.step(micro_batches, HEAD, rows.loss) for _ in range(NUM_STEPS - 1)]
    report["norms"] = max(abs(s.grad_norm / n - 1) for s, n in zip(steps, expected["norm"], strict=True))
    report["losses"] = max(abs(s.loss / n - 1) for s, n in zip(steps, expected["loss"], strict=True))
    report["tokens"] = steps[-1].stats.get("tokens")
    final = load_file(reference / "weights.safetensors")
    report["weights"] = distance(read_back(engine, engine._kept), final)
    report["exported"] = engine.export(out / "export")
    whole = {name: x.clone().contiguous() for name, x in engine.full_tensors()}
    if dist.get_rank() == 0:
        save_file(whole, out / "whole.safetensors")
    before = engine.snapshot()
    engine.load(earlier if earlier is not None else out / "checkpoint")
    for _ in range(NUM_STEPS - 1):
        engine.step(micro_batches, HEAD, rows.loss)
    report["resumed"] = distance(read_back(engine, engine._kept), final)
    engine.start_over()
    report["started_over"] = (
        same_bits(engine.snapshot(), initial) and engine.step(micro_batches, HEAD, rows.loss) == steps[0]
    )
    engine.restore(before)
    report["begun_early"] = is_step_begun_early_the_same(engine, micro_batches, HEAD, rows.loss)
    if dtype == torch.float32:
        report["exports_masters"] = exports_masters(mesh, sharded, directory, out)
    report["restored"] = engine.export(out / "restored") == report["exported"]
    return report


def same_bits(a: Snapshot, b: Snapshot) -> bool:
    return a.num_steps == b.num_steps and all(
        torch.equal(x, b.tensors[name]) for name, x in a.tensors.items()
    )


def exports_masters(mesh: Mesh, sharded: bool, directory: Path, out: Path) -> bool:
    """Whether an engine that computes in bfloat16 exports the float32 weights that learn."""
    engine = ThreeDParallelEngine(
        directory,
        mesh,
        torch.device("cpu"),
        dtype=torch.bfloat16,
        optimizer=OPTIONS,
        shards_over_data=sharded,
    )
    exact = ThreeDParallelEngine(directory, mesh, torch.device("cpu"), shards_over_data=sharded)
    return engine.export(out / "of_bfloat16") == exact.export(out / "of_float32")


def rows_of_reference(log_probs: dict[str, Tensor], rows: Rows, micro_batch: MicroBatch) -> Tensor:
    first = rows._part.start
    return torch.cat([log_probs[str(first + row)] for row in micro_batch.rows])


def run_values(mesh: Mesh, sharded: bool, directory: Path, reference: Path, out: Path) -> dict:
    """A value model that computes its activations twice: its weights after steps."""
    engine = ThreeDParallelEngine(
        directory,
        mesh,
        torch.device("cpu"),
        dtype=torch.float64,
        optimizer=OPTIONS,
        with_value_head=True,
        activation_checkpointing=True,
        shards_over_data=sharded,
    )
    rows = rows_of(mesh, engine.data_rank)
    micro_batches = rows.micro_batches(packs=engine.packs)
    for _ in range(NUM_STEPS):
        engine.step(micro_batches, value_head, rows.value_loss)
    engine.export(out / "export")
    expected = load_file(reference / "weights.safetensors")
    return {"weights": distance({name: x.clone() for name, x in engine.full_tensors()}, expected)}


def main(
    out: Path, cases: dict[str, tuple[str, str, str, list[tuple[tuple[int, ...], bool]]]]
) -> dict[str, dict]:
    reports: dict[str, dict] = {}
    for case, (directory, reference, dtype, meshes) in cases.items():
        earlier: Path | None = None
        for sizes, sharded in meshes:
            mesh = Mesh(*sizes)
            here = out / f"{case}-{'-'.join(map(str, sizes))}{'-sharded' if sharded else ''}"
            if dist.get_rank() == 0:
                here.mkdir()
            dist.barrier()
            if dtype == "value":
                reports[here.name] = run_values(mesh, sharded, Path(directory), Path(reference), here)
            else:
                torch_dtype = getattr(torch, dtype)
                paths = Path(directory), Path(reference)
                reports[here.name] = run(mesh, sharded, *paths, torch_dtype, here, earlier)
                earlier = here / "checkpoint"
    return reports
