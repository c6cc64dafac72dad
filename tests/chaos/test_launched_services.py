"""Failures of services that a run or rlhf-deploy launched: they end with it, however it ends."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from chaos.conftest import (
    ENDS_WITHIN_S,
    START_TIMEOUT_S,
    Site,
    describe,
    wait_for_call,
    wait_until,
    with_vocabulary,
)

pytestmark = pytest.mark.slow

CALL_TIMEOUT_S = 4
SERVICES_END_WITHIN_S = 30.0
"""Longest that services live on, a stopped rank among them, after what launched them was stopped or killed."""
ROLLOUTS = "chaos_plugins:rollouts"


@pytest.fixture
def small(site: Site) -> Site:
    """A site with no more services than `chaos_plugins.rollouts` needs."""
    for role in ("critic", "reference"):
        del site.config["services"][role]
    site.write_config()
    return site


def rank_1(site: Site) -> psutil.Process:
    """A rank of the actor that serves."""
    return psutil.Process(describe(site.address("actor")).ranks[1].pid)


def launcher(site: Site) -> psutil.Process:
    """Process that started the services."""
    (process,) = site.processes("deploy", "up")
    return process


def wait_for_ranks(site: Site) -> None:
    """Waits until the actor's two ranks are there; they need seconds more to serve."""
    wait_until(lambda: len(site.processes("services", "actor")) == 2, START_TIMEOUT_S)


def assert_nothing_is_left(site: Site) -> None:
    assert site.is_quiet()
    assert site.temporary_files() == []


@pytest.mark.parametrize(
    ("victim", "cause"),
    [
        pytest.param(
            rank_1,
            r"service actor: rank 1 was killed by SIGKILL \(log: \S+/logs/actor\.log\)",
            marks=pytest.mark.full,
        ),
        (launcher, r"the launcher of the services \(rlhf-deploy, pid \d+\) was killed by SIGKILL"),
    ],
)
def test_a_killed_rank_or_launcher_ends_the_run_and_all_services_and_is_named(
    small: Site, victim: Callable[[Site], psutil.Process], cause: str
) -> None:
    run = small.controller(algorithm=ROLLOUTS, launch=True)
    wait_for_call(run, small.address("actor"), "GenerateSequences")
    victim(small).kill()
    ended = run.end(ENDS_WITHIN_S + SERVICES_END_WITHIN_S)
    assert ended.code == 1
    assert re.fullmatch(
        rf"error: {cause}; "
        r"actor rank [01] \(\S+\) GenerateSequences: cannot be reached or died: .*",
        ended.line,
    )
    assert small.is_quiet()


@pytest.mark.full
def test_a_stopped_rank_of_a_launched_service_does_not_survive_the_run(small: Site) -> None:
    run = small.controller(f"run.call_timeout_s={CALL_TIMEOUT_S}", algorithm=ROLLOUTS, launch=True)
    wait_for_call(run, small.address("actor"), "GenerateSequences")
    rank_1(small).suspend()
    ended = run.end(CALL_TIMEOUT_S + ENDS_WITHIN_S + SERVICES_END_WITHIN_S)
    assert ended.code == 1
    assert re.fullmatch(
        rf"error: actor rank 1 \(\S+\) GenerateSequences: no answer within {CALL_TIMEOUT_S} s, and none to Cancel: "
        "its process is stopped or stuck",
        ended.line,
    )
    assert_nothing_is_left(small)


@pytest.mark.full
def test_sigterm_in_the_middle_of_a_call_stops_the_launched_services(small: Site) -> None:
    run = small.controller(algorithm=ROLLOUTS, launch=True)
    wait_for_call(run, small.address("actor"), "GenerateSequences")
    run.send(signal.SIGTERM)
    ended = run.end(ENDS_WITHIN_S)
    assert (ended.code, ended.line) == (128 + signal.SIGTERM, "stopped by SIGTERM")
    assert_nothing_is_left(small)


def test_launched_services_end_with_a_run_that_is_killed(small: Site) -> None:
    run = small.controller(algorithm=ROLLOUTS, launch=True)
    wait_for_call(run, small.address("actor"), "GenerateSequences")
    run.send(signal.SIGKILL)
    wait_until(small.is_quiet, SERVICES_END_WITHIN_S)
    assert small.temporary_files() == []


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)])
def test_a_run_stopped_while_its_services_start_stops_them(small: Site, number: signal.Signals) -> None:
    run = small.controller(algorithm=ROLLOUTS, launch=True)
    wait_for_ranks(small)
    run.send(number)
    ended = run.end(ENDS_WITHIN_S)
    assert (ended.code, ended.line) == (128 + number, f"stopped by {number.name}")
    assert_nothing_is_left(small)


def test_services_that_start_end_with_a_run_that_is_killed(small: Site) -> None:
    run = small.controller(algorithm=ROLLOUTS, launch=True)
    wait_for_ranks(small)
    run.send(signal.SIGKILL)
    wait_until(small.is_quiet, SERVICES_END_WITHIN_S)


def test_services_end_with_an_rlhf_deploy_that_is_killed(site: Site) -> None:
    launcher = site.start("rlhf-deploy", "up", "chaos.toml", "--only", "reward")
    launcher.until_it_says("ready\n", START_TIMEOUT_S)
    launcher.send(signal.SIGKILL)
    wait_until(site.is_quiet, SERVICES_END_WITHIN_S)


def test_a_tokenizer_with_more_tokens_than_the_model_is_told_by_rlhf_deploy(site: Site, model: Path) -> None:
    with_vocabulary(model, site.directory / "large", lambda ids: ids.update({"ab": 128, "cd": 129}))
    launcher = site.start(
        *("rlhf-deploy", "up", "chaos.toml", "--only", "critic", "--set", "services.critic.model=large")
    )
    ended = launcher.end(START_TIMEOUT_S)
    assert ended.code == 1
    assert ended.err.splitlines()[-1] == (
        "error: service critic: model: tokenizer and model do not match: the tokenizer large has 130 token ids, "
        "the model large has 128 embeddings"
    )
    assert_nothing_is_left(site)
