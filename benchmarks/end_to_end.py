"""Tokens per second of whole GRPO and PPO iterations, beside TRL.

The same small Llama, prompts, reward and settings in both. They take turns, so that drift of the machine hits all
alike, and each has the machine to itself: it starts for its turn and ends with it, because ranks that only wait still
wake up often enough to slow others down. Throughput is prompt and response tokens of the batch over the time of an
iteration, as the HybridFlow paper has it (section 8.1). Beside each stage of ours stands the time that its matrix
products alone take at the rate that this machine multiplies them with (`benchmarks.roofline`).

TRL is no dependency of the project. Its trainers come from directories of their own, the one of PPO with version 1.12,
the last that has it:

    pip install --target ~/.cache/rlhf-cluster/trl --no-deps trl accelerate
    pip install --target ~/.cache/rlhf-cluster/trl-ppo --no-deps trl==1.12.0 accelerate
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import click
import tomli_w
from rich.table import Table
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks import end_to_end_task as task
from benchmarks import roofline
from benchmarks.end_to_end_task import Sizes
from benchmarks.generate import SHAPE, build_model
from benchmarks.ports import free_port
from benchmarks.report import circumstances, console, json_option, write_json
from benchmarks.turns import Player

ALGORITHMS = ("grpo", "ppo")
TRL = "TRL"
LEAST_OVER_TRL = 2.0
CACHE = Path("~/.cache/rlhf-cluster").expanduser()
REST = "rest: transfers, dispatch, metrics"


@dataclass(frozen=True)
class Paces:
    """Numbers of iterations and turns.

    Attributes:
        warm_up: Iterations not counted, before each turn.
        iterations: In a turn.
        turns: Of each system.
    """

    warm_up: int
    iterations: int
    turns: int

    def options(self) -> list[str]:
        return [*("--warm-up", str(self.warm_up)), *("--iterations", str(self.iterations))]


@dataclass
class SystemTimes:
    """One system with one algorithm.

    Attributes:
        layout: Its processes and threads.
        seconds: Of each iteration, by turn.
        stages: By turn, mean seconds of what an iteration consists of, where the system tells.
    """

    layout: str
    seconds: list[list[float]] = field(default_factory=list)
    stages: list[Mapping[str, float]] = field(default_factory=list)

    def rates(self, sizes: Sizes) -> list[float]:
        """Tokens per second of each turn."""
        return [sizes.tokens / statistics.mean(turn) for turn in self.seconds]

    def mean_stages(self) -> dict[str, float]:
        """Seconds of an iteration by stage and of the rest; empty for a system that reports no stages."""
        stages = task.mean_of(self.stages) if self.stages else {}
        whole = statistics.mean(second for turn in self.seconds for second in turn)
        return {**stages, REST: whole - sum(stages.values())} if stages else {}


class Contest:
    """The systems that run one algorithm."""

    def __init__(self, algorithm: str, sizes: Sizes, paces: Paces, directory: Path, cores: int) -> None:
        self.algorithm = algorithm
        self.players: dict[str, tuple[Player, SystemTimes]] = {}
        self._sizes, self._paces, self._cores = sizes, paces, cores
        self._directory = directory

    def add_ours(self, rollout_engine: str) -> None:
        """The cluster with one of its rollout engines: every role with a model has a rank on each core."""
        name = f"cluster, {rollout_engine}"
        path = self._directory / f"{self.algorithm}-{rollout_engine}.toml"
        steps = task.num_steps(self._paces.warm_up, self._paces.iterations)
        path.write_text(tomli_w.dumps(self._config(rollout_engine, steps)))
        arguments = ["-m", "benchmarks.end_to_end_ours", "--algorithm", self.algorithm, "--config", str(path)]
        self._add(
            name, [*arguments, *self._paces.options()], 1, f"{self._cores} ranks of each role, 1 thread"
        )

    def add_trl(self, packages: Path, micro_rows: int) -> None:
        """The trainer of the TRL in a directory, which computes at most `rows` rows at a time."""
        sizes = {"rows": self._sizes.rows, "prompt-tokens": self._sizes.prompt_tokens}
        sizes |= {"new-tokens": self._sizes.new_tokens, "micro-rows": micro_rows}
        sizes["threads"] = self._cores
        arguments = [
            *("-m", "benchmarks.end_to_end_trl", "--algorithm", self.algorithm),
            *("--model", str(self._directory / "model"), "--prompts", str(self._directory / "train.jsonl")),
            *("--scratch", str(self._directory / "trl")),
            *(part for name, size in sizes.items() for part in (f"--{name}", str(size))),
            *self._paces.options(),
        ]
        paths = [str(packages), *filter(None, [os.environ.get("PYTHONPATH")])]
        layout = f"1 process, {self._cores} threads"
        self._add(TRL, arguments, self._cores, layout, {"PYTHONPATH": os.pathsep.join(paths)})

    def run(self) -> dict[str, SystemTimes]:
        """All systems, in turns."""
        for _ in range(self._paces.turns):
            for player, measured in self.players.values():
                with player:
                    player.wait_until_ready()
                    answer = player.turn()
                measured.seconds.append(answer["seconds"])
                if answer["details"]:
                    measured.stages.append(answer["details"])
        return {name: measured for name, (_, measured) in self.players.items()}

    def _add(
        self,
        name: str,
        arguments: Sequence[str],
        threads: int,
        layout: str,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        log = self._directory / f"{self.algorithm}-{len(self.players)}.log"
        player = Player(f"{name}, {self.algorithm}", arguments, threads, log, variables)
        self.players[name] = player, SystemTimes(layout)

    def _config(self, rollout_engine: str, steps: int) -> dict[str, Any]:
        """The configuration of a run."""
        samples = task.GROUP if self.algorithm == "grpo" else 1
        common = {
            "clip_low": task.CLIP,
            "clip_high": task.CLIP,
            "dual_clip": 0.0,
            "mini_batch_size": self._sizes.rows,
            "recompute_log_probs": False,
        }
        of_algorithm = {
            "grpo": {"kl_loss_coefficient": 0.0},
            "ppo": {
                "kl_reward_coefficient": task.KL_COEFFICIENT,
                "lam": task.LAMBDA,
                "value_clip": task.VALUE_CLIP,
            },
        }
        return {
            "run": {
                "steps": steps,
                "evaluate_every": 0,
                "directory": str(self._directory / "runs"),
                "name": f"{self.algorithm}-{rollout_engine}",
            },
            "data": {
                "train": str(self._directory / "train.jsonl"),
                "heldout": str(self._directory / "heldout.jsonl"),
                "prompts_per_step": self._sizes.rows // samples,
            },
            "rollout": {"samples_per_prompt": samples, "max_response_tokens": self._sizes.new_tokens},
            "algorithm": common | of_algorithm[self.algorithm],
            "pools": {"cores": [f"core/{core}" for core in range(self._cores)]},
            "services": {
                "actor": self._model_service("actor", rollout_engine=rollout_engine),
                "critic": self._model_service("critic"),
                "reference": self._model_service("reference"),
                "reward": {
                    "role": "reward",
                    "address": f"127.0.0.1:{free_port()}",
                    "function": "benchmarks.end_to_end_task:even_words",
                },
            },
        }

    def _model_service(self, role: str, **more: Any) -> dict[str, Any]:
        optimizer = {"learning_rate": task.LEARNING_RATE, "max_grad_norm": task.MAX_GRAD_NORM}
        return {
            "role": role,
            "address": f"127.0.0.1:{free_port()}",
            "ranks": self._cores,
            "pool": "cores",
            "model": str(self._directory / "model"),
            "engine": "3d",
            "mesh": f"1-1-{self._cores}",
            **({} if role == "reference" else {"optimizer": optimizer}),
            **more,
        }


def build_task(directory: Path, sizes: Sizes) -> int:
    """Writes model, tokenizer and prompts; returns the number of parameters."""
    num_parameters = build_model(directory / "model")
    vocabulary = {task.word(token): token for token in range(task.VOCABULARY)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=task.word(0)))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    # No token ends a response, so that each has all its tokens.
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(directory / "model")
    task.write_prompts(directory / "train.jsonl", 8 * sizes.rows, sizes.prompt_tokens)
    task.write_prompts(directory / "heldout.jsonl", 1, sizes.prompt_tokens)
    return num_parameters


def trl_version(packages: Path) -> str | None:
    """Version of the TRL in a directory; None without TRL."""
    found = metadata.distributions(name="trl", path=[str(packages)])
    return next((distribution.version for distribution in found), None)


def over_trl(measured: Mapping[str, SystemTimes], name: str) -> tuple[float, float, float]:
    """Tokens/s over those of TRL: the median over the turns, the least and the most."""
    turns = zip(measured[name].seconds, measured[TRL].seconds, strict=True)
    ratios = [statistics.mean(trl) / statistics.mean(ours) for ours, trl in turns]
    return statistics.median(ratios), min(ratios), max(ratios)


def stage_work(algorithm: str, sizes: Sizes, ranks: int) -> dict[str, list[roofline.MatmulWork]]:
    """The matrix products of each stage on one rank; all ranks have equally many rows."""
    rows, length = sizes.rows // ranks, sizes.prompt_tokens + sizes.new_tokens
    prompts = rows // task.GROUP if algorithm == "grpo" else rows
    read, written = prompts * sizes.prompt_tokens + rows * sizes.new_tokens, rows * sizes.new_tokens
    together = task.TOKENS_TOGETHER
    generation = roofline.generation_work(SHAPE, prompts, rows, sizes.prompt_tokens, sizes.new_tokens)
    actor = roofline.update_work(SHAPE, read, rows, length, written, together)
    if algorithm == "grpo":
        return {"generate_sequences": generation, "update_actor": actor}
    return {
        "generate_sequences": generation,
        "compute_values": roofline.forward_work(SHAPE, read, rows, length, 0, together),
        "compute_ref_log_prob": roofline.forward_work(SHAPE, read, rows, length, written, together),
        "update_critic": roofline.update_work(SHAPE, read, rows, length, 0, together),
        "update_actor": actor,
    }


def ideal_seconds(algorithms: Iterable[str], sizes: Sizes, cores: int) -> dict[str, dict[str, float]]:
    """Seconds of each stage's matrix products at the measured rates, by algorithm."""
    work = {name: stage_work(name, sizes, cores) for name in algorithms}
    shapes = {each.shape for stages in work.values() for products in stages.values() for each in products}
    rates = roofline.measure(sorted(shapes, key=str), cores)
    return {
        name: {stage: roofline.seconds(products, rates) for stage, products in stages.items()}
        for name, stages in work.items()
    }


