"""Whole runs: what they leave behind, that equal seeds give equal numbers however services were started and placed,
what passes through the controller, and that nothing stays when a run ends or is interrupted."""

from __future__ import annotations

import importlib.metadata
import json
import math
import re
import shlex
import signal
import subprocess
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from client.rank import RankClient
from client.stream import CallStream
from controller import cli, job
from controller.config.config import Config
from controller.data.loader import Loader
from controller.data.prompts import PromptData
from controller.tracking.metrics import each_sample, read_metrics
from controller.tracking.timeline import read_events
from integration.harness import (
    ROOT,
    Cluster,
    Processes,
    Service,
    abstract_sockets,
    free_ports,
    is_listening,
    leaked_shared_memory,
    left_in_shared_memory,
    wait_until,
    write_config,
)
from integration.listeners import assert_closed
from nccl_transfer.fetch import Fetcher
from nccl_transfer.refs.batch import Batch
from nccl_transfer.refs.remote_column import RemoteColumn
from rlhf.errors import Refused
from services.models.export import tensors_sha256

pytestmark = pytest.mark.timeout(240)

ROLES = ("actor", "critic", "reference", "reward")
STEPS = 3
RUN_TIMEOUT_S = 150.0
STOP_TIMEOUT_S = 30.0
UNEQUAL = ("time/", "mem/", "rank/")
"""Metrics that may differ between runs of one seed."""

Numbers = list[dict[str, float]]


def run_config(config: Config, directory: Path, **run: Any) -> Config:
    """The four roles on services of their own, at free ports."""
    ports = free_ports(len(ROLES))
    services = {
        role: config.services[role].model_copy(update={"address": f"127.0.0.1:{port}"})
        for role, port in zip(ROLES, ports, strict=True)
    }
    table = config.run.model_copy(update={"directory": directory / "runs", **run})
    return config.model_copy(update={"services": services, "run": table})


def numbers(run_directory: Path) -> Numbers:
    """The metrics of a run that its seed determines."""
    return [
        {key: value for key, value in line.items() if not key.startswith(UNEQUAL)}
        for line in read_metrics(run_directory)
    ]


def sha256(run_directory: Path) -> str:
    return json.loads((run_directory / "summary.json").read_text())["actor_sha256"]


@dataclass
class Controller:
    """rlhf-controller as a process, and what it and its services hold while they run.

    Attributes:
        sockets: Names of the sockets on which the ranks hand out their arenas, once `is_training` held.
    """

    config: Config
    directory: Path
    arguments: tuple[str, ...] = ()
    processes: Processes = field(default_factory=Processes)
    sockets: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.leaked_before = leaked_shared_memory()
        path = write_config(self.config, self.directory / "run.toml")
        self.process = self.processes.start(
            "rlhf-controller", "--algo", "ppo", "--config", str(path), *self.arguments
        )

    @property
    def run_directory(self) -> Path:
        """There is one as soon as the run has begun."""
        (directory,) = self.config.run.directory.glob("test-*")
        return directory

    def wait_for_step(self, step: int) -> None:
        """Waits until a step's metrics are there, and looks at what the services hold."""

        def has_come() -> bool:
            assert self.process.poll() is None, self.process.communicate()
            found = list(self.config.run.directory.glob("test-*/metrics.jsonl"))
            return bool(found) and len(read_metrics(found[0].parent)) > step

        wait_until(has_come, RUN_TIMEOUT_S, f"step {step}")
        for name, table in self.config.services.items():
            service = Service(name, table.address)
            self.sockets |= {rank.endpoint.adverts["memfd"].decode() for rank in service.description.ranks}
            service.close()
        if "--launch" in self.arguments:
            assert_closed(self.processes.living(), self.config)

    def finish(self) -> tuple[int, str, str]:
        """Exit code, stdout and stderr."""
        out, err = self.process.communicate(timeout=RUN_TIMEOUT_S)
        return self.process.returncode, out, err

    def left_behind(self) -> dict[str, Any]:
        """Resources that outlived the run, by kind."""
        return {
            "processes": self.processes.living(),
            "listening": [t.address for t in self.config.services.values() if is_listening(t.address)],
            "sockets": self.sockets & abstract_sockets(),
            "shared memory": left_in_shared_memory(self.leaked_before),
        }


NOTHING = {"processes": [], "listening": [], "sockets": set(), "shared memory": set()}


