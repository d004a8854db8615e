"""ToolEnv through its public API: both ways of writing calls, everything that can be wrong with one, and hooks."""

from __future__ import annotations

import asyncio
import json
import pickle
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import verifiers as vf
from tests.support.tool_calls import call, calling, tool_texts
from verifiers.tools import as_tool
from verifiers.tools.faults import KINDS

ROW = {"question": "2 + 3?", "answer": "5"}
TAGS = vf.XMLParser(["reasoning", ("tool", "answer")])


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def make(tools: Any = (add,), **kwargs: Any) -> vf.ToolEnv:
    return vf.ToolEnv(tools=list(tools), dataset=[ROW], **kwargs)


def roll_out(env: vf.ToolEnv, *replies: Any) -> vf.State:
    state: vf.State = env.rollout(ROW, vf.FakeClient(list(replies)), "fake")
    return state


# --- native calls -------------------------------------------------------------------------------------------------


def test_a_call_is_carried_out_and_the_model_goes_on_until_it_calls_nothing() -> None:
    client = vf.FakeClient([calling(call("add", {"a": 2, "b": 3}, "x")), "It is 5."])
    state = make().rollout(ROW, client, "fake")
    assert state["completion"][1:] == [
        {"role": "tool", "content": "5", "tool_call_id": "x"},
        {"role": "assistant", "content": "It is 5."},
    ]
    assert state["stop_condition"] == "no_tools_called"
    assert [tool["function"]["name"] for tool in client.requests[0].tools or ()] == ["add"]


@pytest.mark.parametrize("of_the_tool", [True, False])
def test_calls_that_must_not_race_run_one_after_another_in_order(of_the_tool: bool) -> None:
    running: list[int] = []
    seen: list[list[int]] = []

    async def step(number: int) -> str:
        running.append(number)
        await asyncio.sleep(0.02 * (3 - number))
        seen.append(list(running))
        running.remove(number)
        return f"step {number}"

    env = make([as_tool(step, sequential=True)]) if of_the_tool else make([step], sequential=True)
    state = roll_out(env, calling(*(call("step", {"number": i}) for i in range(3))), "done")
    assert tool_texts(state) == ["step 0", "step 1", "step 2"]
    assert seen == [[0], [1], [2]]


def test_calls_that_may_race_run_beside_those_that_must_not() -> None:
    first, second = (threading.Barrier(2, timeout=30) for _ in range(2))
    together = {"a": first, "b": first, "c": second, "d": second}

    def meet(name: str) -> str:
        together[name].wait()
        return name

    def wait(name: str) -> str:
        together[name].wait()
        return name

    env = make([as_tool(meet, sequential=True), wait])
    calls = [
        call("meet", {"name": "a"}),
        call("wait", {"name": "b"}),
        call("meet", {"name": "c"}),
        call("wait", {"name": "d"}),
    ]
    assert tool_texts(roll_out(env, calling(*calls), "done")) == ["a", "b", "c", "d"]


def test_the_calls_of_a_turn_run_at_once_and_answer_in_order() -> None:
    together = threading.Barrier(3, timeout=30)

    def meet(name: str) -> str:
        together.wait()
        return name

    async def slow(name: str) -> str:
        await asyncio.sleep(0.05)
        return name

    calls = [call("slow", {"name": "0"}), *(call("meet", {"name": str(i)}) for i in (1, 2, 3))]
    state = roll_out(make([meet, slow]), calling(*calls), "done")
    assert tool_texts(state) == ["0", "1", "2", "3"]
    assert [noted["name"] for noted in state["tool_log"]] == ["slow", "meet", "meet", "meet"]


