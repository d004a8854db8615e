"""Rollouts on Ray workers of a local cluster with two nodes: the overhead per rollout, and the speed-up.

Needs Ray (pip install 'verifiers[ray]'). CPU time is that of this process and the workers together, without Ray's own.
"""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import contextmanager
from typing import Any

import verifiers as vf

SLEEP_S, ROLLOUTS, AT_ONCE = 0.05, 400, 32
SCORED, SPIN_S = 60, 0.2


class Sleeping(vf.SingleTurnEnv):
    async def setup_state(self, state: Any) -> Any:
        await asyncio.sleep(SLEEP_S)
        return state


def spin(completion: Any, state: Any) -> float:
    """Uses a fixed amount of CPU time, independent of other load."""
    began, wall = time.thread_time(), time.perf_counter()
    while time.thread_time() - began < SPIN_S:
        pass
    state["spun"] = (os.getpid(), wall, time.perf_counter())
    return 1.0


def rows(n: int) -> list[dict[str, Any]]:
    return [{"question": f"q{i}", "answer": ""} for i in range(n)]


@contextmanager
def two_nodes() -> Any:
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="disabled", RAY_raylet_start_wait_time_s="90")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1)
        yield cluster.address
    finally:
        cluster.shutdown()


def timed(env: vf.Environment, **given: Any) -> tuple[float, float, Any]:
    wall, cpu = time.perf_counter(), time.process_time()
    results = env.evaluate(client=vf.FakeClient("x"), model="m", use_tqdm=False, **given)
    assert not results.failed
    return time.perf_counter() - wall, time.process_time() - cpu, results


def overhead(workers: Any) -> tuple[float, float]:
    """Wall-clock seconds of the same rollouts in one process and on workers, each the best of three."""
    env = Sleeping(dataset=rows(ROLLOUTS), rubric=vf.Rubric([lambda completion: 1.0]))
    timed(env, max_concurrent=AT_ONCE, workers=workers)  # warm-up: the workers load the environment once
    alone = min(timed(env, max_concurrent=AT_ONCE)[:2] for _ in range(3))
    there = min(timed(env, max_concurrent=AT_ONCE, workers=workers)[:2] for _ in range(3))
    ideal_s = ROLLOUTS * SLEEP_S / AT_ONCE
    print(
        f"{ROLLOUTS} rollouts of {SLEEP_S * 1e3:.0f} ms, {AT_ONCE} at once: {ideal_s:.2f} s if nothing else took time"
    )
    print(f"  one process {alone[0]:.2f} s, Ray {there[0]:.2f} s: {there[0] / alone[0]:.2f} times as long")
    cpu = [one[1] / ROLLOUTS * 1e3 for one in (alone, there)]
    print(f"  CPU of this process, a rollout: {cpu[0]:.2f} ms alone, {cpu[1]:.2f} ms with Ray")
    return alone[0], there[0]


def speed_up(address: str, count: int) -> float:
    """The average number of workers that were scoring, which does not depend on other load."""
    from verifiers.integrations.ray import RayWorkers

    env = vf.SingleTurnEnv(dataset=rows(SCORED), rubric=vf.Rubric([spin]))
    with RayWorkers(address, count=count) as workers:
        timed(env, max_concurrent=count, workers=workers)
        took_s, _, results = timed(env, max_concurrent=count, workers=workers)
    busy = sum(end - begin for _, begin, end in (state["spun"] for state in results.rollouts)) / took_s
    said = f"{SCORED} scores of {SPIN_S:g} processor seconds, {count} workers: {took_s:.1f} s"
    print(f"{said}; {busy:.2f} of them scoring at any time ({busy / count:.2f} × {count})")
    return busy


def main() -> None:
    try:
        import ray  # noqa: F401
    except ImportError:
        print("Ray is not installed here: pip install 'verifiers[ray]'")
        return
    from verifiers.integrations.ray import RayWorkers

    with two_nodes() as address:
        with RayWorkers(address) as workers:
            overhead(workers)
        for count in (1, 2):
            speed_up(address, count)


if __name__ == "__main__":
    main()
