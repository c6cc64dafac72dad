"""A resumed run draws the rows that it would have drawn, however long rows its services can read now, or is refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from unit.test_checkpoints import STATE, write

from controller.checkpoints.facts import check_config
from controller.checkpoints.limits import limits_as_json, row_limits
from controller.checkpoints.resume_point import ResumePoint
from controller.checkpoints.store import CheckpointStore
from controller.config.config import Config
from controller.data.draws import draw
from controller.data.loader import Loader
from controller.data.prompts import load_data
from controller.restoring import Restorer
from rlhf.errors import ConfigError
from rlhf.v1 import worker_pb2

RESPONSE = 10


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    path = tmp_path_factory.mktemp("model")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of 1 to 20 tokens."""
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": "a " * n, "text": "a " * n}) + "\n" for n in range(1, 21)))
    return path


def config(model: Path, rows: Path, *, most: int, **data: Any) -> Config:
    """A config whose actor reads rows of up to `most` tokens."""
    keys = {"micro_batch_tokens": most, "rollout_tokens": most + 1}
    tables = {
        "data": {"train": rows, "heldout": rows, "prompts_per_step": 4, "tokenizer": model, **data},
        "rollout": {"max_response_tokens": RESPONSE},
        "algorithm": {"mini_batch_size": 4},
        "services": {"actor": {"role": "actor", "address": "127.0.0.1:7101", "model": model, **keys}},
    }
    return Config.model_validate(tables)


def services(config: Config, positions: int = 1000) -> dict[str, worker_pb2.DescribeResponse]:
    most = min(positions, config.services["actor"].row_limits["micro_batch_tokens"])
    return {"actor": worker_pb2.DescribeResponse(role="actor", vocabulary_hash="x", max_tokens=most)}


def drawn(config: Config, before: dict[str, int | None] | None) -> list[str]:
    data, _ = load_data(config)
    limit, _ = row_limits(config, services(config), before)
    return [
        row.text for row in draw(data, Loader(data.sizes, [1.0], 3), 12, limit, lambda prompt: prompt.text)
    ]


def test_a_run_goes_on_with_the_same_rows_where_its_services_can_read_longer_ones(
    model: Path, rows: Path
) -> None:
    one, other = config(model, rows, most=15), config(model, rows, most=30)
    check_config(one.model_dump(mode="json"), other.model_dump(mode="json"), elsewhere=True)
    stored = limits_as_json(row_limits(one, services(one)))
    assert stored == {"prompts": 5, "texts": None}
    assert drawn(other, stored) == drawn(one, None) == drawn(one, stored)
    assert drawn(other, None) != drawn(one, None)


def test_a_run_whose_rows_services_cannot_read_is_refused_with_keys_and_value(
    model: Path, rows: Path
) -> None:
    small = config(model, rows, most=15, pretrain=rows)
    keys = "services.actor.micro_batch_tokens, services.actor.rollout_tokens"
    with pytest.raises(ConfigError) as raised:
        row_limits(small, services(small), {"prompts": 20, "texts": 14})
    assert str(raised.value) == (
        "prompts had up to 20 tokens when the checkpoint was written, and here only those of up to 5 can be read "
        "(services.actor, 15 less rollout.max_response_tokens), so the run would go on with other rows; "
        f"set {keys} to at least 30"
    )
    with pytest.raises(
        ConfigError, match=f"texts had up to 29 tokens .* up to 14 .* set {keys} to at least 30"
    ):
        row_limits(small, services(small), {"prompts": 5, "texts": 29})
    enough = config(model, rows, most=30, pretrain=rows)
    assert limits_as_json(row_limits(enough, services(enough), {"prompts": 20, "texts": 29})) == {
        "prompts": 20,
        "texts": 29,
    }


def test_a_service_whose_model_reads_too_short_rows_is_named(model: Path, rows: Path) -> None:
    given = config(model, rows, most=100)
    with pytest.raises(ConfigError, match=r"; services\.actor has to read rows of 30 tokens$"):
        row_limits(given, services(given, positions=25), {"prompts": 20, "texts": None})


def test_a_run_that_counted_no_tokens_counts_none(model: Path, rows: Path, tmp_path: Path) -> None:
    given = config(model, rows, most=15)
    assert row_limits(given, services(given), {"prompts": None, "texts": None}) == (None, None)
    uncounted = config(tmp_path, rows, most=15)
    with pytest.raises(
        ConfigError, match=r"data\.tokenizer: prompts of more than 5 tokens were left out .* counted"
    ):
        row_limits(uncounted, services(uncounted), {"prompts": 5, "texts": None})


@pytest.mark.parametrize("most", [15, 30])
def test_services_are_refused_before_anything_changes(
    most: int, model: Path, rows: Path, tmp_path: Path
) -> None:
    limits = {"prompts": 20, "texts": None}
    facts = {"platform": {}, "config": {"services": {}}, "limits": limits}
    write(CheckpointStore(tmp_path), 4, content={**STATE, "facts": facts})
    given = config(model, rows, most=most)
    plan: Any = SimpleNamespace(resumes=ResumePoint.find(tmp_path), config=given, elsewhere=True)
    restorer = Restorer(plan, ["actor"], dict)
    if most == 30:
        restorer.admit(services(given))
        return
    with pytest.raises(ConfigError, match="prompts had up to 20 tokens"):
        restorer.admit(services(given))
