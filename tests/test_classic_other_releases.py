"""Environments written for releases before and after 0.1.9, where the call tells which one they were written for."""

from __future__ import annotations

import asyncio
import logging
import pickle
from typing import Any

import pytest

import verifiers as vf
from tests.support.classic import quiet
from tests.support.tool_calls import call, calling, tool_texts

ROWS = [{"question": "2 + 2?", "answer": "4"}]


def play(env: vf.Environment, *replies: Any) -> vf.State:
    (state,) = env.evaluate(vf.FakeClient(list(replies)), **quiet()).rollouts
    return state


# --- before 0.1.9 -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_name", [True, False])
def test_a_rollout_of_0_1_8_asks_the_model_by_client_model_and_prompt(by_name: bool) -> None:
    class Twice(vf.MultiTurnEnv):
        async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: Any) -> Any:
            return [{"role": "user", "content": "Again."}], state

        async def rollout(self, client, model, prompt, answer="", task="default", info=None, sampling_args=None, **_):
            messages, state = list(prompt), {"responses": []}
            for _turn in range(2):
                if by_name:
                    response = await self.get_model_response(
                        client=client,
                        model=model,
                        prompt=messages,
                        oai_tools=None,
                        sampling_args=sampling_args,
                        message_type=self.message_type,
                        initial_prompt=not state["responses"],
                    )
                else:
                    response = await self.get_model_response(client, model, messages, None, sampling_args, "chat")
                state["responses"].append(response)
                messages.append({"role": "assistant", "content": response.choices[0].message.content})
            return messages[len(prompt) :], state

    state = play(Twice(dataset=ROWS), "3", "4")
    assert state["error"] is None
    assert [message["content"] for message in state["completion"]] == ["3", "4"]


def test_a_hook_asks_the_model_in_the_form_of_0_1_8_with_some_arguments_by_name() -> None:
    class Critic(vf.ToolEnv):
        async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: Any) -> vf.Messages:
            asked = [*messages, {"role": "user", "content": "Is it right?"}]
            said = await self.get_model_response(state["client"], state["model"], asked, sampling_args={"seed": 7})
            return [{"role": "user", "content": said.choices[0].message.content}]

        async def no_tools_called(self, state: vf.State) -> bool:
            return False

    client = vf.FakeClient(["3", "No.", "4"])
    (state,) = Critic(dataset=ROWS, max_turns=2).evaluate(client, **quiet()).rollouts
    assert state["error"] is None
    assert [message["content"] for message in state["completion"]] == ["3", "No.", "4"]
    assert client.requests[1].sampling["seed"] == 7


def test_a_get_model_response_of_ones_own_may_be_written_as_in_0_1_8() -> None:
    class Counting(vf.SingleTurnEnv):
        asked = 0

        async def get_model_response(
            self, client, model, prompt, oai_tools=None, sampling_args=None, message_type=None, **kwargs
        ):
            self.asked += 1
            return await super().get_model_response(
                client, model, prompt, oai_tools, sampling_args, message_type, **kwargs
            )

    env = Counting(dataset=ROWS)
    state = play(env, "4")
    assert (state["error"], state["completion"][0]["content"], env.asked) == (None, "4", 1)


def test_a_call_of_the_model_that_says_things_twice_or_nothing_is_refused() -> None:
    env = vf.SingleTurnEnv(dataset=ROWS)
    with pytest.raises(TypeError, match="model by position and by name"):
        env.get_model_response(vf.FakeClient("4"), "m", model="n", prompt="?")
    with pytest.raises(TypeError, match="needs a prompt"):
        env.get_model_response(vf.FakeClient("4"), "m")


@pytest.mark.parametrize(
    "make", [vf.Rubric, vf.JudgeRubric, vf.ToolRubric, lambda **how: vf.RubricGroup([vf.Rubric()], **how)]
)
def test_whether_to_score_in_parallel_was_asked_by_0_1_5_and_has_no_effect(make: Any) -> None:
    with pytest.warns(UserWarning, match="parallelize_scoring has no effect"):
        rubric = make(parallelize_scoring=False)
    assert isinstance(rubric, vf.Rubric)


def test_a_reward_hands_all_that_it_was_given_on_to_the_comparison_of_answers() -> None:
    math = vf.MathRubric()

    async def scored(parser: vf.Parser, completion: vf.Messages, answer: str, **kwargs: Any) -> float:
        return await math.correct_answer(parser=math.parser, completion=completion, answer=answer, **kwargs)

    env = vf.SingleTurnEnv(dataset=ROWS, rubric=vf.Rubric([scored]))
    assert play(env, "\\boxed{4}")["reward"] == 1.0


def test_the_numbers_of_an_evaluation_may_be_given_by_position() -> None:
    env, client = vf.SingleTurnEnv(dataset=ROWS * 3), vf.FakeClient("4")
    assert len(env.evaluate(client, "m", {"seed": 7}, 2, 3, use_tqdm=False)["reward"]) == 6
    assert len(env.evaluate_sync(client, "m", None, 1, 2, use_tqdm=False)["reward"]) == 2
    assert len(env.generate(ROWS, client, "m", {"seed": 8}, use_tqdm=False)["reward"]) == 1
    assert [client.requests[0].sampling["seed"], client.requests[-1].sampling["seed"]] == [7, 8]


