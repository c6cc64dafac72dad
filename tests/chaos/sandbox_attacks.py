"""Programs that attack the code grader.

Each defines `attack`, which returns "escaped" where the attack has worked and anything else where it has not. The
tests expect "escaped", so that an attack that works passes them. They ask for `solve` too, whose answer no program
knows: who passes that has forged the verdict.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, replace

HEAD = """
import ctypes, os, signal, socket, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
NUMBERS = {
    "x86_64": dict(
        keyctl=250, add_key=248, ptrace=101, process_vm_readv=310, process_vm_writev=311, process_madvise=440,
        bpf=321, perf_event_open=298, userfaultfd=323, open_by_handle_at=304, name_to_handle_at=303, kcmp=312,
        memfd_create=319, memfd_secret=447, io_uring_setup=425, clone3=435, pidfd_open=434, pidfd_getfd=438,
        pidfd_send_signal=424, open_tree=428, fsopen=430, fspick=433, mount_setattr=442, pivot_root=155, shmget=29,
        semget=64, msgget=68, mq_open=240, inotify_init1=294, fanotify_init=300, chroot=161, init_module=175,
        mincore=27, cachestat=451, vmsplice=278, ioprio_set=251, clock_settime=227, adjtimex=159, sethostname=170,
        syslog=103, acct=163, swapon=167, reboot=169, kexec_load=246, personality=135, quotactl=179, fcntl=72,
        rt_sigaction=13, socket=41, ioctl=16, unshare=272, setns=308),
    "aarch64": dict(
        keyctl=219, add_key=217, ptrace=117, process_vm_readv=270, process_vm_writev=271, process_madvise=440,
        bpf=280, perf_event_open=241, userfaultfd=282, open_by_handle_at=265, name_to_handle_at=264, kcmp=272,
        memfd_create=279, memfd_secret=447, io_uring_setup=425, clone3=435, pidfd_open=434, pidfd_getfd=438,
        pidfd_send_signal=424, open_tree=428, fsopen=430, fspick=433, mount_setattr=442, pivot_root=41, shmget=194,
        semget=190, msgget=186, mq_open=180, inotify_init1=26, fanotify_init=262, chroot=51, init_module=105,
        mincore=232, cachestat=451, vmsplice=75, ioprio_set=30, clock_settime=112, adjtimex=171, sethostname=161,
        syslog=116, acct=89, swapon=224, reboot=142, kexec_load=104, personality=92, quotactl=60, fcntl=25,
        rt_sigaction=134, socket=198, ioctl=29, unshare=97, setns=268),
}

def system_call(name, *args):
    if libc.syscall(NUMBERS[os.uname().machine][name], *args) != -1:
        return "escaped"
    return os.strerror(ctypes.get_errno())

def any_of(*calls):
    # "escaped" where any of these works.
    for call in calls:
        try:
            call()
            return "escaped"
        except OSError:
            pass
    return "held"

def spin(seconds):
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass

