"""A stand-in for the programs ``docker`` and ``podman``: it notes how it was called, and runs what it is told to run
in a folder of its own, with none of the isolation. As the first argument after it, the folder to note it in.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def main(notes: Path, words: list[str]) -> int:
    with (notes / "calls.jsonl").open("a") as file:
        file.write(json.dumps(words) + "\n")
    if words[0] == "kill":
        os.killpg(int((notes / words[1]).read_text()), signal.SIGKILL)
        return 0
    given = [word for word in words[1:] if not word.startswith("--")]
    if given[0] == "no-such-image":
        print("Unable to find image 'no-such-image:latest' locally", file=sys.stderr)
        return 125
    name = next(word for word in words if word.startswith("--name=")).removeprefix("--name=")
    with tempfile.TemporaryDirectory() as work, tempfile.TemporaryDirectory() as kept:
        environment = {"PATH": os.environ["PATH"], "TMPDIR": kept, "HOME": work}
        start = {"cwd": work, "env": environment, "start_new_session": True}
        process = subprocess.Popen([sys.executable, *given[2:]] if given[1] == "python3" else given[1:], **start)
        (notes / name).write_text(str(process.pid))
        code = process.wait()
        if given[0] == "slow-engine":  # it puts away what ended, and says so only then
            time.sleep(3)
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
