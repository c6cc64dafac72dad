"""Role groups by role: the methods that the ranks of each role serve."""

from __future__ import annotations

from controller.role_groups.codec import BatchCodec
from controller.role_groups.dataflow import FutureBatch
from controller.role_groups.futures import all_of, then
from controller.role_groups.group import RoleGroup
from controller.role_groups.verdicts import RewardCodec, all_scored
from rlhf.errors import InvalidRequest
from rlhf.v1 import actor_pb2, critic_pb2, worker_pb2


class ActorGroup(RoleGroup):
    """The actor's ranks: generate, compute log-probabilities and losses, and update the policy."""

    def generate_sequences(
        self, prompts: FutureBatch, sampling: actor_pb2.Sampling, *, return_text: bool = False
    ) -> FutureBatch:
        """Generates a response per row of column "prompt": columns prompt_ids, response_ids and rollout_log_probs, and
        with `return_text` column response."""
        outputs = ["prompt_ids", "response_ids", "rollout_log_probs", *(["response"] if return_text else [])]
        return self.call("generate_sequences", prompts, outputs, sampling=sampling, return_text=return_text)

    def compute_log_prob(self, batch: FutureBatch, temperature: float) -> FutureBatch:
        """log_probs of the response tokens under the current weights."""
        return self.call("compute_log_prob", batch, temperature=temperature)

    def compute_loss(self, batch: FutureBatch) -> FutureBatch:
        """pretrain_loss [rows]: the mean negative log-likelihood of the tokens of column "text", in nats. An algorithm
        measures its policy on texts with it; the loss carries no gradient (`data.pretrain` is what is learned)."""
        return self.call("compute_loss", batch)

    def update_actor(
        self, batch: FutureBatch, loss: actor_pb2.PolicyLoss, schedule: actor_pb2.Schedule, temperature: float
    ) -> FutureBatch:
        """One update of all epochs and mini-batches; one that fails leaves the weights as they were."""
        return self.call("update_actor", batch, loss=loss, schedule=schedule, temperature=temperature)

    def tokenize(self, rows: FutureBatch, max_response_tokens: int) -> FutureBatch:
        """prompt_ids and response_ids of columns "prompt" and "response"."""
        return self.call("tokenize", rows, max_response_tokens=max_response_tokens)

    def update_supervised(self, batch: FutureBatch, schedule: actor_pb2.Schedule) -> FutureBatch:
        """As `update_actor`, on the likelihood of the responses."""
        return self.call("update_supervised", batch, schedule=schedule)


class CriticGroup(RoleGroup):
    """A value model."""

    def compute_values(self, batch: FutureBatch) -> FutureBatch:
        """values of the states in which the response tokens were chosen."""
        return self.call("compute_values", batch)

    def update_critic(
        self, batch: FutureBatch, loss: critic_pb2.ValueLoss, schedule: actor_pb2.Schedule
    ) -> FutureBatch:
        """One update of all epochs and mini-batches; one that fails leaves the weights as they were."""
        return self.call("update_critic", batch, loss=loss, schedule=schedule)


class ReferenceGroup(RoleGroup):
    """The frozen policy."""

    def compute_ref_log_prob(self, batch: FutureBatch, temperature: float) -> FutureBatch:
        """ref_log_probs of the response tokens under the reference weights."""
        return self.call("compute_ref_log_prob", batch, temperature=temperature)


class RewardGroup(RoleGroup):
    """A reward or cost, in whatever language it is written."""

    TEXT = ("prompt", "response", "ground_truth", "metadata")
    TENSORS = ("prompt_ids", "response_ids")

    def _codec(self) -> BatchCodec:
        return RewardCodec(self.name, self.ranks.clients, self.mesh, wants_text=self.wants_text)

    @property
    def wants_text(self) -> bool:
        """Whether it scores text rows, which is the default of a service that declares no input form."""
        return self.description.input_form != worker_pb2.INPUT_FORM_TENSOR

    def compute_reward(self, batch: FutureBatch) -> FutureBatch:
        """rewards: one per row [rows] float64, or one per response token (jagged).

        Raises (when resolved):
            RewardFailed: Rows that could not be scored, with the cause of the first.
        """
        tried = self.try_reward(batch)
        both = all_of([tried["rewards"], tried["reward_errors"]])
        rewards = then(both, lambda columns: all_scored(columns[0], columns[1], self.name))
        return FutureBatch(batch.rows, {"rewards": rewards}, tried.calls, batch.step)

    def try_reward(self, batch: FutureBatch) -> FutureBatch:
        """rewards, as `compute_reward`, and reward_errors: the cause of each row that could not be scored, whose reward
        has no meaning; empty for a row that was scored."""
        names = self.TEXT if self.wants_text else self.TENSORS
        needed = ("response",) if self.wants_text else self.TENSORS
        missing = [name for name in needed if name not in batch]
        if missing:
            raise InvalidRequest(
                f"{self.name}.compute_reward needs columns {missing}; the batch has {sorted(batch.columns)}"
            )
        rows = batch.select([name for name in names if name in batch])
        return self.call("compute_reward", rows, ("rewards", "reward_errors"))

    def compare_pairs(self, pairs: FutureBatch, max_response_tokens: int) -> FutureBatch:
        """chosen_scores and rejected_scores of the pairs, by a reward that learns."""
        return self.call("compare_pairs", pairs, max_response_tokens=max_response_tokens)

    def update_reward(
        self, pairs: FutureBatch, loss: str, schedule: actor_pb2.Schedule, max_response_tokens: int
    ) -> FutureBatch:
        """As `ActorGroup.update_actor`, on the order of the pairs."""
        return self.call(
            "update_reward",
            pairs,
            loss=loss,
            epochs=schedule.epochs,
            mini_batches=schedule.mini_batches,
            max_response_tokens=max_response_tokens,
        )


GROUPS: dict[str, type[RoleGroup]] = {
    "actor": ActorGroup,
    "critic": CriticGroup,
    "reference": ReferenceGroup,
    "reward": RewardGroup,
}
"""Group of each role."""