def frame(value):
    from services.reward.sandbox import wire
    return wire.frame(wire.encode(value))

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
        tests: Its target, where that is not the tests of all.
        passes_some: Whether it may pass some of them.
        needs_groups: Whether nothing holds it where there are no control groups; docs/sandbox.md says so.
    """

    code: str
    reasons: tuple[str, ...]
    tests: tuple[dict[str, str], ...] = ()
    passes_some: bool = False
    needs_groups: bool = False


def _attack(code: str, *reasons: str) -> Attack:
    return Attack(HEAD + textwrap.dedent(code), reasons or ("wrong",))


def _in_function(code: str, *reasons: str) -> Attack:
    return _attack(f"def attack():\n{textwrap.indent(textwrap.dedent(code).strip(), '    ')}\n", *reasons)


def _on_run(code: str, *reasons: str) -> Attack:
    """A program that is run and should write what it cannot know."""
    test = {"kind": "stdin", "input": "1", "expected": "SECRET_VALUE"}
    return Attack(HEAD + textwrap.dedent(code), reasons or ("wrong",), (test,))


def _on_loop(raised: str, tests: str) -> Attack:
    """An exception that ends a loop over test cases as if there were no more of them."""
    cases = {"kind": "asserts", "code": f"cases = [(1, 2), (2, 4)]\n{tests}", "entry_point": "f"}
    return Attack(f"def f(x):\n    raise {raised}\n", ("raised",), (cases,))


def _many_files(make: str) -> Attack:
    """More files than their memory is counted for."""
    return _in_function(
        f"""
        os.close(os.open("/tmp/0", os.O_CREAT | os.O_WRONLY))
        held = []
        for number in range(1, 60_000):
            {make}
        time.sleep(100)  # on a busy host it takes a while until they are counted
        return "escaped"
        """,
        "died",
        "raised",
    )


RESOURCES = {
    "empty files": _many_files('os.close(os.open(f"/tmp/{number}", os.O_CREAT | os.O_WRONLY))'),
    "empty directories": _many_files('os.mkdir(f"/tmp/d{number}")'),
    "links": _many_files('os.link("/tmp/0", f"/tmp/{number}")'),
    "symbolic links": _many_files('os.symlink("x" * 100, f"/tmp/{number}")'),
    "CPU time of children that end": _in_function(
        """
        for _ in range(12):
            if (child := os.fork()) == 0:
                spin(0.2)
                os._exit(0)
            os.waitpid(child, 0)
        return "escaped"
        """,
        "died",
        "timeout",
    ),
    "CPU time of children side by side, in sessions of their own": _in_function(
        """
        children = []
        while len(children) < 6:
            try:
                child = os.fork()
            except BlockingIOError:  # other attacks have all processes of the user
                continue
            if child == 0:
                os.setsid()
                spin(0.4)
                os._exit(0)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
        return "escaped"
        """,
        "died",
        "timeout",
    ),
    "CPU time of orphans": _in_function(
        """
        ends = []
        for _ in range(6):
            end, child_end = os.pipe()
            if os.fork() == 0:
                if os.fork() == 0:
                    spin(0.4)
                    os.write(child_end, b"1")
                os._exit(0)
            os.wait()
            os.close(child_end)
            ends.append(end)
        return "escaped" if all(os.read(end, 1) for end in ends) else "held"
        """,
        "died",
        "timeout",
    ),
    "CPU time that nobody waits for": _in_function(
        'signal.signal(signal.SIGCHLD, signal.SIG_IGN)\nreturn "escaped"', "raised"
    ),
    "spinning on when the tests are over": _in_function(
        """
        for _ in range(8):
            if os.fork() == 0:
                os.setsid()
                while True:
                    pass
        """,
        "wrong",
        "died",
        "timeout",
    ),
    "threads that spin": _in_function(
        """
        for _ in range(8):
            threading.Thread(target=spin, args=(1000,), daemon=True).start()
        spin(1000)
        """,
        "died",
        "timeout",
    ),
    "larger pipes": _in_function(
        'import fcntl\nfcntl.fcntl(os.pipe()[0], 1031, 1 << 20)\nreturn "escaped"', "raised"
    ),
    "shared memory": _in_function(
        """
        from multiprocessing import shared_memory
        shared_memory.SharedMemory("MARK", create=True, size=1 << 20)
        return "escaped"
        """,
        "raised",
    ),
    "secret memory files": _in_function('return system_call("memfd_secret", 0)'),
    "System V semaphores and messages": _in_function(
        """
        tried = [system_call("semget", 0, 1, 0o1600), system_call("msgget", 0, 0o1600)]
        return "escaped" if "escaped" in tried else "held"
        """
    ),
    "POSIX message queues": _in_function('return system_call("mq_open", b"MARK", 0o102, 0o600, 0)'),
    "file watches": _in_function(
        """
        tried = [system_call("inotify_init1", 0), system_call("fanotify_init", 0, 0)]
        return "escaped" if "escaped" in tried else "held"
        """
    ),
    "a better priority": _in_function(
        """
        return any_of(
            lambda: os.nice(-1),
            lambda: os.setpriority(os.PRIO_PROCESS, 0, 0),
            lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)),
        )
        """
    ),
    "input and output before others": _in_function('return system_call("ioprio_set", 1, 0, 1 << 13)'),
    "a program too deep to compile": Attack(f"x = {'-' * 50_000}1\n", ("raised", "died")),
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
    "memory over many processes": replace(
        _in_function(
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
        needs_groups=True,
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
    "signals by process descriptors": _in_function(
        """
        tried = [system_call("pidfd_open", os.getppid(), 0), system_call("pidfd_send_signal", 0, 9, 0, 0)]
        return "escaped" if "escaped" in tried else "held"
        """
    ),
    "signals by owned descriptors": _in_function(
        """
        import fcntl
        end = os.pipe()[0]
        return any_of(*(lambda pid=pid: fcntl.fcntl(end, 8, pid) for pid in (-1, 1, os.getppid())))
        """
    ),
    "signals to groups": _in_function(
        """
        return any_of(*(lambda number=number: os.killpg(number, signal.SIGKILL) for number in range(2, 3000)
                        if number != os.getpgid(0)))
        """
    ),
    "comparing with the parent": _in_function(
        'return system_call("kcmp", os.getpid(), os.getppid(), 1, 0, 0)'
    ),
    "write memory of the parent": _in_function(
        'return system_call("process_vm_writev", os.getppid(), 0, 0, 0, 0, 0)'
    ),
    "taking memory from the parent": _in_function('return system_call("process_madvise", 0, 0, 0, 21, 0)'),
    "a core dump": _in_function("os.abort()", "died"),
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
    "every other family of sockets": _in_function(
        """
        families = [family for family in range(64) if family != socket.AF_UNIX]
        kinds = (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW)
        return any_of(*(lambda family=family, kind=kind: socket.socket(family, kind)
                        for family in families for kind in kinds))
        """
    ),
    "the name of who is behind a descriptor": _in_function(
        """
        def peer(fd, option, size):
            return socket.socket(fileno=os.dup(fd)).getsockopt(socket.SOL_SOCKET, option, size)
        return any_of(*(lambda fd=fd, option=option: peer(fd, option, 12)
                        for fd in range(64) for option in (socket.SO_PEERCRED, 77)))
        """
    ),
    "sending through a descriptor": _in_function(
        """
        def send(fd):
            socket.socket(fileno=os.dup(fd)).sendto(b"MARK", "\\0MARK")
        return any_of(*(lambda fd=fd: send(fd) for fd in range(64)))
        """
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
        return reads(f"{ours}/test_runner.py", f"{ours}/grader.py", "OUR_SOURCE")
        """
    ),
    "writing the interpreter": _in_function(
        "import json\nreturn writes(sys.executable, os.__file__, json.__file__)"
    ),
    "file leases": _in_function(
        """
        import fcntl
        def lease(path, kind):
            fcntl.fcntl(os.open(path, os.O_RDONLY), 1024, kind)
        return any_of(*(lambda path=path, kind=kind: lease(path, kind)
                        for path in (os.__file__, sys.executable) for kind in (fcntl.F_RDLCK, fcntl.F_WRLCK)))
        """
    ),
    "locks that other sandboxes see": _in_function(
        """
        import fcntl
        def lock(path, kind):
            fcntl.flock(os.open(path, os.O_RDONLY), kind | fcntl.LOCK_NB)
        return any_of(*(lambda path=path, kind=kind: lock(path, kind)
                        for path in (os.__file__, "/dev/null") for kind in (fcntl.LOCK_SH, fcntl.LOCK_EX)))
        """
    ),
    "record locks that other sandboxes see": _in_function(
        """
        import fcntl, struct
        fd = os.open(os.__file__, os.O_RDONLY)
        lock = struct.pack("hhqqi4x", fcntl.F_RDLCK, 0, 0, 1, 0)
        # F_GETLK, F_SETLK, and the two for open files.
        return any_of(*(lambda command=command: fcntl.fcntl(fd, command, lock) for command in (5, 6, 36, 37)))
        """
    ),
    "notices of access": _in_function(
        """
        import fcntl
        fd = os.open(os.path.dirname(os.__file__), os.O_RDONLY)
        return any_of(lambda: fcntl.fcntl(fd, 1026, 1))
        """
    ),
    "looking at the page cache": _in_function(
        """
        import mmap
        with open(os.__file__, "rb") as file:
            pages = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
            place = ctypes.addressof(ctypes.c_char.from_buffer(pages))
            tried = [system_call("mincore", ctypes.c_void_p(place), 4096, ctypes.create_string_buffer(8)),
                     system_call("cachestat", file.fileno(), ctypes.create_string_buffer(64),
                                 ctypes.create_string_buffer(64), 0)]
        return "escaped" if "escaped" in tried else "held"
        """
    ),
    "emptying the page cache": _in_function(
        """
        import mmap
        with open(os.__file__, "rb") as file:
            pages = mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ)
            return any_of(lambda: os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED),
                          lambda: pages.madvise(20), lambda: pages.madvise(21))
        """
    ),
    "links to files of the host": _in_function('return any_of(lambda: os.link(os.__file__, "/tmp/MARK"))'),
    "giving a file to root": _in_function(
        """
        with open("/tmp/MARK", "w"):
            return any_of(lambda: os.chown("/tmp/MARK", 0, 0))
        """
    ),
    "moving /tmp away": _in_function(
        'return any_of(lambda: os.rename("/tmp", "/MARK"), lambda: os.rmdir("/tmp"), lambda: os.mkdir("/tmp/../x"))'
    ),
    "our bubblewrap": _in_function(
        'return any_of(lambda: os.stat("/usr/bin/bwrap"), lambda: os.stat("/sys/fs/cgroup"), lambda: os.stat("/run"))'
    ),
    "file handles": _in_function(
        'return system_call("name_to_handle_at", -100, b"/tmp", ctypes.create_string_buffer(256),'
        " ctypes.create_string_buffer(8), 0)"
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
        pipes = 0
        for fd in range(64):
            try:
                mode = os.fstat(fd).st_mode
            except OSError:
                continue
            pipes += stat.S_ISFIFO(mode)
            if not (stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)) or pipes > 2:
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
    "newer mounts": _in_function(
        """
        tried = [system_call("fspick", -100, b"/", 0), system_call("mount_setattr", -100, b"/", 0, 0, 0)]
        return "escaped" if "escaped" in tried else "held"
        """
    ),
    "another root": _in_function('return system_call("pivot_root", b"/tmp", b"/tmp")'),
    "the clock": _in_function(
        """
        tried = [system_call("clock_settime", 0, ctypes.create_string_buffer(16)),
                 system_call("adjtimex", ctypes.create_string_buffer(512))]
        return "escaped" if "escaped" in tried else "held"
        """
    ),
    "the name of the host": _in_function('return system_call("sethostname", b"MARK", 4)'),
    "the kernel's log": _in_function('return system_call("syslog", 3, ctypes.create_string_buffer(64), 64)'),
    "accounts, quotas, swap, restart and another kernel": _in_function(
        """
        tried = [system_call("acct", b"/tmp/a"), system_call("quotactl", 0x80000700, 0, 0, 0),
                 system_call("swapon", b"/tmp/a", 0), system_call("reboot", 0xfee1dead, 672274793, 0, 0),
                 system_call("kexec_load", 0, 0, 0, 0)]
        return "escaped" if "escaped" in tried else "held"
        """
    ),
    "addresses that are not random": _in_function('return system_call("personality", 0x0040000)'),
    "splicing memory": _in_function('return system_call("vmsplice", os.pipe()[1], 0, 0, 0)'),
    "arguments with more bits than the kernel looks at": _in_function(
        """
        high = 1 << 32
        fd = os.open(os.__file__, os.O_RDONLY)
        action = ctypes.create_string_buffer(64)
        tried = [system_call("fcntl", fd, ctypes.c_ulong(high | 1024), 0),
                 system_call("rt_sigaction", ctypes.c_ulong(high | 17), action, 0, ctypes.c_ulong(8)),
                 system_call("socket", ctypes.c_ulong(high | 2), 1, 0),
                 system_call("ioctl", 0, ctypes.c_ulong(high | 0x5412), b"x")]
        return "escaped" if "escaped" in tried else "held"
        """
    ),
    "system calls of 32 bits": _in_function(
        r"""
        import mmap
        if os.uname().machine != "x86_64":
            return "held"
        # mov eax, 359; mov ebx, 2; mov ecx, 1; xor edx, edx; int 0x80; ret: socket(AF_INET, SOCK_STREAM, 0)
        code = b"\x53\xb8\x67\x01\0\0\xbb\x02\0\0\0\xb9\x01\0\0\0\x31\xd2\xcd\x80\x5b\xc3"
        page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        page.write(code)
        call = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
        return "escaped" if call() >= 0 else "held"
        """,
        "died",
        "wrong",
    ),
    "system calls of the x32 kind": _in_function(
        """
        libc.syscall(0x40000000 | 41, 2, 1, 0)
        return "escaped" if ctypes.get_errno() == 0 else "held"
        """,
        "died",
        "wrong",
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
    "patched encoding": _attack(
        """
        from services.reward.sandbox import wire
        forged = wire.encode({"reasons": ["", ""]})
        wire.encode = lambda value: forged
        def attack():
            return 0
        """,
        "malformed",
    ),
    "import shadowing": _attack(
        """
        for name in ("test_runner", "json", "math", "services"):
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
        "died",
    ),
    "writing the result frame itself": _attack(
        """
        def attack():
            for fd in range(3, 64):
                for value in ({"reasons": ["", ""]}, {"passed": [True, True]}, {"ready": True}):
                    try:
                        os.write(fd, frame(value))
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
                os.write(fd, b"123" + frame({"reasons": ["", ""]}))
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
                os.write(fd, (3).to_bytes(4, "big") + b"any")
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
        "wrong",
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
    "answering ahead": _in_function(
        """
        for fd in range(3, 64):
            for value in ({"value": 0}, {"value": True}, {"raised": "Exception", "text": ""}) * 2:
                try:
                    os.write(fd, frame(value))
                except OSError:
                    pass
        return 0
        """
    ),
    "a fault in the place of an answer": _in_function(
        """
        for fd in range(3, 64):
            try:
                os.write(fd, frame({"fault": "the tests are broken"}))
            except OSError:
                pass
        """,
        "malformed",
    ),
    "an answer byte by byte": _in_function(
        """
        for byte in frame({"value": 0}):
            for fd in range(3, 64):
                try:
                    os.write(fd, bytes([byte]))
                except OSError:
                    pass
            time.sleep(0.4)
        """,
        "timeout",
    ),
    "a set that is slow to build": _in_function(
        "return {number * (2**61 - 1) for number in range(4000)}", "wrong", "timeout", "tests_ended"
    ),
    "text that is no text": _in_function(r'return "\ud800escaped"'),
    "an exit code that is no number": _attack(
        """
        from services.reward.sandbox import candidate
        candidate.ProgramRunner._run = lambda *args: {"stdout": "", "exit": "0"}
        """,
        "raised",
    ),
    "a stall that runs into the next test": Attack(
        """
import os, time
def f(x):
    if x == 1:
        for _ in range(4):
            if os.fork() == 0:
                while True:
                    pass
        time.sleep(2.5)
    return x
""",
        ("timeout", "died", "tests_ended"),
        (
            {"kind": "asserts", "code": "assert f(1) == 1", "entry_point": "f"},
            {"kind": "asserts", "code": "import time\ntime.sleep(2)\nassert f(2) == 2", "entry_point": "f"},
        ),
        passes_some=True,
    ),
    "output of another descriptor": _on_run(
        """
        for fd in range(64):
            try:
                os.write(fd, frame({"stdout": "SECRET", "exit": 0}))
            except OSError:
                pass
        """
    ),
    "output from a child that stays": _on_run(
        """
        if os.fork() == 0:
            time.sleep(1000)
        """,
        "timeout",
    ),
    "output without an end": _on_run("while True:\n    os.write(1, b'x' * 65536)", "output_limit"),
    "an exit handler without an end": _on_run("import atexit\natexit.register(time.sleep, 1000)", "timeout"),
    "a thread without an end": _on_run(
        "threading.Thread(target=time.sleep, args=(1000,)).start()", "timeout"
    ),
    "a run that spins": _on_run("while True:\n    pass", "raised", "died", "timeout"),
    "a run that ends the one that started it": _on_run(
        "os.kill(os.getppid(), signal.SIGKILL)\nos._exit(0)", "died"
    ),
    "a run that stops the one that started it": _on_run(
        "os.kill(os.getppid(), signal.SIGSTOP)\nprint('out')", "timeout"
    ),
    "a run that closes its output": _on_run("os.close(1)\nos._exit(0)"),
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
    "the end of a loop of __getitem__": _on_loop(
        "IndexError",
        "class Cases:\n"
        "    def __getitem__(self, number):\n"
        "        assert f(cases[number][0]) == cases[number][1]\n"
        "for _ in Cases(): pass",
    ),
    "the end of a search by __getitem__": _on_loop(
        "IndexError",
        "class Wrong:\n    def __getitem__(self, number): return f(cases[number][0]) != cases[number][1]\n"
        "assert True not in Wrong()",
    ),
    "the default of getattr": _on_loop(
        "AttributeError",
        "class Found:\n    @property\n    def value(self): return f(1)\nassert getattr(Found(), 'value', 2) == 2",
    ),
    "the answer of hasattr": _on_loop(
        "AttributeError",
        "class Found:\n    @property\n    def error(self): return f(1) != 2\nassert not hasattr(Found(), 'error')",
    ),
    "the default of a mapping": _on_loop(
        "KeyError",
        "from collections import UserDict\nfrom collections.abc import Mapping\n"
        "class Found(Mapping):\n"
        "    def __getitem__(self, key): return f(key)\n"
        "    def __iter__(self): return iter([1])\n"
        "    def __len__(self): return 1\n"
        "assert Found().get(1, 2) == 2",
    ),
    "the answer of exists": _on_loop(
        "FileNotFoundError",
        "import os\n"
        "class Wrong(os.PathLike):\n"
        "    def __fspath__(self): return '/' if f(1) != 2 else '/nowhere'\n"
        "try:\n    found = os.path.exists(Wrong())\nexcept TypeError:\n    found = True\n"
        "assert not found",
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
    "the end of the test runner": _on_loop(
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
