"""Writes the checkpoints of a run: state of the services and of the controller after the same step, committed as one;
and its journal after every step."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any

from controller.checkpoints.digests import Digest
from controller.checkpoints.journal import Journal, content_of
from controller.checkpoints.retention import to_remove
from controller.checkpoints.store import CheckpointStore
from controller.checkpoints.termination import Termination
from controller.config.checkpoint import CheckpointTable
from controller.role_groups.futures import on_thread, results
from controller.role_groups.group import RoleGroup
from controller.tracking.marks import Mark
from controller.tracking.run_directory import json_text, writing
from rlhf.errors import ConfigError
from rlhf.plugins import nearest
from rlhf.v1 import worker_pb2

CLOSE_S = 20.0
"""Longest time, in seconds, that a run which ends with an error waits for the checkpoint that is being written."""


class Checkpointer:
    """Writes the checkpoints and the journal of a run, and removes checkpoints that are no longer kept.

    Args:
        table: Settings of the checkpoints.
        store: Directory of the checkpoints.
        groups: Role groups of the services whose state training changes, by name.
        facts: Facts that the results of the run depend on, as JSON values; see `controller.checkpoints.facts`.
        journal: Journal of the run.
        states: Function that returns the id of the state of each service after its last call, by name.
        mark: Function that returns the marks at the present ends of the files that the run appends to.
        say: Called with a line of text for each checkpoint.
        termination: Handlers of SIGTERM of this process.
    """

    def __init__(
        self,
        table: CheckpointTable,
        store: CheckpointStore,
        groups: Mapping[str, RoleGroup],
        facts: Mapping[str, Any],
        journal: Journal,
        states: Callable[[], Mapping[str, str]],
        mark: Callable[[], Mapping[str, Mark]],
        say: Callable[[str], None],
        termination: Termination,
    ) -> None:
        self._table = table
        self._store = store
        self._groups = groups
        self._facts = facts
        self._journal = journal
        self._states = states
        self._mark = mark
        self._say = say
        self._termination = termination
        self._commits = store.commits()
        self._writing: Future[None] = Future()
        self._writing.set_result(None)

    def begin(self, state: Callable[[], Mapping[str, Any]]) -> None:
        """Notes that the steps of the run begin, so that from now on SIGTERM is a request for a checkpoint.

        Args:
            state: Function that returns the state of the run as JSON values; it is called now, so that state that
                no checkpoint can hold is found before the first step.
        """
        state()
        self._termination.grace_s = self._table.grace_s

    def after_step(
        self,
        step: int,
        metrics: Mapping[str, float],
        state: Callable[[], Mapping[str, Any]],
        *,
        known: Collection[str],
        is_last: bool,
        is_cut: bool = True,
        verify: Callable[[], None] = lambda: None,
    ) -> None:
        """Writes the journal, and begins the checkpoint of a step if it is due or SIGTERM was received. Later steps may
        run while the checkpoint is written. No call that changes a service may be running.

        Args:
            step: Number of the step.
            metrics: Metrics of the step by name.
            state: Function that returns the state of the run after the step, as JSON values.
            known: Names of all metrics that the run has had so far.
            is_last: Whether this is the last step of the run.
            is_cut: Whether nothing of a later step is under way. Without it, the run could not go on from the step with
                the same results, so the journal is not written.
            verify: Verifies the weights of the services before a checkpoint that only SIGTERM asks for; those that are
                due by the config (`is_due`) are the caller's to verify. Default: they are not verified.

        Raises:
            ConfigError: No metric is named `checkpoint.best`.
            RlhfError: A service or the controller could not write this checkpoint or the one before; earlier ones are
                as before.
            KeyboardInterrupt: SIGTERM has come, and the checkpoint is written.
        """
        best = self._table.best
        if best and best not in known:
            raise ConfigError(
                f"checkpoint.best: the run has no metric {best!r}{nearest(best, known)}; it has: "
                f"{', '.join(sorted(known))}"
            )
        if self._writing.done():
            self._writing.result()
        content = content_of(step, state(), self._mark(), self._states())
        # Read once: a request that comes after this has its checkpoint after the next step.
        is_requested = self._termination.is_requested
        if is_cut or is_requested:
            self._journal.write(content)
        is_due = self.is_due(step, is_last=is_last)
        if is_requested and not is_due:
            verify()
        if is_requested or is_due:
            self._save(content, metrics)
        if is_requested:
            self.settle()
            self._termination.end_if_requested()
        if is_last:
            self._termination.grace_s = 0.0

    def settle(self) -> None:
        """Waits for the checkpoint that is being written, if any. Raises RlhfError where it could not be written."""
        self._writing.result()

    def close(self) -> None:
        """Waits up to `CLOSE_S` for the checkpoint that is being written, and not at all where the grace period after
        SIGTERM is over; raises no error."""
        wait([self._writing], 0 if self._termination.is_overdue else CLOSE_S)

    def is_due(self, step: int, *, is_last: bool) -> bool:
        """Returns whether the config asks for a checkpoint of a step."""
        table = self._table
        return bool(table.every and step % table.every == 0) or (is_last and table.at_end)

    def _save(self, content: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Tells the services to copy their state, and writes the copies and the controller's own state, `content`, on
        a thread, after the checkpoint before is complete. The copy of one checkpoint at most is in memory.

        Nothing is waited for: a service copies its state in call order, and so before any later call can change it."""
        self.settle()
        step = content["step"]
        partial = self._store.begin(step)
        try:
            for name in self._groups:
                # Hosts of NFS remember for a while that a directory was missing when a rank looked for it.
                with writing(partial, name):
                    (partial / name).mkdir()
            calls = [
                group.save_checkpoint(
                    str(partial / name), worker_pb2.CHECKPOINT_FORMAT_SHARDED, in_background=True
                )
                for name, group in self._groups.items()
            ]
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        text = json_text({**content, "facts": self._facts}, indent=1) + "\n"
        best = metrics.get(self._table.best)
        value = None if best is None else float(best)
        copies = [call for batch in calls for call in batch.calls]
        self._writing = on_thread(lambda: self._complete(step, copies, text, value), "checkpoint")

    def _complete(self, step: int, copies: Sequence[Future[Any]], state: str, value: float | None) -> None:
        """Waits until all services have copied their state and written their files, and commits the checkpoint; then
        removes those that are no longer kept."""
        partial = self._store.partial(step)
        try:
            results(copies)
            waits = {
                name: group.await_checkpoint(str(partial / name)) for name, group in self._groups.items()
            }
            written = {
                f"{name}/{file.path}": Digest(file.size, file.sha256)
                for name, responses in zip(waits, results(list(waits.values())), strict=True)
                for response in responses
                for file in response.files
            }
            commit = self._store.commit(step, state, written, self._table.best, value)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        self._commits = [*(each for each in self._commits if each.step != step), commit]
        for old in to_remove(self._commits, self._table):
            self._store.remove(old)
            self._commits = [each for each in self._commits if each.step != old]
        self._say(f"checkpoint: {self._store.place(step)}")
