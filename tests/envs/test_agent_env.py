"""Agents of others, unchanged: each of their calls of the model is a turn with its exact tokens, within limits."""

from __future__ import annotations

import asyncio
import json
import pickle
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import openai
import pytest

import verifiers as vf
from verifiers.clients.fake import encode_prompt
from verifiers.samples import samples_of

ROWS = [{"question": "2+2?", "answer": "4", "info": {"level": 1}}]
CALLS = [
    {"id": f"c{n}", "type": "function", "function": {"name": "add", "arguments": json.dumps({"a": n, "b": 1})}}
    for n in (1, 2)
]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def correct(completion: Any, answer: str) -> float:
    return float(bool(completion) and answer in completion[-1]["content"])


def make_env(run: Any, **kwargs: Any) -> vf.AgentEnv:
    return vf.AgentEnv(run=run, **{"dataset": ROWS, "rubric": vf.Rubric([correct]), **kwargs})


def play(env: vf.AgentEnv, reply: Any = "4", **kwargs: Any) -> vf.State:
    client = reply if isinstance(reply, vf.FakeClient) else vf.FakeClient(reply, tokens=True)
    results = env.evaluate(client=client, model="policy", use_tqdm=False, **kwargs)
    (state,) = results.rollouts
    assert isinstance(state, vf.State)
    return state


def chat(base_url: str, api_key: str, messages: Any, **kwargs: Any) -> Any:
    with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
        return client.chat.completions.create(model="gpt-4o", messages=messages, **kwargs)


def say(base_url: str, api_key: str, text: str) -> str:
    return str(chat(base_url, api_key, [{"role": "user", "content": text}]).choices[0].message.content)


def check_tokens(state: vf.State) -> None:
    """Every turn has the ids of the very prompt that the model was asked."""
    for step in state["trajectory"]:
        assert step["tokens"]["prompt_ids"] == encode_prompt(step["prompt"])
        assert len(step["tokens"]["completion_ids"]) == len(step["tokens"]["completion_logprobs"]) > 0


# --- SDKs ---------------------------------------------------------------------------------------------------------


