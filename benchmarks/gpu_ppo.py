"""PPO with all roles on one GPU: tokens per second, memory of each stage, and model FLOPs utilisation of the updates.

Actor, critic, reference and reward are services of their own, colocated by a pool, so that they take turns. Models are
random; weights are computed in bfloat16. `rlhf-controller` runs the iterations, and the figures are read from what its
run leaves behind. On a machine without a GPU it runs on the CPU, with `--size tiny`, to show that it does.
"""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import tomli_w
import torch
from rich.table import Table
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks import end_to_end_task as task
from benchmarks.end_to_end_task import Sizes
from benchmarks.model_flops import PEAK_TFLOPS, known_peak_tflops, training_flops
from benchmarks.ports import free_port
from benchmarks.report import circumstances, console, json_option, write_json
from controller.tracking.timeline import read_events
from settings.memory.shape import ModelShape

SHAPES = {
    "1b": ModelShape(
        "llama", 32000, hidden=2048, intermediate=8192, layers=16, heads=16, kv_heads=8, head_dim=128
    ),
    "tiny": ModelShape(
        "llama", 1024, hidden=64, intermediate=128, layers=2, heads=4, kv_heads=2, head_dim=16
    ),
}
UPDATES = {"update_actor": False, "update_critic": True}
"""By method that updates a model, whether the model is a critic."""
LEAST_UTILISATION = 0.4
LEARNING_RATE = 1e-6
STARTUP_S, CALL_S = 900.0, 1800.0
STOPPING_S = 60.0
"""Most seconds that an interrupted run takes to stop its services."""
GIB = 2**30


@dataclass(frozen=True)
class StageTime:
    """One method of one service, over the iterations that count.

    Attributes:
        seconds: Computing, in each iteration.
        peak_bytes: Most memory allocated on the device at a time in any; 0 on CPU.
    """

    service: str
    method: str
    seconds: list[float]
    peak_bytes: int

    @property
    def mean_s(self) -> float:
        return statistics.mean(self.seconds)


@dataclass(frozen=True)
class Setting:
    """Settings of the benchmark.

    Attributes:
        mini_batches: Optimizer steps of an iteration.
        micro_batch_tokens: Most tokens in one forward pass.
        kernels: Setting of the services with a model.
        warm_up, iterations: Those that do not count, and those that do.
    """

    shape: ModelShape
    sizes: Sizes
    engine: str
    mini_batches: int
    micro_batch_tokens: int
    kernels: str
    warm_up: int
    iterations: int


def build_model(directory: Path, model: ModelShape, positions: int) -> int:
    """Writes a random Llama and its tokenizer; returns the number of parameters."""
    torch.manual_seed(0)
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=model.vocabulary,
            hidden_size=model.hidden,
            intermediate_size=model.intermediate,
            num_hidden_layers=model.layers,
            num_attention_heads=model.heads,
            num_key_value_heads=model.kv_heads,
            head_dim=model.head_dim,
            max_position_embeddings=positions,
            eos_token_id=None,
        )
    )
    llama.save_pretrained(directory)
    vocabulary = {task.word(token): token for token in range(model.vocabulary)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=task.word(0)))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    # No token ends a response, so that each has all its tokens.
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(directory)
    return llama.num_parameters()


