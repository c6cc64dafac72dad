"""Every algorithm, and a user's own, on real services: two steps each, on one set of services."""

from __future__ import annotations

import json
import math
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from controller import algorithms, job
from controller.tracking.metrics import read_metrics
from integration.harness import Cluster, Service
from rlhf.errors import InvalidRequest, RlhfError
from services.storage.rejected_rows import read_rejected_rows

STEPS = 2
PARITY = 1e-4
SERVICES = {
    "actor": "actor",
    "critic": "critic",
    "cost_critic": "cost_critic",
    "reference": "reference",
    "reward": "reward",
    "cost": "tensor_scorer",
}
"""Name in the run: name of the service that is up."""
EXAMPLE = "examples.plugins.rlhf_example.algorithms:optimist"
CRITICLESS = {"time/generate_sequences_s", "time/compute_reward_s", "time/update_actor_s", "score/mean"}
EXPECTED = {
    "cispo": {"actor/clip_high", "group/same_score"},
    "dapo": {"groups/rounds", "groups/trained", "overlong/mean"},
    "dr_grpo": {"group/same_score"},
    "grpo": {"actor/ref_kl", "group/same_score"},
    "gspo": {"actor/clip_high", "group/same_score"},
    "ppo": {"critic/loss", "kl/mean", "kl/coefficient", "time/update_critic_s"},
    "reinforce_pp": {"kl/mean", "kl/coefficient"},
    "remax": {"kl/mean", "kl/coefficient", "baseline/mean"},
    "rloo": {"kl/mean", "kl/coefficient"},
    "safe_rlhf": {"cost/mean", "cost/recent_mean", "lambda", "critic/loss", "cost_critic/loss", "kl/mean",
                  "time/compute_reward_s", "time/cost_compute_reward_s", "time/cost_critic_update_critic_s"},
    EXAMPLE: set(),
}  # fmt: skip


def run_on(
    cluster: Cluster, directory: Path, name: str, **tables: dict[str, Any]
) -> tuple[Path, dict[str, Any]]:
    """A run of two steps on services that are up."""
    config = cluster.select(**SERVICES)
    changes = {
        **tables,
        "run": {"directory": directory, "steps": STEPS, "samples": 0, **tables.get("run", {})},
    }
    updated = {table: getattr(config, table).model_copy(update=update) for table, update in changes.items()}
    done = job.run(config.model_copy(update=updated), name)
    return done.directory, dict(done.summary)


def initial_sha256(cluster: Cluster, directory: Path) -> str:
    with cluster.service("actor") as actor:
        return actor.export(directory / "initial")


@pytest.mark.parametrize("name", EXPECTED)
def test_an_algorithm_learns_and_tells_of_it(cluster: Cluster, tmp_path: Path, name: str) -> None:
    path, summary = run_on(cluster, tmp_path, name)
    lines = read_metrics(path)
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert all(math.isfinite(value) for line in lines for value in line.values())
    for line in lines[1:]:
        assert CRITICLESS | EXPECTED[name] <= line.keys()
        assert line["actor/grad_norm"] > 0
        assert "reward/mean" in line
    assert summary["actor_sha256"] != initial_sha256(cluster, tmp_path)


def test_every_algorithm_of_the_package_is_tried() -> None:
    assert set(algorithms.names()) == EXPECTED.keys() - {EXAMPLE} | {"distill", "dpo", "sft", "reward_model"}


def test_the_config_that_a_run_leaves_has_its_services_and_options_only(
    cluster: Cluster, tmp_path: Path
) -> None:
    path, _ = run_on(cluster, tmp_path, "dapo", algorithm={"options": {"max_rounds": 3}})
    text = (path / "config.toml").read_text()
    assert "[services.reward]" in text
    assert "[services.critic]" not in text
    assert "max_rounds = 3" in text
    assert "overlong_penalty = 1.0" in text


def test_grpo_samples_dynamically_and_shapes_its_rewards(cluster: Cluster, tmp_path: Path) -> None:
    shaping = {"reward_normalization": "running", "reward_clip": (-10.0, 0.1)}
    path, _ = run_on(cluster, tmp_path, "grpo", algorithm={"options": {"max_rounds": 3}, **shaping})
    trained = [metrics for metrics in read_metrics(path) if "score/mean" in metrics]
    assert trained
    for metrics in trained:
        assert 1 <= metrics["groups/rounds"] <= 3
        assert metrics["groups/trained"] > 0
        assert 0 <= metrics["score/mean"] <= 1
        assert 0 < metrics["score/clipped"] < 1
    text = (path / "config.toml").read_text()
    assert 'reward_normalization = "running"' in text


