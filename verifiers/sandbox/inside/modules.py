"""Imports modules in the zygote before it forks, so that no cell waits for them."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable

COMMON = (
    "argparse ast base64 bisect calendar cmath collections collections.abc contextlib copy csv dataclasses datetime "
    "decimal difflib enum fractions functools hashlib heapq inspect io itertools json linecache math operator os.path "
    "pprint queue random re statistics string struct textwrap threading time traceback types typing unicodedata uuid"
)
# Without its own mounts, a session that gave up root may not be able to read a Python installed in root's home.
IF_UNREADABLE = (
    "abc array asyncio concurrent.futures contextvars copyreg encodings.idna fnmatch getopt glob gzip html html.parser "
    "keyword locale logging mmap numbers optparse pathlib pickle platform reprlib sched secrets selectors shlex shutil "
    "signal socket stat subprocess symtable tempfile token tokenize urllib.parse warnings weakref zipfile zlib"
)


def preload(names: Iterable[str]) -> None:
    """Import modules for all sessions; if one raises, write its name to stderr and end this process."""
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError:  # not installed; a cell that imports it gets the error
            continue
        except BaseException as error:  # foreign code
            message = " ".join(str(error).split())
            os.write(2, f"the package {name!r} cannot be imported ({type(error).__name__}: {message})\n".encode())
            os._exit(1)
