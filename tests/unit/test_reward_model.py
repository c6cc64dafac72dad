"""Rewards by a model in this process: a row that cannot be read costs no other row its score, and the copy that scores
changes with the weights or not at all."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pretend_device import DEVICE, pretending
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast

from nccl_transfer.refs.columns import Jagged
from nccl_transfer.rows import FetchedRows
from rlhf.errors import CallCancelled, ConfigError, CorruptWeights, InvalidRequest, OutOfStep, RlhfError
from rlhf.v1 import common_pb2, reward_pb2, worker_pb2
from services.compute import matmul
from services.models.families import load_classifier
from services.reward.model import LearningRewardWorker, ModelRewardWorker, PairRewardWorker, in_row_order
from services.reward.model_scorer import ModelScorer
from services.reward.role import worker_class
from services.reward.sharded import ShardedLearningRewardWorker, ShardedRewardWorker
from services.roles import tokenization, torch_worker
from services.runtime.ranks import FailedAlone, Ranks
from services.runtime.worker import NO_ROWS, CallContext, CallRows
from settings.model import OptimizerTable
from settings.reward import RewardTable

pytestmark = pytest.mark.usefixtures("process_group")

BUDGET = 16
PAIRS = {
    "prompt": ["w3", "w4 w5", "w6"],
    "chosen": [" w7", " w8 w9", " w10"],
    "rejected": [" w11 w12", " w13", " w14"],
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model, and a tokenizer of words w1, w2, ... with spaces between."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        pad_token_id=0,
        initializer_range=0.25,
    )
    config.num_labels = 1
    path = tmp_path_factory.mktemp("reward")
    LlamaForSequenceClassification(config).save_pretrained(path)
    words = Tokenizer(models.WordLevel({"<pad>": 0} | {f"w{i}": i for i in range(1, 61)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>").save_pretrained(path)
    return path


def make_table(directory: Path, **more: Any) -> RewardTable:
    return RewardTable.model_validate(
        {
            "role": "reward",
            "address": "127.0.0.1:1",
            "kind": "model",
            "model": directory,
            "micro_batch_tokens": BUDGET,
            **more,
        }
    )


def make_call() -> CallContext:
    return CallContext(common_pb2.Call(call_id="c"), time.monotonic() + 60)


def text_rows(*lengths: int) -> list[reward_pb2.TextRow]:
    return [reward_pb2.TextRow(prompt=" ".join(f"w{3 + i}" for i in range(n))) for n in lengths]


def test_a_text_beyond_the_budget_is_an_error_of_its_row_alone(directory: Path):
    scorer = ModelScorer(make_table(directory))
    scores = scorer.score_texts(text_rows(2, BUDGET + 1, BUDGET, 0), make_call())
    alone = [scorer.score_texts(text_rows(n), make_call())[0].score for n in (2, BUDGET)]
    assert [score.WhichOneof("verdict") for score in scores] == ["score", "error", "score", "error"]
    assert [scores[0].score, scores[2].score] == pytest.approx(alone, abs=1e-6)
    assert "17 tokens; the reward model reads from 1 to 16" in scores[1].error
    assert "micro_batch_tokens" in scores[1].error
    assert "0 tokens" in scores[3].error


def test_token_ids_beyond_the_budget_are_an_error_of_their_row_alone(directory: Path):
    scorer = ModelScorer(make_table(directory, input="tensor"))
    lengths = np.array([3, BUDGET])
    ids = Jagged(np.arange(lengths.sum()) % 50 + 3, lengths)
    values = {"prompt_ids": ids, "response_ids": ids}
    rows = CallRows(FetchedRows(2, values, dict.fromkeys(values, "int64"), 0), np.arange(2))
    assert [score.WhichOneof("verdict") for score in scorer.score_tokens(rows, make_call())] == [
        "score",
        "error",
    ]


@pytest.mark.parametrize("column", ["prompt_ids", "response_ids"])
@pytest.mark.parametrize("token", [-1, 61])
@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
def test_a_token_id_without_an_embedding_is_refused_before_anything_is_computed(
    directory: Path, column: str, token: int, sharded: bool
):
    table = make_table(directory, input="tensor", sharded=sharded)
    scorer: Any = worker_class(table)(table, Ranks(0, 1, 0)).scorer  # type: ignore[attr-defined]
    lengths = np.array([2, 1])
    good = Jagged(np.array([3, 60, 0]), lengths)
    values = {"prompt_ids": good, "response_ids": good, column: Jagged(np.array([3, token, 0]), lengths)}
    rows = CallRows(FetchedRows(2, values, dict.fromkeys(values, "int64"), 0), np.arange(2))
    with pytest.raises(InvalidRequest, match="the model has 61"):
        scorer.score_tokens(rows, make_call())
    values[column] = good
    with torch.no_grad():
        assert [score.error for score in scorer.score_tokens(rows, make_call())] == ["", ""]


def test_a_reward_model_is_computed_in_the_type_that_is_asked_for(directory: Path):
    exact, rounded = (ModelScorer(make_table(directory, dtype=dtype)) for dtype in ("float32", "bfloat16"))
    assert rounded._scorer.model.dtype == torch.bfloat16
    scores = [each.score_texts(text_rows(5), make_call())[0].score for each in (exact, rounded)]
    assert scores[1] != scores[0]
    assert scores[1] == pytest.approx(scores[0], abs=0.05)


def test_a_reward_model_is_computed_on_the_gpu_of_its_local_rank(
    directory: Path, monkeypatch: pytest.MonkeyPatch
):
    scorer = ModelScorer(make_table(directory))
    assert scorer._scorer.model.device == torch.device("cpu")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    moved: list[torch.device] = []
    monkeypatch.setattr(torch.nn.Module, "to", lambda model, device: moved.append(device))
    ModelScorer(make_table(directory))
    assert moved == [torch.device("cuda", 1)]


class StopsAfter(CallContext):
    """A call that is cancelled once it has reported progress a number of times."""

    reports = 1

    def progress(self, done: int, of: int) -> None:
        super().progress(done, of)
        self.reports -= done > 0
        self.cancelled = self.reports <= 0


def test_scoring_by_a_model_tells_its_progress_and_stops_between_micro_batches(
    directory: Path, monkeypatch: pytest.MonkeyPatch
):
    scorer, call = ModelScorer(make_table(directory)), make_call()
    scorer.score_texts(text_rows(*[BUDGET] * 5, 0), call)
    assert (call.done, call.done_of) == (5, 5)
    computed, model = [], scorer._scorer.model
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda **given: (computed.append(1), forward(**given))[1])
    stopping = StopsAfter(common_pb2.Call(call_id="c"), time.monotonic() + 60)
    with pytest.raises(CallCancelled):
        scorer.score_texts(text_rows(*[BUDGET] * 5), stopping)
    assert len(computed) == 1


def test_texts_are_tokenized_in_groups_between_which_the_call_may_stop(
    directory: Path, monkeypatch: pytest.MonkeyPatch
):
    scorer, groups = ModelScorer(make_table(directory)), []
    tokenizer = scorer._tokenizer

    def tokenize(texts: list[str], **options: Any) -> Any:
        groups.append(len(texts))
        return tokenizer(texts, **options)

    monkeypatch.setattr(scorer, "_tokenizer", tokenize)
    assert len(scorer.score_texts(text_rows(*[1] * 200), make_call())) == 200
    assert max(groups) <= tokenization.TEXTS_PER_GROUP
    call = make_call()
    call.cancelled = True
    groups.clear()
    with pytest.raises(CallCancelled):
        scorer.score_texts(text_rows(1), call)
    assert groups == []


def test_a_text_too_long_to_tokenize_is_an_error_of_its_row_alone(directory: Path):
    scorer = ModelScorer(make_table(directory))
    texts = ["w3", "w" * (tokenization.MAX_CHARACTERS + 1)]
    fine, failed = scorer.score_texts([reward_pb2.TextRow(response=text) for text in texts], make_call())
    assert fine.WhichOneof("verdict") == "score"
    assert "has 262145 characters; at most 262144 are tokenized" in failed.error


@pytest.fixture
def no_matmul_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "_in_use", [])


@pytest.mark.usefixtures("no_matmul_yet")
@pytest.mark.parametrize(("mkl", "onednn", "chosen"), [(2.0, 1.0, "onednn"), (1.0, 2.0, "mkl")])
def test_all_ranks_multiply_with_the_library_that_was_faster_on_all_of_them_and_tell_which(
    directory: Path, monkeypatch: pytest.MonkeyPatch, mkl: float, onednn: float, chosen: str
):
    monkeypatch.setattr(Ranks, "total", lambda *_: [mkl, onednn])
    worker = ModelRewardWorker(make_table(directory), Ranks(0, 1, 0))
    assert worker.describe().matmul == chosen


@pytest.mark.usefixtures("no_matmul_yet")
def test_a_library_that_torch_does_not_have_is_refused(directory: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(matmul, "onednn_linear", None)
    with pytest.raises(ConfigError, match="this build of torch has no oneDNN"):
        ModelRewardWorker(make_table(directory, matmul="onednn"), Ranks(0, 1, 0))


def test_weights_that_cannot_be_gathered_end_the_rank_instead_of_leaving_its_peers_waiting(
    directory: Path, monkeypatch: pytest.MonkeyPatch
):
    worker = make_learner(directory)

    def gather() -> Iterator[tuple[str, Tensor]]:
        yield next(iter(gathered))
        raise RuntimeError("a collective failed")

    gathered = dict(worker.engine.full_tensors()).items()
    monkeypatch.setattr(worker.engine, "full_tensors", gather)
    with pytest.raises(FailedAlone, match="a collective failed"):
        worker.copy_weights()


def test_a_rank_whose_scorer_alone_cannot_take_the_new_weights_leaves(
    directory: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its peers score with the new weights."""
    worker = make_learner(directory)

    def fail(staged: object) -> None:
        raise RuntimeError("the device has failed")

    monkeypatch.setattr(worker.scorer, "load_weights", fail)
    with pytest.raises(OutOfStep, match="rank 0 failed alone in taking the weights to score with"):
        update(worker)
    assert worker.state_id == ""


