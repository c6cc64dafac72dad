"""The inputs of the search: models with their calls, rows, and devices (HybridFlow, algorithm 1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from controller.mapping.dataflow import Call
from controller.mapping.devices import DeviceGroup
from controller.mapping.workload import Workload
from settings.memory.use import ModelUse, RowSizes


@dataclass(frozen=True)
class Model:
    """A model that is placed: a service with a model.

    Attributes:
        name: Name of the service.
        use: Its use of a model; the search chooses mesh, sharding, recomputation, and the mesh and cache of generation.
        calls: Its calls in a step.
        is_critic: Whether updates take `critic_epochs`.
    """

    name: str
    use: ModelUse
    calls: tuple[Call, ...]
    is_critic: bool = False

    @property
    def key(self) -> tuple[object, ...]:
        """Key that is equal for models whose costs are: names aside."""
        calls = tuple((call.method, call.rows, call.reads) for call in self.calls)
        return self.use, calls, self.is_critic

    @property
    def receives(self) -> bool:
        """Whether it computes with weights of another service."""
        return not self.use.learns and any(call.kind == "sync" for call in self.calls)

    def rows(self, workload: Workload) -> RowSizes:
        """Returns the rows that its memory is predicted for."""
        return workload.row_sizes(is_critic=self.is_critic)


@dataclass(frozen=True)
class Problem:
    """One instance of the search.

    Attributes:
        models: Models to place.
        workload: Rows of a step.
        devices: Devices by kind. All ranks of a model are on devices of one kind.
        ahead: Steps by which generation may be ahead of updates, `run.ahead`; 0: a step begins when the one before it
            has ended.
    """

    models: Sequence[Model]
    workload: Workload
    devices: Sequence[DeviceGroup]
    ahead: int = 0
