"""Contract of every training engine, in bfloat16 on one device against plain transformers in float32: losses,
gradients and log-probabilities within stated tolerances; states that leave the device and come back bit for bit; and
rollouts. Authors of an engine subclass `EngineContract`."""

from __future__ import annotations

import gc
import importlib.util
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from nccl_transfer.refs.columns import Jagged
from nccl_transfer.refs.mesh import Mesh
from rlhf.errors import OutOfStep
from services.compute.splitting import split
from services.engines import offload
from services.engines.base import EngineOffloaded, EngineSetup, TrainEngine
from services.engines.sharded import ShardedEngine
from services.models.export import tensors_sha256
from services.models.families import load_causal_lm
from services.roles.engine_factory import make_engine
from services.rollout.base import RolloutEngine, RolloutSetup
from services.rollout.factory import make_rollout
from services.storage.checkpoint import WeightShard, read_shards
from services.testing.begun_gradients import BegunGradients
from services.testing.engine_task import (
    NUM_NEW_TOKENS,
    OPTIONS,
    Task,
    generate,
    log_probs,
    same_bits,
)
from services.testing.single_rank import single_rank
from services.testing.weights import SentWeights
from settings.actor import ActorTable

LOSS_TOLERANCE = 0.02
"""Largest relative error of the loss. Products in bfloat16 are off by 2^-9 at most, relative to the largest term."""
GRADIENT_TOLERANCE = 0.08
"""Largest norm of the difference between a tensor's gradient and the one in float32, over the norm of the latter."""
LARGEST_LOG_PROB_ERROR, MEAN_LOG_PROB_ERROR = 0.4, 0.04
"""Bounds of a token's error, in nats. The random weights are so large that logits differ by about 10."""
STILL_HELD = 0.1
"""Largest share of its device memory that an engine may keep while it is offloaded."""

TINY = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
}


def gradients(engine: TrainEngine, expected: dict[str, Tensor], directory: Path) -> dict[str, Tensor]:
    """Returns the gradients of the one step that an engine has taken since its start, by the names in `expected`.
    They are computed from the optimizer's first moments, which are 1 - beta1 of them, in a checkpoint that is saved
    to `directory`: there, every engine's tensors have the same names and shapes."""
    engine.save(directory)
    moments = {
        f"exp_avg.{name}": WeightShard(torch.full_like(x, torch.nan), (0,) * x.ndim, tuple(x.shape))
        for name, x in expected.items()
    }
    read_shards(directory, 1, moments)
    share = 1 - OPTIONS.betas[0]
    return {name: moments[f"exp_avg.{name}"].tensor / share for name in expected}


@contextmanager
def offloaded(engine: TrainEngine) -> Iterator[int]:
    """Context manager that offloads an engine with `take_off`, yields the bytes moved, and brings the engine back
    after the block, if that raises nothing."""
    moved = take_off(engine)
    yield moved
    assert engine.onload() == moved


def take_off(engine: TrainEngine) -> int:
    """Moves an engine to host memory and returns the bytes moved. On a CPU, where `offload` moves nothing, calls the
    `_leave_device` of a ShardedEngine instead, which releases the memory of its tensors as on a GPU."""
    if engine.device.type != "cpu":
        return engine.offload()
    assert engine.offload() == engine.onload() == 0
    return cast(ShardedEngine, engine)._leave_device()


def memory_meter(engine: TrainEngine) -> Callable[[], int]:
    """Returns a function that returns the bytes in use now: those of tensors on the engine's GPU or, on a CPU, of the
    tensors that `offload` moves (0 unless the engine is a ShardedEngine)."""
    if engine.device.type == "cuda":
        return lambda: tensor_bytes(engine.device)
    tensors = engine._resident() if isinstance(engine, ShardedEngine) else []
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in tensors}
    return lambda: sum(storage.nbytes() for storage in storages.values())


def tensor_bytes(device: torch.device) -> int:
    """Returns the bytes that tensors have asked for on a GPU; 0 for a CPU. The allocator may hand out up to 1 MiB more
    for each, which depends on the blocks that are free."""
    if device.type != "cuda":
        return 0
    return torch.cuda.memory_stats(device).get("requested_bytes.all.current", 0)  # {} before the first tensor


