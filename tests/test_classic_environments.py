"""Environments written for classic 0.1.x that lean on less usual parts of it run as they did."""

from __future__ import annotations

import subprocess
import sys
from functools import partial, update_wrapper
from json import JSONDecodeError
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

import verifiers as vf
from tests.support.classic import quiet
from tests.support.tool_calls import call, calling, tool_texts

ROWS = Dataset.from_list([{"question": "2 + 2?", "answer": "4", "info": {"hint": "even"}}])


def play(env: vf.Environment, *replies: Any) -> vf.State:
    (state,) = env.evaluate(vf.FakeClient(list(replies)), **quiet()).rollouts
    return state


# --- judges -------------------------------------------------------------------------------------------------------


def test_a_reward_hands_all_that_it_was_given_on_to_the_judge() -> None:
    rubric = vf.JudgeRubric(judge_client=vf.FakeClient("B"), judge_prompt="{question} {answer} {response}: A, B or C?")

    def graded(prompt, completion, answer, state, **kwargs) -> float:
        assert {"task", "info"} <= kwargs.keys()
        return 1.0 if rubric.judge(prompt, completion, answer, state, **kwargs) == "B" else 0.0

    async def graded_async(judge, prompt, completion, answer, state, **kwargs) -> float:
        return float("B" in await judge(prompt, completion, answer, state, **kwargs))

    rubric.add_reward_func(graded)
    rubric.add_reward_func(graded_async)
    assert play(vf.SingleTurnEnv(dataset=ROWS, rubric=rubric), "four")["reward"] == 2.0


def test_a_judge_that_is_down_fails_a_rollout_that_another_rubric_could_have_scored() -> None:
    """So it is with gpqa of 0.1.5: there, the judge's failure counted as 0.0, and the other rubric's 1.0 stood."""

    def same(completion, answer, **kwargs) -> float:
        return float(completion[-1]["content"] == answer)

    async def judged(judge, prompt, completion, answer, state) -> float:
        return float("yes" in await judge(prompt, completion, answer, state))

    def env_with(judge_client: Any) -> vf.Environment:
        judging = vf.JudgeRubric(judge_client=judge_client)
        judging.add_reward_func(judged, 1.0)
        env = vf.SingleTurnEnv(eval_dataset=ROWS, rubric=vf.Rubric(funcs=[same]))
        env.rubric = vf.RubricGroup([judging, env.rubric])
        return env

    assert play(env_with(vf.FakeClient("yes")), "4")["reward"] == 2.0
    failed = play(env_with(vf.FakeClient(vf.ServerError("down"))), "4")
    assert failed["reward"] is None
    assert isinstance(failed["error"], vf.JudgeError)


def test_mathematics_is_read_with_and_without_thoughts_as_since_0_1_9() -> None:
    """So it is with doublecheck of 0.1.5, whose MathRubric gave 0.0 to every reply without ``</think>``."""

    class Once(vf.MultiTurnEnv):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.rubric = vf.MathRubric()

        async def is_completed(self, messages: vf.Messages, state: vf.State, **kwargs: Any) -> bool:
            return len(state["responses"]) == 1

        async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: Any) -> Any:
            return [{"role": "user", "content": "Are you sure?"}], state

    for reply in ("<think>2 + 2</think>\\boxed{4}", "\\boxed{4}"):
        state = play(Once(dataset=ROWS), reply)
        assert (state["reward"], len(state["trajectory"])) == (1.0, 1)


# --- rewards ------------------------------------------------------------------------------------------------------


def test_a_reward_may_be_a_partial_that_carries_the_name_of_its_function() -> None:
    def at_least(completion, answer, bonus, **kwargs) -> float:
        return bonus + float(completion[-1]["content"] == answer)

    reward = update_wrapper(partial(at_least, bonus=0.5), at_least)
    state = play(vf.SingleTurnEnv(dataset=ROWS, rubric=vf.Rubric(funcs=[reward])), "4")
    assert state["metrics"]["at_least"] == state["reward"] == 1.5


