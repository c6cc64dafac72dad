"""The loop over the training steps: begins up to `run.ahead` steps before the oldest has ended, and ends them in
order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from client.gate import Gate, Patience
from client.session import works_for_a_step
from controller.checkpoints.saver import Checkpointer
from controller.config.rollout import RolloutTable
from controller.config.run import RunTable
from controller.role_groups.cluster import Cluster
from controller.role_groups.futures import on_thread, resolved, results
from controller.tracking.recorder import Recorder
from controller.training.deferral import Deferral
from controller.training.evaluation import Evaluation, Evaluator
from controller.training.feed import Feed
from controller.training.rollouts import rollout_rows
from controller.training.staleness import staleness_metrics
from controller.training.state import RunState
from controller.training.step import Step
from controller.training.step_metrics import StepMetrics
from controller.training.verification import WeightVerifier
from reports.units import counted
from rlhf.errors import InvalidRequest, RlhfError


@dataclass
class OpenStep:
    """A step that has begun and not ended.

    Attributes:
        step: The step.
        gate: Holds back its calls to services that learn; None if steps do not overlap.
        started_s: Unix time of its start, in seconds.
        feed: Position in the data after its last prompt, as JSON values; empty before the next step begins.
        kept: Future of the algorithm's state after the step; None if steps do not overlap.
        left_out: Metrics with the number of rows left out up to its last prompt.
        metrics: Its metrics; empty before its calls have ended.
        evaluated: Future of the metrics of its evaluation; None where it has none.
    """

    step: Step
    gate: Gate | None
    started_s: float
    feed: dict[str, Any] = field(default_factory=dict)
    kept: Future[dict[str, Any]] | None = None
    left_out: dict[str, int] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    evaluated: Future[dict[str, float]] | None = None

    @property
    def segment_gates(self) -> Sequence[Gate]:
        """Gates of the segments of its responses after the first."""
        return self.step.context.segment_gates

    def generate(self, last: int) -> None:
        """Begins the calls that generate its segments up to number `last`, and those that need them."""
        for gate in self.segment_gates[: max(last, 0)]:
            gate.open()


class StepLoop:
    """Begins and ends the steps of a run.

    With `run.ahead` = k, calls of step N on services that learn, but generation, wait behind the gate of the step until
    step N + k makes its first such call or waits for a result, and so has generated. Where responses have several
    segments, segment n of step N is generated when step N + n has generated its first, and calls that need it wait as
    long; or when the algorithm waits for such a result. So every call enters the order of calls at a place that
    depends on the algorithm and the configuration alone, not on times.

    Args:
        table: Settings of the run.
        rollout: Settings of generation: numbers of segments of a response and of chunks of rows.
        cluster: Connected services.
        recorder: Records calls and metrics.
        feed: Draws prompts and texts.
        metrics: Computes the metrics of a step.
        evaluator: Evaluates held-out rows.
        verifier: Verifies weights.
        state: State of the run, changed as steps end.
        checkpointer: Writes checkpoints; None: none are written.
    """

    def __init__(
        self,
        table: RunTable,
        rollout: RolloutTable,
        cluster: Cluster,
        recorder: Recorder,
        feed: Feed,
        metrics: StepMetrics,
        evaluator: Evaluator,
        verifier: WeightVerifier,
        state: RunState,
        checkpointer: Checkpointer | None,
    ) -> None:
        self._table, self._segments, self._cluster = table, rollout.segments, cluster
        self._recorder, self._feed = recorder, feed
        self._metrics, self._evaluator, self._verifier = metrics, evaluator, verifier
        self._state, self._checkpointer = state, checkpointer
        self._deferral = Deferral() if table.ahead or rollout.chunks > 1 else None
        self._open: deque[OpenStep] = deque()
        self._evaluating: OpenStep | None = None
        self._thread = threading.get_ident()
        self._ended_s = 0.0
        self._last = table.steps

    def steps(self, evaluation: Evaluation) -> Iterator[Step]:
        """Iterates over the steps after that of `state`; see `Run.steps`."""
        self._thread = threading.get_ident()
        self._evaluator.is_recorded = True
        if self._evaluator.has_stalled:
            self._last = self._state.step
        try:
            for number in range(self._state.step + 1, 1 if self._state.is_ended else self._table.steps + 1):
                while len(self._open) > self._overlap(number):
                    self._end_oldest(evaluation)
                if number > self._last:
                    break
                opened = self._begin(number, evaluation)
                yield opened.step
                self._passed(opened)
                if self._is_last(opened.step):
                    break
            while self._open:
                self._end_oldest(evaluation)
        finally:
            self.close()

    def close(self) -> None:
        """Makes all calls fail that gates hold back, so that no thread waits for their results. Does not wait."""
        for opened in self._open:
            for gate in (*opened.segment_gates, *([opened.gate] if opened.gate else [])):
                gate.drop(RlhfError(f"step {opened.step.number}: the run has ended before this call"))
        if self._deferral:
            self._deferral.close()

    def _overlap(self, number: int) -> int:
        """Returns how many earlier steps may be open when a step begins: none after a checkpoint, from which a resumed
        run begins with nothing under way."""
        saver = self._checkpointer
        return 0 if saver and saver.is_due(number - 1, is_last=False) else self._table.ahead

    def _begin(self, number: int, evaluation: Evaluation) -> OpenStep:
        if not self._open:
            # Resets the measurement: use by an evaluation before the step does not count.
            self._cluster.device_use()
        gate = Gate(partial(self._reached, number, evaluation)) if self._table.ahead else None
        gates = [Gate(partial(self._segment_needed, number)) for _ in range(self._segments - 1)]
        context, started = self._cluster.session.begin_step(number, gate, gates), self._cluster.session.now()
        draw, texts = self._feed.next_prompts, self._feed.next_texts()
        step = Step(context, draw, texts, self._deferral, overlaps=self._table.ahead > 0)
        self._open.append(opened := OpenStep(step, gate, started))
        return opened

    def _passed(self, opened: OpenStep) -> None:
        """Notes the state of the run after the part of a step that the algorithm has executed.

        Raises:
            InvalidRequest: The algorithm did not call `Step.finish`.
        """
        step = opened.step
        if not (step.is_finished and step.calls):
            raise InvalidRequest(f"the algorithm did not call step.finish in step {step.number}")
        opened.left_out = dict(self._feed.left_out)
        if self._table.ahead:
            opened.feed = self._feed.state()
        if self._table.ahead and self._deferral and self._checkpointer:
            # With no deferred function under way, this thread changes the state, so it is copied before the next step.
            is_own = self._deferral.is_idle
            kept = self._state.kept.state
            opened.kept = resolved(kept()) if is_own else self._deferral.submit(kept)

    def _reached(self, number: int, evaluation: Evaluation, needs_kept: bool) -> Patience | None:
        """Called before step `number` holds back a call to a service that learns, or waits for a result. Opens the gate
        of the oldest open step if it is at least `run.ahead` steps older. If the result depends on calls that are held
        back (`needs_kept`), also ends all earlier steps, with their evaluations, and begins these calls. On another
        thread, does nothing and returns `_patience`."""
        if threading.get_ident() != self._thread:
            return self._patience(needs_kept)
        self._generate_due(number)
        self._finish_evaluation()
        oldest = self._open[0]
        if oldest.gate and oldest.step.number <= number - self._table.ahead:
            oldest.gate.open()
        if needs_kept:
            while self._open[0].step.number < number:
                self._end_oldest(evaluation)
            # An evaluation of the last of them is of the weights before the calls that begin now.
            self._finish_evaluation()
            if gate := self._open[0].gate:
                gate.flush()
        return None

    def _patience(self, needs_kept: bool) -> Patience | None:
        """Returns how long a thread of the algorithm's own waits: if it needs calls that are held back (`needs_kept`),
        which the loop over the steps begins if it goes on, until no call of an open step has begun or ended for the
        longest timeout of a call; else None. The threads of the run itself have no limit, as the loop never waits for
        them before."""
        if not needs_kept or works_for_a_step():
            return None
        return Patience(max(self._table.call_timeout_s, self._table.save_timeout_s), self._progress)

    def _progress(self) -> object:
        """Returns the numbers of the open steps, and of the calls that were made or have ended in each."""
        steps = [opened.step.context for opened in (*self._open, self._evaluating) if opened]
        return [(step.number, step.num_changes) for step in steps]

    def _segment_needed(self, number: int, is_awaited: bool) -> Patience | None:
        """Called before the algorithm waits for a result of step `number`. If the result depends on segments that are
        held back (`is_awaited`), generates the remaining segments of the step, after the due segments of earlier
        steps. On another thread, does nothing and returns `_patience`."""
        if threading.get_ident() != self._thread:
            return self._patience(is_awaited)
        if is_awaited:
            self._generate_due(number)
            for opened in self._open:
                if opened.step.number == number:
                    opened.generate(self._segments - 1)
        return None

    def _generate_due(self, number: int) -> None:
        """Generates the segments of open steps that are due once step `number` has generated its first segment."""
        for opened in self._open:
            opened.generate(number - opened.step.number)

    def _end_oldest(self, evaluation: Evaluation) -> None:
        """Waits for the calls of the oldest open step. If no evaluation is due, ends the step. Otherwise begins the
        evaluation; later steps run concurrently with it until their first update."""
        self._finish_evaluation()
        opened = self._open.popleft()
        step, number = opened.step, opened.step.number
        opened.generate(self._segments - 1)
        if opened.gate:
            opened.gate.open()
        step.wait()
        step.context.raise_unread()  # of calls that have failed by now, before anything is evaluated
        now_s = self._cluster.session.now()
        seconds = now_s - max(opened.started_s, self._ended_s)
        self._recorder.calls(number, step.records, step.batch.rows)
        opened.metrics = self._metrics.of(step, seconds, opened.left_out)
        opened.metrics |= staleness_metrics(step.batch, step.records, self._metrics.sources)
        if (every := self._table.rollouts_every) and number % every == 0:
            self._recorder.rollouts(number, rollout_rows(step.batch))
        self._evaluating = opened
        every = self._table.evaluate_every
        if self._is_last(step) or (every and number % every == 0):
            work = partial(self._evaluator.evaluate, step.context, evaluation)
            if self._open:
                opened.evaluated = on_thread(work, "evaluation")
                self._ended_s = now_s  # later steps go on meanwhile
                return
            opened.metrics |= work()
        self._finish_evaluation()

    def _finish_evaluation(self) -> None:
        """Ends the step whose calls have ended, if there is one: waits for its evaluation, frees its rows, records its
        metrics and begins its checkpoint."""
        opened, self._evaluating = self._evaluating, None
        if opened is None:
            return
        step, number = opened.step, opened.step.number
        metrics = opened.metrics | (results([opened.evaluated])[0] if opened.evaluated else {})
        if self._evaluator.has_stalled:
            self._end_after((self._open[-1] if self._open else opened).step.number)
        is_last = self._is_last(step)
        self._cluster.end_step(step.context)
        self._verifier.after_step(number, is_last=is_last)
        self._recorder.step(number, metrics)
        kept = results([opened.kept])[0] if opened.kept else None
        self._state.passed(number, is_ended=step.is_last, feed=opened.feed, kept=kept)
        if self._checkpointer:
            self._checkpointer.after_step(
                number,
                metrics,
                self._state.to_json,
                known=self._recorder.metric_names,
                is_last=is_last,
                is_cut=not self._open,
                verify=self._verifier.verify,
            )
        if not opened.evaluated:
            self._ended_s = self._cluster.session.now()

    def _end_after(self, number: int) -> None:
        """Makes a step, the newest that has begun, the last of the run, for `run.patience`."""
        if number < self._last:
            self._last = number
            self._recorder.progress.message(
                f"run.patience: {counted(self._table.patience, 'evaluation')} in a row without a better value of "
                f"checkpoint.best; the run ends after step {number}"
            )

    def _is_last(self, step: Step) -> bool:
        return step.is_last or step.number == self._last
