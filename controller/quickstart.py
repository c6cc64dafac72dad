"""Bundled configurations of the quickstart, and the build of the model and data that they use."""

from __future__ import annotations

import importlib.resources
import os
import subprocess
import sys

from controller.config.config import Config, load
from rlhf.errors import ConfigError

BUILD_STOPS_S = 10.0
"""Longest time, in seconds, to wait for an interrupted build to end."""


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
    """Builds the quickstart's model and data beside `data.train`, in a process of its own, unless they are there.

    Raises:
        ConfigError: The build failed.
    """
    build_command = ["-m", "deploy.quickstart.build", "--out", str(config.data.train.parent)]
    # The build ends with this process, even where this one is killed.
    tied = [sys.executable, "-m", "deploy.with_parent", str(os.getpid())]
    command = [*tied, sys.executable, *build_command]
    # A process session of its own: Ctrl-C reaches only this process, and the build has time to remove partial files.
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as build:
        try:
            _, said = build.communicate()
        except BaseException:
            build.terminate()
            build.wait(BUILD_STOPS_S)
            raise
    if build.returncode:
        cause = said.strip().rpartition("\n")[2] or f"exit code {build.returncode}"
        raise ConfigError(f"the quickstart's model could not be built: {cause}")