FAULTS = [
    ("unknown_tool", call("ad", {}), "Error: there is no tool 'ad'; did you mean 'add'?"),
    (
        "unknown_tool",
        call("x" * 1000, {}),
        f"Error: there is no tool '{'x' * 100}'; the tools are add, hang, boom, long",
    ),
    ("bad_json", call("add", '{"a": '), "Error: the arguments are not valid JSON (Expecting value: line 1 column 7 "),
    ("bad_json", call("add", "[1]"), "Error: the arguments must be a JSON object, not [1]"),
    ("missing_argument", call("add", {}), "Error: add needs the argument 'a'; it takes a, b (optional)"),
    ("unknown_argument", call("add", {"a": 1, "c": 2}), "Error: add has no argument 'c'; it takes a, b (optional)"),
    ("wrong_type", call("add", {"a": "x"}), "Error: the argument 'a' of add is wrong: expected integer, got 'x'"),
    ("exception", call("boom", {}), "Error: ZeroDivisionError: division by zero"),
    ("timeout", call("hang", {}), "Error: hang took longer than 0.05 seconds"),
    ("oversized", call("long", {}), "xxxx"),
]


@pytest.mark.parametrize(("kind", "made", "said"), FAULTS, ids=[str(i) for i in range(len(FAULTS))])
def test_every_fault_is_a_message_to_the_model_and_a_metric(kind: str, made: Any, said: str) -> None:
    async def hang() -> None:
        await asyncio.sleep(60)

    def boom() -> float:
        return 1 / 0

    def long() -> str:
        return "x" * 1_000

    env = make([add, as_tool(hang, timeout_s=0.05), boom, long], max_result_chars=200)
    results = env.evaluate(vf.FakeClient([calling(made), "sorry"]), "fake", use_tqdm=False)
    (state,) = results.scored
    (text,) = tool_texts(state)
    assert text.startswith(said)
    assert len(text) < 400
    metrics = state["metrics"]
    assert (metrics[f"{kind}_faults"], metrics["tool_faults"], metrics["total_tool_calls"]) == (1.0, 1.0, 1.0)
    assert sum(metrics[f"{other}_faults"] for other in KINDS) == 1.0
    assert state["stop_condition"] == "no_tools_called"


def test_a_long_result_is_cut_and_says_how_long_it_was() -> None:
    state = roll_out(
        make([add, as_tool(lambda: "y" * 5_000, name="long")], max_result_chars=100), calling(call("long")), ""
    )
    assert tool_texts(state) == ["y" * 100 + "\n[cut: the result has 5,000 characters, these are the first 100]"]


def test_arguments_cut_off_at_any_byte_never_leave_the_rollout() -> None:
    whole = '{"a": 12, "b": "3é"}'
    calls = [call("add", whole[:n], f"c{n}") for n in range(1, len(whole))]
    state = roll_out(make(), calling(*calls), "done")
    assert state["error"] is None
    assert all(text.startswith("Error: the arguments are not valid JSON") for text in tool_texts(state))
    assert [message.get("tool_call_id") for message in state["completion"][1:-1]] == [made["id"] for made in calls]


@pytest.mark.parametrize(
    "listed", [[{}], [None], [{"function": {"name": 3}}], ["junk"], [{"id": "1", "function": {"arguments": "{}"}}]]
)
def test_calls_without_a_shape_are_answered_too(listed: list[Any]) -> None:
    state = roll_out(make(), {"role": "assistant", "tool_calls": listed}, "sorry")
    assert state["error"] is None
    assert tool_texts(state) == ["Error: the call has no function name"]


def test_bad_json_from_an_endpoint_stays_inside_the_rollout() -> None:
    def answer(request: Any) -> Any:
        if request.prompt[-1]["role"] == "tool":
            return "I see: " + request.prompt[-1]["content"]
        return {"choices": [{"message": calling(call("add", '{"a": 1,, "b"')), "finish_reason": "tool_calls"}]}

    with vf.FakeServer(answer) as server:
        results = make().evaluate(vf.HTTPClient(server.url, "key"), "fake", use_tqdm=False)
    assert not results.failed
    assert "not valid JSON" in results["completion"][0][-1]["content"]


