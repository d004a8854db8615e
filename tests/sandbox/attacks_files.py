"""Attempts on files: the host's, a neighbour's, /proc, by links, handles, devices and descriptors left open."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

import verifiers.sandbox
from tests.sandbox.arena import KEY_NAME, KEY_START, Arena, Skip, attack


@attack()
def reads_a_file_of_the_host(arena: Arena) -> None:
    arena.refused(f"attempt(read, {str(arena.secret)!r})", "FileNotFoundError", "PermissionError")


@attack()
def reads_the_hosts_passwords(arena: Arena) -> None:
    arena.refused("[attempt(read, '/etc/shadow'), attempt(read, '/etc/gshadow'), attempt(read, '/etc/sudoers')]")


@attack()
def lists_the_homes_of_the_host(arena: Arena) -> None:
    homes = [home for home in ("/home", os.path.expanduser("~"), "/var", "/run", "/srv") if Path(home).is_dir()]
    inside = [str(Path(sys.prefix)), str(Path(sys.base_prefix)), "/usr"]
    homes = [home for home in homes if not any(one.startswith(home) for one in inside)]
    if not homes:
        raise Skip("this Python lies in the only home there is")
    arena.refused(f"[attempt(os.listdir, home) for home in {homes!r}]")


@attack()
def reads_the_project_that_runs_it(arena: Arena) -> None:
    root = Path(__file__).resolve().parents[2]
    if str(root).startswith(sys.prefix):
        raise Skip("the project lies inside this Python")
    arena.refused(f"[attempt(read, {str(root / 'pyproject.toml')!r}), attempt(read, {__file__!r})]")


@attack()
def writes_into_the_systems_folders(arena: Arena) -> None:
    arena.refused("[attempt(write, folder + '/x') for folder in ('/usr', '/usr/bin', '/etc', '/', '/dev')]")


@attack()
def plants_a_module_in_this_python(arena: Arena) -> None:
    folders = [sysconfig.get_paths()["purelib"], sysconfig.get_paths()["stdlib"]]
    arena.refused(f"[attempt(write, folder + '/planted.py') for folder in {folders!r}]")


@attack()
def changes_the_mode_of_a_file_it_can_see(arena: Arena) -> None:
    arena.refused(
        "[attempt(os.chmod, os.__file__, 0o777), attempt(os.utime, os.__file__), attempt(os.unlink, os.__file__)]"
    )


@attack()
def changes_a_file_of_its_own_user_without_opening_it(arena: Arena) -> None:
    before = arena.secret.stat()
    path = str(arena.secret)
    arena.refused(
        f"[attempt(os.chmod, {path!r}, 0), attempt(os.truncate, {path!r}, 0), attempt(os.utime, {path!r}, (1, 1)),"
        f" attempt(os.chown, {path!r}, os.getuid(), os.getgid()), attempt(os.setxattr, {path!r}, 'user.x', b'x')]"
    )
    after = arena.secret.stat()
    assert (before.st_mode, before.st_size, before.st_mtime) == (after.st_mode, after.st_size, after.st_mtime)


@attack("reduced")
def changes_a_file_it_may_read_through_its_descriptor(arena: Arena) -> None:
    arena.refused(
        "fd = os.open('/usr/bin', os.O_RDONLY)\n[attempt(os.fchmod, fd, 0), attempt(os.fchown, fd, os.getuid(), 0)]",
        "Errno 1]",
    )


@attack()
def reads_what_its_neighbour_wrote(arena: Arena) -> None:
    with arena.sandbox().session() as mine, arena.sandbox().session() as theirs:
        home = mine.run("import os; open('mine.txt', 'w').write('x'); os.getcwd()").value.strip("'")
        if arena.level == "full":
            assert theirs.files() == []
            assert theirs.run("import os; os.listdir('.')").value == "['.shm', '.tmp']"
        else:
            assert theirs.run(f"open({home + '/mine.txt'!r})").error is not None
            assert theirs.run(f"import os; os.listdir({home!r})").status == "error"
            assert theirs.run("import os; os.listdir('..')").status == "error"
        assert mine.files() == ["mine.txt"]


@attack()
def follows_a_symbolic_link_out(arena: Arena) -> None:
    arena.refused(f"os.symlink({str(arena.secret)!r}, 'link')\nattempt(read, 'link')")


@attack()
def has_the_application_follow_a_symbolic_link(arena: Arena) -> None:
    with arena.sandbox().session() as session:
        session.run(f"import os; os.symlink({str(arena.secret)!r}, 'link'); os.symlink({str(arena.folder)!r}, 'out')")
        for name in ("link", "out/secret.txt", f"../..{arena.secret}", str(arena.secret)):
            try:
                assert arena.key.encode() not in session.read(name)
            except OSError:
                continue
        try:
            session.write("out/planted", b"x")
        except OSError:
            pass
        assert sorted(path.name for path in arena.folder.iterdir()) == ["secret.txt", "socket"]


@attack()
def makes_a_hard_link_to_a_file_of_the_host(arena: Arena) -> None:
    arena.refused(f"[attempt(os.link, {str(arena.secret)!r}, 'hard'), attempt(os.link, os.__file__, 'hard')]")


@attack()
def renames_its_way_out(arena: Arena) -> None:
    arena.refused(
        f"write('x')\n[attempt(os.rename, 'x', {str(arena.folder / 'x')!r}), attempt(os.rename, 'x', '/usr/x')]"
    )


@attack()
def opens_a_file_by_its_handle(arena: Arena) -> None:
    arena.denied("name_to_handle_at", -100, 0, 0, 0, 0)
    arena.denied("open_by_handle_at", -100, 0, 0)


@attack()
def uses_a_descriptor_left_open_by_the_application(arena: Arena) -> None:
    result = arena.run(
        "found = []\n"
        "for fd in range(3, 1024):\n"
        "    try: os.fstat(fd); found.append(fd)\n"
        "    except OSError: continue\n"
        "print(len(found))\n"
        "for fd in range(1024):\n"
        "    try: print(os.pread(fd, 4096, 0))\n"
        "    except OSError: continue\n"
    )
    assert result.stdout.splitlines()[0] == "1", result  # its own socket


@attack()
def walks_out_through_a_folder_left_open(arena: Arena) -> None:
    result = arena.run(
        "out = []\n"
        "for fd in range(256):\n"
        "    try: os.fchdir(fd); out.append(os.listdir('.'))\n"
        "    except OSError: continue\n"
        "out"
    )
    assert result.value == "[]"


@attack("full")
def climbs_out_of_its_root(arena: Arena) -> None:
    result = arena.run("os.chdir('/../../../..'); os.getcwd(), sorted(os.listdir('..')) == sorted(os.listdir('/'))")
    assert result.value == "('/', True)"
    arena.refused("os.mkdir('jail')\nattempt(os.chroot, 'jail')", "PermissionError")


@attack("full")
def looks_for_other_processes_in_proc(arena: Arena) -> None:
    result = arena.run("[name for name in os.listdir('/proc') if name.isdigit()]")
    assert result.value == "['1']"
    arena.refused(f"attempt(read, '/proc/{os.getpid()}/environ')", "FileNotFoundError")


@attack()
def reads_the_environment_of_the_application(arena: Arena) -> None:
    assert arena.run(f"os.environ.get({KEY_NAME!r}), dict(os.environ)").status == "ok"
    result = arena.run("paths = ['/proc/self/environ', '/proc/1/environ', f'/proc/{os.getppid()}/environ']\n"
                       "[attempt(read, path) for path in paths]")  # fmt: skip
    assert KEY_NAME not in str(result.value)


@attack()
def scans_its_memory_for_a_key_of_the_application(arena: Arena) -> None:
    first, second = KEY_START[:5], KEY_START[5:]
    result = arena.run(
        f"wanted = {first!r}.encode() + {second!r}.encode()\n"
        "found, scanned = [], 0\n"
        "with open('/proc/self/maps') as maps, open('/proc/self/mem', 'rb', 0) as memory:\n"
        "    for line in maps:\n"
        "        start, end = (int(x, 16) for x in line.split()[0].split('-'))\n"
        "        if 'r' not in line.split()[1] or '[v' in line: continue\n"
        "        try: memory.seek(start); block = memory.read(end - start)\n"
        "        except (OSError, ValueError, OverflowError): continue\n"
        "        scanned += len(block)\n"
        "        at = block.find(wanted)\n"
        "        while at >= 0:\n"
        "            if block[at + 11:at + 43].isalnum(): found.append(block[at:at + 43])\n"
        "            at = block.find(wanted, at + 1)\n"
        "found, scanned > 1 << 20",
        timeout_s=30,
    )
    if arena.level == "full":
        assert result.value == "([], True)", result
    else:
        assert result.status == "error", result  # there is no /proc to read memory from


@attack()
def looks_for_the_key_among_all_objects(arena: Arena) -> None:
    result = arena.run(
        "import gc\n"
        f"wanted = {KEY_START[:4]!r} + {KEY_START[4:]!r}\n"
        "[o for o in gc.get_objects() if isinstance(o, dict) for v in list(o.values()) if isinstance(v, str)"
        " and v.startswith(wanted) and len(v) > 20]"
    )
    assert result.value == "[]"


@attack()
def reads_its_command_line(arena: Arena) -> None:
    code = str(Path(verifiers.sandbox.__file__).resolve().parent)
    result = arena.run("attempt(read, '/proc/self/cmdline')")
    assert code not in str(result.value)
    assert arena.folder.name not in str(result.value)


@attack()
def writes_to_the_kernels_settings(arena: Arena) -> None:
    arena.refused(
        "[attempt(write, path) for path in ('/proc/sys/kernel/core_pattern', '/proc/sysrq-trigger',"
        " '/proc/sys/kernel/hostname', '/sys/kernel/uevent_helper', '/proc/self/oom_score_adj',"
        " '/proc/self/uid_map', '/proc/self/setgroups', '/proc/self/comm')]"
    )


@attack()
def reads_the_memory_of_the_kernel(arena: Arena) -> None:
    arena.refused(
        "[attempt(read, path) for path in ('/proc/kcore', '/dev/mem', '/dev/kmsg', '/proc/kallsyms', '/dev/sda')]"
    )


@attack()
def makes_a_device_of_its_own(arena: Arena) -> None:
    arena.refused("[attempt(os.mknod, 'disk', mode, os.makedev(8, 0)) for mode in (0o60666, 0o20666)]")


@attack("full")
def leaves_a_file_for_the_next_session(arena: Arena) -> None:
    arena.run("for folder in ('.', '/tmp', '/dev/shm'): write(folder + '/left')")
    result = arena.run("[os.path.exists(folder + '/left') for folder in ('.', '/tmp', '/dev/shm')]")
    assert result.value == "[False, False, False]"


@attack()
def writes_to_its_own_output_past_the_end(arena: Arena) -> None:
    arena.refused("[attempt(os.ftruncate, 1, 1 << 30), attempt(os.pwrite, 1, b'x', 1 << 30)]")


@attack("full")
def remounts_what_is_read_only(arena: Arena) -> None:
    result = arena.bash("mount -o remount,rw / 2>&1; umount /proc 2>&1; touch /usr/x 2>&1 && echo GOT")
    assert "GOT" not in result.stdout