@contextmanager
def memory_for(number: int, step: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Context manager in which the first `number` calls of the function `step` of `services.engines.offload` allocate
    as usual, and later ones raise torch.OutOfMemoryError. `step` is "_allocate" (host memory) or "_grow" (device
    memory)."""
    allocate, left = getattr(offload, step), iter(range(number))

    def limited(*arguments: Any) -> Any:
        if next(left, None) is None:
            raise torch.OutOfMemoryError("there is no memory left")
        return allocate(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(offload, step, limited)
        yield


class EngineNumbers:
    """The tests of `EngineContract` that also suit a large model on a GPU.

    Attributes:
        keys: keys of the service's table that choose the engine: `engine`, its options, and whatever else it needs.
        offloads: whether the engine can move its state to host memory. If not, tests of it are skipped. On a CPU, where
            `offload` has nothing to do, they need a subclass of `ShardedEngine`.
    """

    keys: Mapping[str, Any]
    offloads: bool = True

    @pytest.fixture(scope="class")
    @classmethod
    def device(cls) -> torch.device:
        """Device that engines compute on. Default: CPU."""
        return torch.device("cpu")

    @pytest.fixture(scope="class")
    @classmethod
    def sizes(cls) -> dict[str, Any]:
        """Keyword arguments of LlamaConfig for the model. Default: TINY."""
        return TINY

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def process_group(cls, device: torch.device, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        """Makes this process the only rank of the default process group while the class's tests run."""
        with single_rank(device, tmp_path_factory.mktemp("process_group")):
            yield

    @pytest.fixture(scope="class")
    @classmethod
    def task(cls, sizes: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Task:
        """The task of all tests, with a random Llama model that is saved to a temporary directory."""
        torch.manual_seed(7)
        model = LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=128, eos_token_id=None))
        directory = tmp_path_factory.mktemp("llama")
        model.save_pretrained(directory)
        return Task(directory, int(sizes["vocab_size"]))

    def table(self, directory: Path) -> ActorTable:
        """Returns the table of an actor with the engine that `keys` choose and the model of `directory`."""
        keys = {"role": "actor", "address": "127.0.0.1:1", "model": directory, "dtype": "bfloat16"}
        return ActorTable.model_validate(keys | dict(self.keys))

    def make_engine(self, directory: Path, device: torch.device) -> TrainEngine:
        """Returns a new engine with an optimizer, on one rank, that computes in bfloat16, built as a service builds
        it. Skips the test if the engine's package is not installed."""
        table = self.table(directory)
        package = table.engine_spec.package
        if package and importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
        return make_engine(table, EngineSetup(load_causal_lm, Mesh(), device, OPTIONS))

    def make_rollout(self, engine: TrainEngine, directory: Path, device: torch.device) -> RolloutEngine:
        """Returns a rollout engine for a training engine, built as the actor builds it; it has no weights yet."""
        return make_rollout(self.table(directory), RolloutSetup(engine.generation_shards, Mesh(), device))

    def can_offload(self, engine: TrainEngine) -> bool:
        """Returns whether tests can move the engine's tensors with `take_off`."""
        return self.offloads and (engine.device.type != "cpu" or isinstance(engine, ShardedEngine))

    def engine_that_offloads(self, task: Task, device: torch.device) -> TrainEngine:
        """Returns an engine as `make_engine`; skips the test unless `can_offload` of it is True."""
        engine = self.make_engine(task.directory, device)
        if not self.can_offload(engine):
            pytest.skip("the engine does not offload, or does on a GPU alone")
        return engine

    def sharded_engine(self, task: Task, device: torch.device) -> ShardedEngine:
        """Returns an engine as `make_engine`; skips the test, which uses private methods of ShardedEngine, if it is
        no ShardedEngine."""
        engine = self.make_engine(task.directory, device)
        if not isinstance(engine, ShardedEngine):
            pytest.skip("the engine is no ShardedEngine")
        return engine

    def test_log_probs_are_near_those_in_float32(self, task: Task, device: torch.device):
        found = task.log_probs(self.make_engine(task.directory, device))
        errors = (found - task.expected.log_probs).abs()
        assert found.dtype == torch.float32
        assert 0 < float(errors.max()) < LARGEST_LOG_PROB_ERROR
        assert float(errors.mean()) < MEAN_LOG_PROB_ERROR

    def test_loss_and_every_gradient_are_near_those_in_float32(
        self, task: Task, device: torch.device, tmp_path: Path
    ):
        engine = self.make_engine(task.directory, device)
        assert task.step(engine) == pytest.approx(task.expected.loss, rel=LOSS_TOLERANCE)
        expected = task.expected.gradients
        for tensor, gradient in gradients(engine, expected, tmp_path / "checkpoint").items():
            error = float((gradient - expected[tensor]).norm() / expected[tensor].norm())
            assert error < GRADIENT_TOLERANCE, f"{tensor}: {error:.3g}"

    def test_a_step_from_the_same_state_gives_the_same_bits(
        self, task: Task, device: torch.device, tmp_path: Path
    ):
        engine = self.make_engine(task.directory, device)
        task.step(engine)
        start, inferred = engine.snapshot(), task.log_probs(engine)
        write = engine.begin_save(tmp_path / "checkpoint")
        loss, end = task.step(engine), engine.snapshot()
        assert not same_bits(start, end)
        engine.restore(start)
        assert same_bits(engine.snapshot(), start)
        assert torch.equal(task.log_probs(engine), inferred)
        assert task.step(engine) == loss
        assert same_bits(engine.snapshot(), end)
        write()
        engine.load(tmp_path / "checkpoint")
        assert same_bits(engine.snapshot(), start)

    def test_an_offloaded_engine_leaves_the_device_and_comes_back_bit_for_bit(
        self, task: Task, device: torch.device
    ):
        gc.collect()
        before = tensor_bytes(device)
        engine = self.engine_that_offloads(task, device)
        task.step(engine)
        state, in_use = engine.snapshot(), memory_meter(engine)
        # The snapshot stays on a GPU that has room.
        before += sum(x.nbytes for x in state.tensors.values() if x.device.type == "cuda")
        held = in_use() - before
        with offloaded(engine) as moved:
            assert moved > 0
            assert in_use() - before <= STILL_HELD * held
        assert in_use() - before <= held
        assert same_bits(engine.snapshot(), state)
        loss = task.step(engine)
        engine.restore(state)
        assert task.step(engine) == loss

    def test_rollouts_have_the_log_probs_that_training_finds(self, task: Task, device: torch.device):
        engine = self.make_engine(task.directory, device)
        rollout = self.make_rollout(engine, task.directory, device)
        task.step(engine)
        generation = generate(rollout, engine, task.prompts)
        responses = Jagged(generation.responses.values.cpu(), generation.responses.lengths)
        assert responses.lengths.tolist() == [NUM_NEW_TOKENS] * task.prompts.rows
        batch = split(task.prompts, responses, token_budget=96, pad_id=0, packed=engine.packs)
        errors = (generation.log_probs.values.cpu() - log_probs(engine, batch, responses.lengths)).abs()
        assert float(errors.max()) < LARGEST_LOG_PROB_ERROR
        assert float(errors.mean()) < MEAN_LOG_PROB_ERROR

    def test_a_rollout_engine_generates_the_same_after_its_sleep(self, task: Task, device: torch.device):
        engine = self.make_engine(task.directory, device)
        rollout = self.make_rollout(engine, task.directory, device)
        first = generate(rollout, engine, task.prompts)
        slept = rollout.sleep()
        with offloaded(engine) if self.can_offload(engine) else nullcontext():
            pass
        assert rollout.wake() == slept
        again = generate(rollout, engine, task.prompts)
        assert torch.equal(first.responses.values, again.responses.values)
        assert torch.equal(first.log_probs.values, again.log_probs.values)