def tool_agent(base_url: str, api_key: str, prompt: Any, model: str) -> str:
    """A plain agent of the openai SDK: streams, runs the tools that it is asked for, until there is an answer."""
    client, messages = openai.OpenAI(base_url=base_url, api_key=api_key), list(prompt)
    with client:
        while True:
            with client.chat.completions.stream(model=model, messages=messages, tools=[TOOL]) as stream:
                for _ in stream:
                    pass
                message = stream.get_final_completion().choices[0].message
            if not message.tool_calls:
                return str(message.content)
            asked = [{"id": c.id, "type": "function", "function": _plain(c.function)} for c in message.tool_calls]
            messages.append({"role": "assistant", "content": message.content, "tool_calls": asked})
            for call in message.tool_calls:
                args = json.loads(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": str(args["a"] + args["b"])})


def _plain(function: Any) -> dict[str, str]:
    return {"name": function.name, "arguments": function.arguments}


def test_an_agent_of_the_openai_sdk_streams_and_calls_tools_in_parallel_and_is_one_sample_of_exact_tokens() -> None:
    state = play(make_env(tool_agent), [{"content": "", "tool_calls": CALLS}, "it is 4"])
    assert state["error"] is None
    assert state["reward"] == 1.0
    assert state["completion"] == [{"role": "assistant", "content": "it is 4"}]
    assert [message["role"] for message in state["trajectory"][1]["prompt"]] == ["user", "assistant", "tool", "tool"]
    assert state["trajectory"][0]["extras"]["tools"] == [TOOL]
    assert state["metrics"]["num_turns"] == 2.0
    assert state["metrics"]["num_branches"] == 1.0
    assert state["stop_condition"] == "agent_done"
    check_tokens(state)
    (sample,) = samples_of(state["trajectory"])
    assert sum(sample.completion_mask) == sum(len(step["tokens"]["completion_ids"]) for step in state["trajectory"])


async def in_async_code(base_url: str, api_key: str, prompt: Any) -> str:
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        reply = await client.chat.completions.create(model="gpt-4o", messages=prompt)
    return str(reply.choices[0].message.content)


def in_responses(base_url: str, api_key: str, prompt: Any) -> str:
    with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
        first = client.responses.create(model="gpt-5", input=prompt[-1]["content"], instructions="Be brief.")
        with client.responses.stream(model="gpt-5", input="Sure?", previous_response_id=first.id) as stream:
            kinds = [event.type for event in stream]
            assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
            return stream.get_final_response().output_text


def in_messages(anthropic_base_url: str, api_key: str, prompt: Any) -> str:
    client = anthropic.Anthropic(base_url=anthropic_base_url, api_key=api_key)
    with client, client.messages.stream(model="claude", max_tokens=64, messages=prompt) as stream:
        return stream.get_final_text()


@pytest.mark.parametrize("run", [in_async_code, in_responses, in_messages])
def test_agents_in_async_code_and_in_the_other_two_apis_are_recorded_alike(run: Any) -> None:
    state = play(make_env(run))
    assert state["error"] is None
    assert state["reward"] == 1.0
    check_tokens(state)


def test_tool_calls_come_through_anthropics_api_and_the_responses_api_too() -> None:
    def run(base_url: str, anthropic_base_url: str, api_key: str) -> str:
        tool: Any = {"name": "add", "input_schema": {"type": "object", "properties": {}}}
        with anthropic.Anthropic(base_url=anthropic_base_url, api_key=api_key) as theirs:
            asked: Any = [{"role": "user", "content": "add"}]
            message = theirs.messages.create(model="claude", max_tokens=64, messages=asked, tools=[tool])
        blocks = [block.input for block in message.content if block.type == "tool_use"]
        function: Any = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}
        with openai.OpenAI(base_url=base_url, api_key=api_key) as ours:
            items = ours.responses.create(model="x", input="add", tools=[function]).output
        return json.dumps([blocks, [json.loads(item.arguments) for item in items if item.type == "function_call"]])

    state = play(make_env(run), {"content": None, "tool_calls": CALLS})
    wanted = [{"a": 1, "b": 1}, {"a": 2, "b": 1}]
    assert json.loads(state["completion"][0]["content"]) == [wanted, wanted]


def test_what_an_agent_did_not_ask_for_is_not_in_the_reply_that_it_reads() -> None:
    seen: list[Any] = []

    def run(base_url: str, api_key: str, prompt: Any) -> str:
        seen.append(chat(base_url, api_key, prompt).model_dump())
        return "4"

    def reply(request: vf.Request) -> Any:
        assert request.sampling["logprobs"] is True
        logprobs = {"content": [{"token": "4", "logprob": -0.5}]}
        choice = {"message": {"role": "assistant", "content": "4"}, "logprobs": logprobs, "token_ids": [7]}
        return {"choices": [choice], "prompt_token_ids": [1, 2], "usage": {"prompt_tokens": 2, "completion_tokens": 1}}

    state = play(make_env(run), vf.FakeClient(reply), sampling_args={"logprobs": True})
    assert state["trajectory"][0]["tokens"]["completion_ids"] == [7]
    assert "prompt_token_ids" not in seen[0]
    assert "token_ids" not in seen[0]["choices"][0]
    assert seen[0]["choices"][0]["logprobs"] is None


def test_smolagents_runs_unchanged() -> None:
    smolagents = pytest.importorskip("smolagents")

    def run(base_url: str, api_key: str, model: str, prompt: Any) -> str:
        policy = smolagents.OpenAIModel(model_id=model, api_base=base_url, api_key=api_key)
        agent = smolagents.ToolCallingAgent(tools=[], model=policy, max_steps=3, verbosity_level=0)
        return str(agent.run(prompt[-1]["content"]))

    answer = {"id": "c", "type": "function", "function": {"name": "final_answer", "arguments": '{"answer": "4"}'}}
    state = play(make_env(run), {"content": "", "tool_calls": [answer]})
    assert state["error"] is None
    assert state["reward"] == 1.0
    check_tokens(state)