@pytest.mark.parametrize(
    "written", ['{"a": 1,, "b"', "[1]", "", '"{\\"a\\": 1}"', '{"a": NaN}', '{"a": "line\nbreak"}']
)
def test_a_strict_endpoint_gets_calls_it_takes_and_the_record_keeps_what_the_model_wrote(written: str) -> None:
    def strict(request: Any) -> Any:
        listed = [made for message in request.prompt for made in message.get("tool_calls") or ()]
        for made in listed:
            if not isinstance(json.loads(made["function"]["arguments"], parse_constant=pytest.fail), dict):
                raise vf.RequestRefusedError("arguments must be an object")
        if len(listed) == 2:
            return "done"
        return {"choices": [{"message": calling(call("add", written)), "finish_reason": "tool_calls"}]}

    with vf.FakeServer(strict) as server:
        results = make().evaluate(vf.HTTPClient(server.url, "key"), "fake", use_tqdm=False)
        sent = server.requests[-1].body["messages"][1]["tool_calls"][0]["function"]
    (state,) = results.scored
    recorded = [state["completion"][0], state["completion"][2], state["trajectory"][1]["prompt"][1]]
    assert [message["tool_calls"][0]["function"]["arguments"] for message in recorded] == [written] * 3
    assert sent["name"] == "add"


def test_a_call_without_a_name_is_sent_back_with_one() -> None:
    client = vf.FakeClient([{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}, "sorry"])
    state = make().rollout(ROW, client, "fake")
    (sent,) = client.requests[1].prompt[1]["tool_calls"]
    assert sent["function"] == {"name": "unnamed", "arguments": '{"arguments": "{"}'}
    assert sent["id"] == state["completion"][1]["tool_call_id"]
    assert "name" not in state["completion"][0]["tool_calls"][0]["function"]


def test_long_content_parts_are_cut_too() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:,"}}

    def look() -> list[dict[str, Any]]:
        return [{"type": "text", "text": "y" * 90}, image, {"type": "text", "text": "z" * 90}, image]

    def gallery() -> list[dict[str, Any]]:
        return [image] * 1_000

    client = vf.FakeClient([calling(call("look"), call("gallery")), "done"])
    state = make([look, gallery], max_result_chars=100).rollout(ROW, client, "fake")
    looked, seen = (message["content"] for message in state["completion"][1:3])
    assert [part.get("text", "image") for part in looked] == [
        "y" * 90,
        "image",
        "z" * 10,
        "image",
        "\n[cut: the result has 4 parts with 180 characters, these are the first 100]",
    ]
    assert len(seen) == 65
    assert [noted["fault"] for noted in state["tool_log"]] == ["oversized"] * 2


def test_thousands_of_calls_in_one_turn_are_not_all_run() -> None:
    ran: list[int] = []

    def note(i: int) -> None:
        ran.append(i)

    state = roll_out(make([note]), calling(*(call("note", {"i": i}) for i in range(1_000))), "done")
    assert len(ran) == 64
    assert len(tool_texts(state)) == 1_000
    assert tool_texts(state)[-1] == "Error: a turn may make 64 calls, and this one makes 1000; this was not run"


def test_a_sync_tool_that_hangs_is_given_up_and_blocks_nobody() -> None:
    release = threading.Event()

    def hang() -> None:
        release.wait(60)

    began = time.monotonic()
    state = roll_out(make([hang], tool_timeout_s=0.1), calling(call("hang"), call("hang")), "done")
    release.set()
    assert tool_texts(state) == ["Error: hang took longer than 0.1 seconds"] * 2
    assert time.monotonic() - began < 30


def test_a_tool_that_was_quick_twice_still_has_its_limit_the_third_time() -> None:
    release = threading.Event()
    times: list[int] = []

    def moody() -> str:
        times.append(1)
        if len(times) > 5:
            release.wait(60)
        return "quick"

    env = make([moody], tool_timeout_s=0.1, max_turns=20)
    state = roll_out(env, *[calling(call("moody"))] * 6, "done")
    release.set()
    assert tool_texts(state)[-2:] == ["quick", "Error: moody took longer than 0.1 seconds"]


def test_a_tool_whose_exception_has_no_words_is_an_error_like_any_other() -> None:
    class OddError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    def odd() -> None:
        raise OddError

    state = roll_out(make([odd]), calling(call("odd")), "done")
    assert state["error"] is None
    assert tool_texts(state) == ["Error: OddError"]


class _OddExit(BaseException):
    pass


