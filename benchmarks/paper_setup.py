"""The workload of HybridFlow's evaluation (section 8): PPO, its models, and the rows of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from controller.mapping.dataflow import SYNC, Call
from controller.mapping.devices import DeviceGroup
from controller.mapping.problem import Model, Problem
from controller.mapping.workload import LengthShares, Workload
from settings.memory.shape import HeadKind, ModelShape
from settings.memory.use import ModelUse, RolloutUse

LLAMA_7B = ModelShape("llama", 32000, 4096, 11008, 32, 32, 32, 128)
"""Llama 2 7B (Touvron et al. 2023; config.json of meta-llama/Llama-2-7b-hf)."""
LLAMA_13B = ModelShape("llama", 32000, 5120, 13824, 40, 40, 40, 128)
"""Llama 2 13B (config.json of meta-llama/Llama-2-13b-hf)."""
LLAMA_34B = ModelShape("llama", 32000, 8192, 22016, 48, 64, 8, 128)
"""Code Llama 34B (Roziere et al. 2023; config.json of codellama/CodeLlama-34b-hf)."""
LLAMA_70B = ModelShape("llama", 32000, 8192, 28672, 80, 64, 8, 128)
"""Llama 2 70B (config.json of meta-llama/Llama-2-70b-hf)."""
LLAMA_SHAPES = {"7B": LLAMA_7B, "13B": LLAMA_13B, "34B": LLAMA_34B, "70B": LLAMA_70B}
"""Shapes of the models that the HybridFlow paper measures with (section 8), by name."""


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
            replace(shape, head=head),
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


def _ppo_calls(calls: Sequence[Call], role: str, *, is_apart: bool) -> tuple[Call, ...]:
    """Returns the calls of a role of PPO; `is_apart`: generation is a rollout service's."""
    if not is_apart or role not in ("actor", "rollout"):
        return tuple(call for call in calls if call.service == role)
    generation, *others = (call for call in calls if call.service == "actor")
    sync = Call(role, SYNC, 0)
    return (generation, sync) if role == "rollout" else (*others, sync)


def paper_workload() -> Workload:
    """Returns the rows of HybridFlow's evaluation (section 8): 1,024 prompts of 1,024 tokens, responses of 1,024, 8
    updates per epoch; no snapshots before updates."""
    return Workload(1024, LengthShares.of(1024), LengthShares.of(1024), mini_batches=8, snapshots=False)


def ppo_dataflow(rows: int) -> tuple[Call, ...]:
    """Returns the dataflow of PPO (HybridFlow, figure 1)."""
    ids = ("prompt_ids", "response_ids")
    return (
        Call("actor", "generate_sequences", rows, ("prompt",)),
        Call("actor", "compute_log_prob", rows, (), (0,)),
        Call("critic", "compute_values", rows, ids, (0,)),
        Call("reference", "compute_ref_log_prob", rows, ids, (0,)),
        Call("reward", "compute_reward", rows, ids, (0,)),
        Call("critic", "update_critic", rows, ("advantages", "returns"), (1, 2, 3, 4)),
        Call("actor", "update_actor", rows, ("advantages",), (1, 2, 3, 4)),
    )
