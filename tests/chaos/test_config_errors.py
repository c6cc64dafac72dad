"""What is wrong with a config, a command line, data or this host is told in one line, before anything starts."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos.conftest import Program, Site

USAGE_ERROR = 2
TIMEOUT_S = 30.0

PPO = "rlhf-controller --algo ppo --config chaos.toml"
LAUNCH = f"{PPO} --launch"
UP = "rlhf-deploy up chaos.toml"
FILES = {
    "model/config.json": b"{}",
    "bare/tokenizer.json": b"{}",
    "cut.jsonl": b'{"prompt": "1+1="}\n{"prompt": \n',
    "gap.jsonl": b'{"prompt": "1+1="}\n\n{"prompt": 2}\n',
    "list.jsonl": b"[1]\n",
    "nan.jsonl": b'{"prompt": "1+1=", "weight": NaN}\n',
    "half.jsonl": b'{"prompt": "1+1="}\n{"prompt": "\\ud800"}\n',
    "latin.jsonl": b'{"prompt": "\xe9"}\n',
    "empty.jsonl": b"\n",
    "broken.py": b"1 / 0\n",
    "broken.toml": b"[run\n",
}
CASES = {
    f"{PPO} --set run.step=3": "config chaos.toml: run.step: unknown key; did you mean 'steps'?",
    f"{UP} --set algorithm.gama=1": "config chaos.toml: algorithm.gama: unknown key; did you mean 'gamma'?",
    f"{PPO} --set servces.actor.ranks=1": "config chaos.toml: servces: unknown key; did you mean 'services'?",
    f"{PPO} --set services.actor.rank=2": "services.actor.rank: unknown key; did you mean 'ranks'?",
    f"{UP} --set services.actor.optimizer.epz=1": "services.actor.optimizer.epz: unknown key; did you mean 'eps'?",
    f"{PPO} --set run.steps=0": "run.steps: Input should be greater than or equal to 1 (given: 0)",
    f"{PPO} --set algorithm.dual_clip=0.5": "algorithm.dual_clip must be above 1, or 0 for off (given: 0.5)",
    f"{PPO} --set steps": "setting 'steps': expected key.path=value",
    f"{PPO} --set services.actor.pool=a": "services.actor.pool: no pool 'a'; known: none",
    f"{PPO} --set data.prompts_per_step=65": "algorithm.mini_batch_size: 32 does not divide the 130 rows of a step "
    "(data.prompts_per_step 65 x rollout.samples_per_prompt 2)",
    f"{UP} --set services.actor.ranks=3": "algorithm.mini_batch_size: 32 rows do not divide over the 3 data ranks of "
    "services.actor",
    "rlhf-controller --algo ppo --config no.toml": "config no.toml: No such file or directory",
    "rlhf-deploy up no.toml": "config no.toml: No such file or directory",
    "rlhf-controller --algo ppo --config broken.toml": "config broken.toml: not TOML: ",
    f"{PPO} --set data.train=no.jsonl": "data.train: no.jsonl: No such file or directory",
    f"{PPO} --set data.heldout=model": "data.heldout: model: Is a directory",
    f"{PPO} --set data.train=cut.jsonl": "data.train: cut.jsonl:2: not JSON: ",
    f"{PPO} --set data.train=gap.jsonl": "data.train: gap.jsonl:3: prompt is not a text, or empty: 2",
    f"{PPO} --set data.train=list.jsonl": "data.train: list.jsonl:1: not a JSON object with a prompt",
    f"{PPO} --set data.train=nan.jsonl": "data.train: nan.jsonl:1: not JSON: Out of range float",
    f"{PPO} --set data.train=half.jsonl": "data.train: half.jsonl:2: not JSON: 'utf-8' codec can't encode",
    f"{PPO} --set data.train=latin.jsonl": "data.train: latin.jsonl: not UTF-8: ",
    f"{PPO} --set data.train=empty.jsonl": "data.train: empty.jsonl has no rows",
    f"{LAUNCH} --set services.actor.model=no": "services.actor.model: there is no directory no",
    f"{UP} --set services.critic.model=no": "services.critic.model: there is no directory no",
    f"{LAUNCH} --set services.actor.model=bare": "services.actor.model: directory bare has no config.json",
    f"{UP} --set services.reference.model=bare": "services.reference.model: directory bare has no config.json",
    f"{PPO} --set run.directory=chaos.toml": "run directory chaos.toml: file exists",
    f"{PPO} --set run.name=a/b": "run name 'a/b' cannot be part of a directory's name",
    "rlhf-controller --algo pp0 --config chaos.toml": "unknown algorithm 'pp0'; known: cispo, dapo, ",
    "rlhf-controller --algo safe_rlhf --config chaos.toml": "services.cost_critic: safe_rlhf needs this service, of "
    "role critic; the config has: actor, critic, reference, reward",
    "rlhf-controller --algo dapo --config chaos.toml --set algorithm.options.max_round=3": "config algorithm.options "
    "of dapo: max_round: unknown key; did you mean 'max_rounds'?",
    "rlhf-controller --algo grpo --config chaos.toml --set rollout.samples_per_prompt=1": "rollout.samples_per_prompt: "
    "grpo compares the responses to a prompt, so there have to be at least 2 (given: 1)",
    f"{PPO} --set data.pretrain=no.jsonl": "data.pretrain: no.jsonl: No such file or directory",
    f"{PPO} --set data.pretrain=train.jsonl": "data.pretrain: train.jsonl:1: not a JSON object with a text",
    "rlhf-controller --algo no:f --config chaos.toml": "algorithm 'no:f' cannot be imported: "
    "ModuleNotFoundError: No module named 'no'",
    "rlhf-controller --algo chaos_plugins:no --config chaos.toml": "algorithm 'chaos_plugins:no' cannot be imported: "
    "AttributeError: module 'chaos_plugins' has no attribute 'no'",
    "rlhf-controller --algo broken:f --config chaos.toml": "algorithm 'broken:f' cannot be imported: "
    "ZeroDivisionError: division by zero",
    "rlhf-controller --algo os:name --config chaos.toml": "algorithm 'os:name' is not a function",
    f"{UP} --only reference,reward": "no service 'reference,reward'; there are: actor, critic, reference, reward",
    f"{UP} --set services.reward.address=192.0.2.1:7000": "services.reward.address: 192.0.2.1:7000 is not an address "
    "of this host",
}


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A site whose config is right, and some files that are not."""
    for name, content in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    site = Site(tmp_path)
    yield site
    site.close()


