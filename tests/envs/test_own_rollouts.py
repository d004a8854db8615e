"""A ``rollout`` of one's own: what is learned from are the calls that it made, or it is refused with a reason."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

import verifiers as vf
from verifiers.clients.fake import decode_tokens, encode_prompt
from verifiers.samples import NotSampledError, exact_samples

SYSTEM = {"role": "system", "content": "Own words."}
ROW = {"question": "2+2?", "answer": "4"}


def text_rewarded(completion: Any) -> float:
    return 1.0


def played(kind: type[vf.Environment], client: Any, **kwargs: Any) -> vf.State:
    env = kind(dataset=[ROW], rubric=vf.Rubric([text_rewarded]), **kwargs)
    results = env.generate(client=client, model="m", use_tqdm=False)
    assert not results.failed, results.errors()
    return results.rollouts[0]


def said(samples: Sequence[Any]) -> list[str]:
    return [decode_tokens([t for t, m in zip(s.completion_ids, s.completion_mask, strict=True) if m]) for s in samples]


class Sync(vf.SingleTurnEnv):
    def rollout(self, client: Any, model: str, prompt: Any, answer: str, **kwargs: Any) -> Any:
        reply = client.chat.completions.create(model=model, messages=[SYSTEM, *prompt])
        return [{"role": "assistant", "content": reply.choices[0].message.content}], {}


class Async(vf.SingleTurnEnv):
    async def rollout(self, input: Any, client: Any, model: str, sampling_args: Any = None) -> Any:
        messages = [SYSTEM, *input["prompt"]]
        reply = await client.chat.completions.create(model=model, messages=messages)
        messages.append(reply.choices[0].message)  # the list goes on; what was asked does not change by it
        return {"completion": messages[-1:]}


@pytest.mark.parametrize("kind", [Sync, Async])
def test_the_samples_are_those_of_the_call_that_was_made_with_its_own_system_message(kind: Any) -> None:
    client = vf.FakeClient("four", tokens=True)
    state = played(kind, client)
    (sample,) = exact_samples(state)
    asked = [SYSTEM, {"role": "user", "content": "2+2?"}]
    assert sample.prompt_ids == encode_prompt(asked) != encode_prompt(asked[1:])
    assert said([sample]) == ["four"]
    assert all(logprob < 0 for logprob in sample.completion_logprobs)
    assert len(state["trajectory"]) == 1
    assert state["trajectory"][0]["prompt"] == asked


def test_a_text_environment_learns_from_the_prompt_that_was_really_asked() -> None:
    class Prefixed(vf.SingleTurnEnv):
        async def rollout(self, input: Any, client: Any, model: str, sampling_args: Any = None) -> Any:
            reply = await client.completions.create(model=model, prompt="Q: " + input["prompt"])
            return reply.choices[0].text, {}

    state = played(Prefixed, vf.FakeClient("four", tokens=True), message_type="completion")
    (sample,) = exact_samples(state)
    assert decode_tokens(sample.prompt_ids) == "Q: 2+2?"


def test_turns_that_go_on_are_one_sample_and_a_rewritten_history_is_two() -> None:
    class Talk(vf.SingleTurnEnv):
        keeps = True

        async def rollout(self, input: Any, client: Any, model: str, sampling_args: Any = None) -> Any:
            messages, completion = [SYSTEM, *input["prompt"]], []
            for _ in range(2):
                reply = await client.chat.completions.create(model=model, messages=messages)
                turn = [reply.message, {"role": "user", "content": "go on"}]
                completion += turn
                messages = [*messages, *turn] if self.keeps else [SYSTEM, *turn]
            return completion[:-1]

    class Forgets(Talk):
        keeps = False

    assert said(exact_samples(played(Talk, vf.FakeClient(["one", "two"], tokens=True)))) == ["onetwo"]
    assert said(exact_samples(played(Forgets, vf.FakeClient(["one", "two"], tokens=True)))) == ["one", "two"]


def test_a_reply_that_was_dropped_and_a_judge_asked_by_the_same_client_are_not_learned_from() -> None:
    class Judged(vf.SingleTurnEnv):
        async def rollout(self, input: Any, client: Any, model: str, sampling_args: Any = None) -> Any:
            replies = [await client.chat.completions.create(messages=[SYSTEM, *input["prompt"]]) for _ in range(2)]
            question = [{"role": "user", "content": f"Is {replies[1].text} right?"}]
            verdict = await client.chat.completions.create(messages=question)
            return {"completion": [replies[1].message], "verdict": verdict.text}

    state = played(Judged, vf.FakeClient(["first", "yes", "yes"], tokens=True))
    (sample,) = exact_samples(state)  # the judge said the same: it is told apart by what it was asked
    assert decode_tokens(sample.prompt_ids).count("2+2?") == 1
    assert "right?" not in decode_tokens(sample.prompt_ids)
    assert said([sample]) == ["yes"]


def test_a_reply_that_two_different_questions_gave_is_refused_rather_than_guessed() -> None:
    class Twice(vf.SingleTurnEnv):
        async def rollout(self, input: Any, client: Any, model: str, sampling_args: Any = None) -> Any:
            for text in ("first?", "second?"):
                reply = await client.chat.completions.create(messages=[{"role": "user", "content": text}])
            return [reply.message]

    with pytest.raises(NotSampledError, match="several calls with different prompts returned the same reply"):
        exact_samples(played(Twice, vf.FakeClient("yes", tokens=True)))
    assert said(exact_samples(played(Twice, vf.FakeClient(["no", "yes"], tokens=True)))) == ["yes"]


def test_a_rollout_whose_completion_has_no_reply_is_refused_and_one_that_asked_nobody_has_nothing_to_learn() -> None:
    class Silent(vf.SingleTurnEnv):
        async def rollout(self, input: Any, client: Any, model: str, sampling_args: Any = None) -> Any:
            await client.chat.completions.create(messages=input["prompt"])
            return {"completion": []}

    class Idle(vf.SingleTurnEnv):
        async def rollout(self, input: Any, client: Any, model: str, sampling_args: Any = None) -> Any:
            return {"completion": []}

    with pytest.raises(NotSampledError, match="no reply of the model, although the model was called"):
        exact_samples(played(Silent, vf.FakeClient("yes", tokens=True)))
    assert exact_samples(played(Idle, vf.FakeClient("yes", tokens=True))) == []


def test_a_completion_that_is_no_messages_is_scored_and_refused_for_training() -> None:
    class Number(vf.SingleTurnEnv):
        async def rollout(self, input: Any, client: Any, model: str, sampling_args: Any = None) -> Any:
            await client.chat.completions.create(messages=input["prompt"])
            return {"completion": 4}

    state = played(Number, vf.FakeClient("yes", tokens=True))
    assert state["reward"] == 1.0
    with pytest.raises(NotSampledError, match="its completion is neither a text nor messages"):
        exact_samples(state)


def test_the_choice_that_was_taken_of_several_is_the_one_that_is_learned_from() -> None:
    def choices(request: Any) -> dict[str, Any]:
        prompt_ids = encode_prompt(request.prompt)
        made = [
            {
                "message": {"role": "assistant", "content": text},
                "finish_reason": "stop",
                "token_ids": list(text.encode()),
                "logprobs": {"content": [{"token": c, "logprob": -0.5} for c in text]},
            }
            for text in ("ab", "cd")
        ]
        return {"choices": made, "prompt_token_ids": prompt_ids}

    class BestOfTwo(vf.SingleTurnEnv):
        async def rollout(self, input: Any, client: Any, model: str, sampling_args: Any = None) -> Any:
            reply = await client.chat.completions.create(messages=input["prompt"], n=2)
            return [{"role": "assistant", "content": reply.choices[1].message.content}]

    (sample,) = exact_samples(played(BestOfTwo, vf.FakeClient(choices)))
    assert sample.completion_ids == list(b"cd")


def test_space_around_a_reply_is_no_edit_and_any_other_edit_is_refused_with_the_reason() -> None:
    class Edited(vf.SingleTurnEnv):
        async def rollout(self, input: Any, client: Any, model: str, sampling_args: Any = None) -> Any:
            reply = await client.chat.completions.create(messages=[SYSTEM, *input["prompt"]])
            return [{"role": "assistant", "content": self.edit(reply.text)}]

        def edit(self, text: str) -> str:
            return text.strip()

    class Shouted(Edited):
        def edit(self, text: str) -> str:
            return text.upper()

    assert said(exact_samples(played(Edited, vf.FakeClient(" four\n", tokens=True)))) == [" four\n"]
    state = played(Shouted, vf.FakeClient("four", tokens=True))
    assert state["reward"] == 1.0  # it is scored as ever
    with pytest.raises(
        NotSampledError, match=r"contains a reply that no call of the policy returned: .*add_model_response"
    ):
        exact_samples(state)


def test_a_client_of_ones_own_around_the_policy_is_the_policy_and_a_teacher_is_not() -> None:
    class Logged:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        async def complete(self, request: Any) -> Any:
            raise NotImplementedError

        @property
        def chat(self) -> Any:
            return (self.inner[0] if isinstance(self.inner, list) else self.inner).chat

    teacher = vf.FakeClient("four", tokens=True)

    class Taught(vf.SingleTurnEnv):
        async def rollout(self, input: Any, client: Any, model: str, sampling_args: Any = None) -> Any:
            reply = await teacher.chat.completions.create(messages=input["prompt"])
            return [reply.message]

    assert said(exact_samples(played(Sync, Logged(vf.FakeClient("four", tokens=True))))) == ["four"]
    assert said(exact_samples(played(Sync, Logged([vf.FakeClient("four", tokens=True)])))) == ["four"]
    with pytest.raises(NotSampledError, match="no call of the policy returned"):
        exact_samples(played(Taught, vf.FakeClient("five", tokens=True)))


def test_calls_that_are_not_seen_and_clients_without_tokens_are_refused_with_the_reason() -> None:
    class InAThread(vf.SingleTurnEnv):
        def rollout(self, client: Any, model: str, prompt: Any, answer: str, **kwargs: Any) -> Any:
            found: list[Any] = []
            thread = threading.Thread(
                target=lambda: found.append(client.chat.completions.create(messages=[SYSTEM, *prompt]))
            )
            thread.start()
            thread.join()
            return [found[0].message], {}

    with pytest.raises(NotSampledError, match="no model call was recorded in its rollout; calls from your own threads"):
        exact_samples(played(InAThread, vf.FakeClient("four", tokens=True)))
    for kind in (Sync, vf.SingleTurnEnv):
        with pytest.raises(NotSampledError, match="the client gave no token ids and logprobs"):
            exact_samples(played(kind, vf.FakeClient("four")))


def test_a_reply_drawn_with_arguments_of_its_own_says_so() -> None:
    class Cold(vf.SingleTurnEnv):
        async def rollout(self, input: Any, client: Any, model: str, sampling_args: Any = None) -> Any:
            reply = await client.chat.completions.create(messages=[SYSTEM, *input["prompt"]], temperature=0.2)
            return [reply.message]

    (sample,) = exact_samples(played(Cold, vf.FakeClient("four", tokens=True)))
    ((_, record),) = sample.sampling
    assert record == {"asked": {"temperature": 0.2}}


def test_an_override_that_asks_the_library_keeps_the_librarys_trajectory() -> None:
    class Around(vf.SingleTurnEnv):
        def rollout(self, client: Any, model: str, prompt: Any, answer: str, **kwargs: Any) -> Any:
            _, state = super().rollout(client, model, [SYSTEM, *prompt], answer)
            return [{"role": "assistant", "content": "edited"}], state

    state = played(Around, vf.FakeClient("four", tokens=True))
    (sample,) = exact_samples(state)
    assert sample.prompt_ids == encode_prompt([SYSTEM, {"role": "user", "content": "2+2?"}])
    assert said([sample]) == ["four"]


# --- the library's own trajectory, and calls beside it ------------------------------------------------------------

MORE = {"role": "user", "content": "Are you sure?"}


class Again(vf.SingleTurnEnv):
    """Asks once more after the library's own rollout."""

    async def rollout(self, input: Any, client: Any, model: str, sampling_args: Any = None) -> Any:
        state = await super().rollout(input, client, model, sampling_args)
        messages = [*input["prompt"], *state["completion"], MORE]
        reply = await client.chat.completions.create(messages=messages)
        state["completion"] = [*state["completion"], MORE, self.shown(reply.message)]
        return state

    def shown(self, message: Any) -> Any:
        return message


