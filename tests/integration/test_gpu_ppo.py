"""The benchmark of PPO on one GPU, on a CPU: that it runs with every engine, and what it says."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu_ppo import read_stages
from controller.tracking.timeline import Timeline, read_events

ROOT = Path(__file__).parents[2]
DEADLINE_S = 200
STAGES = ["generate_sequences", "compute_log_prob", "compute_values", "compute_ref_log_prob"]
STAGES += ["compute_reward", "update_critic", "update_actor"]
TINY = [sys.executable, "-m", "benchmarks.gpu_ppo", "--size", "tiny", "--peak-tflops", "1"]
TINY += ["--rows", "8", "--prompt-tokens", "8", "--new-tokens", "4"]


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
    command = [*TINY, "--engine", engine, "--iterations", "2", "--json", str(figures)]
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


@pytest.mark.full
@pytest.mark.timeout(DEADLINE_S + 20)
def test_a_run_that_is_cut_off_says_what_the_iterations_until_then_took(tmp_path: Path):
    figures, deadline = tmp_path / "figures.json", time.monotonic() + DEADLINE_S
    command = [*TINY, "--iterations", "1000", "--json", str(figures)]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True) as ran:
        while not (found := list(tmp_path.glob("*/runs/*/metrics.jsonl"))) or len(ended_steps(found[0])) < 3:
            assert ran.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        ran.send_signal(signal.SIGTERM)
        assert ran.wait(deadline - time.monotonic()) == 0
        assert ran.stderr is not None
        assert "interrupted: the figures are those of the iterations that have ended" in ran.stderr.read()
    found = json.loads(figures.read_text())
    assert [stage["method"] for stage in found["stages"]] == STAGES
    counted = len(found["step_s"])
    assert counted >= 2
    assert all(len(stage["seconds"]) == counted for stage in found["stages"])


def ended_steps(metrics: Path) -> list[str]:
    return [line for line in metrics.read_text().splitlines() if "time/step_s" in line]
