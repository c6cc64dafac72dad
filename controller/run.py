"""A run: the roles an algorithm works with, the steps it loops over, evaluation, and the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from controller.advantage import Advantage
from controller.cluster import Cluster
from controller.config import Config
from controller.data import PromptData, TextData
from controller.dataflow import CallRecord, FutureBatch, results
from controller.group import ActorGroup, CriticGroup, ReferenceGroup, RewardGroup, RoleGroup
from controller.loader import Loader
from controller.parity import DriftCheck, parity_metrics
from controller.recorder import Recorder
from controller.rewards import Failures, Reward
from controller.tracking.metrics import Sample
from controller.tracking.transfer import transfer_metrics
from nccl_transfer.batch import Batch, Column, LocalColumn
from nccl_transfer.columns import Jagged
from nccl_transfer.fetch import Fetcher
from nccl_transfer.transports import create_transports, host_id
from rlhf.errors import ConfigError, InvalidRequest
from rlhf.v1 import actor_pb2, critic_pb2, worker_pb2

G = TypeVar("G", bound=RoleGroup)
S = TypeVar("S")

COUNTED = ("prompt_ids", "response_ids")

Evaluation = tuple[dict[str, float], Sequence[FutureBatch]]
"""Metrics of the held-out rows, by name, and the batches whose calls made them."""
Evaluate = Callable[[FutureBatch], Evaluation]
"""From the held-out rows to their evaluation."""


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
            return FutureBatch(batch.rows, {"log_probs": batch["rollout_log_probs"]}, batch.calls)
        if config.rollout.truncates:
            batch = batch.drop("rollout_log_probs")
        made = self._group.compute_log_prob(batch, config.rollout.temperature)
        check = DriftCheck(self._run.step, config.algorithm.max_log_prob_drift)
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
        self, number: int, draw: Callable[[], tuple[FutureBatch, FutureBatch]], pretraining: FutureBatch
    ) -> None:
        self.number = number
        self.prompts, self.groups = draw()
        self.pretraining = pretraining
        self.metrics: dict[str, float] = {}
        self.records: list[CallRecord] = []
        self.batch = self.prompts
        self._draw = draw

    def rounds(self, most: int) -> Iterator[FutureBatch]:
        """Prompts with their groups, in rounds of as many as a step has: first those of the step, then further ones of
        the data, for as long as more are asked for."""
        yield self.prompts | self.groups
        for _ in range(most - 1):
            prompts, groups = self._draw()
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
        return FutureBatch.of(**result.columns)

    def finish(self, *batches: FutureBatch) -> None:
        """Waits for every call that made these batches; the first is the one the step trained on."""
        self.batch = batches[0]
        self.records = results(list(dict.fromkeys(call for batch in batches for call in batch.calls)))


class Run:
    """What an algorithm works with.

    Args:
        config: The whole configuration.
        data: Prompts to train on, and held-out ones.
        pretrain: Texts to go on learning, where there are any.
        cluster: Connected services.
        recorder: Where metrics, samples, timeline and progress go.

    Attributes:
        evaluations: Metrics of the held-out rows, of each evaluation.
        batches_drawn: How far the data has been read, in batches of prompts.
        loader: Which rows come next.
        kept: By name, dataclasses that hold what an algorithm remembers from step to step.
    """

    def __init__(
        self,
        config: Config,
        data: tuple[PromptData, PromptData],
        cluster: Cluster,
        recorder: Recorder,
        pretrain: TextData | None = None,
    ) -> None:
        self.config = config
        self.evaluations: list[dict[str, float]] = []
        self.batches_drawn = 0
        self.loader = _loader(config, data[0])
        self.kept: dict[str, Any] = {}
        self._cluster = cluster
        self._recorder = recorder
        self._train, self._heldout = data
        self._pretrain = pretrain
        self._fetcher = Fetcher(host_id(), create_transports())
        self._tokens = 0
        self._seconds = 0.0
        self._steps = 0
        self._noted: dict[str, float] = {}

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
        return Reward(name, parts, recipes, failures, self._noted)

    def reward_model(self, name: str = "reward") -> RewardModel:
        """A reward service that learns."""
        return RewardModel(self, self._group(name, RewardGroup))

    @property
    def step(self) -> int:
        """Number of the step that is under way; 0 before the first."""
        return self._cluster.session.step

    @property
    def rewards_want_text(self) -> bool:
        """Whether any reward scores text, so that responses have to come as text too."""
        return any(isinstance(g, RewardGroup) and g.wants_text for g in self._cluster.groups.values())

    def steps(self, evaluate: Evaluate | None = None) -> Iterator[Step]:
        """The training steps, with evaluations between them; afterwards everything they left is freed.

        Args:
            evaluate: What is measured on the held-out rows; default: the mean reward of greedy responses to them.
        """
        config = self.config
        evaluate = evaluate or self._evaluate_policy
        self._evaluate(0, evaluate)
        for number in range(1, config.run.steps + 1):
            session = self._cluster.session
            session.begin_step(number)
            self._noted.clear()
            before, started = session.controller_bytes, time.time()
            step = Step(number, self._draw, self._pretraining(number))
            yield step
            if not step.records:
                raise InvalidRequest(f"the algorithm did not call step.finish in step {number}")
            seconds = time.time() - started
            self._recorder.calls(number, step.records)
            metrics = self._step_metrics(step, seconds, session.controller_bytes - before)
            if number == config.run.steps or (
                config.run.evaluate_every and number % config.run.evaluate_every == 0
            ):
                metrics |= self._evaluate(number, evaluate, log=False)
            self._cluster.release(number)
            self._recorder.step(number, metrics)

    def keep(self, name: str, state: S) -> S:
        """Notes a dataclass of plain values that an algorithm changes from step to step, and returns it."""
        self.kept[name] = state
        return state

    def lengths(self, batch: FutureBatch) -> np.ndarray:
        """Tokens per response [rows] int64, which references tell without the tokens. Waits for the responses."""
        return _lengths(batch.result(["response_ids"])["response_ids"])

    def fetch(self, batch: FutureBatch, *names: str) -> dict[str, Any]:
        """Values of float columns on the controller: what `compute_advantage` reads. Waits for them."""
        resolved = batch.result(names)
        rows = self._fetcher.fetch(resolved, time.monotonic() + self.config.run.call_timeout_s)
        remote = [c.nbytes for c in resolved.columns.values() if not isinstance(c, LocalColumn)]
        values = {name: _own(rows.values[name]) for name in names}
        rows.verify()
        self._cluster.session.controller_bytes += sum(remote)
        return values

    def finish(self, trained: str = "actor") -> dict[str, Any]:
        """Exports what was trained and writes the summary; returns its figures.

        Args:
            trained: Name of the service.
        """
        if not self._steps:
            raise InvalidRequest("the algorithm finished no step")
        group = self._group(trained, RoleGroup)
        directory = self._recorder.path.resolve() / trained
        saved = group.save_checkpoint(str(directory), worker_pb2.CHECKPOINT_FORMAT_HUGGING_FACE)
        record = saved.records()[0]
        first, last = self.evaluations[0], self.evaluations[-1]
        summary: dict[str, Any] = {}
        for name in first:
            summary |= {f"{name}_before": first[name], f"{name}_after": last[name]}
        summary |= {
            "steps": self._steps,
            "tokens_per_s": self._tokens / self._seconds,
            "wall_s": time.time() - self._recorder.started_s,
            f"{trained}_sha256": record.responses[0].sha256,
            "seed": self.config.run.seed,
        }
        self._recorder.summary(summary)
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
        rows = self.loader.take(count)
        prompts, groups = self._train.batch(rows), FutureBatch.of(group=numbers)
        samples = config.rollout.samples_per_prompt
        return prompts.repeat(samples), groups.repeat(samples)

    def _pretraining(self, step: int) -> FutureBatch:
        rows = self.config.rows_per_step
        if self._pretrain is None:
            return FutureBatch(rows, {})
        return FutureBatch.of(pretrain_text=self._pretrain.texts_of_step(step, rows, self.config.run.seed))

    def _step_metrics(self, step: Step, seconds: float, controller_bytes: int) -> dict[str, float]:
        calls: dict[tuple[str, str], list[CallRecord]] = {}
        stages: dict[str, float] = {}
        for record in step.records:
            calls.setdefault((record.service, record.method), []).append(record)
            key = f"time/{self._stage(record)}_s"
            stages[key] = stages.get(key, 0.0) + record.ended_s - record.started_s
        metrics = step.metrics | self._noted
        for (service, _), records in calls.items():
            metrics |= {f"{service}/{name}": value for name, value in _mean_metrics(records).items()}
        batch = step.batch.result(step.batch.columns)
        tokens = sum(_tokens(batch, name) for name in COUNTED)
        responses = _tokens(batch, "response_ids")
        self._tokens, self._seconds, self._steps = self._tokens + tokens, self._seconds + seconds, step.number
        metrics |= {
            "transfer/controller_bytes": float(controller_bytes),
            "transfer/batch_bytes": float(batch.nbytes),
            "time/step_s": seconds,
        }
        if "response_ids" in batch.columns:
            metrics["response/length_mean"] = responses / max(batch.rows, 1)
            metrics["time/tokens_per_s"] = tokens / seconds
        memory = {f"mem/{name}_bytes": float(value) for name, value in self._cluster.memory().items()}
        return metrics | parity_metrics(step.records) | transfer_metrics(step.records) | stages | memory

    def _stage(self, record: CallRecord) -> str:
        """The method, with its service where that is not named like its role: there are two of the role."""
        role = self._cluster.group(record.service).description.role
        return record.method if record.service == role else f"{record.service}_{record.method}"

    def _evaluate(self, step: int, evaluate: Evaluate, *, log: bool = True) -> dict[str, float]:
        """Measures on the held-out rows, and notes it."""
        if step == 0:
            self._cluster.session.begin_step(0)
        started = time.time()
        measured, made = evaluate(self._heldout.batch(np.arange(len(self._heldout))))
        self.evaluations.append(measured)
        metrics = {f"evaluation/{name}": value for name, value in measured.items()}
        metrics["time/evaluation_s"] = time.time() - started
        for batch in made:
            self._recorder.calls(step, batch.records())
        if log:
            self._cluster.release(step)
            self._recorder.step(step, metrics)
        return metrics

    def _evaluate_policy(self, prompts: FutureBatch) -> Evaluation:
        """Mean reward of greedy responses to the held-out prompts; writes some of them as samples."""
        responses = self.actor().generate_sequences(prompts, greedy=True)
        scored = self.reward().judge(prompts | responses)
        others = {name: self.reward(name).judge(prompts | responses) for name in self._other_rewards()}
        scores = _row_scores(scored)
        measured = {"accuracy": _mean_of_scored(scores)}
        for source in dict.fromkeys(self._heldout.sources):
            of_source = np.asarray([other == source for other in self._heldout.sources])
            measured[f"accuracy_{source}"] = _mean_of_scored(scores[of_source])
        measured |= {name: _mean_of_scored(_row_scores(other)) for name, other in others.items()}
        self._sample(self._cluster.session.step, prompts, responses, scores)
        return measured, (responses | scored, *others.values())

    def _other_rewards(self) -> list[str]:
        """Rewards and costs beside the reward: by themselves, or made of several."""
        config, groups = self.config, self._cluster.groups
        made_up = {
            name: weights for name, weights in config.rewards.items() if weights.keys() <= groups.keys()
        }
        parts = {
            part for weights in (*config.recipes("reward").values(), *made_up.values()) for part in weights
        }
        alone = [
            name for name, group in groups.items() if isinstance(group, RewardGroup) and name not in parts
        ]
        own = {source.reward for source in config.data.all_sources} | {"reward"}
        return [name for name in (*alone, *made_up) if name not in own]

    def _sample(self, step: int, prompts: FutureBatch, responses: FutureBatch, scores: np.ndarray) -> None:
        count = min(self.config.run.samples, len(self._heldout))
        if not count:
            return
        first = prompts.take(np.arange(count))
        if "response" in responses:
            shown = first | responses.select(["response"]).take(np.arange(count))
        else:
            shown = first | self.actor().generate_sequences(first, greedy=True, return_text=True)
        texts = shown.result(["prompt", "response", "ground_truth"]).columns.values()
        columns = [column.texts for column in texts if isinstance(column, LocalColumn)]
        rows = zip(*columns, scores[:count].tolist(), strict=True)
        self._recorder.samples(step, [Sample(*row) for row in rows])


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


def _loader(config: Config, train: PromptData) -> Loader:
    sizes = train.sizes or (len(train),)
    return Loader(sizes, [source.weight for source in config.data.all_sources], config.run.seed)


def _mean_of_scored(scores: np.ndarray) -> float:
    """Mean of the rows that could be scored [rows]; not a number where none could."""
    found = scores[~np.isnan(scores)]
    return float(np.mean(found)) if len(found) else float("nan")


def _row_scores(scored: FutureBatch) -> np.ndarray:
    """Score per response; scores of tokens are added up. Waits for them."""
    rewards = scored.result(["rewards"])["rewards"]
    assert isinstance(rewards, LocalColumn), "verdicts come in the response itself"
    if isinstance(rewards.values, Jagged):
        return np.asarray([rewards.values.row(row).sum() for row in range(rewards.rows)])
    return np.asarray(rewards.values)


def _lengths(column: Column) -> np.ndarray:
    values = column.values if isinstance(column, LocalColumn) else column
    lengths = getattr(values, "lengths", None)
    if lengths is None:
        raise InvalidRequest("the column has rows of a fixed shape, which have no lengths")
    return lengths


def _tokens(batch: Batch, name: str) -> int:
    return int(_lengths(batch[name]).sum()) if name in batch.columns else 0
