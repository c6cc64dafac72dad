"""Records the dataflow of an algorithm by executing one step of its code with placeholder services."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from client.session import StepContext
from controller.config.config import Config
from controller.mapping.dataflow import SYNC, Call
from controller.role_groups.dataflow import CallRecord, FutureBatch
from controller.role_groups.futures import resolved
from controller.role_groups.group import RoleGroup, inputs_of
from controller.role_groups.joint_calls import JointCalls
from controller.role_groups.roles import group_type
from controller.simulation.rows import PER_ROW, TEXTS
from controller.simulation.run import input_form
from controller.training.algorithm import Algorithm
from controller.training.evaluation import Evaluation
from controller.training.run import Run
from controller.training.step import Step
from nccl_transfer.refs.batch import Column, LocalColumn, lengths_of
from nccl_transfer.refs.columns import Jagged
from rlhf.contract import group_methods
from rlhf.errors import ConfigError, RlhfError
from rlhf.v1 import worker_pb2
from settings.service import ServiceTable

TOKENS = 2
"""Tokens of a placeholder response."""


@dataclass(frozen=True, eq=False)
class MadeColumn(LocalColumn):
    """A column that call number `made_by` of the step made."""

    made_by: int = 0

    def take(self, rows: np.ndarray | slice) -> LocalColumn:
        """Returns a column of the selected rows, made by the same call."""
        return MadeColumn(super().take(rows).values, self.made_by)


class CallLog:
    """The calls that an algorithm has made so far."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._outputs: list[tuple[str, ...]] = []
        self._fetched: set[int] = set()

    def record(
        self, service: str, method: str, rows: int, inputs: dict[str, Column], outputs: tuple[str, ...]
    ) -> int:
        """Records a call and returns its number."""
        makers = {name: self._makers(name, column) for name, column in inputs.items()}
        others = {
            name
            for name, made in makers.items()
            if not made or any(self.calls[number].service != service for number in made)
        }
        after = {number for made in makers.values() for number in made}
        self.calls.append(Call(service, method, rows, tuple(sorted(others)), tuple(sorted(after))))
        self._outputs.append(outputs)
        return len(self.calls) - 1

    def sync(self, source: str, receivers: Sequence[str]) -> None:
        """Records that a service's weights move to others after its last call."""
        last = max(number for number, call in enumerate(self.calls) if call.service == source)
        for service in (source, *receivers):
            self.calls.append(Call(service, SYNC, 0, (), (last,)))
            self._outputs.append(())

    def fetch(self, columns: dict[str, Column]) -> None:
        """Records that the controller reads columns, so that those that it makes from now on depend on them."""
        for name, column in columns.items():
            self._fetched |= self._makers(name, column)

    def _makers(self, name: str, column: Column) -> set[int]:
        """Returns the numbers of the calls that a column depends on: of the one that made it, or of the newest that
        made one of this name; for a column of the controller's, those of the columns that it has read."""
        if isinstance(column, MadeColumn):
            return {column.made_by}
        for number in reversed(range(len(self._outputs))):
            if name in self._outputs[number]:
                return {number}
        return set(self._fetched) if self._fetched and name not in GIVEN else set()


GIVEN = (
    *("prompt", "ground_truth", "metadata", "source", "group", "prompt_number", "pretrain_text", "text"),
    "response_tokens",
)
"""Columns of the data, which depend on no call, and the lengths of responses, which are there when these are."""


def made_up(name: str, rows: int) -> np.ndarray | Jagged[np.ndarray] | list[str]:
    """Returns values for an output of a method: texts, one number per row, or one per response token, which differ
    from row to row. All responses have ended."""
    if name == "turn_end":
        return ["stop"] * rows
    if name in TEXTS:
        return [""] * rows
    numbers = np.arange(rows, dtype=np.float64) % 7 / 7
    if name in PER_ROW:
        return numbers
    values = np.repeat(numbers, TOKENS)
    return Jagged(
        values.astype(np.int32 if name.endswith("_ids") else np.float32), np.full(rows, TOKENS, np.int64)
    )


class RecordedGroup(RoleGroup):
    """Role group that records its calls and returns placeholder columns. Combined with the group type of a role."""

    def __init__(self, name: str, table: ServiceTable, role: str, log: CallLog) -> None:
        self.name = name
        self.description = worker_pb2.DescribeResponse(role=role, input_form=input_form(table))
        self._methods = group_methods(role)
        self._log = log
        # All that `sync_weights` reads of a group.
        self.ranks, self.session = cast(Any, object()), cast(Any, _Timeless())

    def call(
        self,
        name: str,
        batch: FutureBatch | None = None,
        outputs: Sequence[str] | None = None,
        **options: Any,
    ) -> FutureBatch:
        """Records a call; see `RoleGroup.call`, also for what is raised."""
        method, batch = self._methods[name], batch or FutureBatch(0, {})
        read = inputs_of(self.name, method, batch)
        inputs = dict(read.result(read.columns).columns)
        asked = tuple(method.outputs if outputs is None else outputs)
        number = self._log.record(self.name, name, batch.rows, inputs, asked)
        done = resolved(CallRecord(self.name, name, 0.0, 0.0, {}, 0, ()))
        columns: dict[str, Any] = {
            output: resolved(MadeColumn(made_up(output, batch.rows), number)) for output in asked
        }
        return FutureBatch(batch.rows, columns, (done,), batch.step)

    def call_with(
        self,
        others: Sequence[RoleGroup],
        calls: JointCalls,
        longest_s: float,
        of: StepContext | None = None,
        *,
        beside: bool = False,
    ) -> FutureBatch:
        """Records a transfer of weights to other groups; see `RoleGroup.call_with`."""
        self._log.sync(self.name, [group.name for group in others])
        done = resolved(CallRecord(self.name, SYNC, 0.0, 0.0, {}, 0, ()))
        return FutureBatch(0, {}, (done,), of)


