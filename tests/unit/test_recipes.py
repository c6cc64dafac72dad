"""The configs of docs/recipes.md are accepted, and predicted to fit on the GPUs that they name."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from transformers import Qwen2Config

from deploy.cli import main as deploy
from deploy.quickstart.build import make_tokenizer
from integration.harness import free_ports

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"
QWEN_7B = Qwen2Config(
    vocab_size=152064,
    hidden_size=3584,
    intermediate_size=18944,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    max_position_embeddings=32768,
    architectures=["Qwen2ForCausalLM"],
)
TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
ADDRESSES = ("127.0.0.1:7101", "127.0.0.1:7102", "127.0.0.1:7103")
HUB_MODEL, HUB_DATA = '"Qwen/Qwen2.5-7B-Instruct"', 'train = "openai/gsm8k"'


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The first config of the page, with a model of its shape and rows of its fields in place of those on the hub."""
    monkeypatch.chdir(tmp_path)
    model, rows = tmp_path / "model", tmp_path / "rows.jsonl"
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model)
    QWEN_7B.save_pretrained(model)
    (model / "model.safetensors").touch()
    row = '{{"question": "{} + 1?", "answer": "#### {}"}}\n'
    rows.write_text("".join(row.format(n, n + 1) for n in range(200)))
    found = re.search(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    text = found[1]
    assert text.count(HUB_MODEL) == 2
    assert text.count(HUB_DATA) == 1
    for address, port in zip(ADDRESSES, free_ports(len(ADDRESSES)), strict=True):
        assert text.count(address) == 1
        text = text.replace(address, f"127.0.0.1:{port}")
    text = text.replace(HUB_MODEL, f'"{model}"').replace(HUB_DATA, f'train = "{rows}"\nheldout_rows = 72')
    path = tmp_path / "gsm8k.toml"
    path.write_text(text.replace('subset = "main"\n', ""))
    return path


def run(command: object, *arguments: str | Path) -> Result:
    return CliRunner().invoke(command, [str(each) for each in arguments])  # type: ignore[arg-type]


def test_the_dry_run_accepts_it_and_counts_its_steps(config: Path) -> None:
    command = [sys.executable, "-c", "from controller.cli import main; main()"]
    ran = subprocess.run(
        [*command, "--algo", "grpo", "--config", config, "--dry-run"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr
    assert "services.actor: actor, 8 ranks" in ran.stderr
    assert "128 train and 72 held-out rows" in ran.stderr
    assert "run.epochs 2: 2 steps of 128 prompts" in ran.stderr


def test_the_dry_run_accepts_its_model_as_a_teacher(config: Path) -> None:
    student = config.parent / "student"
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(student)
    Qwen2Config(vocab_size=151936).save_pretrained(student)
    settings = (f"services.actor.model='{student}'", "algorithm.kl_loss_coefficient=0")
    command = [sys.executable, "-c", "from controller.cli import main; main()"]
    given = [part for setting in settings for part in ("--set", setting)]
    ran = subprocess.run(
        [*command, "--algo", "distill", "--config", config, *given, "--dry-run"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr
    assert "services.reference: reference, 8 ranks" in ran.stderr


def predicted(config: Path, *settings: str) -> dict[str, int]:
    """Returns the GB of each GPU that are predicted for the actor, by stage; asserts that all fits into 80 GB."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("rlhf-deploy check refuses the config, since vLLM is not installed")
    changes = [text for setting in settings for text in ("--set", setting)]
    ran = run(deploy, "check", config, "--device-memory-gb", "80", *changes)
    assert ran.exit_code == 0, ran.output
    return {
        stage: round(float(found[1]))
        for stage in ("generation", "update")
        if (found := re.search(rf"^ +{stage} +([\d.]+)", ran.output, re.MULTILINE))
    }


def test_it_fits_with_what_the_page_says(config: Path) -> None:
    said = re.search(r"predicts (\d+) GB of each GPU in generation and (\d+) GB in updates", PAGE.read_text())
    assert said is not None
    assert predicted(config) == {"generation": int(said[1]), "update": int(said[2])}


def test_long_rows_fit_with_what_the_page_says(config: Path) -> None:
    page = " ".join(PAGE.read_text().split())
    said = re.search(r"(\d+) GB are predicted in updates of the actor, and (\d+) GB where one GPU", page)
    assert said is not None
    found = []
    for keys in (("sequence_parallel=4", "micro_batch_tokens=8192"), ("micro_batch_tokens=32768",)):
        settings = [f"services.{service}.{key}" for service in ("actor", "reference") for key in keys]
        found.append(predicted(config, "rollout.max_response_tokens=32256", *settings)["update"])
    assert found == [int(said[1]), int(said[2])]


def test_a_smaller_gpu_is_refused_with_what_is_missing(config: Path) -> None:
    ran = run(deploy, "check", config, "--device-memory-gb", "40")
    assert ran.exit_code == 1
    assert "GB too much" in ran.output


def test_the_least_config_and_its_reward_are_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = PAGE.read_text().partition("## The least that a config needs")[2]
    config, reward = (re.search(rf"```{kind}\n(.*?)```", page, re.DOTALL) for kind in ("toml", "python"))
    assert config is not None
    assert reward is not None
    monkeypatch.chdir(tmp_path)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained("path/to/model")
    QWEN_7B.save_pretrained("path/to/model")
    row = '{{"prompt": "{} + 1?", "ground_truth": "{}"}}\n'
    Path("rows.jsonl").write_text("".join(row.format(n, n + 1) for n in range(200)))
    Path("my.toml").write_text(config[1])
    command = [sys.executable, "-c", "from controller.cli import main; main()"]
    ran = subprocess.run(
        [*command, "--algo", "grpo", "--config", "my.toml", "--dry-run"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr
    assert "100 train and 100 held-out rows" in ran.stderr
    exec(reward[1], names := {})
    assert names["last_number"]("", "1 + 1 = 2", "2", {}) == {"score": 1.0, "has_number": True}
    assert names["last_number"]("", "two", "2", {}) == {"score": 0.0, "has_number": False}
