"""The system calls that a program in the sandbox may make. All others do not exist for it: ENOSYS.

A list of what is allowed, because a list of what is not ages: io_uring, user namespaces, and whatever the kernel
learns next, are out without being named. Also out: ptrace, keyctl, bpf, mount, unshare, memfd and System V memory
(which no limit of a process counts), and every socket but unix ones.
"""

from __future__ import annotations

import os
import socket
import termios

from rlhf.errors import ConfigError

ALLOWED = (
    "read", "write", "readv", "writev", "pread64", "pwrite64", "preadv", "pwritev", "preadv2", "pwritev2",
    "lseek", "sendfile", "copy_file_range", "splice", "open", "openat", "creat", "close", "close_range",
    "dup", "dup2", "dup3", "fcntl", "flock", "pipe", "pipe2", "fsync", "fdatasync", "sync_file_range",
    "fadvise64", "stat", "fstat", "lstat", "newfstatat", "statx", "access", "faccessat", "faccessat2",
    "statfs", "fstatfs", "getdents", "getdents64", "truncate", "ftruncate", "fallocate", "rename",
    "renameat", "renameat2", "mkdir", "mkdirat", "rmdir", "link", "linkat", "unlink", "unlinkat",
    "symlink", "symlinkat", "readlink", "readlinkat", "chmod", "fchmod", "fchmodat", "chown", "fchown",
    "lchown", "fchownat", "umask", "utime", "utimes", "utimensat", "futimesat", "getcwd", "chdir",
    "fchdir", "mmap", "munmap", "mprotect", "mremap", "madvise", "msync", "mincore", "brk", "membarrier",
    "rt_sigaction", "rt_sigprocmask", "rt_sigreturn", "rt_sigpending", "rt_sigtimedwait", "rt_sigsuspend",
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

# What is a namespace in the flags of clone: NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET.
_NAMESPACES = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
# Not the ones that put characters into a terminal.
_IOCTLS = (
    termios.TCGETS, termios.TIOCGWINSZ, termios.FIOCLEX, termios.FIONCLEX, termios.FIONBIO, termios.FIONREAD
)  # fmt: skip


def program() -> bytes:
    """The filter, as the BPF that bwrap loads.

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
    for request in _IOCTLS:
        rules.add_rule(pyseccomp.ALLOW, "ioctl", pyseccomp.Arg(1, pyseccomp.EQ, request))
    for name in ("socket", "socketpair"):
        rules.add_rule(pyseccomp.ALLOW, name, pyseccomp.Arg(0, pyseccomp.EQ, socket.AF_UNIX))
    with open(os.memfd_create("seccomp"), "w+b") as file:
        rules.export_bpf(file)
        file.seek(0)
        return file.read()
