"""Programs that attack the code grader.

Each defines `attack`, which returns "escaped" where the attack has worked and anything else where it has not. The
tests expect "escaped", so that an attack that works passes them. They ask for `solve` too, whose answer no program
knows: who passes that has forged the verdict.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

HEAD = """
import ctypes, os, signal, socket, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
NUMBERS = {"x86_64": dict(keyctl=250, add_key=248, ptrace=101, process_vm_readv=310, bpf=321, perf_event_open=298,
                          userfaultfd=323, open_by_handle_at=304, memfd_create=319, io_uring_setup=425, clone3=435,
                          pidfd_getfd=438, open_tree=428, fsopen=430, shmget=29, chroot=161, init_module=175),
           "aarch64": dict(keyctl=219, add_key=217, ptrace=117, process_vm_readv=270, bpf=280, perf_event_open=241,
                           userfaultfd=282, open_by_handle_at=265, memfd_create=279, io_uring_setup=425, clone3=435,
                           pidfd_getfd=438, open_tree=428, fsopen=430, shmget=194, chroot=51, init_module=105)}

def system_call(name, *args):
    if libc.syscall(NUMBERS[os.uname().machine][name], *args) != -1:
        return "escaped"
    return os.strerror(ctypes.get_errno())

def reads(*paths):
    for path in paths:
        try:
            with open(path, "rb") as file:
                if file.read(64):
                    return "escaped"
        except OSError:
            pass
    return "held"

def writes(*paths):
    for path in paths:
        try:
            with open(path, "ab") as file:
                file.write(b"MARK")
            return "escaped"
        except OSError:
            pass
    return "held"
