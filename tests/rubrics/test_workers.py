"""CPU-bound functions run in processes that can be killed: one call's hang or crash is its own, and nothing leaks."""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import functools
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from verifiers.errors import GraderError, WorkerError, describe
from verifiers.parsers import Parser
from verifiers.rubrics import Rubric, cpu_bound, workers
from verifiers.rubrics.shipping import InWorker
from verifiers.rubrics.workers import call_in_worker, check_shippable
from verifiers.types import State

ROOT = Path(__file__).resolve().parent.parent.parent


def call(function: Any, timeout_s: float | None = 20.0, /, **kwargs: Any) -> Any:
    return asyncio.run(call_in_worker(function, kwargs, timeout_s=timeout_s))


@pytest.fixture
def fresh_pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], workers._Pool]]:
    """A pool of the size asked for, in place of the one all other tests share."""
    pool = workers._Pool()

    def make(size: int) -> workers._Pool:
        monkeypatch.setattr(workers, "_pool", pool)
        monkeypatch.setattr(workers, "_cores", lambda: size)
        return pool

    yield make
    pool.close()


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] != "Z"


def wait_until_gone(pids: list[int], limit_s: float = 10.0) -> None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if not any(map(is_running, pids)):
            return
        time.sleep(0.02)
    pytest.fail(f"still running: {[pid for pid in pids if is_running(pid)]}")


# --- functions to send --------------------------------------------------------------------------------------------


def pid() -> int:
    return os.getpid()


def add(a: float, b: float) -> float:
    return a + b


def spin() -> None:
    while True:
        pass


def power_tower() -> int:
    return 9**9**9**9  # one instruction that never gives the interpreter back


def leave() -> None:
    os._exit(7)


def read_address_zero() -> None:
    ctypes.string_at(0)


def give_up() -> None:
    sys.exit("enough")


def fail(reason: str) -> None:
    raise LookupError(f"no {reason}")


def nap(seconds: float) -> int:
    time.sleep(seconds)
    return os.getpid()


# --- calls --------------------------------------------------------------------------------------------------------


def test_a_function_runs_in_another_process_and_its_result_comes_back() -> None:
    assert call(add, a=1, b=2.5) == 3.5
    assert call(pid) != os.getpid()
    assert call(add, None, a=[1], b=[2]) == [1, 2]


def test_workers_outlive_the_loop_that_started_them(fresh_pool: Any) -> None:
    fresh_pool(1)
    assert call(pid) == call(pid)


