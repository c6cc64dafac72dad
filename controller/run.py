"""A run: the roles an algorithm works with, the steps it loops over, evaluation, and the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np

from controller.cluster import Cluster
from controller.config import Config
from controller.data import PromptData
from controller.dataflow import CallRecord, FutureBatch, results
from controller.group import ActorGroup, CriticGroup, ReferenceGroup, RewardGroup, RoleGroup
from controller.recorder import Recorder
from controller.tracking.metrics import Sample
from nccl_transfer.batch import Batch, LocalColumn
from nccl_transfer.columns import Jagged
from nccl_transfer.fetch import Fetcher
from nccl_transfer.transports import create_transports, host_id
from rlhf.errors import ConfigError, InvalidRequest
from rlhf.v1 import actor_pb2, critic_pb2, worker_pb2

Algorithm = Callable[["Run"], None]
G = TypeVar("G", bound=RoleGroup)

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
        )
        wanted = self._run.rewards_want_text if return_text is None else return_text
        return self._group.generate_sequences(prompts, sampling, return_text=wanted)

    def compute_log_prob(self, batch: FutureBatch) -> FutureBatch:
        """log_probs under the weights that sampled: recomputed by the training engine, or the rollout's own."""
        if self._run.config.algorithm.recompute_log_probs:
            return self._group.compute_log_prob(batch, self._run.config.rollout.temperature)
        return FutureBatch(batch.rows, {"log_probs": batch["rollout_log_probs"]}, batch.calls)

    def update_actor(self, batch: FutureBatch) -> FutureBatch:
        """One update, by the losses and the schedule of the config."""
        config, algorithm = self._run.config, self._run.config.algorithm
        loss = actor_pb2.PolicyLoss(
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            dual_clip=algorithm.dual_clip,
            entropy_coefficient=algorithm.entropy_coefficient,
            kl_coefficient=algorithm.kl_loss_coefficient,
            kl_estimator=algorithm.kl_loss_estimator,
            aggregation=algorithm.aggregation,
            max_length=config.rollout.max_response_tokens,
        )
        schedule = actor_pb2.Schedule(epochs=algorithm.epochs, mini_batches=config.mini_batches)
        if not algorithm.kl_loss_coefficient:
            batch = FutureBatch(
                batch.rows, {k: v for k, v in batch.columns.items() if k != "ref_log_probs"}, batch.calls
            )
        return self._group.update_actor(batch, loss, schedule, config.rollout.temperature)


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
        schedule = actor_pb2.Schedule(epochs=algorithm.critic_epochs, mini_batches=config.mini_batches)
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

    Attributes:
        number: From 1.
        prompts: The step's prompts, each repeated for its samples.
        metrics: What the algorithm measured; add to it.
    """

    def __init__(self, number: int, prompts: FutureBatch) -> None:
        self.number = number
        self.prompts = prompts
        self.metrics: dict[str, float] = {}
        self.records: list[CallRecord] = []
        self.batch = prompts

    def finish(self, *batches: FutureBatch) -> None:
        """Waits for every call that made these batches; the first is the one the step trained on."""
        self.batch = batches[0]
        self.records = results(list(dict.fromkeys(call for batch in batches for call in batch.calls)))


class Run:
    """What an algorithm works with.

    Args:
        config: The whole configuration.
        data: Prompts to train on, and held-out ones.
        cluster: Connected services.
        recorder: Where metrics, samples, timeline and progress go.

    Attributes:
        accuracies: Mean held-out reward of greedy responses, one per evaluation.
    """

    def __init__(
        self, config: Config, data: tuple[PromptData, PromptData], cluster: Cluster, recorder: Recorder
    ) -> None:
        self.config = config
        self.accuracies: list[float] = []
        self._cluster = cluster
        self._recorder = recorder
        self._train, self._heldout = data
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

    def reward(self, name: str = "reward") -> RewardGroup:
        return self._group(name, RewardGroup)

    @property
    def rewards_want_text(self) -> bool:
        """Whether any reward scores text, so that responses have to come as text too."""
        return any(isinstance(g, RewardGroup) and g.wants_text for g in self._cluster.groups.values())

    def steps(self) -> Iterator[Step]:
        """The training steps, with evaluations between them; afterwards everything they left is freed."""
        config = self.config
        self._evaluate(0)
        for number in range(1, config.run.steps + 1):
            session = self._cluster.session
            session.begin_step(number)
            before, started = session.controller_bytes, time.time()
            rows = self._train.rows_of_step(number, config.data.prompts_per_step, config.run.seed)
            step = Step(number, self._train.batch(rows).repeat(config.rollout.samples_per_prompt))
            yield step
            if not step.records:
                raise InvalidRequest(f"the algorithm did not call step.finish in step {number}")
            seconds = time.time() - started
            self._recorder.calls(number, step.records)
            metrics = self._step_metrics(step, seconds, session.controller_bytes - before)
            if number == config.run.steps or (
                config.run.evaluate_every and number % config.run.evaluate_every == 0
            ):
                metrics |= self._evaluate(number, log=False)
            self._cluster.release(number)
            self._recorder.step(number, metrics)

    def fetch(self, batch: FutureBatch, *names: str) -> dict[str, Any]:
        """Values of float columns on the controller: what `compute_advantage` reads. Waits for them."""
        resolved = batch.result(names)
        rows = self._fetcher.fetch(resolved, time.monotonic() + self.config.run.call_timeout_s)
        remote = [c.nbytes for c in resolved.columns.values() if not isinstance(c, LocalColumn)]
        values = {name: _own(rows.values[name]) for name in names}
        rows.verify()
        self._cluster.session.controller_bytes += sum(remote)
        return values

    def finish(self) -> dict[str, Any]:
        """Exports the actor and writes the summary; returns its figures."""
        if not self._steps:
            raise InvalidRequest("the algorithm finished no step")
        actor = self._group("actor", ActorGroup)
        directory = self._recorder.path.resolve() / "actor"
        saved = actor.save_checkpoint(str(directory), worker_pb2.CHECKPOINT_FORMAT_HUGGING_FACE)
        record = saved.records()[0]
        summary = {
            "accuracy_before": self.accuracies[0],
            "accuracy_after": self.accuracies[-1],
            "steps": self._steps,
            "tokens_per_s": self._tokens / self._seconds,
            "wall_s": time.time() - self._recorder.started_s,
            "actor_sha256": record.responses[0].sha256,
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

    def _step_metrics(self, step: Step, seconds: float, controller_bytes: int) -> dict[str, float]:
        metrics = dict(step.metrics)
        stages: dict[str, float] = {}
        for record in step.records:
            metrics |= {f"{record.service}/{name}": value for name, value in record.metrics.items()}
            key = f"time/{record.method}_s"
            stages[key] = stages.get(key, 0.0) + record.ended_s - record.started_s
        batch = step.batch.result(step.batch.columns)
        tokens = sum(_tokens(batch, name) for name in COUNTED)
        responses = _tokens(batch, "response_ids")
        self._tokens, self._seconds, self._steps = self._tokens + tokens, self._seconds + seconds, step.number
        metrics |= {
            "response/length_mean": responses / max(batch.rows, 1),
            "transfer/controller_bytes": float(controller_bytes),
            "transfer/batch_bytes": float(batch.nbytes),
            "time/step_s": seconds,
            "time/tokens_per_s": tokens / seconds,
        }
        memory = {f"mem/{name}_bytes": float(value) for name, value in self._cluster.memory().items()}
        return metrics | stages | memory

    def _evaluate(self, step: int, *, log: bool = True) -> dict[str, float]:
        """Mean reward of greedy responses to the held-out prompts; writes some of them as samples."""
        if step == 0:
            self._cluster.session.begin_step(0)
        started = time.time()
        prompts = self._heldout.batch(np.arange(len(self._heldout)))
        responses = self.actor().generate_sequences(prompts, greedy=True)
        scored = self.reward().compute_reward(prompts | responses)
        rewards = scored.result(["rewards"])["rewards"]
        assert isinstance(rewards, LocalColumn)
        scores = _row_scores(rewards)
        self.accuracies.append(float(np.mean(scores)))
        metrics = {"evaluation/accuracy": self.accuracies[-1], "time/evaluation_s": time.time() - started}
        self._recorder.calls(step, (responses | scored).records())
        self._sample(step, prompts, responses, scores)
        if log:
            self._cluster.release(step)
            self._recorder.step(step, metrics)
        return metrics

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


def _row_scores(rewards: LocalColumn) -> np.ndarray:
    """Score per response; scores of tokens are added up."""
    if isinstance(rewards.values, Jagged):
        return np.asarray([rewards.values.row(row).sum() for row in range(rewards.rows)])
    return np.asarray(rewards.values)


def _tokens(batch: Batch, name: str) -> int:
    column = batch.columns.get(name)
    lengths = getattr(column, "lengths", None)
    return 0 if lengths is None else int(lengths.sum())
