"""The pure parts of the code grader: rows, values on the wire, comparison, limits of the host."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import struct_pb2
from hypothesis import given
from hypothesis import strategies as st

from rlhf.errors import CallCancelled, ConfigError
from rlhf.v1 import common_pb2, reward_pb2
from services.reward.sandbox import (
    bubblewrap,
    cgroups,
    grader,
    isolation,
    remote_program,
    sandboxed_process,
    test_kinds,
    usage,
    wire,
)
from services.reward.sandbox.program import (
    BadProgramRow,
    Submission,
    extract_code,
    read_ground_truth,
    read_row,
    read_tests,
)
from services.reward.sandbox.scorer import SandboxScorer
from services.runtime.worker import CallContext
from settings.reward import SandboxTable

CALL = {"kind": "call", "function": "f", "args": [1], "expected": 2}
ASSERTS = {"kind": "asserts", "code": "assert f()", "entry_point": "f"}
NESTED = json.loads("[" * 70 + "]" * 70)

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
hashable = st.recursive(
    scalars | st.complex_numbers(allow_nan=False), lambda inner: st.tuples(inner, inner), max_leaves=4
)
plain = st.recursive(
    hashable,
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(hashable, inner)
        | st.sets(hashable)
        | st.frozensets(hashable)
    ),
    max_leaves=12,
)


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("x = 1", "x = 1"),
        ("Sure:\n```python\nx = 1\n```\nDone.", "x = 1\n"),
        ("```python\nx = 1\n```\nor better\n```py\nx = 2\n```", "x = 2\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```python\nx = 1\n```\n```\noutput\n```", "x = 1\n"),
        ("```python\nx = 1\n```\n```bash\npip install y\n```", "x = 1\n"),
        ("```bash\npip install y\n```", "```bash\npip install y\n```"),
        ("````python\nx = '```'\n````", "x = '```'\n"),
        ("~~~Python3\nx = 1\n~~~", "x = 1\n"),
        ("```python\nx = 1", "```python\nx = 1"),
        ("~~~~~\n```python\nx = 1\n```", "x = 1\n"),
        ("````\n```python\nx = 1\n```\n````", "```python\nx = 1\n```\n"),
        ("Try ```x = 2``` or\n```x = 3```\n```python\nx = 1\n```", "x = 1\n"),
        ("```python\r\nx = 1\r\n```\r\n", "x = 1\r\n"),
        ("", ""),
    ],
)
def test_the_last_python_block_is_the_program(response: str, code: str) -> None:
    assert extract_code(response) == code


@pytest.mark.parametrize(
    "response",
    ["```a\n" * 50_000, "```" + "a" * 250_000, "```" + "a" * 250_000 + "`", " " * 250_000, "`" * 250_000],
)
def test_code_is_found_in_linear_time_whatever_a_policy_writes(response: str) -> None:
    started = time.process_time()
    assert extract_code(response) == response
    assert time.process_time() - started < 1.0


def test_a_completion_is_put_behind_its_prompt() -> None:
    row = read_row("def f():\n", "    return 1\n", "", {"tests": [CALL], "completes_prompt": True}, "all")
    assert (row.code, row.prelude) == ("def f():\n    return 1\n", "def f():\n")


def test_a_prelude_of_the_row_is_put_before_the_program() -> None:
    row = read_row("Write f.", "def f(): pass", "", {"tests": [CALL], "prelude": "import math\n"}, "all")
    assert (row.code, row.prelude) == ("import math\ndef f(): pass", "import math\n")


def test_defaults_of_tests_are_filled_in() -> None:
    assert read_tests([CALL]) == [
        {"kind": "call", "function": "f", "args": [1], "kwargs": {}, "accepted": [2], "tolerance": 0.0}
    ]


def test_whole_numbers_of_a_message_are_integers_and_those_of_json_stay_as_they_are() -> None:
    numbers = [{**CALL, "args": [1.0, [2.0, 2.5]], "expected": {"a": 3.0}}]
    (of_message,), (of_json,) = read_tests(numbers), read_tests(json.dumps(numbers))
    assert [type(x) for x in (of_message["args"][0], *of_message["args"][1])] == [int, int, float]
    assert type(of_json["args"][0]) is float


@pytest.mark.parametrize(
    ("metadata", "ground_truth", "cause"),
    [
        ({}, "", "no tests"),
        ({}, "[1]", "no tests"),
        ({}, '{"inputs": ["1"], "outputs": []}', "no tests"),
        ({"tests": []}, "", "not a list"),
        ({"tests": "[{"}, "", "not JSON"),
        ({"tests": [1]}, "", "test 0: kind is None"),
        ({"tests": [{"kind": "magic"}]}, "", "test 0: kind is 'magic', none of call, stdin, asserts"),
        (
            {"tests": [{**CALL, "kind": ["call"]}]},
            "",
            "test 0: kind is ['call'], none of call, stdin, asserts",
        ),
        ({"tests": [CALL, {"kind": "call", "function": "f"}]}, "", "test 1: expected is missing"),
        ({"tests": [{"kind": "asserts", "code": "assert f()"}]}, "", "test 0: entry_point is missing"),
        ({"tests": [{"kind": "stdin", "expected": 1}]}, "", "test 0: expected is missing or not str"),
        ({"tests": [{**CALL, "agrs": []}]}, "", "test 0: unknown keys agrs"),
        ({"tests": [{**CALL, "args": 1}]}, "", "test 0: args is missing or not list"),
        ({"tests": [{**CALL, "tolerance": "1"}]}, "", "test 0: tolerance is missing or not float | int"),
        ({"tests": [CALL, {**CALL, "tolerance": -1}]}, "", "test 1: tolerance is -1, not a number from 0 up"),
        (
            {"tests": '[{"kind": "call", "function": "f", "expected": 1, "tolerance": NaN}]'},
            "",
            "tolerance is nan",
        ),
        ({"tests": [{**CALL, "tolerance": math.inf}]}, "", "test 0: tolerance is inf"),
        ({"tests": [{**CALL, "tolerance": True}]}, "", "test 0: tolerance is True"),
        ({"tests": [{**CALL, "function": ""}]}, "", "test 0: function '' is not a name"),
        ({"tests": [{**CALL, "function": "class"}]}, "", "test 0: function 'class' is not a name"),
        ({"tests": [{**ASSERTS, "entry_point": "f()"}]}, "", "test 0: entry_point 'f()' is not a name"),
        ({"tests": [{"kind": "call", "function": "f", "accepted": []}]}, "", "test 0: accepted is empty"),
        ({"tests": [{**CALL, "args": [NESTED]}]}, "", "test 0: nested deeper than 64"),
        ({"tests": [{**CALL, "expected": NESTED}]}, "", "test 0: nested deeper than 64"),
        ({"tests": "[" * 100_000}, "", "not JSON"),
        ({}, "[" * 100_000, "no tests"),
        ({"tests": [CALL], "score": "half"}, "", "score is 'half'"),
        ({"tests": [CALL], "prelude": 1}, "", "prelude is not text"),
    ],
)
def test_a_row_without_usable_tests_says_what_is_wrong(
    metadata: dict[str, Any], ground_truth: str, cause: str
) -> None:
    with pytest.raises(BadProgramRow) as raised:
        read_row("", "x = 1", ground_truth, metadata, "all")
    assert cause in str(raised.value)


def test_inputs_and_outputs_are_programs_runs() -> None:
    assert read_ground_truth('{"inputs": ["1\\n", ["2", "3"]], "outputs": ["1", ["4"]]}') == [
        {"kind": "stdin", "input": "1\n", "expected": "1"},
        {"kind": "stdin", "input": "2\n3", "expected": "4"},
    ]


def test_inputs_and_outputs_of_a_function_are_calls() -> None:
    table = {"fn_name": "f", "inputs": [[1, [2]], '"a"\n[3]'], "outputs": [[5], 6]}
    tests = read_ground_truth(json.dumps(table))
    assert [(test["function"], test["args"], test["accepted"]) for test in tests] == [
        ("f", [1, [2]], [[5], 5]),
        ("f", ["a", [3]], [6]),
    ]


def test_the_same_program_has_the_same_key_and_another_limit_another() -> None:
    one, same = (read_row("", "x = 1", "", {"tests": [CALL]}, "all") for _ in range(2))
    other = read_row("", "x = 2", "", {"tests": [CALL]}, "all")
    assert one.key("limits") == same.key("limits")
    assert len({one.key("limits"), one.key("others"), other.key("limits")}) == 3


@given(plain)
def test_plain_values_come_back_the_same(value: Any) -> None:
    decoded = wire.decode(wire.encode(value))
    assert (decoded, type(decoded)) == (value, type(value))
    assert repr(decoded) == repr(value) or isinstance(value, set | frozenset | dict | list | tuple)


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.0, "\udc80", -(2**63), 2**4000, -128, 255])
def test_numbers_and_texts_at_the_edges_come_back(value: Any) -> None:
    assert repr(wire.decode(wire.encode(value))) == repr(value)


def test_subclasses_become_what_they_are_derived_from() -> None:
    class Equal(str):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = str.__hash__

    assert type(wire.decode(wire.encode(Equal("x")))) is str


@pytest.mark.parametrize("value", [object(), len, {"a": object()}, iter([]), type])
def test_what_is_not_plain_is_refused(value: object) -> None:
    with pytest.raises(wire.Malformed):
        wire.encode(value)


def test_a_value_that_contains_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(wire.Malformed):
        wire.encode(value)


COUNT = (1).to_bytes(4, "big")


@pytest.mark.parametrize(
    "data",
    [
        b"", b"x", b"NN", b"i", b"i" + COUNT, b"f" + bytes(7), b"c" + bytes(8), b"s" + COUNT + b"\xff",
        b"l" + COUNT, b"l" + bytes([255] * 4) + b"N", b"S" + COUNT + b"l" + bytes(4),
        b"d" + COUNT + b"N", b"d" + COUNT + b"l" + bytes(4) + b"N", b"Z" + COUNT + b"d" + bytes(4),
        (b"l" + COUNT) * 100_000, (b"t" + COUNT) * 70 + b"N",
    ],
)  # fmt: skip
def test_what_no_encoder_makes_is_refused(data: bytes) -> None:
    with pytest.raises(wire.Malformed):
        wire.decode(data)


@given(st.binary(max_size=64))
def test_any_bytes_are_a_value_or_refused(data: bytes) -> None:
    with contextlib.suppress(wire.Malformed):
        wire.encode(wire.decode(data))


def test_a_count_larger_than_what_comes_takes_no_memory() -> None:
    tracemalloc.start()
    with pytest.raises(wire.Malformed):
        wire.decode(b"l" + bytes([255] * 4) + b"N" * 1000)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


@contextlib.contextmanager
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    try:
        yield ends
    finally:
        for end in ends:
            with contextlib.suppress(OSError):
                os.close(end)


def test_a_frame_arrives_whole_and_a_larger_one_is_refused_by_its_header() -> None:
    with pipe() as (reader, writer):
        wire.send(writer, wire.frame(b"x" * 1000, 2000))
        assert wire.receive(reader, 2000) == b"x" * 1000
        os.write(writer, (1 << 31).to_bytes(4, "big"))
        with pytest.raises(wire.TooLarge):
            wire.receive(reader, 2000)
    with pytest.raises(wire.TooLarge):
        wire.frame(b"x" * 1001, 1000)


def test_a_frame_that_does_not_end_is_given_up_at_the_deadline() -> None:
    with pipe() as (reader, writer):
        os.set_blocking(reader, False)
        os.write(writer, b"\0\0\0\5ab")
        with pytest.raises(TimeoutError):
            wire.receive(reader, 100, time.monotonic() + 0.05)


def test_a_reader_that_does_not_read_is_given_up_at_the_deadline() -> None:
    with pipe() as (_, writer):
        os.set_blocking(writer, False)
        with pytest.raises(TimeoutError):
            wire.send(writer, bytes(1 << 24), time.monotonic() + 0.05)


def test_a_frame_cut_off_is_the_end() -> None:
    with pipe() as (reader, writer):
        os.write(writer, b"\0\0\0\5ab")
        os.close(writer)
        with pytest.raises(EOFError):
            wire.receive(reader, 100)


@pytest.mark.parametrize(
    ("value", "expected", "tolerance", "verdict"),
    [
        (1, 1, 0.0, True),
        (1, 2, 0.0, False),
        (1.0, 1, 0.0, True),
        ("1", 1, 0.0, False),
        (None, 0, 0.0, False),
        ((1, [2, (3,)]), [1, [2, [3]]], 0.0, True),
        ([1, 2], [1], 0.0, False),
        ({"a": (1,)}, {"a": [1]}, 0.0, True),
        ({"a": 1}, {"b": 1}, 0.0, False),
        ({1: 2}, {"1": 2}, 0.0, False),
        ({1, 2}, [1, 2], 0.0, False),
        (0.1 + 0.2, 0.3, 0.0, False),
        (0.1 + 0.2, 0.3, 1e-9, True),
        ([1.0, 2.1], [1, 2], 0.01, False),
        (math.nan, 1.0, 1e-6, False),
        (10**400, 1.0, 1e-6, False),
    ],
)
def test_values_agree_as_pythons_do(value: Any, expected: Any, tolerance: float, verdict: bool) -> None:
    assert test_kinds.agree(value, expected, tolerance) is verdict


@pytest.mark.parametrize(
    ("output", "expected", "same"),
    [
        ("1\n2\n", "1\n2", True),
        ("1  \n2\n\n\n", "1\n2", True),
        ("1\r\n2", "1\n2", True),
        (" 1", "1", False),
        ("1\n\n2", "1\n2", False),
        ("", "\n", True),
        ("12", "1\n2", False),
    ],
)
def test_outputs_are_compared_line_by_line(output: str, expected: str, same: bool) -> None:
    assert (test_kinds.lines(output) == test_kinds.lines(expected)) is same


def test_scores_are_all_or_nothing_or_a_fraction() -> None:
    half = grader.ProgramVerdict(("", "wrong", "", "timeout"))
    assert (half.score("all"), half.score("fraction"), half.reason) == (0.0, 0.5, "wrong")
    assert grader.ProgramVerdict(("", "")).score("all") == 1.0


MIXED, FAULT = wire.encode({"reasons": ["", "wrong"]}), wire.encode({"fault": "test 1 is broken"})
UNTIMELY = grader.ProgramVerdict(fault="the tests end, or run out of time, before they call the program")
ENDED = grader.ProgramVerdict(("tests_ended", "tests_ended"))


@pytest.mark.parametrize(
    ("stages", "verdict", "expected"),
    [
        (b"123", MIXED, grader.ProgramVerdict(("", "wrong"))),
        (b"1", FAULT, grader.ProgramVerdict(fault="test 1 is broken said")),
        (b"", FAULT, grader.ProgramVerdict(fault="test 1 is broken said")),
        (b"", b"", grader.ProgramVerdict(fault="the tests did not start: said")),
        (b"1", b"", UNTIMELY),
        (b"12", b"", UNTIMELY),
        (b"123", b"", ENDED),
        (b"123", FAULT, ENDED),
        (b"123", b"junk", ENDED),
        (b"123", wire.encode({"reasons": [""]}), ENDED),
        (b"123", wire.encode({"reasons": ["", "paid"]}), ENDED),
        (b"123", wire.encode(["reasons"]), ENDED),
        (b"12", wire.encode({"fault": 1}), UNTIMELY),
    ],
)
def test_nothing_is_a_fault_once_the_program_has_been_called(
    stages: bytes, verdict: bytes, expected: grader.ProgramVerdict
) -> None:
    assert grader._verdict(stages, verdict, 2, "said") == expected


@pytest.mark.parametrize(
    "raised",
    [
        "StopIteration",
        "StopAsyncIteration",
        "IndexError",
        "KeyError",
        "AttributeError",
        "SystemExit",
        "open",
        "Mine",
    ],
)
def test_an_exception_that_tests_do_not_name_arrives_as_one_that_nothing_expects(raised: str) -> None:
    for named in (
        set(),
        {"ValueError", "RuntimeError"},
        remote_program.named_in("except Exception: getattr(object, open)"),
    ):
        error = remote_program.exception(raised, "t", named)
        assert (type(error), str(error)) == (remote_program.Raised, f"{raised}: t")


@pytest.mark.parametrize(
    ("raised", "test", "kind"),
    [
        ("IndexError", "except IndexError:", IndexError),
        ("IndexError", "except (KeyError, LookupError):", IndexError),
        ("ZeroDivisionError", "assertRaises(ArithmeticError, f)", ZeroDivisionError),
        ("FileNotFoundError", "except IOError:", FileNotFoundError),
        ("ValueError", "assert type(error).__name__ == 'ValueError'", ValueError),
        ("UnicodeDecodeError", "except UnicodeDecodeError:", remote_program.Raised),
        ("StopIteration", "except StopIteration:", remote_program.Raised),
        ("GeneratorExit", "except GeneratorExit:", remote_program.Raised),
        ("LookupError", "except IndexError:", remote_program.Raised),
    ],
)
def test_an_exception_arrives_as_its_class_where_the_test_names_it_or_a_base(
    raised: str, test: str, kind: type[Exception]
) -> None:
    assert type(remote_program.exception(raised, "t", remote_program.named_in(test))) is kind


def test_a_call_that_should_stop_reads_no_further_row() -> None:
    read: list[reward_pb2.TextRow] = []
    call = CallContext(common_pb2.Call(), time.monotonic() + 60)

    class Row:
        """A row that is cancelled while it is read."""

        prompt = response = ground_truth = ""

        @property
        def metadata(self) -> struct_pb2.Struct:
            read.append(reward_pb2.TextRow())
            call.cancelled = True
            return struct_pb2.Struct()

    scorer = SandboxScorer.__new__(SandboxScorer)
    scorer._score = "all"
    with pytest.raises(CallCancelled):
        scorer.score_texts([Row()] * 5, call)  # type: ignore[list-item]
    assert len(read) == 1


def test_half_a_surrogate_pair_in_a_test_is_the_error_of_its_row_alone() -> None:
    """JSON has them, messages do not: in the text of an error they made the whole call fail."""

    class FaultyGrader:
        def submit(self, program: Submission) -> futures.Future[grader.ProgramVerdict]:
            (done := futures.Future()).set_result(grader.ProgramVerdict(fault="the prelude raises \ud800"))
            return done

    scorer = SandboxScorer.__new__(SandboxScorer)
    scorer._score, scorer._grader = "all", FaultyGrader()  # type: ignore[assignment]
    rows = [reward_pb2.TextRow() for _ in range(2)]
    rows[0].metadata["tests"] = json.dumps([{**CALL, "\ud800": 1}])
    rows[1].metadata["tests"] = json.dumps([CALL])
    first, second = scorer.score_texts(rows, CallContext(common_pb2.Call(), time.monotonic() + 60))
    assert first.error == "test 0: unknown keys \\ud800"
    assert second.error == "sandbox: the prelude raises \\ud800"


def test_the_cause_of_a_fault_is_cut_whoever_sends_it() -> None:
    """Tests are code of a data set and can write to the pipe of the verdict."""
    verdict = grader._verdict(b"1", wire.encode({"fault": "x" * 10**6}), 2, "said")
    assert verdict.fault == f"{'x' * test_kinds.MAX_CAUSE} said"


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="bwrap is not on PATH: install bubblewrap"):
        grader.choose(SandboxTable())


def test_without_isolation_only_the_explicit_option_starts_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    chosen = grader.choose(SandboxTable(allow_unsandboxed=True))
    assert isinstance(chosen, isolation.Unsandboxed)
    assert "UNSANDBOXED" in caplog.text


def test_control_groups_of_services_that_are_gone_are_removed(tmp_path: Any) -> None:
    controllers = [cgroups.Controller("pids", tmp_path, "pids.max")]
    gone, living = (tmp_path / f"{cgroups.PREFIX}{pid}-0" for pid in (2**22 + 1, os.getpid()))
    gone.mkdir()
    living.mkdir()
    cgroups.sweep(controllers)
    assert [path.name for path in tmp_path.iterdir()] == [living.name]


LIMITS = {"pids": 5, "memory": 1000, "cpu": 100_000}


@pytest.fixture
def version_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The group of this process in a host with control groups of version 2, as files: groups come with theirs."""

    def make(group: Path, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        os.makedirs(group, exist_ok=exist_ok)
        for name in ("cgroup.procs", "pids.max", "memory.max", "memory.swap.max", "cpu.max"):
            (group / name).touch()

    monkeypatch.setattr(Path, "mkdir", make)
    monkeypatch.setattr(Path, "rmdir", shutil.rmtree)
    own = tmp_path / "mount/ours"
    own.mkdir()
    (own / "cgroup.type").write_text("domain\n")
    (own / "cgroup.controllers").write_text("cpuset cpu memory pids\n")
    (own / "cgroup.subtree_control").write_text("cpuset\n")
    (own / "cgroup.procs").write_text("17\n")
    _mounted(tmp_path, monkeypatch, "/ours")
    return own


def _mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str) -> None:
    mounts, groups = tmp_path / "mountinfo", tmp_path / "cgroup"
    mounts.write_text(f"41 31 0:38 / {tmp_path}/mount rw,relatime - cgroup2 cgroup2 rw\n")
    groups.write_text(f"0::{own}\n")
    monkeypatch.setattr(cgroups, "MOUNTS", mounts)
    monkeypatch.setattr(cgroups, "OWN", groups)


