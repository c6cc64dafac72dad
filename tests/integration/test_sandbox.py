"""The code grader on programs that are not out to harm it, by itself and as a service."""

from __future__ import annotations

import errno
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from ctypes.util import find_library
from pathlib import Path
from typing import Any

import pytest

from integration.harness import Processes, Service, free_ports, is_listening, wait_until
from rlhf.errors import CallCancelled
from rlhf.v1 import common_pb2, reward_pb2
from services.reward.sandbox import cgroups
from services.reward.sandbox.bubblewrap import Bubblewrap
from services.reward.sandbox.grader import Grader, ProgramVerdict, grade
from services.reward.sandbox.isolation import Unsandboxed
from services.reward.sandbox.program import Submission, read_row
from services.reward.sandbox.scorer import SandboxScorer
from services.runtime.worker import CallContext
from settings.reward import SandboxTable

PROTOS = Path(__file__).parents[2] / "protos"
HUMAN_EVAL = Path(__file__).parents[1] / "data/HumanEval.jsonl.gz"
TIMEOUT_S = 60.0
TABLE = SandboxTable(wall_time_s=5.0, cpu_time_s=5, memory_mb=256)
HASTY = TABLE.model_copy(update={"wall_time_s": 1.5})

# What a mutant returns instead of the right value: of the same type, and wrong.
WRONG = """

def _wrong(value):
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, (list, tuple)):
        return value + type(value)([0])
    if isinstance(value, dict):
        return {**value, "x": 1}
    return 0

_right = ENTRY_POINT

def ENTRY_POINT(*args, **kwargs):
    return _wrong(_right(*args, **kwargs))
"""


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    grader = Grader(TABLE)
    yield grader
    grader.close()


@pytest.fixture(scope="module")
def hasty() -> Iterator[Grader]:
    """A grader for what takes all its time."""
    grader = Grader(HASTY)
    yield grader
    grader.close()


def program(response: str, *tests: dict[str, Any], score: str = "all", **metadata: Any) -> Submission:
    return read_row(metadata.pop("prompt", ""), response, "", {"tests": list(tests), **metadata}, score)


def verdict(grader: Grader, *arguments: Any, **options: Any) -> ProgramVerdict:
    return grader.submit(program(*arguments, **options)).result(TIMEOUT_S)


def call(function: str, *args: Any, expected: Any, **options: Any) -> dict[str, Any]:
    return {"kind": "call", "function": function, "args": list(args), "expected": expected, **options}


def asserts(code: str, entry_point: str = "f") -> dict[str, Any]:
    return {"kind": "asserts", "code": code, "entry_point": entry_point}


def stdin(given: str, expected: str) -> dict[str, Any]:
    return {"kind": "stdin", "input": given, "expected": expected}


def human_eval(grader: Grader, behind: str) -> dict[str, ProgramVerdict]:
    """Verdicts on the canonical solutions, with code put behind them."""
    with gzip.open(HUMAN_EVAL, "rt") as file:
        problems = [json.loads(line) for line in file]
    futures: dict[str, Future[ProgramVerdict]] = {}
    for problem in problems:
        response = problem["canonical_solution"] + behind.replace("ENTRY_POINT", problem["entry_point"])
        tests = asserts(problem["test"], problem["entry_point"])
        row = program(response, tests, prompt=problem["prompt"], completes_prompt=True)
        futures[problem["task_id"]] = grader.submit(row)
    return {task: future.result(TIMEOUT_S) for task, future in futures.items()}


def test_all_canonical_solutions_of_human_eval_pass(grader: Grader) -> None:
    verdicts = human_eval(grader, "")
    assert len(verdicts) == 164
    assert {task: found for task, found in verdicts.items() if found != ProgramVerdict(("",))} == {}


@pytest.mark.slow
def test_all_fail_with_a_wrong_return_value_put_in(grader: Grader) -> None:
    verdicts = human_eval(grader, WRONG)
    assert len(verdicts) == 164
    assert {task: found for task, found in verdicts.items() if found != ProgramVerdict(("wrong",))} == {}


def test_calls_with_arguments_of_all_kinds(grader: Grader) -> None:
    code = "def f(*args, **kwargs):\n    return [args, kwargs]"
    test = call(
        "f",
        1,
        "é\0",
        [None, {"k": 0.5}],
        kwargs={"a": True},
        expected=[[1, "é\0", [None, {"k": 0.5}]], {"a": True}],
    )
    assert verdict(grader, code, test) == ProgramVerdict(("",))


