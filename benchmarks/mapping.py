"""Time of the search of `rlhf-map`: PPO with four models on 8 to 128 A100-80GB, and with five on 1,024.

`python -m benchmarks.mapping --json FILE` prints Markdown and writes the figures. Every plan is checked by the memory
predictor apart from the search. The bars are those of the project: 5 s each, and 60 s with 1,024 devices, on two cores.
HybridFlow (section 8) reports at most half an hour, linear in the number of devices.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from benchmarks.paper import COUNTS, paper_problem
from benchmarks.report import circumstances, json_option, write_json
from controller.mapping.mapper import find_plan, predicted_bytes
from controller.mapping.output import pool_name

FIVE = ("actor", "critic", "cost_critic", "reference", "reward")
BAR_S, LARGE, LARGE_BAR_S = 5.0, 1024, 60.0


def measure(size: str, count: int, services: tuple[str, ...] | None = None) -> dict[str, Any]:
    """Returns the seconds of one search, in CPU time and on the clock, with its plan."""
    problem = paper_problem(size, count, services)
    cpu_s, clock_s = time.process_time(), time.perf_counter()
    plan = find_plan(problem)
    cpu_s, clock_s = time.process_time() - cpu_s, time.perf_counter() - clock_s
    fits = plan is not None and max(predicted_bytes(problem, plan)) <= problem.devices[0].capacity
    return {
        "model": size,
        "gpus": count,
        "models": len(problem.models),
        "cpu_s": cpu_s,
        "clock_s": clock_s,
        "step_s": plan.cost if plan else None,
        "fits": fits,
        "pools": [f"{pool_name(problem, pool)}: {pool.count}" for pool in plan.pools] if plan else [],
    }


@click.command(help=__doc__)
@click.option("--models", "sizes", multiple=True, type=click.Choice(list(COUNTS)), default=list(COUNTS))
@json_option
def main(sizes: tuple[str, ...], json_path: Path | None) -> None:
    """Prints the figures as Markdown and writes them as JSON."""
    before, rows = circumstances(), []
    print("| model | GPUs | models | CPU s | clock s | bar s | step s | pools |\n" + "|---" * 8 + "|")
    cases = [(size, count, None) for size in sizes for count in COUNTS[size]]
    for size, count, services in [*cases, *((size, LARGE, FIVE) for size in sizes)]:
        row = measure(size, count, services)
        row["bar_s"] = LARGE_BAR_S if count == LARGE else BAR_S
        rows.append(row)
        step = f"{row['step_s']:.2f}" if row["fits"] else "does not fit"
        print(
            f"| {size} | {count:,} | {row['models']} | {row['cpu_s']:.1f} | {row['clock_s']:.1f} | "
            f"{row['bar_s']:.0f} | {step} | {'; '.join(row['pools'])} |",
            flush=True,
        )
    late = [row for row in rows if row["clock_s"] > row["bar_s"]]
    print(f"\n{len(rows) - len(late)} of {len(rows)} searches within their bars on the clock")
    write_json(json_path, {"before": before, "after": circumstances(), "searches": rows})


if __name__ == "__main__":
    main()
