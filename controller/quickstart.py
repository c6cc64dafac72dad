"""Bundled configurations of the quickstart, and the build of the model and data that they use."""

from __future__ import annotations

import importlib.resources
import os
import subprocess
import sys

from controller.config.config import Config, load
from rlhf.errors import ConfigError

BUILD_S = 3600.0
"""Longest time, in seconds, that a build may take; on two cores it takes about a minute."""
TEACHER = "teacher"
"""Directory beside the data in which a build has its teacher."""
BUILD_STOPS_S = 10.0
"""Longest time, in seconds, to wait for an interrupted build to end; then it is killed."""


def load_quickstart(name: str = "quickstart", settings: tuple[str, ...] = ()) -> Config:
    """Reads a bundled configuration.

    Args:
        name: Name of its file below deploy/quickstart, without .toml. Default: that for PPO.
        settings: Overrides "key.path=value" of the file's values.

    Raises:
        ConfigError: A setting is invalid.
    """
    with importlib.resources.as_file(
        importlib.resources.files("deploy") / "quickstart" / f"{name}.toml"
    ) as path:
        return load(path, settings)


def build_quickstart(config: Config) -> None:
    """Builds the quickstart's model and data beside `data.train`, in a process of its own, unless they are there; and a
    teacher, where a service has a model in its directory there.

    Raises:
        ConfigError: The build failed, or did not end within `BUILD_S`.
    """
    out = config.data.train.parent
    models = [path for table in config.services.values() if (path := table.model_directory)]
    build_command = ["-m", "deploy.quickstart.build", "--out", str(out)]
    if any(path.is_relative_to(out / TEACHER) for path in models):
        build_command.append("--teacher")
    # The build ends with this process, even where this one is killed.
    tied = [sys.executable, "-m", "deploy.with_parent", str(os.getpid())]
    command = [*tied, sys.executable, *build_command]
    # A process session of its own: Ctrl-C reaches only this process, and the build has time to remove partial files.
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as build:
        try:
            _, said = build.communicate(timeout=BUILD_S)
        except BaseException as error:
            _stop(build)
            if isinstance(error, subprocess.TimeoutExpired):
                raise ConfigError(f"the quickstart's model was not built within {BUILD_S:g} s") from None
            raise
    if build.returncode:
        cause = said.strip().rpartition("\n")[2] or f"exit code {build.returncode}"
        raise ConfigError(f"the quickstart's model could not be built: {cause}")


def _stop(build: subprocess.Popen[str]) -> None:
    build.terminate()
    try:
        build.wait(BUILD_STOPS_S)
    except subprocess.TimeoutExpired:
        build.kill()
