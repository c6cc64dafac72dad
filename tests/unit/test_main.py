"""Memory that a call freed is reused by the next one without page faults; a rank that is stuck ends all the same."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf.errors import ConfigError
from services.reward.role import worker_class
from services.reward.worker import RewardWorker
from services.runtime import main
from settings.model import OptimizerTable
from settings.reward import RewardTable

# The memory of a call: some megabytes at a time, freed in another order, from a thread.
PROGRAM = """
import resource, sys, threading
import numpy as np
from services.runtime.main import keep_freed_memory

if sys.argv[1] == "kept":
    keep_freed_memory()

def call():
    arrays = [np.ones(size << 20, np.uint8) for size in (1, 40, 3, 70, 8)]
    while arrays:
        del arrays[len(arrays) // 2]

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def calls():
    call()
    before = faults()
    for _ in range(5):
        call()
    print(faults() - before)

thread = threading.Thread(target=calls)
thread.start()
thread.join()
"""


def page_faults(way: str, **variables: str) -> int:
    """In five calls after the first."""
    command = [sys.executable, "-c", PROGRAM, way]
    ran = subprocess.run(
        command, env={**_environment(), **variables}, capture_output=True, text=True, check=True
    )
    return int(ran.stdout)


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}


def test_memory_that_is_kept_is_not_faulted_in_again():
    assert page_faults("kept") < page_faults("as it is") / 10


def test_what_the_environment_says_of_malloc_counts():
    assert page_faults("kept", MALLOC_TRIM_THRESHOLD_="131072") > 1000


def test_a_rank_that_does_not_end_by_itself_is_ended_and_says_where_it_was():
    program = (
        "import time; from services.runtime import main; main.LEAVE_WITHIN_S = 0.2; main.leave_in_time(); "
        "time.sleep(60)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert ended.returncode == 1
    assert 'File "<string>", line 1 in <module>' in ended.stderr


def test_ranks_remove_the_directories_of_their_torchrun_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory may go while a rank lists it, which is no error of the rank."""
    listed = Path.rglob

    def vanishing(path: Path, pattern: str) -> Iterator[Path]:
        yield from listed(path, pattern)
        raise FileNotFoundError(path / "attempt_0")

    top = tmp_path / "torchelastic_1"
    (top / "none" / "attempt_0" / "0").mkdir(parents=True)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(top / "none" / "attempt_0" / "0" / "error.json"))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rglob", vanishing)
        main._remove_torchrun_directories()
    main._remove_torchrun_directories()
    assert not list(tmp_path.iterdir())


def test_a_reward_learns_only_by_a_model() -> None:
    table = RewardTable(role="reward", address="127.0.0.1:1")
    assert worker_class(table) is RewardWorker
    with pytest.raises(ConfigError, match="a reward of kind function has nothing to learn"):
        worker_class(table.model_copy(update={"optimizer": OptimizerTable()}))


@pytest.mark.parametrize("worker", ["os:name", "os:PathLike", "json:dumps"])
def test_a_role_whose_worker_is_none_is_refused(worker: str) -> None:
    with pytest.raises(ConfigError, match=rf"'{worker}' is (of type str|no subclass of Worker)"):
        main._worker_class(worker, "a table")  # type: ignore[arg-type]


def test_what_the_module_of_a_worker_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "worker_of_mine.py").write_text("import nothing_of_mine\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError) as raised:
        main._worker_class("worker_of_mine:Mine", "a table")  # type: ignore[arg-type]
    assert str(raised.value) == "No module named 'nothing_of_mine', which 'worker_of_mine:Mine' needs"


def test_a_rank_that_other_hosts_reach_does_not_start_without_certificates(tmp_path: Path) -> None:
    config = tmp_path / "reward.toml"
    config.write_text(
        '[services.reward]\nrole = "reward"\naddress = "127.0.0.1:7199"\nbind_host = "0.0.0.0"\n'
    )
    command = [sys.executable, "-m", "services", "reward", "--config", str(config)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert "fatal: reward: services.reward.bind_host: other hosts reach 0.0.0.0" in ended.stderr


def test_an_unforeseen_error_at_the_start_is_the_last_line_of_the_log(tmp_path: Path) -> None:
    config = tmp_path / "reward.toml"
    config.write_text('[services.reward]\nrole = "reward"\naddress = "127.0.0.1:7199"\n')
    program = (
        "import atexit, sys\n"
        "from rlhf.roles import find_role\n"
        "from services.runtime import main\n"
        "atexit.register(print, 'a library says this at exit', file=sys.stderr)\n"
        "main._serve = lambda *given, **named: {}['table']\n"
        "main.command(find_role('reward'))(['--config', sys.argv[1]])\n"
    )
    command = [sys.executable, "-c", program, str(config)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "KeyError: 'table'\n" in ended.stderr
    assert ended.stderr.splitlines()[-1] == "fatal: reward: KeyError: 'table'"


def test_only_the_first_line_of_a_record_begins_a_line_of_the_log() -> None:
    """An error of a peer may have line feeds; it neither forges a record nor the line that says why a rank ends."""
    program = (
        "import logging; from services.runtime.main import _begin_log; _begin_log('reward/0'); "
        "logging.error('a call failed:\\n%s', 'Traceback:\\nfatal: forged\\rfatal: too')"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    first, *further = ended.stderr.splitlines()
    assert first.endswith(" reward/0 a call failed:")
    assert further == ["  Traceback:", "  fatal: forged", "  fatal: too"]