# --- branches -----------------------------------------------------------------------------------------------------


def test_a_sub_agent_is_a_branch_and_a_sample_of_its_own_and_the_main_one_goes_on_as_one() -> None:
    def run(base_url: str, api_key: str, prompt: Any) -> None:
        messages = [{"role": "system", "content": "You lead."}, *prompt]
        for _ in range(2):
            messages.append(
                {"role": "assistant", "content": chat(base_url, api_key, messages).choices[0].message.content}
            )
            messages.append({"role": "user", "content": say(base_url, api_key, f"a detail of {len(messages)}")})
        chat(base_url, api_key, messages)

    replies = ["plan", "detail", "plan b", "detail b", "4"]
    state = play(make_env(run), replies)
    assert [step["extras"]["branch"] for step in state["trajectory"]] == [0, 1, 0, 2, 0]
    assert len({step["trajectory_id"] for step in state["trajectory"]}) == 3
    assert state["trajectory"][0]["trajectory_id"] == state["trajectory_id"]
    assert [m["content"] for m in state["completion"]] == ["plan", "detail", "plan b", "detail b", "4"]
    samples = samples_of(state["trajectory"])
    assert [sample.steps for sample in samples] == [(0, 2, 4), (1,), (3,)]


def test_a_rewritten_history_begins_a_branch_and_every_reply_is_learned_from_once() -> None:
    def run(base_url: str, api_key: str, prompt: Any) -> str:
        first = say(base_url, api_key, "a long story")
        return say(base_url, api_key, f"a summary of {first}")

    state = play(make_env(run), ["once", "4"])
    assert [step["extras"]["branch"] for step in state["trajectory"]] == [0, 1]
    samples = samples_of(state["trajectory"])
    assert sum(sum(sample.completion_mask) for sample in samples) == len("once") + len("4") + 2


def test_several_replies_to_one_call_are_turns_each() -> None:
    def run(base_url: str, api_key: str, prompt: Any) -> str:
        return str(chat(base_url, api_key, prompt, n=2).choices[1].message.content)

    def reply(request: vf.Request) -> Any:
        said = [{"index": i, "message": {"role": "assistant", "content": text}} for i, text in enumerate("34")]
        return {"choices": said, "usage": {"prompt_tokens": 1, "completion_tokens": 2}}

    state = play(make_env(run), vf.FakeClient(reply))
    assert [step["completion"][0]["content"] for step in state["trajectory"]] == ["3", "4"]
    assert state["reward"] == 1.0


# --- what reaches it, what it returns -----------------------------------------------------------------------------


def test_the_row_reaches_the_agent_by_the_names_of_its_arguments() -> None:
    seen: dict[str, Any] = {}

    def run(**given: Any) -> str:
        seen.update(given)
        return "4"

    play(make_env(run))
    assert seen["answer"] == "4"
    assert seen["info"] == {"level": 1}
    assert seen["row"]["example_id"] == seen["example_id"] == 0
    assert seen["prompt"][-1]["content"] == "2+2?"
    assert seen["model"] == "policy"
    assert seen["base_url"] == f"{seen['anthropic_base_url']}/v1"
    assert seen["base_url"].startswith("http://127.0.0.1:")
    assert isinstance(seen["state"], vf.State)


