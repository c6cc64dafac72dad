"""The benchmark of PPO on one GPU, on a CPU: that it runs with every engine, and what it says."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_ppo import read_stages
from controller.tracking.timeline import Timeline, read_events

ROOT = Path(__file__).parents[2]
DEADLINE_S = 200
STAGES = ["generate_sequences", "compute_log_prob", "compute_values", "compute_ref_log_prob"]
STAGES += ["compute_reward", "update_critic", "update_actor"]


def test_stages_are_what_ranks_computed_in_the_steps_that_count(tmp_path: Path):
    timeline = Timeline(tmp_path, 0.0)
    for step, seconds, peak in ((1, 8.0, 9), (2, 1.0, 5), (3, 2.0, 7), (4, 8.0, 9)):
        start, args = 100.0 * step, {"step": step, "peak_device": peak}
        timeline.add(("controller", "actor"), "update_actor", start, start + 10, {"step": step})
        timeline.add(("actor", "rank 0"), "queue", start, start + 1, args)
        timeline.add(("actor", "rank 0"), "update_actor", start + 1, start + 1 + seconds, args)
        timeline.add(("reward", "rank 0"), "compute_reward", start + 11, start + 12, {"step": step})
    timeline.close()
    events = read_events(tmp_path / "timeline.json")
    update, reward = read_stages(events, range(2, 4))
    assert (update.service, update.method, update.peak_bytes) == ("actor", "update_actor", 7)
    assert update.seconds == [1.0, 2.0]
    assert (reward.service, reward.seconds, reward.peak_bytes) == ("reward", [1.0, 1.0], 0)


@pytest.mark.full
@pytest.mark.timeout(DEADLINE_S + 20)
@pytest.mark.parametrize("engine", ["fsdp", "3d", "zero"])
def test_the_whole_loop_runs_with_every_engine(engine: str, tmp_path: Path):
    figures = tmp_path / "figures.json"
    options = [
        "--size",
        "tiny",
        "--engine",
        engine,
        "--rows",
        "8",
        "--prompt-tokens",
        "8",
        "--new-tokens",
        "4",
    ]
    options += ["--iterations", "2", "--peak-tflops", "1", "--json", str(figures)]
    command = [sys.executable, "-m", "benchmarks.gpu_ppo", *options]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(figures.read_text())
    assert [stage["method"] for stage in found["stages"]] == STAGES
    for stage in found["stages"]:
        assert len(stage["seconds"]) == 2
        learns = stage["method"].startswith("update_")
        assert (stage["flops_utilisation"] is not None) == learns
    assert len(found["tokens_per_s"]) == 2
    assert min(found["tokens_per_s"]) > 0