ESCAPES = {
    "exit": (SystemExit(3), "it called exit(3)"),
    "cancelled": (asyncio.CancelledError(), "something it awaited was cancelled"),
    "generator exit": (GeneratorExit(), "it raised GeneratorExit"),
    "interrupt of its own": (KeyboardInterrupt(), "it raised KeyboardInterrupt"),
    "any other": (_OddExit("out"), "it raised _OddExit: out"),
}


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("kind", ESCAPES)
def test_a_tool_that_exits_or_is_cancelled_fails_its_row_and_the_run_goes_on(kind: str, is_async: bool) -> None:
    raised, words = ESCAPES[kind]

    def leave() -> str:
        raise raised

    async def leave_async() -> str:
        raise raised

    def stay() -> str:
        return "here"

    leave_async.__name__ = "leave"

    def reply(messages: Any) -> Any:
        if messages[-1]["role"] == "tool":
            return "done"
        return calling(call("stay"), call("leave" if messages[-1]["content"] == "2" else "stay"))

    env = vf.ToolEnv(
        tools=[leave_async if is_async else leave, stay],
        dataset=[{"question": str(i)} for i in range(5)],
        rubric=vf.Rubric([lambda: 1.0]),
    )
    results = env.evaluate(client=vf.FakeClient(reply), model="m")
    (failed,) = results.failed
    assert failed["example_id"] == 2
    assert isinstance(failed["error"], vf.HookError)
    assert f"the tool 'leave': {words}" in str(failed["error"])
    assert [state["completion"][-1]["content"] for state in results.states if state["error"] is None] == ["done"] * 4


def test_a_tool_whose_own_task_exits_fails_its_row_alone_and_in_a_task_group() -> None:
    async def leave() -> None:
        raise SystemExit(3)

    async def awaited() -> None:
        await asyncio.create_task(leave())

    async def grouped() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(leave())

    for tool in (awaited, grouped):
        reply = calling(call(tool.__name__))
        results = make([tool]).evaluate(client=vf.FakeClient(reply), model="m", use_tqdm=False)
        assert f"the tool '{tool.__name__}': " in str(results.failed[0]["error"])


@pytest.mark.parametrize("times", [1, 2])
def test_an_error_formatter_that_exits_fails_its_row_also_where_calls_run_at_once(times: int) -> None:
    def broken() -> None:
        raise ValueError("no")

    def leave(error: Exception) -> str:
        raise SystemExit(3)

    env = make([broken], error_formatter=leave)
    results = env.evaluate(client=vf.FakeClient(calling(*[call("broken")] * times)), model="m", use_tqdm=False)
    assert "it called exit(3)" in str(results.failed[0]["error"])


def test_the_calls_of_a_run_that_is_cancelled_are_cancelled_and_no_row_of_it_fails() -> None:
    begun: list[int] = []

    async def wait() -> str:
        begun.append(1)
        await asyncio.sleep(60)
        return "late"

    async def run_and_cancel() -> None:
        env = make([wait])
        task = asyncio.ensure_future(
            env.evaluate(client=vf.FakeClient(lambda _: calling(call("wait"), call("wait"))), model="m")
        )
        async with asyncio.timeout(60):
            while len(begun) < 2:
                await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run_and_cancel())


def test_results_are_text_json_or_content_parts() -> None:
    image = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
    returned: dict[str, Any] = {"a": {"x": [1, None]}, "b": None, "c": 2.5, "d": image, "e": "half \ud83d"}

    def give(key: str) -> Any:
        return returned[key]

    state = roll_out(make([give]), calling(*(call("give", {"key": key}) for key in returned)), "done")
    assert tool_texts(state) == ['{"x":[1,null]}', "None", "2.5", image, "half \\ud83d"]


# --- what ends a rollout ------------------------------------------------------------------------------------------


def test_max_turns_is_ten_and_the_last_call_is_not_run() -> None:
    state = roll_out(make(), calling(call("add", {"a": 1})))
    assert len(state["trajectory"]) == 10
    assert state["stop_condition"] == "max_turns_reached"
    assert state["completion"][-1]["role"] == "assistant"
    assert len(state["tool_log"]) == 9


