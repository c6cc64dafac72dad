"""The ZeRO engine on one rank: what does not need a second one to be checked, and that DeepSpeed behaves."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from model_types import write_directory
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast
from unit.test_engine_three_d import CPU, HEAD, OPTIONS, loss, micro_batches

from rlhf.errors import ConfigError
from services.compute.heads import PolicyOutput, value_head
from services.compute.microbatch import MicroBatch
from services.engines.base import InferenceStopped, TrainEngine
from services.engines.fsdp.engine import FSDPEngine
from services.engines.implementation import implementation_of
from services.models.families import load_causal_lm, load_value_model
from settings.engines import training_engine
from settings.memory.predict import idle_parts
from settings.memory.shape import read_model_shape
from settings.memory.use import ModelUse

pytest.importorskip("services.engines.zero.engine")
from services.engines.zero.engine import ZeROEngine

STAGES = (1, 2, 3)
ROOT = Path(__file__).parents[2]

every_stage = pytest.mark.parametrize("stage", STAGES)


pytestmark = pytest.mark.usefixtures("process_group")


def make_engine(directory: Path, stage: int, **options) -> ZeROEngine:
    return ZeROEngine(directory, stage, CPU, **{"optimizer": OPTIONS, **options})


def weights(engine: ZeROEngine) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in engine.full_tensors()}


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(x, b[name]) for name, x in a.items())


@every_stage
@pytest.mark.parametrize("offloads", [False, True])
def test_a_step_that_fails_leaves_nothing_behind(tiny_llama_dir: Path, stage: int, offloads: bool):
    batch = micro_batches()

    def fail(output: PolicyOutput, micro_batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        if micro_batch.rows[0] == batch[-1].rows[0]:
            raise KeyError("advantages")
        return loss(output, micro_batch)

    engine, other = (make_engine(tiny_llama_dir, stage, offloads=offloads) for _ in range(2))
    with pytest.raises(KeyError):
        engine.step(batch, HEAD, fail)
    assert engine.step(batch, HEAD, loss) == other.step(batch, HEAD, loss)
    assert same_bits(engine.snapshot().tensors, other.snapshot().tensors)


@every_stage
@pytest.mark.parametrize("model_type", ["granite", "gemma2"])
def test_logits_are_scaled_and_capped_as_the_model_does(model_type: str, stage: int, tmp_path: Path):
    write_directory(model_type, tmp_path)
    engine, batch = make_engine(tmp_path, stage), micro_batches()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    outputs = engine.infer(batch, HEAD)
    for micro_batch, output in zip(batch, outputs, strict=True):
        with torch.no_grad():
            logits = plain(micro_batch.input_ids_BT, use_cache=False).logits / HEAD.temperature
        log_p = micro_batch.read(logits.log_softmax(-1), micro_batch.predicting_BR)
        ids = micro_batch.grid(micro_batch.response_ids_N).long()
        expected = log_p.gather(-1, ids[..., None])[..., 0].where(micro_batch.response_mask_BR, 0)
        torch.testing.assert_close(output.log_probs_BR, expected, rtol=0, atol=1e-5)


@every_stage
def test_an_export_is_a_hugging_face_directory_with_the_same_logits(
    tiny_tied_llama_dir: Path, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path, stage: int
):
    engine = make_engine(tiny_tied_llama_dir, stage)
    engine.step(micro_batches(), HEAD, loss)
    digest = engine.export(tmp_path / "export", tiny_tokenizer)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert same_bits(loaded.state_dict(), weights(engine))
    ids = torch.tensor([[1, 5, 9]])
    torch.testing.assert_close(loaded.eval()(ids).logits, engine._model(ids).logits, rtol=0, atol=1e-5)
    assert FSDPEngine(loaded, CPU).export(tmp_path / "fsdp") == digest
    assert (tmp_path / "export" / "tokenizer.json").exists()
    assert loaded.config.architectures == ["LlamaForCausalLM"]


@every_stage
def test_what_a_model_says_about_generating_stays_with_it(tiny_llama_dir: Path, tmp_path: Path, stage: int):
    directory = tmp_path / "model"
    load_causal_lm(tiny_llama_dir).save_pretrained(directory)
    GenerationConfig(eos_token_id=[7, 9]).save_pretrained(directory)
    make_engine(directory, stage, optimizer=None).export(tmp_path / "export")
    assert GenerationConfig.from_pretrained(tmp_path / "export").eos_token_id == [7, 9]


@every_stage
def test_a_value_model_learns_and_is_exported_with_its_head(tiny_llama_dir: Path, tmp_path: Path, stage: int):
    engine = make_engine(tiny_llama_dir, stage, load=load_value_model)
    engine.step(micro_batches(), value_head, lambda values_BR, _: (values_BR.sum() / 100, {}))
    engine.export(tmp_path / "export")
    loaded = load_value_model(tmp_path / "export")
    assert same_bits(loaded.state_dict(), weights(engine))
    assert loaded.value_head.weight.abs().sum() > 0


@every_stage
def test_bfloat16_computes_near_float32_and_keeps_its_weights_in_float32(tiny_llama_dir: Path, stage: int):
    exact = make_engine(tiny_llama_dir, stage)
    rounded = make_engine(tiny_llama_dir, stage, compute_dtype=torch.bfloat16)
    batch = micro_batches()
    expected, actual = (engine.infer(batch, HEAD)[0].log_probs_BR for engine in (exact, rounded))
    difference = (expected - actual)[batch[0].response_mask_BR].abs()
    assert 0 < difference.max() < 0.3
    assert actual.dtype == torch.float32
    rounded.step(batch, HEAD, loss)
    assert {x.dtype for x in rounded.snapshot().tensors.values()} == {torch.float32}


@every_stage
def test_inference_stops_between_micro_batches(tiny_llama_dir: Path, stage: int):
    engine, done = make_engine(tiny_llama_dir, stage), []
    with pytest.raises(InferenceStopped):
        engine.infer(micro_batches(), HEAD, should_stop=lambda: len(done) == 1, progress=done.append)
    assert done == [1]
    assert len(engine.infer(micro_batches(), HEAD)) == len(micro_batches())
    assert engine.infer([], HEAD) == []


@every_stage
def test_an_engine_without_optimizer_does_not_train_and_is_saved(
    tiny_llama_dir: Path, tmp_path: Path, stage: int
):
    engine = make_engine(tiny_llama_dir, stage, optimizer=None)
    with pytest.raises(RuntimeError, match="no optimizer"):
        engine.step(micro_batches(), HEAD, loss)
    engine.save(tmp_path / "checkpoint")
    engine.load(tmp_path / "checkpoint")
    assert same_bits(weights(engine), load_causal_lm(tiny_llama_dir).state_dict())


def test_stage_3_refuses_a_directory_that_lacks_weights(tiny_llama_dir: Path, tmp_path: Path):
    (tmp_path / "config.json").write_text((tiny_llama_dir / "config.json").read_text())
    with pytest.raises(ValueError, match="has no safetensors files"):
        make_engine(tmp_path, 3)


def test_the_number_of_parameters_is_that_of_the_whole_model(tiny_tied_llama_dir: Path):
    expected = sum(p.numel() for p in load_causal_lm(tiny_tied_llama_dir).parameters())
    assert {make_engine(tiny_tied_llama_dir, stage).num_parameters for stage in STAGES} == {expected}


def test_offloading_on_cpu_moves_nothing_and_says_so(tiny_llama_dir: Path):
    engine = make_engine(tiny_llama_dir, 3)
    assert (engine.offload(), engine.onload()) == (0, 0)


@pytest.mark.parametrize("stage", [1, 2])
def test_deepspeeds_buffer_for_gradients_leaves_the_device_with_the_weights(tiny_llama_dir: Path, stage: int):
    engine, other = (make_engine(tiny_llama_dir, stage, offloads=True) for _ in range(2))
    buffer = engine._learning.zero.temp_grad_buffer_for_gpu_offload
    nbytes = buffer.untyped_storage().nbytes()
    use = ModelUse(
        read_model_shape(tiny_llama_dir), "zero", (1, 1, 1), zero_stage=stage, offload_optimizer=True
    )
    assert idle_parts(use, 0)["gradient buffer"] == nbytes
    moved = engine._leave_device()
    assert buffer.untyped_storage().nbytes() == 0
    assert engine.onload() == moved
    assert buffer.untyped_storage().nbytes() == nbytes
    assert engine.step(micro_batches(), HEAD, loss) == other.step(micro_batches(), HEAD, loss)


def test_an_install_without_deepspeed_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    for module in [name for name in sys.modules if name.startswith("services.engines.zero.")]:
        monkeypatch.delitem(sys.modules, module)
    with pytest.raises(
        ConfigError, match=r"engine zero: .*deepspeed.*pip install 'rlhf-cluster\[deepspeed\]'"
    ):
        implementation_of("engine", "zero", training_engine("zero"), TrainEngine)


ALONE = """
import subprocess, socket, sys
import services.roles.model_worker
assert "deepspeed" not in sys.modules, "imported though nobody chose it"
import os, torch, torch.distributed as dist
from pathlib import Path

def refuse(*args, **kwargs):
    raise AssertionError(f"DeepSpeed starts or calls something: {args[1:]}")

subprocess.Popen.__init__ = socket.socket.connect = os.system = refuse
os.environ.pop("DS_ACCELERATOR", None)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=0, world_size=1)
group = dist.distributed_c10d._get_default_group()
from unit.test_engine_zero import STAGES, make_engine, micro_batches, HEAD, loss
for stage in STAGES:
    make_engine(Path(sys.argv[1]), stage).step(micro_batches(), HEAD, loss)
assert dist.distributed_c10d._get_default_group() is group
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_deepspeed_comes_when_chosen_and_keeps_to_itself(tiny_llama_dir: Path, tmp_path: Path):
    """No process, no connection, no other process group, and not a word."""
    ran = subprocess.run(
        [sys.executable, "-c", ALONE, tiny_llama_dir, tmp_path / "store"],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join([str(ROOT / "tests"), *sys.path]),
             "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert (ran.stdout, ran.stderr) == ("", "")
