"""Role groups of the roles of this project, with a method for each RPC that the ranks of the role serve."""

from __future__ import annotations

from dataclasses import replace

from controller.role_groups.chunks import made_of
from controller.role_groups.codec import BatchCodec
from controller.role_groups.dataflow import FutureBatch
from controller.role_groups.group import RoleGroup
from controller.role_groups.verdicts import RewardCodec, all_scored, first_causes, miscounted, token_counts
from rlhf.errors import InvalidRequest
from rlhf.plugins import load_class
from rlhf.roles import find_role
from rlhf.v1 import actor_pb2, critic_pb2, worker_pb2

PARTIAL = {
    "response_ids": "partial_ids",
    "rollout_log_probs": "partial_log_probs",
    "response_versions": "partial_versions",
}
"""Columns that a segment of responses makes, by the names under which the next one is given them."""


class GeneratingGroup(RoleGroup):
    """Role group of ranks that generate."""

    def generate_sequences(
        self,
        prompts: FutureBatch,
        sampling: actor_pb2.Sampling,
        *,
        return_text: bool = False,
        return_ends: bool = False,
        segments: int = 1,
    ) -> FutureBatch:
        """Generates one response to each row of column "prompt". Returns columns prompt_ids, response_ids and
        rollout_log_probs, with `return_text` also response, the text, with `return_ends` turn_end, "stop" for a
        response that ended and "length" for one that was cut off, and with several segments response_versions.

        Args:
            prompts: Rows with column "prompt".
            sampling: How tokens are drawn.
            return_text: Whether to return the texts of responses.
            return_ends: Whether to return how responses ended.
            segments: Number of calls that generate a response: each but the last adds an equal share of the tokens that
                it may have. A call after the first is kept by the segment gate of its number; see
                `StepContext.gate_of`. The records of the calls are in this order.
        """
        rows, made = prompts, FutureBatch(prompts.rows, {}, (), prompts.step)
        for number in range(segments):
            is_last = number == segments - 1
            ids = ["prompt_ids", "response_ids", "rollout_log_probs"]
            asked = {"response": return_text and is_last, "turn_end": return_ends and is_last}
            texts = [name for name, is_asked in asked.items() if is_asked]
            part = self.call(
                "generate_sequences",
                rows,
                [*ids, *texts, *(["response_versions"] if segments > 1 else [])],
                lateness=number,
                sampling=sampling,
                return_text=asked["response"],
                return_ends=asked["turn_end"],
                segment_tokens=0 if is_last else -(-sampling.max_new_tokens // segments),
            )
            made = replace(part, calls=(*made.calls, *part.calls))
            if not is_last:
                rows = prompts | part.select(PARTIAL).rename(**PARTIAL)
        return made

    def generate_turn(
        self,
        rows: FutureBatch,
        sampling: actor_pb2.Sampling,
        *,
        max_response_tokens: int,
        return_text: bool = False,
    ) -> FutureBatch:
        """Generates one turn of episodes. Returns columns prompt_ids, response_ids, response_mask and rollout_log_probs
        of the responses so far, turn, the text of the turn, turn_end, why it ended, and with `return_text` also
        response, the whole text.

        Args:
            rows: Rows with column "prompt", and after the first turn also "partial_ids", "partial_mask",
                "partial_log_probs" and "observation".
            sampling: How tokens are drawn, and how many in the turn.
            max_response_tokens: Maximum length of a response, in tokens. One without room for its observation and a
                further turn is returned as it is.
            return_text: Whether to return the texts of responses.
        """
        names = ["prompt_ids", "response_ids", "response_mask", "rollout_log_probs", "turn", "turn_end"]
        return self.call(
            "generate_sequences",
            rows,
            [*names, *(["response"] if return_text else [])],
            sampling=sampling,
            return_text=return_text,
            episode=True,
            max_response_tokens=max_response_tokens,
        )


class ActorGroup(GeneratingGroup):
    """Role group of the actor: generates responses, computes log-probabilities and losses, and updates the policy."""

    def compute_log_prob(self, batch: FutureBatch, temperature: float, max_drift: float = 0.0) -> FutureBatch:
        """Computes column log_probs: the log-probability of each response token under the current weights at
        `temperature`. Ranks keep the rows whose log-probabilities of rollout and training are more than `max_drift`
        nats apart; 0: none."""
        return self.call("compute_log_prob", batch, temperature=temperature, max_drift=max_drift)

    def compute_loss(self, batch: FutureBatch) -> FutureBatch:
        """Computes column pretrain_loss [rows]: the mean negative log-likelihood of the tokens of column "text", in
        nats. It only measures the policy on texts; to train on texts, use `data.pretrain`."""
        return self.call("compute_loss", batch)

    def update_actor(
        self,
        batch: FutureBatch,
        loss: actor_pb2.PolicyLoss,
        schedule: actor_pb2.Schedule,
        temperature: float,
        *,
        early: bool = False,
    ) -> FutureBatch:
        """Updates the policy by `loss`, over all epochs and mini-batches of `schedule`; divides the logits by
        `temperature`. An update that fails leaves the weights unchanged. Returns no columns. `early`: whether gradients
        of the first mini-batch are computed chunk by chunk where rows are in chunks, for which the loss must add up by
        rows."""
        options = {"loss": loss, "schedule": schedule, "temperature": temperature}
        if early:
            return self.call_prepared("update_actor", "prepare_update", batch, **options)
        return self.call("update_actor", batch, **options)

    def tokenize(self, rows: FutureBatch, max_response_tokens: int) -> FutureBatch:
        """Tokenizes columns "prompt" and "response"; returns columns prompt_ids and response_ids. Responses of more
        than `max_response_tokens` tokens are cut; the others end with the text in column "response_end", or with the
        EOS token where that is empty or there is no such column."""
        return self.call("tokenize", rows, max_response_tokens=max_response_tokens)

    def update_supervised(self, batch: FutureBatch, schedule: actor_pb2.Schedule) -> FutureBatch:
        """Updates the policy by the mean negative log-likelihood of the response tokens, over all epochs and
        mini-batches of `schedule`. An update that fails leaves the weights unchanged. Returns no columns."""
        return self.call("update_supervised", batch, schedule=schedule)


class RolloutGroup(GeneratingGroup):
    """Role group of a rollout service, which generates with weights that it gets by `weights.sync_weights`."""


class ValuesGroup(RoleGroup):
    """Role group of ranks that compute values: of a critic, or of a values service, which computes with weights that it
    gets by `weights.sync_weights`."""

    def compute_values(self, batch: FutureBatch) -> FutureBatch:
        """Computes column `values`: for each response token, the value of the state before it."""
        return self.call("compute_values", batch)


class CriticGroup(ValuesGroup):
    """Role group of a critic, a value model."""

    def update_critic(
        self, batch: FutureBatch, loss: critic_pb2.ValueLoss, schedule: actor_pb2.Schedule
    ) -> FutureBatch:
        """Updates the value model by `loss`, over all epochs and mini-batches of `schedule`. An update that fails
        leaves the weights unchanged. Returns no columns."""
        return self.call("update_critic", batch, loss=loss, schedule=schedule)


class ReferenceGroup(RoleGroup):
    """Role group of the reference policy, which is frozen."""

    def compute_ref_log_prob(self, batch: FutureBatch, temperature: float) -> FutureBatch:
        """Computes column ref_log_probs: the log-probability of each response token under the reference policy at
        `temperature`."""
        return self.call("compute_ref_log_prob", batch, temperature=temperature)


class RewardGroup(RoleGroup):
    """Role group of a reward or cost, whose server may be written in any language."""

    TEXT = ("prompt", "response", "ground_truth", "metadata")
    TENSORS = ("prompt_ids", "response_ids")

    def _codec(self) -> BatchCodec:
        return RewardCodec(self.name, self.ranks.clients, wants_text=self.wants_text)

    @property
    def wants_text(self) -> bool:
        """Whether the reward scores texts instead of token ids. True for a service that declares no input form."""
        return self.description.input_form != worker_pb2.INPUT_FORM_TENSOR

    @property
    def scores_groups(self) -> bool:
        """Whether the reward scores all responses to a prompt at once."""
        return self.description.scores_groups

    def compute_reward(self, batch: FutureBatch) -> FutureBatch:
        """Scores rows. Returns column rewards: one per row [rows] float64, or one per response token (jagged). Raises
        InvalidRequest at once where the batch lacks a column that the reward reads.

        Raises (when resolved):
            RewardFailed: Rows could not be scored; the text has their number and the cause of the first.
        """
        tried = self.try_reward(batch)
        both = [tried["rewards"], tried["reward_errors"]]
        rewards = made_of(both, lambda columns: all_scored(columns[0], columns[1], self.name))
        return FutureBatch(batch.rows, {"rewards": rewards}, tried.calls, batch.step)

    def try_reward(self, batch: FutureBatch) -> FutureBatch:
        """Scores rows without failing where some cannot be scored. Returns columns rewards, as `compute_reward` does,
        and reward_errors: the cause for each row that could not be scored, whose reward is undefined; empty for a row
        that was scored. Where the batch has column response_ids, a row with another number of token scores than of
        response tokens counts as not scored. Raises InvalidRequest where the batch lacks a column that the reward
        reads."""
        names = self.TEXT if self.wants_text else self.TENSORS
        needed = ("response",) if self.wants_text else self.TENSORS
        if self.scores_groups:
            names, needed = (*names, "group"), (*needed, "group")
        missing = [name for name in needed if name not in batch]
        if missing:
            raise InvalidRequest(
                f"{self.name}.compute_reward needs columns {missing}; the batch has {sorted(batch.columns)}"
            )
        rows = batch.select([name for name in names if name in batch])
        sampled = "rollout_log_probs" if "response_mask" in batch else "response_ids"
        tokens = [batch[sampled]] if "response_ids" in batch else []
        if self.wants_text and tokens:
            rows = replace(rows, columns={**rows.columns, "response_tokens": made_of(tokens, token_counts)})
        made = self.call("compute_reward", rows, ("rewards", "reward_errors"))
        if "environment_error" in batch:
            both = [made["reward_errors"], batch["environment_error"]]
            made = replace(made, columns={**made.columns, "reward_errors": made_of(both, first_causes)})
        if not tokens:
            return made
        errors = made_of([made["rewards"], made["reward_errors"], *tokens], miscounted)
        return replace(made, columns={**made.columns, "reward_errors": errors})

    def compare_pairs(self, pairs: FutureBatch, max_response_tokens: int) -> FutureBatch:
        """Scores both responses of pairs, columns prompt, chosen and rejected, with a reward that learns; longer ones
        are cut to `max_response_tokens`. Returns columns chosen_scores and rejected_scores [rows]."""
        return self.call("compare_pairs", pairs, max_response_tokens=max_response_tokens)

    def update_reward(
        self, pairs: FutureBatch, loss: str, schedule: actor_pb2.Schedule, max_response_tokens: int
    ) -> FutureBatch:
        """Trains a reward that learns on `pairs`, with `loss` "bradley_terry" or "cost", for all epochs and
        mini-batches of `schedule`; longer responses are cut to `max_response_tokens`. An update that fails leaves the
        weights unchanged. Returns no columns."""
        return self.call(
            "update_reward",
            pairs,
            loss=loss,
            epochs=schedule.epochs,
            mini_batches=schedule.mini_batches,
            max_response_tokens=max_response_tokens,
        )


def group_type(role: str) -> type[RoleGroup]:
    """Returns the class of the role group of a role.

    Raises:
        PluginError: There is no such role, or its group cannot be imported or is no RoleGroup.
    """
    return load_class(find_role(role).group, RoleGroup)
