"""Names of modules → modules imported before any process is forked, so that no cell waits for them."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable

COMMON = (
    "argparse ast base64 bisect calendar cmath collections collections.abc contextlib copy csv dataclasses datetime "
    "decimal difflib enum fractions functools hashlib heapq inspect io itertools json linecache math operator os.path "
    "pprint queue random re statistics string struct textwrap threading time traceback types typing unicodedata uuid"
)
# Without a root of its own, a session that gave up root may not be able to read a Python that lies in root's home.
IF_UNREADABLE = (
    "abc array asyncio concurrent.futures contextvars copyreg encodings.idna fnmatch getopt glob gzip html html.parser "
    "keyword locale logging mmap numbers optparse pathlib pickle platform reprlib sched secrets selectors shlex shutil "
    "signal socket stat subprocess symtable tempfile token tokenize urllib.parse warnings weakref zipfile zlib"
)


def preload(names: Iterable[str]) -> None:
    """Import them for all sessions; one that breaks ends this process, and its last words say which it was."""
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError:  # it is not installed, which a cell that imports it will hear
            continue
        except BaseException as error:  # foreign code
            said = " ".join(str(error).split())
            os.write(2, f"the package {name!r} cannot be imported ({type(error).__name__}: {said})\n".encode())
            os._exit(1)