def test_an_answer_in_the_last_turn_is_an_answer() -> None:
    state = roll_out(make(max_turns=2), calling(call("add", {"a": 1})), "2")
    assert state["stop_condition"] == "no_tools_called"


def test_stop_errors_of_a_tool_fail_the_rollout() -> None:
    def fetch() -> str:
        raise ConnectionError("the shop is closed")

    env = make([fetch], stop_errors=[ConnectionError])
    results = env.evaluate(vf.FakeClient(calling(call("fetch"))), "fake", use_tqdm=False)
    (state,) = results.failed
    assert isinstance(state["error"], vf.ToolCallError)
    assert str(state["error"]) == "the tool 'fetch' raised ConnectionError: the shop is closed"
    assert state["reward"] is None
    assert tool_texts(roll_out(make([fetch]), calling(call("fetch")), "")) == [
        "Error: ConnectionError: the shop is closed"
    ]


def test_stop_errors_about_a_call_end_the_rollout_and_it_is_scored() -> None:
    env = make(stop_errors=[vf.ToolParseError])
    results = env.evaluate(vf.FakeClient(calling(call("add", "{"))), "fake", use_tqdm=False)
    assert not results.failed
    assert results.scored[0]["stop_condition"] == "BadJSONError"


def test_a_sandbox_or_endpoint_that_is_down_fails_the_rollout_without_being_asked_to() -> None:
    def compute() -> None:
        raise vf.SandboxError("no namespaces here")

    state = roll_out(make([compute]), calling(call("compute")), "done")
    assert isinstance(state["error"], vf.SandboxError)


def test_stop_errors_are_checked_when_the_environment_is_made() -> None:
    with pytest.raises(TypeError, match="stop_errors must contain exception types, not 'ConnectionError'"):
        make(stop_errors=["ConnectionError"])


def test_an_error_formatter_words_every_error() -> None:
    def boom() -> None:
        raise KeyError("x")

    env = make([add, boom], error_formatter=lambda error: f"[{type(error).__name__}]")
    state = roll_out(env, calling(call("boom"), call("add", "{"), call("nothing")), "done")
    assert tool_texts(state) == ["[KeyError]", "[BadJSONError]", "[UnknownToolError]"]


# --- tools come and go --------------------------------------------------------------------------------------------


def double(x: float) -> float:
    """Double a number."""
    return 2 * x


def test_tools_are_added_and_removed() -> None:
    env = make()
    env.add_tool(double)
    assert list(env.tool_map) == ["add", "double"]
    assert env.tools == [add, double]
    assert tool_texts(roll_out(env, calling(call("double", {"x": 2})), "done")) == ["4.0"]
    env.remove_tool(add)
    assert [tool["function"]["name"] for tool in env.oai_tools or ()] == ["double"]
    env.remove_tool("double")
    assert env.oai_tools is None
    with pytest.raises(ValueError, match="is not one of the tools; they are none"):
        env.remove_tool(add)
    with pytest.raises(ValueError, match="there is already a tool 'add'"):
        make([add, add])
    with pytest.raises(TypeError, match="'add' is already a tool"):
        as_tool(as_tool(add), timeout_s=3)


def test_calls_are_counted_by_tool() -> None:
    client = vf.FakeClient(
        [calling(call("add", {"a": 1}), call("double", {"x": 1})), calling(call("add", {"a": 2})), "ok"]
    )
    results = make([add, double]).evaluate(client, "fake", use_tqdm=False)
    metrics = results.scored[0]["metrics"]
    assert (metrics["total_tool_calls"], metrics["add_calls"], metrics["double_calls"]) == (3.0, 2.0, 1.0)
    assert (metrics["num_turns"], metrics["tool_faults"]) == (3.0, 0.0)


def test_a_rubric_keeps_its_reward_beside_the_counts() -> None:
    def right(completion: vf.Messages, answer: str) -> bool:
        return completion[-1]["content"] == answer

    env = make(rubric=vf.RubricGroup([vf.Rubric([right]), vf.ToolRubric([add])]))
    results = env.evaluate(vf.FakeClient([calling(call("add", {"a": 2, "b": 3})), "5"]), "fake", use_tqdm=False)
    assert results["rewards"] == [1.0]
    assert results.scored[0]["metrics"]["total_tool_calls"] == 1.0