@pytest.mark.parametrize(
    ("returned", "completion"),
    [
        ("4", [{"role": "assistant", "content": "4"}]),
        ([{"role": "assistant", "content": "4"}], [{"role": "assistant", "content": "4"}]),
        (None, [{"role": "assistant", "content": "said"}]),
        ({"completion": "4", "note": 7}, [{"role": "assistant", "content": "4"}]),
        (("4", {"note": 7}), [{"role": "assistant", "content": "4"}]),
        ({"note": 7}, [{"role": "assistant", "content": "said"}]),
    ],
)
def test_what_the_agent_returns_is_the_completion_and_nothing_is_the_conversation(
    returned: Any, completion: Any
) -> None:
    def run(base_url: str, api_key: str) -> Any:
        say(base_url, api_key, "hello")
        return returned

    state = play(make_env(run), "said")
    assert state["error"] is None
    assert state["completion"] == completion
    assert isinstance(returned, (str, list, type(None))) or state["note"] == 7


def test_what_is_no_completion_is_a_failure_that_says_so() -> None:
    state = play(make_env(lambda: 4.5))
    assert "the agent returned 4.5" in str(state["error"])


@pytest.mark.parametrize("steps", [None, "x", [None], [{"role": "assistant"}]])
def test_turns_that_an_agent_returns_and_that_are_none_fail_it_in_a_sentence_and_it_is_cleaned_up(steps: Any) -> None:
    cleaned: list[Any] = []

    class Cleaning(vf.AgentEnv):
        @vf.cleanup
        async def note(self, state: Any) -> None:
            cleaned.append(state["example_id"])

    env = Cleaning(run=lambda: {"trajectory": steps}, dataset=[{"question": "2+2?", "answer": "4"}])
    state = play(env)
    assert str(state["error"]).startswith("state['trajectory'] must be the list of the rollout's turns")
    assert cleaned == [0]


def test_an_argument_that_no_rollout_has_is_refused_when_the_environment_is_made() -> None:
    def run(base_url: str, difficulty: str) -> None: ...

    with pytest.raises(TypeError, match=r"run has unknown arguments \['difficulty'\]; it may have base_url"):
        make_env(run)
    with pytest.raises(ValueError, match="max_total_tokens=0"):
        make_env(tool_agent, max_total_tokens=0)
    with pytest.raises(ValueError, match="agent_timeout_s=0"):
        make_env(tool_agent, agent_timeout_s=0)
    with pytest.raises(TypeError, match="are for a command line"):
        make_env(tool_agent, cwd="/")


def test_the_arguments_of_the_run_win_over_those_of_the_agent() -> None:
    seen: list[Any] = []

    def run(base_url: str, api_key: str, prompt: Any) -> str:
        more = {"temperature": 0.0, "max_tokens": 9, "stop": ["."], "extra_body": {"top_k": 3}}
        return str(chat(base_url, api_key, prompt, **more).choices[0].message.content)

    def reply(request: vf.Request) -> str:
        seen.append((request.model, dict(request.sampling)))
        return "4"

    args = {"temperature": 1.0, "max_tokens": 64, "extra_body": {"top_k": 50}}
    play(make_env(run), reply, sampling_args=args)
    assert seen == [
        ("policy", {"temperature": 1.0, "max_tokens": 9, "stop": ["."], "extra_body": {"top_k": 50}}),
    ]


# --- limits -------------------------------------------------------------------------------------------------------


def talkative(base_url: str, api_key: str) -> str:
    for turn in range(20):
        say(base_url, api_key, f"turn {turn}")
    return "done"


def test_past_the_turn_limit_the_model_is_not_asked_and_the_rollout_is_scored() -> None:
    state = play(make_env(talkative, max_turns=3))
    assert state["error"] is None
    assert state["stop_condition"] == "max_turns_reached"
    assert len(state["trajectory"]) == 3
    assert state["reward"] == 1.0  # its last reply


def test_an_agent_that_takes_a_refusal_for_what_it_is_has_its_answer_scored() -> None:
    def run(base_url: str, api_key: str) -> str:
        try:
            return talkative(base_url, api_key)
        except openai.BadRequestError as error:
            return f"{error.code}, my best guess: 4"

    state = play(make_env(run, max_turns=1), "hm")
    assert state["completion"][0]["content"] == "max_turns_reached, my best guess: 4"
    assert state["stop_condition"] == "max_turns_reached"