@dataclass(frozen=True)
class Finished:
    """A run with --launch that has ended."""

    controller: Controller
    code: int
    out: str
    err: str
    left: dict[str, Any]

    @property
    def path(self) -> Path:
        return self.controller.run_directory


@pytest.fixture(scope="module")
def launched(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finished]:
    directory = tmp_path_factory.mktemp("launched")
    controller = Controller(run_config(config, directory), directory, ("--launch",))
    try:
        controller.wait_for_step(0)
        code, out, err = controller.finish()
        yield Finished(controller, code, out, err, controller.left_behind())
    finally:
        controller.processes.kill()


def test_a_run_ends_well_and_says_where_its_files_are(launched: Finished) -> None:
    assert launched.code == 0, launched.err
    assert f"run directory:     {launched.path}" in launched.out
    assert "held-out accuracy: " in launched.out


def test_a_run_leaves_nothing_behind(launched: Finished) -> None:
    assert len(launched.controller.sockets) == sum(
        table.ranks for table in launched.controller.config.services.values()
    )
    assert launched.left == NOTHING


def test_a_run_writes_all_its_files(launched: Finished) -> None:
    files = {path.name for path in launched.path.iterdir()}
    assert files == {
        ".lock",
        "actor",
        "config.toml",
        "logs",
        "metrics.jsonl",
        "report.html",
        "run.json",
        "samples.jsonl",
        "summary.json",
        "tensorboard",
        "timeline.json",
    }
    logs = {path.name for path in (launched.path / "logs").glob("*.log")}
    assert logs == {"launcher.log", *(f"{role}.log" for role in ROLES)}
    for role in ROLES:
        log = (launched.path / "logs" / f"{role}.log").read_text()
        assert re.fullmatch(r"ready: \S+ at \S+, \d ranks?\n([\d :,-]+ \w+/\d left\n)+", log), log
    assert list((launched.path / "tensorboard").glob("events.out.tfevents.*"))
    events = json.loads((launched.path / "timeline.json").read_text())
    assert {"generate_sequences", "update_actor"} <= {event["name"] for event in events}


def test_the_summary_has_the_figures_of_the_run(launched: Finished) -> None:
    summary = json.loads((launched.path / "summary.json").read_text())
    metrics = read_metrics(launched.path)
    figures = {"accuracy_before", "accuracy_after", "steps", "tokens_per_s", "wall_s", "actor_sha256"}
    counts = {"prompts_left_out", "heldout_prompts_left_out"}
    known = json.loads((launched.path / "run.json").read_text())
    assert summary.keys() == figures | counts | known.keys()
    assert known.items() <= summary.items()
    assert (known["algorithm"], known["version"]) == ("ppo", importlib.metadata.version("rlhf-cluster"))
    assert known["started_unix_ns"] > 1e18
    assert (launched.path / "config.toml").read_text().startswith("# ppo, started ")
    assert re.fullmatch(r"test-ppo-\d{8}-\d{6}", launched.path.name)
    config = tomllib.loads((launched.path / "config.toml").read_text())
    for name, service in known["services"].items():
        assert config["services"][name]["matmul"] == service.get("matmul", "auto")
        assert {"version", "threads", "cpu"} <= service.keys()
        assert ("torch" in service) == ("matmul" in service) == (name != "reward")
    assert (summary["steps"], summary["seed"]) == (STEPS, 0)
    assert summary["accuracy_before"] == metrics[0]["evaluation/accuracy"]
    assert summary["accuracy_after"] == metrics[-1]["evaluation/accuracy"]
    assert summary["tokens_per_s"] > 0
    assert summary["wall_s"] > 0


def test_the_actor_that_was_trained_loads_and_has_the_sha256_of_the_summary(launched: Finished) -> None:
    AutoModelForCausalLM.from_pretrained(launched.path / "actor")
    AutoTokenizer.from_pretrained(launched.path / "actor")
    tensors = load_file(launched.path / "actor" / "model.safetensors")
    assert tensors_sha256(sorted(tensors.items())) == sha256(launched.path)


