"""Identity of a run: algorithm, command line, code version, start, platform and initial weights of its services."""

from __future__ import annotations

import functools
import importlib.metadata
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from controller.role_groups.platform import platform_of
from controller.tracking.contents import time_text
from rlhf.v1 import worker_pb2

GIT_TIMEOUT_S = 5.0

RECORDED = (
    *("version", "threads", "cpu", "cpu_capability", "gpu"),
    *("torch", "libraries", "matmul", "kernels"),
)
"""Properties of a service's platform that the identity has; together with the config they determine the results
bitwise."""


@dataclass(frozen=True)
class Identity:
    """The part of a run's identity that is known before the run connects to services.

    Attributes:
        algorithm: Name of the algorithm.
        command_line: Command line of this process, quoted for a shell.
        version: Version of the package.
        commit: Git commit of the package's checkout, followed by + where tracked files were changed; empty outside a
            checkout.
        started_unix_ns: Start of the run, Unix time in nanoseconds.
        seed: Seed of the run.
        resumed: One entry for each time that the run was resumed: step, command line, version, commit, time, and
            learning rates that were changed.
        replaced: One entry for each time that a service was lost and replaced before that: service, step, cause and
            time.
    """

    algorithm: str
    command_line: str
    version: str
    commit: str
    started_unix_ns: int
    seed: int
    resumed: tuple[Mapping[str, Any], ...] = ()
    replaced: tuple[Mapping[str, Any], ...] = ()

    @staticmethod
    def of(algorithm: str, seed: int, started_unix_ns: int) -> Identity:
        """Makes the identity of a run of this process, from its command line, package version and git commit."""
        command_line = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
        version = importlib.metadata.version("rlhf-cluster")
        return Identity(algorithm, command_line, version, git_commit(), started_unix_ns, seed)

    def resuming(
        self,
        stored: Mapping[str, Any],
        known: Mapping[str, Any],
        step: int,
        changed: Mapping[str, tuple[Any, Any]] | None = None,
    ) -> Identity:
        """Returns the identity of a run that this process resumes.

        Args:
            stored: Identity of the run in its checkpoint, as `with_services` has returned it.
            known: The identity that the run has had last, which also lists the times that it was resumed and wrote no
                checkpoint. Empty where it is lost.
            step: Number of the step after which it is resumed.
            changed: Learning rates before and from then on, by key (`changed_learning_rates`). Default: none.
        """
        entry = {
            "step": step,
            "command_line": self.command_line,
            "version": self.version,
            "commit": self.commit,
            "at": self.started,
            **({"changed": {key: list(values) for key, values in changed.items()}} if changed else {}),
        }
        kept = {name: stored[name] for name in ("algorithm", "command_line", "version", "commit")}
        return replace(
            self,
            **kept,
            started_unix_ns=stored["started_unix_ns"],
            resumed=(*(known or stored).get("resumed", ()), entry),
            replaced=tuple((known or stored).get("replaced", ())),
        )

    @property
    def started(self) -> str:
        """Start of the run as text, for example 2026-01-01 12:00:00 UTC."""
        return time_text(self.started_unix_ns / 1e9)

    def as_comment(self) -> str:
        """Returns the identity as comment lines for the top of a TOML file."""
        code = f"{self.version} {self.commit}".strip()
        lines = (f"{self.algorithm}, started {self.started} by rlhf-cluster {code}", self.command_line)
        # A line break in the command must not end the comment.
        return "".join(f"# {line}\n" for text in lines for line in text.splitlines())

    def with_services(
        self, services: Mapping[str, worker_pb2.DescribeResponse], origins: Mapping[str, str]
    ) -> dict[str, Any]:
        """Returns the whole identity, with platform and initial weights of the services, as JSON values.

        Args:
            services: Descriptions of the services, by name.
            origins: Origin of the weights of each service that has weights, as text, by name.
        """
        return {
            "algorithm": self.algorithm,
            "command_line": self.command_line,
            "version": self.version,
            "commit": self.commit,
            "started": self.started,
            "started_unix_ns": self.started_unix_ns,
            "seed": self.seed,
            **({"resumed": list(self.resumed)} if self.resumed else {}),
            **({"replaced": list(self.replaced)} if self.replaced else {}),
            "services": {
                name: {key: figures[key] for key in RECORDED if figures[key]}
                | ({"began_from": origins[name]} if name in origins else {})
                for name, figures in platform_of(services).items()
            },
        }


@functools.cache
def git_commit() -> str:
    """Returns the git commit of this file's checkout, followed by + where tracked files were changed; empty outside a
    checkout."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=True)
        return done.stdout.strip()

    try:
        # A package installed below an unrelated checkout is no part of it.
        git("ls-files", "--error-unmatch", Path(__file__).name)
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return ""