def assert_nothing_was_started(site: Site) -> None:
    assert site.is_quiet()
    assert [path for path in site.directory.rglob("*.log") if path.name != "launcher.log"] == []
    assert site.temporary_files() == []


@pytest.mark.parametrize("command", CASES)
def test_a_mistake_is_one_line_and_starts_nothing(site: Site, command: str) -> None:
    ended = site.start(*command.split()).end(TIMEOUT_S)
    assert ended.line.startswith("error: ")
    assert CASES[command] in ended.line
    assert ended.code == USAGE_ERROR
    assert_nothing_was_started(site)


@pytest.mark.parametrize("command", [LAUNCH, UP])
def test_a_port_in_use_is_told_by_its_key_before_anything_starts(site: Site, command: str) -> None:
    address = site.address("reference")
    with listening(address):
        ended = site.start(*command.split()).end(TIMEOUT_S)
    assert (ended.code, ended.line) == (
        USAGE_ERROR,
        f"error: services.reference.address: {address} is in use",
    )
    assert_nothing_was_started(site)


def test_a_quickstart_that_cannot_be_built_is_told_with_the_cause(site: Site) -> None:
    (site.directory / "runs" / "arithmetic").mkdir(parents=True)
    ended = site.start("rlhf-controller", "--algo", "ppo").end(TIMEOUT_S)
    assert (ended.code, ended.line) == (
        USAGE_ERROR,
        "error: the quickstart's model could not be built: Error: runs/arithmetic exists and is not a quickstart build",
    )
    assert_nothing_was_started(site)


def test_an_address_where_nothing_listens_is_told_with_its_service(site: Site) -> None:
    ended = site.controller("run.connect_timeout_s=0.5").end(TIMEOUT_S)
    assert ended.code == 1
    assert ended.line == (
        f"error: services.actor: no service answers at {site.address('actor')} within 0.5 s: "
        "Failed to connect to remote host: Connection refused"
    )


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("services.actor.rank=1", "services.actor.rank: unknown key; did you mean 'ranks'?"),
        ("services.actor.model=no", "services.actor.model: directory no does not exist"),
        ("services.actor.ranks=4", "services.actor.ranks is 4, but torchrun started 2"),
    ],
)
def test_a_service_started_by_hand_says_one_fatal_line_on_each_rank(
    site: Site, setting: str, message: str
) -> None:
    assert message in fatal_line(site.torchrun("actor", "--set", setting))


def test_a_service_started_by_hand_names_the_port_that_is_in_use(site: Site) -> None:
    address = site.address("actor")
    with listening(address):
        line = fatal_line(site.torchrun("actor"))
    assert line == f"fatal: actor: services.actor.address: {address}: Address already in use"


def fatal_line(torchrun: Program) -> str:
    """The line that ranks which could not start agree on; the rest is torchrun's."""
    ended = torchrun.end(TIMEOUT_S)
    assert ended.code == 1
    assert "services/" not in ended.err, f"a traceback of ours:\n{ended.err}"
    (line,) = {line for line in ended.err.splitlines() if line.startswith("fatal: ")}
    return line


def listening(address: str) -> socket.socket:
    """Somebody else's server at an address."""
    host, _, port = address.rpartition(":")
    return socket.create_server((host, int(port)))
