"""The roles of services: those of this project, and those that other packages bring. This is the one list of them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from rlhf.plugins import PluginError, find_plugin, plugin_names

PLUGINS = "rlhf_cluster.roles"
"""Entry-point group in which packages declare roles, as NAME = "module:object" of a `RoleSpec`."""

ID_BYTES, FLOAT_BYTES = 4, 4


@dataclass(frozen=True)
class RoleSpec:
    """Declaration of a role. It names the parts of the role as texts "module:object", so that each process imports
    only those that it uses: the service and the table are read by all, the worker by ranks, the group by controllers.

    Attributes:
        name: Name of the role: value of the key `role` of `[services.NAME]`, and of the entry point.
        service: gRPC service of the role, as "module:Service" with the module that protoc generated from its proto.
        table: Type of `[services.NAME]` for this role, a subclass of `settings.service.ServiceTable`. Its module
            imports no torch.
        worker: Worker class, a subclass of `services.runtime.worker.Worker`, or a function that takes such a table and
            returns the class. Imported when the configuration has been checked, so it may import torch.
        group: Role group, a subclass of `controller.role_groups.group.RoleGroup`. Its module imports no torch.
        load_tested: Names of the methods that leave the service unchanged for a run that follows, and that
            rlhf-loadtest may therefore call.
        prompt_token_bytes, response_token_bytes: Bytes of rows that the ranks keep for each token of a prompt and of
            a response until the step ends; for the estimate of the arena's size.
    """

    name: str
    service: str
    table: str
    worker: str
    group: str
    load_tested: tuple[str, ...] = ()
    prompt_token_bytes: int = 0
    response_token_bytes: int = 0


BUILT_IN: Mapping[str, RoleSpec] = {
    spec.name: spec
    for spec in (
        RoleSpec(
            "actor",
            "rlhf.v1.actor_pb2:ActorService",
            "settings.actor:ActorTable",
            "services.actor.role:worker_class",
            "controller.role_groups.roles:ActorGroup",
            load_tested=("GenerateSequences", "ComputeLogProb", "ComputeLoss"),
            prompt_token_bytes=ID_BYTES,
            # response_ids; rollout_log_probs, log_probs and advantages.
            response_token_bytes=ID_BYTES + 3 * FLOAT_BYTES,
        ),
        RoleSpec(
            "critic",
            "rlhf.v1.critic_pb2:CriticService",
            "settings.critic:CriticTable",
            "services.critic.worker:CriticWorker",
            "controller.role_groups.roles:CriticGroup",
            load_tested=("ComputeValues",),
            # values and returns.
            response_token_bytes=2 * FLOAT_BYTES,
        ),
        RoleSpec(
            "reference",
            "rlhf.v1.reference_pb2:ReferenceService",
            "settings.reference:ReferenceTable",
            "services.reference.worker:ReferenceWorker",
            "controller.role_groups.roles:ReferenceGroup",
            load_tested=("ComputeRefLogProb",),
            # ref_log_probs.
            response_token_bytes=FLOAT_BYTES,
        ),
        RoleSpec(
            "reward",
            "rlhf.v1.reward_pb2:RewardService",
            "settings.reward:RewardTable",
            "services.reward.role:worker_class",
            "controller.role_groups.roles:RewardGroup",
            load_tested=("ComputeReward",),
        ),
        RoleSpec(
            "rollout",
            "rlhf.v1.rollout_pb2:RolloutService",
            "settings.rollout:RolloutServiceTable",
            "services.rollout_service.worker:RolloutWorker",
            "controller.role_groups.roles:RolloutGroup",
            prompt_token_bytes=ID_BYTES,
            # response_ids and rollout_log_probs.
            response_token_bytes=ID_BYTES + FLOAT_BYTES,
        ),
        RoleSpec(
            "values",
            "rlhf.v1.values_pb2:ValuesService",
            "settings.values:ValuesTable",
            "services.values.worker:ValuesWorker",
            "controller.role_groups.roles:ValuesGroup",
            # values.
            response_token_bytes=FLOAT_BYTES,
        ),
    )
}
"""Roles of this project, by name."""


def role_names() -> list[str]:
    """Returns the names of the roles of this project and of installed packages, sorted."""
    return plugin_names(PLUGINS, BUILT_IN)


@functools.cache
def find_role(name: str) -> RoleSpec:
    """Returns the declaration of a role.

    Args:
        name: Name of a role of this project or of an entry point, or "module:object".

    Raises:
        PluginError: There is no such role; the text lists the known names. Or it cannot be imported, is no RoleSpec,
            or has another name than its entry point.
    """
    spec = find_plugin(PLUGINS, name, RoleSpec, BUILT_IN)
    if ":" not in name and spec.name != name:
        raise PluginError(f"entry point {name!r} of {PLUGINS} declares a role of another name, {spec.name!r}")
    return spec
