"""HybridFlow's testbed simulated: placements, algorithms, scaling, generation meshes and transitions beside reported
figures. `benchmarks.mapping` measures the time of the search.

`python -m benchmarks.paper --json FILE` prints Markdown and writes the figures. Nothing is measured but the CPU time of
the searches. The reported figures (section 8 of HybridFlow) are of other systems; ours are predictions of `rlhf-map`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.paper_setup import LLAMA_SHAPES, paper_workload, ppo_problem
from controller.algorithms import find_algorithm
from controller.config.config import load
from controller.mapping.devices import device_group
from controller.mapping.layouts import Option, layouts
from controller.mapping.mapper import find_plan, named_plans, predicted_bytes
from controller.mapping.output import pool_name
from controller.mapping.problem import Problem
from controller.mapping.record import record_dataflow
from controller.mapping.search import MappedPlan
from controller.mapping.simulate import Site, transition_s
from settings.memory.shape import ModelShape

SERVICES: tuple[str, ...] = ("actor", "critic", "reference", "reward")
COUNTS = {
    "7B": (8, 16, 32, 64, 96, 128),
    "13B": (16, 32, 64, 96, 128),
    "34B": (32, 64, 96, 128),
    "70B": (64, 96, 128),
}
"""GPUs by model, as in HybridFlow, figure 9."""
PLACEMENTS = ("colocate", "split", "standalone")
DEVICE = "A100-80GB"
BASELINES = {
    "colocate": ("DeepSpeed-Chat", "3.67, at most 7.84"),
    "standalone": ("OpenRLHF", "3.25, at most 5.93"),
    "split": ("NeMo-Aligner", "12.52, at most 20.57"),
}
"""System that has each placement, and how many times its throughput HybridFlow reports to have for PPO on average. The
systems also differ in engines, in meshes and in their transitions; ours differ in the placement alone."""
ALGORITHMS = {"ppo": "1.68", "remax": "1.53", "safe_rlhf": "1.71"}
"""Algorithms, and the ratio that HybridFlow reports to OpenRLHF with 7B on 128 GPUs."""
REPORTED = {
    "generation, 7B": "60.3 % less with a smaller tensor size than training's 8",
    "generation, 13B": "36.4 % less",
    "transition": "55.2 % (11.7 s) less on average, at most 89.1 % (78.2 s, 70B)",
    "strong scaling": "66.8 %",
    "PPO at 8 GPUs": "at least 2.09 times a baseline",
    "mapping": "at most half an hour, linear in the number of devices",
}
QUICKSTARTS = Path(__file__).parents[1] / "deploy/quickstart"


def paper_problem(size: str, count: int, services: Sequence[str] | None = None) -> Problem:
    """Returns PPO with models of a size, four by default, on `count` A100-80GB, 8 to a machine."""
    shapes: dict[str, ModelShape] = dict.fromkeys(services or SERVICES, LLAMA_SHAPES[size])
    return ppo_problem(shapes, device_group(f"{DEVICE}:{count}"), paper_workload())


def algorithm_problem(name: str, size: str, count: int) -> Problem:
    """Returns an algorithm of this project, as its text is, with models of a size on the rows of `paper_workload`."""
    algorithm, work = find_algorithm(name), paper_workload()
    settings = (f"data.prompts_per_step={work.rows}", "rollout.samples_per_prompt=1")
    config = algorithm.configure(load(QUICKSTARTS / f"{algorithm.quickstart}.toml", settings))
    flow = record_dataflow(algorithm, config)
    like = {model.name: model for model in paper_problem(size, count).models}
    models = []
    for service, table in config.services.items():
        calls = tuple(call for call in flow if call.service == service)
        if calls:
            models.append(replace(like[table.role], name=service, calls=calls))
    return Problem(models, work, (device_group(f"{DEVICE}:{count}"),))


def algorithms(size: str = "7B", count: int = 128) -> dict[str, dict[str, float]]:
    """Returns tokens per second of the best plan, and with each model on devices of its own, by algorithm."""
    found = {}
    for name in ALGORITHMS:
        problem = algorithm_problem(name, size, count)
        alone = find_plan(problem, [(number,) for number in range(len(problem.models))])
        found[name] = {
            "models": len(problem.models),
            "found": throughput(problem, find_plan(problem)),
            "standalone": throughput(problem, alone),
        }
    return found


def strong_scaling(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Returns, by model, the throughput on the most GPUs over that on the fewest, as a share of the ratio of GPUs."""
    found = {}
    for size in dict.fromkeys(row["model"] for row in rows):
        fitting = [row for row in rows if row["model"] == size and row["tokens_per_s"]]
        first, last = fitting[0], fitting[-1]
        if first is not last:
            gained = last["tokens_per_s"] / first["tokens_per_s"]
            found[size] = gained / (last["gpus"] / first["gpus"])
    return found


def throughput(problem: Problem, plan: MappedPlan | None) -> float:
    """Returns tokens per second of a plan; 0 where none fits."""
    return problem.workload.tokens / plan.cost if plan else 0.0