def test_calls_at_the_same_time_count_towards_the_turn_limit() -> None:
    def run(base_url: str, api_key: str) -> str:
        def ask(n: int) -> str:
            try:
                return say(base_url, api_key, f"part {n}")
            except openai.BadRequestError:
                return "refused"

        with ThreadPoolExecutor(6) as pool:
            said = list(pool.map(ask, range(6)))
        return f"{said.count('refused')} refused"

    state = play(make_env(run, max_turns=4))
    assert len(state["trajectory"]) == 4
    assert state["completion"][0]["content"] == "2 refused"


def test_no_more_calls_run_at_once_than_are_allowed() -> None:
    now = most = 0

    async def reply(messages: Any) -> str:
        nonlocal now, most
        now, most = now + 1, max(most, now + 1)
        await asyncio.sleep(0.02)
        now -= 1
        return "4"

    async def run(base_url: str, api_key: str) -> str:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            asked = [client.responses.create(model="m", input=f"part {n}") for n in range(6)]
            return (await asyncio.gather(*asked))[0].output_text

    state = play(make_env(run, max_concurrent_calls=2), reply)
    assert state["reward"] == 1.0
    assert len(state["trajectory"]) == 6
    assert most == 2


def test_sampled_tokens_are_limited_over_all_calls_and_the_last_reply_by_what_is_left() -> None:
    seen: list[Any] = []

    def reply(request: vf.Request) -> str:
        seen.append(request.sampling.get("max_tokens"))
        return "four"  # five tokens, with its end

    state = play(make_env(talkative, max_total_tokens=12), reply)
    assert seen == [12, 7, 2]
    assert state["stop_condition"] == "max_total_tokens_reached"
    assert state["error"] is None


def test_a_stop_condition_of_ones_own_ends_the_rollout() -> None:
    class Short(vf.AgentEnv):
        @vf.stop
        async def has_said_enough(self, state: vf.State) -> bool:
            return len(state["trajectory"]) == 2

    state = play(Short(run=talkative, dataset=ROWS))
    assert state["stop_condition"] == "has_said_enough"
    assert len(state["trajectory"]) == 2


def test_an_agent_past_its_deadline_has_failed() -> None:
    over = threading.Event()
    state = play(make_env(lambda: over.wait(60), agent_timeout_s=0.2))
    over.set()
    assert isinstance(state["error"], vf.HookError)
    assert "within 0.2 s" in str(state["error"])
    assert state["reward"] is None


# --- failures -----------------------------------------------------------------------------------------------------


def test_a_crash_of_the_agents_own_code_is_a_failure_with_its_cause_and_no_zero() -> None:
    def run(base_url: str, api_key: str) -> str:
        say(base_url, api_key, "hello")
        return str(1 / 0)

    state = play(make_env(run))
    assert isinstance(state["error"], vf.HookError)
    assert state["error"].blame == "environment"
    assert isinstance(state["error"].__cause__, ZeroDivisionError)
    assert state["reward"] is None


def test_a_model_that_is_down_fails_the_rollout_even_where_the_agent_makes_do_without_it() -> None:
    def run(base_url: str, api_key: str) -> str:
        try:
            return say(base_url, api_key, "hello")
        except openai.APIStatusError:
            return "sorry"

    state = play(make_env(run), vf.ServerError("the endpoint is down"))
    assert isinstance(state["error"], vf.ServerError)
    assert state["reward"] is None


def test_a_call_that_failed_and_then_succeeded_is_no_failure() -> None:
    def run(base_url: str, api_key: str) -> str:
        for _ in range(2):
            try:
                return say(base_url, api_key, "hello")
            except openai.InternalServerError:
                continue
        return "sorry"

    state = play(make_env(run), [vf.ServerError("for a moment"), "4"])
    assert state["error"] is None
    assert state["reward"] == 1.0


