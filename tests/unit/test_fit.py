"""A model that does not divide over its mesh is refused before its service starts, wherever the service is started."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from controller.cli import main
from controller.config.config import Config, load
from controller.config.rollout import RolloutTable
from controller.foresight import check_models
from deploy import preflight
from rlhf.errors import ConfigError
from settings.actor import ActorTable
from settings.fit import check_model_fits, read_shape, sized_for_rows
from settings.reward import RewardTable
from settings.services import row_tokens, service_of, shares_devices
from settings.strict import read_tables

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
    tables = read_tables(QUICKSTART, settings(tmp_path))
    assert misfit(tmp_path).services["actor"] == service_of(tables, "actor", QUICKSTART)


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


def test_the_reward_of_an_environment_needs_one() -> None:
    with pytest.raises(ConfigError, match=r"^services\.reward\.function: environment .*factory names none"):
        check_models(load(QUICKSTART, ("services.reward.function=environment",)))
    given = ("rollout.environment.factory=mine:Own", "rollout.environment.turn_tokens=4")
    check_models(load(QUICKSTART, ("services.reward.function=environment", *given)))


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


@pytest.mark.parametrize(("ranks", "fits"), [(2, True), (3, False), (4, True), (6, False), (12, True)])
def test_ranks_that_cannot_divide_the_attention_heads_of_a_row_are_refused(
    ranks: int, fits: bool, tmp_path: Path
) -> None:
    # 12 heads of queries, 4 of keys and values: 12 ranks share each of these by threes.
    keys = (f"ranks={ranks}", f"sequence_parallel={ranks}", f"model='{model(tmp_path, SHAPE)}'")
    table = load(QUICKSTART, tuple(f"services.actor.{key}" for key in keys)).services["actor"]
    if fits:
        check_model_fits("actor", table)
        return
    with pytest.raises(
        ConfigError,
        match="services.actor: sequence_parallel: 12 attention heads and 4 key-value heads cannot be dealt out to "
        f"{ranks} ranks; allowed: 1, 2, 4, 12",
    ):
        check_model_fits("actor", table)


@pytest.mark.parametrize(
    ("keys", "kind", "named"),
    [
        (("ranks=2", "engine='3d'", "mesh='1-2-1'"), "mixtral", "engine 3d"),
        (("ranks=2", "generation_mesh='1-2-1'"), "mixtral", "generation_mesh 1-2-1"),
        (("ranks=2", "engine='zero'", "generation_mesh='2-1-1'"), "gemma", "generation_mesh 2-1-1"),
        (("ranks=2", "sequence_parallel=2"), "gpt2", "sequence_parallel 2"),
        (("ranks=2", "role='rollout'", "mesh='1-2-1'"), "qwen3_moe", "mesh 1-2-1"),
        (("ranks=2", "sequence_parallel=2"), "gemma", ""),
        (("ranks=2", "generation_mesh='1-1-2'"), "gemma", ""),
        (("ranks=2", "role='rollout'", "mesh='1-1-2'"), "gemma", ""),
        (("ranks=2", "engine='3d'", "mesh='1-2-1'"), "qwen3", ""),
    ],
)
def test_ranks_compute_models_of_some_types_together(
    keys: tuple[str, ...], kind: str, named: str, tmp_path: Path
) -> None:
    path = tmp_path / "services.toml"
    path.write_text("[services.policy]\nrole = 'actor'\naddress = '127.0.0.1:1'\n")
    given = (*keys, f"model='{model(tmp_path, SHAPE | {'model_type': kind})}'")
    table = service_of(read_tables(path, tuple(f"services.policy.{key}" for key in given)), "policy", path)
    if not named:
        check_model_fits("policy", table)
        return
    with pytest.raises(ConfigError, match=f"services.policy: {named} is for models .* is of type {kind}"):
        check_model_fits("policy", table)


def test_vllm_is_refused_where_heads_are_too_small(tmp_path: Path) -> None:
    shape = SHAPE | {"head_dim": None, "hidden_size": 96}
    keys = ("rollout_engine='vllm'", f"model='{model(tmp_path, shape)}'")
    config = load(QUICKSTART, tuple(f"services.actor.{key}" for key in keys))
    with pytest.raises(
        ConfigError, match=r"services\.actor: .* at least 32 dimensions, and the model's have 8"
    ):
        check_model_fits("actor", config.services["actor"])


LLAMA = {
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
}
"""A token takes 2 * 4 layers * 4 heads * 32 * 2 bytes = 2 KiB of KV cache in bfloat16."""


def vllm(directory: Path, *keys: str, shape: object = LLAMA) -> Config:
    engine = ("rollout_engine='vllm'", f"model='{model(directory, shape)}'", "dtype='bfloat16'")
    services = [f"services.actor.{key}" for key in engine]
    return load(QUICKSTART, (*services, *keys))


@pytest.mark.parametrize(
    ("keys", "tokens"),
    [
        (("data.max_prompt_tokens=1000", "rollout.max_response_tokens=24"), 1024),
        (("services.actor.vllm.max_model_len=2048",), 2048),
        (("data.max_prompt_tokens=9000", "services.actor.vllm.max_model_len=2048"), 2048),
        (("data.max_prompt_tokens=0",), 131072),
        (("data.max_prompt_tokens=200000",), 131072),
    ],
)
def test_a_kv_cache_that_cannot_hold_a_row_is_refused_before_vllm_would(
    keys: tuple[str, ...], tokens: int, tmp_path: Path
) -> None:
    enough = tokens / 2**19
    check_models(vllm(tmp_path, *keys, f"services.actor.vllm.kv_cache_gb={enough}"))
    too_small = vllm(tmp_path, *keys, f"services.actor.vllm.kv_cache_gb={0.99 * enough}")
    with pytest.raises(
        ConfigError,
        match=rf"services\.actor\.vllm\.kv_cache_gb: .* cannot hold the KV cache of one row of {tokens} tokens",
    ):
        check_models(too_small)
    if importlib.util.find_spec("vllm"):
        with pytest.raises(ConfigError, match="cannot hold the KV cache of one row"):
            preflight.check(too_small, ["actor"])


@pytest.mark.parametrize(
    ("keys", "shape"),
    [
        (("services.actor.engine='3d'", "services.actor.ranks=4", "services.actor.mesh='1-4-1'"), LLAMA),
        (("services.actor.vllm.engine_args.kv_cache_dtype='fp8'",), LLAMA),
        ((), {**LLAMA, "model_type": "mistral", "sliding_window": 4096}),
        ((), {**LLAMA, "model_type": "another"}),
    ],
    ids=["tensor ranks", "another type", "sliding window", "unknown model"],
)
def test_a_kv_cache_that_vllm_may_find_large_enough_passes(
    keys: tuple[str, ...], shape: object, tmp_path: Path
) -> None:
    keys = (*keys, "data.max_prompt_tokens=0", "services.actor.vllm.kv_cache_gb=0.0625")
    check_models(vllm(tmp_path, *keys, shape=shape))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (("data.max_prompt_tokens=1000", "rollout.max_response_tokens=24"), 1024),
        (("data.max_prompt_tokens=1000", "services.actor.vllm.max_model_len=2000"), 2000),
        (("data.max_prompt_tokens=131072",), 131072),
        (("data.max_prompt_tokens=0",), 0),
        (("data.max_prompt_tokens='many'",), 0),
    ],
)
def test_the_length_of_vllms_rows_is_that_of_the_run(
    keys: tuple[str, ...], expected: int, tmp_path: Path
) -> None:
    settings = (
        "services.actor.rollout_engine='vllm'",
        f"services.actor.model='{model(tmp_path, LLAMA)}'",
        *keys,
    )
    tables = read_tables(QUICKSTART, settings)
    table = sized_for_rows(service_of(tables, "actor", QUICKSTART), row_tokens(tables))
    assert isinstance(table, ActorTable)
    assert table.vllm.max_model_len == expected


def test_services_and_controller_agree_on_the_length_of_rows(tmp_path: Path) -> None:
    prompt = "data.max_prompt_tokens=10"
    for keys in ((), (prompt,), (prompt, "rollout.max_response_tokens=7")):
        assert load(QUICKSTART, keys).row_tokens == row_tokens(read_tables(QUICKSTART, keys))
    path = tmp_path / "short.toml"
    path.write_text("[data]\nmax_prompt_tokens = 5\n")
    assert row_tokens(read_tables(path)) == 5 + RolloutTable().max_response_tokens


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 64},
        {"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 64}},
        {"rope_parameters": {"full": {"rope_type": "longrope", "original_max_position_embeddings": 64}}},
    ],
)
def test_rows_with_longrope_are_no_longer_than_its_first_positions(rope: dict, tmp_path: Path) -> None:
    model(tmp_path, {"max_position_embeddings": 128, **rope})
    assert read_shape(tmp_path)["max_position_embeddings"] == 64
    model(tmp_path, {"max_position_embeddings": 128, "rope_scaling": {"type": "linear", "factor": 2.0}})
    assert read_shape(tmp_path)["max_position_embeddings"] == 128


@pytest.mark.parametrize("config", [None, [], {"num_attention_heads": None}])
def test_a_model_whose_sizes_cannot_be_read_fits(config: object, tmp_path: Path) -> None:
    if config is not None:
        model(tmp_path, config)
    assert read_shape(tmp_path) == {}
    check_model_fits("actor", load(QUICKSTART, settings(tmp_path)).services["actor"])


def test_a_service_without_a_model_fits() -> None:
    check_model_fits("reward", RewardTable(role="reward", address="127.0.0.1:1"))


@pytest.mark.parametrize(
    ("settings", "shares"), [((), False), (("services.actor.pool=one",), True), (("placement=split",), True)]
)
def test_services_of_a_pool_or_a_placement_may_share_devices(settings: tuple[str, ...], shares: bool) -> None:
    """They keep no memory of the device cached between calls."""
    tables = read_tables(QUICKSTART, settings)
    assert shares_devices(tables, service_of(tables, "actor", QUICKSTART)) is shares