def test_a_rubric_tells_its_functions_names_and_weights_by_the_methods_of_0_1_5() -> None:
    def one(completion, **kwargs) -> float:
        return 1.0

    rubric = vf.Rubric(funcs=[one], weights=[0.5])
    group = vf.RubricGroup([rubric, vf.Rubric(funcs=[one])])
    assert (rubric.get_reward_func_names(), rubric.get_reward_funcs()) == (["one"], [one])
    assert group.get_reward_weights() == [0.5, 1.0]


# --- tools --------------------------------------------------------------------------------------------------------


def shift(x: int, offset: int) -> int:
    """Add an offset."""
    return x + offset


def test_update_tool_args_comes_before_the_arguments_are_checked() -> None:
    class Shifting(vf.StatefulToolEnv):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(tools=[shift], **kwargs)

        def update_tool_args(self, tool_name, tool_args, messages, state, **kwargs):
            state["asked"] = dict(tool_args)
            return {**tool_args, "offset": 3}

    state = play(Shifting(dataset=ROWS), calling(call("shift", {"x": "5"})), calling(call("shift", {"y": 5})), "8")
    answered, refused = tool_texts(state)
    assert answered == "8"
    assert "no argument 'y'" in refused
    assert state["asked"] == {"y": 5}
    assert state["error"] is None


def test_skipped_arguments_leave_the_schema_and_are_listed() -> None:
    env = vf.StatefulToolEnv(dataset=ROWS)
    env.add_tool(shift, args_to_skip=["offset"])
    (schema,) = env.oai_tools or []
    assert list(schema["function"]["parameters"]["properties"]) == ["x"]
    assert schema["function"]["parameters"]["required"] == ["x"]
    assert env.skipped_args == {"shift": ["offset"]}


def test_arguments_that_are_no_json_end_the_rollout_where_stop_errors_say_so() -> None:
    bad = calling(call("shift", '{"x": oops}'))
    for env in (
        vf.ToolEnv(tools=[shift], stop_errors=[JSONDecodeError], dataset=ROWS),
        vf.StatefulToolEnv(tools=[shift], stop_errors=[JSONDecodeError], dataset=ROWS),
    ):
        state = play(env, bad, "never asked")
        assert (len(state["trajectory"]), state["stop_condition"]) == (1, "BadJSONError")
        assert state["error"] is None  # the policy's doing: it is scored
    patient = vf.ToolEnv(tools=[shift], dataset=ROWS)
    assert len(play(patient, bad, "sorry")["trajectory"]) == 2


def test_an_image_that_a_tool_returns_is_shown_as_one() -> None:
    image = pytest.importorskip("PIL.Image")

    def draw(colour: str) -> Any:
        """Draw a square."""
        return image.new("RGB", (2, 2), colour)

    def gallery() -> Any:
        """Two squares, with a title."""
        return ["Squares", draw("red"), image.new("CMYK", (2, 2))]

    state = play(vf.ToolEnv(tools=[draw, gallery], dataset=ROWS), calling(call("draw", {"colour": "red"})), "red")
    (shown,) = next(m for m in state["completion"] if m["role"] == "tool")["content"]
    assert shown["type"] == "image_url"
    assert shown["image_url"]["url"].startswith("data:image/png;base64,iVBOR")
    state = play(vf.ToolEnv(tools=[gallery], dataset=ROWS), calling(call("gallery")), "nice")
    parts = next(m for m in state["completion"] if m["role"] == "tool")["content"]
    assert [part["type"] for part in parts] == ["text", "image_url", "image_url"]


def test_an_image_of_a_smolagents_tool_is_shown_as_one() -> None:
    smolagents = pytest.importorskip("smolagents")
    image = pytest.importorskip("PIL.Image")

    class Painter(smolagents.Tool):
        name = "painter"
        description = "Paints."
        inputs = {"what": {"type": "string", "description": "What to paint."}}
        output_type = "image"

        def forward(self, what: str) -> Any:
            return image.new("RGB", (2, 2), "blue")

    class Framed(Painter):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, sanitize_inputs_outputs=True, **kwargs)  # gives smolagents' own image type

    for tool in (Painter(), Framed()):
        state = play(vf.SmolToolEnv(tools=[tool], dataset=ROWS), calling(call("painter", {"what": "sky"})), "blue")
        (shown,) = next(m for m in state["completion"] if m["role"] == "tool")["content"]
        assert shown["image_url"]["url"].startswith("data:image/png;base64,")


