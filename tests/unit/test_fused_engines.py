"""Engines that compute with compiled kernels learn what they learn without them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from unit.test_engine_three_d import CPU, HEAD, loss, micro_batches

from nccl_transfer.refs.mesh import Mesh
from services.compute import fused
from services.engines.base import OptimizerOptions, TrainEngine
from services.engines.fsdp.engine import FSDPEngine
from services.engines.fsdp.lora import AdapterOptions, LoRAEngine
from services.engines.three_d.engine import ThreeDParallelEngine
from services.models.families import load_causal_lm

OPTIONS = OptimizerOptions(lr=1e-3)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("process_group")]


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    fused.use(compiled=False)


def make_engine(name: str, directory: Path, *, recomputes: bool = False) -> TrainEngine:
    if name == "3d":
        return ThreeDParallelEngine(
            directory,
            Mesh(),
            CPU,
            optimizer=OPTIONS,
            dtype=torch.bfloat16,
            activation_checkpointing=recomputes,
        )
    options = {
        "optimizer": OPTIONS,
        "compute_dtype": torch.bfloat16,
        "activation_checkpointing": recomputes,
    }
    if name == "lora":
        return LoRAEngine(load_causal_lm(directory), CPU, adapters=AdapterOptions(), **options)
    if name == "zero":
        engine = pytest.importorskip("services.engines.zero.engine")
        return engine.ZeROEngine(directory, 3, CPU, optimizer=OPTIONS)
    return FSDPEngine(load_causal_lm(directory), CPU, **options)


def steps(engine: TrainEngine) -> tuple[list[Tensor], list[float], dict[str, Tensor], int]:
    """Returns log-probabilities before two steps, the norms of both gradients, the weights after them, and the bytes
    that the second step kept for its backward pass."""
    batch, saved = micro_batches(), []
    before = [output.log_probs_BR for output in engine.infer(batch, HEAD)]
    norms = [engine.step(batch, HEAD, loss).grad_norm]
    with saved_tensors_hooks(lambda x: (saved.append(x.nbytes), x)[1], lambda x: x):
        norms.append(engine.step(batch, HEAD, loss).grad_norm)
    return before, norms, {name: x.clone() for name, x in engine.full_tensors()}, sum(saved)


@pytest.mark.parametrize("name", ["fsdp", "3d", "lora", "zero"])
def test_steps_are_close_to_those_without_and_keep_less(name: str, tiny_llama_dir: Path) -> None:
    found = []
    for compiled in (False, True):
        fused.use(compiled=compiled)
        found.append(steps(make_engine(name, tiny_llama_dir)))
    (eager, eager_norms, eager_weights, eager_kept), (ours, norms, weights, kept) = found
    for x, y in zip(ours, eager, strict=True):
        torch.testing.assert_close(x, y, rtol=0.02, atol=0.02)
    assert norms == pytest.approx(eager_norms, rel=0.05)
    assert norms != eager_norms  # rounded otherwise: the kernels were used
    for weight, other in weights.items():
        torch.testing.assert_close(other, eager_weights[weight], rtol=0.05, atol=2.5 * OPTIONS.lr)
    if name != "zero":  # DeepSpeed's hooks keep tensors of their own
        assert kept < 0.9 * eager_kept


@pytest.mark.parametrize("name", ["fsdp", "3d", "lora"])
def test_recomputation_has_the_same_bits(name: str, tiny_llama_dir: Path) -> None:
    fused.use(compiled=True)
    (_, norms, weights, _), (_, other_norms, others, _) = (
        steps(make_engine(name, tiny_llama_dir, recomputes=each)) for each in (False, True)
    )
    assert norms == other_norms
    assert all(torch.equal(x, others[name]) for name, x in weights.items())


@pytest.mark.parametrize("name", ["fsdp", "3d"])
def test_an_update_has_the_bits_of_inference(name: str, tiny_llama_dir: Path) -> None:
    fused.use(compiled=True)
    engine, batch = make_engine(name, tiny_llama_dir), micro_batches()
    before = [output.log_probs_BR for output in engine.infer(batch, HEAD)]
    learning: list[Tensor] = []

    def noting(output, micro_batch):
        learning.append(output.log_probs_BR.detach().clone())
        return loss(output, micro_batch)

    engine.step(batch, HEAD, noting)
    assert len(learning) == len(before)
    assert all(map(torch.equal, learning, before))
