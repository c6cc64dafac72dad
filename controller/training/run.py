"""A run: the roles an algorithm works with, the steps it loops over, evaluation, and the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from client.session import StepContext
from controller.advantage import Advantage
from controller.config.config import Config
from controller.data.draws import Limit, draw, rows_that_fit
from controller.data.loader import Loader
from controller.data.prompts import Prompt, PromptData, TextData, columns_of
from controller.role_groups.cluster import Cluster
from controller.role_groups.dataflow import CallRecord, FutureBatch
from controller.role_groups.futures import results
from controller.role_groups.group import RoleGroup
from controller.role_groups.roles import ActorGroup, CriticGroup, ReferenceGroup, RewardGroup
from controller.tracking.recorder import Recorder
from controller.tracking.transfer import transfer_metrics
from controller.training.evaluation import Evaluation, batches, mean_of_scored, policy_evaluation, row_scores
from controller.training.parity import DriftCheck, parity_metrics
from controller.training.rewards import Failures, Reward
from nccl_transfer.fetch import Fetcher
from nccl_transfer.refs.batch import Batch, Column, LocalColumn
from nccl_transfer.refs.columns import Jagged
from nccl_transfer.refs.remote_column import RemoteColumn
from nccl_transfer.registry import create_transports
from nccl_transfer.transports import host_id
from rlhf.errors import ConfigError, InvalidRequest
from rlhf.v1 import actor_pb2, critic_pb2, worker_pb2

G = TypeVar("G", bound=RoleGroup)
S = TypeVar("S")

COUNTED = ("prompt_ids", "response_ids")


class Actor:
    """The policy of a run: its group, with the run's options."""

    def __init__(self, run: Run, group: ActorGroup) -> None:
        self._run = run
        self._group = group

    def generate_sequences(
        self, prompts: FutureBatch, *, greedy: bool = False, return_text: bool | None = None
    ) -> FutureBatch:
        """prompt_ids, response_ids, rollout_log_probs; and response, where a reward asks for text."""
        rollout = self._run.config.rollout
        sampling = actor_pb2.Sampling(
            greedy=greedy,
            temperature=rollout.temperature,
            top_k=rollout.top_k,
            top_p=rollout.top_p,
            max_new_tokens=rollout.max_response_tokens,
            stop=rollout.stop,
        )
        wanted = self._run.rewards_want_text if return_text is None else return_text
        return self._group.generate_sequences(prompts, sampling, return_text=wanted)

    def compute_log_prob(self, batch: FutureBatch) -> FutureBatch:
        """log_probs under the weights that sampled: recomputed by the training engine, or the rollout's own.

        Raises:
            RlhfError: The two are further apart than the config allows; when resolved.
        """
        config = self._run.config
        if not config.algorithm.recompute_log_probs:
            return batch.select(["rollout_log_probs"]).rename(rollout_log_probs="log_probs")
        if config.rollout.truncates:
            batch = batch.drop("rollout_log_probs")
        made = self._group.compute_log_prob(batch, config.rollout.temperature)
        step = self._run.step_of(batch)
        check = DriftCheck(step.number, config.algorithm.max_log_prob_drift)
        return made.checked(check) if check.limit else made

    def update_actor(self, batch: FutureBatch) -> FutureBatch:
        """One update, by the losses and the schedule of the config; of the columns only what these have a use for
        travels."""
        config, algorithm = self._run.config, self._run.config.algorithm
        loss = actor_pb2.PolicyLoss(
            surrogate=algorithm.surrogate,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            dual_clip=algorithm.dual_clip,
            entropy_coefficient=algorithm.entropy_coefficient,
            kl_coefficient=algorithm.kl_loss_coefficient,
            kl_estimator=algorithm.kl_loss_estimator,
            aggregation=algorithm.aggregation,
            max_length=config.rollout.max_response_tokens,
            rollout_correction=algorithm.rollout_correction,
            rollout_correction_level=algorithm.rollout_correction_level,
            rollout_correction_low=algorithm.rollout_correction_low,
            rollout_correction_high=algorithm.rollout_correction_high,
            pretrain_coefficient=algorithm.pretrain_coefficient if "pretrain_text" in batch else 0,
        )
        schedule = actor_pb2.Schedule(epochs=algorithm.epochs, mini_batches=config.mini_batches(batch.rows))
        unused = {
            "ref_log_probs": not algorithm.kl_loss_coefficient,
            "rollout_log_probs": algorithm.rollout_correction == "none",
            "pretrain_text": not algorithm.pretrain_coefficient,
        }
        batch = batch.drop(*(name for name, is_unused in unused.items() if is_unused))
        return self._group.update_actor(batch, loss, schedule, config.rollout.temperature)

    def log_likelihood(self, batch: FutureBatch) -> FutureBatch:
        """log_probs under the current weights at temperature 1."""
        return self._group.compute_log_prob(batch, 1.0)

    def tokenize(self, rows: FutureBatch) -> FutureBatch:
        """prompt_ids and response_ids of prompts and responses that are given as text."""
        return self._group.tokenize(rows, self._run.config.rollout.max_response_tokens)

    def update_supervised(self, batch: FutureBatch) -> FutureBatch:
        """One update on the responses as they are, by the schedule of the config."""
        config = self._run.config
        schedule = actor_pb2.Schedule(
            epochs=config.algorithm.epochs, mini_batches=config.mini_batches(batch.rows)
        )
        return self._group.update_supervised(batch, schedule)