def shares(stages: Mapping[str, float], ideal: Mapping[str, float]) -> dict[str, float]:
    """By stage with matrix products, their time alone over the time of the stage."""
    return {stage: ideal[stage] / stages[stage] for stage in ideal if stages.get(stage)}


def show(
    algorithm: str, measured: Mapping[str, SystemTimes], sizes: Sizes, ideal: Mapping[str, float]
) -> None:
    """The tables of one algorithm."""
    table = Table(title=f"{algorithm.upper()}, tokens per second of whole iterations")
    for name in ("system", "processes", "median", "turns", "over TRL (turns)"):
        table.add_column(name, justify="left" if name in ("system", "processes") else "right")
    for name, system in measured.items():
        rates = system.rates(sizes)
        is_compared = TRL in measured and name != TRL
        table.add_row(
            name,
            system.layout,
            f"{statistics.median(rates):,.0f}",
            f"{min(rates):,.0f} to {max(rates):,.0f}",
            "{:.2f} ({:.2f} to {:.2f})".format(*over_trl(measured, name)) if is_compared else "",
        )
    screen = console()
    screen.print(table)
    screen.print(_stages_table({name: system.mean_stages() for name, system in measured.items()}, ideal))
    for name in measured:
        if TRL in measured and name != TRL:
            ratio = over_trl(measured, name)[0]
            verdict = "met" if ratio >= LEAST_OVER_TRL else "missed"
            screen.print(f"{name} over TRL: {ratio:.2f}, aim at least {LEAST_OVER_TRL:g}: {verdict}")