def test_calls_come_from_any_thread_and_loop_at_once() -> None:
    results: list[Any] = []

    async def many() -> list[Any]:
        return await asyncio.gather(*(call_in_worker(add, {"a": i, "b": 1}, timeout_s=20) for i in range(20)))

    threads = [threading.Thread(target=lambda: results.append(asyncio.run(many()))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [list(range(1, 21))] * 4


def test_an_async_function_runs_to_its_end() -> None:
    async def later(x: int) -> int:
        await asyncio.sleep(0)
        return x + 1

    assert call(later, x=1) == 2


def test_numbers_of_other_libraries_become_plain_ones_and_other_objects_are_refused() -> None:
    def numbers() -> Any:
        import numpy as np

        return [np.float32(0.5), np.arange(3), Fraction(1, 4), (1, True, None), {1}]

    assert call(numbers) == [0.5, [0, 1, 2], 0.25, [1, True, None], [1]]
    with pytest.raises(GraderError, match="TypeError: it returned a Parser"):
        call(Parser)


def test_what_a_function_prints_does_not_disturb_the_result(fresh_pool: Any, capfd: pytest.CaptureFixture[str]) -> None:
    fresh_pool(1)

    def chatty() -> int:
        import os

        print("hello")
        os.write(1, b"raw\n")
        return 1

    assert call(chatty) == 1
    assert capfd.readouterr().err.count("hello\nraw\n") == 1


def test_large_arguments_and_results_pass() -> None:
    text = "x" * 3_000_000
    assert call(add, a=text, b=text) == text * 2


def test_an_exception_comes_back_with_its_traceback() -> None:
    with pytest.raises(GraderError, match=r"^'fail' raised LookupError: no colour$") as caught:
        call(fail, reason="colour")
    record = describe(caught.value)
    assert record["blame"] == "grader"
    assert "in fail" in record["traceback"]
    assert call(add, a=1, b=1) == 2


def test_a_call_costs_the_application_little() -> None:
    async def many() -> float:
        await asyncio.gather(*(call_in_worker(add, {"a": 1, "b": 1}, timeout_s=20) for _ in range(50)))
        began = time.process_time()
        await asyncio.gather(*(call_in_worker(add, {"a": 1, "b": 1}, timeout_s=20) for _ in range(300)))
        return (time.process_time() - began) / 300

    assert min(asyncio.run(many()) for _ in range(3)) < 0.001  # 0.1 ms on a quiet machine


# --- one call's trouble is its own --------------------------------------------------------------------------------


@pytest.mark.parametrize("hang", [spin, power_tower])
def test_a_call_that_hangs_is_stopped_at_its_limit_and_the_others_finish(hang: Callable[..., Any]) -> None:
    async def many() -> list[Any]:
        calls = [call_in_worker(hang, {}, timeout_s=0.3)]
        calls += [call_in_worker(add, {"a": i, "b": i}, timeout_s=20) for i in range(10)]
        return await asyncio.gather(*calls, return_exceptions=True)

    began = time.monotonic()
    stopped, *others = asyncio.run(many())
    assert isinstance(stopped, GraderError)
    assert str(stopped) == f"{hang.__name__!r} did not finish within 0.3 s and was stopped"
    assert others == [2 * i for i in range(10)]
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("crash", "how"),
    [
        (leave, "'leave' ended its worker process (exit status 7)"),
        (read_address_zero, "'read_address_zero' ended its worker process (SIGSEGV)"),
        (give_up, "'give_up' raised SystemExit: enough"),
    ],
)
def test_a_crash_fails_its_own_call_and_says_how(crash: Callable[..., Any], how: str) -> None:
    with pytest.raises(GraderError, match=re.escape(how)):
        call(crash)
    assert call(add, a=1, b=1) == 2


def test_a_worker_that_was_killed_while_idle_is_replaced_without_blame() -> None:
    idle = call(pid)
    os.kill(idle, signal.SIGKILL)
    os.waitid(os.P_PID, idle, os.WEXITED | os.WNOWAIT)  # it dies in its own time, and the pool reaps it
    assert call(pid) != idle


def test_waiting_for_a_worker_does_not_count_against_the_limit(fresh_pool: Any) -> None:
    fresh_pool(1)

    async def many() -> list[Any]:
        return await asyncio.gather(*(call_in_worker(nap, {"seconds": 0.6}, timeout_s=2.0) for _ in range(5)))

    assert len(set(asyncio.run(many()))) == 1


def test_a_cancelled_call_frees_its_worker_and_one_that_waits_is_never_made(fresh_pool: Any, tmp_path: Path) -> None:
    fresh_pool(1)
    mark = str(tmp_path / "called")

    async def cancel_both() -> Any:
        running = asyncio.create_task(call_in_worker(nap, {"seconds": 60}, timeout_s=None))
        await asyncio.sleep(0.5)
        waiting = asyncio.create_task(call_in_worker(os.mkdir, {"path": mark}, timeout_s=None))
        await asyncio.sleep(0)
        running.cancel()
        waiting.cancel()
        return await call_in_worker(add, {"a": 1, "b": 1}, timeout_s=20)

    began = time.monotonic()
    assert asyncio.run(cancel_both()) == 2
    assert time.monotonic() - began < 20
    assert not os.path.exists(mark)


def test_a_worker_is_replaced_after_so_many_calls(fresh_pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh_pool(1)
    monkeypatch.setattr(workers, "MAX_CALLS", 2)
    first, second, third = call(pid), call(pid), call(pid)
    assert first == second != third


def test_idle_workers_end_after_a_while(fresh_pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh_pool(1)
    monkeypatch.setattr(workers, "IDLE_S", 0.05)
    wait_until_gone([call(pid)])
    assert call(add, a=1, b=1) == 2


def test_a_program_that_never_starts_is_an_infrastructure_error(
    fresh_pool: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fresh_pool(1)
    program = tmp_path / "program.py"
    program.write_text("raise SystemExit(3)")
    monkeypatch.setattr(workers, "_PROGRAM", str(program))
    with pytest.raises(WorkerError, match="exit status 3; exit status 3; exit status 3"):
        call(pid)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    with pytest.raises(WorkerError, match="no-python"):
        call(pid)
    monkeypatch.undo()


# --- what is sent -------------------------------------------------------------------------------------------------


def test_lambdas_closures_partials_and_local_functions_can_be_sent() -> None:
    bonus = 10

    def outer(x: int) -> int:
        return inner(x) + bonus

    def inner(x: int) -> int:
        return 0 if x == 0 else 1 + inner(x - 1)

    assert call(lambda x: x + bonus, x=1) == 11
    assert call(outer, x=5) == 15
    assert call(functools.partial(add, b=2), a=1) == 3


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, Any]]:
    """Cells that run in a ``__main__`` without a file."""
    module = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)

    def run(cell: str) -> dict[str, Any]:
        exec(textwrap.dedent(cell), module.__dict__)
        return module.__dict__

    return run


CELL = """
    import abc, dataclasses, functools, os.path
    import xml.etree.ElementTree
    from collections import namedtuple

    class Shape(abc.ABC):
        scale = 2
        def __init__(self, size): self.size = size
        @abc.abstractmethod
        def area(self): ...
        @staticmethod
        def unit(): return 1
        @classmethod
        def of(cls, size): return cls(size)
        @property
        def double(self): return self.size * self.scale
        @functools.cached_property
        def cached(self): return self.size + 1

    class Square(Shape):
        __slots__ = ("extra",)
        def __init__(self, size):
            super().__init__(size)
            self.extra = 1
        def area(self): return self.size ** 2

    @dataclasses.dataclass(frozen=True)
    class Point:
        x: int
        y: int = 3
        names: tuple = dataclasses.field(default=(), metadata={"unit": "m"})

    def grade(completion, shape):
        assert isinstance(shape, Square)
        square = Square.of(shape.size)
        xml.etree.ElementTree.fromstring("<a/>")
        point = dataclasses.asdict(dataclasses.replace(Point(1), x=4))
        return [square.area(), square.unit(), square.double, square.cached, square.extra, point["x"] + point["y"]]
"""


def test_functions_and_classes_of_a_notebook_are_sent_as_they_are(notebook: Callable[[str], dict[str, Any]]) -> None:
    names = notebook(CELL)
    shape = names["Square"](3)
    assert call(names["grade"], completion="x", shape=shape) == [9, 1, 6, 4, 1, 7]


def test_a_helper_that_is_defined_or_changed_later_is_the_one_that_runs(
    notebook: Callable[[str], dict[str, Any]],
) -> None:
    names = notebook("def grade(completion): return helper(completion)")
    check_shippable(names["grade"])
    notebook("def helper(completion): return 1")
    assert call(names["grade"], completion="x") == 1
    notebook("def helper(completion): return 2")
    assert call(names["grade"], completion="x") == 2


def test_a_function_of_a_module_that_was_loaded_from_a_path_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    file = tmp_path / "my_environment.py"
    file.write_text("LEVEL = 3\n\ndef grade(completion):\n    return LEVEL\n")
    spec = importlib.util.spec_from_file_location("my_environment_by_path", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "my_environment_by_path", module)
    spec.loader.exec_module(module)
    assert call(module.grade, completion="x") == 3


def test_a_function_named_for_the_worker_alone_is_imported_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_in_workers.py").write_text("def double(x):\n    return 2 * x\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert call(InWorker("only_in_workers", "double"), x=2) == 4
    assert "only_in_workers" not in sys.modules
    with pytest.raises(GraderError, match="No module named 'no_such_module'"):
        call(InWorker("no_such_module", "f"))


@dataclasses.dataclass
class Connection:
    lock: Any = dataclasses.field(default_factory=threading.Lock)

    def grade(self, completion: str) -> float:
        return 1.0


def test_what_cannot_be_sent_is_refused_when_the_rubric_is_made() -> None:
    lock = threading.Lock()
    connection = Connection()

    @cpu_bound
    def guarded(completion):
        with lock:
            return 1.0

    with pytest.raises(TypeError, match="'guarded' is cpu_bound and cannot be sent to a worker process: cannot pickle"):
        Rubric(funcs=[guarded])
    method = functools.partial(connection.grade)
    with pytest.raises(TypeError, match="it is a method, and its Connection cannot be pickled"):
        check_shippable(connection.grade)
    with pytest.raises(TypeError, match="put it into a separate module"):
        check_shippable(method)


def test_the_global_that_cannot_be_sent_is_named(notebook: Callable[[str], dict[str, Any]]) -> None:
    names = notebook(
        """
        import enum, threading
        client = threading.Lock()
        class Colour(enum.Enum):
            RED = 1
        def grade(completion): return client
        def coloured(completion): return Colour.RED.value
        """
    )
    with pytest.raises(TypeError, match="it uses the global 'client', a lock, which cannot be pickled"):
        check_shippable(names["grade"])
    with pytest.raises(TypeError, match=r"it uses the global 'Colour'.*metaclass 'Enum"):
        check_shippable(names["coloured"])


def rollout(**fields: Any) -> State:
    row = {"prompt": "2+2?", "answer": "4", "task": "sums", "info": {}, "example_id": 0}
    return State({"input": row, "completion": "4", "trajectory": [], **fields})


def test_a_state_arrives_without_live_objects_and_what_cannot_be_pickled() -> None:
    def look(state: State) -> list[Any]:
        return [sorted(state), state["answer"], type(state).__name__, state["trajectory"], state["game"]]

    lock = threading.Lock()
    state = rollout(
        client=object(),
        responses=["kept by the environment"],
        lock=lock,
        trajectory=[{"response": object(), "reward": 1.0}],
        game={"board": [1, lock], "lock": lock},
    )
    keys = ["completion", "game", "input", "responses", "trajectory"]
    assert call(look, state=state) == [keys, "4", "State", [{"response": None, "reward": 1.0}], {"board": [1, None]}]
    assert state["lock"] is lock
    assert state["game"]["lock"] is lock


def test_an_error_says_what_the_state_came_without() -> None:
    def look(state: State) -> Any:
        return state["lock"]

    with pytest.raises(GraderError, match=r"KeyError: 'lock' \(not sent to the worker: state\['lock'\]\)"):
        call(look, state=rollout(lock=threading.Lock()))


def test_an_argument_that_is_asked_for_and_cannot_be_sent_is_an_error_and_any_other_is_left_out() -> None:
    def greedy(completion: str, connection: Any) -> float:
        return 1.0

    def modest(completion: str, **kwargs: Any) -> list[str]:
        return sorted(kwargs)

    arguments = {"completion": "x", "connection": Connection(), "answer": "4"}
    with pytest.raises(GraderError, match="'greedy' is cpu_bound and takes 'connection', a Connection"):
        call(greedy, **arguments)
    assert call(modest, **arguments) == ["answer"]


def test_a_parser_with_a_lambda_is_sent_too() -> None:
    def grade(parser: Parser, completion: str) -> str | None:
        return parser.parse_answer(completion)

    assert call(grade, parser=Parser(extract_fn=lambda text: text.upper()), completion="yes") == "YES"


def test_whole_groups_and_batches_can_be_cpu_bound() -> None:
    @cpu_bound
    def ranks(completions, states):
        return [len(state["completion"]) for state in states]

    states = [rollout(client=object()), rollout(completion="four")]
    Rubric(funcs=[ranks]).score_group(states)
    assert [state["reward"] for state in states] == [1.0, 4.0]


def test_workers_do_not_get_the_keys_of_the_application(fresh_pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "secret")
    monkeypatch.setenv("MY_SETTING", "1")
    fresh_pool(1)

    def environment() -> dict[str, str]:
        return dict(os.environ)

    seen = call(environment)
    assert "MY_API_KEY" not in seen
    assert seen["MY_SETTING"] == "1"


# --- the life of the application ----------------------------------------------------------------------------------


def start_script(tmp_path: Path, script: str) -> subprocess.Popen[str]:
    file = tmp_path / "script.py"
    file.write_text(textwrap.dedent(script))
    return subprocess.Popen(
        [sys.executable, "-W", "always", str(file)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_script_without_a_main_guard_runs_once(tmp_path: Path) -> None:
    script = """
        import re
        import verifiers as vf

        print("top", flush=True)
        WORD = re.compile(r"[a-z]+")

        def count(text):
            return len(WORD.findall(text))

        @vf.cpu_bound
        def words(completion):
            return count(completion)

        rubric = vf.Rubric(funcs=[words])
        print(rubric.score_rollout_sync("", "one two three", "", {})["reward"])
        print(rubric.score_rollout_sync("", "four", "", {})["reward"])
    """
    with start_script(tmp_path, script) as process:
        out, err = process.communicate(timeout=60)
    assert (out, err) == ("top\n3.0\n1.0\n", "")


HANGING = """
    import asyncio, contextlib, os, pathlib, sys, threading, time
    from verifiers.rubrics.workers import call_in_worker

    def pid(): return os.getpid()
    def hang(path):
        import subprocess, time
        child = subprocess.Popen(["sleep", "600"])
        path.write_text(f"{os.getpid()} {child.pid}")
        time.sleep(600)

    pids = pathlib.Path(sys.argv[0] + ".pids")

    def background():
        with contextlib.suppress(Exception):
            asyncio.run(call_in_worker(hang, {"path": pids}, timeout_s=None))

    threading.Thread(target=background, daemon=True).start()
    print(asyncio.run(call_in_worker(pid, {}, timeout_s=20)), flush=True)
    while not pids.exists() or not pids.read_text(): time.sleep(0.01)
    print("ready", flush=True)
"""


@pytest.mark.parametrize("end", ["returns", "is killed"])
def test_no_process_outlives_the_application(tmp_path: Path, end: str) -> None:
    script = HANGING + ("" if end == "returns" else "\n    time.sleep(600)\n")
    with start_script(tmp_path, script) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        idle = int(process.stdout.readline())
        assert process.stdout.readline() == "ready\n"
        if end == "is killed":
            process.kill()
        process.wait(timeout=30)
        busy = [int(number) for number in (tmp_path / "script.py.pids").read_text().split()]
        wait_until_gone([idle, *busy])
        assert process.stderr.read() == ""


def test_a_fork_of_the_application_has_workers_of_its_own(tmp_path: Path) -> None:
    script = """
        import asyncio, os, sys, warnings
        from verifiers.rubrics.workers import call_in_worker
        warnings.simplefilter("ignore", DeprecationWarning)

        def pid(): return os.getpid()
        def ask(): return asyncio.run(call_in_worker(pid, {}, timeout_s=20))

        before = ask()
        child = os.fork()
        if child == 0:
            assert ask() != before
            sys.exit(0)
        _, status = os.waitpid(child, 0)
        print(status, ask() == before)
    """
    with start_script(tmp_path, script) as process:
        out, err = process.communicate(timeout=60)
    assert (out, err) == ("0 True\n", "")
