"""The pipeline's own parts: dialogues cut into rows, the error where there is no data, and its summary page."""

from __future__ import annotations

import gzip
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import psutil
import pytest
from click.testing import CliRunner

from deploy.pipeline.cli import main
from deploy.pipeline.dialogues import Pair, answers, is_heldout, read_pairs, shortened
from deploy.pipeline.report import check, render, summarize
from deploy.processes import is_alive

TALK = "\n\nHuman: hi\n\nAssistant: hello\n\nHuman: how are you\n\nAssistant:"


def test_pairs_are_cut_at_the_last_answer_and_odd_rows_left_out(tmp_path: Path) -> None:
    rows = [
        {"chosen": TALK + " well \n", "rejected": TALK + " bad"},
        {"chosen": TALK + " same", "rejected": TALK + " same"},
        {"chosen": TALK + " x", "rejected": "\n\nHuman: other\n\nAssistant: y"},
        {"chosen": TALK + " ", "rejected": TALK + " y"},
    ]
    path = tmp_path / "pairs.jsonl.gz"
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    assert read_pairs(path) == [Pair(TALK, " well", " bad")]


def test_every_answer_is_a_demonstration() -> None:
    first = "\n\nHuman: hi\n\nAssistant:"
    assert list(answers(Pair(TALK, " well", " bad"))) == [(first, " hello"), (TALK, " well")]


def test_a_prompt_keeps_the_last_turns_that_fit() -> None:
    last = "\n\nHuman: how are you\n\nAssistant:"
    assert shortened(TALK, len, len(TALK)) == TALK
    assert shortened(TALK, len, len(TALK) - 1) == last
    assert shortened(TALK, len, len(last) - 1) == ""


def test_pairs_with_the_same_opening_are_on_the_same_side() -> None:
    pairs = [Pair(f"\n\nHuman: {i}\n\nAssistant:", "a", "b") for i in range(400)]
    later = [Pair(f"{pair.prompt} ok\n\nHuman: more\n\nAssistant:", "c", "d") for pair in pairs]
    held = [is_heldout(pair, 45) for pair in pairs]
    assert held == [is_heldout(pair, 45) for pair in later]
    assert 140 < sum(held) < 220


def test_data_that_is_not_there_is_named(tmp_path: Path) -> None:
    ran = CliRunner().invoke(
        main, ["--data", str(tmp_path / "gone.jsonl.gz"), "--out", str(tmp_path / "runs")]
    )
    assert ran.exit_code == 1
    assert f"--data {tmp_path / 'gone.jsonl.gz'}: no such file" in ran.output
    assert not (tmp_path / "runs").exists()


def test_a_setting_of_no_stage_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").touch()
    ran = CliRunner().invoke(
        main, ["--data", str(tmp_path / "pairs.jsonl"), "--out", str(tmp_path), "--set", "dpo.run.steps=1"]
    )
    assert ran.exit_code == 1
    assert "stages: sft, reward_model, ppo" in ran.output


def write_runs(directory: Path) -> dict[str, Path]:
    runs = {name: directory / name for name in ("sft", "reward_model", "ppo")}
    summaries = {
        "sft": {"loss_before": 7.0, "loss_after": 4.0, "wall_s": 1.0},
        "reward_model": {
            "accuracy_after": 0.6, "accuracy_low_after": 0.49, "accuracy_high_after": 0.7, "pairs_after": 50.0,
            "wall_s": 1.0,
        },
        "ppo": {"reward_before": -0.5, "reward_after": 0.25, "wall_s": 1.0},
    }  # fmt: skip
    samples = [{"step": step, "prompt": "\n<p>", "response": f"r{step}", "ground_truth": "", "reward": step / 2}
               for step in (0, 2)]  # fmt: skip
    for name, path in runs.items():
        path.mkdir()
        (path / "summary.json").write_text(json.dumps(summaries[name]))
    lines = [{"step": 1, "kl/sequence_mean": 0.5}, {"step": 2, "kl/sequence_mean": 0.75, "other": 1}]
    (runs["ppo"] / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (runs["ppo"] / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))
    return runs


def test_the_summary_has_the_figures_and_says_which_bars_are_met(tmp_path: Path) -> None:
    summary = summarize(write_runs(tmp_path), wall_s=3.0)
    assert summary["ppo"] == {"reward_before": -0.5, "reward_after": 0.25, "kl": 0.75, "wall_s": 1.0}
    assert [held for held, _ in check(summary).values()] == [True, False, True]


def test_the_page_shows_responses_before_and_after(tmp_path: Path) -> None:
    runs = write_runs(tmp_path)
    root = ElementTree.fromstring(render(tmp_path, runs, summarize(runs, 3.0)).partition("\n")[2])
    texts = ["".join(cell.itertext()) for cell in root.iter("td")]
    assert texts[-3:] == ["<p>", "r0\n[0.00]", "r2\n[1.00]"]
    assert "MISSED" in texts
    assert [link.get("href") for link in root.iter("a")] == [f"{name}/report.html" for name in runs]


def test_without_data_and_without_the_hub_the_error_says_what_to_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    ended = CliRunner().invoke(main, ["--out", str(tmp_path / "runs")])
    assert ended.exit_code == 1
    assert "give a file with --data" in ended.output
    assert not (tmp_path / "runs").exists()


STAGE = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_stage_ends_with_a_pipeline_that_is_killed(number: signal.Signals) -> None:
    """And so do the services that it has launched."""
    program = f"from deploy.pipeline.cli import _run; _run('-c', {STAGE!r})"
    pipeline = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert pipeline.stdout is not None
    stage = psutil.Process(int(pipeline.stdout.readline()))
    pipeline.send_signal(number)
    pipeline.wait(20)
    pipeline.stdout.close()
    deadline = time.monotonic() + 20
    while is_alive(stage):
        if time.monotonic() > deadline:
            stage.kill()
            pytest.fail("the stage is left behind")
        time.sleep(0.02)
