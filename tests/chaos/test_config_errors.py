"""Mistakes in a config, a command line, data or this host are told in one line, before anything starts."""

from __future__ import annotations

import importlib.metadata
import signal
import socket
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos.conftest import ROLES, Program, Site, wait_until

pytestmark = pytest.mark.slow

USAGE_ERROR = 2
TIMEOUT_S = 30.0

PPO = "rlhf-controller --algo ppo --config chaos.toml"
LAUNCH = f"{PPO} --launch"
UP = "rlhf-deploy up chaos.toml"
CHECK = "rlhf-deploy check chaos.toml"
FILES = {
    **dict.fromkeys(
        ("model/config.json", "model/tokenizer.json", "model/model.safetensors", "odd/tokenizer.json"), b"{}"
    ),
    "odd/model.safetensors": b"",
    "odd/config.json": b'{"num_hidden_layers": 2, "num_attention_heads": 3}',
    "bare/tokenizer.json": b"{}",
    "cut.jsonl": b'{"prompt": "1+1=", "ground_truth": "2"}\n{"prompt": \n',
    "gap.jsonl": b'{"prompt": "1+1=", "ground_truth": "2"}\n\n{"prompt": 2}\n',
    "list.jsonl": b"[1]\n",
    "nan.jsonl": b'{"prompt": "1+1=", "ground_truth": "2", "weight": NaN}\n',
    "half.jsonl": b'{"prompt": "1+1=", "ground_truth": "2"}\n{"prompt": "\\ud800"}\n',
    "latin.jsonl": b'{"prompt": "\xe9"}\n',
    "empty.jsonl": b"\n",
    "rows.tsv": b"prompt\tground_truth\n",
    "short.csv": b"prompt,ground_truth\n1+1=,2\n1+2=\n",
    "unanswered.jsonl": b'{"prompt": "1+1=", "ground_truth": "2"}\n{"prompt": "1+2="}\n',
    "broken.py": b"1 / 0\n",
    "broken.toml": b"[run\n",
}
ODD = "--set services.actor.model=odd --set services.actor.engine=3d --set services.actor.mesh=1-2-1"
MISFIT = (
    "services.actor: mesh 1-2-1 does not fit the model: its 3 attention heads cannot be dealt out to 2 tensor ranks; "
    "the nearest that fit: 1-1-2, 2-1-1"
)
CASES = {
    f"{PPO} {ODD}": MISFIT,
    f"{UP} {ODD}": MISFIT,
    f"{PPO} --set run.step=3": "config chaos.toml: run.step: unknown key; did you mean 'steps'?",
    f"{UP} --set algorithm.gama=1": "config chaos.toml: algorithm.gama: unknown key; did you mean 'gamma'?",
    f"{PPO} --set servces.actor.ranks=1": "config chaos.toml: servces: unknown key; did you mean 'services'?",
    f"{PPO} --set steps=3": "config chaos.toml: steps: unknown key; did you mean 'run.steps'?",
    f"{PPO} --set services.actor.rank=2": "services.actor.rank: unknown key; did you mean 'ranks'?",
    f"{UP} --set services.actor.optimizer.epz=1": "services.actor.optimizer.epz: unknown key; did you mean 'eps'?",
    f"{PPO} --set run.steps=0": "run.steps: must be at least 1 (given: 0)",
    f"{PPO} --set algorithm.dual_clip=0.5": "algorithm.dual_clip: must be above 1, or 0 for off (given: 0.5)",
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
    f"{PPO} --set data.train=rows.tsv": "data.train: rows.tsv: no reader for files that end with '.tsv'; ",
    f"{PPO} --set data.train=short.csv": "data.train: short.csv:3: 1 field, and the first line names 2: prompt, ",
    f"{PPO} --set data.heldout_rows=1000000": "data.heldout_rows: 1000000 of the ",
    f"{PPO} --set data.template=x": "data.template: {prompt} must occur in it exactly once (given: 'x')",
    f"{PPO} --set run.epochs=2 --set run.steps=2": "config chaos.toml: run: give steps or epochs, not both",
    f"{PPO} --set data.train=nan.jsonl": "data.train: nan.jsonl:1: not JSON: NaN is not a number",
    f"{PPO} --set data.train=half.jsonl": "data.train: half.jsonl:2: not JSON: 'utf-8' codec can't encode",
    f"{PPO} --set data.train=latin.jsonl": "data.train: latin.jsonl:1: not UTF-8: ",
    f"{PPO} --set data.train=empty.jsonl": "data.train: empty.jsonl has no rows",
    f"{LAUNCH} --set services.actor.model=no": "services.actor.model: there is no directory no",
    f"{UP} --set services.critic.model=no": "services.critic.model: there is no directory no",
    f"{LAUNCH} --set services.actor.model=bare": "services.actor.model: directory bare has no config.json",
    f"{UP} --set services.reference.model=bare": "services.reference.model: directory bare has no config.json",
    f"{PPO} --set run.directory=chaos.toml": "run directory chaos.toml: file exists",
    f"{PPO} --set run.name=a/b": "run.name: 'a/b' cannot be part of a file's name: ",
    "rlhf-controller --algo pp0 --config chaos.toml": "algorithm 'pp0' is unknown; did you mean 'ppo'?; "
    "known: cispo, dapo, ",
    "rlhf-controller --algo safe_rlhf --config chaos.toml": "services.cost_critic: safe_rlhf needs this service, of "
    "role critic; the config has: actor, critic, reference, reward",
    "rlhf-controller --algo dapo --config chaos.toml --set algorithm.options.max_round=3": "config algorithm.options "
    "of dapo: max_round: unknown key; did you mean 'max_rounds'?",
    "rlhf-controller --algo grpo --config chaos.toml --set rollout.samples_per_prompt=1": "rollout.samples_per_prompt: "
    "grpo compares the responses to a prompt, so there have to be at least 2 (given: 1)",
    f"{PPO} --set data.pretrain=no.jsonl": "data.pretrain: no.jsonl: No such file or directory",
    f"{PPO} --set data.pretrain=train.jsonl": "data.pretrain: train.jsonl:1: no field text, only: prompt",
    "rlhf-controller --algo no:f --config chaos.toml": "algorithm 'no:f' cannot be imported: "
    "ModuleNotFoundError: No module named 'no'",
    "rlhf-controller --algo chaos_plugins:no --config chaos.toml": "algorithm 'chaos_plugins:no' cannot be imported: "
    "AttributeError: module 'chaos_plugins' has no attribute 'no'",
    "rlhf-controller --algo broken:f --config chaos.toml": "algorithm 'broken:f' cannot be imported: "
    "ZeroDivisionError: division by zero",
    "rlhf-controller --algo os:name --config chaos.toml": "algorithm 'os:name' is not a function",
    f"{PPO} --set services.reward.function=exact_mach": "config chaos.toml: services.reward: function: 'exact_mach' is "
    "unknown; did you mean 'exact_match'?; known: environment, exact_match, format, ",
    f"{PPO} --set services.reward.kind=model": "config chaos.toml: services.reward: kind model needs model, ",
    f"{PPO} --set services.reward.kind=judge": "config chaos.toml: services.reward: kind judge needs judge.url and "
    "judge.model",
    f"{CHECK} --set services.reward.function=no:f": "services.reward.function: 'no:f' cannot be imported: "
    "ModuleNotFoundError: No module named 'no'",
    f"{CHECK} --set services.reward.function=broken:f": "services.reward.function: 'broken:f' cannot be imported: "
    "ZeroDivisionError: division by zero",
    f"{CHECK} --set services.reward.function=os:name": "services.reward.function: 'os:name' is not callable",
    f"{PPO} --set services.reward.function=http://x/score": "config chaos.toml: services.reward: function: "
    "'http://x/score' is an address; kind = \"http\" asks one, given in http.urls",
    f"{CHECK} --set services.reward.function=my-module:f": "services.reward.function: 'my-module:f' is not of the form "
    "module:object",
    f"{CHECK} --set services.reward.function=chaos_plugins:one_argument": "services.reward.function: "
    "chaos_plugins:one_argument(response) cannot be called: too many positional arguments; a reward function takes ",
    f"{PPO} --set services.reward.kind=http": "config chaos.toml: services.reward: kind http needs http.urls",
    f"{CHECK} --set services.reward.options.x=1": "services.reward.options: chaos_plugins:score takes none named x, "
    "only: none",
    f"{PPO} --set services.reward.function=exact_match --set data.train=unanswered.jsonl": "data.train: "
    "unanswered.jsonl:2: no ground_truth, with which the service reward compares responses",
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
    assert list(site.directory.rglob("*.log")) == []
    assert [path.name for path in site.directory.glob("runs/*")] in ([], ["arithmetic"])
    assert site.temporary_files() == []


@pytest.mark.parametrize("command", CASES)
def test_a_mistake_is_one_line_and_starts_nothing(site: Site, command: str) -> None:
    ended = site.run_forked(*command.split(), timeout_s=TIMEOUT_S)
    assert ended.line.startswith("error: ")
    assert CASES[command] in ended.line
    assert ended.code == USAGE_ERROR
    assert_nothing_was_started(site)


@pytest.mark.parametrize("command", [LAUNCH, UP])
def test_a_port_in_use_is_told_by_its_key_before_anything_starts(site: Site, command: str) -> None:
    address = site.address("reference")
    with listening(address):
        ended = site.start(*command.split()).end(TIMEOUT_S)
    assert ended.code == USAGE_ERROR
    assert ended.line.startswith(f"error: services.reference.address: {address} is in use; ")
    assert_nothing_was_started(site)


def test_a_quickstart_that_cannot_be_built_is_told_with_the_cause(site: Site) -> None:
    (site.directory / "runs" / "arithmetic").mkdir(parents=True)
    # Two processes import torch, one after the other.
    ended = site.start("rlhf-controller", "--algo", "ppo").end(2 * TIMEOUT_S)
    assert (ended.code, ended.line) == (
        USAGE_ERROR,
        "error: the quickstart's model could not be built: Error: runs/arithmetic exists and is not a quickstart build",
    )
    assert_nothing_was_started(site)


def test_all_services_that_are_not_there_are_told_with_what_to_do(site: Site) -> None:
    ended = site.controller("run.connect_timeout_s=0.5").end(TIMEOUT_S)
    assert ended.code == 1
    # On a busy machine even half a second may be long enough for the line about what the run waits for.
    assert all(line.startswith("waiting for services.") for line in ended.out.splitlines())
    assert ended.line == (
        "error: no service answers within 0.5 s at "
        + "; at ".join(f"services.{role} ({site.address(role)}): Connection refused" for role in ROLES)
        + ". Start services with rlhf-deploy up CONFIG, or have the run start them: --launch"
    )
    assert not list(site.directory.glob("runs/*"))


def test_an_external_service_that_is_not_there_is_to_be_started_by_hand(site: Site) -> None:
    every = tuple(f"services.{role}.external=true" for role in ROLES)
    ended = site.controller("run.connect_timeout_s=0.5", *every).end(TIMEOUT_S)
    assert (ended.code, ended.line.partition(". ")[2]) == (
        1,
        "Start it by hand: neither rlhf-deploy nor --launch starts services that are external",
    )


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("services.actor.rank=1", "services.actor.rank: unknown key; did you mean 'ranks'?"),
        ("services.actor.model=no", "services.actor.model: directory no does not exist"),
        ("services.actor.ranks=4", "services.actor.ranks is 4, but 2 were started"),
    ],
)
def test_a_service_started_by_hand_says_one_fatal_line_on_each_rank(
    site: Site, setting: str, message: str
) -> None:
    assert message in fatal_line(site.torchrun("actor", "--set", setting))


