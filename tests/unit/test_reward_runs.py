"""Whole runs on ranks that serve in this process, with rewards of users: the same numbers from every kind, and the
reward's own metrics among those of the steps."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from unit.http_endpoint import serving
from unit.test_run_in_process import PROMPTS, SAMPLES, STEPS, config_of, on_services

from controller.job import run
from rlhf.plugins import load_object
from settings.reward import RewardTable

EXAMPLES = Path(__file__).parent.parent.parent / "examples" / "reward_http"
RESPONSES = range(1, PROMPTS * SAMPLES + 1)
"""Lengths of the responses of a step, of which that with three characters is right."""


def ran(directory: Path, **keys: Any) -> list[dict[str, float]]:
    """Metrics of the steps of a run with a reward of these keys."""
    config = config_of(directory)
    table = {"role": "reward", "address": config.services["reward"].address, **keys}
    services = {**config.services, "reward": RewardTable.model_validate(table)}
    config = config.model_copy(update={"services": services})
    done = asyncio.run(on_services(config, lambda: run(config, "dr_grpo")))
    lines = [json.loads(line) for line in (done.directory / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == STEPS + 1
    return lines[1:]


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Address of the example of a verifier."""
    monkeypatch.syspath_prepend(EXAMPLES)
    server = ThreadingHTTPServer(("127.0.0.1", 0), load_object("server:Handler", type))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/score"
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_verifier_behind_http_gives_the_numbers_of_the_function(tmp_path: Path, url: str) -> None:
    pytest.importorskip("httpx")
    ours = ran(tmp_path, function="exact_match")
    theirs = ran(tmp_path, kind="http", http={"urls": [url], "batch_rows": 3})
    for name in ("reward/mean", "score/mean"):
        expected = [1 / len(RESPONSES)] * STEPS
        assert [line[name] for line in theirs] == [line[name] for line in ours] == expected
    assert [line["reward/extra/characters"] for line in theirs] == [sum(RESPONSES) / len(RESPONSES)] * STEPS
    assert not any(name.startswith("reward/extra") for line in ours for name in line)


def test_a_verifier_may_answer_with_a_score_for_each_token_that_it_was_told_of(tmp_path: Path) -> None:
    pytest.importorskip("httpx")
    with serving() as endpoint:
        endpoint.answer = lambda number, body: (
            200,
            {},
            {"scores": [[0.5] * row["response_tokens"] for row in body["rows"]]},
        )
        done = ran(tmp_path, kind="http", http={"urls": [f"{endpoint.url}/score"]})
    assert [line["reward/mean"] for line in done] == [sum(RESPONSES) / len(RESPONSES) / 2] * STEPS


@pytest.mark.parametrize(
    ("function", "metrics"),
    [
        ("compute_score", {"reward/extra/acc": 1 / len(RESPONSES)}),
        ("async_compute_score", {"reward/extra/waited": 1.0}),
        ("trl", {}),
    ],
)
def test_rewards_as_other_frameworks_have_them_train(
    function: str, metrics: dict[str, float], tmp_path: Path
) -> None:
    for line in ran(tmp_path, function=f"unit.own_rewards:{function}"):
        assert line["reward/mean"] == pytest.approx(1 / len(RESPONSES))
        extra = {name: value for name, value in line.items() if name.startswith("reward/extra")}
        assert extra == pytest.approx(metrics)
