"""Settings of a run's losses as messages for requests: every field of a message has the value of the config key of its
name."""

from __future__ import annotations

from typing import Any, TypeVar

from google.protobuf.json_format import ParseDict
from google.protobuf.message import Message

from controller.config.config import Config
from rlhf.v1 import actor_pb2, critic_pb2

M = TypeVar("M", bound=Message)


def policy_loss(config: Config, *, with_texts: bool) -> actor_pb2.PolicyLoss:
    """Returns the settings of the policy loss, from `[algorithm]` and `[rollout]`, as the message for UpdateActor.

    Args:
        config: Configuration of the run.
        with_texts: Whether the update has pretraining texts. False: `pretrain_coefficient` is 0 in the message.
    """
    without = {} if with_texts else {"pretrain_coefficient": 0.0}
    return _message(actor_pb2.PolicyLoss(), config, "surrogate", **without)


def value_loss(config: Config) -> critic_pb2.ValueLoss:
    """Returns the settings of the value loss, from `[algorithm]` and `[rollout]`, as the message for UpdateCritic."""
    return _message(critic_pb2.ValueLoss(), config, "value_loss")


def _message(message: M, config: Config, loss: str, **given: Any) -> M:
    """Fills `message` in place from `[algorithm]` and `[rollout]`, with all options of the loss that the value of key
    `loss`, surrogate or value_loss, names; values in `given` come first. Returns the message."""
    options = config.algorithm.loss_options(loss).model_dump(mode="json", exclude_none=True)
    tables = (
        config.rollout.model_dump() | config.algorithm.model_dump() | {f"{loss}_options": options} | given
    )
    return ParseDict({field.name: tables[field.name] for field in message.DESCRIPTOR.fields}, message)
