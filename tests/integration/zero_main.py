"""One rank of test_zero.py: trains tiny models at one ZeRO stage after the other and measures how far they are from
plain torch's numbers, which the test wrote down."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoModelForCausalLM

from integration.begun_early import is_step_begun_early_the_same
from integration.three_d_main import HEAD, NUM_STEPS, OPTIONS, Rows, distance, rows_of, rows_of_reference
from nccl_transfer.refs.mesh import Mesh
from services.compute.heads import PolicyOutput, value_head
from services.compute.microbatch import MicroBatch
from services.engines.base import NonFiniteGradient
from services.engines.fsdp.engine import FSDPEngine
from services.engines.three_d.engine import ThreeDParallelEngine
from services.engines.zero.engine import ZeROEngine
from services.models.families import load_causal_lm, load_value_model

CPU = torch.device("cpu")


def whole(engine: ZeROEngine, parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that lie as the engine's weights, whole on every rank: all boxes of all ranks, added up."""
    tensors: dict[str, Tensor] = {}
    for name, shard in engine.shards({f"weight.{name}": x for name, x in parts.items()}).items():
        box = tuple(slice(o, o + n) for o, n in zip(shard.offsets, shard.tensor.shape, strict=True))
        plain_name = name.removeprefix("weight.").partition("#")[0]
        tensors.setdefault(plain_name, shard.tensor.new_zeros(shard.whole))[box] += shard.tensor
    for name, shape in sorted(engine._partitions.shapes.items()):
        tensors.setdefault(name, next(iter(parts.values())).new_zeros(shape))
        dist.all_reduce(tensors[name])
    return tensors


def weights(engine: ZeROEngine) -> dict[str, Tensor]:
    """Without the further names of tied ones."""
    names = engine._partitions.shapes.keys()
    return {name: x.clone() for name, x in engine.full_tensors() if name in names}


def log_prob_distance(engine: ZeROEngine, rows: Rows, reference: Path) -> float:
    """The largest of any response token of this rank's rows."""
    micro_batches, expected = rows.micro_batches(), load_file(reference / "log_probs.safetensors")
    return max(
        float((m.collect(o.log_probs_BR) - rows_of_reference(expected, rows, m)).abs().max())
        for m, o in zip(micro_batches, engine.infer(micro_batches, HEAD), strict=True)
        if m.response_mask_BR.any()
    )


def num_visible(engine: ZeROEngine) -> int:
    """Elements of weights that the model has on this rank while it computes nothing."""
    return sum(p.numel() for p in engine._model.parameters())


def watch(engine: ZeROEngine) -> list[int]:
    """A list that grows by `num_visible` whenever a layer begins to compute."""
    seen: list[int] = []
    for layer in engine._model.get_submodule("model.layers").children():
        layer.register_forward_pre_hook(lambda *_: seen.append(num_visible(engine)))
    return seen


