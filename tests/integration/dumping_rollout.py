"""The role rollout with ranks that write down what they have received: role = "integration.dumping_rollout:ROLE"."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.roles import BUILT_IN, RoleSpec
from settings.rollout import RolloutServiceTable

if TYPE_CHECKING:
    from services.runtime.worker import Worker

DIRECTORY = "dumps"
"""Below the first of the service's output_roots; each rank writes SERVICE-RANK.pt there at each commit."""


class DumpingTable(RolloutServiceTable):
    role: str  # type: ignore[assignment]


def worker_class(table: RolloutServiceTable) -> type[Worker]:
    import torch

    from services.rollout_service.worker import RolloutWorker
    from services.runtime.worker import CallContext, CallResult, CallRows, register

    class DumpingWorker(RolloutWorker):
        """Writes the name, the first index and the values of each slice that its engine was given."""

        def __init__(self, *arguments) -> None:
            super().__init__(*arguments)
            self.given = {}
            load = self.rollout.load_weights

            def noted(weights):
                for name, tensor in weights:
                    self.given[name] = tensor.clone()
                    yield name, tensor

            self.rollout.load_weights = lambda weights: load(noted(weights))

        @register("ONE_TO_ALL")
        def commit_weights(self, rows: CallRows, request, call: CallContext) -> CallResult:
            result = super().commit_weights(rows, request, call)
            wanted = self._wanted
            tensors = self.given or self.rollout.weight_memory()
            shards = {
                name: layout.shard(tensors[name], wanted.part) for name, layout in wanted.layouts.items()
            }
            boxes = {name: (shard.offsets, shard.tensor.clone()) for name, shard in shards.items()}
            path = Path(self.output_roots[0]) / DIRECTORY / f"{self.service}-{self.ranks.rank}.pt"
            path.parent.mkdir(exist_ok=True)
            torch.save(boxes, path)
            return result

    return DumpingWorker


ROLE: RoleSpec = replace(
    BUILT_IN["rollout"],
    table="integration.dumping_rollout:DumpingTable",
    worker="integration.dumping_rollout:worker_class",
)
