"""An arena that a step may not fit into is told before anything starts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from controller import foresight
from controller.algorithms import find_algorithm
from controller.config.config import Config, load
from controller.foresight import arena_mb_needed, arena_warnings
from rlhf.errors import ConfigError
from settings.hub import DESCRIPTION

QUICKSTART = Path(__file__).parents[2] / "deploy/quickstart/quickstart.toml"


def config(*settings: str) -> Config:
    return load(QUICKSTART, ("data.prompts_per_step=8192", "rollout.max_response_tokens=1024", *settings))


def test_what_is_needed_by_hand() -> None:
    # Two ranks of the actor hold 4,096 rows each: 256 ids of a prompt, 1,024 of a response, three floats to these.
    assert arena_mb_needed(config(), prompt_tokens=256) == {
        "actor": 4096 * (256 * 4 + 1024 * (4 + 3 * 4)) // 2**20,
        "critic": 8192 * 1024 * 8 // 2**20,
        "reference": 8192 * 1024 * 4 // 2**20,
    }


def test_a_mesh_divides_the_rows_over_its_data_ranks_alone() -> None:
    mesh = ("services.actor.engine='3d'", "services.actor.mesh='1-2-1'", "services.actor.model='nowhere'")
    assert arena_mb_needed(config(*mesh), 0)["actor"] == 2 * arena_mb_needed(config(), 0)["actor"]


def test_a_large_batch_of_an_evaluation_counts() -> None:
    settings = ("data.prompts_per_step=128", "run.evaluation_rows=8192")
    assert arena_mb_needed(config(*settings), 0) == arena_mb_needed(config(), 0)


def further(algorithm: str, quickstart: str, *settings: str) -> dict[str, int]:
    """Returns the arenas that an algorithm needs beyond those of an algorithm that keeps one response per row."""
    found = find_algorithm(algorithm)
    sized = ("data.prompts_per_step=8192", "rollout.max_response_tokens=1024", *settings)
    configured = found.configure(load(QUICKSTART.with_name(f"{quickstart}.toml"), sized))
    needed = arena_mb_needed(configured, 256, found.further_responses(configured))
    return {name: needed[name] - mb for name, mb in arena_mb_needed(configured, 256).items()}


GENERATED_MB = (256 * 4 + 1024 * (4 + 4)) * 4096 // 2**20
"""Of 4,096 responses: ids of prompt and response, and the log-probabilities of sampling."""


def test_the_greedy_responses_of_remax_count() -> None:
    """One per prompt, which two ranks of the actor share; other services do not keep them."""
    assert further("remax", "quickstart") == {"actor": GENERATED_MB, "reference": 0}


def test_all_responses_to_a_prompt_are_in_one_batch_of_an_evaluation() -> None:
    sampled = ("rollout.evaluation.temperature=1", "rollout.evaluation.samples=65536")
    few, many = (
        arena_mb_needed(load(QUICKSTART, ("run.evaluation_rows=1", *settings)), 256)
        for settings in ((), sampled)
    )
    assert many["actor"] > 30 * few["actor"]


def test_an_evaluation_of_distill_keeps_two_responses_where_a_reward_scores_one() -> None:
    ranks, rows = ("services.actor.ranks=2",), ("data.prompts_per_step=128", "run.evaluation_rows=8192")
    assert further("distill", "distill", *ranks, *rows)["actor"] == GENERATED_MB
    config = load(QUICKSTART.with_name("distill.toml"), rows)
    teacher = {name: table for name, table in config.services.items() if name != "reward"}
    distill = find_algorithm("distill")
    assert distill.further_responses(config.model_copy(update={"services": teacher})) == (0, 0)


def test_the_responses_of_all_rounds_of_dapo_count() -> None:
    """Which end with their step, those of groups that it does not train on too."""
    settings = (
        "rollout.samples_per_prompt=2",
        "data.prompts_per_step=4096",
        "algorithm.options.max_rounds=3",
    )
    assert further("dapo", "groups", "services.actor.ranks=2", *settings)["actor"] == 2 * GENERATED_MB


def test_the_figure_that_is_needed_is_told_with_its_key() -> None:
    lines = arena_warnings(config("services.critic.arena_mb=64", "services.reference.arena_mb=1"), 256)
    assert [line.partition(":")[0] for line in lines] == [
        "services.actor.arena_mb", "services.reference.arena_mb"
    ]  # fmt: skip
    assert lines[0].endswith("64 may be too small: if all responses have rollout.max_response_tokens, 1024, "
                             "each rank needs 68")  # fmt: skip


@pytest.mark.parametrize("name", ["ppo", "remax", "grpo", "dapo", "distill"])
def test_bundled_configurations_have_arenas_that_are_large_enough(name: str) -> None:
    algorithm = find_algorithm(name)
    config = algorithm.configure(load(QUICKSTART.with_name(f"{algorithm.quickstart}.toml")))
    assert arena_warnings(config, 64, algorithm.further_responses(config)) == []


def test_models_on_the_hub_are_described_here_where_that_is_possible(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A controller without a network goes on, as for directories that are on other hosts."""
    asked = []

    def fetch(model: Path, key: str, within_s: float, files: Sequence[str]) -> Path:
        asked.append((str(model), key, within_s, files))
        raise ConfigError("the hub cannot be reached")

    monkeypatch.setattr(foresight, "fetch", fetch)
    on_hub = load(QUICKSTART, ("services.actor.model='owner/tiny@v1'", "run.connect_timeout_s=7"))
    foresight.fetch_descriptions(on_hub)
    assert asked == [("owner/tiny@v1", "services.actor.model", 7.0, DESCRIPTION)]
    assert [record.getMessage() for record in caplog.records] == ["the hub cannot be reached"]


def write_tokenizer(directory: Path, vocabulary: object, **added: int) -> Path:
    directory.mkdir()
    tokens = [{"content": token, "id": number} for token, number in added.items()]
    tables = {"model": {"vocab": vocabulary}, "added_tokens": tokens}
    (directory / "tokenizer.json").write_text(json.dumps(tables))
    (directory / "tokenizer_config.json").write_text("{}")
    return directory


def test_a_model_with_another_tokenizer_than_the_actor_is_refused_before_anything_starts(
    tmp_path: Path,
) -> None:
    actor = write_tokenizer(tmp_path / "actor", {"a": 0, "b": 1}, end=2)
    same = write_tokenizer(tmp_path / "same", [["a", 0.0], ["b", -1.5], ["end", 0.0]])
    more = write_tokenizer(tmp_path / "more", {"a": 0, "b": 1}, end=2, think=3)

    def check(reference: Path) -> None:
        models = {"actor": actor, "critic": tmp_path / "elsewhere", "reference": reference}
        settings = (f"services.{name}.model='{path}'" for name, path in models.items())
        foresight.check_models(load(QUICKSTART, tuple(settings)))

    check(actor)
    check(same)
    with pytest.raises(
        ConfigError,
        match=r"^services\.reference\.model: its tokenizer is not that of services\.actor: token 'think' is 3 "
        r"there, and none in \S+/actor$",
    ):
        check(more)
    # A special token may be named without an id; it gets one where the tokenizer is loaded, as in "more".
    (actor / "tokenizer_config.json").write_text(json.dumps({"extra_special_tokens": ["think"]}))
    check(more)
    (actor / "tokenizer_config.json").write_text("{}")
    (actor / "special_tokens_map.json").write_text(json.dumps({"pad_token": {"content": "think"}}))
    check(more)