class EngineContract(EngineNumbers, SentWeights, BegunGradients):
    """Tests that every training engine passes. The tests of an engine are a subclass that sets `keys`, for example to
    `{"engine": "my_package.engines:mine"}`."""

    def test_an_offloaded_engine_refuses_what_needs_its_weights(
        self, task: Task, device: torch.device, tmp_path: Path
    ):
        engine = self.engine_that_offloads(task, device)
        engine.save(tmp_path / "checkpoint")
        before = engine.snapshot()
        uses: list[Callable[[], object]] = [
            lambda: task.log_probs(engine),
            lambda: task.step(engine),
            engine.snapshot,
            lambda: engine.restore(before),
            lambda: next(engine.full_tensors()),
            lambda: next(engine.rollout_weights()),
            lambda: engine.export(tmp_path / "export"),
            lambda: engine.save(tmp_path / "save"),
            lambda: engine.load(tmp_path / "checkpoint"),
        ]
        with offloaded(engine):
            for use in uses:
                with pytest.raises(EngineOffloaded, match="the engine is offloaded; bring it back first"):
                    use()
        assert same_bits(engine.snapshot(), before)
        assert {path.name for path in tmp_path.iterdir()} == {"checkpoint"}

    def test_an_engine_that_starts_over_is_a_new_one_in_the_same_memory(
        self, task: Task, device: torch.device
    ):
        engine = self.make_engine(task.directory, device)
        rollout = self.make_rollout(engine, task.directory, device)
        first, generated = engine.snapshot(), generate(rollout, engine, task.prompts)
        loss = task.step(engine)
        learned, in_use = engine.snapshot(), memory_meter(engine)
        held = in_use()
        assert not same_bits(learned, first)
        if self.can_offload(engine):
            take_off(engine)
            assert in_use() < held
        engine.start_over()
        assert in_use() <= held
        assert engine.snapshot().num_steps == 0
        assert same_bits(engine.snapshot(), first)
        again = generate(rollout, engine, task.prompts)
        assert torch.equal(again.responses.values, generated.responses.values)
        assert torch.equal(again.log_probs.values, generated.log_probs.values)
        assert task.step(engine) == loss
        assert same_bits(engine.snapshot(), learned)

    def test_an_engine_whose_directory_is_gone_does_not_start_over(
        self, task: Task, device: torch.device, tmp_path: Path
    ):
        directory = tmp_path / "model"
        shutil.copytree(task.directory, directory)
        engine = self.make_engine(directory, device)
        task.step(engine)
        learned = engine.snapshot()
        (directory / "model.safetensors").unlink()
        with pytest.raises((ValueError, FileNotFoundError)):
            engine.start_over()
        assert same_bits(engine.snapshot(), learned)

    def test_a_rank_that_fails_in_what_all_ranks_have_agreed_on_is_out_of_step(
        self, task: Task, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        engine = self.sharded_engine(task, device)
        task.step(engine)
        engine.save(tmp_path / "checkpoint")

        def fail(_: object) -> None:
            raise ValueError("no memory")

        monkeypatch.setattr(engine, "restore", fail)
        for take_over in (engine.start_over, partial(engine.load, tmp_path / "checkpoint")):
            with pytest.raises(OutOfStep, match=r"rank 0 failed alone in .*: ValueError: no memory"):
                take_over()

    @pytest.mark.parametrize("step", ["_allocate", "_grow"])
    def test_an_engine_stays_where_it_is_when_memory_runs_out_on_its_way(
        self, step: str, task: Task, device: torch.device, monkeypatch: pytest.MonkeyPatch
    ):
        engine = self.sharded_engine(task, device)
        if not self.offloads:
            pytest.skip("the engine does not offload")
        task.step(engine)
        state, in_use = engine.snapshot(), memory_meter(engine)
        held = in_use()
        num_storages = len(offload.copy_to_host(engine._resident()))
        if step == "_grow":
            take_off(engine)
        there = in_use()
        for number in range(num_storages):
            with memory_for(number, step, monkeypatch), pytest.raises(torch.OutOfMemoryError):
                (take_off if step == "_allocate" else ShardedEngine.onload)(engine)
            assert in_use() == there
        if step == "_grow":
            with pytest.raises(EngineOffloaded):
                engine.snapshot()
            engine.onload()
        assert in_use() == held
        assert same_bits(engine.snapshot(), state)

    @pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16], ids=str)
    def test_the_same_weights_are_exported_as_the_same_bits_by_every_engine(
        self, dtype: torch.dtype | None, task: Task, device: torch.device, tmp_path: Path
    ):
        weights = load_causal_lm(task.directory, dtype or torch.float32).state_dict()
        expected = tensors_sha256(sorted(weights.items()))
        exported = self.make_engine(task.directory, device).export(tmp_path / "export", dtype=dtype)
        assert exported == expected
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
        assert loaded.dtype == (dtype or torch.float32)
        assert tensors_sha256(sorted(loaded.state_dict().items())) == expected

    def test_what_is_exported_are_the_weights_that_the_optimizer_has(
        self, task: Task, device: torch.device, tmp_path: Path
    ):
        engine = self.make_engine(task.directory, device)
        task.step(engine)
        engine.save(tmp_path / "checkpoint")
        engine.export(tmp_path / "export")
        exported = load_causal_lm(tmp_path / "export").state_dict()
        saved = {f"weight.{key}": WeightShard.of_whole(torch.zeros_like(x)) for key, x in exported.items()}
        read_shards(tmp_path / "checkpoint", 1, saved)
        assert all(torch.equal(saved[f"weight.{key}"].tensor, x) for key, x in exported.items())
        assert not all(torch.equal(x, x.bfloat16().float()) for x in exported.values())
