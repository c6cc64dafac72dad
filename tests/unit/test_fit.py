"""A model that does not divide over its mesh is refused before its service starts, wherever the service is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from controller.cli import main
from controller.config.config import Config, load
from controller.foresight import check_models
from deploy import preflight
from rlhf.errors import ConfigError
from settings.fit import check_model_fits, read_shape
from settings.reward import RewardTable
from settings.services import load_service

QUICKSTART = Path(__file__).parents[2] / "deploy/quickstart/quickstart.toml"
SHAPE = {"num_hidden_layers": 6, "num_attention_heads": 12, "num_key_value_heads": 4, "hidden_size": 96}
MISFIT = (
    "services.actor: mesh 1-8-1 does not fit the model: its 12 attention heads cannot be dealt out to 8 tensor ranks; "
    "the nearest that fit: 1-4-2, 2-4-1, 1-2-4"
)


def model(directory: Path, config: object) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def settings(directory: Path) -> tuple[str, ...]:
    keys = ("engine='3d'", "mesh='1-8-1'", "ranks=8", f"model='{directory}'")
    return tuple(f"services.actor.{key}" for key in keys)


def misfit(directory: Path) -> Config:
    return load(QUICKSTART, settings(model(directory, SHAPE)))


def test_a_table_is_valid_whatever_the_model_directory_holds(tmp_path: Path) -> None:
    assert misfit(tmp_path).services["actor"] == load_service(QUICKSTART, "actor", settings(tmp_path))


def test_a_misfit_is_told_with_the_service_and_the_nearest_meshes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        check_model_fits("actor", misfit(tmp_path).services["actor"])
    assert str(raised.value) == MISFIT


def test_the_launcher_refuses_a_misfit(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        preflight.check(misfit(tmp_path), ["actor"])
    assert str(raised.value) == MISFIT


def test_a_dry_run_refuses_a_misfit(tmp_path: Path) -> None:
    model(tmp_path, SHAPE)
    flags = [flag for setting in settings(tmp_path) for flag in ("--set", setting)]
    ran = CliRunner().invoke(main, ["--algo", "ppo", "--dry-run", *flags])
    assert (ran.exit_code, ran.output) == (2, f"error: {MISFIT}\n")


def short(directory: Path, positions: int) -> tuple[str, ...]:
    """Settings of a service whose model has so many positions, with responses of 100 tokens."""
    config = {"max_position_embeddings": positions}
    return (f"services.critic.model='{model(directory, config)}'", "rollout.max_response_tokens=100")


def test_a_model_without_positions_for_a_prompt_beside_a_response_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the quickstart's model, if it was built, has fewer positions
    config = load(QUICKSTART, short(tmp_path, 100))
    expected = (
        "rollout.max_response_tokens: 100 leave no room for a prompt in services.critic, whose model "
        f"{tmp_path} reads rows of up to 100 tokens in all (max_position_embeddings)"
    )
    with pytest.raises(ConfigError) as raised:
        check_models(config)
    assert str(raised.value) == expected
    with pytest.raises(ConfigError) as raised:
        preflight.check(config, ["critic"])
    assert str(raised.value) == expected
    check_models(load(QUICKSTART, short(tmp_path, 101)))
    check_model_fits(
        "critic", config.services["critic"]
    )  # a service alone does not know the length of responses


@pytest.mark.parametrize("engine", ["fsdp", "zero"])
def test_a_model_that_does_not_divide_over_its_generation_mesh_is_refused(
    engine: str, tmp_path: Path
) -> None:
    keys = ("ranks=8", "generation_mesh='1-8-1'", f"engine='{engine}'", f"model='{model(tmp_path, SHAPE)}'")
    config = load(QUICKSTART, tuple(f"services.actor.{key}" for key in keys))
    with pytest.raises(ConfigError) as raised:
        check_model_fits("actor", config.services["actor"])
    assert str(raised.value) == MISFIT.replace("mesh", "generation_mesh", 1)


def test_vllm_is_refused_where_heads_are_too_small(tmp_path: Path) -> None:
    shape = SHAPE | {"head_dim": None, "hidden_size": 96}
    keys = ("rollout_engine='vllm'", f"model='{model(tmp_path, shape)}'")
    config = load(QUICKSTART, tuple(f"services.actor.{key}" for key in keys))
    with pytest.raises(
        ConfigError, match=r"services\.actor: .* at least 32 dimensions, and the model's have 8"
    ):
        check_model_fits("actor", config.services["actor"])


@pytest.mark.parametrize("config", [None, [], {"num_attention_heads": None}])
def test_a_model_whose_sizes_cannot_be_read_fits(config: object, tmp_path: Path) -> None:
    if config is not None:
        model(tmp_path, config)
    assert read_shape(tmp_path) == {}
    check_model_fits("actor", load(QUICKSTART, settings(tmp_path)).services["actor"])


def test_a_service_without_a_model_fits() -> None:
    check_model_fits("reward", RewardTable(role="reward", address="127.0.0.1:1"))
