"""A run says at its start where the chat template ends messages with a token that does not end responses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from click.testing import CliRunner

from controller.cli import main
from controller.config.config import Config
from controller.data.endings import messages_without_end
from controller.data.prompts import load_data
from deploy.quickstart.build import EOS, UNK, make_tokenizer

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}END\n{% endfor %}<assistant>"
)
LINE = (
    "services.actor.model: the chat template ends a message of the assistant with '\\x1a', which is no EOS token of "
    "the model, so responses go on after it; add its id, 26, to eos_token_id in "
)


def tables(tmp_path: Path, end: str, chat: bool = True, **configs: Any) -> dict[str, Any]:
    """A config with a model whose template ends messages with `end`; `configs` are the contents of its config.json
    (`config`) and generation_config.json (`generation_config`)."""
    model, rows = tmp_path / "model", tmp_path / "rows.jsonl"
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE.replace("END", end)
    tokenizer.save_pretrained(model)
    for name, content in {"config": {}, **configs}.items():
        (model / f"{name}.json").write_text(json.dumps(content))
    rows.write_text('{"prompt": "a", "ground_truth": "b"}\n')
    return {
        "data": {"train": str(rows), "heldout": str(rows), "chat": chat},
        "rollout": {"samples_per_prompt": 2},
        "algorithm": {"mini_batch_size": 256, "kl_loss_coefficient": 0},
        "services": {
            "actor": {"role": "actor", "address": "127.0.0.1:7101", "model": str(model)},
            "reward": {"role": "reward", "address": "127.0.0.1:7102"},
        },
    }


def lines(given: dict[str, Any]) -> list[str]:
    config = Config.model_validate(given)
    return list(messages_without_end(config, load_data(config)))


@pytest.mark.parametrize(
    ("end", "configs"),
    [
        (EOS, {}),
        (UNK, {"generation_config": {"eos_token_id": [3, 26]}}),
        (UNK, {"config": {"eos_token_id": 26}}),
        (UNK + EOS, {}),
        ("[end]", {}),
    ],
    ids=["the tokenizer's", "one of several", "the model's", "the second of two", "no special token"],
)
def test_a_message_that_ends_with_an_eos_token_is_not_told(
    end: str, configs: dict[str, Any], tmp_path: Path
) -> None:
    assert lines(tables(tmp_path, end, **configs)) == []


@pytest.mark.parametrize(
    "configs", [{}, {"generation_config": {"eos_token_id": 3}, "config": {"eos_token_id": 26}}]
)
def test_a_message_that_ends_with_another_token_is_told_with_what_to_do(
    configs: dict[str, Any], tmp_path: Path
) -> None:
    given = tables(tmp_path, UNK, **configs)
    line = f"{LINE}{tmp_path / 'model' / 'generation_config.json'}"
    assert lines(given) == [line]


def test_prompts_that_are_texts_have_no_messages_to_end(tmp_path: Path) -> None:
    assert lines(tables(tmp_path, UNK, chat=False)) == []


def test_a_dry_run_warns_of_it(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(tomli_w.dumps(tables(tmp_path, UNK)))
    ran = CliRunner().invoke(main, ["--algo", "grpo", "--config", str(tmp_path / "run.toml"), "--dry-run"])
    assert f"warning: {LINE}" in ran.stderr, ran.output