class RewardModel:
    """A reward or cost of a run that learns."""

    def __init__(self, run: Run, group: RewardGroup) -> None:
        self._run = run
        self._group = group

    def compare_pairs(self, pairs: FutureBatch) -> FutureBatch:
        """chosen_scores and rejected_scores of columns prompt, chosen and rejected."""
        return self._group.compare_pairs(pairs, self._run.config.rollout.max_response_tokens)

    def update_reward(self, pairs: FutureBatch, loss: str) -> FutureBatch:
        """One update on pairs, by the schedule of the config."""
        config = self._run.config
        schedule = actor_pb2.Schedule(
            epochs=config.algorithm.epochs, mini_batches=config.mini_batches(pairs.rows)
        )
        return self._group.update_reward(pairs, loss, schedule, config.rollout.max_response_tokens)


class Critic:
    """A value model of a run."""

    def __init__(self, run: Run, group: CriticGroup) -> None:
        self._run = run
        self._group = group

    def compute_values(self, batch: FutureBatch) -> FutureBatch:
        """values of the response tokens."""
        return self._group.compute_values(batch)

    def update_critic(self, batch: FutureBatch) -> FutureBatch:
        """One update, by the losses and the schedule of the config."""
        config, algorithm = self._run.config, self._run.config.algorithm
        loss = critic_pb2.ValueLoss(
            clip=algorithm.value_clip,
            aggregation=algorithm.aggregation,
            max_length=config.rollout.max_response_tokens,
        )
        schedule = actor_pb2.Schedule(
            epochs=algorithm.critic_epochs, mini_batches=config.mini_batches(batch.rows)
        )
        return self._group.update_critic(batch, loss, schedule)


class Reference:
    """The frozen policy of a run."""

    def __init__(self, run: Run, group: ReferenceGroup) -> None:
        self._run = run
        self._group = group

    def compute_ref_log_prob(self, batch: FutureBatch) -> FutureBatch:
        """ref_log_probs of the response tokens."""
        return self._group.compute_ref_log_prob(batch, self._run.config.rollout.temperature)


class Step:
    """One training step, as an algorithm sees it.

    Args:
        context: On whose behalf calls on its rows are made.
        draw: The next prompts of the data, each repeated for its samples, and their groups.
        pretraining: See below.

    Attributes:
        number: From 1.
        prompts: The step's prompts, each repeated for its samples.
        groups: Column "group" of the same rows [rows] int64: the responses to one prompt have one number, which no
            other prompt of the run has.
        pretraining: Column "pretrain_text" of the same rows, where the config has such texts; else no column.
        metrics: What the algorithm measured; add to it.
    """

    def __init__(
        self,
        context: StepContext,
        draw: Callable[[], tuple[FutureBatch, FutureBatch]],
        pretraining: FutureBatch,
    ) -> None:
        self.number = context.number
        self.context = context
        self._draw = draw
        self.prompts, self.groups = self._next()
        self.pretraining = pretraining.of_step(context)
        self.metrics: dict[str, float] = {}
        self.records: list[CallRecord] = []
        self.batch = self.prompts

    def rounds(self, most: int) -> Iterator[FutureBatch]:
        """Prompts with their groups, in rounds of as many as a step has: first those of the step, then further ones of
        the data, for as long as more are asked for."""
        yield self.prompts | self.groups
        for _ in range(most - 1):
            prompts, groups = self._next()
            yield prompts | groups

    def compute(self, function: Callable[..., Advantage], *columns: Any, **options: Any) -> FutureBatch:
        """The columns that a pure function makes of numbers; its metrics become those of the step.

        Raises:
            InvalidRequest: It refused them.
        """
        try:
            result = function(*columns, **options)
        except ValueError as error:
            raise InvalidRequest(f"compute_advantage, step {self.number}: {error}") from error
        self.metrics |= result.metrics
        return FutureBatch.of(**result.columns).of_step(self.context)

    def finish(self, *batches: FutureBatch) -> None:
        """Waits for every call that made these batches; the first is the one the step trained on."""
        self.batch = batches[0]
        self.records = results(list(dict.fromkeys(call for batch in batches for call in batch.calls)))

    def _next(self) -> tuple[FutureBatch, FutureBatch]:
        prompts, groups = self._draw()
        return prompts.of_step(self.context), groups.of_step(self.context)


