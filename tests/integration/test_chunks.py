"""Rows in chunks on real services: the bits of one call where micro-batches are the same, and calls that overlap."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from controller import job
from controller.config.config import Config
from controller.tracking.timeline import read_events
from integration.conftest import Task
from integration.harness import Processes, free_ports, write_config
from integration.resuming import Results, resumable, with_tables

pytestmark = pytest.mark.timeout(600)

PPO = ("actor", "critic", "reference", "reward")
PROMPT_TOKENS, RESPONSE_TOKENS, PROMPTS = 16, 6, 8
ROW_TOKENS = PROMPT_TOKENS + RESPONSE_TOKENS
"""No two rows fit into a batch of as many tokens, so micro-batches do not depend on which rows are in a call."""


@pytest.fixture(scope="module")
def config(config: Config, task: Task, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Config]:
    """The config of services that are up, which compute each row in a batch of its own."""
    directory = tmp_path_factory.mktemp("chunks")
    for name in ("train", "heldout"):
        rows = [{"prompt": f"{row:07d}+{7 * row:07d}=", "ground_truth": str(8 * row)} for row in range(32)]
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = {"model": task.model, "micro_batch_tokens": ROW_TOKENS}
    roots = [tmp_path_factory.getbasetemp()]
    learner = {**model, "optimizer": {"learning_rate": 3e-4}, "output_roots": roots}
    generator = {"rollout_tokens": ROW_TOKENS}
    tables: dict[str, dict[str, Any]] = {
        "actor": {"role": "actor", **learner, **generator},
        "rollout": {"role": "rollout", "model": task.model, **generator},
        "critic": {"role": "critic", **learner},
        "reference": {"role": "reference", **model},
        "reward": {"role": "reward", "function": "toy_rewards:digit_mean"},
    }
    services = {
        name: {"address": f"127.0.0.1:{port}", **table}
        for (name, table), port in zip(tables.items(), free_ports(len(tables)), strict=True)
    }
    data = {
        "train": directory / "train.jsonl",
        "heldout": directory / "heldout.jsonl",
        "prompts_per_step": PROMPTS,
    }
    given = config.model_dump(exclude_unset=True)
    found = Config.model_validate(
        {**given, "data": data, "algorithm": {"mini_batch_size": PROMPTS}, "services": services}
    )
    processes = Processes()
    try:
        processes.serve(write_config(found, directory / "services.toml"), directory / "logs")
        yield found
    finally:
        processes.kill()


def on(config: Config, names: tuple[str, ...], placement: str | None = None, **tables: Any) -> Config:
    """The config of a run on some of the services, with other values in some of its tables."""
    services = {name: config.services[name] for name in names}
    found = with_tables(config.model_copy(update={"services": services}), **tables)
    return found.model_copy(update={"placement": placement}) if placement else found


def executed(config: Config, directory: Path, algorithm: str) -> Path:
    return job.run(with_tables(config, run={"directory": directory}), algorithm).directory


def check_same(one: Results, other: Results) -> None:
    """The weights and samples of two runs are equal bit by bit. A metric that is a mean over several calls may differ
    by the order in which it was summed."""
    assert one.sha256 == other.sha256
    assert one.samples == other.samples
    for line, expected in zip(one.metrics, other.metrics, strict=True):
        assert _but_transfers(line) == pytest.approx(_but_transfers(expected), rel=1e-9, abs=1e-12)


def _but_transfers(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith("transfer/")}


def spans(directory: Path, step: int) -> dict[tuple[str, int], tuple[float, float]]:
    """Begin and end in microseconds of the calls of a step, by method and number of the chunk."""
    return {
        (event["name"], event["args"].get("chunk", 0)): (event["ts"], event["ts"] + event["dur"])
        for event in read_events(directory / "timeline.json")
        if event.get("ph") == "X" and event["cat"] == "controller" and event["args"]["step"] == step
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "chunks", "tables"),
    [
        ("ppo", 2, {}),
        pytest.param("grpo", 4, {"algorithm": {"aggregation": "token-mean"}}, marks=pytest.mark.full),
    ],
)
def test_rows_in_chunks_give_the_bits_of_one_call(
    config: Config, algorithm: str, chunks: int, tables: dict[str, Any], tmp_path: Path
) -> None:
    run = on(config, PPO, run={"steps": 2}, **tables)
    whole = executed(run, tmp_path / "whole", algorithm)
    parts = executed(with_tables(run, rollout={"chunks": chunks}), tmp_path / "chunks", algorithm)
    check_same(Results.of(parts), Results.of(whole))
    calls = spans(parts, 1)
    assert [number for name, number in calls if name == "generate_sequences"] == list(range(chunks))
    assert calls["compute_reward", 0][0] < calls["generate_sequences", chunks - 1][1]
    assert ("update_actor", 1) not in calls


@pytest.mark.slow
@pytest.mark.parametrize("epochs", [pytest.param(1, marks=pytest.mark.full), 2])
def test_gradients_that_were_begun_chunk_by_chunk_give_the_bits_of_one_call(
    config: Config, epochs: int, tmp_path: Path
) -> None:
    """Responses of one token, so that all rows are as long: the order of micro-batches is that of the rows."""
    run = on(
        config,
        PPO,
        run={"steps": 2},
        rollout={"max_response_tokens": 1},
        algorithm={"epochs": epochs, "mini_batch_size": PROMPTS // epochs},
    )
    whole = executed(run, tmp_path / "whole", "grpo")
    early = with_tables(run, rollout={"max_response_tokens": 1, "chunks": 4})
    parts = executed(early, tmp_path / "chunks", "grpo")
    check_same(Results.of(parts), Results.of(whole))
    calls = spans(parts, 2)
    assert [number for name, number in calls if name == "prepare_update"] == [0, 1, 2]
    assert calls["prepare_update", 2][1] <= calls["update_actor", 0][1]
    assert ("update_actor", 1) not in calls


@pytest.mark.full
@pytest.mark.parametrize(("ahead", "segments"), [(0, 1), (1, 1), (1, 2)])
def test_a_disaggregated_run_in_chunks_goes_on_after_a_kill(
    config: Config, ahead: int, segments: int, tmp_path: Path
) -> None:
    run = on(
        config,
        (*PPO, "rollout"),
        "disaggregated",
        run={"steps": 6, "evaluate_every": 4, "ahead": ahead},
        rollout={"segments": segments},
        checkpoint={"every": 3},
    )
    whole = Results.of(executed(run, tmp_path / "whole", "ppo"))
    parts = with_tables(run, rollout={"segments": segments, "chunks": 3})
    first = executed(parts, tmp_path / "first", "ppo")
    check_same(Results.of(first), whole)
    calls = spans(first, 2)
    assert calls["compute_ref_log_prob", 0][0] < calls["compute_reward", 2][1]
    with resumable(parts, tmp_path / "killed") as killed:
        killed.kill_after(killed.start(), 3)
        killed.finish(killed.resume())
        assert Results.of(killed.run_dir) == Results.of(first)


@pytest.mark.full
@pytest.mark.parametrize("algorithm", ["rloo", "dapo", "remax"])
def test_algorithms_run_in_chunks_from_their_texts(config: Config, algorithm: str, tmp_path: Path) -> None:
    run = on(config, (*PPO, "rollout"), "disaggregated", run={"steps": 2}, rollout={"samples_per_prompt": 4})
    whole = executed(run, tmp_path / "whole", algorithm)
    parts = with_tables(run, rollout={"samples_per_prompt": 4, "chunks": 3})
    check_same(Results.of(executed(parts, tmp_path / "chunks", algorithm)), Results.of(whole))