def test_version_2_controllers_are_enabled_once_the_processes_have_moved_to_a_leaf(version_2: Path) -> None:
    found = cgroups.usable(LIMITS)
    assert {(controller.name, controller.parent) for controller in found} == {
        ("pids", version_2),
        ("memory", version_2),
        ("cpu", version_2),
    }
    assert (version_2 / cgroups.LEAF / "cgroup.procs").read_text() == "17"
    # The kernel takes each; the file that stands for it keeps the last.
    assert (version_2 / "cgroup.subtree_control").read_text() == "+pids"


def test_the_root_of_version_2_keeps_its_processes(version_2: Path) -> None:
    (version_2 / "cgroup.type").unlink()
    assert len(cgroups.usable(LIMITS)) == 3
    assert not (version_2 / cgroups.LEAF).exists()
    assert (version_2 / "cgroup.subtree_control").read_text() == "+pids"


def test_a_service_started_in_the_leaf_uses_the_group_above(
    version_2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (version_2 / "cgroup.subtree_control").write_text("cpu memory pids\n")
    _mounted(tmp_path, monkeypatch, f"/ours/{cgroups.LEAF}")
    assert [controller.parent for controller in cgroups.usable(LIMITS)] == [version_2] * 3
    assert (version_2 / "cgroup.subtree_control").read_text() == "cpu memory pids\n"


def test_where_nothing_may_be_enabled_no_process_is_moved(
    version_2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: path.name != "cgroup.subtree_control")
    cgroups.usable(LIMITS)
    assert not (version_2 / cgroups.LEAF).exists()
    assert (version_2 / "cgroup.subtree_control").read_text() == "cpuset\n"


def test_version_2_groups_have_their_limits_and_may_not_swap(version_2: Path) -> None:
    group = cgroups.make(cgroups.usable(LIMITS), "group", LIMITS)
    (directory,) = group.directories
    files = ("pids.max", "memory.max", "memory.swap.max", "cpu.max")
    assert [(directory / name).read_text() for name in files] == ["5", "1000", "0", "100000"]
    group.remove()


def test_a_start_that_is_interrupted_leaves_no_process_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(info: int) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(bubblewrap, "_first_pid", interrupted)
    isolated = bubblewrap.Bubblewrap.__new__(bubblewrap.Bubblewrap)
    isolated._quota = sandboxed_process.Quota(1.0, 1, 1)
    info, gate = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(100)"], stderr=subprocess.PIPE
    ) as waiting:
        with pytest.raises(KeyboardInterrupt):
            isolated._open_gate(waiting, info, gate)
        assert waiting.returncode is not None
    os.close(info)
    os.close(gate)


