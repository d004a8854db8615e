"""Cost of isolation: a fresh call, a call to a ready process, the next cell, calls per second, memory, a kill.

And its memory limit: the peak memory of twelve forks together, after they replaced their shell.

Calls of all contenders alternate, so that other load affects them equally.
"""

from __future__ import annotations

import argparse
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
CODE = "sum(range(100))"
BARE = "python -I -S, not isolated"
BUBBLE = "--unshare-all --die-with-parent --clearenv --proc /proc --dev /dev --tmpfs /scratch --chdir /scratch"
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
PAUSE_S = 0.01
UNTIL_READY_S = 1.5


def commands() -> dict[str, list[str]]:
    """The same code in a separate process: plain, and inside bubblewrap if it is installed."""
    from verifiers.sandbox.sight import readable_folders

    plain = [sys.executable, "-I", "-S", "-c", f"print({CODE})"]
    found = {BARE: plain}
    if program := shutil.which("bwrap"):
        binds = [part for folder in readable_folders() for part in ("--ro-bind", folder, folder)]
        found["bubblewrap"] = [program, *BUBBLE.split(), *binds, *plain]
    return found


def spawn(command: list[str]) -> None:
    subprocess.run(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, check=True)


def descendants(pid: int) -> list[int]:
    found = []
    with suppress(OSError):  # it has just ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += [int(child), *descendants(int(child))]
    return found