# --- when a rollout ends ------------------------------------------------------------------------------------------


def test_stop_conditions_of_messages_and_state_are_asked_after_tools_have_run() -> None:
    class Shop(vf.ToolEnv):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(tools=[self.buy], **kwargs)

        def buy(self, what: str) -> str:
            """Buy something."""
            return f"bought {what}"

        @vf.stop
        async def has_tea(self, messages: vf.Messages, state: vf.State) -> bool:
            return "bought tea" in str(messages[-1]["content"])

    state = play(Shop(dataset=ROWS), calling(call("buy", {"what": "milk"})), calling(call("buy", {"what": "tea"})), "x")
    assert state["stop_condition"] == "has_tea"
    assert [m["role"] for m in state["completion"]] == ["assistant", "tool", "assistant", "tool"]


def test_a_rollout_of_ones_own_asks_stop_conditions_with_its_messages() -> None:
    class Own(vf.MultiTurnEnv):
        async def rollout(self, input, client, model, sampling_args=None):
            state = await self.init_state(input, client, model, sampling_args)
            messages = list(state["prompt"])
            while not await self.is_completed(messages, state):
                response = await self.get_model_response(state, messages)
                messages.append({"role": "assistant", "content": response.choices[0].message.content})
            state["completion"] = messages[len(state["prompt"]) :]
            return state

        async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: Any) -> vf.Messages:
            return []

        @vf.stop
        async def said_stop(self, messages: vf.Messages, state: vf.State) -> bool:
            return messages[-1]["content"] == "stop"

    state = play(Own(dataset=ROWS), "go", "stop")
    assert (state["error"], len(state["completion"]), state["stop_condition"]) == (None, 2, "said_stop")


def test_a_stop_condition_that_reads_what_the_environment_wrote_ends_the_rollout_there() -> None:
    class Door(vf.MultiTurnEnv):
        async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: Any) -> vf.Messages:
            state["is_open"] = messages[-1]["content"] == "4"
            return [{"role": "user", "content": "It opens." if state["is_open"] else "Locked."}]

        @vf.stop
        async def went_through(self, state: vf.State) -> bool:
            return bool(state.get("is_open"))

    state = play(Door(dataset=ROWS), "3", "4", "never asked")
    assert [m["content"] for m in state["completion"]] == ["3", "Locked.", "4", "It opens."]
    assert state["stop_condition"] == "went_through"


# --- groups of environments ---------------------------------------------------------------------------------------


def test_a_group_has_a_column_that_only_one_of_its_members_has() -> None:
    plain = vf.SingleTurnEnv(dataset=Dataset.from_list([{"question": "1?", "answer": "1"}]))
    group = vf.EnvGroup([plain, vf.SingleTurnEnv(dataset=ROWS)], env_names=["plain", "hinted"])
    rows = group.get_dataset()
    assert rows["info"] == [None, {"hint": "even"}]
    assert "info" in rows.column_names
    assert rows.to_hf()["info"][1] == {"hint": "even"}
    with pytest.raises(KeyError, match="no row has 'hint'"):
        rows["hint"]


def test_the_rubric_of_a_group_can_be_made_from_environments_by_name() -> None:
    from verifiers.envs.env_group import EnvGroupRubric

    def one(completion, **kwargs) -> float:
        return 1.0

    def two(completion, **kwargs) -> float:
        return 2.0

    envs = {name: vf.SingleTurnEnv(dataset=ROWS, rubric=vf.Rubric(funcs=[f])) for name, f in (("a", one), ("b", two))}
    rubric = EnvGroupRubric(envs)
    assert rubric.all_reward_names == ["one", "two"]
    state = vf.State(input={"prompt": "?", "answer": "", "task": "b", "example_id": 0}, completion="x", trajectory=[])
    rubric.score_rollout(state)
    assert (state["reward"], rubric.env_map["a"]) == (2.0, envs["a"])


# --- sandboxes ----------------------------------------------------------------------------------------------------

LEVEL = vf.sandbox.level().name


