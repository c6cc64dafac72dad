"""The loss of an update of the policy, as a request asks for it."""

from __future__ import annotations

from collections.abc import Collection, Hashable

import torch
from torch import Tensor

from rlhf.errors import InvalidRequest
from rlhf.v1 import actor_pb2
from services.actor.losses import policy_loss, surrogate_of
from services.compute.heads import PolicyOutput
from services.compute.microbatch import MicroBatch
from services.engines.base import LossFn
from services.roles.columns import jagged_column, on_device, token_column
from services.roles.log_probs import policy_head
from services.roles.loss_options import PolicyLossOptions, read_knobs
from services.roles.update_loss import UpdateLoss
from services.runtime.worker import CallContext, CallRows, require

UpdateRequest = actor_pb2.UpdateActorRequest | actor_pb2.PrepareUpdateRequest


def policy_update(
    rows: CallRows, request: UpdateRequest, losses: Collection[str], device: torch.device
) -> tuple[PolicyLossOptions, UpdateLoss[PolicyOutput]]:
    """Returns the loss that a request asks for on its rows, without a term, and the knobs of the loss.

    Args:
        rows: Rows of the call.
        request: The request.
        losses: Losses as "module:object" that may be imported; see `read_knobs`.
        device: Device of the rank, to which columns are moved.

    Raises:
        InvalidRequest: The loss is wrong, or a column is missing.
    """
    require(request, "loss", "schedule")
    options = read_knobs(PolicyLossOptions, request.loss, losses)
    surrogate = surrogate_of(options)
    given = [name for name in ("ref_log_probs", "rollout_log_probs") if name in rows]
    columns = [jagged_column(rows, "log_probs"), token_column(rows, "advantages")]
    columns += [jagged_column(rows, name) for name in given]
    old_log_probs, advantages, *others = columns = on_device(columns, device)
    reference, rollout = map(
        dict(zip(given, others, strict=True)).get, ("ref_log_probs", "rollout_log_probs")
    )
    if options.kl_loss_coefficient and reference is None:
        raise InvalidRequest("loss.kl_loss_coefficient needs column 'ref_log_probs'")
    if options.rollout_correction != "none" and rollout is None:
        raise InvalidRequest("loss.rollout_correction needs column 'rollout_log_probs'")

    def loss_for(num_tokens: int, num_rows: int) -> LossFn[PolicyOutput]:
        def loss(output: PolicyOutput, micro_batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
            return policy_loss(
                output.log_probs_BR,
                micro_batch.spread(old_log_probs),
                micro_batch.spread(advantages),
                micro_batch.response_mask_BR,
                surrogate,
                options,
                num_tokens=num_tokens,
                num_sequences=num_rows,
                entropy_BT=output.entropy_BR,
                ref_log_probs_BT=micro_batch.spread(reference) if reference is not None else None,
                rollout_log_probs_BT=micro_batch.spread(rollout) if rollout is not None else None,
            )

        return loss

    head = policy_head(request.temperature, entropy_gradient=options.entropy_coefficient != 0)
    return options, UpdateLoss(head, loss_for, columns)


def update_id(request: UpdateRequest, call: CallContext, policy_version: int) -> Hashable:
    """Returns the id of an update: session, step and ordinal, the version of the weights that it
    begins with, and the loss."""
    options = (message.SerializeToString(deterministic=True) for message in (request.loss, request.schedule))
    header = call.call
    where = header.session, header.seed, header.step, header.ordinal
    return (*where, policy_version, *options, request.temperature)
