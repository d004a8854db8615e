"""Finds the judges in an environment's rubrics, and replaces their clients temporarily."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from verifiers.clients import Cassette, as_client
from verifiers.clients.openai_looks import OpenAILooks
from verifiers.clients.protocol import Client, Completion, Request
from verifiers.clients.resolve import server_of
from verifiers.envs.environment import Environment
from verifiers.rubrics import JudgeRubric, Rubric


def members_of(env: Environment) -> list[Environment]:
    """An environment and, recursively, the members of a group."""
    return [env, *(member for inner in getattr(env, "envs", ()) for member in members_of(inner))]


def judges_of(env: Environment) -> list[JudgeRubric]:
    """All judges in the rubrics of an environment and its members."""
    waiting: list[Rubric] = [member.rubric for member in members_of(env)]
    judges: list[JudgeRubric] = []
    while waiting:
        rubric = waiting.pop(0)
        waiting += getattr(rubric, "rubrics", ())
        if isinstance(rubric, JudgeRubric):
            judges.append(rubric)
    return judges


class _Looking(OpenAILooks):
    """A client that reward functions can also call with the interface of OpenAI's client."""

    def __init__(self, client: Client, base_url: str) -> None:
        self.client = client
        self.base_url = base_url

    async def complete(self, request: Request) -> Completion:
        return await self.client.complete(request)


@contextmanager
def judges_answer(env: Environment, client_for: Callable[[str], Client]) -> Iterator[None]:
    """Within this context, each judge's client is ``client_for(name of its server)``."""
    with _instead(env, lambda judge, server: client_for(server)):
        yield


@contextmanager
def judges_recorded(env: Environment, path: Path) -> Iterator[None]:
    """Within this context, judge replies are recorded in a cassette."""
    with _instead(env, lambda judge, server: Cassette(path, as_client(judge.judge_client), namespace=server)):
        yield


@contextmanager
def _instead(env: Environment, client_for: Callable[[JudgeRubric, str], Client]) -> Iterator[None]:
    """Replace each judge server by a client and give it a name: "" for the first, "2" for the second, and so on."""
    judges = judges_of(env)
    before = [(judge.judge_client, judge.class_objects["judge_client"]) for judge in judges]
    clients: dict[str | int, _Looking] = {}
    try:
        for judge in judges:
            server = server_of(judge.judge_client)
            if server not in clients:
                name = str(len(clients) + 1) if clients else ""
                clients[server] = _Looking(client_for(judge, name), server if isinstance(server, str) else "")
            judge.judge_client = clients[server]
            judge.add_class_object("judge_client", clients[server])
        yield
    finally:
        for judge, (own, injected) in zip(judges, before, strict=True):
            judge.judge_client = own
            judge.add_class_object("judge_client", injected)