def held_for_backward(engine: ZeROEngine, micro_batches: list[MicroBatch], rows: Rows) -> list[str]:
    """Names of linear layers whose gathered weight is still there when the forward pass of a step is done."""
    gathered: dict[str, StorageWeakRef] = {}
    held: set[str] = set()

    def loss(output: PolicyOutput, micro_batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        held.update(name for name, storage in gathered.items() if not storage.expired())
        return rows.loss(output, micro_batch)

    def note(name: str) -> Callable[[nn.Linear, object], None]:
        return lambda layer, _: gathered.update({name: StorageWeakRef(layer.weight.untyped_storage())})

    layers = engine._model.get_submodule("model.layers").named_modules()
    linears = [(name, module) for name, module in layers if isinstance(module, nn.Linear)]
    hooks = [module.register_forward_pre_hook(note(name)) for name, module in linears]
    engine._accumulate_gradients(micro_batches, HEAD, loss)
    engine._drop_gradients()
    for hook in hooks:
        hook.remove()
    assert len(gathered) == len(linears)
    return sorted(held)


def refused(engine: ZeROEngine, micro_batches: list[MicroBatch], rows: Rows) -> list[str]:
    """Error of a step whose loss is not finite on the last rank, and tensors that moved."""

    def not_finite(output: PolicyOutput, micro_batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        loss, counts = rows.loss(output, micro_batch)
        return loss * (torch.inf if engine.data_rank == engine.data_size - 1 else 1), counts

    raised, before = [], engine.snapshot()
    try:
        engine.step(micro_batches, HEAD, not_finite)
    except NonFiniteGradient as error:
        raised.append(type(error).__name__)
    after = engine.snapshot()
    return raised + [name for name, x in before.tensors.items() if not torch.equal(x, after.tensors[name])]


def run(stage: int, offloads: bool, directory: Path, reference: Path, dtype: torch.dtype, out: Path) -> dict:
    """Everything a stage must get right, as distances from the reference."""
    engine = ZeROEngine(directory, stage, CPU, dtype=dtype, optimizer=OPTIONS, offloads=offloads)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).state_dict()
    expected = json.loads((reference / "numbers.json").read_text())
    rows = rows_of(Mesh(data=engine.data_size), engine.data_rank)
    micro_batches = rows.micro_batches()
    report: dict = {
        "num_kept": sum(x.numel() for x in engine._kept.values()),
        "num_parameters": engine.num_parameters,
        "num_micro_batches": len(micro_batches),
        "wrong_whole": [name for name, x in engine.full_tensors() if not torch.equal(x, model[name])],
        "num_visible": [num_visible(engine)],
    }
    seen = watch(engine)
    report["log_probs"] = log_prob_distance(engine, rows, reference)
    report["most_visible"] = max(seen)
    report["num_visible"].append(num_visible(engine))
    initial = engine.snapshot()
    report["refused"] = refused(engine, micro_batches, rows)
    report["held"] = held_for_backward(engine, micro_batches, rows)
    loss, _ = engine._accumulate_gradients(micro_batches, HEAD, rows.loss)
    gradients = whole(engine, {name: x.grad for name, x in engine._kept.items() if x.grad is not None})
    engine._drop_gradients()
    report["loss"] = abs(loss / expected["loss"][0] - 1)
    report["gradients"] = distance(gradients, load_file(reference / "gradients.safetensors"))
    steps = [engine.step(micro_batches, HEAD, rows.loss)]
    engine.save(out / "checkpoint", {"policy_version": 1})
    steps += [engine.step(micro_batches, HEAD, rows.loss) for _ in range(NUM_STEPS - 1)]
    report["num_visible"].append(num_visible(engine))
    report["norms"] = max(abs(s.grad_norm / n - 1) for s, n in zip(steps, expected["norm"], strict=True))
    report["losses"] = max(abs(s.loss / n - 1) for s, n in zip(steps, expected["loss"], strict=True))
    report["steps"] = [(s.loss, s.grad_norm, s.lr) for s in steps]
    final = load_file(reference / "weights.safetensors")
    report["weights"] = distance(weights(engine), final)
    report["published"] = same_bits(whole(engine, engine._kept), weights(engine))
    after = engine.snapshot()
    report["exported"] = engine.export(out / "export")
    if engine.data_rank == 0:
        save_file(
            {name: x.clone().contiguous() for name, x in engine.full_tensors()}, out / "whole.safetensors"
        )
    else:
        list(engine.full_tensors())

    if engine.data_rank == 0:
        engine.restore(after)
    engine.restore(initial)
    again = [engine.step(micro_batches, HEAD, rows.loss) for _ in range(NUM_STEPS)]
    report["restored"] = again == steps and same_bits(engine.snapshot().tensors, after.tensors)
    engine.start_over()
    report["started_over"] = same_bits(engine.snapshot().tensors, initial.tensors)
    again = [engine.step(micro_batches, HEAD, rows.loss) for _ in range(NUM_STEPS)]
    report["started_over"] &= again == steps and same_bits(engine.snapshot().tensors, after.tensors)
    engine.load(out / "checkpoint")
    for _ in range(NUM_STEPS - 1):
        engine.step(micro_batches, HEAD, rows.loss)
    report["reloaded"] = same_bits(engine.snapshot().tensors, after.tensors)
    report["begun_early"] = is_step_begun_early_the_same(engine, micro_batches, HEAD, rows.loss)
    report.update(interchanged(engine, directory, dtype, micro_batches, rows, final, out))
    return report


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(x, b[name]) for name, x in a.items())


