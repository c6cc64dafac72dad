"""A whole run on ranks that serve in this process: steps, rewards, evaluation, samples, export; no row is left."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from unit.test_requests import SharedProcess

from controller import algorithms
from controller.config.config import Config
from controller.job import open_run, run
from controller.role_groups.dataflow import FutureBatch
from controller.tracking.metrics import each_sample, read_metrics
from controller.training.evaluation import Evaluation
from controller.training.run import Run
from nccl_transfer.refs.columns import Jagged
from nccl_transfer.refs.mesh import Mesh
from rlhf.contract import group_methods
from rlhf.errors import RlhfError
from rlhf.v1 import worker_pb2
from services.reward.worker import RewardWorker
from services.runtime.server import RankServer
from services.runtime.worker import CallResult, Worker, register

T = TypeVar("T")

TIMEOUT_S = 60.0
PROMPTS, SAMPLES, STEPS = 4, 2, 2


def registered(name: str) -> Any:
    """Registers a method of the actor with the transfer protocol that its proto declares."""
    spec = group_methods("actor")[name].spec
    assert spec is not None
    return register(spec.transfer_protocol)


def nothing(name: str) -> Any:
    """A method that makes no rows."""
    return registered(name)(lambda self, rows, request, call: CallResult({}))


class ToyActor(Worker):
    """Answers the n-th prompt of a call with n tokens."""

    role = "actor"
    update_actor, update_supervised = nothing("update_actor"), nothing("update_supervised")
    prepare_update = nothing("prepare_update")
    tokenize, compute_loss = nothing("tokenize"), nothing("compute_loss")
    begin_session, save_checkpoint = nothing("begin_session"), nothing("save_checkpoint")

    @registered("generate_sequences")
    def generate_sequences(self, rows: Any, request: Any, call: Any) -> CallResult:
        lengths = np.arange(1, len(rows["prompt"]) + 1)
        ids = Jagged(np.arange(lengths.sum()), lengths)
        log_probs = Jagged(np.zeros(lengths.sum(), np.float32), lengths)
        made: dict[str, Any] = {"prompt_ids": ids, "response_ids": ids, "rollout_log_probs": log_probs}
        if request.return_text:
            made["response"] = ["x" * int(length) for length in lengths]
        return CallResult(made)

    @registered("compute_log_prob")
    def compute_log_prob(self, rows: Any, request: Any, call: Any) -> CallResult:
        lengths = rows["response_ids"].lengths
        return CallResult({"log_probs": Jagged(np.zeros(lengths.sum(), np.float32), lengths)})


class EndlessActor(ToyActor):
    """An actor whose model has no EOS token."""

    def describe(self) -> worker_pb2.DescribeResponse:
        return worker_pb2.DescribeResponse(lacks_eos=True)


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def config_of(directory: Path, algorithm: str = "dr_grpo") -> Config:
    """Returns the configuration of a run with an algorithm of the package, or with one of a test, if it is empty."""
    for name in ("train", "heldout"):
        rows = [json.dumps({"prompt": f"{i}+1=", "ground_truth": "x" * 3}) + "\n" for i in range(16)]
        (directory / f"{name}.jsonl").write_text("".join(rows))
    tables = {
        "data": {
            "train": directory / "train.jsonl",
            "heldout": directory / "heldout.jsonl",
            "prompts_per_step": PROMPTS,
        },
        "rollout": {"samples_per_prompt": SAMPLES, "max_response_tokens": 50},
        "algorithm": {"mini_batch_size": 4, "max_log_prob_drift": 0.0},
        "services": {
            "actor": {"role": "actor", "address": free_address(), "model": directory},
            "reward": {"role": "reward", "address": free_address(), "function": "exact_match"},
        },
        "run": {"steps": STEPS, "directory": directory / "runs", "samples": 3},
    }
    config = Config.model_validate(tables)
    return algorithms.find_algorithm(algorithm).configure(config) if algorithm else config


async def on_services(config: Config, work: Callable[[], T], actor: type[Worker] = ToyActor) -> T:
    """Executes blocking work on a thread of its own while the services serve; afterwards they hold no rows."""
    servers = []
    kinds: list[tuple[Any, str]] = [(actor, "actor"), (RewardWorker, "reward")]
    for kind, name in kinds:
        ranks = SharedProcess(0, 1, 1, endpoints=[], model_mesh=Mesh(1, 1, 1))
        servers.append(RankServer(kind(config.services[name], ranks)))
    serving = [asyncio.ensure_future(server.serve()) for server in servers]
    try:
        done = await asyncio.wait_for(asyncio.to_thread(work), TIMEOUT_S)
        assert [server.store.stat().shards for server in servers] == [0, 0]
        return done
    finally:
        for server in servers:
            server._stop.set()
        await asyncio.wait_for(asyncio.gather(*serving), TIMEOUT_S)


def test_a_run_steps_evaluates_exports_and_frees_its_rows(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    done = asyncio.run(on_services(config, lambda: run(config, "dr_grpo")))
    lines, summary = done.metrics, done.summary
    assert lines == read_metrics(done.directory)
    assert [line["step"] for line in lines] == [0, *range(1, STEPS + 1)]
    assert (
        lines[0]["evaluation/accuracy"] == summary["accuracy_before"] == summary["accuracy_after"] == 1 / 16
    )
    # Of eight responses the third has three tokens, which is the right answer.
    assert [line["reward/mean"] for line in lines[1:]] == [1 / (PROMPTS * SAMPLES)] * STEPS
    assert (summary["steps"], summary["prompts_left_out"]) == (STEPS, 0)
    assert [(step, sample.response) for step, sample in each_sample(done.directory)] == [
        (step, "x" * length) for step in (0, STEPS) for length in (1, 2, 3)
    ]


def test_steps_write_the_rows_that_they_trained_on_and_train_as_without(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    writing = config.model_copy(update={"run": config.run.model_copy(update={"rollouts_every": 2})})
    plain, done = (
        asyncio.run(on_services(each, lambda c=each: run(c, "dr_grpo"))) for each in (config, writing)
    )
    assert not (plain.directory / "rollouts").exists()
    files = sorted(path.name for path in (done.directory / "rollouts").iterdir())
    assert files == [f"step-{step}.jsonl" for step in range(2, STEPS + 1, 2)]
    for path in (done.directory / "rollouts").iterdir():
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert len(rows) == PROMPTS * SAMPLES
        assert [row["response"] for row in rows] == ["x" * row["tokens"] for row in rows]
        assert [row["reward"] for row in rows] == [float(row["response"] == "xxx") for row in rows]
        assert {row["ground_truth"] for row in rows} == {"xxx"}
        prompts = {(row["prompt_number"], row["prompt"]) for row in rows}
        assert len(prompts) == len({number for number, _ in prompts}) == PROMPTS
        assert f"step-{rows[0]['step']}.jsonl" == path.name
        assert {number // PROMPTS for number, _ in prompts} == {rows[0]["step"] - 1}
    for line, other in zip(plain.metrics, done.metrics, strict=True):
        assert line["step"] == other["step"]
        assert line.get("reward/mean") == other.get("reward/mean")


@pytest.mark.parametrize(
    ("actor", "ends", "warns"),
    [
        (EndlessActor, {}, True),
        (EndlessActor, {"stop": ("!",)}, False),
        (EndlessActor, {"stop_token_ids": (33,)}, False),
        (ToyActor, {}, False),
    ],
)
def test_a_run_says_at_its_start_that_responses_have_no_end(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    actor: type[Worker],
    ends: dict[str, Any],
    warns: bool,
) -> None:
    config = config_of(tmp_path)
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update=ends)})
    asyncio.run(on_services(config, lambda: run(config, "dr_grpo"), actor))
    line = (
        "services.actor.model has no EOS token, neither in its tokenizer nor in its generation config, so each "
        "response has rollout.max_response_tokens, 50, tokens"
    )
    assert (line in " ".join(capsys.readouterr().out.split())) is warns


@pytest.mark.parametrize(
    "error", [None, ValueError("mine"), KeyboardInterrupt()], ids=["close", "error", "Ctrl-C"]
)
def test_a_run_that_stays_open_is_called_by_hand_and_frees_its_rows_at_the_end(
    tmp_path: Path, error: BaseException | None
) -> None:
    config = config_of(tmp_path)

    def by_hand() -> Path:
        opened = open_run(config)
        prompts = FutureBatch.of(prompt=["1+1=", "1+2=", "1+3="], ground_truth=["x", "xx", "y"])
        batch = prompts | opened.actor().generate_sequences(prompts, return_text=True)
        columns = opened.fetch(opened.reward().score(batch), "response", "rewards", "rollout_log_probs")
        assert columns["response"] == ["x", "xx", "xxx"]
        assert columns["rewards"].tolist() == [1, 1, 0]
        assert columns["rollout_log_probs"].row(2).tolist() == [0, 0, 0]
        if error is None:
            opened.close()
            opened.close()
        else:
            with pytest.raises(type(error)), opened:
                raise error
        return opened.directory

    for _ in range(2):
        directory = asyncio.run(on_services(config, by_hand))
        assert json.loads((directory / "run.json").read_text())["algorithm"] == "controller.job:by_hand"
        assert "</html>" in (directory / "report.html").read_text()


def test_a_run_ends_after_the_step_that_stops_it(tmp_path: Path) -> None:
    config = config_of(tmp_path, "")

    def one_step(given: Run) -> None:
        for step in given.steps():
            batch = step.prompts | given.actor().generate_sequences(step.prompts)
            step.stop()
            step.finish(batch)

    done = asyncio.run(on_services(config, lambda: run(config, one_step)))
    assert done.summary["steps"] == 1 < config.run.steps
    assert "evaluation/accuracy" in done.metrics[1]
    known = json.loads((done.directory / "run.json").read_text())
    assert known["algorithm"] == f"{__name__}:{one_step.__qualname__}"
    assert (done.directory / "config.toml").read_text().startswith(f"# {known['algorithm']}, started ")


def test_the_summary_has_metrics_that_one_evaluation_has_alone(tmp_path: Path) -> None:
    config, found = config_of(tmp_path, ""), [{"x": 1.0, "rows_dropped": 2.0}, {"x": 3.0}]

    def algorithm(given: Run) -> None:
        evaluation = Evaluation(lambda rows: ({"x": np.zeros(rows.rows)}, ()), lambda values: found.pop(0))
        for step in given.steps(evaluation):
            step.finish(step.prompts | given.actor().generate_sequences(step.prompts))

    summary = asyncio.run(on_services(config, lambda: run(config, algorithm))).summary
    assert (summary["x_before"], summary["rows_dropped_before"], summary["x_after"]) == (1, 2, 3)
    assert "rows_dropped_after" not in summary


def test_an_evaluation_within_the_loop_comes_after_the_update(tmp_path: Path) -> None:
    """It frees the rows of the step, which an update could not read any more."""
    config = config_of(tmp_path, "")

    def early(given: Run) -> None:
        for step in given.steps():
            batch = step.prompts | given.actor().generate_sequences(step.prompts)
            batch.records()
            given.evaluate()
            step.finish(batch, given.actor().compute_log_prob(batch))

    def late(given: Run) -> None:
        for step in given.steps():
            batch = step.prompts | given.actor().generate_sequences(step.prompts)
            step.finish(batch, given.actor().compute_log_prob(batch))
            assert given.evaluate()["evaluation/accuracy"] == 1 / 16

    done = asyncio.run(on_services(config, lambda: run(config, late)))
    assert done.summary["steps"] == STEPS
    with pytest.raises(RlhfError):
        asyncio.run(on_services(config, lambda: run(config, early)))