@pytest.mark.skipif(LEVEL != "full", reason=f"bash needs the full level of the sandbox, here is {LEVEL}")
def test_a_subclass_of_the_sandbox_environment_works_by_the_sandbox_id(tmp_path: Path) -> None:
    class Counting(vf.SandboxEnv):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.add_tool(self.count, args_to_skip=["sandbox_id"])

        async def count(self, path: str, sandbox_id: str) -> str:
            """Count the characters of a file."""
            return (await self.sandbox_client.execute_command(sandbox_id, f"wc -c < {path}")).stdout.strip()

        async def setup_state(self, state: vf.State, **kwargs: Any) -> vf.State:
            state = await super().setup_state(state, **kwargs)
            where = {"sandbox_id": state["sandbox_id"], "sandbox_state": state["sandbox_state"]}
            await self.bash("mkdir d && echo hello > d/a.txt", **where)
            return state

        def update_tool_args(self, tool_name, tool_args, messages, state, **kwargs):
            args = super().update_tool_args(tool_name, tool_args, messages, state, **kwargs)
            return {**args, "sandbox_id": state["sandbox_id"]}

        async def post_rollout(self, state: vf.State) -> None:
            response = await self.sandbox_client.execute_command(state["sandbox_id"], "cat b.txt; exit 3", timeout=10)
            state["found"] = (response.stdout, response.exit_code)
            await self.sandbox_client.download_file(state["sandbox_id"], "b.txt", tmp_path / "kept.txt")

    env = Counting(dataset=ROWS)
    copy = calling(call("bash", {"command": "cp d/a.txt b.txt"}))
    try:
        state = play(env, calling(call("count", {"path": "d/a.txt"})), copy, "done")
    finally:
        env.close()
    assert state["error"] is None
    assert tool_texts(state)[0] == "6"
    assert state["found"] == ("hello\n", 3)
    assert (tmp_path / "kept.txt").read_text() == "hello\n"


RENTED = """
from prime_sandboxes import AsyncSandboxClient, CommandTimeoutError
from prime_sandboxes.core import APIClient

import verifiers as vf


def rent() -> AsyncSandboxClient:
    return AsyncSandboxClient(APIClient())


def same(completion, answer):
    try:
        return float(completion[-1]["content"] == answer)
    except CommandTimeoutError:
        return 0.0


def load_environment():
    return vf.SingleTurnEnv(dataset=[{"question": "1?", "answer": "1"}], rubric=vf.Rubric([same]))
"""


def test_an_environment_may_import_the_sandbox_service_and_never_call_it(tmp_path: Path) -> None:
    folder = tmp_path / "environments" / "rented_env"
    folder.mkdir(parents=True)
    (folder / "rented_env.py").write_text(RENTED)
    program = """
import verifiers as vf
env = vf.load_environment("rented-env")
print(env.evaluate(vf.FakeClient("1"), "m", use_tqdm=False)["reward"])
import rented_env
try:
    rented_env.rent()
except ImportError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120
    )
    scored, told = done.stdout.splitlines()
    assert scored == "[1.0]"
    assert "prime_sandboxes.core.APIClient needs prime_sandboxes" in told
    assert "pip install prime-sandboxes" in told


# --- names --------------------------------------------------------------------------------------------------------


def test_environments_of_agents_in_containers_say_what_to_use_instead() -> None:
    from verifiers.envs.experimental.cli_agent_env import CliAgentEnv
    from verifiers.envs.experimental.harbor_env import HarborEnv

    assert (vf.CliAgentEnv, vf.HarborEnv) == (CliAgentEnv, HarborEnv)

    class Mine(vf.HarborEnv):
        pass

    with pytest.raises(NotImplementedError, match=r"there is no Mine here: .*SandboxEnv"):
        Mine(run_command="agent", dataset_path="tasks")


def test_the_trainer_of_0_1_9_is_the_one_here() -> None:
    pytest.importorskip("torch")
    from verifiers.rl.trainer import RLConfig, RLTrainer

    assert (vf.RLTrainer, vf.RLConfig) == (RLTrainer, RLConfig) == (vf.GRPOTrainer, vf.GRPOConfig)
