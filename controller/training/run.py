"""The run that an algorithm is given: its roles, its training steps, evaluation, and the export of the model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np

from client.session import AFTER_UPDATES, StepContext
from controller.advantage.shaping import ScoreMoments
from controller.checkpoints.saver import Checkpointer
from controller.config.config import Config
from controller.data.draws import Limit
from controller.data.prompts import PromptData, TextData
from controller.role_groups.cluster import Cluster
from controller.role_groups.dataflow import FutureBatch
from controller.role_groups.group import RoleGroup
from controller.role_groups.roles import (
    ActorGroup,
    CriticGroup,
    ReferenceGroup,
    RewardGroup,
    RolloutGroup,
    ValuesGroup,
)
from controller.tracking.metrics import Sample
from controller.tracking.recorder import Recorder
from controller.training.columns import ColumnReader, sampled_lengths
from controller.training.episodes import EpisodePlayer
from controller.training.evaluation import Evaluation, Evaluator
from controller.training.feed import Feed
from controller.training.loop import StepLoop
from controller.training.policy_evaluation import PolicyEvaluation
from controller.training.rewards import Failures, Reward
from controller.training.roles import Actor, Critic, Reference, RewardModel, Rollout
from controller.training.state import RunState
from controller.training.step import Step
from controller.training.step_metrics import StepMetrics
from controller.training.verification import WeightVerifier
from nccl_transfer.fetch import Fetcher
from nccl_transfer.registry import create_readers
from nccl_transfer.transports import host_id
from rlhf.errors import ConfigError, InvalidRequest
from rlhf.v1 import worker_pb2

G = TypeVar("G", bound=RoleGroup)
S = TypeVar("S")

MOMENTS = "reward_moments"
"""Name of the state that holds the moments of all rewards so far, with `algorithm.reward_normalization` running."""


class Run:
    """The run that the function of an algorithm is given, and `open_run` returns. Context manager that closes the run
    on exit.

    Args:
        config: Configuration of the run.
        data: Training prompts and held-out prompts.
        cluster: Connected services.
        recorder: Writes metrics, samples, timeline and progress.
        pretrain: Texts of data.pretrain. Default: none.
        limits: Limits on the length of prompts and of texts; None: any length.
        resources: Stack of what `close` closes beside the run's own connections, such as session and launched
            services. Default: empty.
        checkpointer: Writes the checkpoints of the run. Default: none are written.
        resumed: State of the run that it is resumed from, of a checkpoint. Default: the run begins.
        started_unix_s: Start of the run, Unix time in seconds, which chat templates may use. Default: now.

    Attributes:
        loader: Loader that draws the prompts.
    """

    def __init__(
        self,
        config: Config,
        data: tuple[PromptData, PromptData],
        cluster: Cluster,
        recorder: Recorder,
        pretrain: TextData | None = None,
        limits: tuple[Limit | None, Limit | None] = (None, None),
        resources: contextlib.ExitStack | None = None,
        checkpointer: Checkpointer | None = None,
        resumed: Mapping[str, Any] | None = None,
        started_unix_s: float | None = None,
    ) -> None:
        self.config = config
        self.recorder = recorder
        self._cluster = cluster
        self._feed = Feed(config, data[0], pretrain, limits)
        self.loader = self._feed.loader
        self._metrics = StepMetrics(cluster)
        self._evaluator = Evaluator(config, data[1], limits[0], cluster, recorder)
        self._state = RunState(self._feed, self._metrics, self._evaluator)
        if resumed is not None:
            self._state.restore(resumed)
        if config.algorithm.reward_normalization == "running":
            self.keep(MOMENTS, ScoreMoments())
        self._checkpointer = checkpointer
        self._verifier = WeightVerifier(config.run.verify_every, cluster, checkpointer)
        fetcher = Fetcher(host_id(), create_readers())
        self._columns = ColumnReader(fetcher, cluster.session, config.run.call_timeout_s)
        self._resources = resources or contextlib.ExitStack()
        self._resources.callback(self._columns.close)
        self._player = EpisodePlayer.of(config, self._resources, started_unix_s)
        self._loop = StepLoop(
            config.run,
            config.rollout,
            cluster,
            recorder,
            self._feed,
            self._metrics,
            self._evaluator,
            self._verifier,
            self._state,
            checkpointer,
        )
        self._resources.callback(self._loop.close)

    @property
    def kept(self) -> Mapping[str, Any]:
        """State that the algorithm registered with `keep`, by name."""
        return self._state.kept.states

    @property
    def directory(self) -> Path:
        """Path of the run directory."""
        return self.recorder.path

    def actor(self, name: str = "actor") -> Actor:
        """Returns an `Actor` that calls service `name`, and, to generate, the rollout service that the configuration
        has for it (`Config.generators`); raises ConfigError as `group`."""
        generator, group = self.config.generators.get(name), self.group(name, ActorGroup)
        rollout = self.group(generator, RolloutGroup) if generator else None
        return Actor(group, self.config, step_of=self.step_of, rollout=rollout, **_options(self))

    def rollout(self, name: str = "rollout") -> Rollout:
        """Returns a `Rollout` that calls service `name`; raises ConfigError as `group`."""
        return Rollout(self.group(name, RolloutGroup), self.config, **_options(self))

    def reconnect(self, name: str) -> None:
        """Takes a rollout service that was restarted into the run again; see `Cluster.reconnect`. The service `rollout`
        has the weights of `actor` then; others get theirs by `Actor.sync_weights`."""
        self._cluster.reconnect(name)
        self._cluster.fill_receivers()

    def critic(self, name: str = "critic") -> Critic:
        """Returns a `Critic` that calls service `name`, and, for values, the service that the configuration has for it
        (`Config.valuers`); raises ConfigError as `group`."""
        values = self.group(self.config.valuers.get(name, name), ValuesGroup)
        return Critic(self.group(name, CriticGroup), self.config, self.step_of, values)

    def reference(self, name: str = "reference") -> Reference:
        """Returns a `Reference` that calls service `name`, or the actor without its adapters where it is the reference.
        Raises ConfigError where the run has no such service, or its role is another."""
        return Reference(self.group(name, ReferenceGroup), self.config)

    def reward(self, name: str = "reward") -> Reward:
        """Returns a `Reward` for the reward or cost `name`: the service of this name, or the weighted sum of services
        in `[rewards]`. Raises ConfigError where the run has no such service, or its role is another."""
        recipes = self.config.recipes(name)
        parts = {part: self.group(part, RewardGroup) for recipe in recipes.values() for part in recipe}
        sources = [each.label for each in self.config.data.trained_sources]
        return Reward(name, parts, recipes, Failures.of(self.config.algorithm), self.step_of, sources)

    def reward_model(self, name: str = "reward") -> RewardModel:
        """Returns a `RewardModel` that calls service `name`, which must be a reward that learns. Raises ConfigError
        where the run has no such service, or its role is another."""
        return RewardModel(self.group(name, RewardGroup), self.config)

    def group(self, name: str, kind: type[G]) -> G:
        """Returns the role group of service `name`, whose methods call all of its ranks, for roles of other packages.
        Raises ConfigError where the run has no such service, or its role has another group than `kind`."""
        group = self._cluster.group(name)
        if not isinstance(group, kind):
            role = kind.__name__.removesuffix("Group").lower()
            raise ConfigError(
                f"services.{name}: the algorithm needs role {role} here, not {group.description.role}"
            )
        return group

    @property
    def groups(self) -> Mapping[str, RoleGroup]:
        """Role groups of the configured services, by name."""
        return self._cluster.groups

    def step_of(self, batch: FutureBatch) -> StepContext:
        """Returns the step that calls on these rows belong to: `batch.step`, or the step begun last where that is None
        or has ended."""
        return self._cluster.session.step_of(batch.step)

    def steps(self, evaluation: Evaluation | None = None) -> Iterator[Step]:
        """Iterates over the training steps. Evaluates before step 1, between steps as `run.evaluate_every` says, and
        after the last: number `run.steps`, or one on which the algorithm called `Step.stop`. When the next step is
        requested, waits until at most `run.ahead` steps have not ended, frees the rows of those that have, and begins
        their checkpoints if some are due, which are written while later steps run. A resumed run begins with the step
        after its checkpoint, without an evaluation before it.

        Args:
            evaluation: Measures the held-out rows. Default: `policy_evaluation`.

        Raises:
            InvalidRequest: The algorithm did not call `Step.finish`.
            ConfigError: The algorithm keeps other state than the checkpoint has, or state that one cannot hold; or no
                metric is named `checkpoint.best`.
            RlhfError: This checkpoint or the one before it could not be written, or weights are corrupt.
            KeyboardInterrupt: SIGTERM has come, and the checkpoint of the step is written.
        """
        session, state = self._cluster.session, self._state
        state.kept.check_complete()
        evaluation = evaluation or self.policy_evaluation()
        if not state.step:
            metrics = self._evaluator.evaluate(session.newest, evaluation)
            self._cluster.end_step(session.newest)
            self.recorder.step(session.newest.number, metrics)
        self._verifier.verify()
        if self._checkpointer:
            self._checkpointer.begin(state.to_json)
        yield from self._loop.steps(evaluation)

    def evaluate(self, evaluation: Evaluation | None = None) -> dict[str, float]:
        """Measures the held-out rows outside of `steps`, and returns the metrics, with prefix evaluation/. In the loop
        over the steps, call it after `Step.finish`: it frees the rows of the step, which later calls cannot read then.
        Before the first step of a resumed run nothing is recorded, since the run has done so.

        Args:
            evaluation: Measures the rows. Default: as for `steps`.
        """
        (newest := self._cluster.session.newest).reached(AFTER_UPDATES)
        return self._evaluator.evaluate(newest, evaluation or self.policy_evaluation())

    def policy_evaluation(self) -> Evaluation:
        """Returns the default `Evaluation`: the mean reward of responses as `rollout.evaluation` samples them, which
        needs a service reward."""

        def add(samples: Sequence[Sample]) -> None:
            self._evaluator.add_samples(samples)  # RecordingRun has no evaluator

        return PolicyEvaluation(self.config, self.groups, self.actor(), self.reward, add).evaluation()

    def keep(self, name: str, state: S) -> S:
        """Registers a dataclass that the algorithm changes from step to step, and returns it. Call it before `steps`.
        Checkpoints hold its fields, and in a resumed run they get the values of the checkpoint, in place.

        Args:
            name: Name of the state, unique in the run.
            state: A dataclass whose fields are numbers, texts, numpy arrays, lists and dictionaries of them, or such
                dataclasses.

        Raises:
            ConfigError: The checkpoint that the run is resumed from has no such state.
        """
        self._state.kept.add(name, state)
        return state

    def lengths(self, batch: FutureBatch) -> np.ndarray:
        """Returns `sampled_lengths` of a batch: the number of tokens of each response, without fetching them."""
        return sampled_lengths(batch)

    def fetch(self, batch: FutureBatch, *names: str) -> dict[str, Any]:
        """Waits for columns and returns copies of their values by name: an array, a jagged array or a list of texts
        each. Raises InvalidRequest for a column on the ranks that is not of floats, such as token ids."""
        return self._columns.fetch(batch, *names)

    def finish(self, trained: str = "actor") -> dict[str, Any]:
        """Exports the trained model to the run directory, writes `summary.json` and returns its figures by name. Waits
        for the export. Raises InvalidRequest where no step was finished.

        Args:
            trained: Name of the service that was trained.
        """
        totals = self._metrics
        if not totals.steps:
            raise InvalidRequest("the algorithm finished no step")
        if self._checkpointer:
            self._checkpointer.settle()
        group, directory = self.group(trained, RoleGroup), str(self.recorder.directory.output(trained))
        record = group.save_checkpoint(directory, worker_pb2.CHECKPOINT_FORMAT_HUGGING_FACE).records()[0]
        summary: dict[str, Any] = {
            **_before_and_after(self._evaluator.history),
            "steps": totals.steps,
            "tokens_per_s": totals.tokens / totals.seconds,
            "wall_s": self._state.wall_s,
            f"{trained}_sha256": record.responses[0].sha256,
            "heldout_prompts_left_out": self._evaluator.left_out,
            **{name.removeprefix("data/"): count for name, count in self._feed.left_out.items()},
        }
        self.recorder.summary(summary)
        return summary

    def close(self) -> None:
        """Closes the run; may be called again. For a run that `open_run` opened, ends the session, in which the rows
        on the ranks are freed, writes the report, and stops services that were launched."""
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._resources.__exit__(kind, error, trace)


def _before_and_after(history: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the metrics of the first and the last evaluation as NAME_before and NAME_after. One that the first lacks
    is left out; the last may lack one, such as a count of what went wrong."""
    both = {"before": history[0], "after": history[-1]}
    return {
        f"{name}_{when}": each[name] for name in history[0] for when, each in both.items() if name in each
    }


def _options(run: Run) -> dict[str, Any]:
    """Returns arguments of a `Rollout`: texts are returned where `wants_text` says so."""
    return {"returns_text": wants_text(run), "player": run._player}


def wants_text(run: Run) -> bool:
    """Returns whether a reward of the run scores text, or the responses of steps are written to files."""
    if run.config.run.rollouts_every:
        return True
    return any(isinstance(each, RewardGroup) and each.wants_text for each in run.groups.values())