def test_sdks_do_not_repeat_what_the_client_has_given_up() -> None:
    asked: list[Any] = []

    def reply(messages: Any) -> Any:
        asked.append(messages)
        return vf.RateLimitError("too many")

    play(make_env(lambda base_url, api_key: say(base_url, api_key, "hello")), reply)
    assert len(asked) == 1


def test_a_context_that_overflows_is_scored_and_says_so_unless_the_agent_shortens_it() -> None:
    def reply(messages: Any) -> Any:
        return vf.OverlongPromptError("too long") if len(messages[-1]["content"]) > 10 else "4"

    def insist(base_url: str, api_key: str) -> str:
        return say(base_url, api_key, "hello") + say(base_url, api_key, "x" * 20)

    def shorten(base_url: str, api_key: str) -> str:
        try:
            return insist(base_url, api_key)
        except openai.BadRequestError as error:
            return f"{error.code} {say(base_url, api_key, 'in short')}"

    state = play(make_env(insist), reply)
    assert state["error"] is None
    assert state["stop_condition"] == "prompt_too_long"
    assert state["is_truncated"]
    assert state["reward"] == 1.0
    state = play(make_env(shorten), reply)
    assert state["completion"][0]["content"] == "context_length_exceeded 4"
    assert state["stop_condition"] == "agent_done"
    assert not state["is_truncated"]


def test_a_request_that_cannot_be_read_is_refused_by_name_and_is_the_agents_fault() -> None:
    def run(base_url: str, api_key: str) -> str:
        with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
            return client.responses.create(model="m", input="hi", tools=[{"type": "web_search"}]).output_text

    state = play(make_env(run))
    assert isinstance(state["error"], vf.HookError)
    assert "web_search" in str(state["error"])


def post(base_url: str, api_key: str, path: str, body: bytes) -> tuple[int, Any]:
    request = urllib.request.Request(f"{base_url}{path}", body, {"Authorization": f"Bearer {api_key}"})
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_nonsense_is_refused_and_an_agent_that_goes_on_without_it_is_scored() -> None:
    """What was never a call of the model is no failure of the model's."""
    found: list[Any] = []

    def run(base_url: str, api_key: str) -> str:
        for path, body in (
            ("/chat/completions", b"{"),
            ("/chat/completions", b"null"),
            ("/chat/completions", b'{"messages": [5]}'),
            ("/chat/completions", b'{"messages": [{"content": "no role"}]}'),
            ("/chat/completions", b'{"messages": ' + b"[" * 100_000),
            ("/chat/completions", b'{"messages": [{"role": "assistant", "tool_calls": true}]}'),
            ("/completions", b'{"prompt": [{"role": "user", "content": "hello"}]}'),
            ("/completions", b'{"prompt": [null]}'),
            ("/completions", b'{"prompt": [1, "x"]}'),
            ("/embeddings", b'{"input": "hello"}'),
        ):
            found.append(post(base_url, api_key, path, body))
        return say(base_url, api_key, "hello")

    state = play(make_env(run))
    assert [status for status, _ in found] == [400] * 9 + [404]
    assert "a message must be an object with a role, not 5" in found[2][1]["error"]["message"]
    assert "a list of token ids, or a list of either, not None" in found[7][1]["error"]["message"]
    assert "/embeddings" in found[9][1]["error"]["message"]
    assert (state["error"], state["reward"], len(state["trajectory"])) == (None, 1.0, 1)


def test_an_agent_that_asks_with_token_ids_is_answered_and_its_turns_have_these_very_ids(tmp_path: Any) -> None:
    def run(base_url: str, api_key: str) -> str:
        with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
            first = client.completions.create(model="m", prompt=[104, 105]).choices[0].text
            return client.completions.create(model="m", prompt=[[104, 105, 257, 33]]).choices[0].text + first

    state = play(make_env(run), save_results=True, results_path=tmp_path / "run")
    assert [step["tokens"]["prompt_ids"] for step in state["trajectory"]] == [[104, 105], [104, 105, 257, 33]]
    assert (state["error"], state["reward"]) == (None, 1.0)
    (again,) = make_env(run).evaluate(
        client=vf.FakeClient("4", tokens=True), model="policy", use_tqdm=False, resume=tmp_path / "run"
    ).rollouts  # fmt: skip
    assert again["reward"] == 1.0


