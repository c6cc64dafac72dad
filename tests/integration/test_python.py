"""Runs from Python and from a notebook: the examples, role groups that are called by hand, and an end without leftovers
however the script or the session ends."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from controller.advantage.groups import group_advantage
from controller.api import FinishedRun, FutureBatch, RlhfError, Run, algorithm, open_run, run
from controller.config.config import Config
from controller.tracking.metrics import read_metrics
from integration.conftest import Task
from integration.harness import (
    ROOT,
    Cluster,
    Processes,
    Service,
    free_ports,
    is_listening,
    leaked_shared_memory,
    left_in_shared_memory,
    wait_until,
    write_config,
)
from integration.python_cells_main import code_cells
from rlhf.errors import InvalidRequest

pytestmark = pytest.mark.timeout(240)

EXAMPLES = ROOT / "examples"
TIMEOUT_S = 150.0
SERVICES = ("actor", "reference", "reward")
TEXTS = ["12+34=46", "1", "a longer text without numbers", "99+1=100"]


@pytest.fixture
def processes() -> Iterator[Processes]:
    started = Processes()
    yield started
    started.kill()


def site(task: Task, directory: Path) -> Path:
    """A working directory in which the quickstart's model and data are built already."""
    (directory / "runs").mkdir()
    (directory / "runs" / "arithmetic").symlink_to(task.directory)
    return directory


def smaller(source: str, addresses: dict[str, str], **changes: str) -> str:
    """An example with other addresses and sizes, that builds no model."""
    return replaced(source, {**addresses, **changes, "build_quickstart(config)": ""})


def replaced(source: str, changes: Mapping[str, str]) -> str:
    """A source with other texts in place of those that are named."""
    for old, new in changes.items():
        assert old in source, old
        source = source.replace(old, new)
    return source


def finished(directory: Path) -> Path:
    """The directory of the only run below."""
    (path,) = directory.glob("runs/*-*-*/summary.json")
    return path.parent


@pytest.mark.slow
def test_the_script_of_the_examples_runs_its_own_algorithm_and_leaves_nothing(
    task: Task, tmp_path: Path, processes: Processes
) -> None:
    before = leaked_shared_memory()
    ports = free_ports(2)
    addresses = {f"127.0.0.1:{old}": f"127.0.0.1:{new}" for old, new in zip((7101, 7104), ports, strict=True)}
    sizes = {"steps=20": "steps=2", "prompts_per_step=64": "prompts_per_step=16"}
    script = site(task, tmp_path) / "mine.py"
    script.write_text(smaller((EXAMPLES / "from_python.py").read_text(), addresses, **sizes))
    out, err = processes.start("python", str(script), cwd=tmp_path).communicate(timeout=TIMEOUT_S)
    assert "step 2/2" in out, err
    summary = json.loads((finished(tmp_path) / "summary.json").read_text())
    assert summary["algorithm"] == "__main__:above_the_others"
    assert finished(tmp_path).name.startswith("from_python-above_the_others-")
    config = (finished(tmp_path) / "config.toml").read_text()
    assert config.startswith("# __main__:above_the_others, started ")
    assert "[pools]\nboth = [" in config
    assert all(line["actor/pretrain_loss"] > 0 for line in read_metrics(finished(tmp_path))[1:])
    assert not processes.living()
    assert not any(is_listening(address) for address in addresses.values())
    assert not left_in_shared_memory(before)


@pytest.mark.slow
def test_the_cells_of_the_page_run_one_after_another(
    task: Task, tmp_path: Path, processes: Processes
) -> None:
    page = (ROOT / "docs" / "python.md").read_text()
    _, config, mine, opened, _ = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    ports = zip((7101, 7102, 7103, 7104), free_ports(4), strict=True)
    changes = {f"127.0.0.1:{old}": f"127.0.0.1:{new}" for old, new in ports}
    changes |= {"max_response_tokens=4)": "max_response_tokens=4), run=RunTable(steps=1)"}
    script = site(task, tmp_path) / "page.py"
    script.write_text("from controller.api import RunTable\n" + replaced(config, changes) + mine + opened)
    ran = processes.start("python", str(script), cwd=tmp_path)
    out, err = ran.communicate(timeout=TIMEOUT_S)
    assert ran.returncode == 0, err
    assert "step 1/1" in out
    assert json.loads((finished(tmp_path) / "summary.json").read_text())["algorithm"] == "__main__:mine"
    assert not processes.living()


@pytest.fixture
def notebook(task: Task, tmp_path: Path) -> Path:
    """The notebook of the examples, with two steps at free addresses."""
    settings = ", ".join(
        f'"services.{name}.address=127.0.0.1:{port}"'
        for name, port in zip(SERVICES, free_ports(len(SERVICES)), strict=True)
    )
    book = json.loads((EXAMPLES / "notebook.ipynb").read_text())
    first = next(cell for cell in book["cells"] if cell["cell_type"] == "code")
    sizes = {'"run.steps=5"': f'"run.steps=2", "data.prompts_per_step=16", {settings}'}
    first["source"] = smaller("".join(first["source"]), {}, **sizes)
    path = site(task, tmp_path) / "notebook.ipynb"
    path.write_text(json.dumps(book))
    return path


