"""Turns: every form a hook may take, the limits, the stop reasons, and both message types."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path
from typing import Any

import numpy
import pytest

import verifiers as vf
from verifiers import calls

ROWS = [{"question": "Guess.", "answer": "7"}]
ASSISTANT, USER = "assistant", "user"


def play(env: vf.Environment, reply: Any = "x", **kwargs: Any) -> vf.State:
    client = reply if isinstance(reply, vf.FakeClient) else vf.FakeClient(reply)
    (state,) = env.evaluate(client=client, model="m", use_tqdm=False, **kwargs).rollouts
    assert isinstance(state, vf.State)
    return state


def said(state: vf.State) -> list[tuple[str, str]]:
    return [(m["role"], m["content"]) for m in state["completion"]]


def env_with(max_turns: int = 2, dataset: Any = None, **hooks: Any) -> vf.MultiTurnEnv:
    settings = {
        k: hooks.pop(k) for k in ("message_type", "max_retries", "parser", "max_seq_len", "rubric") if k in hooks
    }
    cls = type("Made", (vf.MultiTurnEnv,), hooks)
    made = cls(dataset=dataset or ROWS, max_turns=max_turns, **settings)
    assert isinstance(made, vf.MultiTurnEnv)
    return made


# --- env_response -------------------------------------------------------------------------------------------------

HINT = {"role": USER, "content": "hint"}


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ("hint", [HINT]),
        (HINT, [HINT]),
        ([HINT, HINT], [HINT, HINT]),
        (["hint"], [HINT]),
        (("hint", {"hints": 1}), [HINT]),
        ((HINT, {"hints": 1}), [HINT]),
        (([HINT], {"hints": 1}), [HINT]),
        ([], []),
        (None, []),
        ((None, {"hints": 1}), []),
    ],
)
def test_an_answer_may_be_text_a_message_a_list_or_any_with_a_state(
    returned: Any, expected: Any, is_async: bool
) -> None:
    async def later(self: Any, messages: Any, state: Any, **kwargs: Any) -> Any:
        return returned

    def now(self: Any, messages: Any, state: Any) -> Any:
        return returned

    state = play(env_with(env_response=later if is_async else now))
    reply = {"role": ASSISTANT, "content": "x"}
    assert state["completion"] == [reply, *expected, reply]
    assert state["error"] is None
    has_state = isinstance(returned, tuple)
    assert state.get("hints") == (1 if has_state else None)


def test_a_whole_state_may_be_returned_and_a_partial_one_is_merged() -> None:
    def whole(self: Any, messages: Any, state: Any) -> Any:
        state["seen"] = state.get("seen", 0) + len(messages)
        return "go on", state

    assert play(env_with(max_turns=3, env_response=whole))["seen"] == 2 + 4


def test_hooks_see_the_conversation_so_far_and_the_models_last_message() -> None:
    seen: list[Any] = []

    def respond(self: Any, messages: Any, state: Any) -> str:
        seen.append([m["content"] for m in messages])
        return f"turn {state['turn']}"

    state = play(env_with(max_turns=3, env_response=respond), ["a", "b", "c"])
    assert seen == [["Guess.", "a"], ["Guess.", "a", "turn 1", "b"]]
    assert [r.text for r in state["responses"]] == ["a", "b", "c"]
    assert state["turn"] == len(state["trajectory"]) == 3
    assert state["metrics"]["num_turns"] == 3.0


def test_an_environment_may_count_turns_and_keep_replies_itself_under_the_names_of_the_library() -> None:
    def start(self: Any, state: Any) -> None:
        state["usage"] = {"hints": 1}
        assert (state.setdefault("responses", []), state.setdefault("turn", 0)) == ([], 0)

    def respond(self: Any, messages: Any, state: Any) -> str:
        state["turn"] += 1
        state["responses"].append(messages[-1]["content"])
        return f"turn {state['turn']}"

    state = play(env_with(max_turns=3, setup_state=start, env_response=respond), ["a", "b", "c"])
    assert (state["turn"], state["responses"], state["usage"]) == (2, ["a", "b"], {"hints": 1})
    assert said(state)[1::2] == [("user", "turn 1"), ("user", "turn 2")]


def test_what_an_environment_adds_to_the_count_of_turns_is_counted_on_as_in_0_1_5() -> None:
    def respond(self: Any, messages: Any, state: Any) -> str:
        before = state.get("turn", "unknown")
        state["turn"] += 1
        return f"turn {before}"

    state = play(env_with(max_turns=3, env_response=respond), ["a", "b", "c"])
    assert said(state)[1::2] == [("user", "turn 1"), ("user", "turn 3")]
    assert state["turn"] == 5


def test_half_a_turn_more_than_the_count_of_turns_is_half_a_turn_more() -> None:
    def pace(state: Any) -> float:
        return 1 / (state["turn"] + 0.5)

    state = play(env_with(max_turns=2, env_response=lambda self, messages, state: "more", rubric=vf.Rubric([pace])))
    assert state["reward"] == 1 / 2.5


@pytest.mark.parametrize("hook", ["add_trajectory_step", "add_model_response"])
def test_a_hook_that_keeps_no_turn_fails_the_rollout_in_the_place_of_playing_without_end(hook: str) -> None:
    state = play(env_with(env_response=lambda self, messages, state: "more", **{hook: lambda self, *given: None}))
    assert str(state["error"]).startswith("the turn was not kept")


@pytest.mark.parametrize("given", [None, 5, {"role": "user", "content": "x"}])
def test_a_prompt_hook_that_returns_no_messages_is_told_what_it_returned(given: Any) -> None:
    state = play(env_with(get_prompt_messages=lambda self, state: given))
    assert str(state["error"]).startswith(f"get_prompt_messages returned {given!r}; it returns a list of messages")


def test_whose_turn_it_is_may_be_in_the_state() -> None:
    def respond(self: Any, messages: Any, state: Any) -> Any:
        return "go on", {"turn": "black"}

    state = play(env_with(max_turns=3, env_response=respond))
    assert (state["error"], state["turn"]) == (None, "black")


@pytest.mark.parametrize("usage", [{"hints": 1}, 5, "much"])
def test_a_run_goes_on_whatever_an_environment_keeps_as_usage(usage: Any, tmp_path: Path) -> None:
    env = env_with(env_response=lambda self, messages, state: ("go on", {"usage": usage}))
    results = env.evaluate(vf.FakeClient("x"), "fake", results_path=tmp_path / "run")
    assert (results["num_turns"], results.usage.total_tokens) == ([2.0], 0)
    assert results.states[0]["usage"] == usage


def test_each_step_holds_what_was_shown_and_what_was_said() -> None:
    state = play(env_with(env_response=lambda self, messages, state: "more"), ["a", "b"])
    first, second = state["trajectory"]
    assert [m["content"] for m in first["prompt"]] == ["Guess."]
    assert [m["content"] for m in second["prompt"]] == ["Guess.", "a", "more"]
    assert first["completion"] == [{"role": ASSISTANT, "content": "a"}]
    assert first["trajectory_id"] == second["trajectory_id"] == state["trajectory_id"]
    assert second["tokens"] is None


# --- when it ends -------------------------------------------------------------------------------------------------


def test_ten_turns_are_the_limit_where_nobody_says() -> None:
    class Talk(vf.MultiTurnEnv):
        def env_response(self, messages: Any, state: Any) -> str:
            return "more"

    state = play(Talk(dataset=ROWS))
    assert (len(state["trajectory"]), state["stop_condition"]) == (10, "max_turns_reached")


def test_is_completed_of_messages_and_state_ends_after_the_environments_word() -> None:
    asked: list[int] = []

    def respond(self: Any, messages: Any, state: Any) -> Any:
        right = messages[-1]["content"] == state["answer"]
        return ("Correct!", {"solved": True}) if right else "Wrong."

    def is_completed(self: Any, messages: Any, state: Any) -> bool:
        asked.append(len(messages))
        return bool(state.get("solved"))

    state = play(env_with(5, env_response=respond, is_completed=is_completed), ["5", "7", "never said"])
    assert said(state) == [(ASSISTANT, "5"), (USER, "Wrong."), (ASSISTANT, "7"), (USER, "Correct!")]
    assert state["stop_condition"] == "is_completed"
    assert min(asked) == 2  # never before the model has spoken


@pytest.mark.parametrize("is_async", [False, True])
def test_is_completed_of_the_state_alone_is_asked_before_every_turn(is_async: bool) -> None:
    def now(self: Any, state: Any) -> bool:
        return len(state["trajectory"]) == 2

    async def later(self: Any, state: Any, **kwargs: Any) -> bool:
        return now(self, state)

    made = env_with(5, env_response=lambda self, m, s: "more", is_completed=later if is_async else now)
    state = play(made)
    assert (state["error"], len(state["trajectory"]), state["stop_condition"]) == (None, 2, "is_completed")
    assert said(state)[-1] == (ASSISTANT, "x")


def test_is_completed_may_ask_super_which_knows_the_stop_conditions() -> None:
    class Asks(vf.MultiTurnEnv):
        def env_response(self, messages: Any, state: Any) -> str:
            return "more"

        async def is_completed(self, state: vf.State, **kwargs: Any) -> bool:  # type: ignore[override]
            return bool(await super().is_completed(state, **kwargs)) or len(state["trajectory"]) >= 2

    assert play(Asks(dataset=ROWS, max_turns=1))["stop_condition"] == "max_turns_reached"
    assert play(Asks(dataset=ROWS))["stop_condition"] == "is_completed"


def test_completed_in_the_state_ends_it_with_the_last_word_shown() -> None:
    state = play(env_with(9, env_response=lambda self, m, s: ("Correct! Well done.", {"completed": True})))
    assert said(state) == [(ASSISTANT, "x"), (USER, "Correct! Well done.")]
    assert state["stop_condition"] == "has_final_env_response"


def test_a_final_env_response_ends_the_rollout() -> None:
    def respond(self: Any, messages: Any, state: Any) -> Any:
        state["final_env_response"] = [{"role": USER, "content": "The end."}]
        return state["final_env_response"]

    state = play(env_with(9, env_response=respond))
    assert said(state) == [(ASSISTANT, "x"), (USER, "The end.")]
    assert len(state["trajectory"]) == 1


def test_an_environment_without_an_answer_is_refused_when_built() -> None:
    class Mute(vf.MultiTurnEnv):
        pass

    with pytest.raises(TypeError, match="Mute must define env_response"):
        Mute(dataset=ROWS)


# --- state --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True])
def test_initial_state_and_setup_state_add_to_what_a_rollout_starts_from(is_async: bool) -> None:
    def initial(self: Any, row: Any) -> dict[str, Any]:
        return {"target": row["answer"], "attempts": 0}

    def setup(self: Any, state: Any) -> Any:
        state["doubled"] = state["target"] * 2
        return None if is_async else state

    async def initial_later(self: Any, row: Any) -> dict[str, Any]:
        return initial(self, row)

    async def setup_later(self: Any, state: Any) -> Any:
        return setup(self, state)

    hooks = (initial_later, setup_later) if is_async else (initial, setup)
    made = env_with(env_response=lambda self, m, s: "more", initial_state=hooks[0], setup_state=hooks[1])
    state = play(made)
    assert (state["error"], state["target"], state["attempts"], state["doubled"]) == (None, "7", 0, "77")


def test_the_first_state_can_be_overridden_with_super() -> None:
    class Own(vf.SingleTurnEnv):
        async def init_state(self, input: Any, client: Any, model: str, sampling_args: Any = None) -> vf.State:
            state: vf.State = await super().init_state(input, client, model, sampling_args)
            state["mine"] = input["answer"]
            return state

    env = Own(dataset=ROWS)
    assert play(env)["mine"] == "7"
    assert env.rollout(vf.FakeClient("x"), "m", "q", "a")[1]["mine"] == "a"


def test_every_rollout_starts_from_a_state_of_its_own() -> None:
    def initial(self: Any, row: Any) -> dict[str, Any]:
        return {"attempts": 0}

    def respond(self: Any, messages: Any, state: Any) -> Any:
        state["attempts"] += 1
        return "more", state

    made = env_with(4, env_response=respond, initial_state=initial)
    results = made.evaluate(client=vf.FakeClient("x"), model="m", rollouts_per_example=5, use_tqdm=False)
    assert [s["attempts"] for s in results.states] == [3] * 5


def test_other_columns_of_a_row_are_in_the_state() -> None:
    made = env_with(1, dataset=[{"question": "x", "difficulty": "hard", "completion": "of the data set"}])
    state = play(made)
    assert state["difficulty"] == "hard"
    assert said(state) == [(ASSISTANT, "x")]


# --- steps that can be overridden ---------------------------------------------------------------------------------


def test_prompt_step_and_rendering_can_be_overridden_with_super() -> None:
    class Own(vf.MultiTurnEnv):
        def env_response(self, messages: Any, state: Any) -> str:
            return "more"

        async def get_prompt_messages(self, state: vf.State) -> Any:
            messages = await super().get_prompt_messages(state)
            return [*messages, {"role": USER, "content": f"({len(state['trajectory'])})"}]

        async def add_trajectory_step(self, state: vf.State, trajectory_step: Any) -> None:
            trajectory_step["reward"] = float(len(state["trajectory"]))
            trajectory_step["extras"]["note"] = "mine"
            await super().add_trajectory_step(state, trajectory_step)

        async def render_completion(self, state: vf.State) -> None:
            await super().render_completion(state)
            state["completion"].append({"role": USER, "content": "fin"})

    client = vf.FakeClient("x")
    state = play(Own(dataset=ROWS, max_turns=2), client)
    assert [r.prompt[-1]["content"] for r in client.requests] == ["(0)", "(1)"]  # type: ignore[index]
    assert [step["reward"] for step in state["trajectory"]] == [0.0, 1.0]  # the rollout's score leaves them be
    assert state["trajectory"][0]["extras"] == {"note": "mine"}
    assert said(state)[-1] == (USER, "fin")


def test_a_sync_override_may_call_super_without_awaiting() -> None:
    class Own(vf.MultiTurnEnv):
        def env_response(self, messages: Any, state: Any) -> str:
            return "more"

        def get_prompt_messages(self, state: vf.State) -> Any:
            return super().get_prompt_messages(state)

        def get_model_response(self, state: vf.State, prompt: Any, **kwargs: Any) -> Any:
            state["asked"] = state.get("asked", 0) + 1
            return super().get_model_response(state, prompt, **kwargs)

    state = play(Own(dataset=ROWS, max_turns=3))
    assert (state["error"], state["asked"], len(state["trajectory"])) == (None, 3, 3)


def test_a_reply_of_ones_own_may_be_any_object_of_openais_shape() -> None:
    class Own(vf.SingleTurnEnv):
        async def get_model_response(self, state: vf.State, prompt: Any, **kwargs: Any) -> Any:
            return {"choices": [{"message": {"role": ASSISTANT, "content": "canned"}, "finish_reason": "length"}]}

    state = play(Own(dataset=ROWS))
    assert said(state) == [(ASSISTANT, "canned")]
    assert state["is_truncated"] is True


# --- asking again, limits -----------------------------------------------------------------------------------------


def test_a_reply_without_form_is_asked_for_again_and_counted() -> None:
    parser = vf.XMLParser(["answer"])
    client = vf.FakeClient(["7", "seven", "<answer>7</answer>"])
    env = vf.SingleTurnEnv(dataset=ROWS, parser=parser, max_retries=3)
    state = play(env, client)
    assert said(state) == [(ASSISTANT, "<answer>7</answer>")]
    assert len(client.requests) == 3
    assert state["metrics"]["parse_retries"] == 2.0
    assert len(state["trajectory"]) == 1
    assert state["usage"].completion_tokens > len("<answer>7</answer>") + 1  # the discarded ones were paid for


def test_when_it_never_has_form_the_last_reply_counts() -> None:
    client = vf.FakeClient("seven")
    state = play(vf.SingleTurnEnv(dataset=ROWS, parser=vf.XMLParser(["answer"]), max_retries=2), client)
    assert len(client.requests) == 3
    assert (state["error"], said(state), state["metrics"]["parse_retries"]) == (None, [(ASSISTANT, "seven")], 2.0)


def test_without_retries_nothing_is_asked_again_and_no_metric_is_kept() -> None:
    client = vf.FakeClient("seven")
    state = play(vf.SingleTurnEnv(dataset=ROWS, parser=vf.XMLParser(["answer"])), client)
    assert len(client.requests) == 1
    assert "parse_retries" not in state["metrics"]


def test_a_parser_that_raises_is_a_reply_without_form() -> None:
    class Strict(vf.Parser):
        def parse(self, text: Any) -> Any:
            raise ValueError(text)

    client = vf.FakeClient("x")
    assert play(vf.SingleTurnEnv(dataset=ROWS, parser=Strict(), max_retries=1), client)["error"] is None
    assert len(client.requests) == 2


@pytest.mark.parametrize("is_extract", [False, True])
def test_a_parser_that_exits_fails_its_row_and_is_no_reply_without_form(is_extract: bool) -> None:
    class Leaving(vf.Parser):
        def parse(self, text: Any) -> Any:
            raise SystemExit(2)

    def leave(text: str) -> str:
        raise SystemExit(2)

    parser = vf.Parser(extract_fn=leave) if is_extract else Leaving()
    env = vf.SingleTurnEnv(dataset=ROWS, parser=parser, rubric=vf.Rubric([lambda: 1.0]), max_retries=1)
    results = env.evaluate(client=vf.FakeClient("x"), model="m")
    assert len(results.failed) == len(ROWS)
    assert "it called exit(2)" in str(results.failed[0]["error"])


def test_a_tool_call_needs_no_form() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    client = vf.FakeClient({"role": ASSISTANT, "content": None, "tool_calls": [call]})
    state = play(vf.SingleTurnEnv(dataset=ROWS, parser=vf.XMLParser(["answer"]), max_retries=5), client)
    assert len(client.requests) == 1
    assert state["completion"][0]["tool_calls"] == [call]


def test_a_request_past_the_timeout_fails_the_rollout() -> None:
    env = vf.SingleTurnEnv(dataset=ROWS, timeout=0.05)
    began = time.perf_counter()
    state = play(env, vf.FakeClient("x", latency_s=30))
    assert isinstance(state["error"], vf.DeadlineError)
    assert time.perf_counter() - began < 5


def test_tokens_are_cut_to_the_longest_sequence_and_the_rollout_is_truncated() -> None:
    def tokens_of(max_seq_len: int | None) -> tuple[vf.State, Any]:
        state = play(
            vf.SingleTurnEnv(dataset=ROWS, max_seq_len=max_seq_len), vf.FakeClient("a long reply", tokens=True)
        )
        return state, state["trajectory"][0]["tokens"]

    whole, uncut = tokens_of(None)
    limit = len(uncut["prompt_ids"]) + 3
    state, cut = tokens_of(limit)
    assert len(uncut["completion_ids"]) > 3
    assert (cut["completion_ids"], cut["is_truncated"]) == (uncut["completion_ids"][:3], True)
    assert (whole["is_truncated"], state["is_truncated"]) == (False, True)
    assert said(state) == [(ASSISTANT, "a long reply")]
    assert tokens_of(2)[1]["overlong_prompt"] is True


# --- the other message type ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("returned", [" more ", {"role": USER, "content": " more "}, [" more "], (" more ", {"n": 1})])
def test_completion_prompts_grow_as_text(returned: Any) -> None:
    client = vf.FakeClient(["one", "two"])
    made = env_with(
        2,
        dataset=[{"prompt": "Count: ", "answer": ""}],
        message_type="completion",
        env_response=lambda self, m, s: returned,
    )
    state = play(made, client)
    assert state["completion"] == "one more two"
    assert [r.prompt for r in client.requests] == ["Count: ", "Count: one more "]
    assert {r.message_type for r in client.requests} == {"completion"}
    assert [step["completion"] for step in state["trajectory"]] == ["one", "two"]


def test_completion_prompts_work_with_rewards_parsers_and_endings() -> None:
    def right(completion: Any, answer: str, parser: vf.Parser) -> bool:
        return parser.parse_answer(completion) == answer

    parser = vf.XMLParser(["answer"])
    env = vf.SingleTurnEnv(
        dataset=[{"question": "2+2?", "answer": "4"}],
        message_type="completion",
        system_prompt="Use tags.",
        parser=parser,
        rubric=vf.Rubric([right, parser.get_format_reward_func()], parser=parser),
    )
    client = vf.FakeClient("<answer>4</answer>", tokens=True)
    state = play(env, client)
    assert (state["error"], state["metrics"]["right"]) == (None, 1.0)
    assert client.requests[0].prompt == "Use tags.\n\n2+2?"
    ends = env_with(5, message_type="completion", env_response=lambda self, m, s: (" done", {"completed": True}))
    assert play(ends)["completion"] == "x done"


def test_a_message_type_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="'chat' or 'completion', got 'text'"):
        vf.SingleTurnEnv(dataset=ROWS, message_type="text")  # type: ignore[arg-type]


# --- hooks that block, and hooks inside hooks ---------------------------------------------------------------------


def test_many_environments_that_block_in_their_answers_run_side_by_side() -> None:
    made = env_with(
        2, dataset=[{"question": str(i)} for i in range(60)], env_response=lambda self, m, s: time.sleep(0.2) or "x"
    )
    began = time.perf_counter()
    results = made.evaluate(client=vf.FakeClient("x"), model="m", use_tqdm=False)
    assert results.failed == []
    assert time.perf_counter() - began < 6  # one after the other: 12 s


def test_more_than_512_rollouts_that_roll_out_inside_their_hooks_do_not_deadlock() -> None:
    class Inner(vf.MultiTurnEnv):
        def env_response(self, messages: Any, state: Any) -> Any:
            time.sleep(0.006)  # too slow for the loop: it holds a thread
            return "ok", {"completed": True}

    inner = Inner(dataset=[])

    class Outer(vf.MultiTurnEnv):
        def env_response(self, messages: Any, state: Any) -> Any:
            completion, _ = inner.rollout(state["client"], state["model"], "sub-problem", "")
            return completion[-1]["content"], {"completed": True}

    env = Outer(dataset=[{"question": str(i)} for i in range(600)])

    async def main() -> Any:
        return await asyncio.wait_for(env.evaluate(vf.FakeClient("x"), "m", use_tqdm=False), 60)

    results = asyncio.run(main())
    assert results.failed == []
    assert {said(s)[-1] for s in results.states} == {(USER, "ok")}


def test_built_in_environments_answer_in_one_style_that_plain_and_async_code_may_build_on() -> None:
    kinds = [vf.ToolEnv, vf.DoubleCheckEnv, vf.GymEnv, vf.TextArenaEnv, vf.CodeMathEnv]
    assert all(calls.is_default(kind.env_response) for kind in kinds)

    class Plain(vf.DoubleCheckEnv):
        def env_response(self, messages: Any, state: Any) -> Any:
            return super().env_response(messages, state) + " (plain)"

    class Async(vf.DoubleCheckEnv):
        async def env_response(self, messages: Any, state: Any) -> Any:
            return await super().env_response(messages, state) + " (async)"

    for kind, how in ((Plain, "plain"), (Async, "async")):
        env = kind(dataset=[{"question": "2+2?", "answer": "4"}], checks="Sure?")
        completion, _ = env.rollout(vf.FakeClient(["5", "4"]), "fake", "2+2?", "4")
        assert completion[1]["content"] == f"Sure? ({how})"


# --- mistakes of hooks --------------------------------------------------------------------------------------------


def appended(self: Any, messages: Any, state: Any) -> Any:
    messages.append(HINT)
    return messages


@pytest.mark.parametrize(
    "answer", [appended, lambda self, messages, state: messages, lambda self, messages, state: [*messages, HINT]]
)
def test_an_answer_that_is_the_whole_conversation_is_refused_and_not_said_twice(answer: Any) -> None:
    state = play(env_with(env_response=answer))
    assert "it must return only the environment's response" in str(state["error"])
    assert said(state) == [(ASSISTANT, "x")]


def test_any_text_goes_on_from_an_empty_one() -> None:
    rows = [{"prompt": "", "answer": "x"}]
    env = env_with(2, rows, env_response=lambda self, messages, state: "hint", message_type="completion")
    state = env.evaluate(vf.FakeClient(""), "m").rollouts[0]
    assert (state["error"], state["completion"]) == (None, "hint")


@pytest.mark.parametrize("answer", [3, {"content": "hint"}, ({"hints": 1}, "hint"), [HINT, 3], ("hint", {}, 1)])
def test_an_answer_that_is_no_message_fails_the_rollout_and_is_shown(answer: Any) -> None:
    state = play(env_with(env_response=lambda self, messages, state: answer))
    assert f"env_response returned {answer!r}" in str(state["error"])


def test_a_setup_that_returns_no_state_fails_the_rollout_and_is_shown() -> None:
    state = play(env_with(env_response=lambda self, messages, state: "hint", setup_state=lambda self, state: "ready"))
    assert "a hook returned 'ready'" in str(state["error"])


def test_a_prompt_that_setup_writes_as_a_text_is_a_message_of_the_user_and_costs_nothing_of_the_completion() -> None:
    def setup(self: Any, state: vf.State) -> None:
        state["prompt"] = "Guess a number from 1 to 9."

    state = play(env_with(env_response=lambda self, messages, state: "hint", setup_state=setup))
    assert state["prompt"] == [{"role": USER, "content": "Guess a number from 1 to 9."}]
    assert said(state) == [(ASSISTANT, "x"), (USER, "hint"), (ASSISTANT, "x")]


def test_a_model_that_is_shown_less_than_the_prompt_has_its_last_reply_in_the_completion() -> None:
    class Window(vf.MultiTurnEnv):
        async def env_response(self, messages: Any, state: Any) -> Any:
            return "hint"

        async def get_prompt_messages(self, state: Any) -> Any:
            messages = await super().get_prompt_messages(state)
            return messages[-1:]

    prompt = [{"role": "system", "content": "Be brief."}, {"role": USER, "content": "Guess."}]
    state = play(Window(dataset=[{"prompt": prompt, "answer": "7"}], max_turns=3), ["1", "2", "7"])
    assert said(state) == [(ASSISTANT, "7")]


@pytest.mark.parametrize("answer", [(False, "not yet"), "no", b"", "coroutine"])
@pytest.mark.parametrize("form", ["stop", "stop of messages", "is_completed"])
def test_a_condition_that_returns_what_is_always_true_fails_by_its_name(answer: object, form: str) -> None:
    def check(*_: object) -> object:
        async def later() -> bool:
            return False

        async def earlier() -> object:
            return later()

        return earlier() if answer == "coroutine" else answer

    class Base(vf.MultiTurnEnv):
        def env_response(self, messages, state):
            return "again"

    class ByState(Base):
        @vf.stop
        def solved(self, state):
            return check(state)

    class ByMessages(Base):
        @vf.stop
        def solved(self, messages, state):
            return check(messages, state)

    class Own(Base):
        def is_completed(self, messages, state):
            return check(messages, state)

    kind = {"stop": ByState, "stop of messages": ByMessages, "is_completed": Own}[form]
    env = kind(dataset=[{"question": "q", "answer": "a"}], max_turns=2)
    (state,) = env.evaluate(vf.FakeClient("hi"), "fake", use_tqdm=False).rollouts
    name = "is_completed" if form == "is_completed" else "solved"
    assert isinstance(state["error"], vf.HookError)
    assert re.search(rf"{name} returned .*(True or False)", str(state["error"])), state["error"]


@pytest.mark.parametrize("answer", [1, numpy.bool_(True), True, [0]])
def test_a_condition_may_return_what_can_be_true_or_false(answer: object) -> None:
    class Base(vf.MultiTurnEnv):
        def env_response(self, messages, state):
            return "again"

        @vf.stop
        def solved(self, state):
            return answer if state["trajectory"] else None

    env = Base(dataset=[{"question": "q", "answer": "a"}], max_turns=2)
    (state,) = env.evaluate(vf.FakeClient("hi"), "fake", use_tqdm=False).rollouts
    assert (state["error"], state["stop_condition"], len(state["trajectory"])) == (None, "solved", 1)