def test_pairs_of_token_ids_end_as_the_responses_of_their_row_do(directory: Path) -> None:
    worker = make_learner(directory)
    rows = CallRows(FetchedRows(3, PAIRS | {"response_end": [" w20", "", " w20"]}, {}, 0), np.arange(3))
    as_text = worker._pair_ids(rows, 0, make_call()).tolist()
    assert as_text == [[3, 7], [3, 11, 12], [4, 5, 8, 9], [4, 5, 13], [6, 10], [6, 14]]
    worker._reads_ids = True
    ended = [[*each, 20] if place not in (2, 3) else each for place, each in enumerate(as_text)]
    assert worker._pair_ids(rows, 0, make_call()).tolist() == ended


def update(worker: PairRewardWorker) -> None:
    rows = CallRows(FetchedRows(3, PAIRS, {}, 0), np.arange(3))
    request = reward_pb2.UpdateRewardRequest(loss="bradley_terry", epochs=1, mini_batches=1)
    worker.around(lambda: worker.update_reward(rows, request, make_call()))


def state(worker: LearningRewardWorker) -> dict[str, Tensor]:
    """Weights and moments, and the weights that score."""
    scoring = worker.scorer._scorer.model.state_dict()
    return worker.engine.snapshot().tensors | {f"scorer.{name}": x.clone() for name, x in scoring.items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(x, b[name]) for name, x in a.items())


