"""The 3D-parallel engine on one rank: what does not need a mesh to be checked."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import Gemma2Config

from nccl_transfer.refs.columns import Jagged
from nccl_transfer.refs.mesh import Mesh
from rlhf.errors import ConfigError
from services.compute.heads import PolicyHead, PolicyOutput
from services.compute.microbatch import MicroBatch
from services.compute.splitting import split
from services.engines.base import EngineSetup, InferenceStopped, OptimizerOptions
from services.engines.fsdp.engine import FSDPEngine
from services.engines.offload import copy_to_host, num_bytes
from services.engines.three_d.engine import ThreeDParallelEngine
from services.models.families import load_causal_lm, load_scoring_model
from services.models.loading import Load
from settings.actor import ActorTable

CPU = torch.device("cpu")
HEAD = PolicyHead(temperature=1.7)
OPTIONS = OptimizerOptions(lr=1e-2, max_grad_norm=0.5)


pytestmark = pytest.mark.usefixtures("process_group")


def make_engine(directory: Path, dtype: torch.dtype = torch.float32, **options) -> ThreeDParallelEngine:
    return ThreeDParallelEngine(directory, Mesh(), CPU, dtype=dtype, optimizer=OPTIONS, **options)


def micro_batches() -> list[MicroBatch]:
    generator = np.random.default_rng(1)
    lengths = generator.integers(1, 7, (2, 6)).astype(np.int64)
    prompts, responses = (
        Jagged(torch.from_numpy(generator.integers(3, 61, counts.sum())), counts) for counts in lengths
    )
    return split(prompts, responses, token_budget=30, pad_id=0)


def loss(output: PolicyOutput, micro_batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    return -output.log_probs_BR[micro_batch.response_mask_BR].sum() / 20, {}


def weights(engine: ThreeDParallelEngine | FSDPEngine) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in engine.full_tensors()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_weights_and_what_they_learn_with_leave_the_device_together(
    dtype: torch.dtype, tiny_llama_dir: Path
):
    engine = make_engine(tiny_llama_dir, dtype)
    engine.step(micro_batches(), HEAD, loss)
    # Two moments; and a float32 copy of weights of another type.
    bytes_each = 4 + 4 + (4 if dtype == torch.float32 else 4 + 2)
    parked = num_bytes(copy_to_host(engine._resident()))
    assert parked == pytest.approx(bytes_each * engine.num_parameters, rel=0.1)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("fixture", ["tiny_llama_dir", "tiny_tied_llama_dir"])
def test_a_checkpoint_of_fsdp_continues_in_3d_and_back(
    fixture: str, sharded: bool, request: pytest.FixtureRequest, tmp_path: Path
):
    directory = request.getfixturevalue(fixture)
    fsdp = FSDPEngine(load_causal_lm(directory, torch.float64), CPU, optimizer=OPTIONS)
    fsdp.step(micro_batches(), HEAD, loss)
    fsdp.save(tmp_path / "fsdp", {"policy_version": 3})
    ours = make_engine(directory, torch.float64, shards_over_data=sharded)
    assert ours.load(tmp_path / "fsdp") == {"policy_version": 3}
    assert ours.step(micro_batches(), HEAD, loss).loss == pytest.approx(
        fsdp.step(micro_batches(), HEAD, loss).loss, rel=1e-12
    )
    ours.save(tmp_path / "3d")
    expected = weights(fsdp)
    fsdp.load(tmp_path / "3d")
    for name, x in weights(fsdp).items():
        torch.testing.assert_close(x, expected[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("sharded", [False, True])
def test_the_hash_of_an_export_does_not_depend_on_the_engine(
    tiny_tied_llama_dir: Path, tmp_path: Path, sharded: bool
):
    fsdp = FSDPEngine(load_causal_lm(tiny_tied_llama_dir), CPU)
    ours = make_engine(tiny_tied_llama_dir, shards_over_data=sharded)
    assert ours.export(tmp_path / "3d") == fsdp.export(tmp_path / "fsdp")


def test_an_export_that_cannot_be_written_fails(tiny_llama_dir: Path, tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        make_engine(tiny_llama_dir).export(tmp_path / "file" / "export")


def test_the_number_of_parameters_is_that_of_the_whole_model(tiny_tied_llama_dir: Path):
    expected = sum(p.numel() for p in load_causal_lm(tiny_tied_llama_dir).parameters())
    assert make_engine(tiny_tied_llama_dir).num_parameters == expected


def test_bfloat16_computes_near_float32(tiny_llama_dir: Path):
    exact, rounded = make_engine(tiny_llama_dir), make_engine(tiny_llama_dir, torch.bfloat16)
    batch = micro_batches()
    expected, actual = (engine.infer(batch, HEAD)[0].log_probs_BR for engine in (exact, rounded))
    difference = (expected - actual)[batch[0].response_mask_BR].abs()
    assert 0 < difference.max() < 0.3
    assert actual.dtype == torch.float32


@pytest.mark.parametrize("sharded", [False, True])
def test_bfloat16_weights_learn_as_rounded_copies_of_float32_ones(tiny_llama_dir: Path, sharded: bool):
    """Steps too small for bfloat16 to hold add up, and gradients of micro-batches are added in float32."""
    options = OptimizerOptions(lr=1e-5, max_grad_norm=float("inf"))
    engine = ThreeDParallelEngine(
        tiny_llama_dir,
        Mesh(),
        CPU,
        dtype=torch.bfloat16,
        optimizer=options,
        shards_over_data=sharded,
    )
    plain = load_causal_lm(tiny_llama_dir, torch.bfloat16)
    whole = load_causal_lm(tiny_llama_dir).state_dict()
    masters = {name: nn.Parameter(whole[name].clone()) for name, _ in plain.named_parameters()}
    adamw = torch.optim.AdamW(masters.values(), lr=1e-5, weight_decay=options.weight_decay)
    batch = micro_batches()
    for _ in range(8):
        sums = {name: torch.zeros_like(x) for name, x in masters.items()}
        for each in batch:
            plain.zero_grad()
            loss(HEAD(plain(each.input_ids_BT, use_cache=False).logits, each), each)[0].backward()
            for name, x in plain.named_parameters():
                assert x.grad is not None
                sums[name] += x.grad.float()
        for name, x in masters.items():
            x.grad = sums[name]
        adamw.step()
        plain.load_state_dict({name: x.detach().bfloat16() for name, x in masters.items()})
        engine.step(batch, HEAD, loss)
    moved = False
    for name, x in engine.full_tensors():
        kept = engine._shard(name, engine._kept[name]).tensor
        torch.testing.assert_close(kept, masters[name].detach(), atol=2e-5, rtol=0)
        assert torch.equal(x, kept.bfloat16())
        moved |= bool((kept != whole[name]).any())
    assert moved


def test_weights_stay_where_they_are(tiny_llama_dir: Path):
    engine = make_engine(tiny_llama_dir)
    places = {name: x.data_ptr() for name, x in engine._kept.items()}
    before = engine.snapshot()
    for _ in range(3):
        engine.step(micro_batches(), HEAD, loss)
    engine.restore(before)
    assert {name: x.data_ptr() for name, x in engine._kept.items()} == places


def test_padding_stays_zero(tiny_llama_dir: Path):
    engine = make_engine(tiny_llama_dir)
    engine.step(micro_batches(), HEAD, loss)
    assert engine._kept["lm_head.weight"].shape == (64, 32)
    assert not engine._kept["lm_head.weight"][61:].any()
    assert not engine._kept["model.embed_tokens.weight"][61:].any()


def test_inference_stops_between_micro_batches(tiny_llama_dir: Path):
    done: list[int] = []
    with pytest.raises(InferenceStopped):
        make_engine(tiny_llama_dir).infer(
            micro_batches(), HEAD, should_stop=lambda: len(done) == 1, progress=done.append
        )
    assert done == [1]


def test_a_mesh_of_another_size_is_refused(tiny_llama_dir: Path):
    with pytest.raises(ValueError, match="mesh 1-2-2 has 4 ranks, and there are 1"):
        ThreeDParallelEngine(tiny_llama_dir, Mesh(1, 2, 2), CPU)


def test_a_model_of_another_family_is_refused(tmp_path: Path):
    Gemma2Config(num_hidden_layers=2).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is a gemma2, engine 3d knows llama, mistral, qwen2, qwen3"):
        make_engine(tmp_path)


def test_an_engine_without_optimizer_does_not_train(tiny_llama_dir: Path):
    with pytest.raises(RuntimeError, match="no optimizer"):
        ThreeDParallelEngine(tiny_llama_dir, Mesh(), CPU).step(micro_batches(), HEAD, loss)


def created(directory: Path, load: Load = load_causal_lm, **keys: str) -> ThreeDParallelEngine:
    table = {
        "role": "actor",
        "address": "127.0.0.1:1",
        "model": directory,
        "engine": "3d",
        "mesh": "1-1-1",
        **keys,
    }
    return ThreeDParallelEngine.create(
        ActorTable.model_validate(table), None, EngineSetup(load, Mesh(), CPU, OPTIONS)
    )


def test_a_model_that_is_neither_a_language_model_nor_a_value_model_is_refused(tiny_llama_dir: Path):
    with pytest.raises(ConfigError, match="engine 3d: has causal language models and value models alone"):
        created(tiny_llama_dir, load_scoring_model)


def test_generation_weights_are_gathered_for_an_actor_that_generates_alone(tiny_llama_dir: Path):
    assert created(tiny_llama_dir).generation_shards is not None
    assert created(tiny_llama_dir, rollout_engine="none").generation_shards is None