def test_methods_of_a_class_solution(grader: Grader) -> None:
    code = "class Solution:\n    def add(self, a, b):\n        return a + b"
    assert verdict(grader, code, call("add", 1, 2, expected=3)) == ProgramVerdict(("",))


def test_a_fraction_counts_what_passes(grader: Grader) -> None:
    tests = [call("f", x, expected=x * x) for x in range(4)]
    found = verdict(grader, "def f(x):\n    return x if x < 2 else None", *tests)
    assert (found.reasons, found.score("fraction")) == (("", "", "wrong", "wrong"), 0.5)


def test_programs_that_read_and_write(grader: Grader) -> None:
    code = "import sys\nn = int(input())\nprint(sum(map(int, sys.stdin.read().split())) * n)\nexit()"
    tests = stdin("2\n1 2\n3\n", "12\n"), stdin("3\n1\n", "3"), stdin("1\n1\n", "2"), stdin("x", "1")
    assert verdict(grader, code, *tests).reasons == ("", "", "wrong", "raised")


@pytest.mark.parametrize(
    "code",
    [
        "import atexit\natexit.register(print, 'out')",
        "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.1), print('out'))).start()",
        "file = open(1, 'w', closefd=False)\nfile.write('out')",
        "import io, sys\nsys.__stdout__.write('out')\nsys.stdout = io.StringIO()",
        "import sys\nprint('out')\nsys.stdout.close()",
        "import sys\nprint('out', flush=True)\nsys.stdout = None",
        "import atexit\natexit.register(print, 'out')\nexit()",
    ],
)
def test_a_run_ends_as_that_of_any_interpreter(code: str, grader: Grader) -> None:
    assert verdict(grader, code, stdin("", "out"), stdin("", "out")).reasons == ("", "")


@pytest.mark.parametrize(
    "code",
    [
        "print('out')\nraise SystemExit('x')",
        "print('out')\nraise KeyboardInterrupt",
        "class Closed:\n    def flush(self): raise OSError\nimport sys\nprint('out', flush=True)\n"
        "sys.stdout = Closed()\nraise ValueError",
    ],
)
def test_a_run_that_fails_is_no_pass_and_the_next_one_is_asked(code: str, grader: Grader) -> None:
    code = f"if input():\n    exec({code!r})\nelse:\n    print('out')"
    assert verdict(grader, code, stdin("1", "out"), stdin("\n", "out")).reasons == ("raised", "")


def test_each_run_of_a_program_is_a_new_one(grader: Grader) -> None:
    code = "import os\nprint(os.path.exists('/tmp/x') + (globals().setdefault('n', 0)))\nglobals()['n'] += 1"
    assert verdict(grader, code, stdin("", "0"), stdin("", "0")).reasons == ("", "")


