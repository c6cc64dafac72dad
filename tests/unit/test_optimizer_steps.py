"""Learning rates whose schedule follows the length of the run."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from controller.algorithms import find_algorithm
from controller.checkpoints.facts import changed_learning_rates, check_config
from controller.cli import main as rlhf_controller
from controller.config.config import Config, as_config, load
from controller.optimizer_steps import with_total_steps
from controller.plan import Plan
from rlhf.errors import ConfigError
from services.roles.engine_factory import optimizer_options
from services.runtime import main
from settings.model import OptimizerTable

QUICKSTART = Path(__file__).parents[2] / "deploy" / "quickstart" / "quickstart.toml"
SIZES = ("data.prompts_per_step=16", "rollout.samples_per_prompt=4", "algorithm.mini_batch_size=16")
FALLING = "optimizer.schedule='linear'"


def of_ppo(*settings: str) -> Config:
    return find_algorithm("ppo").configure(load(QUICKSTART, (*SIZES, "run.steps=10", *settings)))


def optimizer_of(config: Config, name: str = "actor") -> OptimizerTable:
    found = getattr(config.services[name], "optimizer", None)
    assert isinstance(found, OptimizerTable)
    return found


def totals(config: Config) -> dict[str, int]:
    found = with_total_steps(config)
    return {name: optimizer_of(found, name).total_steps for name in ("actor", "critic")}


def test_a_schedule_ends_with_the_run() -> None:
    config = of_ppo(f"services.actor.{FALLING}", f"services.critic.{FALLING}")
    assert totals(config) == {"actor": 40, "critic": 40}
    more = {"epochs": 2, "critic_epochs": 3, "critic_warmup_steps": 4}
    table = config.algorithm.model_copy(update=more)
    assert totals(config.model_copy(update={"algorithm": table})) == {
        "actor": 6 * 2 * 4,
        "critic": 10 * 3 * 4,
    }


def test_a_number_that_is_given_or_not_needed_stays() -> None:
    config = of_ppo(f"services.actor.{FALLING}", "services.actor.optimizer.total_steps=7")
    assert totals(config) == {"actor": 7, "critic": 0}
    assert with_total_steps(config) == config


def test_a_warm_up_is_a_fraction_of_the_run() -> None:
    ratio = "optimizer.warmup_ratio=0.1"
    config = with_total_steps(
        of_ppo(f"services.actor.{ratio}", f"services.critic.{ratio}", f"services.critic.{FALLING}")
    )
    for name, schedule in (("actor", "constant"), ("critic", "linear")):
        table = optimizer_of(config, name)
        found = optimizer_options(table)
        given = {"warmup_steps": 4, "schedule": schedule, "total_steps": 40 if schedule == "linear" else 0}
        same = optimizer_options(OptimizerTable(learning_rate=table.learning_rate, **given))
        assert [found.lr_at(step) for step in range(45)] == [same.lr_at(step) for step in range(45)]
    assert OptimizerTable(warmup_ratio=0.29, total_steps=100).num_warmup_steps == 29


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            (f"services.actor.{FALLING}", "services.actor.optimizer.warmup_steps=40"),
            "services.actor.optimizer, for a run of 40 optimizer steps: .*given are 40 and 40",
        ),
        (
            ("services.actor.optimizer.warmup_ratio=0.1", "services.actor.optimizer.warmup_steps=4"),
            "give warmup_steps or warmup_ratio, not both",
        ),
        (
            (f"services.actor.{FALLING}", "algorithm.critic_warmup_steps=10"),
            "services.actor.optimizer.total_steps: has to be given where no step of the run updates the service: "
            "run.steps is 10, algorithm.critic_warmup_steps is 10",
        ),
    ],
)
def test_a_warm_up_that_cannot_be_is_refused(settings: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        with_total_steps(of_ppo(*settings))


def test_a_dry_run_of_a_quickstart_shows_the_number() -> None:
    flags = ("--set", f"services.actor.{FALLING}", "--set", "run.steps=10")
    ran = CliRunner().invoke(rlhf_controller, ["--algo", "ppo", "--dry-run", *flags])
    assert ran.exit_code == 0, ran.output
    quickstart = find_algorithm("ppo").configure(
        load(QUICKSTART, ("run.steps=10", f"services.actor.{FALLING}"))
    )
    shown = tomllib.loads(ran.stdout)["services"]["actor"]["optimizer"]["total_steps"]
    assert shown == totals(quickstart)["actor"] > 0


@pytest.mark.parametrize("keys", [{"schedule": "cosine"}, {"warmup_ratio": 0.1}])
def test_a_service_that_is_started_by_itself_needs_the_number(keys: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    table = load(QUICKSTART).services["actor"]
    alone = table.model_copy(update={"model": tmp_path, "ranks": 1, "optimizer": OptimizerTable(**keys)})
    with pytest.raises(
        ConfigError, match=r"services.actor.optimizer.total_steps: has to be given to a service"
    ):
        main._check(alone, "actor", "actor")


def tables(directory: Path, **run: Any) -> dict[str, Any]:
    path = directory / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}=", "response": "x"}) + "\n" for i in range(33)))
    actor = {
        "role": "actor",
        "address": "127.0.0.1:7101",
        "model": directory / "model",
        "optimizer": {"schedule": "cosine", "warmup_ratio": 0.25},
    }
    return {
        "run": run,
        "data": {"train": path, "heldout_rows": 1, "prompts_per_step": 8},
        "algorithm": {"mini_batch_size": 4},
        "services": {"actor": actor},
    }


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("controller.plan.check_models", lambda config: None)
    return lambda given: Plan.of(find_algorithm("sft"), as_config(given))


def test_passes_over_the_rows_count_as_steps(planned: Any, tmp_path: Path) -> None:
    found = optimizer_of(planned(tables(tmp_path, epochs=3)).config)
    assert (found.total_steps, found.num_warmup_steps) == (3 * 4 * 2, 6)


def test_a_constant_schedule_takes_the_place_of_the_computed_steps_in_the_file_of_a_run(
    planned: Any, tmp_path: Path
) -> None:
    given = tables(tmp_path, steps=10)
    del given["services"]["actor"]["optimizer"]["warmup_ratio"]
    first = planned(given)
    assert optimizer_of(first.config).total_steps == 20
    (path := tmp_path / "config.toml").write_text(first.resolved(first.config))
    constant = "services.actor.optimizer.schedule=constant"
    found = optimizer_of(load(path, (constant,)))
    assert (found.schedule, found.total_steps) == ("constant", 0)
    with pytest.raises(ConfigError, match="total_steps for these and for warmup_ratio"):
        load(path, (constant, "services.actor.optimizer.total_steps=20"))
    assert optimizer_of(load(path, (constant, "services.actor.optimizer.warmup_ratio=0.1"))).total_steps == 20


def test_the_file_of_a_run_keeps_its_schedule_whatever_its_length(planned: Any, tmp_path: Path) -> None:
    first = planned(tables(tmp_path, steps=10))
    assert optimizer_of(first.config).total_steps == 20
    written = tomllib.loads(first.resolved(first.config))
    longer = {**written, "run": {**written["run"], "steps": 100}}
    assert optimizer_of(planned(longer).config) == optimizer_of(first.config)
    longer["services"]["actor"]["optimizer"]["total_steps"] = 0
    anew = planned(longer)
    assert optimizer_of(anew.config).total_steps == 200
    before, now = (plan.algorithm.resolved(plan.config) for plan in (first, anew))
    check_config(before, now, elsewhere=False)
    assert changed_learning_rates(before, now) == {"services.actor.optimizer.total_steps": (20, 200)}