def make_learner(directory: Path) -> LearningRewardWorker:
    table = make_table(directory, optimizer=OptimizerTable(learning_rate=1e-2), micro_batch_tokens=64)
    return LearningRewardWorker(table, Ranks(0, 1, 0))


@contextmanager
def little_memory(worker: LearningRewardWorker, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """There is not enough of it to copy the weights to the scorer."""
    allocate, left = torch.empty_like, iter(range(4))

    def limited(*arguments: Any, **options: Any) -> Tensor:
        if next(left, None) is None:
            raise torch.OutOfMemoryError("there is no memory left")
        return allocate(*arguments, **options)

    stage = worker.scorer.stage_weights

    def stage_with_little_memory(weights: Any) -> dict[str, Tensor]:
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty_like", limited)
            return stage(weights)

    worker.scorer.stage_weights = stage_with_little_memory
    with pytest.raises((RlhfError, torch.OutOfMemoryError), match="no memory left"):
        yield
    worker.scorer.stage_weights = stage


def test_an_update_whose_weights_cannot_be_copied_to_the_scorer_leaves_no_trace(
    directory: Path, monkeypatch: pytest.MonkeyPatch
):
    worker, untroubled = make_learner(directory), make_learner(directory)
    before = state(worker)
    with little_memory(worker, monkeypatch):
        update(worker)
    assert worker.policy_version == 0
    assert same(state(worker), before)
    for each in (worker, untroubled):
        update(each)
    assert worker.policy_version == 1
    assert same(state(worker), state(untroubled))


def test_after_an_update_and_a_new_start_the_scorer_has_the_weights_that_learn(directory: Path):
    worker = make_learner(directory)
    before = state(worker)
    update(worker)
    learned = dict(worker.engine.full_tensors())
    assert same(dict(worker.scorer._scorer.model.state_dict()), learned)
    assert not same(learned, load_classifier(directory).state_dict())
    worker.start_over()
    assert same(state(worker), before)


def test_the_texts_of_pairs_are_tokenized_only_while_the_call_goes_on(
    directory: Path, monkeypatch: pytest.MonkeyPatch
):
    worker, call = make_learner(directory), make_call()
    rows = CallRows(FetchedRows(3, PAIRS, {}, 0), np.arange(3))
    request = reward_pb2.UpdateRewardRequest(loss="bradley_terry", epochs=1, mini_batches=1)
    call.cancelled = True

    def tokenize(*_: Any, **__: Any) -> None:
        raise AssertionError("tokenized")

    monkeypatch.setattr(worker, "tokenizer", tokenize)
    with pytest.raises(CallCancelled):
        worker.around(lambda: worker.update_reward(rows, request, call))


def call_load(worker: LearningRewardWorker, directory: Path) -> None:
    worker.output_roots = (directory.parent.resolve(),)
    request = worker_pb2.LoadCheckpointRequest(directory=str(directory))
    worker.around(lambda: worker.load_checkpoint(NO_ROWS, request, make_call()))


@pytest.mark.parametrize("way", ["load", "start over"])
def test_weights_that_cannot_be_copied_to_the_scorer_are_not_taken_over(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
):
    worker = make_learner(directory)
    saved = state(worker)
    worker.engine.save(tmp_path / "saved", {"policy_version": 0})
    update(worker)
    learned = state(worker)

    def change() -> None:
        call_load(worker, tmp_path / "saved") if way == "load" else worker.start_over()

    with little_memory(worker, monkeypatch):
        change()
    assert worker.policy_version == 1
    assert same(state(worker), learned)
    change()
    assert worker.policy_version == 0
    assert same(state(worker), saved)


def test_weights_that_score_are_verified(directory: Path):
    worker = ModelRewardWorker(make_table(directory), Ranks(0, 1, 0))
    assert worker.verify_weights(NO_ROWS, None, make_call()).fields["verified_bytes"] > 0
    weight = next(worker.scorer._scorer.model.parameters())  # type: ignore[attr-defined]
    weight.data.view(-1).view(torch.int32)[0] ^= 1
    with pytest.raises(CorruptWeights, match=r"scorer\.\S+ on rank 0 has changed since it was last verified"):
        worker.verify_weights(NO_ROWS, None, make_call())


def test_weights_that_learn_and_their_scoring_copy_are_verified(directory: Path):
    worker = make_learner(directory)
    for change in (lambda: update(worker), worker.start_over, lambda: None):
        worker.verify_weights(NO_ROWS, None, make_call())
        change()
    weight = next(worker.scorer._scorer.model.parameters())  # type: ignore[attr-defined]
    weight.data.view(-1).view(torch.int32)[0] ^= 1
    with pytest.raises(CorruptWeights, match=r"scorer\.\S+ on rank 0 has changed since it was last verified"):
        update(worker)


def scores_of(
    worker: ShardedRewardWorker | ShardedLearningRewardWorker | LearningRewardWorker, *lengths: int
) -> Any:
    """RowScores of text rows by the method that the service serves."""
    request = reward_pb2.ComputeRewardRequest(text_rows=text_rows(*lengths))
    return worker.around(lambda: worker.compute_reward(NO_ROWS, request, make_call())).fields["scores"]


ZERO = {"engine": "zero", "zero": {"stage": 3}}
ENGINES = [pytest.param({}, id="fsdp"), pytest.param(ZERO, id="zero-3")]


def skip_without_its_engine(keys: dict[str, Any]) -> None:
    if keys:
        pytest.importorskip("deepspeed")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 1e-2)])