def test_rollouts_are_generated_unscored_by_the_keyword_of_0_1_5() -> None:
    scored = []

    def seen(completion: vf.Messages) -> float:
        scored.append(completion)
        return 1.0

    env = vf.SingleTurnEnv(dataset=ROWS, rubric=vf.Rubric([seen]))
    how: dict[str, Any] = {"interleave_scoring": True, "use_tqdm": False}
    asyncio.run(env.a_generate(ROWS, vf.FakeClient("4"), "m", score_rollouts=False, **how))
    assert scored == []
    results = env.evaluate(vf.FakeClient("4"), "m", score_rollouts=True, **how)
    assert results["reward"] == [1.0]
    with pytest.raises(TypeError, match="two names for the same argument"):
        env.evaluate(vf.FakeClient("4"), "m", score_rollouts=True, score=True)


def test_the_configuration_takes_the_keys_of_0_1_5_and_0_1_9_and_says_which_have_no_effect() -> None:
    with pytest.warns(UserWarning, match="micro_batch_size has no effect"):
        config = vf.RLConfig(run_name="again", rollouts_per_example=4, micro_batch_size=2, max_prompt_len=64)
    assert (config.group_size, config.max_prompt_length) == (4, 64)
    for name, value in {"mask_env_responses": True, "async_generation_timeout": 60.0, "vllm_server_port": 8000}.items():
        with pytest.warns(UserWarning, match=f"{name} has no effect"):
            setattr(config, name, value)


def test_the_defaults_of_the_trainer_take_what_should_be_different() -> None:
    config = vf.grpo_defaults(run_name="again", num_generations=4, lr_scheduler_type="constant_with_warmup")
    config.check()
    assert (config.run_name, config.group_size, config.lr_scheduler_type) == ("again", 4, "constant")


# --- after 0.1.9 --------------------------------------------------------------------------------------------------


def test_keys_that_an_environment_needs_are_asked_for_when_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SET_KEY", "x")
    monkeypatch.setenv("EMPTY_KEY", "")
    vf.ensure_keys(["SET_KEY"])
    with pytest.raises(vf.MissingKeyError, match="EMPTY_KEY, UNSET_KEY") as raised:
        vf.ensure_keys(["SET_KEY", "EMPTY_KEY", "UNSET_KEY"])
    assert pickle.loads(pickle.dumps(raised.value)).keys == ["EMPTY_KEY", "UNSET_KEY"]


def test_the_log_is_quiet_for_a_while(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("verifiers.envs")
    with vf.log_level("info"):
        logger.info("seen")
        with vf.quiet_verifiers():
            logger.info("unseen")
    assert caplog.messages == ["seen"]


# --- sandboxes ----------------------------------------------------------------------------------------------------


def test_a_python_tool_of_ones_own_hands_on_the_arguments_of_0_1_9() -> None:
    class Marked(vf.PythonEnv):
        async def python(self, code: str, sandbox_id: str, sandbox_state: dict, python_state: dict) -> str:
            """Run a cell."""
            return f"> {await super().python(code, sandbox_id, sandbox_state, python_state)}"

        def update_tool_args(self, tool_name, tool_args, messages, state, **kwargs):
            args = super().update_tool_args(tool_name, tool_args, messages, state, **kwargs)
            return {**args, "python_state": state["python_state"]}

    env = Marked(dataset=ROWS, packages=[])
    try:
        state = play(env, calling(call("python", {"code": "6 * 7"})), "42")
    finally:
        env.close()
    assert state["error"] is None
    assert tool_texts(state) == ["> 42"]
    assert list(state["oai_tools"][0]["function"]["parameters"]["properties"]) == ["code"]


def test_a_shell_command_in_the_sandbox_of_a_python_environment_is_refused_and_not_run_as_python() -> None:
    class Listing(vf.PythonEnv):
        async def post_rollout(self, state: vf.State) -> None:
            state["listed"] = await self.sandbox_client.execute_command(state["sandbox_id"], "ls -l")

    env = Listing(dataset=ROWS, packages=[])
    try:
        state = play(env, calling(call("python", {"code": "6 * 7"})), "42")
    finally:
        env.close()
    assert "cannot start programs such as 'ls -l'" in str(state["error"])


def test_an_image_that_an_environment_chooses_for_each_row_is_said_to_have_no_effect() -> None:
    class Images(vf.SandboxEnv):
        def get_sandbox_request(self, state: vf.State) -> Any:
            return state["info"]["image"]

    with pytest.warns(UserWarning, match="docker_image, get_sandbox_request: no effect"):
        Images(dataset=ROWS, docker_image="python:3.11").close()


def test_an_environment_may_answer_with_no_news_of_its_state() -> None:
    class Shrug(vf.MultiTurnEnv):
        def env_response(self, messages: vf.Messages, state: vf.State) -> Any:
            return "Go on.", None

    state = play(Shrug(dataset=ROWS, max_turns=2), "3", "4")
    assert [message["content"] for message in state["completion"]] == ["3", "Go on.", "4"]
