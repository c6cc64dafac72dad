"""One launch of real services for all tests here: a launch costs seconds, so it is done once, side by side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast

from controller.config.config import Config
from deploy.quickstart import Recipe
from deploy.quickstart.build import BOS, EOS, PAD, UNK, build, make_tokenizer
from integration import example_plugins, node_reward
from integration.harness import Cluster, Processes, Service, free_ports, write_config
from integration.references import References

START_TIMEOUT_S = 110.0
STOP_TIMEOUT_S = 40.0
SUPERVISED_STEPS = 40
"""Enough that the model ends its answers, so that responses have different lengths."""
NUM_TRAIN, NUM_HELDOUT = 64, 16
LEARNS = ("actor", "lone_actor", "critic", "cost_critic", "cut_critic")

# As a rank does: oracles compute with the services' number of threads.
torch.set_num_threads(1)


@dataclass(frozen=True)
class Task:
    """The quickstart's task, supervised only a little, and models beside it.

    Attributes:
        directory: Prompts.
        model: The policy and its tokenizer.
        renumbered: The same policy with a tokenizer that gives other ids to the same characters.
        scorer, own_scorer: A reward model with the policy's tokenizer, and one with the other.
    """

    directory: Path
    model: Path
    renumbered: Path
    scorer: Path
    own_scorer: Path


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    directory = tmp_path_factory.mktemp("task") / "arithmetic"
    build(directory, Recipe(max_steps=SUPERVISED_STEPS))
    for name, rows in (("train", NUM_TRAIN), ("heldout", NUM_HELDOUT)):
        path = directory / f"{name}.jsonl"
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:rows]))
    task = Task(directory, *(directory / name for name in ("model", "renumbered", "scorer", "own_scorer")))
    task.renumbered.mkdir()
    for path in task.model.iterdir():
        if not path.name.startswith("tokenizer"):
            (task.renumbered / path.name).symlink_to(path)
    _renumbered_tokenizer().save_pretrained(task.renumbered)
    _write_scorer(task.scorer, make_tokenizer())
    _write_scorer(task.own_scorer, _renumbered_tokenizer())
    return task


def _renumbered_tokenizer() -> PreTrainedTokenizerFast:
    """The quickstart's tokenizer with every id one higher, and the last one 0."""
    vocabulary = {chr(code): (code + 1) % 128 for code in range(128)}
    backend: Any = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNK))
    backend.decoder = decoders.Fuse()
    special = {"pad_token": PAD, "bos_token": BOS, "eos_token": EOS, "unk_token": UNK}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def _write_scorer(directory: Path, tokenizer: Any) -> None:
    torch.manual_seed(5)
    labels: dict[str, Any] = {"num_labels": 1}
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        initializer_range=0.25,
        pad_token_id=tokenizer.pad_token_id,
        **labels,
    )
    LlamaForSequenceClassification(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


@pytest.fixture(scope="session")
def config(task: Task, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """All services that are up, with free ports; a run selects some of them."""
    # With matmul = "auto" each service measures for itself, and two that are started at different loads may differ.
    same = {"matmul": "mkl"}
    # Tests have directories of their own below the one of all tests.
    learner = {
        **same,
        "model": task.model,
        "optimizer": {"learning_rate": 3e-4},
        "output_roots": [tmp_path_factory.getbasetemp()],
    }
    cut = {"micro_batch_tokens": 48}
    tables: dict[str, dict[str, Any]] = {
        "actor": {"role": "actor", "ranks": 2, "checksums": True, **learner},
        "lone_actor": {"role": "actor", **learner, **cut},
        "critic": {"role": "critic", **learner},
        "cost_critic": {"role": "critic", **learner},
        # Reads the same ids as the others, but its tokenizer says that it means something else by them.
        "cut_critic": {"role": "critic", "ranks": 2, **learner, **cut, "model": task.renumbered},
        "reference": {"role": "reference", "model": task.model, **same},
        "reward": {"role": "reward", "function": "toy_rewards:digit_mean"},
        "verdicts": {"role": "reward", "ranks": 1, "function": "toy_rewards:by_metadata"},
        "tensor_scorer": {"role": "reward", "kind": "model", "model": task.scorer, "input": "tensor", **same},
        "text_scorer": {"role": "reward", "kind": "model", "model": task.own_scorer, "input": "text", **same},
    }
    ports = iter(free_ports(len(tables)))
    return Config.model_validate(
        {
            "run": {
                "name": "test",
                "directory": tmp_path_factory.mktemp("runs"),
                "steps": 3,
                "evaluate_every": 0,
                "samples": 2,
                "call_timeout_s": 60.0,
            },
            "data": {
                "train": task.directory / "train.jsonl",
                "heldout": task.directory / "heldout.jsonl",
                "prompts_per_step": 16,
            },
            "rollout": {"samples_per_prompt": 2, "max_response_tokens": 6},
            "algorithm": {"mini_batch_size": 16},
            "services": {
                name: {"address": f"127.0.0.1:{next(ports)}", **table} for name, table in tables.items()
            },
        }
    )


@pytest.fixture(scope="session")
def cluster(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The services, up until the last test."""
    directory = tmp_path_factory.mktemp("cluster")
    path = write_config(config, directory / "cluster.toml")
    processes = Processes()
    try:
        up = processes.serve(path, directory / "logs")
        yield Cluster(config, _save_all(config, directory), processes)
        up.terminate()
        assert up.wait(STOP_TIMEOUT_S) == 0
        assert not processes.living()
    finally:
        processes.kill()


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    """Reference results for ranks of engines."""
    return References(tmp_path_factory.mktemp("references"))


@pytest.fixture(scope="session")
def reward_node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reward in Node.js, ready to start."""
    return node_reward.install(tmp_path_factory.mktemp("node"))


@pytest.fixture(scope="session")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory to put on PYTHONPATH, in which the package `examples/plugins` is installed."""
    return example_plugins.install(tmp_path_factory.mktemp("plugins"))


def _save_all(config: Config, directory: Path) -> dict[str, Path]:
    """A checkpoint of every service that learns, in the state it started in."""
    saved = {}
    for name in LEARNS:
        service = Service(name, config.services[name].address)
        saved[name] = directory / f"{name}-initial"
        service.save(saved[name])
        service.close()
    return saved


def _service_fixture(name: str) -> Any:
    @pytest.fixture(name=name)
    def service(cluster: Cluster) -> Iterator[Service]:
        with cluster.service(name) as service:
            yield service

    return service


actor = _service_fixture("actor")
lone_actor = _service_fixture("lone_actor")
critic = _service_fixture("critic")
cut_critic = _service_fixture("cut_critic")
reference = _service_fixture("reference")