def test_a_sharded_model_scores_as_a_whole_one_and_tells_the_same_faults(
    directory: Path, dtype: str, tolerance: float, engine: dict[str, Any]
) -> None:
    skip_without_its_engine(engine)
    table = make_table(directory, dtype=dtype, sharded=True, **engine)
    worker = worker_class(table)(table, Ranks(0, 1, 0))
    assert isinstance(worker, ShardedRewardWorker)
    lengths = (2, BUDGET + 1, BUDGET, 0, 5)
    found = scores_of(worker, *lengths)
    whole = ModelScorer(make_table(directory, dtype=dtype)).score_texts(text_rows(*lengths), make_call())
    assert [score.error for score in found] == [score.error for score in whole]
    assert [score.score for score in found] == pytest.approx([score.score for score in whole], abs=tolerance)
    kept = {held.tensor.dtype for held in worker.held() if held.name.endswith("weight")}
    assert kept == {getattr(torch, dtype)}
    assert worker.describe().engine == f"model, sharded by {'zero, stage 3' if engine else 'fsdp'}"


@pytest.mark.parametrize("engine", [*ENGINES, pytest.param({"engine": "zero"}, id="zero-2")])
def test_a_sharded_model_that_learns_scores_by_the_weights_that_it_trains(
    directory: Path, engine: dict[str, Any]
) -> None:
    skip_without_its_engine(engine)
    learning = {"optimizer": OptimizerTable(learning_rate=1e-2), "micro_batch_tokens": 64}
    table = make_table(directory, **learning, sharded=True, **engine)
    worker, copying = worker_class(table)(table, Ranks(0, 1, 0)), make_learner(directory)
    assert isinstance(worker, ShardedLearningRewardWorker)
    before = [score.score for score in scores_of(worker, 2, 5)]
    for each in (worker, copying):
        update(each)
    found = [score.score for score in scores_of(worker, 2, 5)]
    assert found == pytest.approx([score.score for score in scores_of(copying, 2, 5)], abs=1e-6)
    assert found != pytest.approx(before, abs=1e-3)
    assert not any(held.name.startswith("scorer.") for held in worker.held())