def test_metrics_are_finite_and_tell_of_every_step(launched: Finished) -> None:
    metrics = read_metrics(launched.path)
    assert [line["step"] for line in metrics] == list(range(STEPS + 1))
    assert all(math.isfinite(value) for line in metrics for value in line.values())
    for line in metrics[1:]:
        assert {"actor/loss", "actor/grad_norm", "critic/loss", "kl/mean", "score/mean"} <= line.keys()
        assert {"time/step_s", "time/tokens_per_s", "mem/actor_bytes", "rank/actor/cpu_s"} <= line.keys()
        assert line["transfer/batch_bytes"] > 0
        assert line["transfer/memfd/bytes"] > 0
        assert line["time/transfer/memfd/gb_per_s"] == pytest.approx(
            line["transfer/memfd/bytes"] / line["time/transfer/memfd/seconds"] / 1e9
        )
        assert line["transfer/critic.update_critic/bytes"] > 0
        assert line["time/transfer/critic.update_critic/seconds"] > 0
    assert len({line["actor/loss"] for line in metrics[1:]}) == STEPS
    assert len(list(each_sample(launched.path))) == 2 * launched.controller.config.run.samples


@pytest.mark.slow
def test_services_started_by_hand_as_the_readme_says_give_the_same_run(
    cluster: Cluster, config: Config, tmp_path: Path
) -> None:
    expected = run_on(cluster, tmp_path / "up")
    by_hand = run_config(config, tmp_path, connect_timeout_s=100.0)
    path = write_config(by_hand, tmp_path / "services.toml")
    processes = Processes()
    services = [
        start_by_hand(processes, line, path, tmp_path)
        for line in (ROOT / "README.md").read_text().splitlines()
        if line.startswith(("torchrun ", "python -m services ")) and line.endswith("/quickstart.toml")
    ]
    try:
        assert len(services) == len(ROLES)
        code, _, err = Controller(by_hand, tmp_path, processes=processes).finish()
        assert code == 0, err
        (run_directory,) = by_hand.run.directory.iterdir()
        assert numbers(run_directory) == numbers(expected.path)
        assert sha256(run_directory) == expected.summary["actor_sha256"]
        assert_closed(processes.living(), by_hand)
        for service in services:
            service.send_signal(signal.SIGINT)
        for service in services:
            service.wait(STOP_TIMEOUT_S)
        assert not processes.living()
        for name, table in by_hand.services.items():
            ready = f"ready: {name} at {table.address}, {table.ranks} rank{'s' * (table.ranks > 1)}\n"
            assert (tmp_path / f"{name}.log").read_text().count(ready) == 1
    finally:
        processes.kill()


def start_by_hand(processes: Processes, line: str, config: Path, directory: Path) -> subprocess.Popen[str]:
    """A command line of the README, with this config in the place of the quickstart's."""
    *command, name, _ = shlex.split(line)
    assert name == "--config"
    log = directory / f"{command[-1]}.log"
    with log.open("w") as sink:
        return processes.start(*command, "--config", str(config), stdout=sink, stderr=sink)


@dataclass(frozen=True)
class Ran:
    """A run in this process, on the services that are up."""

    path: Path
    summary: dict[str, Any]


def run_on(
    cluster: Cluster,
    directory: Path,
    *,
    pools: Any = None,
    data: Any = None,
    take_over: bool = False,
    **run: Any,
) -> Ran:
    """Runs PPO on services that are up."""
    config = cluster.select(**{role: role for role in ROLES})
    placed = {role: (pools or {}).get(role, "") for role in ROLES}
    services = {
        role: table.model_copy(update={"pool": placed[role]}) for role, table in config.services.items()
    }
    table = config.run.model_copy(update={"directory": directory, **run})
    rows = config.data.model_copy(update=data or {})
    pool_table = POOLS if pools else {}
    config = config.model_copy(update={"run": table, "data": rows, "services": services, "pools": pool_table})
    done = job.run(config, "ppo", take_over=take_over)
    return Ran(done.directory, dict(done.summary))


POOLS = {"both": ["cpu0", "cpu1"], "left": ["cpu0"], "right": ["cpu1"], "front": ["cpu0", "cpu2"]}
COLOCATED = dict.fromkeys(ROLES, "both")
INTERLEAVED = {"actor": "both", "critic": "both", "reference": "left", "reward": "right"}
SPLIT = {"actor": "front", "reference": "left", "critic": "right", "reward": "right"}


@pytest.mark.parametrize(
    "pools",
    [None, COLOCATED, INTERLEAVED, SPLIT],
    ids=["standalone", "colocated", "interleaved", "split"],
)
def test_placement_and_who_launched_the_services_change_no_number(
    launched: Finished, cluster: Cluster, tmp_path: Path, pools: dict[str, str] | None
) -> None:
    ran = run_on(cluster, tmp_path, pools=pools)
    assert numbers(ran.path) == numbers(launched.path)
    assert ran.summary["actor_sha256"] == sha256(launched.path)


