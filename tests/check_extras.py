"""Chore `make check-extras`: resolves each extra for NVIDIA GPUs with uv's resolver, without installing anything, and
checks that what it would install fits together: one NCCL, equal CUDA majors of torch and cupy, the tested torch.
Pins, such as that of vLLM on torch, are the resolver's own concern: it finds nothing where they clash.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import click

from services.runtime.gpus import library_conflict

ROOT = Path(__file__).parent.parent
TESTED_TORCH = "2.13.0"
CU12_HINT = (
    "as meant: PyPI has no torch for CUDA 12; `--index https://download.pytorch.org/whl/cu126` resolves it"
)
PYTHON = "3.11"
EXTRAS = (
    ("cu13",),
    ("cu13", "deepspeed"),
    ("cu13", "vllm"),
    ("cu13", "vllm", "deepspeed"),
    ("cu12",),
    ("cu12", "deepspeed"),
)
SHOWN = re.compile(r"torch|cupy-.*|nvidia-nccl-.*|vllm|deepspeed")


class Unresolved(Exception):
    """There is no set of packages for the extras; the text says why."""


def resolve(extras: tuple[str, ...], index: str = "") -> dict[str, str]:
    """Returns the version of every package, by normalized name, that an installation of some extras into an empty
    environment on Linux x86_64 has.

    Args:
        extras: Extras of this project.
        index: A further package index. Default: none.

    Raises:
        Unresolved: There is no such set of packages.
    """
    command = ["uv", "pip", "compile", "pyproject.toml", "--quiet", "--no-header", "--no-annotate"]
    command += ["--python-version", PYTHON, "--python-platform", "x86_64-manylinux_2_28"]
    command += [part for extra in extras for part in ("--extra", extra)]
    command += ["--extra-index-url", index] if index else []
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    if ran.returncode != 0:
        raise Unresolved(" ".join(ran.stderr.split()))
    lines = (line.partition(" ;")[0].split("==") for line in ran.stdout.splitlines() if "==" in line)
    return dict(lines)


def cuda_of_torch(installed: Mapping[str, str]) -> str | None:
    """Returns the version of CUDA that the resolved torch is built for, by the packages it brings: None for a build
    for CPUs."""
    label = re.search(r"\+cu(\d+)(\d)$", installed["torch"])
    if label:
        return f"{label[1]}.{label[2]}"
    majors = {name.rpartition("-cu")[2] for name in installed if re.fullmatch(r"nvidia-nccl-cu\d+", name)}
    return min(majors) if majors else None


def findings(installed: Mapping[str, str]) -> list[str]:
    """Returns what does not fit in a resolved set of packages, given as `resolve` returns it."""
    wrong = []
    if installed["torch"].partition("+")[0] != TESTED_TORCH:
        wrong.append(f"torch {installed['torch']} is not the tested {TESTED_TORCH}")
    cuda = cuda_of_torch(installed)
    if cuda is None:
        wrong.append("torch is a build for CPUs")
    conflict = library_conflict(installed["torch"], cuda, installed)
    return [*wrong, *([conflict] if conflict else [])]


@click.command(help=__doc__)
@click.option("--index", default="", help="Further package index for cu12, such as that of PyTorch.")
def main(index: str) -> None:
    failed = False
    print("| extras | resolves to | |\n|---|---|---|")
    for extras in EXTRAS:
        name = ", ".join(extras)
        try:
            installed = resolve(extras, index if "cu12" in extras else "")
        except Unresolved as error:
            # PyPI has no torch for CUDA 12, and must not install one for CUDA 13 in its place.
            meant = "cu12" in extras and not index and "torch==2.13.0+cu126" in str(error)
            failed |= not meant
            print(
                f"| {name} | nothing{'' if meant else f': {error}'} | {CU12_HINT if meant else 'WRONG'} |",
                flush=True,
            )
            continue
        wrong = findings(installed)
        shown = ", ".join(f"{each} {installed[each]}" for each in sorted(installed) if SHOWN.fullmatch(each))
        failed |= bool(wrong)
        print(f"| {name} | {shown} | {'; '.join(wrong) or 'fits'} |", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
