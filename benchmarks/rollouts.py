"""CPU milliseconds per single-turn rollout (parser, two rewards, saved to disk), vs. classic 0.1.14 and bare aiohttp.

python benchmarks/rollouts.py                # installs classic in .bench/classic on first use
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
PEER = HERE.parent / ".bench" / "classic"
PEER_VERSION = "0.1.14"


def make_env(vf, rows):  # the same lines for both libraries
    parser = vf.XMLParser(["reasoning", "answer"])

    def correct(parser, completion, answer):
        return 1.0 if parser.parse_answer(completion) == answer else 0.0

    rubric = vf.Rubric(funcs=[correct, parser.get_format_reward_func()], weights=[1.0, 0.2], parser=parser)
    return vf.SingleTurnEnv(dataset=rows, system_prompt="Answer in the given format.", parser=parser, rubric=rubric)


def questions(n):
    return [{"question": f"What is 2+2? (asked {i} times before)", "answer": "4"} for i in range(n)]


def run_ours(url, n, concurrency, folder):
    from openai import AsyncOpenAI

    import verifiers as vf

    env = make_env(vf, questions(n))
    client = AsyncOpenAI(base_url=url, api_key="none")
    env.evaluate(client=client, model="canned", num_examples=200, max_concurrent=concurrency, use_tqdm=False)
    began = time.process_time()
    results = env.evaluate(
        client=client, model="canned", max_concurrent=concurrency, results_path=f"{folder}/run", use_tqdm=False
    )
    took = time.process_time() - began
    assert len(results.rewards) == n, results
    assert abs(sum(results.rewards) / n - 1.2) < 1e-9, results
    assert Path(folder, "run", "results.jsonl").read_bytes().count(b"\n") == n
    return took


def run_classic(url, n, concurrency, folder):
    os.environ["NO_KEY"] = "none"
    from datasets import Dataset

    import verifiers as vf
    from verifiers.types import ClientConfig

    env = make_env(vf, Dataset.from_list(questions(n)))
    client = ClientConfig(api_key_var="NO_KEY", api_base_url=url)
    quiet = {"on_progress": lambda *_: None}

    async def both():
        await env.evaluate(client, "canned", num_examples=200, max_concurrent=concurrency, **quiet)
        began = time.process_time()
        path = Path(folder) / "classic"
        results = await env.evaluate(
            client, "canned", max_concurrent=concurrency, save_results=True, results_path=path, **quiet
        )
        took = time.process_time() - began
        assert len(results["outputs"]) == n, len(results["outputs"])
        assert abs(sum(o["reward"] for o in results["outputs"]) / n - 1.2) < 1e-9
        return took

    took = asyncio.run(both())
    assert Path(folder, "classic", "results.jsonl").read_bytes().count(b"\n") == n
    return took


def run_bare(url, n, concurrency, folder):
    import aiohttp

    async def main():
        body = json.dumps({"model": "canned", "messages": [{"role": "user", "content": "What is 2+2?"}]}).encode()
        left = iter(range(n))

        async def worker(session):
            for _ in left:
                async with session.post(f"{url}/chat/completions", data=body) as response:
                    await response.read()

        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            await asyncio.gather(*(worker(session) for _ in range(concurrency)))

    began = time.process_time()
    asyncio.run(main())
    return time.process_time() - began


RUNS = {"verifiers": run_ours, "classic": run_classic, "aiohttp": run_bare}


def peer_python() -> str:
    python = PEER / "bin" / "python"
    if not python.exists():
        print(f"setting up verifiers {PEER_VERSION} in {PEER.relative_to(HERE.parent)} …", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(PEER)], check=True)
        subprocess.run([str(python), "-m", "pip", "-q", "install", f"verifiers=={PEER_VERSION}"], check=True)
    return str(python)


def measure(kind: str, url: str, n: int, concurrency: int) -> float:
    python = peer_python() if kind == "classic" else sys.executable
    environment = {**os.environ, "PYTHONPATH": "" if kind == "classic" else str(HERE.parent)}
    with tempfile.TemporaryDirectory() as folder:
        command = [python, __file__, "--worker", kind, url, str(n), str(concurrency), folder]
        out = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
    if out.returncode:
        raise SystemExit(f"{kind} failed:\n{out.stderr[-3000:]}")
    return float(out.stdout.splitlines()[-1]) / n * 1000


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("-n", type=int, default=4000)
    options.add_argument("-c", type=int, default=512)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--only", choices=list(RUNS))
    args = options.parse_args()
    sys.path.insert(0, str(HERE))
    from _server import running

    best: dict[str, float] = {}
    with running() as url:
        for _ in range(args.rounds):
            for kind in [args.only] if args.only else RUNS:
                n = args.n if kind != "classic" else min(args.n, 2000)
                cost = measure(kind, url, n, args.c)
                best[kind] = min(best.get(kind, cost), cost)
    for kind, cost in best.items():
        print(f"{kind:<10} {cost:.3f} ms of CPU a rollout (concurrency {args.c}, best of {args.rounds})")
    if len(best) == len(RUNS):
        print(f"classic / verifiers  {best['classic'] / best['verifiers']:.1f}×")
        print(f"verifiers / aiohttp  {best['verifiers'] / best['aiohttp']:.2f}×")


if __name__ == "__main__":
    if "--worker" in sys.argv:
        kind, url, n, concurrency, folder = sys.argv[2:]
        sys.path = [path for path in sys.path if Path(path or ".").resolve() != HERE]
        sys.path.insert(0, str(HERE))
        from _server import raise_open_files

        raise_open_files()
        print(RUNS[kind](url, int(n), int(concurrency), folder))
    else:
        main()