class Run:
    """The run that an algorithm's function is given.

    Args:
        config: The whole configuration.
        data: Prompts to train on, and held-out ones.
        cluster: Connected services.
        recorder: Where metrics, samples, timeline and progress go.
        pretrain: Texts to go on learning, where there are any.
        limits: Of prompts and of such texts; None: however long they are.

    Attributes:
        evaluations: Metrics of the held-out rows, of each evaluation.
        batches_drawn: How far the data has been read, in batches of prompts.
        loader: Which prompts come next.
        text_loader: Which texts come next, where there are any.
        kept: By name, dataclasses that hold what an algorithm remembers from step to step.
        recorder: Where metrics, samples, timeline and progress go.
    """

    def __init__(
        self,
        config: Config,
        data: tuple[PromptData, PromptData],
        cluster: Cluster,
        recorder: Recorder,
        pretrain: TextData | None = None,
        limits: tuple[Limit | None, Limit | None] = (None, None),
    ) -> None:
        self.config = config
        self.evaluations: list[dict[str, float]] = []
        self.batches_drawn = 0
        weights = [source.weight for source in config.data.all_sources]
        self.loader = Loader(data[0].sizes, weights, config.run.seed)
        self.text_loader = Loader([len(pretrain)], [1.0], config.run.seed, "pretrain") if pretrain else None
        self.kept: dict[str, Any] = {}
        self._cluster = cluster
        self.recorder = recorder
        self._train, self._heldout = data
        self._pretrain = pretrain
        self._limit, self._text_limit = limits
        self._fetcher = Fetcher(host_id(), create_transports())
        self._tokens = 0
        self._seconds = 0.0
        self._steps = 0

    def actor(self, name: str = "actor") -> Actor:
        """The policy; `name` is that of its service, here and below."""
        return Actor(self, self._group(name, ActorGroup))

    def critic(self, name: str = "critic") -> Critic:
        return Critic(self, self._group(name, CriticGroup))

    def reference(self, name: str = "reference") -> Reference:
        return Reference(self, self._group(name, ReferenceGroup))

    def reward(self, name: str = "reward") -> Reward:
        """A reward or cost: a service of this name, or what the config makes it of."""
        recipes = self.config.recipes(name)
        parts = {part: self._group(part, RewardGroup) for recipe in recipes.values() for part in recipe}
        table = self.config.algorithm
        failures = Failures(table.on_failed_reward, table.reward_retries)
        return Reward(name, parts, recipes, failures, self.step_of)

    def reward_model(self, name: str = "reward") -> RewardModel:
        """A reward service that learns."""
        return RewardModel(self, self._group(name, RewardGroup))

    @property
    def step(self) -> int:
        """Number of the step that was begun last; 0 before the first."""
        return self._cluster.session.newest.number

    def step_of(self, batch: FutureBatch) -> StepContext:
        """The step on whose behalf calls on these rows are made."""
        return self._cluster.session.step_of(batch.step)

    @property
    def groups(self) -> Mapping[str, RoleGroup]:
        """The groups of the configuration's services by name."""
        return self._cluster.groups

    @property
    def rewards_want_text(self) -> bool:
        """Whether any reward scores text, so that responses have to come as text too."""
        return any(isinstance(g, RewardGroup) and g.wants_text for g in self._cluster.groups.values())

    def steps(self, evaluation: Evaluation | None = None) -> Iterator[Step]:
        """The training steps, with evaluations between them; afterwards everything they left is freed.

        Args:
            evaluation: What is measured on the held-out rows; default: the mean reward of greedy responses to them.
        """
        config = self.config
        evaluation = evaluation or policy_evaluation(self)
        self._evaluate(self._cluster.session.newest, evaluation)
        for number in range(1, config.run.steps + 1):
            context, started = self._cluster.session.begin_step(number), time.time()
            step = Step(context, self._draw, self._pretraining())
            yield step
            if not step.records:
                raise InvalidRequest(f"the algorithm did not call step.finish in step {number}")
            seconds = time.time() - started
            self.recorder.calls(number, step.records)
            metrics = self._step_metrics(step, seconds)
            if number == config.run.steps or (
                config.run.evaluate_every and number % config.run.evaluate_every == 0
            ):
                metrics |= self._evaluate(context, evaluation, log=False)
            self._cluster.end_step(context)
            self.recorder.step(number, metrics)

    def keep(self, name: str, state: S) -> S:
        """Notes a dataclass of plain values that an algorithm changes from step to step, and returns it."""
        self.kept[name] = state
        return state

    def lengths(self, batch: FutureBatch) -> np.ndarray:
        """Tokens per response [rows] int64, which references tell without the tokens. Waits for the responses."""
        return _lengths(batch.result(["response_ids"])["response_ids"])

    def fetch(self, batch: FutureBatch, *names: str) -> dict[str, Any]:
        """Values on the controller, of what `compute_advantage` reads: float columns of the ranks, and columns that are
        here. Waits for them.

        Raises:
            InvalidRequest: A column of the ranks holds no floats, as token ids do not: these stay where they are.
        """
        resolved = batch.result(names)
        for name, column in resolved.columns.items():
            if isinstance(column, RemoteColumn) and not column.dtype.startswith(("float", "bfloat")):
                raise InvalidRequest(
                    f"run.fetch: column {name!r} holds {column.dtype} on the ranks; only float columns come to the "
                    "controller"
                )
        rows = self._fetcher.fetch(resolved, time.monotonic() + self.config.run.call_timeout_s)
        remote = [c.nbytes for c in resolved.columns.values() if not isinstance(c, LocalColumn)]
        values = {name: _own(rows.values[name]) for name in names}
        rows.verify()
        self.step_of(batch).count_bytes(sum(remote))
        return values

    def finish(self, trained: str = "actor") -> dict[str, Any]:
        """Exports what was trained and writes the summary; returns its figures.

        Args:
            trained: Name of the service.
        """
        if not self._steps:
            raise InvalidRequest("the algorithm finished no step")
        group = self._group(trained, RoleGroup)
        directory = str(self.recorder.directory.output(trained))
        saved = group.save_checkpoint(directory, worker_pb2.CHECKPOINT_FORMAT_HUGGING_FACE)
        record = saved.records()[0]
        first, last = self.evaluations[0], self.evaluations[-1]
        summary: dict[str, Any] = {}
        for name in first:
            summary |= {f"{name}_before": first[name], f"{name}_after": last[name]}
        summary |= {
            "steps": self._steps,
            "tokens_per_s": self._tokens / self._seconds,
            "wall_s": time.time() - self.recorder.started_s,
            f"{trained}_sha256": record.responses[0].sha256,
            "heldout_prompts_left_out": len(self._heldout) - len(self._heldout_rows),
            **{name.removeprefix("data/"): count for name, count in self._left_out.items()},
        }
        self.recorder.summary(summary)
        return summary

    def close(self) -> None:
        """Drops the connections to the ranks' memory."""
        self._fetcher.close()

    def _group(self, name: str, kind: type[G]) -> G:
        group = self._cluster.group(name)
        if not isinstance(group, kind):
            role = kind.__name__.removesuffix("Group").lower()
            raise ConfigError(
                f"services.{name}: the algorithm needs role {role} here, not {group.description.role}"
            )
        return group

    def _draw(self) -> tuple[FutureBatch, FutureBatch]:
        """The next prompts of the data, each repeated for its samples, and column "group"."""
        config, count = self.config, self.config.data.prompts_per_step
        numbers = self.batches_drawn * count + np.arange(count)
        self.batches_drawn += 1
        drawn = draw(self._train, self.loader, count, self._limit, _text_of)
        prompts, groups = columns_of(drawn), FutureBatch.of(group=numbers)
        samples = config.rollout.samples_per_prompt
        return prompts.repeat(samples), groups.repeat(samples)

    def _pretraining(self) -> FutureBatch:
        rows = self.config.rows_per_step
        if self._pretrain is None or self.text_loader is None:
            return FutureBatch(rows, {})
        texts = draw(self._pretrain, self.text_loader, rows, self._text_limit, str)
        return FutureBatch.of(pretrain_text=texts)

    def _step_metrics(self, step: Step, seconds: float) -> dict[str, float]:
        calls: dict[tuple[str, str], list[CallRecord]] = {}
        stages: dict[str, float] = {}
        for record in step.records:
            calls.setdefault((record.service, record.method), []).append(record)
            key = f"time/{self._stage(record)}_s"
            stages[key] = stages.get(key, 0.0) + record.ended_s - record.started_s
        metrics = step.metrics | step.context.noted | self._left_out
        for (service, _), records in calls.items():
            metrics |= {f"{service}/{name}": value for name, value in _mean_metrics(records).items()}
        batch = step.batch.result(step.batch.columns)
        tokens = sum(_tokens(batch, name) for name in COUNTED)
        responses = _tokens(batch, "response_ids")
        self._tokens, self._seconds, self._steps = self._tokens + tokens, self._seconds + seconds, step.number
        metrics |= {
            "transfer/controller_bytes": float(step.context.controller_bytes),
            "transfer/batch_bytes": float(batch.nbytes),
            "time/step_s": seconds,
        }
        if "reward/mean" not in metrics and "rewards" in batch.columns:
            metrics["reward/mean"] = mean_of_scored(row_scores(step.batch))
        if "response_ids" in batch.columns:
            metrics["response/length_mean"] = responses / max(batch.rows, 1)
            metrics["time/tokens_per_s"] = tokens / seconds
        memory = {f"mem/{name}_bytes": float(value) for name, value in self._cluster.memory().items()}
        return metrics | parity_metrics(step.records) | transfer_metrics(step.records) | stages | memory

    def _stage(self, record: CallRecord) -> str:
        """The method, with its service where that is not named like its role: there are two of the role."""
        role = self._cluster.group(record.service).description.role
        return record.method if record.service == role else f"{record.service}_{record.method}"

    @cached_property
    def _heldout_rows(self) -> np.ndarray:
        """The held-out rows that are evaluated: those that are short enough."""
        return rows_that_fit(self._heldout, self._limit, _text_of)

    @property
    def _left_out(self) -> dict[str, int]:
        """Rows that were read and left out so far, because they are too long."""
        loaders = {"data/prompts_left_out": self.loader, "data/texts_left_out": self.text_loader}
        return {
            name: sum(position.left_out for position in loader.state.positions)
            for name, loader in loaders.items()
            if loader is not None
        }

    def _evaluate(self, step: StepContext, evaluation: Evaluation, *, log: bool = True) -> dict[str, float]:
        """Measures on the held-out rows, a batch at a time, whose rows are freed before the next."""
        started = time.time()
        parts: list[Mapping[str, np.ndarray]] = []
        for batch in batches(self._heldout, self._heldout_rows, self.config.run.evaluation_rows):
            values, made = evaluation.measure(batch.of_step(step))
            parts.append(values)
            for each in made:
                self.recorder.calls(step.number, each.records())
            self._cluster.release(step)
        measured = evaluation.summarize({name: np.concatenate([p[name] for p in parts]) for name in parts[0]})
        self.evaluations.append(measured)
        metrics = {f"evaluation/{name}": value for name, value in measured.items()}
        metrics["time/evaluation_s"] = time.time() - started
        if log:
            self._cluster.end_step(step)
            self.recorder.step(step.number, metrics)
        return metrics


def _own(values: Any) -> Any:
    """A copy of fetched values: rows read in place are only good until their step is released."""
    if isinstance(values, Jagged):
        return Jagged(values.values.copy(), values.lengths)
    return values.copy() if isinstance(values, np.ndarray) else values


def _mean_metrics(records: list[CallRecord]) -> dict[str, float]:
    """The metrics of a method that was called as often: the mean of its calls."""
    names = dict.fromkeys(name for record in records for name in record.metrics)
    values = {name: [r.metrics[name] for r in records if name in r.metrics] for name in names}
    return {name: sum(found) / len(found) for name, found in values.items()}


def _text_of(prompt: Prompt) -> str:
    return prompt.text


def _lengths(column: Column) -> np.ndarray:
    values = column.values if isinstance(column, LocalColumn) else column
    lengths = getattr(values, "lengths", None)
    if lengths is None:
        raise InvalidRequest("the column has rows of a fixed shape, which have no lengths")
    return lengths


def _tokens(batch: Batch, name: str) -> int:
    return int(_lengths(batch[name]).sum()) if name in batch.columns else 0