def _stages_table(stages: Mapping[str, Mapping[str, float]], ideal: Mapping[str, float]) -> Table:
    shown = {name: seconds for name, seconds in stages.items() if seconds}
    table = Table(
        title="Where the time of an iteration goes, mean in milliseconds (share of the matmul rate)"
    )
    for name in ("", *shown, "matrix products alone"):
        table.add_column(name, justify="right" if name else "left")
    for stage in dict.fromkeys(_in_order(shown.values())):
        alone = f"{ideal[stage] * 1e3:.0f}" if stage in ideal else ""
        table.add_row(stage, *(_milliseconds(stage, seconds, ideal) for seconds in shown.values()), alone)
    return table


def _milliseconds(stage: str, seconds: Mapping[str, float], ideal: Mapping[str, float]) -> str:
    share = shares(seconds, ideal).get(stage)
    return f"{seconds.get(stage, 0.0) * 1e3:.0f}" + (f" ({share:.0%})" if share else "")


def _in_order(stages: Iterable[Mapping[str, float]]) -> Iterable[str]:
    return (stage for each in stages for stage in each)


def _rollout_engines() -> list[str]:
    if importlib.util.find_spec("vllm"):
        return ["hf", "vllm"]
    click.echo("vLLM is not installed (make setup-vllm): the cluster runs with hf alone", err=True)
    return ["hf"]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--algo", "algorithms", multiple=True, type=click.Choice(ALGORITHMS), help="Only this one.")