def placements(sizes: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yields the figures of the best plan, and of each placement, for each model and number of GPUs."""
    for size in sizes:
        for count in COUNTS[size]:
            problem, started = paper_problem(size, count), time.process_time()
            plan = find_plan(problem)
            cpu_s = time.process_time() - started
            fits = plan is not None and max(predicted_bytes(problem, plan)) <= problem.devices[0].capacity
            yield {
                "model": size,
                "gpus": count,
                "tokens_per_s": throughput(problem, plan),
                "pools": [f"{pool_name(problem, pool)}: {pool.count}" for pool in plan.pools] if plan else [],
                "stages_s": list(plan.stages) if plan else [],
                "search_cpu_s": cpu_s,
                "fits": fits,
                **{name: throughput(problem, found) for name, found in named_plans(problem).items()},
            }


def generation_by_tensor_size(size: str, count: int = 16) -> dict[int, float | None]:
    """Returns the seconds of generation by tensor size, transition included (HybridFlow, figure 15): training on
    1-8-2, all models colocated; None where it does not fit."""
    problem = paper_problem(size, count)
    site = Site(problem.devices[0], 8)

    def of_mesh(number: int) -> list[Option]:
        found = layouts(problem.models[number], site, count, problem.workload)
        return [
            option
            for option in found
            if option.use.mesh == (1, 8, count // 8) and not option.use.shards_over_data
        ]

    others = sum(min(option.idle for option in of_mesh(number)) for number in (1, 2, 3))
    found: dict[int, float | None] = {}
    for tensor in (1, 2, 4, 8):
        fitting = [
            option.times[0]
            for option in of_mesh(0)
            if option.use.rollout is not None
            and option.use.rollout.tensor == tensor
            and option.idle + option.extra + others <= site.group.capacity
        ]
        found[tensor] = min(fitting, default=None)
    return found


def transitions(size: str, count: int, tensor: int) -> dict[str, float]:
    """Returns the seconds of the transition from training on t = 8 to a generation tensor size: gathered from all
    ranks, over which weights are sharded (DeepSpeed-Chat), within model-parallel groups (HybridFlow-V), and within
    micro-DP groups (HybridFlow)."""
    problem = paper_problem(size, count)
    site = Site(problem.devices[0], 8)
    actor = problem.models[0].use
    assert actor.rollout is not None
    mesh = (1, 8, count // 8)
    fine = replace(actor, mesh=mesh, rollout=replace(actor.rollout, tensor=tensor))
    whole = replace(fine, rollout=replace(actor.rollout, gathers_all=True))
    return {
        "gather_all": transition_s(replace(whole, shards_over_data=True), site),
        "hybridflow_v": transition_s(whole, site),
        "hybridflow": transition_s(fine, site),
    }


def main() -> None:
    """Prints the figures as Markdown and writes them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(COUNTS), choices=list(COUNTS))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = []
    print("| model | GPUs | tokens/s | pools | " + " | ".join(PLACEMENTS) + " | search, CPU s |")
    print("|" + "---|" * (5 + len(PLACEMENTS)))
    for row in placements(given.models):
        rows.append(row)
        each = " | ".join(f"{row[name]:,.0f}" if row[name] else "-" for name in PLACEMENTS)
        pools = ", ".join(row["pools"]) or "does not fit"
        print(
            f"| {row['model']} | {row['gpus']} | {row['tokens_per_s']:,.0f} | {pools} | {each} | "
            f"{row['search_cpu_s']:.1f} |",
            flush=True,
        )
    print("\n| times the throughput of | mean | most | system | reported |\n|---|---|---|---|---|")
    for name, (system, reported) in BASELINES.items():
        ratios = [row["tokens_per_s"] / row[name] for row in rows if row[name]]
        print(f"| {name} | {sum(ratios) / len(ratios):.2f} | {max(ratios):.2f} | {system} | {reported} |")
    scaling = strong_scaling(rows)
    print(f"\nstrong scaling: {', '.join(f'{size} {100 * share:.0f} %' for size, share in scaling.items())}")
    by_algorithm = algorithms() if "7B" in given.models else {}
    print("\n| 7B, 128 GPUs | models | found, tokens/s | standalone | ratio | reported, to OpenRLHF |")
    print("|---|---|---|---|---|---|")
    for name, each in by_algorithm.items():
        print(
            f"| {name} | {each['models']:.0f} | {each['found']:,.0f} | {each['standalone']:,.0f} | "
            f"{each['found'] / each['standalone']:.2f} | {ALGORITHMS[name]} |"
        )
    generation = {size: generation_by_tensor_size(size) for size in ("7B", "13B")}
    print("\n| generation, 16 GPUs, training 1-8-2 | 1 | 2 | 4 | 8 |\n|---|---|---|---|---|")
    for size, seconds in generation.items():
        print(
            f"| {size} | " + " | ".join("-" if s is None else f"{s:.1f} s" for s in seconds.values()) + " |"
        )
    moved = {size: transitions(size, 128, 2 if size in ("7B", "13B") else 8) for size in COUNTS}
    print(
        "\n| transition, 128 GPUs, from t = 8 | gather_all | hybridflow_v | hybridflow | less than gather_all |\n"
        "|---|---|---|---|---|"
    )
    for size, seconds in moved.items():
        each = " | ".join(f"{1e3 * s:.0f} ms" for s in seconds.values())
        less = 1 - seconds["hybridflow"] / seconds["gather_all"]
        print(f"| {size} | {each} | {100 * less:.1f} % |")
    print("\nReported: " + "; ".join(f"{name}: {text}" for name, text in REPORTED.items()))
    if given.json:
        figures = {
            "placements": rows,
            "algorithms": by_algorithm,
            "strong_scaling": scaling,
            "generation_s": generation,
            "transition_s": moved,
            "reported": REPORTED,
        }
        given.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