def test_a_run_leaves_no_rows_in_any_arena(cluster: Cluster, tmp_path: Path) -> None:
    run_on(cluster, tmp_path, steps=1)
    for role in ROLES:
        service = Service(role, cluster.config.services[role].address)
        assert service.used_bytes() == [0] * len(service.ranks)
        service.close()


def test_evaluation_in_batches_gives_the_same_figures_and_samples(
    launched: Finished, cluster: Cluster, tmp_path: Path
) -> None:
    ran = run_on(cluster, tmp_path, steps=1, evaluation_rows=5)
    before, first = numbers(ran.path)[0], numbers(launched.path)[0]
    assert before["evaluation/accuracy"] == first["evaluation/accuracy"]
    assert list(each_sample(ran.path))[:2] == list(each_sample(launched.path))[:2]


def test_a_prompt_that_is_too_long_is_left_out_and_counted(cluster: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    lines = cluster.config.data.train.read_text().splitlines()[:15]
    path.write_text("\n".join([*lines, json.dumps({"prompt": "1+" * 200, "ground_truth": "0"})]))
    data = {"train": path, "heldout": path}
    ran = run_on(cluster, tmp_path, steps=1, data=data)
    assert read_metrics(ran.path)[1]["data/prompts_left_out"] == ran.summary["prompts_left_out"] == 1
    assert ran.summary["heldout_prompts_left_out"] == 1


def test_another_seed_gives_another_run(launched: Finished, cluster: Cluster, tmp_path: Path) -> None:
    ran = run_on(cluster, tmp_path, seed=1)
    assert ran.summary["actor_sha256"] != sha256(launched.path)
    assert ran.summary["accuracy_before"] == read_metrics(launched.path)[0]["evaluation/accuracy"]
    first, other = numbers(launched.path)[1], numbers(ran.path)[1]
    assert first["actor/loss"] != other["actor/loss"]


@dataclass
class Tap:
    """All that passes between a controller and its services, by column, in bytes."""

    inline: Counter[str] = field(default_factory=Counter)
    fetched: Counter[str] = field(default_factory=Counter)

    def listen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        call, start, fetch = RankClient.call, CallStream.start, Fetcher.fetch

        async def tapped_call(client: RankClient, method: Any, request: Any, timeout_s: float) -> Any:
            self._message(method.request.FromString(request) if isinstance(request, bytes) else request)
            response = await call(client, method, request, timeout_s)
            self._message(response)
            return response

        def tapped_start(stream: CallStream, method: Any, request: bytes, timeout_s: float) -> Any:
            self._message(method.request.FromString(request))
            answer = start(stream, method, request, timeout_s)
            answer.add_done_callback(lambda answer: self._message(answer.result()))
            return answer

        def tapped_fetch(fetcher: Fetcher, batch: Batch, deadline: float) -> Any:
            for name, column in batch.columns.items():
                self.fetched[name] += column.nbytes if isinstance(column, RemoteColumn) else 0
            return fetch(fetcher, batch, deadline)

        monkeypatch.setattr(RankClient, "call", tapped_call)
        monkeypatch.setattr(CallStream, "start", tapped_start)
        monkeypatch.setattr(Fetcher, "fetch", tapped_fetch)

    def _message(self, message: Any) -> None:
        for descriptor, value in message.ListFields():
            if descriptor.name == "batch":
                for column in value.columns:
                    content = len(column.inline) + sum(len(text.encode()) for text in column.text.rows)
                    self.inline[column.name] += content
            elif descriptor.name == "text_rows":
                for row in value:
                    for name in ("prompt", "response", "ground_truth"):
                        self.inline[name] += len(getattr(row, name).encode())
            elif descriptor.name == "scores":
                self.inline["rewards"] += 8 * len(value)


def test_the_controller_holds_only_prompts_text_rows_and_the_floats_it_computes_with(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tap = Tap()
    tap.listen(monkeypatch)
    ran = run_on(cluster, tmp_path)
    passed = {name for name, nbytes in (tap.inline + tap.fetched).items() if nbytes}
    assert passed == {"prompt", "response", "ground_truth", "rewards", "log_probs", "ref_log_probs", "values",
                      "advantages", "returns"}  # fmt: skip
    assert set(+tap.fetched) == {"log_probs", "ref_log_probs", "values"}
    config = cluster.config
    data = PromptData.load(config.data.train, "data.train")
    for line in read_metrics(ran.path)[1:]:
        assert 0 < line["transfer/controller_bytes"] <= allowed_bytes(config, data, line)
        assert line["transfer/controller_bytes"] != line["transfer/batch_bytes"]


def allowed_bytes(config: Config, data: PromptData, line: dict[str, float]) -> float:
    """Bytes allowed in a step: prompts to the actor, text rows with their numbers of tokens to the reward and its
    scores back, and per response token three floats in and two out."""
    samples = config.rollout.samples_per_prompt
    count = config.data.prompts_per_step
    rows = Loader(data.sizes, [1.0], config.run.seed).take(int(line["step"]) * count)[-count:]
    prompt = sum(len(data[row].text) for row in rows) * samples
    rest = sum(len(data[row].ground_truth) + len(data[row].metadata) for row in rows) * samples
    tokens = line["response/length_mean"] * len(rows) * samples
    response = tokens  # characters are tokens here, and the end of a sequence has none
    return 2 * prompt + 2 * response + rest + (8 + 8) * len(rows) * samples + (3 + 2) * 4 * tokens


def test_a_second_controller_takes_the_services_over_when_told_to_and_the_first_ends_with_one_line(
    cluster: Cluster, tmp_path: Path
) -> None:
    config = cluster.select(**{role: role for role in ROLES})
    endless = config.run.model_copy(update={"directory": tmp_path / "first", "steps": 1000})
    first = Controller(config.model_copy(update={"run": endless}), tmp_path)
    try:
        first.wait_for_step(1)
        with pytest.raises(Refused, match=r"is in use by run test-[-\w]+; .*--take-over"):
            run_on(cluster, tmp_path / "refused", steps=1)
        second = run_on(cluster, tmp_path / "second", take_over=True, steps=1)
        code, _, err = first.finish()
    finally:
        first.processes.kill()
    assert second.summary["steps"] == 1
    assert code == 1
    (line,) = err.strip().splitlines()
    assert line.startswith("error: ")
    # Or, if the first was about to read them: the rows of its step are not there any more.
    assert "superseded" in line or "was released" in line


def test_a_run_that_was_killed_leaves_what_it_wrote_and_its_report_can_be_made(
    cluster: Cluster, tmp_path: Path
) -> None:
    config = cluster.select(**{role: role for role in ROLES})
    endless = config.run.model_copy(update={"directory": tmp_path, "steps": 1000})
    controller = Controller(config.model_copy(update={"run": endless}), tmp_path)
    try:
        controller.wait_for_step(2)
        controller.process.kill()
        controller.finish()
    finally:
        controller.processes.kill()
    path = controller.run_directory
    steps = len(read_metrics(path))
    assert steps >= 3
    events = read_events(path / "timeline.json")
    assert {"generate_sequences", "update_actor"} <= {event["name"] for event in events}
    known = json.loads((path / "run.json").read_text())
    assert (known["algorithm"], known["seed"]) == ("ppo", 0)
    assert known["command_line"].startswith("rlhf-controller --algo ppo --config ")
    assert known["services"]["actor"]["torch"] == torch.__version__
    done = CliRunner().invoke(cli.main, ["--report", str(path)])
    assert done.exit_code == 0, done.output
    assert f"interrupted after step {steps - 1}" in (path / "report.html").read_text()


@pytest.mark.slow
def test_ctrl_c_in_the_middle_of_a_step_ends_all_with_130_and_keeps_the_files(
    config: Config, tmp_path: Path
) -> None:
    controller = Controller(run_config(config, tmp_path, steps=1000), tmp_path, ("--launch",))
    try:
        controller.wait_for_step(1)
        controller.process.send_signal(signal.SIGINT)
        code, out, err = controller.finish()
        assert code == 128 + signal.SIGINT
        assert "Traceback" not in err
        assert f"{controller.run_directory} has no checkpoint to resume from\n" in out
        assert controller.left_behind() == NOTHING
    finally:
        controller.processes.kill()
    files = {path.name for path in controller.run_directory.iterdir()}
    assert {"config.toml", "metrics.jsonl", "samples.jsonl", "timeline.json", "report.html"} <= files
    assert "summary.json" not in files
    assert "</html>" in (controller.run_directory / "report.html").read_text()
    metrics = read_metrics(controller.run_directory)
    assert [line["step"] for line in metrics] == list(range(len(metrics)))
    json.loads((controller.run_directory / "timeline.json").read_text())