class _Timeless:
    """A session in which no call takes time."""

    def time_of(self, name: str) -> float:
        """Returns 0."""
        return 0.0


class RecordingRun(Run):
    """Run of one step that records the calls of an algorithm. Its role groups return placeholder columns, and no
    service is called.

    Args:
        config: Configuration of the run, as `Algorithm.configure` returned it.
        log: Records the calls.
        texts: Names of the texts of a row.
    """

    def __init__(self, config: Config, log: CallLog, texts: Sequence[str]) -> None:
        self.config = config
        self._texts = texts
        self._log = log
        self._player = None  # an episode is recorded as one call
        self._step = StepContext(1)
        roles = {name: table.role for name, table in config.services.items()} | {
            role: role for role in config.also_served
        }
        self._groups = {
            name: self._group(name, role, config.services[config.also_served.get(name, name)], log)
            for name, role in roles.items()
        }

    @staticmethod
    def _group(name: str, role: str, table: ServiceTable, log: CallLog) -> RoleGroup:
        kind = type("Recorded", (RecordedGroup, group_type(role)), {})
        return kind(name, table, role, log)

    @property
    def groups(self) -> dict[str, RoleGroup]:
        """The groups, by name of the service."""
        return self._groups

    def group(self, name: str, kind: type[Any]) -> Any:
        """Returns the group of a service. Raises ConfigError where there is none, or it has another role."""
        found = self._groups.get(name)
        if not isinstance(found, kind):
            raise ConfigError(f"services.{name}: the algorithm needs a service of another role here")
        return found

    def step_of(self, batch: FutureBatch) -> StepContext:
        """Returns the step."""
        return self._step

    def steps(self, evaluation: Evaluation | None = None) -> Iterator[Step]:
        """Yields one step."""
        rows = self.config.rows_per_step
        texts = (
            FutureBatch.of(pretrain_text=[""] * rows) if self.config.data.pretrain else FutureBatch(rows, {})
        )
        yield Step(self._step, self._draw, texts)

    def _draw(self) -> tuple[FutureBatch, FutureBatch]:
        config = self.config
        numbers = np.arange(config.data.prompts_per_step)
        sources = [source.label for source in config.data.trained_sources]
        texts = {name: [""] * len(numbers) for name in self._texts}
        of_source = [sources[number % len(sources)] for number in numbers]
        prompts = FutureBatch.of(prompt_number=numbers, source=of_source, **texts)
        samples = config.rollout.samples_per_prompt
        return prompts.repeat(samples), FutureBatch.of(group=numbers).repeat(samples)

    @property
    def kept(self) -> dict[str, Any]:
        """No state: each step is the first."""
        return {}

    def keep(self, name: str, state: Any) -> Any:
        """Returns the state."""
        return state

    def lengths(self, batch: FutureBatch) -> np.ndarray:
        """Returns the lengths of responses [rows] int64."""
        columns = dict(batch.result(["response_ids"]).columns)
        self._log.fetch(columns)
        return lengths_of(columns["response_ids"])

    def fetch(self, batch: FutureBatch, *names: str) -> dict[str, Any]:
        """Returns the values of columns, by name."""
        columns = dict(batch.result(names).columns)
        self._log.fetch(columns)
        return {name: column.values for name, column in columns.items() if isinstance(column, LocalColumn)}


def record_dataflow(algorithm: Algorithm, config: Config) -> tuple[Call, ...]:
    """Executes one step of an algorithm with placeholder services, and returns its calls in the order in which the
    algorithm makes them. The step is one after the critics' warm-up.

    Args:
        algorithm: The algorithm, of this project or of a plug-in.
        config: Configuration of the run, as `algorithm.configure` returned it.

    Raises:
        ConfigError: The algorithm failed on columns that are made up, or makes no calls.
    """
    log = CallLog()
    run: Callable[[Run], None] = algorithm
    try:
        config = config.without_critic_warmup()
        run(RecordingRun(config, log, ("prompt", "ground_truth", "metadata", *algorithm.columns)))
    except (RlhfError, ValueError, ArithmeticError, LookupError) as error:
        raise ConfigError(
            f"algorithm {algorithm.name}: a step with made-up columns failed: {error}"
        ) from error
    if not log.calls:
        raise ConfigError(f"algorithm {algorithm.name} makes no calls in a step")
    return tuple(log.calls)