def test_a_service_started_by_hand_refuses_a_model_that_does_not_divide_over_its_mesh(site: Site) -> None:
    assert fatal_line(site.torchrun("actor", *ODD.split())) == f"fatal: actor: {MISFIT}"


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


def test_what_a_run_waits_for_is_told_long_before_it_gives_up(site: Site) -> None:
    run = site.controller("run.connect_timeout_s=60")
    waiting = ", ".join(f"services.{role} ({site.address(role)})" for role in ROLES)
    run.until_it_says(f"waiting for {waiting}\n", TIMEOUT_S)
    run.send(signal.SIGINT)
    assert run.end(TIMEOUT_S).code == 128 + signal.SIGINT
    assert not list(site.directory.glob("runs/*"))


def test_torchrun_leaves_no_empty_directories_where_ranks_end_early(site: Site) -> None:
    fatal_line(site.torchrun("actor", "--set", "services.actor.model=no"))
    assert site.temporary_files() == []


@pytest.mark.parametrize(("backend", "warnings"), [("--standalone", 1), ("--rdzv-backend=rlhf", 0)])
def test_rank_0_warns_of_a_store_that_anybody_can_write_to(site: Site, backend: str, warnings: int) -> None:
    service = ("services", "actor", "--config", "chaos.toml", "--set", "services.actor.model=no")
    # Of several ranks, torchrun may kill rank 0 for a peer that ended before it said anything.
    ended = site.start("torchrun", backend, "--nproc-per-node=1", "-m", *service).end(TIMEOUT_S)
    assert ended.err.count("the store of this torchrun listens on every interface") == warnings


