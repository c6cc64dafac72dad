"""Rows of steps for files: one text or number of each column, scores per token summed."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from unit.simulated_run import simulate

from controller.role_groups.dataflow import FutureBatch
from controller.tracking.marks import remove_rollouts
from controller.tracking.recorder import Recorder
from controller.tracking.run_directory import RunDirectory
from controller.training.rollouts import rollout_rows
from nccl_transfer.refs.columns import Jagged
from rlhf.errors import RlhfError

IDS = Jagged(np.arange(5), np.array([2, 3]))
GENERATED: dict[str, Any] = {
    "prompt": ["1+1=", "é\n"],
    "metadata": ["{}", "{}"],
    "response_ids": IDS,
    "rollout_log_probs": Jagged(np.zeros(5, np.float32), np.array([2, 3])),
    "response": ["2", "\u2028"],
    "advantages": Jagged(np.ones(5), np.array([2, 3])),
}


def test_rows_have_texts_tokens_and_every_score() -> None:
    scores = {
        "rewards": np.array([1.2, np.nan]),
        "rewards/math": np.array([1.0, 0.5]),
        "costs": np.array([3, 4]),
    }
    batch = FutureBatch.of(**GENERATED, source=["a", "b"], prompt_number=np.array([7, 8]), **scores)
    first, second = rollout_rows(batch)
    assert first == {
        "prompt_number": 7,
        "source": "a",
        "prompt": "1+1=",
        "response": "2",
        "reward": 1.2,
        "reward/math": 1.0,
        "cost": 3,
        "tokens": 2,
    }
    assert (second["prompt"], second["cost"], second["tokens"]) == ("é\n", 4, 3)


def test_scores_per_token_are_summed() -> None:
    batch = FutureBatch.of(**GENERATED, rewards=Jagged(np.array([0.5, 1, 0, 2, 4]), np.array([2, 3])))
    assert [row["reward"] for row in rollout_rows(batch)] == [1.5, 6.0]


def test_tokens_of_an_environment_do_not_count() -> None:
    sampled = Jagged(np.zeros(3, np.float32), np.array([1, 2]))
    mask = Jagged(np.array([True, False, True, True, False]), np.array([2, 3]))
    given = {**GENERATED, "rollout_log_probs": sampled, "response_mask": mask}
    assert [row["tokens"] for row in rollout_rows(FutureBatch.of(**given))] == [1, 2]


@pytest.mark.parametrize("lacks", ["rollout_log_probs", "response"])
def test_responses_of_the_data_are_no_rollouts(lacks: str) -> None:
    given = {name: values for name, values in GENERATED.items() if name != lacks}
    assert rollout_rows(FutureBatch.of(**given)) == []


def recorder(directory: Path) -> Recorder:
    return Recorder(RunDirectory(directory), SimpleNamespace())  # type: ignore[arg-type]


def test_files_hold_a_row_on_each_line(tmp_path: Path) -> None:
    found = recorder(tmp_path)
    found.rollouts(3, [])
    assert not (tmp_path / "rollouts").exists()
    rows = [{"response": "\u2028\n", "reward": float("nan")}, {"response": "", "reward": 1.0}]
    for step in (3, 3, 4):
        found.rollouts(step, rows)
    assert sorted(path.name for path in (tmp_path / "rollouts").iterdir()) == ["step-3.jsonl", "step-4.jsonl"]
    lines = (tmp_path / "rollouts" / "step-3.jsonl").read_bytes().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 3, "response": "\u2028\n", "reward": "NaN"},
        {"step": 3, "response": "", "reward": 1.0},
    ]


def test_a_resumed_run_has_no_files_of_the_steps_that_it_goes_back_behind(tmp_path: Path) -> None:
    remove_rollouts(tmp_path, 2)
    found = recorder(tmp_path)
    for step in (1, 2, 3, 10):
        found.rollouts(step, [{"reward": 1.0}])
    others = [tmp_path / "rollouts" / name for name in ("step-3.jsonl.gz", "step-x.jsonl", "notes")]
    for path in others:
        path.touch()
    remove_rollouts(tmp_path, 2)
    kept = {"step-1.jsonl", "step-2.jsonl", *(path.name for path in others)}
    assert {path.name for path in (tmp_path / "rollouts").iterdir()} == kept


def test_a_file_that_cannot_be_written_ends_the_run_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "rollouts").write_text("in the way")
    with pytest.raises(RlhfError, match="file exists while writing rollouts"):
        recorder(tmp_path).rollouts(3, [{"reward": 1.0}])


@pytest.mark.parametrize(
    ("name", "settings"),
    list(
        itertools.product(
            ("ppo", "dapo", "remax", "safe_rlhf"), ((), ("run.ahead=1",), ("rollout.chunks=2",))
        )
    ),
)
def test_training_is_the_same_with_files(name: str, settings: tuple[str, ...], tmp_path: Path) -> None:
    plain = simulate(tmp_path, name, *settings)
    run = simulate(tmp_path, name, *settings, "run.rollouts_every=2")
    assert run.states() == plain.states()
    ours, theirs = (
        {
            step: {k: v for k, v in each.items() if not k.startswith("transfer/")}
            for step, each in found.items()
        }
        for found in (run.notes.metrics, plain.notes.metrics)
    )
    assert ours == theirs
    assert not plain.notes.rollouts_of
    assert sorted(run.notes.rollouts_of) == [2, 4]
    for rows in run.notes.rollouts_of.values():
        assert rows
        assert all({"prompt", "response", "reward", "tokens"} <= row.keys() for row in rows)
