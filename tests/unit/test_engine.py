"""The training engine in one process: plain torch's numbers, however rows are cut, and states that come back whole."""

import errno
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from nccl_transfer.refs.columns import Jagged
from services.compute.heads import PolicyHead, PolicyOutput, value_head
from services.compute.jagged_rows import assemble
from services.compute.linear import speed_up
from services.compute.microbatch import MicroBatch
from services.compute.norms import speed_up_norms
from services.compute.splitting import split
from services.engines import sharded
from services.engines.base import NonFiniteGradient, OptimizerOptions
from services.engines.fsdp.engine import FSDPEngine
from services.engines.offload import bring_back, copy_to_host, free, num_bytes
from services.models.export import tensors_sha256
from services.models.families import load_causal_lm, load_value_model
from services.models.value_model import ValueModel
from services.storage import publish
from services.storage.written import WrittenFile

CPU = torch.device("cpu")
TEMPERATURE = 1.7
HEAD = PolicyHead(temperature=TEMPERATURE, entropy_gradient=True)
OPTIONS = OptimizerOptions(lr=1e-2, weight_decay=0.1, max_grad_norm=0.5, warmup_steps=2)
ENTROPY_WEIGHT = 0.05


pytestmark = pytest.mark.usefixtures("process_group")


class Rows:
    """Prompts, responses and advantages of unequal lengths; one response is empty."""

    def __init__(self, seed: int) -> None:
        generator = np.random.default_rng(seed)
        prompt_lengths, response_lengths = generator.integers(1, 7, 9), generator.integers(1, 9, 9)
        response_lengths[2] = 0
        self.prompts = self._column(generator.integers(3, 61, prompt_lengths.sum()), prompt_lengths)
        self.responses = self._column(generator.integers(3, 61, response_lengths.sum()), response_lengths)
        self.advantages = self._column(generator.normal(size=response_lengths.sum()), response_lengths)

    @staticmethod
    def _column(values: np.ndarray, lengths: np.ndarray) -> Jagged[Tensor]:
        return Jagged(torch.from_numpy(values), lengths.astype(np.int64))

    def micro_batches(self, token_budget: int = 40) -> list[MicroBatch]:
        return split(self.prompts, self.responses, token_budget=token_budget, pad_id=0)

    def loss(self, output: PolicyOutput, micro_batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Policy gradient with an entropy bonus, as a token mean over all rows; counts tokens."""
        per_token = (
            micro_batch.spread(self.advantages) * output.log_probs_BR + ENTROPY_WEIGHT * output.entropy_BR
        )
        share = -per_token[micro_batch.response_mask_BR].sum() / len(self.responses.values)
        return share, {"tokens": micro_batch.response_mask_BR.sum()}


ROWS = Rows(seed=1)


def float64_model(directory: Path) -> PreTrainedModel:
    return load_causal_lm(directory, torch.float64)


def make_engine(directory: Path, dtype: torch.dtype = torch.float32, **options) -> FSDPEngine:
    return FSDPEngine(load_causal_lm(directory, dtype), CPU, optimizer=OPTIONS, **options)


def weights(engine: FSDPEngine) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.full_tensors()}


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(tensor, b[name]) for name, tensor in a.items())


def row_distributions(model: PreTrainedModel, row: int) -> Tensor:
    """Log-distributions of the response tokens of a row that is computed alone, without padding."""
    prompt, response = ROWS.prompts.row(row), ROWS.responses.row(row)
    logits = model(torch.cat((prompt, response))[None]).logits[0, len(prompt) - 1 : -1]
    return (logits[: len(response)] / TEMPERATURE).log_softmax(dim=-1)


def plain_loss(model: PreTrainedModel) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for row in range(ROWS.prompts.rows):
        log_p = row_distributions(model, row)
        for position, token in enumerate(ROWS.responses.row(row)):
            entropy = -(log_p[position].exp() * log_p[position]).sum()
            advantage = ROWS.advantages.row(row)[position]
            total = total - (advantage * log_p[position, token] + ENTROPY_WEIGHT * entropy)
    return total / len(ROWS.responses.values)


def test_log_probs_and_entropy_are_those_of_rows_computed_alone(tiny_llama_dir: Path):
    micro_batches = ROWS.micro_batches()
    outputs = make_engine(tiny_llama_dir).infer(micro_batches, HEAD)
    parts = [micro_batch.rows for micro_batch in micro_batches]
    pairs = list(zip(micro_batches, outputs, strict=True))
    log_probs = assemble(parts, [m.collect(o.log_probs_BR) for m, o in pairs], ROWS.responses.lengths)
    entropy = assemble(parts, [m.collect(o.entropy_BR) for m, o in pairs], ROWS.responses.lengths)
    model = float64_model(tiny_llama_dir)
    for row in range(ROWS.prompts.rows):
        expected = row_distributions(model, row)
        of_tokens = expected.gather(1, ROWS.responses.row(row)[:, None])[:, 0]
        torch.testing.assert_close(log_probs.row(row).double(), of_tokens, atol=1e-5, rtol=0)
        expected_entropy = -(expected.exp() * expected).sum(dim=-1)
        torch.testing.assert_close(entropy.row(row).double(), expected_entropy, atol=1e-5, rtol=0)


def test_values_are_those_of_the_positions_before_the_response_tokens(tiny_llama_dir: Path):
    model = load_value_model(tiny_llama_dir)
    torch.nn.init.normal_(model.value_head.weight)
    plain = load_value_model(tiny_llama_dir)
    plain.load_state_dict(model.state_dict())
    micro_batches = ROWS.micro_batches()
    for micro_batch, values_BR in zip(
        micro_batches, FSDPEngine(model, CPU).infer(micro_batches, value_head), strict=True
    ):
        for row, values_R in zip(micro_batch.rows, values_BR, strict=True):
            prompt, response = ROWS.prompts.row(row), ROWS.responses.row(row)
            expected = plain(torch.cat((prompt, response))[None])[0, len(prompt) - 1 : -1]
            torch.testing.assert_close(
                values_R[: len(response)], expected[: len(response)], atol=1e-5, rtol=0
            )


def test_three_steps_are_those_of_plain_torch_in_float64(tiny_llama_dir: Path):
    engine = make_engine(tiny_llama_dir, torch.float64)
    model = float64_model(tiny_llama_dir)
    adamw = torch.optim.AdamW(model.parameters(), weight_decay=OPTIONS.weight_decay, foreach=False)
    for lr in (0.5e-2, 1e-2, 1e-2):
        result = engine.step(ROWS.micro_batches(), HEAD, ROWS.loss)
        adamw.zero_grad()
        loss = plain_loss(model)
        loss.backward()
        norm = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None))
        assert norm > OPTIONS.max_grad_norm, "the gradient must be clipped"
        for p in model.parameters():
            if p.grad is not None:
                p.grad *= OPTIONS.max_grad_norm / norm
        adamw.param_groups[0]["lr"] = lr
        adamw.step()
        assert result.loss == pytest.approx(float(loss.detach()), rel=1e-10)
        assert result.grad_norm == pytest.approx(norm, rel=1e-10)
        assert result.lr == lr
        assert result.stats == {"tokens": len(ROWS.responses.values)}
    for name, tensor in engine.full_tensors():
        torch.testing.assert_close(tensor, model.state_dict()[name], rtol=1e-9, atol=1e-12)


def test_a_small_gradient_is_not_clipped(tiny_llama_dir: Path):
    engine, model = make_engine(tiny_llama_dir), load_causal_lm(tiny_llama_dir)
    results = []
    for limit in (1e6, float("inf")):
        options = OptimizerOptions(lr=1e-2, max_grad_norm=limit)
        engine = FSDPEngine(load_causal_lm(tiny_llama_dir), CPU, optimizer=options)
        engine.step(ROWS.micro_batches(), HEAD, ROWS.loss)
        results.append(weights(engine))
    assert same_bits(*results)
    assert not same_bits(results[0], {name: x.detach() for name, x in model.state_dict().items()})


def test_a_step_does_not_depend_on_how_rows_are_cut(tiny_llama_dir: Path):
    results, tensors = [], []
    for token_budget in (14, 40, 1000):
        engine = make_engine(tiny_llama_dir)
        results.append(engine.step(ROWS.micro_batches(token_budget), HEAD, ROWS.loss))
        tensors.append(torch.cat([x.flatten() for _, x in engine.full_tensors()]))
    assert len(ROWS.micro_batches(14)) > len(ROWS.micro_batches(40)) > len(ROWS.micro_batches(1000)) == 1
    for result, tensor in zip(results, tensors, strict=True):
        assert result.loss == pytest.approx(results[0].loss, abs=1e-5)
        assert result.grad_norm == pytest.approx(results[0].grad_norm, rel=1e-5)
        assert float((tensor - tensors[0]).norm() / tensors[0].norm()) < 1e-5


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_moves_nothing(tiny_llama_dir: Path, poison: float):
    engine = make_engine(tiny_llama_dir)
    engine.step(ROWS.micro_batches(), HEAD, ROWS.loss)
    before = engine.snapshot()
    with pytest.raises(NonFiniteGradient, match="at optimizer step 1"):
        engine.step(ROWS.micro_batches(), HEAD, lambda out, m: (poison * ROWS.loss(out, m)[0], {}))
    assert same_bits(engine.snapshot().tensors, before.tensors)
    engine.step(ROWS.micro_batches(), HEAD, ROWS.loss)
    other = make_engine(tiny_llama_dir)
    for _ in range(2):
        other.step(ROWS.micro_batches(), HEAD, ROWS.loss)
    assert same_bits(weights(engine), weights(other)), "nothing of the refused step may remain"


def test_an_error_in_the_loss_leaves_nothing_behind(tiny_llama_dir: Path):
    def fail(output: PolicyOutput, micro_batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        if micro_batch.rows[0] == micro_batches[-1].rows[0]:
            raise KeyError("advantages")
        return ROWS.loss(output, micro_batch)

    micro_batches = ROWS.micro_batches()
    engine, other = make_engine(tiny_llama_dir), make_engine(tiny_llama_dir)
    with pytest.raises(KeyError):
        engine.step(micro_batches, HEAD, fail)
    engine.step(micro_batches, HEAD, ROWS.loss)
    other.step(micro_batches, HEAD, ROWS.loss)
    assert same_bits(weights(engine), weights(other))


def test_an_engine_goes_back_to_a_snapshot_bit_for_bit(tiny_llama_dir: Path):
    engine = make_engine(tiny_llama_dir)
    engine.step(ROWS.micro_batches(), HEAD, ROWS.loss)
    snapshot, before = engine.snapshot(), weights(engine)
    first = engine.step(ROWS.micro_batches(), HEAD, ROWS.loss)
    after = weights(engine)
    engine.restore(snapshot)
    assert same_bits(weights(engine), before)
    assert engine.step(ROWS.micro_batches(), HEAD, ROWS.loss) == first
    assert same_bits(weights(engine), after)


def test_a_checkpoint_continues_bit_for_bit_in_a_fresh_engine(tiny_llama_dir: Path, tmp_path: Path):
    engine = make_engine(tiny_llama_dir)
    engine.step(ROWS.micro_batches(), HEAD, ROWS.loss)
    engine.save(tmp_path / "checkpoint")
    fresh = make_engine(tiny_llama_dir)
    fresh.load(tmp_path / "checkpoint")
    assert same_bits(fresh.snapshot().tensors, engine.snapshot().tensors)
    step = engine.step(ROWS.micro_batches(), HEAD, ROWS.loss)
    assert fresh.step(ROWS.micro_batches(), HEAD, ROWS.loss) == step
    assert same_bits(fresh.snapshot().tensors, engine.snapshot().tensors)


def test_a_checkpoint_that_is_written_later_has_the_state_from_when_it_was_begun(
    tiny_llama_dir: Path, tmp_path: Path
):
    engine = make_engine(tiny_llama_dir)
    engine.step(ROWS.micro_batches(), HEAD, ROWS.loss)
    write = engine.begin_save(tmp_path / "checkpoint", {"policy_version": 7})
    begun = engine.snapshot()
    engine.step(ROWS.micro_batches(), HEAD, ROWS.loss)
    names = ["rank-00000.safetensors", "manifest.json"]
    paths = [tmp_path / "checkpoint" / name for name in names]
    assert [(file.path, file.digest()) for file in write()] == [
        (path, WrittenFile(path).digest()) for path in paths
    ]
    fresh = make_engine(tiny_llama_dir)
    assert fresh.load(tmp_path / "checkpoint") == {"policy_version": 7}
    assert same_bits(fresh.snapshot().tensors, begun.tensors)
    with pytest.raises(ValueError, match="is not empty"):
        engine.begin_save(tmp_path / "checkpoint")


def test_a_checkpoint_replaces_an_older_one_and_leaves_nothing_beside_it(
    tiny_llama_dir: Path, tmp_path: Path
):
    engine = make_engine(tiny_llama_dir)
    engine.save(tmp_path / "checkpoint")
    engine.step(ROWS.micro_batches(), HEAD, ROWS.loss)
    engine.save(tmp_path / "checkpoint")
    fresh = make_engine(tiny_llama_dir)
    fresh.load(tmp_path / "checkpoint")
    assert same_bits(weights(fresh), weights(engine))
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_there_is_nothing_to_unpickle_in_a_checkpoint(tiny_llama_dir: Path, tmp_path: Path):
    make_engine(tiny_llama_dir).save(tmp_path / "checkpoint")
    names = sorted(path.name for path in (tmp_path / "checkpoint").iterdir())
    assert names == ["manifest.json", "rank-00000.safetensors", "rlhf-files.json"]


def test_a_checkpoint_that_fails_half_way_leaves_the_older_one(
    tiny_llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def disk_full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    engine = make_engine(tiny_llama_dir)
    engine.save(tmp_path / "checkpoint")
    before = weights(engine)
    engine.step(ROWS.micro_batches(), HEAD, ROWS.loss)
    monkeypatch.setattr(sharded, "write_manifest", disk_full)
    with pytest.raises(OSError, match="No space left"):
        engine.save(tmp_path / "checkpoint")
    engine.load(tmp_path / "checkpoint")
    assert same_bits(weights(engine), before)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_a_checkpoint_is_readable_while_it_is_replaced_and_its_writer_is_left_alone(
    tiny_llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Where two directories cannot be exchanged, there is a moment without a directory of that name."""
    monkeypatch.setattr(publish, "_exchange", lambda one, other: False)
    directory, rename, read = tmp_path / "checkpoint", os.rename, []
    engine, reader = make_engine(tiny_llama_dir), make_engine(tiny_llama_dir)
    engine.save(directory, {"version": 1})

    def rename_and_read(source: Path, target: Path) -> None:
        rename(source, target)
        if source == directory:
            read.append(reader.load(directory)["version"])

    monkeypatch.setattr(os, "rename", rename_and_read)
    engine.save(directory, {"version": 2})
    assert read == [1]
    assert reader.load(directory)["version"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_a_missing_checkpoint_is_named(tiny_llama_dir: Path, tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=f"no checkpoint in {tmp_path}"):
        make_engine(tiny_llama_dir).load(tmp_path)


def test_a_checkpoint_of_another_model_changes_nothing(
    tiny_llama_dir: Path, tiny_tied_llama_dir: Path, tmp_path: Path
):
    make_engine(tiny_tied_llama_dir).save(tmp_path / "checkpoint")
    engine = make_engine(tiny_llama_dir)
    before = engine.snapshot()
    with pytest.raises(ValueError, match=r"lacks 3 tensors, the first is exp_avg\.lm_head\.weight"):
        engine.load(tmp_path / "checkpoint")
    assert same_bits(engine.snapshot().tensors, before.tensors)


def test_a_checkpoint_of_another_size_is_refused(tiny_llama_dir: Path, tmp_path: Path):
    model = load_causal_lm(tiny_llama_dir)
    model.resize_token_embeddings(64)
    FSDPEngine(model, CPU, optimizer=OPTIONS).save(tmp_path / "checkpoint")
    with pytest.raises(ValueError, match=r"as \[64, 32\], expected \[61, 32\]"):
        make_engine(tiny_llama_dir).load(tmp_path / "checkpoint")


def test_a_damaged_checkpoint_is_refused(tiny_llama_dir: Path, tmp_path: Path):
    engine = make_engine(tiny_llama_dir)
    engine.save(tmp_path / "checkpoint")
    file = tmp_path / "checkpoint" / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"rank-00000\.safetensors is damaged"):
        engine.load(tmp_path / "checkpoint")


@pytest.mark.parametrize("fixture", ["tiny_llama_dir", "tiny_tied_llama_dir"])
def test_an_export_is_a_hugging_face_directory_with_the_same_logits(
    fixture: str, request: pytest.FixtureRequest, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
):
    engine = make_engine(request.getfixturevalue(fixture))
    engine.step(ROWS.micro_batches(), HEAD, ROWS.loss)
    digest = engine.export(tmp_path / "export", tiny_tokenizer)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert same_bits(loaded.state_dict(), weights(engine))
    # Or the last bits would differ by who computes.
    speed_up(loaded)
    speed_up_norms(loaded)
    logits = loaded(torch.tensor([[1, 5, 9]])).logits
    assert torch.equal(logits, engine._model(torch.tensor([[1, 5, 9]])).logits)
    assert tensors_sha256(sorted(load_file(tmp_path / "export" / "model.safetensors").items())) == digest
    assert (tmp_path / "export" / "tokenizer.json").exists()


def test_the_hash_of_an_export_follows_the_weights(tiny_llama_dir: Path, tmp_path: Path):
    engine = make_engine(tiny_llama_dir)
    first = engine.export(tmp_path / "a")
    assert engine.export(tmp_path / "b") == first
    engine.step(ROWS.micro_batches(), HEAD, ROWS.loss)
    assert engine.export(tmp_path / "b") != first


def test_an_export_that_cannot_be_written_fails(tiny_llama_dir: Path, tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        make_engine(tiny_llama_dir).export(tmp_path / "file" / "export")


def test_a_value_model_is_exported_with_its_head(tiny_llama_dir: Path, tmp_path: Path):
    engine = FSDPEngine(load_value_model(tiny_llama_dir), CPU, optimizer=OPTIONS)
    engine.step(ROWS.micro_batches(), value_head, lambda values_BR, m: (values_BR.sum() / 100, {}))
    engine.export(tmp_path / "export")
    loaded: ValueModel = load_value_model(tmp_path / "export")
    assert same_bits(loaded.state_dict(), weights(engine))
    assert loaded.value_head.weight.abs().sum() > 0


def test_tied_weights_come_under_every_name_and_in_order(tiny_tied_llama_dir: Path):
    tensors = list(make_engine(tiny_tied_llama_dir).full_tensors())
    names = [name for name, _ in tensors]
    assert names == sorted(AutoModelForCausalLM.from_pretrained(tiny_tied_llama_dir).state_dict())
    assert torch.equal(dict(tensors)["lm_head.weight"], dict(tensors)["model.embed_tokens.weight"])


def test_an_engine_without_optimizer_does_not_train(tiny_llama_dir: Path):
    engine = FSDPEngine(load_causal_lm(tiny_llama_dir), CPU)
    with pytest.raises(RuntimeError, match="no optimizer"):
        engine.step(ROWS.micro_batches(), HEAD, ROWS.loss)


def test_bfloat16_computes_near_float32_and_keeps_its_weights_in_float32(tiny_llama_dir: Path):
    exact, rounded = make_engine(tiny_llama_dir), make_engine(tiny_llama_dir, compute_dtype=torch.bfloat16)
    micro_batches = ROWS.micro_batches(1000)
    expected, actual = (engine.infer(micro_batches, HEAD)[0].log_probs_BR for engine in (exact, rounded))
    difference = (expected - actual)[micro_batches[0].response_mask_BR].abs()
    assert 0 < difference.max() < 0.3
    assert actual.dtype == torch.float32
    rounded.step(micro_batches, HEAD, ROWS.loss)
    assert {tensor.dtype for _, tensor in rounded.full_tensors()} == {torch.float32}


def test_offloading_on_cpu_moves_nothing_and_says_so(tiny_llama_dir: Path):
    engine = make_engine(tiny_llama_dir)
    assert engine.offload() == 0
    assert engine.onload() == 0


def test_parked_memory_is_freed_and_comes_back_under_its_views():
    tensor = torch.randn(6)
    view, expected = tensor[2:].view(2, 2), tensor.clone()
    offloaded = copy_to_host([tensor, view])
    assert torch.equal(tensor, expected)
    free(offloaded)
    assert tensor.untyped_storage().nbytes() == 0
    assert num_bytes(offloaded) == 6 * 4
    bring_back(offloaded)
    assert torch.equal(tensor, expected)
    assert torch.equal(view.flatten(), expected[2:])


def test_an_engine_with_nothing_to_infer_returns_nothing(tiny_llama_dir: Path):
    assert make_engine(tiny_llama_dir, compute_dtype=torch.bfloat16).infer([], HEAD) == []


def test_the_number_of_parameters_is_that_of_the_whole_model(tiny_llama_dir: Path):
    stored = sum(tensor.numel() for tensor in load_file(tiny_llama_dir / "model.safetensors").values())
    assert make_engine(tiny_llama_dir).num_parameters == stored
