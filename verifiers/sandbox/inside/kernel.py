"""System calls that Python lacks, through the C library: namespaces, mounts, capabilities, Landlock and seccomp."""

from __future__ import annotations

import ctypes
import os
import struct

from verifiers.sandbox.inside import syscalls

NEWNS, NEWCGROUP, NEWUTS, NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
NEWUSER, NEWPID, NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
MNT_DETACH = 2
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV, ATTR_NOEXEC = 1, 2, 4, 8
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 1, 4, 24, 38, 47
PR_CAP_AMBIENT_CLEAR_ALL = 4
CAPABILITY_VERSION_3 = 0x20080522
SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, SECCOMP_FILTER_FLAG_NEW_LISTENER = 1, 1, 8
LANDLOCK_CREATE_RULESET_VERSION, LANDLOCK_RULE_PATH_BENEATH = 1, 1

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]


def _checked(result: int, what: str) -> int:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _syscall(name: str, *args: object) -> int:
    number = syscalls.REFUSED.get(name)
    if number is None:
        raise OSError(38, f"{name} has no known number on {syscalls.MACHINE}")
    return _checked(_libc.syscall(ctypes.c_long(number), *args), name)


def unshare(flags: int) -> None:
    """Leave some of the parent's namespaces for new ones."""
    _checked(_libc.unshare(ctypes.c_int(flags)), f"unshare({flags:#x})")


def setns(fd: int, kind: int) -> None:
    """Enter the namespace of a descriptor."""
    _checked(_libc.setns(ctypes.c_int(fd), ctypes.c_int(kind)), "setns")


def mount(source: str | None, target: str, kind: str | None = None, flags: int = 0, options: str | None = None) -> None:
    """Mount a file system, or change a mount."""
    texts = [None if text is None else text.encode() for text in (source, target, kind, options)]
    done = _libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3])
    _checked(done, f"mount {kind or source or ''} on {target}")


def make_read_only(target: str, *, is_device: bool = False) -> None:
    """Make a mount and all below it read-only, without set-uid programs and devices."""
    wanted = ATTR_RDONLY | ATTR_NOSUID | (ATTR_NOEXEC if is_device else ATTR_NODEV)
    attributes = struct.pack("=QQQQ", wanted, 0, 0, 0)
    size = ctypes.c_size_t(len(attributes))
    flags = ctypes.c_uint(AT_RECURSIVE)
    _syscall("mount_setattr", ctypes.c_int(AT_FDCWD), target.encode(), flags, attributes, size)


def pivot_root(new: str, old: str) -> None:
    """Make ``new`` the root of the file system and put the old one at ``old``."""
    _syscall("pivot_root", new.encode(), old.encode())


def detach(target: str) -> None:
    """Unmount lazily, once the mount is no longer in use."""
    _checked(_libc.umount2(target.encode(), ctypes.c_int(MNT_DETACH)), f"umount {target}")


def set_hostname(name: str) -> None:
    """Set the host name in this UTS namespace."""
    _checked(_libc.sethostname(name.encode(), ctypes.c_size_t(len(name))), "sethostname")


def prctl(option: int, *values: int) -> None:
    """Change an attribute of this process."""
    _checked(_libc.prctl(option, *(*values, 0, 0, 0, 0)[:4]), f"prctl({option})")


def die_with_parent() -> None:
    """Kill this process when its parent ends. A change of user resets this, so call it again afterwards."""
    prctl(PR_SET_PDEATHSIG, 9)


def drop_capabilities() -> None:
    """Drop all capabilities, for this process and all its descendants."""
    for capability in range(64):
        if _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) == -1:
            break  # past the last one that the kernel knows
    _libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    _syscall("capset", struct.pack("=Ii", CAPABILITY_VERSION_3, 0), bytes(24))


def landlock_version() -> int:
    """The Landlock version of this kernel; 0 if there is none."""
    try:
        return _syscall(
            "landlock_create_ruleset", None, ctypes.c_size_t(0), ctypes.c_uint(LANDLOCK_CREATE_RULESET_VERSION)
        )
    except OSError:
        return 0


def landlock_ruleset(attributes: bytes) -> int:
    """Create a Landlock ruleset and return its descriptor."""
    return _syscall("landlock_create_ruleset", attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint(0))


def landlock_allow(ruleset: int, fd: int, access: int) -> None:
    """Add a rule to a ruleset: the access allowed on an open file, or below an open folder."""
    rule = struct.pack("=Qi", access, fd)
    kind = ctypes.c_uint(LANDLOCK_RULE_PATH_BENEATH)
    _syscall("landlock_add_rule", ctypes.c_int(ruleset), kind, rule, ctypes.c_uint(0))


def landlock_restrict(ruleset: int) -> None:
    """Apply a ruleset to this process, irrevocably."""
    _syscall("landlock_restrict_self", ctypes.c_int(ruleset), ctypes.c_uint(0))


class Program(ctypes.Structure):
    """A filter as the kernel expects it (``struct sock_fprog``); keeps its instructions alive."""

    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def program(instructions: bytes) -> Program:
    """A filter from 8-byte instructions."""
    return Program(len(instructions) // 8, instructions)


def seccomp(program: Program) -> None:
    """Apply a filter to all threads of this process, irrevocably."""
    flags = ctypes.c_uint(SECCOMP_FILTER_FLAG_TSYNC)
    if _syscall("seccomp", ctypes.c_uint(SECCOMP_SET_MODE_FILTER), flags, ctypes.byref(program)):
        raise OSError(0, "seccomp: the filter could not be applied to all threads")


def seccomp_listener(program: Program) -> int:
    """Add a filter to this single-threaded process; return the descriptor that reports calls waiting for an answer."""
    flags = ctypes.c_uint(SECCOMP_FILTER_FLAG_NEW_LISTENER)
    return _syscall("seccomp", ctypes.c_uint(SECCOMP_SET_MODE_FILTER), flags, ctypes.byref(program))
