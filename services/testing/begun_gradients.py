"""The part of the contract of training engines that is about gradients that are begun before the step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from services.compute.heads import PolicyOutput
from services.compute.microbatch import MicroBatch
from services.compute.splitting import split
from services.engines.accumulating import AccumulatingEngine
from services.engines.base import TrainEngine
from services.testing.engine_task import HEAD, Task, same_bits


class BegunGradients:
    """Tests of `EngineContract`."""

    def make_engine(self, directory: Path, device: torch.device) -> TrainEngine:
        """As in `EngineContract`."""
        raise NotImplementedError

    def accumulating(self, task: Task, device: torch.device) -> tuple[AccumulatingEngine, list[MicroBatch]]:
        """Returns an engine as `make_engine`, and each row of the task as a micro-batch; skips the test unless the
        engine can accumulate."""
        engine = self.make_engine(task.directory, device)
        if not isinstance(engine, AccumulatingEngine):
            pytest.skip("the engine does not hold gradients between calls")
        each = (
            split(
                task.prompts,
                task.responses,
                token_budget=96,
                pad_id=0,
                rows=np.array([row]),
                packed=engine.packs,
            )
            for row in range(task.prompts.rows)
        )
        return engine, [micro_batch for row in each for micro_batch in row]

    def test_a_gradient_that_was_begun_before_the_step_makes_the_same_step(
        self, task: Task, device: torch.device
    ):
        engine, rows = self.accumulating(task, device)
        before = engine.snapshot()

        def loss(output: PolicyOutput, micro_batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
            value, _ = task.loss(output, micro_batch)
            return value, {"rows": torch.tensor(float(len(micro_batch.rows)))}

        whole, learned = engine.step(rows, HEAD, loss), engine.snapshot()
        assert whole.stats == {"rows": len(rows)}
        for early in (1, 4, len(rows)):
            engine.restore(before)
            engine.accumulate(rows[:1], HEAD, loss)
            task.log_probs(engine)
            engine.accumulate(rows[1:early], HEAD, loss)
            assert engine.holds_gradient
            assert same_bits(engine.snapshot(), before)
            assert engine.step(rows[early:], HEAD, loss) == whole
            assert not engine.holds_gradient
            assert same_bits(engine.snapshot(), learned)

    def test_a_gradient_that_was_begun_is_dropped_with_what_it_is_of(
        self, task: Task, device: torch.device, tmp_path: Path
    ):
        engine, rows = self.accumulating(task, device)
        engine.save(tmp_path / "checkpoint")
        before = engine.snapshot()
        whole = engine.step(rows, HEAD, task.loss)

        def fail(output: PolicyOutput, micro_batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
            raise ValueError("no loss")

        def failing(method: Callable[..., object]) -> None:
            with pytest.raises(ValueError, match="no loss"):
                method(rows[:1], HEAD, fail)

        def offload_and_back() -> None:
            engine.offload()
            engine.onload()

        ways: list[Callable[[], object]] = [
            engine.drop_gradient,
            engine.start_over,
            offload_and_back,
            lambda: engine.restore(before),
            lambda: engine.load(tmp_path / "checkpoint"),
            lambda: failing(engine.accumulate),
            lambda: failing(engine.step),
        ]
        for drops in ways:
            engine.restore(before)
            engine.accumulate(rows[:3], HEAD, task.loss)
            drops()
            assert not engine.holds_gradient
            assert engine.step(rows, HEAD, task.loss) == whole
