"""Cost of thousands of concurrent rollouts: event loop lag, memory per waiting rollout, and CPU time by number.

python benchmarks/scale.py [lag|memory|replies|resume|curve]
"""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from _server import raise_open_files, running  # noqa: E402
from rollouts import make_env, questions  # noqa: E402

MANY = 16_384


def rss_bytes() -> int:
    """Resident memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def lag_probe(lags: list[float], every_s: float = 0.01) -> None:
    while True:
        began = time.perf_counter()
        await asyncio.sleep(every_s)
        lags.append(time.perf_counter() - began - every_s)


def worker_lag(url: str, n: int) -> str:
    import verifiers as vf

    env, client, lags = make_env(vf, questions(n)), vf.HTTPClient(url, max_concurrent=n), []

    async def main():
        probe = asyncio.create_task(lag_probe(lags))
        results = await env.evaluate(client=client, model="canned", max_concurrent=n, use_tqdm=False)
        probe.cancel()
        return results

    began = time.process_time()
    results = asyncio.run(main())
    cpu = (time.process_time() - began) / n * 1000
    assert len(results.rewards) == n, results
    lags.sort()
    p50, p99 = (lags[int(len(lags) * q)] * 1000 for q in (0.5, 0.99))
    return f"all {n:,} finished; loop lag p50 {p50:.1f} ms, p99 {p99:.1f} ms; {cpu:.3f} ms of CPU each"


def worker_memory(url: str, n: int) -> str:
    import verifiers as vf

    env, client = make_env(vf, questions(n)), vf.HTTPClient(url, max_concurrent=n)

    async def main():
        await env.evaluate(client=vf.HTTPClient(os.environ["QUICK"]), model="canned", num_examples=200, use_tqdm=False)
        rows = list(env.dataset)  # the memory of the messages is not the runner's
        gc.collect()
        before = rss_bytes()
        run = asyncio.create_task(env.evaluate(client=client, model="canned", max_concurrent=n, use_tqdm=False))
        waiting = 0
        while waiting < n:
            await asyncio.sleep(0.5)
            waiting = in_flight(client)
        gc.collect()
        used = rss_bytes() - before
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)
        return used / len(rows)

    return f"{asyncio.run(main()) / 1000:.1f} kB a waiting rollout, its messages included, with {n:,} waiting"


def worker_replies(_: str, n: int) -> str:
    """Memory of large replies in a saved run: as text, and in other fields of the endpoint's response."""
    import verifiers as vf

    class Wordy:
        def __init__(self, kind: str) -> None:
            self.kind = kind

        async def complete(self, request):
            large = request.prompt[-1]["content"][-1] * (20 << 20)
            message = {"role": "assistant", "content": large if self.kind == "text" else "4"}
            return vf.Completion(message=message, raw={"choices": [{"message": message}], "more": large})

    grown = {}
    for kind in ("text", "other"):
        env = make_env(vf, questions(n))
        env.evaluate(client=Wordy(kind), model="canned", num_examples=1, use_tqdm=False)
        gc.collect()
        before = rss_bytes()
        with tempfile.TemporaryDirectory() as folder:
            results = env.evaluate(
                client=Wordy(kind), model="canned", results_path=f"{folder}/run", max_concurrent=1, use_tqdm=False
            )
            assert len(results.rewards) == n
            gc.collect()
            grown[kind] = (rss_bytes() - before) / 2**20
    return (
        f"{n} replies of 20 MiB in a saved run: {grown['text']:.0f} MiB more as text, {grown['other']:.0f} MiB as other"
    )


def in_flight(client) -> int:
    """The number of unanswered requests, counted as this process's open sockets to the server."""
    port = client.base_url.rstrip("/").split(":")[-1].split("/")[0]
    target = f"0100007F:{int(port):04X}"
    with open("/proc/self/net/tcp") as file:
        return sum(1 for line in file if line.split()[2] == target and line.split()[3] == "01")


def worker_curve(url: str, n: int, concurrency: int) -> str:
    import verifiers as vf

    env, client = make_env(vf, questions(n)), vf.HTTPClient(url, max_concurrent=concurrency)
    env.evaluate(client=client, model="canned", num_examples=200, use_tqdm=False)
    with tempfile.TemporaryDirectory() as folder:
        began = time.process_time()
        results = env.evaluate(
            client=client, model="canned", max_concurrent=concurrency, results_path=f"{folder}/run", use_tqdm=False
        )
        took = time.process_time() - began
    assert len(results.rewards) == n, results
    return f"{n:>7,} rollouts, {concurrency:>5,} at once: {took / n * 1000:.3f} ms of CPU each, {rss_bytes() >> 20} MiB"


def worker_resume(url: str, n: int) -> str:
    """The time from the call to the first request, for a run that is 99% done; without a server."""
    import verifiers as vf

    asked_at: list[tuple[float, float]] = []

    class Canned:
        async def complete(self, request):
            asked_at.append((time.process_time(), time.perf_counter()))
            return vf.Completion(message={"role": "assistant", "content": "word " * 180})

    def evaluate(**options):
        env = make_env(vf, [{**row, "question": row["question"] + " word" * 160} for row in questions(n)])
        began = time.process_time(), time.perf_counter()
        env.evaluate(client=Canned(), model="canned", results_path=path, max_concurrent=256, use_tqdm=False, **options)
        return began

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run")
        evaluate()
        lines = (path / "results.jsonl").read_bytes().splitlines(keepends=True)
        (path / "results.jsonl").write_bytes(b"".join(lines[: -n // 100]))
        asked_at.clear()
        began = evaluate(resume=True)
    assert len(asked_at) == n // 100, len(asked_at)
    cpu, wall = (at - start for at, start in zip(asked_at[0], began, strict=True))
    size = sum(map(len, lines)) / len(lines) / 1000
    return f"resume of {n:,} rows ({size:.1f} kB each): first request after {cpu:.2f} s of CPU, {wall:.2f} s wall"


def spawn(*args: object, **environment: str) -> None:
    command = [sys.executable, __file__, "--worker", *map(str, args)]
    out = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    if out.returncode:
        raise SystemExit(out.stderr[-3000:])
    print(out.stdout.strip(), flush=True)


def main(wanted: list[str]) -> None:
    if "lag" in wanted:
        with running(latency_s=2.0) as url:
            spawn("lag", url, MANY)
    if "memory" in wanted:
        with running(latency_s=120.0) as slow, running() as quick:
            spawn("memory", slow, MANY, QUICK=quick)
    if "replies" in wanted:
        spawn("replies", "-", 30)
    if "resume" in wanted:
        spawn("resume", "-", 100_000)
    if "curve" in wanted:
        with running() as url:
            for n in (1_000, 10_000, 100_000):
                spawn("curve", url, n, 512)
            for concurrency in (64, 512, 4_096):
                spawn("curve", url, 10_000, concurrency)


if __name__ == "__main__":
    raise_open_files()
    if "--worker" in sys.argv:
        kind, url, *numbers = sys.argv[2:]
        print(globals()[f"worker_{kind}"](url, *map(int, numbers)))
    else:
        main(sys.argv[1:] or ["lag", "memory", "replies", "resume", "curve"])
