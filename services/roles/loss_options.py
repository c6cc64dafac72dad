"""Reads the loss of an update's request: its knobs, by name, and its loss per token, which a plug-in declares."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Self, TypeVar

import torch
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from pydantic import ValidationError, model_validator
from torch import Tensor

from rlhf.errors import InvalidRequest
from rlhf.plugins import PluginError, load_object
from services.roles.losses import check_aggregation
from services.roles.update import STEP_METRICS
from settings.explain import explain
from settings.losses import LossSpec, LossTable, PolicyLossTable, ValueLossTable
from settings.strict import Positive, Strict

TokenLoss = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]
"""A loss per token, with its options bound to it: takes four columns [B, T], the last one the mask, and returns the
loss [B, T] and sums of statistics over response tokens."""

T = TypeVar("T", bound=Strict)


class RequestedLoss(LossTable):
    """Knobs that the policy loss and the value loss of a request have in common."""

    max_response_tokens: Positive | None = None
    """`rollout.max_response_tokens`; needed by aggregation seq-mean-token-sum-norm."""

    @model_validator(mode="after")
    def _check_length(self) -> Self:
        check_aggregation(self.aggregation, self.max_response_tokens)
        return self


class PolicyLossOptions(RequestedLoss, PolicyLossTable):
    """Knobs of the policy loss as a request carries them; `surrogate_options` has all options of the surrogate."""


class ValueLossOptions(RequestedLoss, ValueLossTable):
    """Knobs of the value loss as a request carries them; `value_loss_options` has all options of the loss."""


def read_knobs(kind: type[T], message: Message, objects: Collection[str]) -> T:
    """Returns the knobs of the loss message of a request, as an instance of `kind`, whose attributes are named like the
    fields of the message. Fields that are not set have the defaults of `kind`.

    Args:
        kind: Class of the knobs: `PolicyLossOptions` or `ValueLossOptions`.
        message: The loss in the request.
        objects: Losses as "module:object" that may be imported, `Worker.losses`. A request may name others only by
            their entry points, so that it cannot make a service import any module.

    Raises:
        InvalidRequest: A knob is unknown or wrong; the text names it.
    """
    given = {
        field.name: MessageToDict(value) if isinstance(value, Message) else value
        for field, value in message.ListFields()
    }
    for key, value in given.items():
        if isinstance(value, str) and ":" in value and value not in objects:
            raise InvalidRequest(
                f"loss.{key}: {value!r} is not imported, since the config file of the service does not name it as "
                f"algorithm.{key}"
            )
    return _validated(kind, given, "loss")


def token_loss(
    key: str, name: str, spec: LossSpec, given: Mapping[str, Any], taken: Collection[str] = ()
) -> TokenLoss:
    """Returns the loss per token that a plug-in declares, with its options. It is tried on a few tokens here, where it
    fails on all ranks alike.

    Args:
        key: Field of the request that names the loss, "surrogate" or "value_loss"; for error messages.
        name: Name of the loss.
        spec: Declaration of the loss: its function and the class of its options.
        given: Options from the request; the others have the defaults of their class.
        taken: Names that its statistics must not have, beside STEP_METRICS.

    Raises:
        InvalidRequest: An option is unknown or wrong, or the function cannot be imported or fails; the text says which.
    """
    options = _validated(spec.options, dict(given), f"loss.{key}_options of {name}")
    where = f"loss.{key} {name}"
    try:
        found = load_object(spec.function, object)
    except PluginError as error:
        raise InvalidRequest(f"{where}: {error}") from error
    if not callable(found):
        raise InvalidRequest(f"{where}: {spec.function!r} is not a function")
    function: Callable[..., Any] = found

    def loss(*columns: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return function(*columns, options)

    try:
        _try(loss, {*STEP_METRICS, *taken})
    except Exception as error:
        raise InvalidRequest(
            f"{where}: {spec.function} fails on 2 rows of 3 tokens: {type(error).__name__}: {error}"
        ) from error
    return loss


def _try(loss: TokenLoss, taken: Collection[str]) -> None:
    """Computes the loss of 2 rows of 3 tokens; raises ValueError if it returns something else than `TokenLoss` says, or
    a statistic whose name is in `taken`. Errors of the loss itself are passed on."""
    shape = (2, 3)
    new_BT, old_BT = torch.full(shape, -1.0, requires_grad=True), torch.full(shape, -1.0)
    advantages_BT = torch.linspace(-1.0, 1.0, 6).reshape(shape)
    made: Any = loss(new_BT, old_BT, advantages_BT, torch.ones(shape, dtype=torch.bool))
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], dict)):
        raise ValueError(f"it returned {type(made).__name__}, not the loss and a dictionary of statistics")
    loss_BT, stats = made
    if not isinstance(loss_BT, Tensor) or loss_BT.shape != shape:
        found = f"of shape {list(loss_BT.shape)}" if isinstance(loss_BT, Tensor) else type(loss_BT).__name__
        raise ValueError(f"the loss is {found}, not one number per token, [2, 3]")
    if not loss_BT.requires_grad:
        raise ValueError("the loss has no gradient")
    for name, value in stats.items():
        if name in taken:
            raise ValueError(f"statistic {name!r} exists already; taken are {', '.join(sorted(taken))}")
        if not isinstance(value, Tensor) or value.shape or value.requires_grad:
            raise ValueError(f"statistic {name!r} is no sum: it must be a scalar tensor without gradient")


def _validated(kind: type[T], given: dict[str, Any], where: str) -> T:
    """Returns `given` as an object of class `kind`; raises InvalidRequest, with `where` and the reason, if it is
    invalid."""
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise InvalidRequest(f"{where}: {explain(error, given, kind)}") from None