def test_a_dry_run_prints_a_config_and_the_services_and_starts_nothing(site: Site) -> None:
    devices = ("--set", "placement=colocate", "--set", "devices=['gpu:3','gpu:1']")
    ended = site.start(*PPO.split(), "--launch", "--dry-run", "--set", "run.steps=7", *devices).end(TIMEOUT_S)
    assert ended.code == 0
    assert tomllib.loads(ended.out)["run"]["steps"] == 7
    actor = f"services.actor: actor, 2 ranks at {site.address('actor')}, rank 0 on gpu:3, rank 1 on gpu:1"
    assert f"{actor}, would be started" in ended.err
    assert "data: 64 train and 8 held-out rows" in ended.err
    assert_nothing_was_started(site)


def test_a_dry_run_refuses_what_a_run_would(site: Site) -> None:
    ended = site.start(*PPO.split(), "--dry-run", "--set", "data.train=no.jsonl").end(TIMEOUT_S)
    assert (ended.code, ended.line) == (
        USAGE_ERROR,
        "error: data.train: no.jsonl: No such file or directory",
    )


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)])
def test_a_run_stopped_while_it_builds_the_quickstart_leaves_nothing_half_built(
    site: Site, number: signal.Signals
) -> None:
    run = site.start("rlhf-controller", "--algo", "ppo")
    wait_until(lambda: any((site.directory / "runs").glob(".arithmetic-*")), TIMEOUT_S)
    run.send(number)
    assert run.end(TIMEOUT_S).code == 128 + number
    assert list((site.directory / "runs").iterdir()) == []


@pytest.mark.parametrize("program", ["rlhf-controller", "rlhf-deploy", "rlhf-loadtest", "rlhf-conformance"])
def test_every_program_tells_its_version(site: Site, program: str) -> None:
    ended = site.start(program, "--version").end(TIMEOUT_S)
    assert (ended.code, ended.out) == (
        0,
        f"{program}, version {importlib.metadata.version('rlhf-cluster')}\n",
    )


def listening(address: str) -> socket.socket:
    """Somebody else's server at an address."""
    host, _, port = address.rpartition(":")
    return socket.create_server((host, int(port)))
