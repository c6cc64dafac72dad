"""Random calls to services of all roles, each in processes of its own: no rank ends, grows or is locked, no call ends
in a way that the contract does not allow, and afterwards every service computes what it computed before.

`make fuzz` sends FUZZ_CALLS calls, 200,000 by default; `make test` has a sample (unit/test_fuzz_sample.py). A call that
ends badly is saved in FUZZ_DIR, and FUZZ_REPLAY=FILE sends it again.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
import uvloop
from chaos.fuzzing import ALLOWED, Answer, Results, replay, send
from chaos.growth import Usage, growth
from chaos.shots import rpcs
from chaos.targets import Target, started
from transformers import LlamaConfig, LlamaForSequenceClassification

from integration.ranks import server_context

pytestmark = [pytest.mark.full, pytest.mark.timeout(7200)]

CALLS = int(os.environ.get("FUZZ_CALLS", "200000"))
WARM = CALLS // 2
"""Calls before memory, threads and descriptors are counted."""
MORE = CALLS // 10
"""Calls of another round, where the calls before it have left more open than there was."""
MOST_ROUNDS = 3
ROUND = 2_000
"""Calls after which all services are looked at."""
ROUND_S = 600.0
"""Longest time that they take, in seconds."""
SAVED = Path(os.environ.get("FUZZ_DIR", "runs/fuzz")).resolve()


@pytest.fixture(scope="module")
def scorer(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a reward model with the policy's tokenizer."""
    path = tmp_path_factory.mktemp("scorer")
    torch.manual_seed(3)
    config = LlamaConfig.from_pretrained(model)
    config.num_labels = 1
    LlamaForSequenceClassification(config).save_pretrained(path)
    for file in model.glob("*token*"):
        (path / file.name).write_bytes(file.read_bytes())
    return path


@pytest.fixture(scope="module")
def targets(
    model: Path, scorer: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mapping[str, Target]]:
    learner = {"model": str(model), "micro_batch_tokens": 64, "optimizer": {"learning_rate": 1e-3}}
    services = {
        "actor": ("actor", 2, learner),
        "critic": ("critic", 1, learner),
        "reference": ("reference", 1, {"model": str(model), "micro_batch_tokens": 64}),
        "rollout": ("rollout", 2, {"model": str(model)}),
        "values": ("values", 1, {"model": str(model), "micro_batch_tokens": 64}),
        "reward": ("reward", 1, {"function": "chaos.chaos_plugins:score"}),
        "scorer": ("reward", 1, {**learner, "kind": "model", "model": str(scorer)}),
    }
    with started(services, tmp_path_factory.mktemp("fuzz")) as made:
        yield made


@pytest.mark.skipif("FUZZ_REPLAY" in os.environ, reason="FUZZ_REPLAY names a saved call")
def test_random_calls_leave_services_of_all_roles_as_they_were(targets: Mapping[str, Target]) -> None:
    seed = int(os.environ.get("FUZZ_SEED", random.SystemRandom().randrange(2**32)))
    print(f"FUZZ_SEED={seed}", flush=True)
    services = [target.service for target in targets.values()]
    codes, paths = Results().codes, set[str]()

    def send_all(first: int, last: int) -> None:
        nonlocal codes
        for sent in range(first, last, ROUND):
            count, began = min(ROUND, last - sent), time.monotonic()
            with ProcessPoolExecutor(1, server_context()) as process:
                results = process.submit(send, services, seed, SAVED, sent, count).result(ROUND_S)
            results.check()
            codes += results.codes
            paths.update(results.paths)
            for target in targets.values():
                target.check()
            rate = count / (time.monotonic() - began)
            print(f"{sent + count} calls, {rate:.0f} a second: {dict(codes)}", flush=True)

    send_all(0, WARM)
    before = {name: Usage.of(target) for name, target in targets.items()}
    send_all(WARM, CALLS)
    # A rank keeps a connection to each rank of its service that it has read from, and few calls read.
    rounds = 0
    while more := [grown for name, target in targets.items() if (grown := growth(target, before[name]))]:
        assert rounds < MOST_ROUNDS, more
        before = {name: Usage.of(target) for name, target in targets.items()}
        send_all(CALLS + rounds * MORE, CALLS + (rounds + 1) * MORE)
        rounds += 1
    for target in targets.values():
        assert target.compute() == target.numbers
    if CALLS > 10_000:
        assert paths == {rpc.path for target in targets.values() for rpc in rpcs(target.role)}


@pytest.mark.skipif("FUZZ_REPLAY" not in os.environ, reason="FUZZ_REPLAY names no saved call")
def test_a_saved_call_is_answered_as_the_contract_says(targets: Mapping[str, Target], tmp_path: Path) -> None:
    services = [target.service for target in targets.values()]
    saved = Path(os.environ["FUZZ_REPLAY"]).read_text()

    async def send() -> Mapping[str, list[Answer]]:
        return await replay(services, saved, tmp_path)

    for how, answers in uvloop.run(send()).items():
        print(f"{how}: {answers}", flush=True)
        assert {answer.code for answer in answers} <= ALLOWED
    for target in targets.values():
        target.check()
