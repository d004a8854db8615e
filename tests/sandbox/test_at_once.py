"""Sync and async, one and many: calls from loops and threads, in line for a place."""

from __future__ import annotations

import asyncio
import threading

import pytest

from verifiers.sandbox import Result, Sandbox
from verifiers.sandbox.drive import Gate, drive, drive_async

pytestmark = pytest.mark.usefixtures("full_level")


def test_inside_a_loop_calls_are_awaited() -> None:
    async def main() -> None:
        async with Sandbox() as sandbox:
            assert (await sandbox.run("1 + 1")).value == "2"
            async with sandbox.session() as session:
                await session.run("x = 1")
                await session.write("f", "x")
                assert await session.files() == ["f"]
                assert await session.read("f") == b"x"
                assert (await session.run("x")).value == "1"

    asyncio.run(main())


def test_inside_a_loop_a_call_may_be_used_without_await() -> None:
    async def main() -> str:
        with Sandbox() as sandbox:
            return str(sandbox.run("6 * 7").value)

    assert asyncio.run(main()) == "42"


def test_many_calls_at_once_wait_for_a_place() -> None:
    async def main(sandbox: Sandbox) -> list[Result]:
        return list(await asyncio.gather(*[sandbox.run(f"{n}", timeout_s=60) for n in range(200)]))

    with Sandbox(warm=0) as sandbox:
        sandbox.start()
        assert sandbox._host is not None
        sandbox._host.places.limit = 8
        results = asyncio.run(main(sandbox))
    assert [result.value for result in results] == [str(n) for n in range(200)]


def test_many_sessions_at_once_keep_their_own_state() -> None:
    async def one(sandbox: Sandbox, number: int) -> bool:
        async with sandbox.session() as session:
            for _ in range(3):
                await session.run(f"x = globals().get('x', {number}) + 1", timeout_s=60)
            return (await session.run("x", timeout_s=60)).value == str(number + 3)

    async def main() -> None:
        async with Sandbox() as sandbox:
            assert all(await asyncio.gather(*[one(sandbox, 10 * n) for n in range(40)]))

    asyncio.run(main())


def test_calls_from_many_threads() -> None:
    found: list[str] = []
    with Sandbox(warm=2) as sandbox:

        def client(number: int) -> None:
            found.extend(sandbox.run(f"{number}", timeout_s=60).value for _ in range(5))

        threads = [threading.Thread(target=client, args=(n,)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(found) == sorted(str(n) for n in range(6) for _ in range(5))


def test_a_cancelled_call_ends_its_process_and_frees_its_place() -> None:
    async def main() -> None:
        async with Sandbox(warm=0) as sandbox:
            await sandbox.start()
            assert sandbox._host is not None
            places = sandbox._host.places
            task = asyncio.create_task(sandbox.run("import time; time.sleep(600)", timeout_s=600))
            while not places._inside:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert places._inside == 0
            assert (await sandbox.run("1")).value == "1"

    asyncio.run(main())


def test_a_place_given_up_while_waiting_goes_to_the_next_in_line() -> None:
    async def main() -> None:
        gate = Gate(1)
        await drive_async(gate.enter())
        first, second = (asyncio.create_task(drive_async(gate.enter())) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.sleep(0)
        gate.leave()
        await asyncio.wait_for(second, 20)
        gate.leave()
        assert gate._inside == 0

    asyncio.run(main())
    gate = Gate(1)
    drive(gate.enter())
    gate.leave()
    drive(gate.enter())


def test_a_forgotten_session_frees_its_place_and_its_process() -> None:
    with Sandbox(warm=0) as sandbox:
        session = sandbox.session()
        session.run("1")
        assert sandbox._host is not None
        assert sandbox._host.places._inside == 1
        del session
        assert sandbox._host.places._inside == 0
