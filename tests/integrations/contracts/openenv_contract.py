"""Servers of the real `openenv` on loopback, started by `vf.OpenEnv` from packages: typed actions and MCP tools.

Run by tests/integrations/test_openenv.py in an environment with that package.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import verifiers as vf
from tests.support.doc_blocks import unrun_blocks

ECHO = '''
from typing import Any, Optional
from uuid import uuid4
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field

class EchoAction(Action):
    """Say something that is echoed."""
    message: str = Field(..., description="What to say")
    times: int = 1

class EchoObservation(Observation):
    echoed: str = ""

class EchoEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State(episode_id=str(uuid4()), step_count=0)

    def reset(self, seed: Optional[int] = None, episode_id: Optional[str] = None, **kwargs: Any) -> EchoObservation:
        self._state = State(episode_id=str(uuid4()), step_count=0)
        return EchoObservation(echoed=f"ready {seed}", done=False, reward=0.0)

    def step(self, action: EchoAction, **kwargs: Any) -> EchoObservation:
        self._state.step_count += 1
        said = " ".join([action.message] * action.times)
        return EchoObservation(echoed=said, reward=len(said) / 10, done=self._state.step_count == 2)

    @property
    def state(self) -> State:
        return self._state

app = create_app(EchoEnvironment, EchoAction, EchoObservation, env_name="echo", max_concurrent_envs=2)
'''

TOOLS = '''
from typing import Any, Optional
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Observation, State

class Tools(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("tools")

        @server.tool
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            return a + b

        super().__init__(server)
        self._state = State(episode_id="e", step_count=0)

    def reset(self, seed: Optional[int] = None, episode_id: Optional[str] = None, **kwargs: Any) -> Observation:
        return Observation(done=False, reward=0.0)

    def _step_impl(self, action: Any, timeout_s: Any = None, **kwargs: Any) -> Observation:
        return Observation(done=False, reward=0.0, metadata={"error": "no such action"})

    @property
    def state(self) -> State:
        return self._state

app = create_app(Tools, CallToolAction, CallToolObservation, env_name="tools", max_concurrent_envs=4)
'''


def called(name: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"content": None, "tool_calls": [{"id": "c", "type": "function", "function": function}]}


def play(package: str, reply: Any, episodes: int, **kwargs: Any) -> vf.Results:
    env = vf.OpenEnv(package, num_episodes=episodes, **kwargs)
    try:
        return env.evaluate(client=vf.FakeClient(reply, tokens=True), model="m", use_tqdm=False)
    finally:
        env.close()
        assert env._server._process is None


def main() -> None:
    folder = Path(tempfile.mkdtemp())
    for name, code in (("echo_env", ECHO), ("tools_env", TOOLS)):
        package = folder / name / "server"
        package.mkdir(parents=True)
        for place in (folder / name, package):
            (place / "__init__.py").touch()
        (package / "app.py").write_text(code)
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])

    results = play("echo_env", lambda messages: called("echo", message="hello", times=2), 3)
    assert not results.failed, [str(state["error"]) for state in results.failed]
    assert results["rewards"] == [2.2, 2.2, 2.2], results["rewards"]
    state = results.rollouts[1]
    assert state["prompt"][-1]["content"] == "ready 1", state["prompt"]
    assert state["completion"][1]["content"] == "hello hello"
    assert state["stop_condition"] == "episode_done"
    assert state["oai_tools"][0]["function"]["name"] == "echo"

    def wrong(messages: Any) -> Any:
        tries = sum(message["role"] == "tool" for message in messages)
        return called("echo", message="x", volume=3) if not tries else called("echo", message="hello")

    (state,) = play("echo_env", wrong, 1).rollouts
    assert state["error"] is None
    assert "volume" in state["completion"][1]["content"]

    def adding(messages: Any) -> Any:
        return called("add", a=2, b=3) if messages[-1]["role"] == "user" else "It is 5."

    def says_five(completion: Any) -> float:
        return float("5" in completion[-1]["content"])

    (state,) = play("tools_env", adding, 1, rubric=vf.Rubric([says_five])).rollouts
    assert state["error"] is None, state["error"]
    assert state["reward"] == 1.0
    assert state["oai_tools"][0]["function"]["name"] == "add"
    assert state["completion"][1]["content"] == "5", state["completion"]

    put = {"http://127.0.0.1:8000": "echo_env", "num_episodes=50": "num_episodes=2", 'model="gpt-4o"': "client, 'm'"}
    (code,) = unrun_blocks("openenv.md", "needs a server", put)  # the page's own block
    names: dict[str, Any] = {"client": vf.FakeClient(lambda messages: called("echo", message="hello"))}
    exec(code, names)
    names["env"].close()
    assert len(names["results"]["rewards"]) == 2, names["results"]
    print("openenv done")


if __name__ == "__main__":
    main()
