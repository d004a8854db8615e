"""Names of attacks on standard input → how they went on standard output: run by a user who may do nothing."""

from __future__ import annotations

import json
import sys
import traceback

from tests.sandbox import (  # noqa: F401 - each notes its attacks
    attacks_files,
    attacks_kernel,
    attacks_network,
    attacks_processes,
    attacks_replies,
    attacks_resources,
    attacks_shared,
    attacks_watch,
)
from tests.sandbox.arena import ATTACKS, Arena, Skip, guard_processes, why_not


def outcome(name: str, level: str, arenas: dict[str, Arena]) -> dict[str, str]:
    """One fight."""
    if reason := why_not(level):
        return {"skipped": reason}
    if level not in arenas:
        arenas[level] = Arena(level)
    try:
        ATTACKS[name][0](arenas[level])
    except Skip as reason:
        return {"skipped": str(reason)}
    except Exception:
        return {"failed": traceback.format_exc()}
    return {}


def main() -> None:
    guard_processes()
    arenas: dict[str, Arena] = {}
    for line in sys.stdin:
        print(json.dumps(outcome(*json.loads(line), arenas)), flush=True)
    for arena in arenas.values():
        arena.close()


if __name__ == "__main__":
    main()