@contextlib.contextmanager
def many_descriptors() -> Iterator[None]:
    """A block in which new descriptors have numbers beyond those that select can take."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, before[1]))
    with contextlib.ExitStack() as opened:
        try:
            for _ in range(1100):
                opened.enter_context(open(os.devnull, "rb"))
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.fixture
def sandboxed(tmp_path: Path) -> Iterator[sandboxed_process.SandboxedProcess]:
    """A process as a sandbox, with a control group."""
    (tmp_path / "group").mkdir()
    with many_descriptors():
        process = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(100)"], stderr=subprocess.PIPE
        )
        started = sandboxed_process.SandboxedProcess(process, sandboxed_process.Quota(1.0, 1, 1))
        started.group = cgroups.ControlGroup([tmp_path / "group"])
        started.set_first_process(process.pid)
        try:
            yield started
        finally:
            process.kill()
            process.wait()


def test_a_sandbox_ends_where_a_thousand_descriptors_are_open(
    sandboxed: sandboxed_process.SandboxedProcess, tmp_path: Path
) -> None:
    assert sandboxed.end() == ""
    assert list(tmp_path.iterdir()) == []


def test_a_sandbox_that_does_not_end_in_time_still_gives_its_control_group_up(
    sandboxed: sandboxed_process.SandboxedProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda *_: None)
    monkeypatch.setattr(isolation, "END_TIMEOUT_S", 0.05)
    with pytest.raises(subprocess.TimeoutExpired):
        sandboxed.end()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("failing", ["memory_file", "job_file", "_first_pid"])
def test_a_sandbox_that_cannot_be_started_leaves_no_descriptor_open(
    failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "no space")

    class Waiting:
        """A command that waits, in place of bwrap."""

        def line(self, *_: Any) -> list[str]:
            return ["sleep", "100"]

    monkeypatch.setattr(bubblewrap, failing, fail)
    isolated = bubblewrap.Bubblewrap.__new__(bubblewrap.Bubblewrap)
    isolated._quota = sandboxed_process.Quota(1.0, 1, 1)
    isolated._filter, isolated._limits, isolated._as_root = b"", {}, False
    isolated._command = Waiting()  # type: ignore[assignment]
    before = os.listdir("/proc/self/fd")
    with open(os.devnull, "wb") as stdout, pytest.raises((OSError, isolation.SandboxFailed)):
        isolated.start("candidate", {}, stdout.fileno(), [])
    assert os.listdir("/proc/self/fd") == before


SPINNING = """
import os, sys, time
def spin(seconds):
    until = time.process_time() + seconds
    while time.process_time() < until: pass
for _ in range(2):
    if (child := os.fork()) == 0:
        if (grandchild := os.fork()) == 0:
            spin(0.15)
            os._exit(0)
        os.waitpid(grandchild, 0)
        os._exit(0)
    os.waitpid(child, 0)
spin(0.15)
print("ready", flush=True)
sys.stdin.read()
"""


def test_cpu_time_is_that_of_all_processes_and_of_those_that_have_ended() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SPINNING], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as spinning:
        assert spinning.stdout is not None
        spinning.stdout.readline()
        assert 0.4 < usage.cpu_time_s(spinning.pid) < 1.5
        spinning.communicate()
    assert usage.cpu_time_s(spinning.pid) == 0.0