def test_a_ground_truth_of_inputs_and_outputs(grader: Grader) -> None:
    truth = json.dumps({"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]})
    row = read_row("", "```python\nprint(sum(map(int, input().split())))\n```", truth, {}, "all")
    assert grader.submit(row).result(TIMEOUT_S) == ProgramVerdict(("", ""))


def test_plain_asserts_call_the_program_by_its_name(grader: Grader) -> None:
    test = asserts("import math\nassert math.isclose(f(2), 4)\nassert f(3) == 9")
    assert verdict(grader, "def f(x):\n    return x * x", test) == ProgramVerdict(("",))
    assert verdict(grader, "def f(x):\n    return x + 2", test) == ProgramVerdict(("wrong",))


def test_tests_see_the_names_of_the_prelude_and_none_of_the_programs(grader: Grader) -> None:
    code, test = "def f(x):\n    return double(x)\nhidden = 1", "assert f(2) == double(2)"
    prelude = "def double(x):\n    return 2 * x\n"
    assert verdict(grader, code, asserts(test), prelude=prelude) == ProgramVerdict(("",))
    assert verdict(grader, code, asserts(f"{test}\nassert hidden == 1"), prelude=prelude) == ProgramVerdict(
        ("wrong",)
    )


def test_exceptions_of_the_program_reach_tests_that_expect_them(grader: Grader) -> None:
    test = asserts(
        "try:\n    f(0)\nexcept ZeroDivisionError:\n    pass\nelse:\n    raise AssertionError('no error')"
    )
    assert verdict(grader, "def f(x):\n    return 1 / x", test) == ProgramVerdict(("",))
    assert verdict(grader, "def f(x):\n    raise ValueError(x)", test) == ProgramVerdict(("raised",))


@pytest.mark.parametrize("code", ["def f(:", "x = 1", "def f(x):\n    return x[0]"])
def test_asserts_say_that_the_program_raised_or_does_not_compile(code: str, grader: Grader) -> None:
    test = asserts("def check(candidate):\n    assert candidate(2) == 4")
    assert verdict(grader, code, test) == ProgramVerdict(("raised",))


def test_tests_cannot_catch_that_the_program_has_ended(grader: Grader) -> None:
    test = asserts("try:\n    f()\nexcept BaseException:\n    pass")
    assert verdict(grader, "import os\ndef f():\n    os._exit(0)", test) == ProgramVerdict(("died",))


@pytest.mark.parametrize(
    ("test", "cause"),
    [
        (asserts("def check(candidate:"), "does not load: SyntaxError"),
        (asserts("import no_such_module\nassert f() == 1"), "fails by itself: ModuleNotFoundError"),
        (asserts("assert True"), "it ends before it calls f"),
        (asserts("def check(candidate):\n    pass"), "it ends before it calls f"),
        (asserts("assert f(object()) == 1"), "fails by itself: argument of f: object is not plain data"),
        (asserts("while True: pass\nassert f() == 1"), "time is up before it calls f"),
        (asserts("import time\ntime.sleep(100)\nassert f() == 1"), "time is up before it calls f"),
        (asserts("import os\nos._exit(0)"), "test 0: it ends before it calls f"),
        (asserts("raise SystemExit"), "fails by itself: SystemExit"),
    ],
)
def test_broken_tests_are_a_fault_and_no_zero(hasty: Grader, test: dict[str, Any], cause: str) -> None:
    found = verdict(hasty, "def f(*args):\n    return 1", test)
    assert cause in found.fault


@pytest.mark.parametrize("first", ["return 1", "return 2", "import os; os._exit(0)"])
def test_tests_are_checked_before_the_program_runs(first: str, grader: Grader) -> None:
    tests = asserts("assert f() == 1"), asserts("import os\nos._exit(0)")
    found = verdict(grader, f"def f():\n    {first}", *tests)
    assert found.fault == "test 1: it ends before it calls f"


def test_a_test_is_asked_once_however_it_catches_errors(grader: Grader) -> None:
    test = asserts("try:\n    found = f()\nexcept BaseException:\n    found = 1\nassert found == 1")
    assert verdict(grader, "def f():\n    return 1", test) == ProgramVerdict(("",))
    assert verdict(grader, "def f():\n    return 2", test) == ProgramVerdict(("wrong",))


def test_the_programs_time_runs_from_its_first_call(hasty: Grader) -> None:
    test = asserts("import time\ntime.sleep(1.2)\nassert f() == 1")
    assert verdict(hasty, "import time\ndef f():\n    time.sleep(0.6)\n    return 1", test) == ProgramVerdict(
        ("",)
    )


def test_tests_that_end_with_what_the_program_gives_them_count_against_it(grader: Grader) -> None:
    test = asserts("import os\nif f() == 1:\n    os._exit(0)")
    assert verdict(grader, "def f():\n    return 1", test) == ProgramVerdict(("tests_ended",))


def test_a_program_that_does_not_compile_has_failed(grader: Grader) -> None:
    assert verdict(grader, "def f(:", call("f", expected=1)) == ProgramVerdict(("raised",))


def test_a_program_is_graded_once(grader: Grader) -> None:
    code = "import time\ndef f():\n    return time.time_ns()"
    tests = [call("f", expected=0)]
    row = program(code, *tests)
    first = grader.submit(row)
    assert grader.submit(program(code, *tests)) is first
    assert first.result(TIMEOUT_S) == ProgramVerdict(("wrong",))
    assert grader.submit(row) is first
    assert grader.submit(program(code + "\n", *tests)) is not first


def test_faults_are_not_remembered(grader: Grader) -> None:
    row = program("def f():\n    return 1", asserts("assert True"))
    first = grader.submit(row)
    assert first.result(TIMEOUT_S).fault
    assert grader.submit(row) is not first


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import time\ndef f():\n    time.sleep(100)", "timeout"),
        ("def f():\n    return 1", "tests_ended"),
    ],
)
def test_what_another_try_may_pass_is_not_remembered(code: str, reason: str, hasty: Grader) -> None:
    row = program(code, asserts("import os\nif f() == 1:\n    os._exit(0)"))
    first = hasty.submit(row)
    assert first.result(TIMEOUT_S) == ProgramVerdict((reason,))
    assert hasty.submit(row) is not first