def check_notebook_run(directory: Path, processes: Processes) -> None:
    lines = read_metrics(finished(directory))
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert (finished(directory) / "actor" / "model.safetensors").is_file()
    assert "</html>" in (finished(directory) / "report.html").read_text()
    assert not processes.living()


@pytest.mark.full
def test_the_cells_of_the_notebook_run_under_a_running_loop_and_leave_the_process_as_it_was(
    notebook: Path, processes: Processes
) -> None:
    main = Path(__file__).with_name("python_cells_main.py")
    ran = processes.start("python", str(main), str(notebook), cwd=notebook.parent)
    out, err = ran.communicate(timeout=TIMEOUT_S)
    assert ran.returncode == 0, err
    assert "step 2/2" in out
    check_notebook_run(notebook.parent, processes)


@pytest.mark.full
def test_the_notebook_runs_in_a_kernel(
    notebook: Path, processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ipykernel")
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    monkeypatch.setenv(Processes.MARK, processes.id)
    book = nbformat.read(notebook, as_version=4)
    client = nbclient.NotebookClient(
        book, timeout=TIMEOUT_S, resources={"metadata": {"path": notebook.parent}}
    )
    client.execute()
    cells = [cell for cell in book.cells if cell.cell_type == "code"]
    said = "".join(output.get("text", "") for cell in cells for output in cell.outputs)
    assert "step 2/2" in said, "plain lines, also in a kernel"
    assert "'actor_sha256'" in cells[-1].outputs[-1]["data"]["text/plain"]
    check_notebook_run(notebook.parent, processes)


def test_the_notebook_has_been_cleared_of_output() -> None:
    cells = json.loads((EXAMPLES / "notebook.ipynb").read_text())["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
    assert code_cells(EXAMPLES / "notebook.ipynb")


def run_config(cluster: Cluster, directory: Path, **run_keys: Any) -> Config:
    """Services that are up, for a run of two steps."""
    config = cluster.select(**{name: name for name in SERVICES})
    keys = {"directory": directory, "steps": 2, "samples": 0, **run_keys}
    return config.model_copy(update={"run": config.run.model_copy(update=keys)})


def test_a_run_by_hand_gives_the_bits_of_the_algorithm(cluster: Cluster, tmp_path: Path) -> None:
    config = run_config(cluster, tmp_path)
    done = run(config, "grpo")
    assert isinstance(done, FinishedRun)
    assert done.metrics == read_metrics(done.directory)
    with open_run(config, "grpo") as opened:
        actor, reference, reward = opened.actor(), opened.reference(), opened.reward()
        for step in opened.steps():
            batch = step.prompts | step.groups | actor.generate_sequences(step.prompts)
            batch |= actor.compute_log_prob(batch)
            batch |= reference.compute_ref_log_prob(batch)
            batch = reward.score(batch)
            rewards, group = opened.fetch(batch, "rewards", "group").values()
            batch |= step.compute(group_advantage, rewards, opened.lengths(batch), group)
            step.finish(batch, actor.update_actor(batch))
        assert opened.finish()["actor_sha256"] == done.summary["actor_sha256"]


def used_bytes(config: Config) -> dict[str, int]:
    used = {}
    for name in SERVICES:
        service = Service(name, config.services[name].address)
        used[name] = sum(service.used_bytes())
        service.close()
    return used


@pytest.mark.parametrize(
    "error", [None, ValueError("mine"), KeyboardInterrupt()], ids=["close", "error", "Ctrl-C"]
)
def test_role_groups_are_called_by_hand_and_their_rows_are_freed_at_the_end(
    cluster: Cluster, tmp_path: Path, error: BaseException | None
) -> None:
    config = run_config(cluster, tmp_path)
    opened = open_run(config)
    prompts = FutureBatch.of(prompt=["12+34=", "7+8="], ground_truth=["46", "15"])
    batch = prompts | opened.actor().generate_sequences(prompts, return_text=True)
    batch |= opened.actor().compute_log_prob(batch) | opened.reference().compute_ref_log_prob(batch)
    columns = opened.fetch(opened.reward().score(batch), "response", "rewards", "log_probs", "ref_log_probs")
    assert [len(row) for row in (columns["response"], columns["rewards"])] == [2, 2]
    assert columns["log_probs"].row(1).dtype == np.float32
    np.testing.assert_allclose(columns["log_probs"].values, columns["ref_log_probs"].values, atol=1e-5)
    with pytest.raises(InvalidRequest, match="only float columns come to the controller"):
        opened.fetch(batch, "response_ids")
    if error is None:
        opened.close()
        opened.close()
    else:
        with pytest.raises(type(error)), opened:
            raise error
    assert used_bytes(config) == dict.fromkeys(SERVICES, 0)
    with open_run(config, "grpo") as again:
        assert again.config.algorithm.aggregation == "seq-mean-token-mean"
    assert json.loads((again.directory / "run.json").read_text())["algorithm"] == "grpo"
    assert json.loads((opened.directory / "run.json").read_text())["algorithm"] == "controller.job:by_hand"


def test_a_run_that_stays_open_goes_on_after_a_call_that_failed(cluster: Cluster, tmp_path: Path) -> None:
    with open_run(run_config(cluster, tmp_path)) as opened:
        too_long = FutureBatch.of(prompt=["1+" * 500])
        with pytest.raises(RlhfError, match="actor rank"):
            opened.actor().generate_sequences(too_long).records()
        texts = opened.actor().compute_loss(FutureBatch.of(text=TEXTS))
        assert opened.fetch(texts, "pretrain_loss")["pretrain_loss"].shape == (len(TEXTS),)


def test_a_run_leaves_the_garbage_collector_as_it_was(cluster: Cluster, tmp_path: Path) -> None:
    before = gc.get_threshold(), gc.get_freeze_count()

    async def in_a_notebook() -> FinishedRun:
        return run(run_config(cluster, tmp_path, steps=1), "grpo")

    assert asyncio.run(in_a_notebook()).summary["steps"] == 1
    assert (gc.get_threshold(), gc.get_freeze_count()) == before


def oracle(model: Path, texts: list[str]) -> tuple[list[float], float]:
    """transformers' own loss of each text, its end included, in float64; and its mean over all tokens."""
    policy, tokenizer = (
        AutoModelForCausalLM.from_pretrained(model).double(),
        AutoTokenizer.from_pretrained(model),
    )
    losses, tokens = [], []
    for text in texts:
        ids = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id]])
        with torch.no_grad():
            losses.append(policy(input_ids=ids, labels=ids).loss.item())
        tokens.append(ids.shape[1] - 1)
    return losses, float(np.average(losses, weights=tokens))