def test_a_copy_scores_for_a_model_that_learns_on_zero(directory: Path) -> None:
    skip_without_its_engine(ZERO)
    learning = {"optimizer": OptimizerTable(learning_rate=1e-2), "micro_batch_tokens": 64}
    table = make_table(directory, **learning, **ZERO)
    worker, expected = worker_class(table)(table, Ranks(0, 1, 0)), make_learner(directory)
    assert isinstance(worker, LearningRewardWorker)
    before = [score.score for score in scores_of(worker, 2, 5)]
    for each in (worker, expected):
        update(each)
    found = [score.score for score in scores_of(worker, 2, 5)]
    assert found == pytest.approx([score.score for score in scores_of(expected, 2, 5)], abs=1e-6)
    worker.start_over()
    assert [score.score for score in scores_of(worker, 2, 5)] == before != found


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"engine": "zero"}, "engine is for a reward of kind model that is sharded or learns"),
        (
            {"engine": "zero", "sharded": True},
            "zero.stage 2 does not shard a model that does not learn; 3 does",
        ),
        ({"zero": {"stage": 3}}, "zero is for engine zero, and engine is fsdp"),
        ({"engine": "3d", "sharded": True}, "Input should be 'fsdp' or 'zero'"),
    ],
)
def test_an_engine_that_does_not_shard_a_reward_is_refused(
    directory: Path, keys: dict[str, Any], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        make_table(directory, **keys)


def test_scores_leave_the_device_in_one_copy() -> None:
    with pretending() as log:
        micro_batches: list[Any] = [SimpleNamespace(rows=np.array(rows)) for rows in ([3, 0], [2], [1, 4])]
        outputs = [torch.tensor(each.rows / 2, device=DEVICE) for each in micro_batches]
        log.clear()
        assert in_row_order(micro_batches, outputs).tolist() == [0, 0.5, 1, 1.5, 2]
        assert (len(log.to_host), log.to_device, log.waits) == (1, [], [])


@pytest.mark.parametrize("budget", [8, 64], ids=["a micro-batch per pair", "one for all"])
def test_a_cost_model_learns_on_a_device_and_the_signs_of_all_pairs_go_there_in_one_copy(
    directory: Path, monkeypatch: pytest.MonkeyPatch, budget: int
) -> None:
    monkeypatch.setattr(torch_worker, "rank_device", lambda: DEVICE)
    keys: dict[str, Any] = {"optimizer": OptimizerTable(learning_rate=1e-2), "sharded": True}
    # No kernels can be compiled for a pretend device.
    table = make_table(directory, **keys, kernels="eager", micro_batch_tokens=budget)
    signs = {"chosen_sign": np.array([1, -1, 1]), "rejected_sign": np.array([1, 1, -1])}
    rows = CallRows(FetchedRows(3, PAIRS | signs, {}, 0), np.arange(3))
    request = reward_pb2.UpdateRewardRequest(loss="cost", epochs=2, mini_batches=1)
    with pretending() as log:
        worker: Any = worker_class(table)(table, Ranks(0, 1, 0))  # type: ignore[call-arg]
        log.clear()
        worker.around(lambda: worker.update_reward(rows, request, make_call()))
        assert len(log.to_device) == 1 + request.epochs, log  # signs, and the layout of each mini-batch
        scores = worker.around(lambda: worker.compare_pairs(rows, request, make_call())).columns
    assert all(scores["chosen_scores"].isfinite())


def test_sharding_is_for_models_alone() -> None:
    table = RewardTable.model_validate({"role": "reward", "address": "127.0.0.1:1", "sharded": True})
    with pytest.raises(ConfigError, match="sharded: a reward of kind function has no weights"):
        worker_class(table)


def test_a_causal_language_model_cannot_score_without_training(tiny_llama_dir: Path) -> None:
    table = make_table(tiny_llama_dir, sharded=True)
    with pytest.raises(ConfigError, match=r"lacks 1 weights of its model, the first is score\.weight"):
        worker_class(table)(table, Ranks(0, 1, 0))