def test_the_cache_is_bounded() -> None:
    grader = Grader(TABLE.model_copy(update={"cache_entries": 2}))
    rows = [program(f"def f():\n    return {i}", call("f", expected=1)) for i in range(3)]
    futures = [grader.submit(row) for row in rows]
    assert grader.submit(rows[2]) is futures[2]
    assert grader.submit(rows[0]) is not futures[0]
    grader.close()


def test_without_a_sandbox_the_same_programs_get_the_same_verdicts() -> None:
    right, slow = "def f():\n    return 1", "import time\ndef f():\n    time.sleep(100)"
    table = TABLE.model_copy(update={"wall_time_s": 0.5})
    for code, reason in ((right, ""), (slow, "timeout")):
        found = grade(program(code, call("f", expected=1)), Unsandboxed(table), table)
        assert found == ProgramVerdict((reason,))


def test_graders_of_one_process_have_control_groups_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    names, make = list[str](), cgroups.make

    def noted(controllers: Any, name: str, limits: dict[str, int]) -> cgroups.ControlGroup:
        names.append(name)
        return make(controllers, name, limits)

    monkeypatch.setattr(cgroups, "make", noted)
    right = program("def f():\n    return 1", call("f", expected=1))
    for isolated in (Bubblewrap(TABLE), Bubblewrap(TABLE)):
        assert grade(right, isolated, TABLE) == ProgramVerdict(("",))
    started = [name for name in names if not name.endswith("-probe")]
    assert len(started) == len(set(started)) == 4


def test_a_control_group_that_cannot_be_made_is_a_fault_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once: bwrap, which waits for its group, is ended."""
    isolated = Bubblewrap(TABLE)

    def full(controllers: Any, name: str, limits: dict[str, int]) -> cgroups.ControlGroup:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cgroups, "make", full)
    found = grade(program("def f():\n    return 1", call("f", expected=1)), isolated, TABLE)
    assert found.fault.startswith("bwrap did not start: OSError: [Errno 28] No space left on device")


def test_sandboxes_start_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    bubblewrap = Bubblewrap(TABLE)
    both, getpid = threading.Barrier(2, timeout=10), os.getpid

    def meet() -> int:
        both.wait()
        return getpid()

    # Called for the name of each control group.
    monkeypatch.setattr(os, "getpid", meet)
    rows = [program(f"def f():\n    return {i}", call("f", expected=i)) for i in range(2)]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda row: grade(row, bubblewrap, TABLE), rows)) == [ProgramVerdict(("",))] * 2


def test_a_program_is_ended_by_the_cpu_time_of_all_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "usable", lambda limits: [])
    table = TABLE.model_copy(update={"wall_time_s": TIMEOUT_S, "cpu_time_s": 1})
    code = """
import os, time
def f():
    for _ in range(40):
        if os.fork() == 0:
            while time.process_time() < 0.1: pass
            os._exit(0)
        os.wait()
    return 1