@click.option(
    "--rows", default=128, show_default=True, type=click.IntRange(8), help="Sequences of an iteration."
)
@click.option("--prompt-tokens", default=16, show_default=True, type=click.IntRange(1))
@click.option("--new-tokens", default=64, show_default=True, type=click.IntRange(1), help="Of each sequence.")
@click.option(
    "--warm-up",
    default=2,
    show_default=True,
    type=click.IntRange(1),
    help="Iterations not counted, before each turn.",
)
@click.option("--iterations", default=2, show_default=True, type=click.IntRange(1), help="In a turn.")
@click.option("--turns", default=5, show_default=True, type=click.IntRange(1), help="Of each system.")
@click.option(
    "--cores", default=2, show_default=True, type=click.IntRange(1), help="Ranks, or threads of TRL."
)
@click.option(
    "--trl-grpo",
    default=CACHE / "trl",
    show_default=True,
    type=click.Path(path_type=Path),
    help="Directory with the TRL whose GRPO is run.",
)
@click.option(
    "--trl-ppo",
    default=CACHE / "trl-ppo",
    show_default=True,
    type=click.Path(path_type=Path),
    help="Directory with the TRL whose PPO is run.",
)
@click.option(
    "--trl-rows",
    default=128,
    show_default=True,
    type=click.IntRange(1),
    help="Rows that TRL computes at a time.",
)
@json_option
def main(
    algorithms: tuple[str, ...],
    rows: int,
    prompt_tokens: int,
    new_tokens: int,
    warm_up: int,
    iterations: int,
    turns: int,
    cores: int,
    trl_grpo: Path,
    trl_ppo: Path,
    trl_rows: int,
    json_path: Path | None,
) -> None:
    """Time iterations of GRPO and PPO beside TRL."""
    before = circumstances()
    sizes, paces = Sizes(rows, prompt_tokens, new_tokens), Paces(warm_up, iterations, turns)
    packages = {"grpo": trl_grpo, "ppo": trl_ppo}
    versions = {name: trl_version(packages[name]) for name in algorithms or ALGORITHMS}
    engines = _rollout_engines()
    results: dict[str, dict[str, SystemTimes]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        num_parameters = build_task(directory, sizes)
        ideal = ideal_seconds(versions, sizes, cores)
        for name, version in versions.items():
            contest = Contest(name, sizes, paces, directory, cores)
            for engine in engines:
                contest.add_ours(engine)
            if version:
                contest.add_trl(packages[name], min(trl_rows, rows))
            else:
                click.echo(
                    f"no TRL in {packages[name]}: {name} runs without its anchor; benchmarks/README.md says how to "
                    "install it",
                    err=True,
                )
            results[name] = contest.run()
            show(name, results[name], sizes, ideal[name])
    figures = {
        "before": before,
        "after": circumstances(),
        "parameters": num_parameters,
        "sizes": vars(sizes),
        "trl": versions,
        "matmul_s": ideal,
        "algorithms": {name: _figures(measured, sizes, ideal[name]) for name, measured in results.items()},
    }
    write_json(json_path, figures)


def _figures(measured: Mapping[str, SystemTimes], sizes: Sizes, ideal: Mapping[str, float]) -> dict[str, Any]:
    """Figures of one algorithm by system, for the JSON file."""
    return {
        name: {
            "layout": system.layout,
            "seconds": system.seconds,
            "tokens_per_s": system.rates(sizes),
            "mean_s": system.mean_stages(),
            "share_of_matmul_rate": shares(system.mean_stages(), ideal),
            **({"over_trl": over_trl(measured, name)} if TRL in measured and name != TRL else {}),
        }
        for name, system in measured.items()
    }


if __name__ == "__main__":
    main()
