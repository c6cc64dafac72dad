"""The pure parts of the code grader: rows, values on the wire, comparison, limits of the host."""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import struct_pb2
from hypothesis import given
from hypothesis import strategies as st

from rlhf.config import SandboxTable
from rlhf.errors import CallCancelled, ConfigError
from rlhf.v1 import common_pb2, reward_pb2
from services.reward.sandbox import cgroups, grader, isolation, judge, wire
from services.reward.sandbox.program import BadRow, extract_code, read_ground_truth, read_row, read_tests
from services.reward.sandbox.scorer import SandboxScorer
from services.worker import CallContext

CALL = {"kind": "call", "function": "f", "args": [1], "expected": 2}
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
        ({"tests": [CALL, {"kind": "call", "function": "f"}]}, "", "test 1: expected is missing"),
        ({"tests": [{"kind": "asserts", "code": "assert f()"}]}, "", "test 0: entry_point is missing"),
        ({"tests": [{"kind": "stdin", "expected": 1}]}, "", "test 0: expected is missing or not str"),
        ({"tests": [{**CALL, "agrs": []}]}, "", "test 0: unknown keys agrs"),
        ({"tests": [{**CALL, "args": 1}]}, "", "test 0: args is missing or not list"),
        ({"tests": [{**CALL, "tolerance": "1"}]}, "", "test 0: tolerance is missing or not float | int"),
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
    with pytest.raises(BadRow) as raised:
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
def test_plain_values_come_back_the_same_over_json(value: Any) -> None:
    decoded = wire.decode(wire.unpack(wire.pack(wire.encode(value), 1 << 30)[wire.HEADER_BYTES :]))
    assert (decoded, type(decoded)) == (value, type(value))
    assert repr(decoded) == repr(value) or isinstance(value, set | frozenset | dict | list | tuple)


def test_numbers_that_are_none_come_back() -> None:
    assert math.isnan(wire.decode(wire.unpack(wire.pack(wire.encode(math.nan), 100)[wire.HEADER_BYTES :])))


def test_subclasses_become_what_they_are_derived_from() -> None:
    class Equal(str):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = str.__hash__

    assert type(wire.encode(Equal("x"))) is str


@pytest.mark.parametrize("value", [object(), len, {"a": object()}, iter([]), type])
def test_what_is_not_plain_is_refused(value: object) -> None:
    with pytest.raises(wire.Malformed):
        wire.encode(value)


def test_a_value_that_contains_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(wire.Malformed):
        wire.encode(value)


@pytest.mark.parametrize(
    "data",
    [
        {}, {"tuple": 1}, {"tuple": [], "list": []}, {"object": []}, {"int": 5}, {"int": "zz"}, {"set": [[]]},
        {"dict": [[1]]}, {"dict": [[[], 1]]}, {"dict": 3}, {"bytes": "x"}, {"bytes": 1}, {"complex": [1]},
        {"complex": ["a", 1]},
    ],
)  # fmt: skip
def test_what_no_encoder_makes_is_refused(data: Any) -> None:
    with pytest.raises(wire.Malformed):
        wire.decode(data)


@pytest.mark.parametrize(
    "payload", [b"", b"{", b'{"a": 1, "a": 2}', b"\xff", b"[" * 100_000, b"1" * 10_000, b"{} {}"]
)
def test_what_is_not_json_is_refused(payload: bytes) -> None:
    with pytest.raises(wire.Malformed):
        wire.unpack(payload)


def test_a_frame_arrives_whole_and_a_larger_one_is_refused_by_its_header() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        wire.send(ours.fileno(), wire.pack("x" * 1000, 2000))
        assert wire.unpack(wire.receive(theirs.fileno(), 2000)) == "x" * 1000
        ours.send((1 << 31).to_bytes(4, "big"))
        with pytest.raises(wire.TooLarge):
            wire.receive(theirs.fileno(), 2000)
    with pytest.raises(wire.TooLarge):
        wire.pack("x" * 1000, 1000)


def test_a_frame_that_does_not_end_is_given_up_at_the_deadline() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        ours.send(b"\0\0\0\5ab")
        with pytest.raises(TimeoutError):
            wire.receive(theirs.fileno(), 100, time.monotonic() + 0.05)


def test_a_reader_that_does_not_read_is_given_up_at_the_deadline() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        with pytest.raises(TimeoutError):
            wire.send(ours.fileno(), bytes(1 << 24), time.monotonic() + 0.05)


def test_a_frame_cut_off_is_the_end() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.send(b"\0\0\0\5ab")
        ours.close()
        with pytest.raises(EOFError):
            wire.receive(theirs.fileno(), 100)


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
    assert judge.agree(value, expected, tolerance) is verdict


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
    assert (judge.lines(output) == judge.lines(expected)) is same


