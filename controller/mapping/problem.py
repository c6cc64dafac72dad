"""The inputs of the search: models with their calls, rows, and devices (HybridFlow, algorithm 1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from controller.mapping.dataflow import SYNC, Call, Dataflow, ppo_dataflow
from controller.mapping.devices import DeviceGroup
from controller.mapping.workload import LengthShares, Workload
from settings.memory.shape import HeadKind, ModelShape
from settings.memory.use import ModelUse, RolloutUse, RowSizes


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


def ppo_problem(
    shapes: Mapping[str, ModelShape], devices: DeviceGroup, workload: Workload, ahead: int = 0
) -> Problem:
    """Returns PPO with models in bfloat16, as HybridFlow measures it (section 8): the reward is divided over a mesh
    too, as no reward service of this project is.

    Args:
        shapes: Shape of each model by its service: actor, critic, reference, reward, and any further critics; with
            rollout, a service that generates for the actor.
        devices: The devices.
        workload: Rows of a step.
        ahead: As in `Problem`.
    """
    flow = ppo_dataflow(workload.rows)
    models = []
    is_apart = "rollout" in shapes
    for name, shape in shapes.items():
        role = "critic" if name.endswith("critic") else name
        head: HeadKind = {"critic": "value", "reward": "score"}.get(role, "lm")  # type: ignore[assignment]
        use = ModelUse(
            shape.with_head(head),
            engine="none" if role == "rollout" else "3d",
            dtype="bfloat16",
            learns=role in ("actor", "critic"),
            rollout=RolloutUse(generates=role == "rollout" or not is_apart)
            if role in ("actor", "rollout")
            else None,
            receives=role == "rollout",
        )
        models.append(Model(name, use, _ppo_calls(flow, role, is_apart=is_apart), role == "critic"))
    return Problem(models, workload, (devices,), ahead)


def _ppo_calls(flow: Dataflow, role: str, *, is_apart: bool) -> tuple[Call, ...]:
    """Returns the calls of a role of PPO; `is_apart`: generation is a rollout service's."""
    if not is_apart or role not in ("actor", "rollout"):
        return flow.of(role)
    generation, *others = flow.of("actor")
    sync = Call(role, SYNC, 0)
    return (generation, sync) if role == "rollout" else (*others, sync)


def paper_workload() -> Workload:
    """Returns the rows of HybridFlow's evaluation (section 8): 1,024 prompts of 1,024 tokens, responses of 1,024, 8
    updates per epoch; no snapshots before updates."""
    return Workload(1024, LengthShares.of(1024), LengthShares.of(1024), mini_batches=8, snapshots=False)