def test_a_limit_on_tokens_that_is_no_number_is_refused_and_not_left_out() -> None:
    found: list[Any] = []

    def run(base_url: str, api_key: str) -> str:
        for limit in (b"1.5", b'"4"', b"true"):
            body = b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": ' + limit + b"}"
            found.append(post(base_url, api_key, "/chat/completions", body))
        return say(base_url, api_key, "hi")

    play(make_env(run))
    assert [status for status, _ in found] == [400, 400, 400]
    assert "max_tokens must be an integer, not 1.5" in found[0][1]["error"]["message"]


def test_an_agent_that_hangs_up_in_the_middle_of_a_stream_goes_on() -> None:
    def run(base_url: str, api_key: str, prompt: Any) -> str:
        with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
            for _ in range(3):
                stream = client.chat.completions.create(model="m", messages=prompt, stream=True)
                next(iter(stream))
                stream.close()
        return say(base_url, api_key, "hello")

    state = play(make_env(run), "4 " * 20_000)
    assert (state["error"], state["reward"], len(state["trajectory"])) == (None, 1.0, 4)


# --- keys ---------------------------------------------------------------------------------------------------------


def test_every_rollout_has_a_url_and_a_key_of_its_own_and_others_are_refused() -> None:
    both, seen = threading.Barrier(2, timeout=30), []

    def run(base_url: str, api_key: str, prompt: Any) -> str:
        seen.append((base_url, api_key))
        both.wait()
        mine, other = (base_url, api_key), next(pair for pair in seen if pair[0] != base_url)
        for wrong in ((mine[0], other[1]), (mine[0], "vf-guess"), (f"{mine[0][:-5]}/v1", mine[1])):
            with pytest.raises((openai.AuthenticationError, openai.NotFoundError)):
                say(*wrong, "hello")
        both.wait()
        return say(base_url, api_key, "hello")

    results = make_env(run).evaluate(
        client=vf.FakeClient("4"), model="m", rollouts_per_example=2, use_tqdm=False, max_concurrent=2
    )
    assert not results.failed
    assert len(set(seen)) == 2


def test_a_key_is_refused_once_its_rollout_has_ended_and_late_calls_change_nothing() -> None:
    kept: list[Any] = []
    asked = threading.Event()

    async def slow(messages: Any) -> str:
        if messages[-1]["content"] == "late":
            asked.set()
            await asyncio.sleep(3600)
        return "4"

    def late(base_url: str, api_key: str) -> None:
        with pytest.raises(openai.APIError):
            say(base_url, api_key, "late")
        kept.append("cut off")

    def run(base_url: str, api_key: str, example_id: int) -> str:
        if kept:
            with pytest.raises(openai.AuthenticationError):
                say(*kept[0], "hello")
            return "4"
        kept.append((base_url, api_key))
        kept.append(threading.Thread(target=late, args=(base_url, api_key)))
        kept[1].start()
        assert asked.wait(30)
        return "4"

    results = make_env(run).evaluate(
        client=vf.FakeClient(slow), model="m", rollouts_per_example=2, use_tqdm=False, max_concurrent=1
    )
    kept[1].join(30)
    assert kept[2] == "cut off"
    assert not results.failed
    assert [state["trajectory"] for state in results.rollouts] == [[], []]


def test_an_environment_with_an_agent_travels_to_other_processes_and_plays_in_one_loop_after_the_other() -> None:
    env = pickle.loads(pickle.dumps(make_env(tool_agent)))
    assert [play(env)["reward"] for _ in range(2)] == [1.0, 1.0]
