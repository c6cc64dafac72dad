"""Seccomp filter of the system calls that a program in a sandbox may make. All others fail with ENOSYS.

The list names the allowed calls, so calls that later kernels add are excluded without an update. It excludes
io_uring, user namespaces, ptrace, keyctl, bpf, mount, unshare, memfd and System V memory (which no limit of a process
counts), all sockets except unix ones, and the ways to affect another sandbox through files that both can read:
leases, locks, notifications of access, and changes of the page cache.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import signal
import socket
import termios

from rlhf.errors import ConfigError

ALLOWED = (
    "read", "write", "readv", "writev", "pread64", "pwrite64", "preadv", "pwritev", "preadv2", "pwritev2",
    "lseek", "sendfile", "copy_file_range", "splice", "open", "openat", "creat", "close", "close_range",
    "dup", "dup2", "dup3", "pipe", "pipe2", "fsync", "fdatasync", "sync_file_range",
    "stat", "fstat", "lstat", "newfstatat", "statx", "access", "faccessat", "faccessat2",
    "statfs", "fstatfs", "getdents", "getdents64", "truncate", "ftruncate", "fallocate", "rename",
    "renameat", "renameat2", "mkdir", "mkdirat", "rmdir", "link", "linkat", "unlink", "unlinkat",
    "symlink", "symlinkat", "readlink", "readlinkat", "chmod", "fchmod", "fchmodat", "chown", "fchown",
    "lchown", "fchownat", "umask", "utime", "utimes", "utimensat", "futimesat", "getcwd", "chdir",
    "fchdir", "mmap", "munmap", "mprotect", "mremap", "msync", "brk", "membarrier",
    "rt_sigprocmask", "rt_sigreturn", "rt_sigpending", "rt_sigtimedwait", "rt_sigsuspend",
    "rt_sigqueueinfo", "sigaltstack", "kill", "tkill", "tgkill", "pause", "alarm", "getitimer",
    "setitimer", "restart_syscall", "fork", "vfork", "execve", "exit", "exit_group", "wait4", "waitid",
    "set_tid_address", "set_robust_list", "get_robust_list", "futex", "rseq", "sched_yield",
    "sched_getaffinity", "sched_setaffinity", "sched_getparam", "sched_getscheduler",
    "sched_get_priority_max", "sched_get_priority_min", "getpriority", "setpriority", "getcpu", "prctl",
    "arch_prctl", "getpid", "getppid", "gettid", "getpgid", "getpgrp", "setpgid", "getsid", "setsid",
    "getuid", "geteuid", "getgid", "getegid", "getresuid", "getresgid", "getgroups", "setuid", "setgid",
    "setresuid", "setresgid", "setgroups", "getrlimit", "setrlimit", "prlimit64", "getrusage", "times",
    "sysinfo", "uname", "nanosleep", "clock_nanosleep", "clock_gettime", "clock_getres", "gettimeofday",
    "time", "getrandom", "timerfd_create", "timerfd_settime", "timerfd_gettime", "eventfd", "eventfd2",
    "signalfd", "signalfd4", "poll", "ppoll", "select", "pselect6", "epoll_create", "epoll_create1",
    "epoll_ctl", "epoll_wait", "epoll_pwait", "bind", "listen", "accept", "accept4", "connect",
    "shutdown", "sendto", "recvfrom", "sendmsg", "recvmsg", "sendmmsg", "recvmmsg", "getsockname",
    "getpeername", "getsockopt", "setsockopt",
)  # fmt: skip

# Flags of clone that make a namespace: NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET.
_NAMESPACES = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
# Values of one argument for which a call is allowed. All 64 bits are compared, also where the kernel reads 32 of them.
_BY_VALUE: dict[tuple[str, int], tuple[int, ...]] = {
    # Not the ones that put characters into a terminal.
    ("ioctl", 1): (
        termios.TCGETS, termios.TIOCGWINSZ, termios.FIOCLEX, termios.FIONCLEX, termios.FIONBIO, termios.FIONREAD,
    ),
    # No leases, locks and notices, and no larger pipes: their content counts for all processes of the user.
    ("fcntl", 1): (
        fcntl.F_DUPFD, fcntl.F_DUPFD_CLOEXEC, fcntl.F_GETFD, fcntl.F_SETFD, fcntl.F_GETFL, fcntl.F_SETFL,
        fcntl.F_GETPIPE_SZ,
    ),
    # None that takes pages from the page cache.
    ("madvise", 2): (
        mmap.MADV_NORMAL, mmap.MADV_RANDOM, mmap.MADV_SEQUENTIAL, mmap.MADV_WILLNEED, mmap.MADV_DONTNEED,
        mmap.MADV_FREE, mmap.MADV_DONTFORK, mmap.MADV_DOFORK, mmap.MADV_HUGEPAGE, mmap.MADV_NOHUGEPAGE,
    ),
    # No SIGCHLD: the CPU time of a child that its parent does not wait for would be lost.
    ("rt_sigaction", 0): tuple(number for number in range(1, 65) if number != signal.SIGCHLD),
    ("socket", 0): (socket.AF_UNIX,),
    ("socketpair", 0): (socket.AF_UNIX,),
}  # fmt: skip


def program() -> bytes:
    """Returns the filter as the BPF program that bwrap loads.

    Raises:
        ConfigError: pyseccomp or libseccomp is missing.
    """
    try:
        import pyseccomp
    except (ImportError, RuntimeError, OSError) as error:
        raise ConfigError(
            f"seccomp filters cannot be made ({error}); install libseccomp2 and pip install 'rlhf-cluster[sandbox]'"
        ) from error
    rules = pyseccomp.SyscallFilter(pyseccomp.ERRNO(38))
    for name in ALLOWED:
        # Each architecture lacks some of the older ones.
        if pyseccomp.resolve_syscall(pyseccomp.system_arch(), name) >= 0:
            rules.add_rule(pyseccomp.ALLOW, name)
    rules.add_rule(pyseccomp.ALLOW, "clone", pyseccomp.Arg(0, pyseccomp.MASKED_EQ, _NAMESPACES, 0))
    for (name, argument), values in _BY_VALUE.items():
        for value in values:
            rules.add_rule(pyseccomp.ALLOW, name, pyseccomp.Arg(argument, pyseccomp.EQ, value))
    # Reading the action on SIGCHLD is allowed: interpreters do so when they start.
    asked = (pyseccomp.Arg(0, pyseccomp.EQ, signal.SIGCHLD), pyseccomp.Arg(1, pyseccomp.EQ, 0))
    rules.add_rule(pyseccomp.ALLOW, "rt_sigaction", *asked)
    with open(os.memfd_create("seccomp"), "w+b") as file:
        rules.export_bpf(file)
        file.seek(0)
        return file.read()