def configuration(directory: Path, setting: Setting, *, on_gpu: bool) -> dict[str, Any]:
    """Configuration of a run whose services share one device."""
    sizes = setting.sizes

    def service(role: str, **more: Any) -> dict[str, Any]:
        address = f"127.0.0.1:{free_port()}"
        return {"role": role, "address": address, "pool": "device", "startup_timeout_s": STARTUP_S, **more}

    def model_service(role: str, **more: Any) -> dict[str, Any]:
        return service(
            role,
            model=str(directory / "model"),
            dtype="bfloat16",
            engine=setting.engine,
            micro_batch_tokens=setting.micro_batch_tokens,
            kernels=setting.kernels,
            **({"mesh": "1-1-1"} if setting.engine == "3d" else {}),
            **({"transports": ["cuda_ipc", "memfd"]} if on_gpu else {}),
            **({} if role == "reference" else {"optimizer": {"learning_rate": LEARNING_RATE}}),
            **more,
        )

    return {
        "run": {
            # The step after the last that counts is evaluated, too.
            "steps": setting.warm_up + setting.iterations + 1,
            "evaluate_every": 0,
            "directory": str(directory / "runs"),
            "name": "gpu_ppo",
            "call_timeout_s": CALL_S,
        },
        "data": {
            "train": str(directory / "train.jsonl"),
            "heldout": str(directory / "heldout.jsonl"),
            "prompts_per_step": sizes.rows,
        },
        "rollout": {"max_response_tokens": sizes.new_tokens},
        "algorithm": {"mini_batch_size": sizes.rows // setting.mini_batches},
        "pools": {"device": ["gpu:0" if on_gpu else "cpu:0"]},
        "services": {
            "actor": model_service("actor", rollout_tokens=sizes.tokens),  # all rows together
            "critic": model_service("critic"),
            "reference": model_service("reference"),
            "reward": service("reward", function="benchmarks.end_to_end_task:even_words"),
        },
    }


def run(config: Path, runs: Path) -> Path:
    """Runs PPO with the services of a configuration, which are started and stopped; returns the run's directory.
    SIGINT and SIGTERM end the run, not this process."""
    command = [sys.executable, "-m", "controller.cli", "--algo", "ppo", "--config", str(config), "--launch"]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with subprocess.Popen(command) as controller:
        try:
            code = controller.wait()
        except KeyboardInterrupt:
            click.echo("interrupted: the figures are those of the iterations that have ended", err=True)
            code = 0
            controller.send_signal(signal.SIGINT)
            try:
                controller.wait(STOPPING_S)
            except subprocess.TimeoutExpired:
                controller.kill()
    if code:
        for log in runs.glob("*/logs/*.log"):
            click.echo(
                f"--- {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-20:]), err=True
            )
        raise click.ClickException(f"rlhf-controller ended with exit code {code}")
    (directory,) = runs.iterdir()
    return directory


def read_stages(events: Iterable[Mapping[str, Any]], counted: Collection[int]) -> list[StageTime]:
    """Stages of the steps that count, read from the events of a timeline, in order of the first call."""
    events = list(events)
    names = {
        (event["name"], event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["ph"] == "M" and event["name"].endswith("_name")
    }
    seconds: dict[tuple[str, str], dict[int, float]] = {}
    peaks: dict[tuple[str, str], int] = {}
    for event in sorted((each for each in events if each["ph"] == "X"), key=lambda each: each["ts"]):
        service, step = names["process_name", event["pid"], 0], event["args"].get("step")
        if service == "controller" or event["name"] in ("queue", "fetch", "store") or step not in counted:
            continue
        stage = service, event["name"]
        of_step = seconds.setdefault(stage, {})
        of_step[step] = of_step.get(step, 0.0) + event["dur"] / 1e6
        peaks[stage] = max(peaks.get(stage, 0), event["args"].get("peak_device", 0))
    return [StageTime(*stage, list(of_step.values()), peaks[stage]) for stage, of_step in seconds.items()]


def read_metrics(path: Path, counted: range) -> Iterator[dict[str, float]]:
    """The metrics of the steps that count."""
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if row["step"] in counted and "time/step_s" in row:
            yield row


def utilisation(stage: StageTime, setting: Setting, peak: float) -> float | None:
    """Model FLOPs utilisation of an update: what the model needs over what the device could do while it was computed,
    the optimizer and the copy that an update can be undone with included. None of what is no update."""
    if stage.method not in UPDATES:
        return None
    sizes = setting.sizes
    flops = training_flops(
        setting.shape,
        sizes.rows,
        sizes.prompt_tokens,
        sizes.new_tokens,
        is_critic=UPDATES[stage.method],
    )
    return flops / stage.mean_s / (peak * 1e12)


def show(
    stages: Sequence[StageTime], setting: Setting, metrics: Sequence[Mapping[str, float]], peak: float | None
) -> None:
    """Prints the table, and whether the aim is met."""
    table = Table(title="PPO with all roles on one device, a mean iteration")
    for name in ("stage", "seconds", "tokens/s", "peak memory, GiB", "FLOPs utilisation"):
        table.add_column(name, justify="left" if name == "stage" else "right")
    for stage in stages:
        share = utilisation(stage, setting, peak) if peak else None
        table.add_row(
            f"{stage.service}.{stage.method}",
            f"{stage.mean_s:.3f}",
            f"{setting.sizes.tokens / stage.mean_s:,.0f}",
            f"{stage.peak_bytes / GIB:.2f}" if stage.peak_bytes else "",
            f"{share:.1%}" if share is not None else "",
        )
    screen = console()
    screen.print(table)
    whole_s = statistics.mean(row["time/step_s"] for row in metrics)
    screen.print(f"whole iterations: {setting.sizes.tokens / whole_s:,.0f} tokens/s, {whole_s:.2f} s each")
    carried = bytes_by_transport(metrics).items()
    screen.print("bytes in all: " + ", ".join(f"{name} {nbytes:,}" for name, nbytes in carried))
    if peak is None:
        screen.print(f"no peak is known of this device (--peak-tflops): known are {', '.join(PEAK_TFLOPS)}")
        return
    for stage in stages:
        share = utilisation(stage, setting, peak)
        if share is not None:
            verdict = "met" if share >= LEAST_UTILISATION else "missed"
            screen.print(
                f"{stage.method}: {share:.1%} of {peak:g} TFLOP/s, aim at least {LEAST_UTILISATION:.0%}: {verdict}"
            )


def bytes_by_transport(metrics: Iterable[Mapping[str, float]]) -> dict[str, int]:
    """Total bytes that ranks fetched, by transport."""
    found: dict[str, int] = {}
    for row in metrics:
        for name in row:
            if name.startswith("transfer/") and name.endswith("/transfers"):
                transport = name.split("/")[1]
                nbytes = int(row[f"transfer/{transport}/bytes"])
                found[transport] = found.get(transport, 0) + nbytes
    return found


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--size", default="1b", show_default=True, type=click.Choice(list(SHAPES)))
@click.option("--engine", default="fsdp", show_default=True, type=click.Choice(["fsdp", "3d", "zero"]))
@click.option("--rows", default=512, show_default=True, type=click.IntRange(1), help="Of an iteration.")
@click.option("--prompt-tokens", default=256, show_default=True, type=click.IntRange(1))
@click.option("--new-tokens", default=256, show_default=True, type=click.IntRange(1), help="Of each row.")
@click.option(
    "--mini-batches",
    default=4,
    show_default=True,
    type=click.IntRange(1),
    help="Optimizer steps of an iteration.",
)
@click.option(
    "--micro-batch-tokens",
    default=16384,
    show_default=True,
    type=click.IntRange(1),
    help="Most tokens in one forward pass.",
)
@click.option(
    "--kernels",
    default="auto",
    show_default=True,
    type=click.Choice(["auto", "eager", "compiled"]),
    help="Of norms, gated activations and rotary embeddings.",
)
@click.option(
    "--warm-up", default=1, show_default=True, type=click.IntRange(1), help="Iterations not counted."
)
@click.option("--iterations", default=3, show_default=True, type=click.IntRange(1), help="Counted ones.")
@click.option(
    "--peak-tflops",
    type=click.FloatRange(0, min_open=True),
    help="Peak bfloat16 rate of the device, if it is not in the table.",
)
@json_option
def main(
    size: str,
    engine: str,
    rows: int,
    prompt_tokens: int,
    new_tokens: int,
    mini_batches: int,
    micro_batch_tokens: int,
    kernels: str,
    warm_up: int,
    iterations: int,
    peak_tflops: float | None,
    json_path: Path | None,
) -> None:
    """Run PPO with all roles on one GPU, and report time and memory by stage. Interrupted, it reports the iterations
    that have ended: `timeout 300 python -m benchmarks.gpu_ppo` takes at most about five minutes."""
    if rows % mini_batches:
        raise click.UsageError(f"{rows} rows are no {mini_batches} mini-batches of one size")
    before, on_gpu = circumstances(), torch.cuda.is_available()
    setting = Setting(
        SHAPES[size],
        Sizes(rows, prompt_tokens, new_tokens),
        engine,
        mini_batches,
        micro_batch_tokens,
        kernels,
        warm_up,
        iterations,
    )
    counted = range(warm_up + 1, warm_up + iterations + 1)
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        num_parameters = build_model(directory / "model", setting.shape, prompt_tokens + new_tokens)
        task.write_prompts(directory / "train.jsonl", (warm_up + iterations + 1) * rows, prompt_tokens)
        task.write_prompts(directory / "heldout.jsonl", 1, prompt_tokens)
        config = directory / "config.toml"
        config.write_text(tomli_w.dumps(configuration(directory, setting, on_gpu=on_gpu)))
        outcome = run(config, directory / "runs")
        metrics = list(read_metrics(outcome / "metrics.jsonl", counted))
        if not metrics:
            raise click.ClickException("no iteration that counts has ended")
        stages = read_stages(read_events(outcome / "timeline.json"), [int(row["step"]) for row in metrics])
        services = json.loads((outcome / "run.json").read_text())["services"]
    device = torch.cuda.get_device_name() if on_gpu else "cpu"
    peak = peak_tflops or known_peak_tflops(device)
    show(stages, setting, metrics, peak)
    console().print(f"kernels of norms, activations and rotary embeddings: {services['actor']['kernels']}")
    figures = {
        "before": before,
        "after": circumstances(),
        "device": device,
        "peak_tflops": peak,
        "parameters": num_parameters,
        "kernels": services["actor"]["kernels"],
        "setting": asdict(setting),
        "step_s": [row["time/step_s"] for row in metrics],
        "tokens_per_s": [setting.sizes.tokens / row["time/step_s"] for row in metrics],
        "bytes_by_transport": bytes_by_transport(metrics),
        "stages": [
            {
                **asdict(stage),
                "tokens_per_s": setting.sizes.tokens / stage.mean_s,
                "flops_utilisation": utilisation(stage, setting, peak) if peak else None,
            }
            for stage in stages
        ],
    }
    write_json(json_path, figures)


if __name__ == "__main__":
    main()
