"""An actor's rank in this process: the columns that it returns, and an actor that cannot be loaded."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2Config

from nccl_transfer.rows import FetchedRows
from rlhf.errors import Refused
from rlhf.roles import find_role
from rlhf.v1 import actor_pb2, common_pb2
from services.actor.worker import ActorWorker
from services.engines.sharded import ShardedEngine
from services.runtime import main
from services.runtime.ranks import Ranks
from services.runtime.worker import CallContext, CallRows
from settings.actor import ActorTable

pytestmark = pytest.mark.usefixtures("process_group")

TEXTS = {"prompt": ["w3", "w5"], "response": ["w6", "w7"]}


@pytest.fixture(scope="module")
def actor(tiny_llama_dir: Path) -> ActorWorker:
    table = {"role": "actor", "address": "127.0.0.1:1", "model": tiny_llama_dir}
    return ActorWorker(ActorTable.model_validate(table), Ranks(0, 1, 0))


def text_rows() -> CallRows:
    values: dict[str, Any] = {**TEXTS}
    return CallRows(FetchedRows(2, values, dict.fromkeys(values, "text"), 0), np.arange(2))


def make_call() -> CallContext:
    return CallContext(common_pb2.Call(call_id="c", seed=1, step=1), time.monotonic() + 60)


def test_generated_token_ids_leave_the_actor_as_int32(actor: ActorWorker) -> None:
    request = actor_pb2.GenerateSequencesRequest(
        sampling=actor_pb2.Sampling(max_new_tokens=4, temperature=1.0)
    )
    columns = actor.generate_sequences(text_rows(), request, make_call()).columns
    dtypes = {name: columns[name].values.dtype for name in ("prompt_ids", "response_ids")}
    assert dtypes == {"prompt_ids": torch.int32, "response_ids": torch.int32}
    assert columns["prompt_ids"].values.tolist() == [3, 5]


def test_a_response_whose_last_possible_token_is_an_end_is_not_cut_off(
    actor: ActorWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = actor_pb2.GenerateSequencesRequest(
        sampling=actor_pb2.Sampling(max_new_tokens=4, temperature=1.0), return_ends=True
    )
    ids = actor.generate_sequences(text_rows(), request, make_call()).columns["response_ids"].tolist()
    end = ids[0][-1]
    assert [len(row) for row in ids] == [4, 4]
    assert end not in [*ids[0][:-1], *ids[1]]
    monkeypatch.setattr(actor._generator, "_eos_ids", (end,))
    columns = actor.generate_sequences(text_rows(), request, make_call()).columns
    assert columns["response_ids"].tolist() == ids
    assert columns["turn_end"] == ["stop", "length"]


def test_a_stop_token_ends_a_response_and_stays_in_it(actor: ActorWorker) -> None:
    request = actor_pb2.GenerateSequencesRequest(
        sampling=actor_pb2.Sampling(max_new_tokens=4, temperature=1.0), return_ends=True
    )
    ids = actor.generate_sequences(text_rows(), request, make_call()).columns["response_ids"].tolist()
    end = ids[0][2]
    assert end not in [*ids[0][:2], *ids[1]]
    request.sampling.stop_token_ids.append(end)
    result = actor.generate_sequences(text_rows(), request, make_call())
    assert result.columns["response_ids"].tolist() == [ids[0][:3], ids[1]]
    assert result.columns["turn_end"] == ["stop", "length"]
    assert result.metrics["finished"] == (1, 2)


def test_a_stop_token_that_the_model_does_not_have_is_refused(actor: ActorWorker) -> None:
    sampling = actor_pb2.Sampling(max_new_tokens=4, temperature=1.0, stop_token_ids=[3, 1 << 20])
    request = actor_pb2.GenerateSequencesRequest(sampling=sampling)
    with pytest.raises(ValueError, match=r"stop_token_ids: 1048576 is beyond the model's \d+ embeddings"):
        actor.generate_sequences(text_rows(), request, make_call())


def test_an_actor_whose_responses_another_service_generates_has_no_rollout_engine(
    tiny_llama_dir: Path,
) -> None:
    table = {"role": "actor", "address": "127.0.0.1:1", "model": tiny_llama_dir, "rollout_engine": "none"}
    actor = ActorWorker(ActorTable.model_validate(table), Ranks(0, 1, 0))
    described = actor.describe()
    assert described.engine == "fsdp, rollout none"
    assert (
        "it generates no responses, since rollout_engine is none: a rollout service does" in described.limits
    )
    request = actor_pb2.GenerateSequencesRequest(sampling=actor_pb2.Sampling(max_new_tokens=4))
    with pytest.raises(Refused, match="this service generates no responses: a rollout service does"):
        actor.generate_sequences(text_rows(), request, make_call())
    assert actor.tokenize(text_rows(), actor_pb2.TokenizeRequest(), make_call()).columns
    assert actor.offload(text_rows(), None, make_call()).fields == {"moved_bytes": 0}
    actor.onload(text_rows(), None, make_call())


@pytest.mark.parametrize("lacking", [("tokenizer", "config"), ("tokenizer",), ("config",), ()])
def test_an_actor_says_whether_its_model_lacks_an_eos_token(
    lacking: tuple[str, ...], tiny_llama_dir: Path, tmp_path: Path
) -> None:
    files = {"tokenizer": ("tokenizer_config.json",), "config": ("config.json", "generation_config.json")}
    shutil.copytree(tiny_llama_dir, tmp_path / "model")
    for path in (tmp_path / "model" / name for each in lacking for name in files[each]):
        table = json.loads(path.read_text())
        path.write_text(json.dumps({**table, "eos_token": None, "eos_token_id": None}))
    table = {"role": "actor", "address": "127.0.0.1:1", "model": tmp_path / "model"}
    described = ActorWorker(ActorTable.model_validate(table), Ranks(0, 1, 0)).describe()
    assert described.lacks_eos is (len(lacking) == 2)


def test_an_actor_that_was_offloaded_generates_after_it_has_loaded_a_checkpoint(
    actor: ActorWorker, tmp_path: Path
) -> None:
    actor.engine.save(tmp_path / "saved", {"policy_version": 0})
    assert isinstance(actor.engine, ShardedEngine)
    actor.engine._leave_device()
    actor.rollout.sleep()
    actor.load(tmp_path / "saved")
    request = actor_pb2.GenerateSequencesRequest(
        sampling=actor_pb2.Sampling(max_new_tokens=4, temperature=1.0)
    )
    assert (
        len(actor.generate_sequences(text_rows(), request, make_call()).columns["response_ids"].lengths) == 2
    )


def test_token_ids_of_texts_leave_the_actor_as_int32(actor: ActorWorker) -> None:
    columns = actor.tokenize(text_rows(), actor_pb2.TokenizeRequest(), make_call()).columns
    assert {name: column.values.dtype for name, column in columns.items()} == {
        "prompt_ids": torch.int32,
        "response_ids": torch.int32,
    }


def test_a_response_ends_with_the_text_of_its_row_or_the_eos_token(actor: ActorWorker) -> None:
    values: dict[str, Any] = {**TEXTS, "response_end": ["<bos>", ""]}
    rows = CallRows(FetchedRows(2, values, dict.fromkeys(values, "text"), 0), np.arange(2))
    assert actor.eos_id is not None
    for given, ends in ((rows, [1, actor.eos_id]), (text_rows(), [actor.eos_id] * 2)):
        columns = actor.tokenize(given, actor_pb2.TokenizeRequest(), make_call()).columns
        assert columns["response_ids"].tolist() == [[6, ends[0]], [7, ends[1]]]


def test_an_actor_without_a_tokenizer_is_the_service_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the line of its rank that rlhf-deploy shows. Once it began to serve, the reference would be blamed for another
    vocabulary."""
    Qwen2Config(vocab_size=61, hidden_size=32, num_hidden_layers=1, num_attention_heads=2).save_pretrained(
        tmp_path
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    config = tmp_path / "services.toml"
    config.write_text(f'[services.actor]\nrole = "actor"\naddress = "{address}"\nmodel = "{tmp_path}"\n')

    def load(table: ActorTable, name: str, worker: str, *_: Any, **__: Any) -> None:
        main._worker_class(worker, table)(table, Ranks(0, 1, 0))

    monkeypatch.setattr(main, "_serve", load)
    monkeypatch.setattr(main, "ends_with", lambda parent: True)
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr(sys, "argv", ["actor", "--config", str(config)])
    with pytest.raises(SystemExit) as ended:
        main.command(find_role("actor"))()
    assert ended.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("fatal: ")]
    assert line == f"fatal: actor: model: {tmp_path} has no files of a tokenizer, such as tokenizer.json"