class Before(vf.SingleTurnEnv):
    """Asks for a draft before the library's own rollout, which goes on from there."""

    has_draft = True

    def rollout(self, client: Any, model: str, prompt: Any, answer: str, **kwargs: Any) -> Any:
        draft = client.chat.completions.create(messages=prompt).choices[0].message.content
        began = [{"role": "assistant", "content": self.edit(draft)}, MORE]
        completion, state = super().rollout(client, model, [*prompt, *began], answer)
        return [*began, *completion] if self.has_draft else completion, state

    def edit(self, text: str) -> str:
        return text


class Between(vf.MultiTurnEnv):
    """Lets the policy think aloud once more between its turns."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(max_turns=2, **kwargs)

    async def env_response(self, messages: Any, state: Any) -> Any:
        reply = await state["client"].chat.completions.create(messages=[*messages, MORE])
        return self.answered(reply.text)

    def answered(self, text: str) -> Any:
        return [MORE, {"role": "assistant", "content": text}, {"role": "user", "content": "And now?"}]


@pytest.mark.parametrize(("kind", "turns"), [(Again, ["four", "yes"]), (Before, ["four", "yes"])])
def test_what_is_asked_before_or_after_the_librarys_own_rollout_is_learned_from_too(kind: Any, turns: Any) -> None:
    state = played(kind, vf.FakeClient(turns, tokens=True))
    (sample,) = exact_samples(state)
    assert sample.prompt_ids == encode_prompt([{"role": "user", "content": "2+2?"}])
    assert said([sample]) == ["".join(turns)]
    assert len(state["trajectory"]) == 2
    assert state["metrics"]["num_turns"] == 2.0


@pytest.mark.parametrize("kind", [Again, Before])
def test_the_same_reply_twice_is_two_replies(kind: Any) -> None:
    assert said(exact_samples(played(kind, vf.FakeClient("four", tokens=True)))) == ["fourfour"]


def test_what_an_environment_lets_the_policy_say_between_turns_is_learned_from_in_order() -> None:
    state = played(Between, vf.FakeClient(["one", "aloud", "two"], tokens=True))
    assert said(exact_samples(state)) == ["onealoudtwo"]
    assert [step["completion"][0]["content"] for step in state["trajectory"]] == ["one", "aloud", "two"]


def test_a_user_that_the_policy_plays_is_not_learned_from() -> None:
    class Simulated(Between):
        def answered(self, text: str) -> Any:
            return {"role": "user", "content": text}

    state = played(Simulated, vf.FakeClient(["one", "ask", "two"], tokens=True))
    assert said(exact_samples(state)) == ["onetwo"]


def test_a_further_reply_that_was_edited_is_refused_and_not_learned_from_by_half(tmp_path: Any) -> None:
    class Shouted(Again):
        def shown(self, message: Any) -> Any:
            return {**message, "content": message["content"].upper()}

    class Drafted(Before):
        def edit(self, text: str) -> str:
            return text.upper()

    class Aloud(Between):
        def answered(self, text: str) -> Any:
            return super().answered(text.upper())

    for kind in (Shouted, Drafted, Aloud):
        state = played(kind, vf.FakeClient(["one", "two", "three"], tokens=True))
        assert state["reward"] == 1.0
        with pytest.raises(NotSampledError, match="contains a reply that no call of the policy returned"):
            exact_samples(state)
        assert all(step["tokens"] is None for step in state["trajectory"])


def test_a_draft_that_is_not_in_the_completion_is_not_learned_from() -> None:
    class Forgotten(Before):
        has_draft = False

    state = played(Forgotten, vf.FakeClient(["four", "yes"], tokens=True))
    assert said(exact_samples(state)) == ["yes"]


def test_an_assistants_words_that_the_environment_put_there_itself_are_no_ones_reply() -> None:
    class Scripted(vf.MultiTurnEnv):
        def env_response(self, messages: Any, state: Any) -> Any:
            return [{"role": "assistant", "content": "I shall go on."}, MORE]

        async def rollout(self, input: Any, client: Any, model: str, sampling_args: Any = None) -> Any:
            return await super().rollout(input, client, model, sampling_args)

    state = played(Scripted, vf.FakeClient(["one", "two"], tokens=True), max_turns=2)
    assert said(exact_samples(state)) == ["onetwo"]


def test_a_reply_repeated_for_want_of_form_does_not_spoil_a_completion_that_is_shown_without_its_thoughts() -> None:
    class Short(vf.SingleTurnEnv):
        async def rollout(self, input: Any, client: Any, model: str, sampling_args: Any = None) -> Any:
            state = await super().rollout(input, client, model, sampling_args)
            state["completion"] = [{"role": "assistant", "content": "4"}]
            return state

    client = vf.FakeClient(["no form", "<answer>4</answer>"], tokens=True)
    state = played(Short, client, parser=vf.XMLParser(["answer"]), max_retries=1)
    assert said(exact_samples(state)) == ["<answer>4</answer>"]


def test_a_teachers_rollout_is_not_learned_from_as_if_the_policy_had_said_it() -> None:
    teacher = vf.FakeClient("four", tokens=True)

    class Taught(vf.SingleTurnEnv):
        async def rollout(self, input: Any, client: Any, model: str, sampling_args: Any = None) -> Any:
            return await super().rollout(input, teacher, "teacher", sampling_args)

    with pytest.raises(NotSampledError, match="a reply of a client other than the policy's"):
        exact_samples(played(Taught, vf.FakeClient("five", tokens=True)))


@pytest.mark.parametrize("is_edited", [False, True])
def test_a_text_that_goes_on_after_the_librarys_own_rollout_is_learned_from_or_refused(is_edited: bool) -> None:
    class Longer(vf.SingleTurnEnv):
        async def rollout(self, input: Any, client: Any, model: str, sampling_args: Any = None) -> Any:
            state = await super().rollout(input, client, model, sampling_args)
            reply = await client.completions.create(prompt=input["prompt"] + state["completion"] + " so ")
            text = reply.choices[0].text
            state["completion"] += " so " + (text.upper() if is_edited else text)
            return state

    state = played(Longer, vf.FakeClient(["four", "yes"], tokens=True), message_type="completion")
    if is_edited:
        with pytest.raises(NotSampledError, match="no call of the policy returned"):
            exact_samples(state)
    else:
        assert "".join(said(exact_samples(state))) == "fouryes"


def test_a_refused_rollout_out_of_a_cache_stays_refused() -> None:
    class Cached(Again):
        cache: dict[str, Any] = {}

        async def rollout(self, input: Any, client: Any, model: str, sampling_args: Any = None) -> Any:
            if "one" not in self.cache:
                self.cache["one"] = await super().rollout(input, client, model, sampling_args)
            return self.cache["one"]

        def shown(self, message: Any) -> Any:
            return {**message, "content": message["content"].upper()}

    env = Cached(dataset=[ROW], rubric=vf.Rubric([text_rewarded]))
    client = vf.FakeClient(["four", "yes"], tokens=True)
    results = env.generate(client=client, model="m", rollouts_per_example=2, max_concurrent=1, use_tqdm=False)
    for state in results.rollouts:
        with pytest.raises(NotSampledError):
            exact_samples(state)


def test_tool_calls_of_an_own_rollout_are_found_by_what_they_call() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}

    class Calls(vf.SingleTurnEnv):
        async def rollout(self, input: Any, client: Any, model: str, sampling_args: Any = None) -> Any:
            reply = await client.chat.completions.create(messages=[SYSTEM, *input["prompt"]])
            made = {**call, "id": "other", "function": {"name": "add", "arguments": '{"a":1}'}}
            return [{**reply.message, "tool_calls": [made]}]

    state = played(Calls, vf.FakeClient({"content": None, "tool_calls": [call]}, tokens=True))
    assert len(exact_samples(state)) == 1


def test_classic_batches_tokenize_what_nobody_sampled_and_say_why() -> None:
    class Shouted(vf.SingleTurnEnv):
        async def rollout(self, input: Any, client: Any, model: str, sampling_args: Any = None) -> Any:
            reply = await client.chat.completions.create(messages=input["prompt"])
            return [{"role": "assistant", "content": reply.text.upper()}]

    env = Shouted(dataset=[ROW], rubric=vf.Rubric([text_rewarded]))
    results = env.generate(client=vf.FakeClient("four", tokens=True), model="m", use_tqdm=False)
    with pytest.raises(ValueError, match=r"no call of the policy returned.*pass processing_class=tokenizer"):
        env.process_env_results(results["prompts"], results["completions"], results["states"], results["rewards"])


def test_a_rollout_of_ones_own_that_is_cancelled_is_cleaned_up() -> None:
    ended = []

    class Waiting(vf.SingleTurnEnv):
        async def rollout(self, input: Any, client: Any, model: str, sampling_args: Any = None) -> Any:
            await asyncio.sleep(60)

        @vf.cleanup
        async def give_back(self, state: vf.State) -> None:
            ended.append(state["example_id"])

    env = Waiting(dataset=[ROW, ROW], rubric=vf.Rubric([text_rewarded]))
    results = env.evaluate(client=vf.FakeClient("4"), model="m", deadline_s=0.3, use_tqdm=False)
    assert len(results.failed) == 2
    assert sorted(ended) == [0, 1]


HI = {"role": "assistant", "content": "hi"}


@pytest.mark.parametrize("returned", [[HI], HI, ([HI], None), (HI, {"n": 1}), {"completion": [HI]}])
def test_a_completion_is_read_alone_as_one_message_or_beside_no_state(returned: Any) -> None:
    class Own(vf.SingleTurnEnv):
        async def rollout(self, input: Any, client: Any, model: str, sampling_args: Any = None) -> Any:
            return returned

    assert played(Own, vf.FakeClient("four"))["completion"] == [HI]


@pytest.mark.parametrize("returned", [None, (None, None)])
def test_a_rollout_that_returns_nothing_is_a_failure_and_no_empty_answer(returned: Any) -> None:
    class Own(vf.SingleTurnEnv):
        async def rollout(self, input: Any, client: Any, model: str, sampling_args: Any = None) -> Any:
            return returned

    env = Own(dataset=[ROW], rubric=vf.Rubric([text_rewarded]))
    (failed,) = env.generate(client=vf.FakeClient("four"), model="m", use_tqdm=False).failed
    assert "rollout returned None" in str(failed["error"])
