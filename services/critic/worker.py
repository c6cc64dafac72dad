"""Worker of the critic role, which computes the value of the state in which each response token was chosen."""

from __future__ import annotations

from torch import Tensor

from rlhf.v1 import critic_pb2
from services.compute.heads import value_head
from services.compute.microbatch import MicroBatch
from services.engines.base import LossFn
from services.models.families import load_value_model
from services.roles.columns import jagged_column, on_device
from services.roles.loss_options import ValueLossOptions, read_knobs, token_loss
from services.roles.losses import aggregate
from services.roles.model_worker import ModelWorker
from services.roles.update_loss import UpdateLoss
from services.roles.values import response_values
from services.runtime.ranks import Ranks
from services.runtime.worker import CallContext, CallResult, CallRows, register, require
from settings.critic import CriticTable
from settings.losses import find_value_loss


class CriticWorker(ModelWorker):
    """Worker of the critic, a value model: computes values and trains them. A cost critic is a second service with
    this role.

    Args:
        table: Table of the service.
        ranks: Ranks of the service.
    """

    role = "critic"
    on_device = frozenset(("values", "returns"))

    def __init__(self, table: CriticTable, ranks: Ranks) -> None:
        super().__init__(table, ranks, load_value_model, table.optimizer)

    @register("3D_PROTO")
    def compute_values(
        self, rows: CallRows, request: critic_pb2.ComputeValuesRequest, call: CallContext
    ) -> CallResult:
        """Implements ComputeValues: returns column "values", the value of the state in which each response token was
        chosen."""
        return response_values(self, rows, call)

    @register("3D_PROTO")
    def update_critic(
        self, rows: CallRows, request: critic_pb2.UpdateCriticRequest, call: CallContext
    ) -> CallResult:
        """Implements UpdateCritic: trains the value model on the rows with the request's value loss and schedule."""
        require(request, "loss", "schedule")
        columns = [jagged_column(rows, name) for name in ("values", "returns")]
        old_values, returns = on_device(columns, self.torch_device)
        options = read_knobs(ValueLossOptions, request.loss, self.losses)
        name = options.value_loss
        value_loss = token_loss("value_loss", name, find_value_loss(name), options.value_loss_options)

        def loss_for(num_tokens: int, num_rows: int) -> LossFn[Tensor]:
            def loss(values_BR: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
                mask_BR = micro_batch.response_mask_BR
                loss_BR, stats = value_loss(
                    values_BR, micro_batch.spread(old_values), micro_batch.spread(returns), mask_BR
                )
                total = aggregate(
                    loss_BR,
                    mask_BR,
                    options.aggregation,
                    num_tokens=num_tokens,
                    num_sequences=num_rows,
                    max_response_tokens=options.max_response_tokens,
                )
                return total, stats

            return loss

        loss = UpdateLoss(value_head, loss_for, (old_values, returns))
        return self.update(rows, request.schedule, call, loss)