"""
    # Each process ends long before its own limit; together they take four seconds.
    assert grade(program(code, call("f", expected=1)), Bubblewrap(table), table) == ProgramVerdict(("died",))


def test_the_bubblewrap_that_is_found_is_the_one_that_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = tmp_path / "used"
    (tmp_path / "bwrap").write_text(f'#!/bin/sh\n: > {used}\nexec {shutil.which("bwrap")} "$@"\n')
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    isolated = Bubblewrap(TABLE)
    assert grade(program("def f():\n    return 1", call("f", expected=1)), isolated, TABLE) == ProgramVerdict(
        ("",)
    )
    assert used.exists()


BELOW_TMP = """
from settings.reward import SandboxTable
from services.reward.sandbox.grader import Grader
from services.reward.sandbox.program import read_row
grader = Grader(SandboxTable(workers=1))
tests = [{"kind": "call", "function": "f", "expected": %r}]
code = "import sys\\ndef f():\\n    return sys.prefix"
print(grader.submit(read_row("", code, "", {"tests": tests}, "all")).result())
"""


@pytest.mark.skipif(
    bool(sysconfig.get_config_var("Py_ENABLE_SHARED"))
    and not find_library("python{}.{}".format(*sys.version_info)),
    reason="a copied interpreter finds its libpython outside of the sandbox alone",
)
def test_a_python_below_the_temporary_directory_is_seen() -> None:
    def link(source: str, target: str) -> None:
        try:
            os.link(source, target)
        except OSError:
            shutil.copy2(source, target)

    library = f"lib/python{sys.version_info.major}.{sys.version_info.minor}"
    ignored = shutil.ignore_patterns("site-packages", "test", "idlelib", "tkinter", "config-*", "ensurepip")
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        prefix = Path(directory, "python")
        base = Path(sys.base_prefix)
        shutil.copytree(base / library, prefix / library, ignore=ignored, copy_function=link)
        interpreter = prefix / "bin/python3"
        interpreter.parent.mkdir()
        link(os.path.realpath(sys._base_executable), str(interpreter))  # type: ignore[attr-defined]
        said = subprocess.run(
            [interpreter, "-c", BELOW_TMP % str(prefix)], capture_output=True, text=True, timeout=TIMEOUT_S,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(PROTOS), *sys.path])}, check=False,
        )  # fmt: skip
    assert said.stdout == f"{ProgramVerdict(('',))}\n", said.stderr


def test_a_cancelled_call_stops_waiting_and_the_next_one_is_answered() -> None:
    scorer = SandboxScorer(TABLE.model_copy(update={"workers": 1, "wall_time_s": 2.0}))
    cancelled, next_call = (CallContext(common_pb2.Call(), time.monotonic() + TIMEOUT_S) for _ in range(2))
    cancelled.cancelled = True
    rows = [
        text_row(f"import time\ndef f():\n    time.sleep({100 + i})", call("f", expected=1))
        for i in range(50)
    ]
    with pytest.raises(CallCancelled):
        scorer.score_texts(rows, cancelled)
    (score,) = scorer.score_texts([text_row("def f():\n    return 1", call("f", expected=1))], next_call)
    assert score.score == 1.0


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The grader as its users start it."""
    directory = tmp_path_factory.mktemp("service")
    (port,) = free_ports(1)
    config = directory / "config.toml"
    config.write_text(
        f'[services.reward]\nrole = "reward"\nkind = "sandbox"\naddress = "127.0.0.1:{port}"\n'
        "[services.reward.sandbox]\nwall_time_s = 2.0\n"
    )
    processes = Processes()
    try:
        with (directory / "log").open("w") as log:
            launched = processes.start(
                "python", "-m", "services", "reward", "--config", str(config), stdout=log, stderr=log
            )
        address = f"127.0.0.1:{port}"
        wait_until(
            lambda: is_listening(address) or launched.poll() is not None, TIMEOUT_S, "the service is up"
        )
        service = Service("reward", address)
        yield service
        service.close()
        launched.send_signal(signal.SIGTERM)
        launched.wait(TIMEOUT_S)
        wait_until(lambda: not processes.living(), TIMEOUT_S, "all processes have ended")
    finally:
        processes.kill()


def text_row(response: str, *tests: dict[str, Any]) -> reward_pb2.TextRow:
    row = reward_pb2.TextRow(response=response)
    if tests:
        row.metadata.update({"tests": list(tests)})
    return row


def test_a_service_of_kind_sandbox_scores_rows(service: Service) -> None:
    test = call("f", 3, expected=[9])
    rows = [
        text_row("```python\ndef f(x):\n    return [x * x]\n```", test),
        text_row("def f(x):\n    return x", test),
        text_row("def f(x):\n    while True: pass", test),
        text_row("def f(x):\n    return [9]"),
        text_row("def f(x):\n    return [9]", asserts("assert True")),
    ]
    (answer,) = service.call("compute_reward", text_rows=rows)
    assert [score.WhichOneof("verdict") for score in answer.scores] == ["score"] * 3 + ["error"] * 2
    assert [score.score for score in answer.scores[:3]] == [1.0, 0.0, 0.0]
    assert "no tests" in answer.scores[3].error
    assert "test 0: it ends before it calls f" in answer.scores[4].error
    metrics = {name: (metric.sum, metric.count) for name, metric in answer.outcome.metrics.items()}
    assert metrics["sandbox/wrong"] == (1, 5)
    assert metrics["sandbox/timeout"] == (1, 5)


def test_the_service_needs_no_torch_and_says_what_it_is(service: Service) -> None:
    (rank,) = service.description.ranks
    assert service.description.engine == "sandbox"
    assert "libtorch" not in Path(f"/proc/{rank.pid}/maps").read_text()