def test_an_algorithm_measures_texts_in_its_loop_and_stops_by_their_loss(
    cluster: Cluster, task: Task, tmp_path: Path
) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    config = run_config(cluster, tmp_path, steps=5)
    config = config.model_copy(update={"data": config.data.model_copy(update={"pretrain": path})})
    seen: list[tuple[list[str], list[float]]] = []

    @algorithm(services=("actor", "reward"))
    def watchful(run: Run) -> None:
        actor = run.actor()
        for step in run.steps():
            batch = step.prompts | actor.generate_sequences(step.prompts)
            loss = actor.compute_loss(step.pretraining)
            texts = run.fetch(step.pretraining | loss, "pretrain_text", "pretrain_loss")
            seen.append((texts["pretrain_text"], texts["pretrain_loss"].tolist()))
            step.metrics["pretrain/loss"] = loss.metrics()["pretrain_loss"]
            if len(seen) == 3:
                step.stop()
            step.finish(batch, loss)

    done = run(config, watchful)
    assert done.summary["steps"] == 3 == len(seen)
    assert [line["step"] for line in done.metrics] == [0, 1, 2, 3]
    assert "time/evaluation_s" in done.metrics[3]
    assert "time/evaluation_s" not in done.metrics[2]
    for line, (texts, losses) in zip(done.metrics[1:], seen, strict=True):
        expected, mean = oracle(task.model, texts)
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
        assert line["actor/pretrain_loss"] == line["pretrain/loss"] == pytest.approx(mean, rel=1e-5)
    with (
        open_run(config) as opened,
        pytest.raises(InvalidRequest, match=r"compute_loss needs columns \['text'\]"),
    ):
        opened.actor().compute_loss(FutureBatch.of(prompt=["1"]))


@pytest.fixture
def reward_only(config: Config, tmp_path: Path) -> Config:
    """One service, which starts fast."""
    table = config.services["reward"].model_copy(
        update={"address": f"127.0.0.1:{free_ports(1)[0]}", "function": "exact_match"}
    )
    own = config.run.model_copy(update={"directory": tmp_path / "runs"})
    return config.model_copy(update={"services": {"reward": table}, "run": own})


@pytest.mark.slow
@pytest.mark.parametrize(
    "ending", ["close", pytest.param("exit", marks=pytest.mark.full), "raise", "SIGINT", "SIGKILL"]
)
def test_launched_services_end_with_the_script_however_it_ends(
    reward_only: Config, tmp_path: Path, processes: Processes, ending: str
) -> None:
    path = write_config(reward_only, tmp_path / "config.toml")
    is_signal = ending.startswith("SIG")
    main = str(Path(__file__).with_name("python_open_main.py"))
    script = processes.start("python", main, str(path), "wait" if is_signal else ending)
    assert script.stdout is not None
    if is_signal:
        assert any("[1.0, 0.0]" in line for line in script.stdout)
        script.send_signal(getattr(signal, ending))
    out, err = script.communicate(timeout=TIMEOUT_S)
    if not is_signal:
        assert out.count("[1.0, 0.0]") == (2 if ending == "close" else 1), err
    failing = {"raise": "an error of the script", "SIGINT": "KeyboardInterrupt"}
    assert (failing[ending] in err) if ending in failing else not err, err
    wait_until(lambda: not processes.living(), TIMEOUT_S, "the services end")
    assert not is_listening(reward_only.services["reward"].address)
