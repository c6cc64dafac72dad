"""Losses are plug-ins with typed options, and a knob of a loss has one name from the config file to the service."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from google.protobuf.message import Message
from torch import Tensor
from unit.test_model_worker import make_critic, make_rows, update

from controller.algorithms import find_algorithm
from controller.config.algorithm import AlgorithmTable
from controller.config.config import Config, load
from controller.config.rollout import RolloutTable
from controller.training.algorithm import Algorithm, algorithm
from controller.training.losses import policy_loss, value_loss
from rlhf.errors import ConfigError, InvalidRequest
from rlhf.v1 import actor_pb2, critic_pb2
from services.actor.losses import surrogate_of
from services.roles.loss_options import PolicyLossOptions, ValueLossOptions, read_knobs, token_loss
from settings.losses import LOSSES, POLICY_LOSSES, VALUE_LOSSES, LossSpec, find_policy_loss
from settings.services import named_losses
from settings.strict import Positive, Strict, read_tables

QUICKSTARTS = Path(__file__).parent.parent.parent / "deploy" / "quickstart"
TOLD = 1e-3
"""A number that no knob has by default."""


class GateOptions(Strict):
    """Options of the loss below: one of its own, and two that are keys of [algorithm]."""

    width: Positive = 7
    """A whole number."""
    clip_high: float = 0.1
    """A key that grpo reads."""
    lam: float = 0.5
    """A key that grpo does not read."""


def gate_loss(new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, options: GateOptions) -> Any:
    """Returns the options as a loss."""
    return new * (options.width + options.clip_high + options.lam), {"width": torch.tensor(options.width)}


gate = LossSpec(f"{__name__}:gate_loss", GateOptions)
GATE = f"{__name__}:gate"


class ScaleOptions(Strict):
    """Options of the value loss below."""

    scale: float = 1.0
    """Factor of the loss."""


def scaled_error(values: Tensor, old: Tensor, returns: Tensor, mask: Tensor, options: ScaleOptions) -> Any:
    error = options.scale * (values - returns).square()
    return error, {"error": torch.where(mask, error, 0).detach().sum()}


scaled = LossSpec(f"{__name__}:scaled_error", ScaleOptions)


def quickstart(name: str, *settings: str) -> Config:
    return load(QUICKSTARTS / f"{name}.toml", settings)


def configured(*settings: str, name: str = "grpo") -> Config:
    return find_algorithm(name).configure(quickstart("groups" if name == "grpo" else "quickstart", *settings))


def fields(message: type[Message]) -> set[str]:
    return {field.name for field in message.DESCRIPTOR.fields}


@pytest.mark.parametrize(
    ("message", "options"),
    [(actor_pb2.PolicyLoss, PolicyLossOptions), (critic_pb2.ValueLoss, ValueLossOptions)],
)
def test_config_request_and_service_name_the_knobs_of_a_loss_alike(
    message: type[Message], options: type[Strict]
) -> None:
    assert fields(message) == options.model_fields.keys()
    assert fields(message) <= AlgorithmTable.model_fields.keys() | RolloutTable.model_fields.keys()


@pytest.mark.parametrize("spec", [*POLICY_LOSSES.values(), *VALUE_LOSSES.values()])
def test_every_option_of_a_loss_of_the_project_is_a_key(spec: LossSpec) -> None:
    assert spec.options.model_fields.keys() <= AlgorithmTable.model_fields.keys()


def test_every_knob_of_the_policy_loss_reaches_the_service() -> None:
    told: dict[str, Any] = {
        "aggregation": "seq-mean-token-sum-norm",
        "surrogate": GATE,
        "entropy_coefficient": TOLD,
        "kl_loss_coefficient": TOLD,
        "kl_loss_estimator": "k2",
        "rollout_correction": "mask",
        "rollout_correction_level": "sequence",
        "rollout_correction_low": TOLD,
        "rollout_correction_high": 2 * TOLD,
        "pretrain_coefficient": TOLD,
    }
    own = {"surrogate_options.width": 9, "clip_high": TOLD, "lam": TOLD}
    config = quickstart("groups", *(f"algorithm.{key}={value}" for key, value in (told | own).items()))
    options = read_knobs(PolicyLossOptions, policy_loss(config, with_texts=True), {GATE})
    assert told.keys() | {"surrogate_options", "max_response_tokens"} == PolicyLossOptions.model_fields.keys()
    assert options.model_dump(include=set(told)) == told
    assert options.max_response_tokens == config.rollout.max_response_tokens
    assert options.surrogate_options == {"width": 9, "clip_high": TOLD, "lam": TOLD}
    ones = torch.ones(1, 1)
    assert surrogate_of(options)(ones, ones, ones, ones)[0].item() == pytest.approx(9 + 2 * TOLD)
    assert (
        read_knobs(PolicyLossOptions, policy_loss(config, with_texts=False), {GATE}).pretrain_coefficient == 0
    )


def test_a_request_imports_no_module_that_the_config_of_the_service_does_not_name(tmp_path: Path) -> None:
    message = actor_pb2.PolicyLoss(surrogate=GATE)
    why = "loss.surrogate: .* is not imported, since the config file of the service does not name it"
    with pytest.raises(InvalidRequest, match=why):
        read_knobs(PolicyLossOptions, message, {"settings.losses:another"})
    path = tmp_path / "services.toml"
    path.write_text(f'[algorithm]\nsurrogate = "{GATE}"\n')
    assert read_knobs(PolicyLossOptions, message, named_losses(read_tables(path))).surrogate == GATE
    assert named_losses(read_tables(path, ("algorithm.surrogate=ppo", "algorithm.value_loss=a:b"))) == {
        "ppo",
        "a:b",
    }


def test_every_knob_of_the_value_loss_reaches_the_service() -> None:
    settings = ("aggregation=seq-mean-token-sum", f"value_clip={TOLD}")
    config = quickstart("quickstart", *(f"algorithm.{setting}" for setting in settings))
    assert read_knobs(ValueLossOptions, value_loss(config), ()).model_dump() == {
        "aggregation": "seq-mean-token-sum",
        "max_response_tokens": config.rollout.max_response_tokens,
        "value_loss": "clipped",
        "value_loss_options": {"value_clip": TOLD},
    }


@pytest.mark.parametrize("low", [0.2, 3e-4, 1 / 3, 0.0])
def test_numbers_reach_the_service_to_the_bit(low: float) -> None:
    config = quickstart("quickstart", f"algorithm.clip_low={low!r}", f"algorithm.entropy_coefficient={low!r}")
    options = read_knobs(PolicyLossOptions, policy_loss(config, with_texts=False), {GATE})
    assert options.surrogate_options["clip_low"] == options.entropy_coefficient == low


@pytest.mark.parametrize(
    ("kind", "message"),
    [(PolicyLossOptions, actor_pb2.PolicyLoss()), (ValueLossOptions, critic_pb2.ValueLoss())],
)
def test_what_a_request_does_not_set_has_the_default_of_its_key(kind: type[Strict], message: Message) -> None:
    keys = AlgorithmTable().model_dump(include=set(kind.model_fields))
    assert read_knobs(kind, message, ()).model_dump(exclude={"max_response_tokens"}) == keys


def test_the_resolved_configuration_has_the_options_of_the_losses() -> None:
    found = find_algorithm("grpo")
    config = configured(f"algorithm.surrogate={GATE}", "algorithm.lam=0.9")
    assert config.algorithm.surrogate_options == {"width": 7}
    resolved = found.resolved(config)["algorithm"]
    assert (resolved["surrogate_options"], resolved["clip_high"], resolved["lam"]) == ({"width": 7}, 0.2, 0.9)
    assert "value_loss" not in resolved
    assert found.configure(Config.model_validate(found.resolved(config))) == config


def test_an_algorithm_may_bring_its_loss() -> None:
    mine: Algorithm = algorithm(services=("actor",), defaults={"surrogate": GATE})(lambda run: None)
    given = quickstart("groups", "algorithm.surrogate_options.width=3")
    assert mine.configure(given).algorithm.surrogate_options == {"width": 3}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ("surrogate_options.widht=3",),
            f"config algorithm.surrogate_options of {GATE}: widht: unknown key; did you mean 'width'? Known keys: "
            "width, clip_high, lam",
        ),
        (
            ("surrogate_options.width=0",),
            f"config algorithm.surrogate_options of {GATE}: width: must be at least 1 (given: 0)",
        ),
        (
            ("surrogate_options.clip_high=1",),
            f"config algorithm.surrogate_options of {GATE}: clip_high: is a key of [algorithm]; set "
            "algorithm.clip_high",
        ),
    ],
)
def test_options_of_a_loss_are_checked_when_the_config_is_read(
    settings: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        quickstart("groups", f"algorithm.surrogate={GATE}", *(f"algorithm.{setting}" for setting in settings))
    assert str(raised.value) == message


def test_options_of_the_loss_that_an_algorithm_chooses_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"algorithm.surrogate_options of ppo: width: unknown key"):
        configured("algorithm.surrogate_options.width=3")


def test_a_loss_of_the_critic_is_refused_where_there_is_none() -> None:
    with pytest.raises(ConfigError, match=r"algorithm.value_loss: grpo has no use for this"):
        configured("algorithm.value_loss=clipped")


@pytest.mark.usefixtures("process_group")
def test_a_critic_trains_with_a_loss_of_ones_own(tiny_llama_dir: Path) -> None:
    critic = make_critic(tiny_llama_dir, "fsdp")
    plain = update(critic, make_rows(), value_loss_options={"value_clip": 0}).metrics["loss"]
    critic.start_over()
    name = f"{__name__}:scaled"
    critic.losses = frozenset({name})
    made = update(critic, make_rows(), value_loss=name, value_loss_options={"scale": 3}).metrics
    assert made["loss"][0] == pytest.approx(6 * plain[0], rel=1e-6)
    assert made["error"][0] / made["error"][1] == pytest.approx(made["loss"][0], rel=1e-6)
    with pytest.raises(
        InvalidRequest, match=r"^loss.value_loss_options of .*: scael: unknown key; did you mean"
    ):
        update(critic, make_rows(), value_loss=name, value_loss_options={"scael": 3})
    assert critic.policy_version == 1


BROKEN = {
    "raises": (lambda *_: 1 / 0, "ZeroDivisionError: division by zero"),
    "reduced": (
        lambda new, *_: (new.sum(), {}),
        r"the loss is of shape \[\], not one number per token, \[2, 3\]",
    ),
    "of_rows": (
        lambda new, *_: (new.mean(1, keepdim=True), {}),
        r"the loss is of shape \[2, 1\], not one number",
    ),
    "of_all": (
        lambda new, *_: (new.mean().reshape(1, 1), {}),
        r"the loss is of shape \[1, 1\], not one number",
    ),
    "number": (lambda *_: (1.0, {}), "the loss is float, not one number per token"),
    "detached": (lambda new, *_: (new.detach(), {}), "the loss has no gradient"),
    "alone": (lambda new, *_: new, "it returned Tensor, not the loss and a dictionary of statistics"),
    "listed": (
        lambda new, *_: (new, [1.0]),
        "it returned tuple, not the loss and a dictionary of statistics",
    ),
    "frozen": (
        lambda new, *_: (new, MappingProxyType({})),
        "it returned tuple, not the loss and a dictionary of statistics",
    ),
    "float_statistic": (lambda new, *_: (new, {"mine": 1.0}), "statistic 'mine' is no sum"),
    "named": (
        lambda new, *_: (new, {"loss": new.detach().sum()}),
        "statistic 'loss' exists already; taken are ",
    ),
    "columns": (lambda new, *_: (new, {"mine": new.detach()}), "statistic 'mine' is no sum"),
    "graph": (lambda new, *_: (new, {"mine": new.sum()}), "statistic 'mine' is no sum"),
}
locals().update({name: function for name, (function, _) in BROKEN.items()})


@pytest.mark.parametrize("name", BROKEN)
def test_a_loss_that_fails_is_refused_before_an_update_begins(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^loss.surrogate mine: .*{BROKEN[name][1]}"):
        token_loss("surrogate", "mine", LossSpec(f"{__name__}:{name}"), {})


def of_good_tokens(new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, options: Strict) -> Any:
    """Returns a loss without gradient where no advantage is positive."""
    return (-new if (advantages > 0).any() else torch.zeros_like(new)), {}


def test_a_loss_is_tried_on_advantages_of_both_signs() -> None:
    assert token_loss("surrogate", "mine", LossSpec(f"{__name__}:of_good_tokens"), {})


def test_a_loss_that_cannot_be_imported_is_refused_with_the_cause() -> None:
    with pytest.raises(
        InvalidRequest, match=r"^loss.surrogate mine: 'nothing:f' cannot be imported: ModuleNot"
    ):
        token_loss("surrogate", "mine", LossSpec("nothing:f"), {})


def test_a_spec_needs_a_table_of_options() -> None:
    with pytest.raises(TypeError, match=r"options of a loss must be a subclass of settings.strict.Strict"):
        LossSpec("a:b", dict)  # type: ignore[arg-type]


def test_losses_are_found_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; from settings.losses import *;"
        "print(find_policy_loss('gspo').function, find_value_loss('clipped').function)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.stdout.split() == [
        find_policy_loss("gspo").function,
        LOSSES["value_loss"]("clipped").function,
    ], ran.stderr