def interchanged(
    engine: ZeROEngine,
    directory: Path,
    dtype: torch.dtype,
    micro_batches: list[MicroBatch],
    rows: Rows,
    final: dict[str, Tensor],
    out: Path,
) -> dict:
    """How far other engines come from this one's checkpoint after one step, and this one from theirs."""

    def ends() -> Iterator[FSDPEngine | ThreeDParallelEngine]:
        yield FSDPEngine(load_causal_lm(directory, dtype), CPU, optimizer=OPTIONS)
        yield ThreeDParallelEngine(
            directory, Mesh(data=engine.data_size), CPU, dtype=dtype, optimizer=OPTIONS
        )

    report = {"hashes": [], "theirs": [], "ours": []}
    for number, other in enumerate(ends()):
        scalars = other.load(out / "checkpoint")
        assert scalars == {"policy_version": 1}
        engine.load(out / "checkpoint")
        report["hashes"].append(other.export(out / "theirs") == engine.export(out / "ours"))
        other.save(out / f"other-{number}", scalars)
        for _ in range(NUM_STEPS - 1):
            other.step(micro_batches, HEAD, rows.loss)
        named = {name: x.clone() for name, x in other.full_tensors()}
        report["theirs"].append(distance({name: named[name] for name in final}, final))
        engine.load(out / f"other-{number}")
        for _ in range(NUM_STEPS - 1):
            engine.step(micro_batches, HEAD, rows.loss)
        report["ours"].append(distance(weights(engine), final))
    return report


def run_values(stage: int, offloads: bool, directory: Path, reference: Path, out: Path) -> dict:
    """A value model: its weights after steps."""
    engine = ZeROEngine(
        directory,
        stage,
        CPU,
        dtype=torch.float64,
        optimizer=OPTIONS,
        offloads=offloads,
        load=load_value_model,
    )
    rows = rows_of(Mesh(data=engine.data_size), engine.data_rank)
    micro_batches = rows.micro_batches()
    for _ in range(NUM_STEPS):
        engine.step(micro_batches, value_head, rows.value_loss)
    engine.export(out / "export")
    return {"weights": distance(weights(engine), load_file(reference / "weights.safetensors"))}


def run_frozen(stage: int, directory: Path, reference: Path, dtype: torch.dtype) -> dict:
    """A model that does not learn."""
    engine = ZeROEngine(directory, stage, CPU, dtype=dtype)
    rows = rows_of(Mesh(data=engine.data_size), engine.data_rank)
    return {"log_probs": log_prob_distance(engine, rows, reference), "num_visible": num_visible(engine)}


def main(out: Path, plan: list[tuple[str, int, bool, str, str, str]]) -> dict[str, dict]:
    reports: dict[str, dict] = {}
    for case, stage, offloads, directory, reference, dtype in plan:
        here = out / f"{case}-{stage}{'-offloaded' if offloads else ''}"
        if dist.get_rank() == 0:
            here.mkdir()
        dist.barrier()
        paths = Path(directory), Path(reference)
        if dtype == "value":
            reports[here.name] = run_values(stage, offloads, *paths, here)
        else:
            torch_dtype = getattr(torch, dtype)
            reports[here.name] = run(stage, offloads, *paths, torch_dtype, here)
            reports[here.name]["frozen"] = run_frozen(stage, *paths, torch_dtype)
    return reports