def test_grpo_without_kl_runs_without_a_reference(cluster: Cluster, tmp_path: Path) -> None:
    path, _ = run_on(cluster, tmp_path, "grpo", algorithm={"kl_loss_coefficient": 0.0})
    assert "[services.reference]" not in (path / "config.toml").read_text()
    assert not {"time/compute_ref_log_prob_s", "actor/ref_kl"} & read_metrics(path)[-1].keys()


def test_the_same_run_twice_gives_the_same_weights(cluster: Cluster, tmp_path: Path) -> None:
    """The multiplier and whatever else is remembered from step to step are functions of the seed too, and to verify the
    weights of all services changes nothing."""
    runs = [run_on(cluster, tmp_path, "safe_rlhf", run={"verify_every": every}) for every in (0, 1)]
    shas = {summary["actor_sha256"] for _, summary in runs}
    assert len(shas) == 1


def test_texts_are_learned_beside_the_rewards(cluster: Cluster, tmp_path: Path) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(f"{json.dumps({'text': f'{n}+{n}={2 * n}'})}\n" for n in range(10, 20)))
    changes: dict[str, Any] = {"data": {"pretrain": texts}, "algorithm": {"pretrain_coefficient": 4.0}}
    path, with_texts = run_on(cluster, tmp_path, "safe_rlhf", **changes)
    _, without = run_on(cluster, tmp_path, "safe_rlhf")
    losses = [line["actor/pretrain_loss"] for line in read_metrics(path)[1:]]
    assert losses[1] < losses[0]
    assert with_texts["actor_sha256"] != without["actor_sha256"]


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_rollout_is_corrected_where_asked_and_was_hardly_off(
    cluster: Cluster, tmp_path: Path, level: str
) -> None:
    correction = {"rollout_correction": "truncate", "rollout_correction_level": level}
    path, _ = run_on(cluster, tmp_path, "grpo", algorithm=correction)
    for line in read_metrics(path)[1:]:
        assert line["actor/rollout_ratio"] == pytest.approx(1.0, abs=1e-3)
        assert line["actor/rollout_cut"] == 0


def test_rollout_and_training_are_compared_in_every_step(cluster: Cluster, tmp_path: Path) -> None:
    path, _ = run_on(cluster, tmp_path, "grpo")
    for line in read_metrics(path)[1:]:
        assert 0 < line["rollout/parity_mean_abs"] <= line["rollout/parity_max_abs"] < PARITY
        assert 0 <= line["rollout/kl"] < PARITY**2


def test_a_truncated_distribution_is_not_compared_with_the_whole(cluster: Cluster, tmp_path: Path) -> None:
    path, _ = run_on(cluster, tmp_path, "grpo", rollout={"top_p": 0.9})
    assert not [key for line in read_metrics(path) for key in line if key.startswith("rollout/")]


def test_a_run_ends_before_the_update_where_rollout_and_training_drift_apart(
    cluster: Cluster, tmp_path: Path
) -> None:
    with pytest.raises(
        RlhfError,
        match=r"^step 1: .*actor's .* up to \S+ apart, .*max_log_prob_drift, 1e-12; its rows are in "
        r"\S+/rejected/step-1$",
    ):
        run_on(cluster, tmp_path, "grpo", algorithm={"max_log_prob_drift": 1e-12})
    kept = [read_rejected_rows(path) for path in tmp_path.glob("*/rejected/step-1/actor-rank-*.json")]
    assert 0 < sum(len(rows.facts["rows"]) for rows in kept) <= cluster.config.rows_per_step
    assert all({"response_ids", "rollout_log_probs"} <= rows.columns.keys() for rows in kept)
    with closing(Service("actor", cluster.config.services["actor"].address)) as actor:
        assert set(actor.versions) == {0}


def test_a_run_within_its_drift_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    _, summary = run_on(cluster, tmp_path, "grpo", algorithm={"max_log_prob_drift": PARITY})
    assert summary["steps"] == STEPS


def test_dapo_ends_with_one_line_where_no_prompt_has_anything_to_teach(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Greedy responses to one prompt are all the same."""
    changes: dict[str, Any] = {
        "rollout": {"temperature": 1e-3},
        "algorithm": {"options": {"max_rounds": 2}},
    }
    with pytest.raises(InvalidRequest, match="in 2 rounds no prompt had responses with different rewards"):
        run_on(cluster, tmp_path, "dapo", **changes)
