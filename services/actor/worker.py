"""Worker of the actor role, which generates with a rollout engine, and computes log-probabilities and trains with a
training engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf.errors import ConfigError, InvalidRequest, Refused
from rlhf.v1 import actor_pb2, rollout_pb2, worker_pb2
from services.actor.colocated_rollout import ColocatedRollout
from services.actor.losses import pretraining_loss, supervised_loss
from services.actor.parity import DRIFT, drifting_rows, rollout_parity
from services.actor.policy_update import policy_update, update_id
from services.compute.heads import PolicyHead, PolicyOutput
from services.compute.microbatch import MicroBatch
from services.engines.base import LossFn, TrainEngine
from services.engines.generation_shards import GenerationWeights
from services.engines.implementation import compute_dtype
from services.generation.generator import ID_DTYPE, SequenceGenerator
from services.models.families import load_causal_lm
from services.roles.columns import jagged_column, jagged_ids, on_device, response_ends, sequence_columns
from services.roles.log_probs import policy_head
from services.roles.micro_batching import per_token
from services.roles.model_worker import ModelWorker
from services.roles.update_loss import LossTerm, UpdateLoss
from services.rollout.base import RolloutSetup
from services.rollout.factory import make_rollout
from services.runtime.ranks import Ranks
from services.runtime.worker import CallContext, CallResult, CallRows, register, require
from services.weights.resharding import Resharding
from settings.actor import ActorTable


class ActorWorker(ModelWorker):
    """Worker of the actor: generates responses with a rollout engine, and computes log-probabilities and trains the
    policy with a training engine.

    Args:
        table: Table of the service.
        ranks: Ranks of the service.
    """

    role = "actor"
    also_serves = ("rollout",)
    on_device = frozenset(("log_probs", "ref_log_probs", "rollout_log_probs", "advantages"))

    def __init__(self, table: ActorTable, ranks: Ranks) -> None:
        super().__init__(table, ranks, load_causal_lm, table.optimizer)
        self.table: ActorTable = table
        weights = _generation_weights(table, self.engine, ranks, self.torch_device)
        setup = RolloutSetup(weights.generation_shards, ranks.mesh, self.torch_device)
        self.rollout = make_rollout(table, setup)
        self.colocated = ColocatedRollout(
            self.rollout, weights, ranks, lambda: self.policy_version, sleeps=table.rollout_sleep
        )
        self._generator = SequenceGenerator(self, self.rollout, table.model)
        self._texts = self._generator.texts
        self._lacks_eos = table.generates and self._generator.lacks_eos

    def describe(self) -> worker_pb2.DescribeResponse:
        answer = super().describe()
        answer.engine = f"{answer.engine}, rollout {self.table.rollout_engine}"
        answer.limits.extend(self.rollout.limits)
        answer.lacks_eos = self._lacks_eos
        return answer

    @register("3D_ALL_MICRO_DP")
    def generate_sequences(
        self, rows: CallRows, request: actor_pb2.GenerateSequencesRequest, call: CallContext
    ) -> CallResult:
        """Implements GenerateSequences of both roles: generates one response per row with the current weights."""
        self.colocated.wake(call)
        return self._generator.generate_sequences(rows, request, call, lambda: self.colocated.refresh(call))

    @register("ONE_TO_ALL", collective=False, instant=True)
    def load_weights(
        self, rows: CallRows, request: rollout_pb2.LoadWeightsRequest, call: CallContext
    ) -> CallResult:
        """Implements LoadWeights of the rollout role: raises Refused."""
        raise Refused(f"{self.service} generates with the weights that it trains, and receives none")

    @register("ONE_TO_ALL", collective=False, instant=True)
    def commit_weights(
        self, rows: CallRows, request: rollout_pb2.CommitWeightsRequest, call: CallContext
    ) -> CallResult:
        """Implements CommitWeights of the rollout role: raises Refused."""
        raise Refused(f"{self.service} generates with the weights that it trains, and receives none")

    @register("3D_PROTO")
    def compute_log_prob(
        self, rows: CallRows, request: actor_pb2.ComputeLogProbRequest, call: CallContext
    ) -> CallResult:
        """Implements ComputeLogProb: returns column "log_probs", metric "entropy" and, where column "rollout_log_probs"
        is given, field `parity`: the differences between the two columns, by `rollout_parity`."""
        sequences = sequence_columns(rows)
        computed = self.forward(sequences, policy_head(request.temperature), call)
        log_probs = per_token(computed, lambda output: output.log_probs_BR, sequences.lengths)
        entropy = per_token(computed, lambda output: output.entropy_BR, sequences.lengths)
        total = float(entropy.values.double().sum())
        fields = {}
        if "rollout_log_probs" in rows and self.engine.sees_outputs:
            (rollout,) = on_device([jagged_column(rows, "rollout_log_probs")], self.torch_device)
            fields["parity"] = parity = rollout_parity(rollout.values, log_probs.values)
            far = drifting_rows(rollout, log_probs, request.max_drift)
            if len(far):
                is_first = self.ranks.mesh.position(self.ranks.rank)[1] == 0
                parity.kept = self.row_keeper.keep(rows, far, call, DRIFT, writes=is_first)
        return CallResult({"log_probs": log_probs}, {"entropy": (total, len(entropy.values))}, fields)

    @register("3D_PROTO")
    def compute_loss(
        self, rows: CallRows, request: actor_pb2.ComputeLossRequest, call: CallContext
    ) -> CallResult:
        """Implements ComputeLoss: returns the mean next-token cross-entropy of each text, in nats, as column
        "pretrain_loss"; 0 for a text of one token."""
        with self.ranks.together(call.peers_deadline):
            sequences = self._texts.pretraining_sequences(rows.texts("text"), call)
        computed = self.forward(sequences, PolicyHead(), call)
        log_probs = per_token(computed, lambda output: output.log_probs_BR, sequences.lengths)
        # One number per row, which is for the host: all are summed there after one copy.
        values = log_probs.values.double().cpu()
        totals = [float(-row.sum()) for row in values.split(log_probs.lengths.tolist())]
        means = [
            total / max(length, 1) for total, length in zip(totals, log_probs.lengths.tolist(), strict=True)
        ]
        loss = (sum(totals), float(log_probs.lengths.sum()))
        return CallResult(
            {"pretrain_loss": torch.tensor(means, dtype=torch.float32)}, {"pretrain_loss": loss}
        )

    @register("3D_PROTO")
    def update_actor(
        self, rows: CallRows, request: actor_pb2.UpdateActorRequest, call: CallContext
    ) -> CallResult:
        """Implements UpdateActor: trains the policy on the rows with the request's policy loss and schedule."""
        options, loss = policy_update(rows, request, self.losses, self.torch_device)
        loss = replace(loss, term=self._pretraining(rows, options.pretrain_coefficient, call))
        prepared_as = update_id(request, call, self.policy_version) if request.prepared else None
        return self.update(rows, request.schedule, call, loss, prepared_as=prepared_as)

    @register("3D_PROTO")
    def prepare_update(
        self, rows: CallRows, request: actor_pb2.PrepareUpdateRequest, call: CallContext
    ) -> CallResult:
        """Implements PrepareUpdate: computes the gradient of those rows that are in the first mini-batch."""
        options, loss = policy_update(rows, request, self.losses, self.torch_device)
        if not options.adds_up_by_rows:
            raise InvalidRequest(
                "loss: the gradient of a row depends on the lengths of all rows with aggregation token-mean, and on "
                "texts with pretrain_coefficient above 0; such an update cannot be prepared"
            )
        of = update_id(request, call, self.policy_version)
        return self.prepare(rows, request.schedule, call, loss, num_rows=request.rows, of=of)

    @register("3D_PROTO")
    def tokenize(self, rows: CallRows, request: actor_pb2.TokenizeRequest, call: CallContext) -> CallResult:
        """Implements Tokenize: returns token ids of prompts and responses, the latter cut to `max_response_tokens`
        (0: not cut)."""
        prompts = self.prompt_ids(rows.texts("prompt"), call)
        responses = self.response_ids(rows.texts("response"), response_ends(rows), call)
        most = request.max_response_tokens or max(map(len, responses), default=0)
        num_cut = sum(len(row) > most for row in responses)
        columns = {
            "prompt_ids": jagged_ids(prompts, ID_DTYPE),
            "response_ids": jagged_ids([row[:most] for row in responses], ID_DTYPE),
        }
        return CallResult(columns, {"cut": (num_cut, len(responses))}) if prompts else CallResult()

    @register("3D_PROTO")
    def update_supervised(
        self, rows: CallRows, request: actor_pb2.UpdateSupervisedRequest, call: CallContext
    ) -> CallResult:
        """Implements UpdateSupervised: trains the policy on the mean negative log-likelihood of response tokens."""
        require(request, "schedule")

        def loss_for(num_tokens: int, num_rows: int) -> LossFn[PolicyOutput]:
            def loss(output: PolicyOutput, micro_batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
                mask_BR = micro_batch.response_mask_BR
                return supervised_loss(output.log_probs_BR, mask_BR, num_tokens=num_tokens), {}

            return loss

        return self.update(rows, request.schedule, call, UpdateLoss(PolicyHead(), loss_for))

    def make_room(self, call: CallContext) -> None:
        self.colocated.rest(call)

    def start_over(self) -> None:
        """Resets the worker as the base class does, and onloads the rollout engine, which loads weights at the next
        generation."""
        self.colocated.forget()
        super().start_over()
        self.colocated.onload()

    @register("ONE_TO_ALL")
    def offload(self, rows: CallRows, request: Any, call: CallContext) -> CallResult:
        """Implements Offload: moves the states of training and rollout engine from a GPU to host memory."""
        self.ranks.agree(None, call.peers_deadline)
        moved_bytes = self.engine.offload() + self.colocated.offload()
        return CallResult(fields={"moved_bytes": moved_bytes})

    @register("ONE_TO_ALL")
    def onload(self, rows: CallRows, request: Any, call: CallContext) -> CallResult:
        """Implements Onload: moves the states of training and rollout engine back to the GPU."""
        self.ranks.agree(None, call.peers_deadline)
        return CallResult(fields={"moved_bytes": self.engine.onload() + self.colocated.onload()})

    def load(self, directory: Path) -> None:
        """Loads a checkpoint as the base class does, and onloads the rollout engine, which loads the new weights at the
        next generation."""
        self.colocated.forget()
        super().load(directory)
        self.colocated.onload()

    def verify_copies(self, call: CallContext) -> None:
        """Compares the weights of the rollout engine with those of the training engine; see
        `ColocatedRollout.verify`."""
        self.colocated.verify(self.weight_check, call)

    def _pretraining(
        self, rows: CallRows, coefficient: float, call: CallContext
    ) -> LossTerm[PolicyOutput] | None:
        """Returns the pre-training loss of an update, on the texts of column "pretrain_text"; None if the coefficient
        is 0. Collective unless the coefficient is 0.

        Raises:
            InvalidRequest: A text has no tokens.
        """
        if not coefficient:
            return None
        with self.ranks.together(call.peers_deadline):
            sequences = self._texts.pretraining_sequences(rows.texts("pretrain_text"), call)

        def loss_for(num_tokens: int) -> LossFn[PolicyOutput]:
            def loss(output: PolicyOutput, micro_batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
                mask_BR = micro_batch.response_mask_BR
                return pretraining_loss(output.log_probs_BR, mask_BR, coefficient, num_tokens=num_tokens)

            return loss

        return LossTerm(sequences, PolicyHead(), loss_for, ("pretrain_loss",))


def _generation_weights(
    table: ActorTable, engine: TrainEngine, ranks: Ranks, device: torch.device
) -> GenerationWeights:
    """Returns the source of the weights that the rollout engine of a table loads: the training engine, or, where it has
    no mesh and several ranks share a model to generate, what reshards its weights. Collective.

    Raises:
        ConfigError: The model cannot be shared on the table's `generation_mesh`.
    """
    if table.mesh or not table.generates or ranks.mesh.replica_size == 1:
        return engine
    try:
        return Resharding(engine, table.model, ranks.mesh, dtype=compute_dtype(table), device=device)
    except ValueError as error:
        raise ConfigError(f"generation_mesh: {error}") from error