def test_scores_are_all_or_nothing_or_a_fraction() -> None:
    half = grader.Verdict(("", "wrong", "", "timeout"))
    assert (half.score("all"), half.score("fraction"), half.reason) == (0.0, 0.5, "wrong")
    assert grader.Verdict(("", "")).score("all") == 1.0


@pytest.mark.parametrize(
    ("heard", "expected"),
    [
        (b'\n{"reasons": ["", "wrong"]}', grader.Verdict(("", "wrong"))),
        (b'{"fault": "the tests do not load"}', grader.Verdict(fault="the tests do not load said")),
        (b' \n {"reasons": ["", "wrong"]}', grader.Verdict(("", "wrong"))),
        (b" \n", grader.Verdict(("tests_ended", "tests_ended"))),
        (b' \n{"reasons": [""', grader.Verdict(("tests_ended", "tests_ended"))),
        (b" ", grader.Verdict(fault="the tests end, or run out of time, before they call the program")),
        (b" \n ", grader.Verdict(fault="the tests end, or run out of time, before they call the program")),
        (b"", grader.Verdict(fault="the tests did not start: said")),
    ],
)
def test_silence_is_a_fault_until_the_test_in_turn_has_called_the_program(
    heard: bytes, expected: grader.Verdict
) -> None:
    assert grader._verdict(heard, 2, "said") == expected


@pytest.mark.parametrize(
    "raised", ["StopIteration", "StopAsyncIteration", "SystemExit", "GeneratorExit", "open"]
)
def test_what_would_end_a_loop_or_the_judge_in_silence_arrives_as_an_error(raised: str) -> None:
    error = judge._exception({"raised": raised, "text": "t"})
    assert type(error) in (RuntimeError, Exception)
    assert error.args == ("t",)


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


@pytest.fixture
def version_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The group of this process in a host with control groups of version 2, as files: groups come with theirs."""

    def make(group: Path, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        os.makedirs(group, exist_ok=exist_ok)
        for name in ("cgroup.procs", "pids.max", "memory.max", "memory.swap.max"):
            (group / name).touch()

    monkeypatch.setattr(Path, "mkdir", make)
    monkeypatch.setattr(Path, "rmdir", shutil.rmtree)
    own = tmp_path / "mount/ours"
    own.mkdir()
    (own / "cgroup.type").write_text("domain\n")
    (own / "cgroup.controllers").write_text("cpu memory pids\n")
    (own / "cgroup.subtree_control").write_text("cpu\n")
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
    found = cgroups.usable()
    assert {(controller.name, controller.parent) for controller in found} == {
        ("pids", version_2),
        ("memory", version_2),
    }
    assert (version_2 / cgroups.LEAF / "cgroup.procs").read_text() == "17"
    assert (version_2 / "cgroup.subtree_control").read_text() == "+memory +pids"


def test_the_root_of_version_2_keeps_its_processes(version_2: Path) -> None:
    (version_2 / "cgroup.type").unlink()
    assert len(cgroups.usable()) == 2
    assert not (version_2 / cgroups.LEAF).exists()
    assert (version_2 / "cgroup.subtree_control").read_text() == "+memory +pids"


def test_a_service_started_in_the_leaf_uses_the_group_above(
    version_2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (version_2 / "cgroup.subtree_control").write_text("memory pids\n")
    _mounted(tmp_path, monkeypatch, f"/ours/{cgroups.LEAF}")
    assert [controller.parent for controller in cgroups.usable()] == [version_2, version_2]
    assert (version_2 / "cgroup.subtree_control").read_text() == "memory pids\n"


def test_where_nothing_may_be_enabled_no_process_is_moved(
    version_2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: path.name != "cgroup.subtree_control")
    cgroups.usable()
    assert not (version_2 / cgroups.LEAF).exists()
    assert (version_2 / "cgroup.subtree_control").read_text() == "cpu\n"


def test_version_2_groups_may_not_swap(version_2: Path) -> None:
    group = cgroups.make(cgroups.usable(), "group", {"pids": 5, "memory": 1000})
    (directory,) = group.directories
    assert [(directory / name).read_text() for name in ("pids.max", "memory.max", "memory.swap.max")] == [
        "5", "1000", "0",
    ]  # fmt: skip
    group.remove()


def test_a_start_that_is_interrupted_leaves_no_process_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(info: int) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(isolation, "_first_pid", interrupted)
    bubblewrap = isolation.Bubblewrap.__new__(isolation.Bubblewrap)
    info, gate = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(100)"], stderr=subprocess.PIPE
    ) as waiting:
        with pytest.raises(KeyboardInterrupt):
            bubblewrap._let_go(waiting, info, gate)
        assert waiting.returncode is not None
    os.close(info)
    os.close(gate)
