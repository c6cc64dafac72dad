"""One launch of real services for all tests here: a launch costs seconds, so it is done once, side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast

from controller.config import Config
from deploy.quickstart import Recipe
from deploy.quickstart.build import build, make_tokenizer
from integration.harness import Cluster, Processes, Service, free_ports, wait_until, write_config

START_TIMEOUT_S = 110.0
STOP_TIMEOUT_S = 40.0
SUPERVISED_STEPS = 60
"""Enough that the model ends its answers, so that responses have different lengths."""
NUM_TRAIN, NUM_HELDOUT = 64, 16
LEARNS = ("actor", "lone_actor", "critic", "cut_critic")

# As a rank does: the oracles here compute with the thread count of the services.
torch.set_num_threads(1)


@dataclass(frozen=True)
class Task:
    """What the services are started with.

    Attributes:
        directory: The quickstart's task, supervised only a little.
        model: The policy's model and tokenizer.
        renumbered: The same model beside a tokenizer that gives other ids to the same characters.
        scorer, own_scorer: A reward model with the policy's tokenizer, and one with the other.
    """

    directory: Path

    @property
    def model(self) -> Path:
        return self.directory / "model"

    @property
    def renumbered(self) -> Path:
        return self.directory / "renumbered"

    @property
    def scorer(self) -> Path:
        return self.directory / "scorer"

    @property
    def own_scorer(self) -> Path:
        return self.directory / "own_scorer"


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    task = Task(tmp_path_factory.mktemp("task") / "arithmetic")
    build(task.directory, Recipe(max_steps=SUPERVISED_STEPS))
    for name, rows in (("train", NUM_TRAIN), ("heldout", NUM_HELDOUT)):
        path = task.directory / f"{name}.jsonl"
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:rows]))
    tokenizer, renumbered = make_tokenizer(), _renumbered()
    for path in task.model.iterdir():
        if not path.name.startswith("tokenizer"):
            task.renumbered.mkdir(exist_ok=True)
            (task.renumbered / path.name).symlink_to(path)
    renumbered.save_pretrained(task.renumbered)
    _write_scorer(task.scorer, tokenizer)
    _write_scorer(task.own_scorer, renumbered)
    return task


def _renumbered() -> PreTrainedTokenizerFast:
    """The quickstart's tokenizer with every id one higher, the last one first."""
    tokenizer = make_tokenizer()
    state = tokenizer.backend_tokenizer.to_str()
    raise NotImplementedError(state)


def _write_scorer(directory: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    torch.manual_seed(5)
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
        num_labels=1,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForSequenceClassification(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