"""


@dataclass(frozen=True)
class Attack:
    """A program and the reasons for which it may fail.

    Attributes:
        code: Its source; MARK stands for a text by which traces of it can be found on the host.
        reasons: As `services.reward.sandbox.grader.REASONS`.
        tests: What it attacks, where not the tests of all.
    """

    code: str
    reasons: tuple[str, ...]
    tests: tuple[dict[str, str], ...] = ()


def _attack(code: str, *reasons: str) -> Attack:
    return Attack(HEAD + textwrap.dedent(code), reasons or ("wrong",))


def _in_function(code: str, *reasons: str) -> Attack:
    return _attack(f"def attack():\n{textwrap.indent(textwrap.dedent(code).strip(), '    ')}\n", *reasons)


def _on_loop(raised: str, tests: str) -> Attack:
    """An exception that ends a loop over test cases as if there were no more of them."""
    cases = {"kind": "asserts", "code": f"cases = [(1, 2), (2, 4)]\n{tests}", "entry_point": "f"}
    return Attack(f"def f(x):\n    raise {raised}\n", ("wrong",), (cases,))


RESOURCES = {
    "fork bomb": _in_function(
        """
        while True:
            try:
                os.fork()
            except OSError:
                pass
        """,
        "died",
        "timeout",
        "wrong",
        "malformed",
        "raised",
    ),
    "more processes than allowed": _in_function(
        """
        for count in range(100):
            try:
                if os.fork() == 0:
                    time.sleep(100)
            except OSError:
                return count
        return "escaped"
        """
    ),
    "more threads than allowed": _in_function(
        """
        threading.stack_size(65536)
        for count in range(100):
            try:
                threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
            except RuntimeError:
                return count
        return "escaped"
        """
    ),
    "memory in one process": _in_function(
        """
        blocks = []
        for _ in range(64):
            blocks.append(bytearray(64 << 20))
        return "escaped"
        """,
        "raised",
        "died",
    ),
    "memory over many processes": _in_function(
        """
        # Each keeps below its own limit; together they hold more than the sandbox may.
        ends = []
        for _ in range(10):
            end, child_end = os.pipe()
            if os.fork() == 0:
                block = bytearray(100 << 20)
                os.write(child_end, b"1")
                time.sleep(100)
            os.close(child_end)
            ends.append(end)
        held = sum(os.read(end, 1) == b"1" for end in ends)
        return "escaped" if held == 10 else held
        """,
        "wrong",
        "died",
        "raised",
        "timeout",
    ),
    "a list that doubles": _in_function("x = [0]\nwhile True:\n    x += x", "raised", "died"),
    "a huge integer": _in_function("return 1 << (1 << 40)", "raised", "died"),
    "deep recursion": _in_function(
        "sys.setrecursionlimit(10**9)\nreturn attack()", "died", "raised", "timeout"
    ),
    "disk fill": _in_function(
        """
        written = 0
        try:
            for number in range(1000):
                with open(f"/tmp/MARK{number}", "wb") as file:
                    written += file.write(bytes(1 << 20))
        except OSError:
            pass
        return "escaped" if written > 64 << 20 else written
        """
    ),
    "disk fill outside /tmp": _in_function(
        'return writes("/MARK", "/dev/MARK", "/dev/shm/MARK", "/sandbox/MARK", "/var/tmp/MARK")'
    ),
    "one huge sparse file": _in_function(
        """
        with open("/tmp/MARK", "wb") as file:
            file.truncate(1 << 40)
        return "escaped"
        """,
        "raised",
        "died",
    ),
    "many open files": _in_function(
        """
        files = []
        try:
            for _ in range(5000):
                files.append(open("/dev/null"))
        except OSError:
            return len(files)
        return "escaped"
        """
    ),
    "anonymous memory files": _in_function('return system_call("memfd_create", b"MARK", 0)'),
    "System V memory": _in_function('return system_call("shmget", 0, 1 << 30, 0o1600)'),
    "endless loop": _in_function("while True:\n    pass", "died", "timeout"),
    "endless loop that ignores signals": _in_function(
        """
        for number in range(1, 65):
            try:
                signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError):
                pass
        while True:
            pass
        """,
        "died",
        "timeout",
    ),
    "sleeping loop": _in_function("while True:\n    time.sleep(1)", "timeout"),
    "endless import": _attack("while True:\n    time.sleep(0.01)", "timeout"),
    "endless regular expression": _in_function(
        'import re\nreturn re.match(r"(a+)+$", "a" * 64 + "b")', "died", "timeout"
    ),
    "raising its limits": _in_function(
        """
        import resource
        for limit in ("RLIMIT_AS", "RLIMIT_CPU", "RLIMIT_NPROC", "RLIMIT_FSIZE", "RLIMIT_NOFILE"):
            number = getattr(resource, limit)
            try:
                resource.setrlimit(number, (resource.getrlimit(number)[1] + 1,) * 2)
                return "escaped"
            except (OSError, ValueError):
                pass
        """
    ),
    "huge return value": _in_function('return "x" * (10 << 20)', "output_limit"),
    "huge printed output": _in_function(
        """
        while True:
            os.write(1, b"x" * 65536)
            os.write(2, b"x" * 65536)
        """,
        "died",
        "timeout",
    ),
    "NUL and ANSI output": _in_function(
        r'print("\0\x1b[2J\x1b]0;MARK\x07" * 1000, flush=True)' "\n" r'return "\0\x1b[2J"'
    ),
    "deeply nested return value": _in_function(
        "x = []\nfor _ in range(100000):\n    x = [x]\nreturn x", "raised", "died"
    ),
    "a value that contains itself": _in_function("x = []\nx.append(x)\nreturn x", "raised"),
}

PROCESSES = {
    "kill the parent": _in_function(
        "os.kill(os.getppid(), signal.SIGKILL)\ntime.sleep(100)", "timeout", "died", "raised"
    ),
    "kill everything": _in_function(
        "os.kill(-1, signal.SIGKILL)\ntime.sleep(100)", "timeout", "died", "raised"
    ),
    "kill process 1": _in_function(
        "os.kill(1, signal.SIGKILL)\ntime.sleep(100)", "timeout", "died", "raised"
    ),
    "kill every number": _in_function(
        """
        for number in range(2, 70000):
            if number != os.getpid():
                try:
                    os.kill(number, signal.SIGKILL)
                    return "escaped"
                except OSError:
                    pass
        """
    ),
    "stop itself": _in_function("os.kill(os.getpid(), signal.SIGSTOP)", "timeout", "wrong"),
    "orphaned daemon": _in_function(
        """
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.execv(sys.executable, [sys.executable, "-sS", "-c", "import time; time.sleep(1000)", "MARK"])
            os._exit(0)
        time.sleep(0.3)
        return "left it"
        """
    ),
    "daemons that respawn": _in_function(
        """
        def respawn():
            while True:
                if os.fork():
                    os._exit(0)
                os.setsid()
                time.sleep(0.001)
        if os.fork() == 0:
            respawn()
        time.sleep(0.2)
        return "left it"
        """
    ),
    "ptrace": _in_function('return system_call("ptrace", 16, os.getppid(), 0, 0)'),
    "read memory of the parent": _in_function(
        'return system_call("process_vm_readv", os.getppid(), 0, 0, 0, 0, 0)'
    ),
    "take descriptors of the parent": _in_function('return system_call("pidfd_getfd", 0, 0, 0)'),
}

NETWORK = {
    "TCP": _in_function('socket.create_connection(("127.0.0.1", PORT), 1)\nreturn "escaped"', "raised"),
    "TCP over IPv6": _in_function(
        'socket.socket(socket.AF_INET6).connect(("::1", PORT))\nreturn "escaped"', "raised"
    ),
    "UDP": _in_function(
        """
        sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sender.sendto(b"MARK", ("127.0.0.1", PORT))
        return "escaped"
        """,
        "raised",
    ),
    "listening": _in_function('socket.socket().bind(("0.0.0.0", 0))\nreturn "escaped"', "raised"),
    "abstract sockets of the host": _in_function(
        'socket.socket(socket.AF_UNIX).connect("\\0MARK")\nreturn "escaped"', "raised"
    ),
    "netlink": _in_function(
        'socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)\nreturn "escaped"', "raised"
    ),
    "raw packets": _in_function(
        'socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)\nreturn "escaped"', "raised"
    ),
    "virtual machine sockets": _in_function(
        'socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)\nreturn "escaped"', "raised"
    ),
    "the kernel's crypto sockets": _in_function(
        'socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET, 0)\nreturn "escaped"', "raised"
    ),
    "name resolution": _in_function('socket.gethostbyname("example.com")\nreturn "escaped"', "raised"),
}

FILES = {
    "files of the host": _in_function(
        'return reads("/etc/passwd", "/etc/shadow", "/etc/hostname", "/proc/version", "SECRET_FILE")'
    ),
    "home directories": _in_function(
        """
        for path in ("/home", "/root", "/var", "/run", "/sys", "/boot", "/opt", "/mnt"):
            try:
                if set(os.listdir(path)) - {".pyenv"}:
                    return "escaped"
            except OSError:
                pass
        """
    ),
    "/proc": _in_function(
        'return reads("/proc/1/environ", "/proc/self/environ", "/proc/self/maps", "/proc/cpuinfo")'
    ),
    "environment secrets": _in_function(
        'return "escaped" if "SECRET_VALUE" in str(os.environ) or "SECRET_NAME" in os.environ else "held"'
    ),
    "environment in its memory": _in_function(
        """
        environ = ctypes.POINTER(ctypes.c_char_p).in_dll(libc, "environ")
        found, index = [], 0
        while environ[index]:
            found.append(environ[index])
            index += 1
        return "escaped" if any(b"SECRET_VALUE" in text for text in found) else "held"
        """
    ),
    "our own sources": _in_function(
        """
        ours = "/sandbox/services/reward/sandbox"
        return reads(f"{ours}/judge.py", f"{ours}/grader.py", "OUR_SOURCE")
        """
    ),
    "writing the interpreter": _in_function(
        "import json\nreturn writes(sys.executable, os.__file__, json.__file__)"
    ),
    "symlinks out": _in_function(
        """
        os.symlink("/proc/1/root/etc/passwd", "/tmp/a")
        os.symlink("../../../../../../etc/passwd", "/tmp/b")
        os.symlink("SECRET_FILE", "/tmp/c")
        return reads("/tmp/a", "/tmp/b", "/tmp/c")
        """
    ),
    "descriptors left open": _in_function(
        """
        import stat
        for fd in range(64):
            try:
                mode = os.fstat(fd).st_mode
            except OSError:
                continue
            if stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISFIFO(mode):
                return "escaped"
        """
    ),
    "climbing out by descriptors": _in_function(
        """
        for fd in range(64):
            for path in ("..", "../..", "../../../../etc/passwd"):
                try:
                    os.close(os.open(path, os.O_RDONLY, dir_fd=fd))
                    return "escaped"
                except OSError:
                    pass
        """
    ),
    "open by handle": _in_function('return system_call("open_by_handle_at", 3, 0, 0)'),
    "block devices": _in_function(
        """
        for name, device in (("null", os.makedev(1, 1)), ("disk", os.makedev(8, 0))):
            try:
                os.mknod(f"/tmp/{name}", 0o600 | 0o060000, device)
                return "escaped"
            except OSError:
                pass
        """
    ),
}

KERNEL = {
    "nested user namespace": _in_function('return "escaped" if libc.unshare(0x10000000) == 0 else "held"'),
    "nested namespaces by clone": _in_function(
        """
        for flag in (0x10000000, 0x20000000, 0x40000000, 0x00020000):
            if libc.syscall({"x86_64": 56, "aarch64": 220}[os.uname().machine], flag | 17, 0, 0, 0, 0) != -1:
                return "escaped"
        """
    ),
    "nested namespaces by clone3": _in_function(
        """
        arguments = ctypes.create_string_buffer(bytes([0, 0, 0, 16]) + bytes(84))
        return system_call("clone3", arguments, 88)
        """
    ),
    "entering another namespace": _in_function(
        'return "escaped" if libc.setns(0, 0) == 0 or ctypes.get_errno() != 38 else "held"'
    ),
    "mount": _in_function(
        'return "escaped" if libc.mount(b"none", b"/tmp", b"tmpfs", 0, 0) == 0 else "held"'
    ),
    "remount the root writable": _in_function(
        'return "escaped" if libc.mount(b"none", b"/", b"", 0x20, 0) == 0 else "held"'
    ),
    "unmount": _in_function('return "escaped" if libc.umount2(b"/tmp", 2) == 0 else "held"'),
    "mounts by descriptor": _in_function(
        """
        tried = [system_call("fsopen", b"tmpfs", 0), system_call("open_tree", -100, b"/", 1)]
        return "escaped" if "escaped" in tried else "held"
        """
    ),
    "chroot": _in_function('return system_call("chroot", b"/tmp")'),
    "keyctl": _in_function('return system_call("keyctl", 0, -3, 1)'),
    "adding keys": _in_function('return system_call("add_key", b"user", b"MARK", b"x", 1, -3)'),
    "io_uring": _in_function('return system_call("io_uring_setup", 8, ctypes.create_string_buffer(256))'),
    "bpf": _in_function('return system_call("bpf", 0, ctypes.create_string_buffer(128), 128)'),
    "performance counters": _in_function(
        'return system_call("perf_event_open", ctypes.create_string_buffer(128), 0, -1, -1, 0)'
    ),
    "userfaultfd": _in_function('return system_call("userfaultfd", 1)'),
    "kernel modules": _in_function('return system_call("init_module", 0, 0, b"")'),
    "becoming root": _in_function(
        """
        for become, who in ((os.setuid, 0), (os.seteuid, 0), (os.setgid, 0), (os.setegid, 0), (os.setgroups, [0])):
            try:
                become(who)
                return "escaped"
            except OSError:
                pass
        return "escaped" if 0 in (os.getuid(), os.geteuid(), os.getgid(), *os.getgroups()) else "held"
        """
    ),
    "capabilities": _in_function(
        """
        header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        libc.capget(header, data)
        return "escaped" if data[0] or data[3] else "held"
        """
    ),
    "terminal input": _in_function(
        """
        import fcntl
        for fd in range(3):
            try:
                fcntl.ioctl(fd, 0x5412, b"x")
                return "escaped"
            except OSError:
                pass
        """
    ),
}

VERDICTS = {
    "exit code 0 by sys.exit": _in_function("sys.exit(0)", "raised"),
    "exit code 0 by os._exit": _in_function("os._exit(0)", "died"),
    "exit while it loads": _attack("os._exit(0)", "died"),
    "an object equal to everything": _in_function(
        """
        class Equal:
            __eq__ = lambda self, other: True
            __hash__ = lambda self: 0
        return Equal()
        """,
        "raised",
    ),
    "text equal to everything": _in_function(
        """
        class Equal(str):
            __eq__ = lambda self, other: True
            __hash__ = str.__hash__
        return Equal("x")
        """
    ),
    "a list equal to everything": _in_function(
        """
        class Equal(list):
            __eq__ = lambda self, other: True
            __len__ = lambda self: 7
        return Equal()
        """
    ),
    "a number equal to everything": _in_function(
        """
        class Equal(int):
            __eq__ = lambda self, other: True
            __hash__ = int.__hash__
        return Equal(1)
        """
    ),
    "a frame walk": _in_function(
        """
        import gc
        frame, found = sys._getframe(), []
        while frame:
            found += [*frame.f_locals.values(), *frame.f_globals.values()]
            frame = frame.f_back
        for value in [*found, *gc.get_objects()]:
            if isinstance(value, dict) and ("accepted" in value or "expected" in value):
                return value.get("accepted", value.get("expected"))
        """
    ),
    "patched builtins": _attack(
        """
        import builtins
        for name in ("all", "any", "isinstance", "bool", "zip", "len"):
            setattr(builtins, name, lambda *args, **kwargs: True)
        def attack():
            return 0
        """,
        "wrong",
        "died",
        "malformed",
        "raised",
        "timeout",
    ),
    "patched assert": _attack(
        """
        import builtins
        builtins.AssertionError = builtins.Exception = type("Never", (BaseException,), {})
        def attack():
            return 0
        """,
        "wrong",
        "raised",
    ),
    "patched unittest": _attack(
        """
        import unittest
        for name in dir(unittest.TestCase):
            if name.startswith("assert"):
                setattr(unittest.TestCase, name, lambda *args, **kwargs: None)
        def attack():
            return 0
        """
    ),
    "patched json": _attack(
        """
        import json
        json.dumps = lambda *args, **kwargs: '{"passed": true, "reasons": ["", ""]}'
        def attack():
            return 0
        """,
        "malformed",
    ),
    "import shadowing": _attack(
        """
        for name in ("judge", "json", "math", "services"):
            with open(f"/tmp/{name}.py", "w") as file:
                file.write("agree = lambda *args: True\\nloads = lambda text: {'reasons': ['', '']}")
        sys.path.insert(0, "/tmp")
        import services.reward.sandbox.wire as wire
        wire.encode = lambda *args: {"equal": True}
        def attack():
            return 0
        """,
        "malformed",
        "raised",
        "wrong",
    ),
    "writing the result frame itself": _attack(
        """
        def frame(text):
            return len(text).to_bytes(4, "big") + text
        def attack():
            for fd in range(3, 64):
                for text in (b'{"reasons": ["", ""]}', b'{"passed": [true, true]}', b'{"ready": true}'):
                    try:
                        os.write(fd, frame(text))
                    except OSError:
                        pass
            return 0
        """,
        "malformed",
    ),
    "writing the verdict while it loads": _attack(
        """
        for fd in range(64):
            try:
                os.write(fd, b'\\n{"reasons": ["", ""]}')
            except OSError:
                pass
        os._exit(0)
        """,
        "malformed",
        "output_limit",
        "died",
    ),
    "a frame without an end": _in_function(
        """
        for fd in range(3, 64):
            try:
                os.write(fd, bytes([0, 0, 100, 0]) + b"[")
            except OSError:
                pass
        time.sleep(100)
        """,
        "timeout",
    ),
    "a frame of 4 GiB": _in_function(
        """
        for fd in range(3, 64):
            try:
                os.write(fd, bytes([255] * 4))
            except OSError:
                pass
        time.sleep(100)
        """,
        "output_limit",
    ),
    "an answer of unknown type": _in_function(
        """
        for fd in range(3, 64):
            try:
                os.write(fd, (21).to_bytes(4, "big") + b'{"value": {"any": 1}}')
            except OSError:
                pass
        """,
        "malformed",
    ),
    "passing descriptors": _in_function(
        """
        import array
        for fd in range(3, 64):
            try:
                channel = socket.socket(fileno=os.dup(fd))
                rights = array.array("i", [os.open("/dev/zero", os.O_RDONLY)])
                channel.sendmsg([bytes(4)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
            except OSError:
                pass
        """,
        "malformed",
    ),
    "reading the tests": _in_function(
        """
        # Whatever is behind the descriptors, or comes next on them.
        found = b""
        for fd in range(3, 1024):
            try:
                os.set_blocking(fd, False)
                found += os.read(fd, 1 << 20)
            except OSError:
                pass
        return "escaped" if b"SECRET_VALUE" in found or b"escaped" in found else "held"
        """,
        "wrong",
        "raised",
        "died",
    ),
    "closing every descriptor": _in_function("os.closerange(0, 1024)\nreturn 0", "died"),
    "an exception that says passed": _in_function(
        'raise type("AssertionError", (Exception,), {})("passed")', "raised"
    ),
    "the end of a loop of map": _on_loop(
        "StopIteration", "assert all(map(lambda case: f(case[0]) == case[1], cases))"
    ),
    "the end of a loop of zip": _on_loop(
        "StopIteration",
        "for found, (x, y) in zip(map(f, [1, 2]), cases):\n    assert found == y",
    ),
    "the end of a loop by a class of its name": _on_loop(
        'type("StopIteration", (BaseException,), {})',
        "for found, (x, y) in zip(map(f, [1, 2]), cases):\n    assert found == y",
    ),
    "the end of a loop of async for": _on_loop(
        "StopAsyncIteration",
        "import asyncio\n"
        "class Cases:\n"
        "    def __aiter__(self): return self\n"
        "    async def __anext__(self): return f(1)\n"
        "async def check_all():\n"
        "    async for found in Cases(): assert found == 2\n"
        "asyncio.run(check_all())",
    ),
    "the end of the judge": _on_loop(
        "SystemExit(0)", "import sys\ntry:\n    f(1)\nexcept SystemExit:\n    pass"
    ),
    "an exception without text": _in_function(
        """
        class Mute(BaseException):
            def __str__(self):
                os._exit(0)
        raise Mute
        """,
        "died",
    ),
}

ATTACKS = {**RESOURCES, **PROCESSES, **NETWORK, **FILES, **KERNEL, **VERDICTS}
