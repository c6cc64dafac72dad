"""Roles as an algorithm calls them: each class calls a role group with the options of the config."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from client.session import StepContext
from controller.config.config import Config
from controller.config.rollout import EvaluationTable, RolloutTable
from controller.role_groups.chunks import ChunkedColumn, chunk_sizes
from controller.role_groups.dataflow import FutureBatch
from controller.role_groups.group import RoleGroup
from controller.role_groups.roles import (
    ActorGroup,
    CriticGroup,
    GeneratingGroup,
    ReferenceGroup,
    RewardGroup,
    RolloutGroup,
    ValuesGroup,
)
from controller.role_groups.weights import sync_weights
from controller.training.episodes import EpisodePlayer, rows_that_ended
from controller.training.evaluation import table_of
from controller.training.losses import policy_loss, value_loss
from controller.training.parity import DriftCheck
from controller.training.scoring import groups_of
from controller.training.staleness import with_version
from rlhf.errors import InvalidRequest
from rlhf.v1 import actor_pb2


class Rollout:
    """Ranks that generate, as an algorithm calls them: those of a rollout service, or of the actor itself.

    Args:
        group: Role group of the ranks.
        config: Configuration of the run.
        returns_text: Whether `generate_sequences` returns the texts of responses by default.
        player: Plays episodes of several turns with the environment of the config. Default: responses have one turn.

    Attributes:
        group: See Args.
    """

    def __init__(
        self,
        group: GeneratingGroup,
        config: Config,
        *,
        returns_text: bool,
        player: EpisodePlayer | None = None,
    ) -> None:
        self.group = group
        self._player = player
        self._config = config
        self._returns_text = returns_text

    def generate_sequences(
        self, prompts: FutureBatch, *, greedy: bool = False, return_text: bool | None = None
    ) -> FutureBatch:
        """Generates one response to each row of column prompt, with the sampling options of the config, in
        `rollout.chunks` calls unless they are greedy.

        Args:
            prompts: Rows with column prompt.
            greedy: Whether to take the most probable token instead of sampling.
            return_text: Whether to return the texts of responses. Default: where a reward of the run scores text, or
                with `run.rollouts_every`.

        Returns:
            Columns prompt_ids, response_ids and rollout_log_probs, and with `return_text` also response, the text;
            where `algorithm.on_truncated` is drop also turn_end, "stop" for a response that ended with an
            end-of-sequence token or a stop string and "length" for one that was cut off; with `run.ahead` also
            policy_version [rows] int64, the version that began to generate each row; with `rollout.segments` above 1
            also response_versions, the version that generated each token. With an environment, waits until all episodes
            have ended, and returns their whole responses, with column response_mask, and, in place of turn_end, those
            of `EpisodePlayer.play`; columns with a value per response token then have one per sampled token.
        """
        rollout = self._config.rollout
        sampling = self._sampling(rollout, greedy=greedy)
        if greedy:  # a baseline, which is of one version
            return self._generate(prompts, sampling, return_text)
        if rollout.chunks > 1 and not self._player:
            prompts = prompts.in_chunks(chunk_sizes(groups_of(prompts), rollout.chunks))
        return self._generate(prompts, sampling, return_text, rollout.segments)

    def generate_for_eval(self, prompts: FutureBatch, *, return_text: bool | None = None) -> FutureBatch:
        """Generates one response to each row of column prompt as `rollout.evaluation` says, and the `evaluation` of the
        rows' source, with weights of one version; else as `generate_sequences`. The rows are some of a batch of an
        evaluation, or repeated ones."""
        table = table_of(self._config, prompts)
        sampling = self._sampling(table, greedy=table.is_greedy)
        sampling.repetition_penalty = table.repetition_penalty
        return self._generate(prompts, sampling, return_text)

    def _sampling(self, table: RolloutTable | EvaluationTable, *, greedy: bool) -> actor_pb2.Sampling:
        rollout = self._config.rollout
        return actor_pb2.Sampling(
            greedy=greedy,
            temperature=table.temperature,
            top_k=table.top_k,
            top_p=table.top_p,
            min_p=table.min_p,
            max_new_tokens=rollout.max_response_tokens,
            stop=rollout.stop,
            stop_token_ids=rollout.stop_token_ids,
        )

    def _generate(
        self,
        prompts: FutureBatch,
        sampling: actor_pb2.Sampling,
        return_text: bool | None,
        segments: int = 1,
    ) -> FutureBatch:
        with_text = self._returns_text if return_text is None else return_text
        if self._player:
            made = self._player.play(prompts, partial(self._generate_turn, sampling, return_text=with_text))
        else:
            made = self.group.generate_sequences(
                prompts,
                sampling,
                return_text=with_text,
                return_ends=self._config.algorithm.on_truncated == "drop",
                segments=segments,
            )
        return with_version(made) if self._config.run.ahead else made

    def _generate_turn(
        self, sampling: actor_pb2.Sampling, rows: FutureBatch, *, return_text: bool
    ) -> FutureBatch:
        sampling.max_new_tokens = self._config.rollout.environment.turn_tokens
        most = self._config.rollout.max_response_tokens
        return self.group.generate_turn(rows, sampling, max_response_tokens=most, return_text=return_text)


class Actor(Rollout):
    """The actor as an algorithm calls it: calls the ranks of the policy with the options of the config.

    Args:
        group: Role group of the actor.
        config: Configuration of the run.
        returns_text: As for `Rollout`.
        step_of: Function that returns the step that calls on a batch belong to.
        rollout: Role group of the rollout service that generates its responses. It gets the weights after every
            update. Default: the actor's own ranks generate them.
        player: As for `Rollout`.
    """

    def __init__(
        self,
        group: ActorGroup,
        config: Config,
        *,
        returns_text: bool,
        step_of: Callable[[FutureBatch], StepContext],
        rollout: RolloutGroup | None = None,
        player: EpisodePlayer | None = None,
    ) -> None:
        super().__init__(rollout or group, config, returns_text=returns_text, player=player)
        self._group = group
        self._step_of = step_of
        self._receivers = [rollout] if rollout else []

    def sync_weights(self, to: Sequence[Rollout], bucket_bytes: int = 0) -> FutureBatch:
        """Moves the policy's weights to rollout services; see `controller.role_groups.weights.sync_weights`. Returns
        no columns."""
        return sync_weights(self._group, [rollout.group for rollout in to], bucket_bytes)

    def compute_log_prob(self, batch: FutureBatch) -> FutureBatch:
        """Returns column log_probs of the response tokens: recomputed by the training engine with the current
        weights, or those of the rollout engine where `algorithm.recompute_log_probs` is false.

        Raises (when resolved):
            RlhfError: The log-probabilities of the two engines differ by more than `algorithm.max_log_prob_drift`.
        """
        config = self._config
        if not config.algorithm.recompute_log_probs:
            return batch.select(["rollout_log_probs"]).rename(rollout_log_probs="log_probs")
        if config.rollout.truncates:
            batch = batch.drop("rollout_log_probs")
        limit = config.algorithm.max_log_prob_drift
        made = self._group.compute_log_prob(batch, config.rollout.temperature, limit)
        check = DriftCheck(self._step_of(batch).number, limit)
        return made.checked(check) if check.limit else made

    def update_actor(self, batch: FutureBatch, mini_batches: int = 0) -> FutureBatch:
        """Updates the policy by the loss of `[algorithm]`, in `epochs` passes over the batch in `mini_batches`
        mini-batches (default: see `Config.mini_batches`). Columns that this loss does not read are not sent. Where
        advantages are in chunks and the loss adds up by rows, gradients of a chunk begin when it is there. With
        `on_truncated` drop, waits for the responses and trains on those that ended. Makes no call in the first
        `critic_warmup_steps` steps. Returns no columns.

        Raises:
            InvalidRequest: With `on_truncated` drop, no response ended.
        """
        config, algorithm = self._config, self._config.algorithm
        if not algorithm.updates_actor(self._step_of(batch).number):
            return FutureBatch(batch.rows, {}, (), batch.step)
        if algorithm.on_truncated == "drop":
            batch = self._that_ended(batch)
        loss = policy_loss(config, with_texts="pretrain_text" in batch)
        unused = {
            "ref_log_probs": not algorithm.kl_loss_coefficient,
            "rollout_log_probs": algorithm.rollout_correction == "none",
            "pretrain_text": not algorithm.pretrain_coefficient,
        }
        batch = batch.drop(*(name for name, is_unused in unused.items() if is_unused))
        schedule = _schedule(config, batch, algorithm.epochs)
        schedule.mini_batches = mini_batches or schedule.mini_batches
        early = algorithm.adds_up_by_rows and isinstance(batch.columns.get("advantages"), ChunkedColumn)
        updated = self._group.update_actor(batch, loss, schedule, config.rollout.temperature, early=early)
        return _synced(updated, self._group, self._receivers, self._step_of(batch))

    def _that_ended(self, batch: FutureBatch) -> FutureBatch:
        """Waits for the responses and returns the rows whose response ended; raises InvalidRequest where none did."""
        rows = rows_that_ended(batch)
        if not len(rows):
            most = self._config.rollout.max_response_tokens
            raise InvalidRequest(
                f"step {self._step_of(batch).number}: all {batch.rows} responses were cut off, and none is left to "
                f"train on: raise rollout.max_response_tokens ({most}), or set algorithm.on_truncated to train"
            )
        return batch.take(rows) if len(rows) < batch.rows else batch

    def compute_loss(self, texts: FutureBatch) -> FutureBatch:
        """Measures the policy on texts, as in Figure 6 of HybridFlow. It only measures: to train on texts, give
        `update_actor` a batch with column pretrain_text and set `algorithm.pretrain_coefficient`.

        Args:
            texts: Rows with column text, or `step.pretraining`, with column pretrain_text.

        Returns:
            Column pretrain_loss [rows] float32: the mean negative log-likelihood of the tokens of each text, in nats.
            Metric pretrain_loss, see `FutureBatch.metrics`: the mean over all tokens of all texts.

        Raises:
            InvalidRequest: `texts` has neither column.
        """
        if "text" not in texts and "pretrain_text" in texts:
            texts = texts.rename(pretrain_text="text")
        return self._group.compute_loss(texts)

    def log_likelihood(self, batch: FutureBatch) -> FutureBatch:
        """Computes column log_probs: the log-probability of each response token under the current weights at
        temperature 1, whatever `rollout.temperature` is."""
        return self._group.compute_log_prob(batch, 1.0)

    def tokenize(self, rows: FutureBatch) -> FutureBatch:
        """Tokenizes columns prompt and response; returns columns prompt_ids and response_ids. Responses of more than
        `rollout.max_response_tokens` tokens are cut; the others end with column response_end, or with the EOS token."""
        return self._group.tokenize(rows, self._config.rollout.max_response_tokens)

    def update_supervised(self, batch: FutureBatch) -> FutureBatch:
        """Updates the policy by the mean negative log-likelihood of the response tokens, in `algorithm.epochs` passes
        over the batch in mini-batches (see `Config.mini_batches`). Makes no call in the first `critic_warmup_steps`
        steps. Returns no columns."""
        if not self._config.algorithm.updates_actor(self._step_of(batch).number):
            return FutureBatch(batch.rows, {}, (), batch.step)
        schedule = _schedule(self._config, batch, self._config.algorithm.epochs)
        updated = self._group.update_supervised(batch, schedule)
        return _synced(updated, self._group, self._receivers, self._step_of(batch))


class RewardModel:
    """A reward or cost model that is trained, as an algorithm calls it."""

    def __init__(self, group: RewardGroup, config: Config) -> None:
        self._group = group
        self._config = config

    def compare_pairs(self, pairs: FutureBatch) -> FutureBatch:
        """Scores both responses of pairs, columns prompt, chosen and rejected, cut to `rollout.max_response_tokens`;
        returns columns chosen_scores and rejected_scores [rows]."""
        return self._group.compare_pairs(pairs, self._config.rollout.max_response_tokens)

    def update_reward(self, pairs: FutureBatch, loss: str) -> FutureBatch:
        """Updates the model on pairs by `loss`, "bradley_terry" or "cost", in `algorithm.epochs` passes
        over them in mini-batches (see `Config.mini_batches`). Returns no columns."""
        schedule = _schedule(self._config, pairs, self._config.algorithm.epochs)
        return self._group.update_reward(pairs, loss, schedule, self._config.rollout.max_response_tokens)


class Critic:
    """The critic (value model) as an algorithm calls it: calls the critic's ranks with the options of the config.

    Args:
        group: Role group of the critic.
        config: Configuration of the run.
        step_of: Function that returns the step that calls on a batch belong to.
        values: Role group that computes its values: `group` itself, or that of a values service, which gets the weights
            after every update.
    """

    def __init__(
        self,
        group: CriticGroup,
        config: Config,
        step_of: Callable[[FutureBatch], StepContext],
        values: ValuesGroup,
    ) -> None:
        self._group = group
        self._config = config
        self._step_of = step_of
        self._values = values
        self._receivers = [] if values is group else [values]

    def compute_values(self, batch: FutureBatch) -> FutureBatch:
        """Computes column `values`: for each response token, the value of the state before it."""
        return self._values.compute_values(batch)

    def update_critic(self, batch: FutureBatch) -> FutureBatch:
        """Updates the value model by `algorithm.value_loss`, in `critic_epochs` passes over the batch in mini-batches
        (see `Config.mini_batches`). Returns no columns."""
        algorithm = self._config.algorithm
        loss = value_loss(self._config)
        updated = self._group.update_critic(
            batch, loss, _schedule(self._config, batch, algorithm.critic_epochs)
        )
        return _synced(updated, self._group, self._receivers, self._step_of(batch))


class Reference:
    """The reference policy, which is frozen, as an algorithm calls it."""

    def __init__(self, group: ReferenceGroup, config: Config) -> None:
        self._group = group
        self._config = config

    def compute_ref_log_prob(self, batch: FutureBatch) -> FutureBatch:
        """Computes column ref_log_probs: the log-probability of each response token under the reference policy at
        `rollout.temperature`."""
        return self._group.compute_ref_log_prob(batch, self._config.rollout.temperature)


def _synced(
    updated: FutureBatch, source: RoleGroup, receivers: Sequence[RoleGroup], step: StepContext
) -> FutureBatch:
    """Moves the weights that an update makes to the services that receive them, if there are any. Returns `updated`
    with the calls of that transfer: they belong to the same step, which waits for them."""
    if not receivers:
        return updated
    synced = sync_weights(source, receivers, step=step)
    return replace(updated, calls=(*updated.calls, *synced.calls))


def _schedule(config: Config, batch: FutureBatch, epochs: int) -> actor_pb2.Schedule:
    return actor_pb2.Schedule(epochs=epochs, mini_batches=config.mini_batches(batch.rows))
