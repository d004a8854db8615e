"""Calls on hostile text: bounded by processor time and memory, never by the clock."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = """
import json, os, resource, signal, sys, time
from verifiers.rubrics.bounded import Bounded, ChildEndedError, ExhaustedError

def steps(what):
    yield 5.0
    yield {"step": "begun"}
    yield 0.1
    if what == "loop":
        while True: pass
    if what == "hold the interpreter":
        9 ** 9 ** 9
    if what == "backtrack":
        import re
        re.match("(a+)+$", "a" * 60 + "b")
    if what == "fill the memory":
        x = [bytes(2**20) for _ in range(2**20)]
    if what == "keep memory":
        kept.append(bytes(40 * 2**20))
    if what == "one allocation":
        x = bytearray(2**40)
    if what == "recurse":
        f = lambda: f()
        f()
    if what == "raise":
        raise KeyError("text")
    if what == "exit":
        os._exit(3)
    if what == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if what == "be killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "wait":
        time.sleep(0.5)
    yield {"step": what}

kept = []
bounded, found = Bounded(steps, memory_bytes=64 * 2**20), []
for what in json.loads(sys.argv[1]):
    try:
        found.append(bounded(what))
    except ExhaustedError as error:
        found.append(["exhausted", *error.steps])
    except ChildEndedError as error:
        found.append(["ended"])
bounded.close()
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([found, used.ru_utime + used.ru_stime]))
"""


def run(*what: str) -> tuple[list[Any], float]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(what)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    found, used_s = json.loads(done.stdout)
    return found, used_s


@pytest.mark.parametrize("what", ["loop", "hold the interpreter", "backtrack"])
def test_what_computes_for_too_long_is_ended_by_the_kernel_and_the_next_call_works(what: str) -> None:
    found, used_s = run("fine", what, what, "fine")
    assert found == [["begun", "fine"], *[["exhausted", "begun"]] * 2, ["begun", "fine"]]
    assert used_s < 0.8  # two limits of 0.1 s, and what starting the children takes


@pytest.mark.parametrize("what", ["fill the memory", "one allocation", "recurse", "raise", "exit", "crash"])
def test_what_takes_too_much_or_crashes_says_so_and_the_next_call_works(what: str) -> None:
    found, _ = run(what, "fine")
    assert found == [["exhausted", "begun"], ["begun", "fine"]]


def test_time_on_the_clock_plays_no_part() -> None:
    assert run("wait")[0] == [["begun", "wait"]]


def test_a_child_that_something_else_killed_has_found_nothing_out() -> None:
    assert run("be killed", "fine")[0] == [["ended"], ["begun", "fine"]]


def test_what_a_library_keeps_of_earlier_calls_does_not_take_the_memory_of_later_ones() -> None:
    assert run(*["keep memory"] * 5)[0] == [["begun", "keep memory"]] * 5