# --- hooks of subclasses ------------------------------------------------------------------------------------------


def test_call_tool_and_env_response_can_be_overridden_and_asked_by_super() -> None:
    class Noting(vf.ToolEnv):
        async def call_tool(self, tool_name: str, tool_args: dict[str, Any], tool_call_id: str, **kwargs: Any) -> Any:
            if tool_name == "own":
                return {"role": "tool", "content": f"own {tool_args}", "tool_call_id": tool_call_id}
            message = await super().call_tool(tool_name, tool_args, tool_call_id, **kwargs)
            return {**message, "content": message["content"] + "!"}

        async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: Any) -> Any:
            state["seen"] = state.get("seen", 0) + 1
            return await super().env_response(messages, state, **kwargs)

    env = Noting(tools=[add], dataset=[ROW])
    state = roll_out(env, calling(call("add", {"a": 1}), call("own", {"x": 1}), call("add", {})), "done")
    assert tool_texts(state) == ["2!", "own {'x': 1}", "Error: add needs the argument 'a'; it takes a, b (optional)"]
    assert state["seen"] == 1


def test_an_override_of_call_tool_may_return_plain_text() -> None:
    class Plain(vf.ToolEnv):
        def call_tool(self, tool_name: str, tool_args: dict[str, Any], tool_call_id: str, **kwargs: Any) -> Any:
            return "done"

    state = roll_out(Plain(tools=[add], dataset=[ROW]), calling(call("add", {"a": 1}, "x")), "")
    assert state["completion"][1] == {"role": "tool", "content": "done", "tool_call_id": "x"}


def test_sync_overrides_may_ask_super_too() -> None:
    class Sync(vf.ToolEnv):
        def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: Any) -> Any:
            return [*super().env_response(messages, state, **kwargs), {"role": "user", "content": "Go on."}]

    state = roll_out(Sync(tools=[add], dataset=[ROW]), calling(call("add", {"a": 1})), "done")
    assert [message["role"] for message in state["completion"]] == ["assistant", "tool", "user", "assistant"]


def test_the_environment_can_be_asked_by_hand_in_plain_code() -> None:
    env = make()
    assert env.call_tool("add", {"a": 1}, "x") == {"role": "tool", "content": "2", "tool_call_id": "x"}
    assert env.is_tool_call(calling(call("add")))
    assert not env.is_tool_call({"role": "assistant", "content": "no"})


def test_a_row_may_bring_its_own_schemas() -> None:
    own = [{"type": "function", "function": {"name": "add", "description": "Sum.", "parameters": {}}}]
    client = vf.FakeClient("5")
    make().rollout({**ROW, "info": {"oai_tools": own}}, client, "fake")
    assert client.requests[0].tools == own


def test_environments_travel_and_groups_play_them() -> None:
    env = pickle.loads(pickle.dumps(make(parser=TAGS)))
    group = vf.EnvGroup([env, make()], ["tags", "native"])
    client = vf.FakeClient(lambda request: "<answer>5</answer>" if request.tools is None else "5")
    results = group.evaluate(client, "fake", use_tqdm=False)
    assert not results.failed
    assert sorted(results["stop_conditions"]) == ["answer_given", "no_tools_called"]


def test_a_run_with_tools_is_saved_and_gone_on_with(tmp_path: Path) -> None:
    env = vf.ToolEnv(tools=[add], dataset=[{"question": f"{i}?"} for i in range(3)], parser=TAGS)
    client = vf.FakeClient(lambda messages: "<answer>5</answer>")
    first = env.evaluate(client, "fake", num_examples=2, results_path=tmp_path / "run", use_tqdm=False)
    again = env.evaluate(client, "fake", num_examples=2, results_path=tmp_path / "run", resume=True, use_tqdm=False)
    assert len(client.requests) == 2
    assert again["rewards"] == first["rewards"]
    assert again["prompts"][0][0]["content"] == first["prompts"][0][0]["content"]
