"""The launcher of other tests says which rank has ended."""

from __future__ import annotations

from pathlib import Path

from integration.harness import Processes, free_ports

CONFIG = """
[services.reward]
role = "reward"
address = "127.0.0.1:{}"
kind = "function"
function = "nowhere:nothing"
"""

PROGRAM = """
import sys
from pathlib import Path
import forked_services

forked_services.MODULES = ()
forked_services.serve(Path(sys.argv[1]), Path(sys.argv[2]), [])
"""


def test_a_rank_that_ends_before_it_serves_is_named(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(CONFIG.format(*free_ports(1)))
    processes = Processes()
    try:
        launcher = processes.start("python", "-c", PROGRAM, str(config), str(tmp_path / "logs"))
        _, said = launcher.communicate(timeout=110)
        assert (launcher.returncode, processes.living()) == (1, [])
    finally:
        processes.kill()
    last = said.splitlines()[-1]
    assert last.startswith("service reward is not healthy; a rank that ended: ")
    assert last.split()[-1].isdecimal()