def cpu_s() -> float:
    """CPU time of this process, its descendants, and the processes they waited for (bubblewrap waits for none)."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = time.process_time() + children.ru_utime + children.ru_stime
    for pid in descendants(os.getpid()):
        with suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += sum(int(field) for field in fields[11:15]) / CLOCK_TICKS
    return total


def compare(calls: dict[str, Callable[[], object]], times: int, pause_s: float) -> None:
    """Call each alternately, many times; print the median, the best, and the ratio of medians to the bare process."""
    took: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(times):
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            took[name].append(time.perf_counter() - began)
            time.sleep(pause_s)
    bare = median(took[BARE])
    for name, seconds in took.items():
        ratio = median(seconds) / bare
        print(f"{name:28} p50 {median(seconds) * 1e3:7.2f} ms   best {min(seconds) * 1e3:6.2f} ms   {ratio:5.2f}×")


def one_after_another(call: Callable[[], object], times: int, pause_s: float = 0.0) -> str:
    """The median and the best of consecutive calls, with or without a pause."""
    took = []
    for _ in range(times):
        if pause_s:
            time.sleep(pause_s)
        began = time.perf_counter()
        call()
        took.append(time.perf_counter() - began)
    return f"p50 {median(took) * 1e3:7.2f} ms   best {min(took) * 1e3:6.2f} ms"


def first_cells(count: int, pause_s: float = 0.0) -> str:
    """The first cells of ready processes, one after another; no new process is started in between."""
    from verifiers.sandbox import Sandbox

    with Sandbox(warm=count) as sandbox:
        sandbox.start()
        time.sleep(UNTIL_READY_S)
        sandbox.warm = 0
        waiting = iter([sandbox.session() for _ in range(count)])
        return one_after_another(lambda: next(waiting).run(CODE), count, pause_s)


def cpu_of(calls: dict[str, Callable[[], object]], times: int) -> None:
    """Print the CPU time of one call of each."""
    for name, call in calls.items():
        before = cpu_s()
        for _ in range(times):
            call()
        time.sleep(0.2)  # until the last process has been reaped
        print(f"{name:28} {(cpu_s() - before) / times * 1e3:7.2f} ms of CPU")


def calls_per_second(call: Callable[[], object], clients: int, seconds: float) -> float:
    """Calls per second of several concurrent clients."""
    ends = time.perf_counter() + seconds

    def client(_: int) -> int:
        done = 0
        while time.perf_counter() < ends:
            call()
            done += 1
        return done

    began = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        done = sum(pool.map(client, range(clients)))
    return done / (time.perf_counter() - began)


def proportional_mb(pids: list[int]) -> float:
    """The proportional memory (PSS) of processes, in which shared pages count once."""
    total = 0
    for pid in pids:
        with suppress(OSError):  # it has just ended
            rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += sum(int(row.split()[1]) for row in rows if row.startswith("Pss:"))
    return total / 1024


def memory_of_sessions(count: int) -> float:
    """MiB of one ready process that waits for its first cell."""
    from verifiers.sandbox import Sandbox

    with Sandbox(warm=0) as sandbox, sandbox.session() as first:
        first.run("1")
        time.sleep(0.5)  # until earlier sessions have ended
        before = descendants(os.getpid())
        before_mb = proportional_mb(before)
        sandbox.warm = count
        sandbox.start()
        time.sleep(UNTIL_READY_S)
        after = descendants(os.getpid())
        assert len(after) - len(before) == count
        return (proportional_mb(after) - before_mb) / count


def kill_to_dead(times: int) -> str:
    """The time from killing a busy session until its process is gone."""
    from verifiers.sandbox import Sandbox

    took = []
    with Sandbox(warm=0) as sandbox:
        for _ in range(times):
            with sandbox.session() as session:
                session.run("import threading\nthreading.Thread(target=lambda: [0 for _ in iter(int, 1)]).start()")
                pidfd = os.dup(session._process._held.pidfd)
                poll = select.poll()
                poll.register(pidfd, select.POLLIN)
                began = time.perf_counter()
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                poll.poll()
                took.append(time.perf_counter() - began)
                os.close(pidfd)
    return f"p50 {median(took) * 1e3:7.2f} ms   best {min(took) * 1e3:6.2f} ms"


def most_of_twelve_forks(times: int) -> str:
    """The peak memory of twelve forks of 60 MiB together, with a limit of 128 MiB, after their shell has ended."""
    from verifiers.sandbox import Sandbox

    fill = "x = bytearray(60 << 20)\nfor at in range(0, len(x), 4096): x[at] = 1\n"
    code = f"import os, time\nfor n in range(11):\n    if os.fork() == 0: break\n{fill}time.sleep(60)"
    most = []
    with Sandbox(language="bash", memory_mb=128, files={"forks.py": code}, warm=0) as sandbox:
        for _ in range(times):
            with sandbox.session() as session, ThreadPoolExecutor(1) as pool:
                session.run("true")
                before = set(descendants(os.getpid()))
                running = pool.submit(session.run, "exec python3 -S forks.py")
                held = [0.0]
                while not running.done():
                    held.append(proportional_mb(list(set(descendants(os.getpid())) - before)))
                assert running.result().status == "memory", running.result()
                most.append(max(held))
    return f"p50 {median(most):7.0f} MiB  most {max(most):6.0f} MiB"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--times", type=int, default=200)
    options.add_argument("--seconds", type=float, default=5.0)
    given = options.parse_args()
    from verifiers.sandbox import Sandbox, level

    print(f"level {level()}; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    calls: dict[str, Callable[[], object]] = {name: lambda c=command: spawn(c) for name, command in commands().items()}
    if "bubblewrap" not in calls:
        print("bubblewrap is not installed (bwrap)")
    with ExitStack() as stack:
        cold, warm = (stack.enter_context(Sandbox(warm=count)) for count in (0, 1))
        session = stack.enter_context(cold.session())
        calls["sandbox, fresh"] = lambda: cold.run(CODE)
        warm.start()
        session.run(CODE)
        compare(
            {**calls, "sandbox, prewarmed": lambda: warm.run(CODE), "sandbox, next cell": lambda: session.run(CODE)},
            given.times,
            PAUSE_S,
        )
        print(f"{'sandbox, ready, in a row':28} {first_cells(50)}")
        print(f"{'sandbox, ready, after pauses':28} {first_cells(50, PAUSE_S)}")
        print(f"{'sandbox, cell upon cell':28} {one_after_another(lambda: session.run(CODE), given.times)}")
        cpu_of({name: call for name, call in calls.items() if name != "bubblewrap"}, given.times)
        for name, call in calls.items():
            print(f"{name:28} {calls_per_second(call, 4, given.seconds):7.0f} a second with 4 clients")
    print(f"a session that is ready      {memory_of_sessions(40):7.2f} MiB")
    print(f"kill to dead                 {kill_to_dead(50)}")
    if level().name == "full":
        print(f"twelve forks, 128 MiB        {most_of_twelve_forks(10)}")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
