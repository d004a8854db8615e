"""The shapes of code that the documents promise, in our own words, run against the fake model."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import verifiers as vf
from verifiers.envs import MultiTurnEnv, SingleTurnEnv
from verifiers.parsers import XMLParser
from verifiers.rubrics import Rubric, RubricGroup

SUMS = [{"prompt": f"{i}+{i}", "answer": str(2 * i), "task": "arithmetic"} for i in range(6)]


def solve(messages: Any) -> str:
    """Adds the two numbers in the last message; wrong on 3+3."""
    asked = messages if isinstance(messages, str) else messages[-1]["content"]
    left, _, right = str(asked).strip().partition("+")
    try:
        total = int(left) + int(right)
    except ValueError:
        return "<reasoning>\nno idea\n</reasoning>\n<answer>\nnone\n</answer>"
    return f"<reasoning>\nadding\n</reasoning>\n<answer>\n{total + (total == 6)}\n</answer>"


def quiet(**kwargs: Any) -> dict[str, Any]:
    return {"use_tqdm": False, **kwargs}


class MathEnv(SingleTurnEnv):
    def __init__(self, dataset: Any, **kwargs: Any) -> None:
        parser = XMLParser(["reasoning", "answer"])

        def check_answer(completion: Any, answer: str, **kwargs: Any) -> bool:
            parsed = parser.parse(completion)
            try:
                return float(parsed.answer) == float(answer)
            except (TypeError, ValueError):
                return bool((parsed.answer or "").strip() == answer.strip())

        rubric = Rubric(funcs=[check_answer, parser.get_format_reward_func()], weights=[0.9, 0.1], parser=parser)
        super().__init__(dataset=dataset, system_prompt="Use tags.", parser=parser, rubric=rubric, **kwargs)


# --- environments made of environments ----------------------------------------------------------------------------


class Hierarchical(MultiTurnEnv):
    """Splits a problem by asking the model itself, and hands the parts to other environments."""

    def __init__(self, dataset: Any, **kwargs: Any) -> None:
        super().__init__(dataset=dataset, **kwargs)
        self.math_env = MathEnv(dataset=[])
        self.word_env = SingleTurnEnv(dataset=[])

    def initial_state(self, row: Any) -> dict[str, Any]:
        return {"phase": "decomposition", "problem": row["prompt"][-1]["content"], "solutions": []}

    def decompose(self, problem: str) -> list[dict[str, str]]:
        response = self.client.chat.completions.create(
            model="splitter", messages=[{"role": "user", "content": f"split: {problem}"}]
        )
        return [{"problem": part, "type": "math"} for part in response.choices[0].message.content.split(";")]

    def env_response(self, messages: Any, state: Any) -> Any:
        if state["phase"] == "decomposition":
            state["sub_problems"], state["phase"], state["current"] = self.decompose(state["problem"]), "solving", 0
            return f"Sub-problems: {state['sub_problems']}", state
        if state["current"] < len(state["sub_problems"]):
            sub = state["sub_problems"][state["current"]]
            env = {"math": self.math_env}.get(sub["type"], self.word_env)
            solution, _ = env.rollout(client=self.client, model=self.model, prompt=sub["problem"], answer="")
            state["solutions"].append(env.parser.parse_answer(solution))
            state["current"] += 1
            return f"Solution {state['current']}: {solution}", state
        return "Problem solved!", {"completed": True}


@pytest.mark.parametrize("in_loop", [False, True])
def test_a_hierarchical_environment_rolls_out_others_inside_its_hook(in_loop: bool) -> None:
    def reply(messages: Any) -> str:
        asked = messages[-1]["content"]
        return "1+1;2+2" if asked.startswith("split: ") else solve(messages)

    env = Hierarchical([{"question": "1+1 and 2+2"}] * 3, client=vf.FakeClient(reply), model="m")
    if in_loop:

        async def main() -> Any:
            return await env.evaluate(**quiet())

        results = asyncio.run(main())
    else:
        results = env.evaluate(**quiet())
    assert results.causes == {}
    assert [s["solutions"] for s in results.states] == [["2", "4"]] * 3
    assert results["completions"][0][-1] == {"role": "user", "content": "Problem solved!"}


class Adversarial(MathEnv):
    """Collects what the model got wrong."""

    def __init__(self, dataset: Any, difficulty_model: Any, **kwargs: Any) -> None:
        super().__init__(dataset=dataset, **kwargs)
        self.difficulty_model = difficulty_model
        self.error_patterns: dict[str, list[Any]] = defaultdict(list)

    def rollout(self, client: Any, model: Any, prompt: Any, answer: Any, **kwargs: Any) -> Any:
        completion, state = super().rollout(client, model, prompt, answer, **kwargs)
        scores = self.rubric.score_rollout_sync(prompt, completion, answer, state)
        if scores["reward"] < 0.5:
            parsed = self.parser.parse(completion)
            self.error_patterns["sum"].append({"wrong_answer": parsed.answer, "correct_answer": answer})
            state["error_type"] = "sum"
        return completion, state


def test_an_adversarial_environment_scores_inside_its_rollout() -> None:
    env = Adversarial(SUMS, difficulty_model=None, client=vf.FakeClient(solve), model="m")
    results = env.evaluate(**quiet())
    assert results["rewards"] == pytest.approx([1.0, 1.0, 1.0, 0.1, 1.0, 1.0])
    assert env.error_patterns == {"sum": [{"wrong_answer": "7", "correct_answer": "6"}]}
    assert [s.get("error_type") for s in results.states] == [None, None, None, "sum", None, None]
    completion, state = env.rollout(vf.FakeClient(solve), "m", "3+3", "6", temperature=0.5)
    assert state["error_type"] == "sum"
    assert completion[0]["role"] == "assistant"


class MetaLearning(SingleTurnEnv):
    """Finds out by itself what a good reply looks like."""

    def __init__(self, dataset: Any, meta_model: Any, **kwargs: Any) -> None:
        super().__init__(dataset=dataset, **kwargs)
        self.meta_model = meta_model

    def learn_evaluation_criteria(self, n_samples: int = 100) -> None:
        best = []
        for sample in self.dataset[:n_samples]:  # type: ignore[index]
            replies = []
            for temperature in [0.3, 0.7, 1.0]:
                completion, _ = self.generate_completion(sample["prompt"], temperature=temperature)
                replies.append((completion, float(sample["answer"] in completion[-1]["content"])))
            replies.sort(key=lambda pair: pair[1], reverse=True)
            best.append(replies[0][0])
        for criterion in self.meta_model(json.dumps(best)):
            self.rubric.add_reward_func(self.criterion_reward(criterion), weight=0.5)

    def criterion_reward(self, criterion: str) -> Any:
        def reward(completion: Any, **kwargs: Any) -> float:
            return float(criterion in completion[-1]["content"])

        reward.__name__ = f"learned_{criterion[:20]}"
        return reward


def test_a_meta_learning_environment_iterates_its_rows_and_adds_rewards() -> None:
    client = vf.FakeClient(solve)
    env = MetaLearning(SUMS, meta_model=lambda text: ["adding", "<answer>"], client=client, model="m")
    env.learn_evaluation_criteria(n_samples=2)
    assert [r.sampling["temperature"] for r in client.requests] == [0.3, 0.7, 1.0] * 2
    results = env.evaluate(num_examples=2, **quiet())
    assert results["rewards"] == [1.0, 1.0]
    assert set(results.metrics) >= {"learned_adding", "learned_<answer>"}


class VerifiedMath(SingleTurnEnv):
    """One environment solves, another checks; made before the class it belongs to is."""

    def __init__(self, dataset: Any, **kwargs: Any) -> None:
        self.solver_env = MathEnv(dataset)
        self.verifier_env = SingleTurnEnv(dataset=dataset, system_prompt="Verify.")
        super().__init__(dataset=dataset, **kwargs)

    def rollout(self, client: Any, model: Any, prompt: Any, answer: Any, **kwargs: Any) -> Any:
        solution, _ = self.solver_env.rollout(client, model, prompt, answer)
        verification, state = self.verifier_env.rollout(client, model, solution, answer)
        return solution + verification, {**state, "verified": verification[0]["content"]}


def test_environments_compose_and_every_rollout_stays_its_own_rows() -> None:
    def reply(messages: Any) -> str:
        return "looks right" if messages[0]["content"] == "Verify." else solve(messages)

    env = VerifiedMath(SUMS, rubric=Rubric([lambda completion: float(len(completion))]))
    results = env.evaluate(client=vf.FakeClient(reply), model="m", **quiet())
    assert results.causes == {}
    assert results["rewards"] == [2.0] * 6
    assert results["example_id"] == list(range(6))
    assert {s["verified"] for s in results.states} == {"looks right"}


class Cached(SingleTurnEnv):
    def __init__(self, *args: Any, cache_size: int = 10000, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.cache_size = cache_size
        self.rollout_cache: dict[str, Any] = {}

    @lru_cache(maxsize=1000)  # noqa: B019
    def parse_cached(self, completion: str) -> Any:
        return self.parser.parse(completion)

    def rollout(
        self, client: Any, model: Any, prompt: Any, answer: Any, temperature: float = 0.7, **kwargs: Any
    ) -> Any:
        key = hashlib.md5(f"{prompt}|{model}|{temperature}".encode()).hexdigest()
        if key in self.rollout_cache:
            return self.rollout_cache[key]
        result = super().rollout(client, model, prompt, answer, temperature=temperature, **kwargs)
        if len(self.rollout_cache) < self.cache_size:
            self.rollout_cache[key] = result
        return result


def test_a_caching_environment_asks_once_and_scores_each_rollout() -> None:
    client = vf.FakeClient(solve)
    env = Cached(SUMS, rubric=Rubric([lambda completion, answer: answer in completion[-1]["content"]]))
    first = env.evaluate(client=client, model="m", temperature=0.2, **quiet())
    second = env.evaluate(client=client, model="m", rollouts_per_example=2, temperature=0.2, **quiet())
    assert len(client.requests) == 6
    assert {r.sampling["temperature"] for r in client.requests} == {0.2}
    assert first["rewards"] == [1.0, 1.0, 1.0, 0.0, 1.0, 1.0]
    assert second["rewards"] == [r for r in first["rewards"] for _ in range(2)]
    assert env.parse_cached("x") is env.parse_cached("x")


# --- turns --------------------------------------------------------------------------------------------------------


class Tutor(MultiTurnEnv):
    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset=dataset, system_prompt="You are a Socratic tutor.", max_turns=10)

    def env_response(self, messages: Any, state: Any) -> Any:
        if state["answer"] in messages[-1]["content"]:
            return "Correct! Well done.", {"completed": True}
        attempt = state.get("attempts", 0) + 1
        return f"Hint {attempt}", {"attempts": attempt}

    def is_completed(self, messages: Any, state: Any) -> bool:
        return bool(state.get("completed", False) or state.get("attempts", 0) >= 5)


def test_a_tutor_ends_on_the_right_answer_or_after_five_hints() -> None:
    env = Tutor([{"question": "capital?", "answer": "Paris"}])
    completion, state = env.rollout(vf.FakeClient(["Rome", "Bern", "Paris"]), "m", "capital?", "Paris")
    assert [m["content"] for m in completion] == ["Rome", "Hint 1", "Bern", "Hint 2", "Paris", "Correct! Well done."]
    assert (state["attempts"], state["completed"], state["error"]) == (2, True, None)
    completion, state = env.rollout(vf.FakeClient("Rome"), "m", "capital?", "Paris")
    assert [m["content"] for m in completion][-1] == "Hint 5"
    assert len(state["trajectory"]) == 5


class Stateful(MultiTurnEnv):
    def initial_state(self, task_data: Any) -> dict[str, Any]:
        return {"target": task_data["answer"], "attempts": 0, "hints_given": [], "score": 1.0}

    def env_response(self, messages: Any, state: Any) -> Any:
        state["attempts"] += 1
        state["score"] *= 0.9
        state["hints_given"].append(f"not {messages[-1]['content']}")
        return state["hints_given"][-1], state

    def score_rollout(self, state: Any) -> float:  # type: ignore[override]
        return float(state["score"])


def test_a_stateful_environment_scores_from_its_state() -> None:
    env = Stateful(dataset=[{"question": "?", "answer": "7"}] * 2, max_turns=3)
    results = env.evaluate(client=vf.FakeClient("5"), model="m", rollouts_per_example=2, **quiet())
    assert results["rewards"] == pytest.approx([0.81] * 4)
    assert [s["hints_given"] for s in results.states] == [["not 5", "not 5"]] * 4


# --- rubrics ------------------------------------------------------------------------------------------------------


class Compositional(Rubric):
    def __init__(self, base_rubrics: Any, composition_logic: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.base_rubrics = base_rubrics
        self.composition_logic = composition_logic

    def score_rollout_sync(self, prompt: Any, completion: Any, answer: Any, state: Any, **kwargs: Any) -> Any:
        base = {
            name: rubric.score_rollout_sync(prompt, completion, answer, state, **kwargs)
            for name, rubric in self.base_rubrics.items()
        }
        return self.composition_logic(base, state)


def compose(base: Any, state: Any) -> dict[str, float]:
    if base["format"]["xml_format"] < 0.5:
        return {"reward": 0.0}
    share = 0.6 if state.get("difficulty", "medium") == "hard" else 0.9
    scores = {"reward": base["math"]["reward"] * share + base["reasoning"]["reward"] * (1 - share)}
    for name, found in base.items():
        scores.update({f"{name}_{key}": value for key, value in found.items()})
    return scores


def compositional() -> Compositional:
    def correct_answer(completion: Any, answer: str) -> bool:
        return f"\n{answer}\n" in completion[-1]["content"]

    def step_count(completion: Any) -> float:
        return 0.5

    async def clarity(completion: Any) -> float:
        return 1.0

    def xml_format(completion: Any) -> bool:
        return "<answer>" in completion[-1]["content"]

    return Compositional(
        base_rubrics={
            "math": Rubric(funcs=[correct_answer], weights=[1.0]),
            "reasoning": Rubric(funcs=[step_count, clarity], weights=[0.5, 0.5]),
            "format": Rubric(funcs=[xml_format], weights=[1.0]),
        },
        composition_logic=compose,
    )


@pytest.mark.parametrize("in_loop", [False, True])
def test_a_compositional_rubric_scores_by_hand_and_through_evaluate(in_loop: bool) -> None:
    rubric = compositional()
    said = [{"role": "assistant", "content": "<answer>\n4\n</answer>"}]
    by_hand = rubric.score_rollout_sync("2+2", said, "4", {"difficulty": "hard"})
    assert by_hand["reward"] == pytest.approx(0.6 + 0.4 * 0.75)
    assert by_hand["reasoning_clarity"] == 1.0
    rows = [{**row, "difficulty": "hard" if i % 2 else "easy"} for i, row in enumerate(SUMS)]
    env = SingleTurnEnv(dataset=rows, rubric=rubric, client=vf.FakeClient(solve), model="m")

    async def main() -> Any:
        return await env.evaluate(**quiet())

    results = asyncio.run(main()) if in_loop else env.evaluate(**quiet())
    assert results.causes == {}
    easy, hard = 0.9 + 0.1 * 0.75, 0.6 + 0.4 * 0.75
    assert results["rewards"] == pytest.approx([easy, hard, easy, 0.3, easy, hard])
    assert results["math_correct_answer"] == [1.0, 1.0, 1.0, 0.0, 1.0, 1.0]


class Vectorized(Rubric):
    def score_rollouts_vectorized(self, prompts: Any, completions: Any, answers: Any, states: Any) -> dict[str, Any]:
        matrix = np.zeros((len(prompts), len(self.reward_funcs)))
        with ThreadPoolExecutor(max_workers=8) as executor:
            for column, func in enumerate(self.reward_funcs):
                if hasattr(func, "vectorized"):
                    matrix[:, column] = func.vectorized(prompts, completions, answers, states)
                    continue
                futures = [
                    executor.submit(self._call_reward_func, func, prompt=p, completion=c, answer=a, state=s)
                    for p, c, a, s in zip(prompts, completions, answers, states, strict=True)
                ]
                matrix[:, column] = [future.result() for future in futures]
        results: dict[str, Any] = {f.__name__: matrix[:, i].tolist() for i, f in enumerate(self.reward_funcs)}
        return {**results, "reward": (matrix @ np.array(self.reward_weights)).tolist()}


def test_a_vectorized_rubric_gives_what_scoring_one_by_one_gives() -> None:
    def exact(completion: str, answer: str) -> bool:
        return completion == answer

    async def short(completion: str) -> float:
        return 1.0 / len(completion)

    def length(completion: str) -> float:
        return float(len(completion))

    length.vectorized = lambda prompts, completions, answers, states: [float(len(c)) for c in completions]  # type: ignore[attr-defined]
    rubric = Vectorized(funcs=[exact, short, length], weights=[1.0, 0.5, 0.1])
    columns = (["p"] * 3, ["a", "bb", "ccc"], ["a", "b", "ccc"], [{}, {}, {}])
    vectorized = rubric.score_rollouts_vectorized(*columns)
    assert vectorized["exact"] == [1.0, 0.0, 1.0]
    batch = rubric.score_rollouts(prompts=columns[0], completions=columns[1], answers=columns[2], states=columns[3])
    assert batch["reward"] == pytest.approx(vectorized["reward"])
    one = [rubric.score_rollout_sync(*row)["reward"] for row in zip(*columns, strict=True)]
    assert one == pytest.approx(vectorized["reward"])


def test_group_weights_are_set_for_a_while_and_restored() -> None:
    group = RubricGroup([Rubric([lambda completion: 1.0]), Rubric([lambda completion: 0.5])])
    env = SingleTurnEnv(dataset=SUMS[:1], rubric=group, client=vf.FakeClient("x"), model="m")
    before = env.rubric.get_group_weights()  # type: ignore[attr-defined]
    env.rubric.set_group_weights([0.0, 2.0])  # type: ignore[attr-defined]
    assert env.evaluate(**quiet())["rewards"] == [1.0]
    env.rubric.set_group_weights(before)  # type: ignore[attr-defined]
    assert env.evaluate(**quiet())["rewards"] == [1.5]


# --- loops of one's own -------------------------------------------------------------------------------------------


def test_a_training_loop_samples_prompts_rolls_out_groups_and_scores_them() -> None:
    env, client = MathEnv(SUMS), vf.FakeClient(solve)
    rewards = []
    for prompt in env.sample_prompts(4):
        replies = [
            env.rollout(client=client, model="m", prompt=prompt["prompt"], answer=prompt["answer"], temperature=0.7)[0]
            for _ in range(2)
        ]
        rewards += [
            env.rubric.score_rollout_sync(prompt=prompt["prompt"], completion=c, answer=prompt["answer"], state={})[
                "reward"
            ]
            for c in replies
        ]
    assert len(rewards) == 8
    assert set(np.round(rewards, 3)) <= {1.0, 0.1}


def test_several_metrics_tracked_by_hand() -> None:
    env, metrics = MathEnv(SUMS, client=vf.FakeClient(solve), model="m"), defaultdict(list)
    for sample in env.get_eval_dataset():
        began = time.time()
        completion, _ = env.rollout(model="m", prompt=sample["prompt"], answer=sample["answer"])
        scores = env.rubric.score_rollout_sync(
            prompt=sample["prompt"], completion=completion, answer=sample["answer"], state={}
        )
        metrics["accuracy"].append(scores.get("check_answer", 0))
        metrics["missing"].append(scores.get("no_such_metric", 0))
        metrics["time"].append(time.time() - began)
    assert np.mean(metrics["accuracy"]) == pytest.approx(5 / 6)
    assert np.mean(metrics["missing"]) == 0


def test_generation_with_a_system_prompt_a_batch_size_and_a_limit() -> None:
    env = SingleTurnEnv(dataset=SUMS, client=vf.FakeClient(solve))
    with pytest.warns(UserWarning, match="batch_size has no effect"):
        prompts, completions, rewards = env.generate(
            model="m", n_samples=10, temperature=0.8, batch_size=100, max_concurrent=10, **quiet()
        )
    assert len(prompts) == len(completions) == len(rewards) == 10

    async def generate_dataset() -> Any:
        with pytest.warns(UserWarning, match="batch_size"):
            return await env.generate_async(model="m", n_samples=10, batch_size=10, max_concurrent=5, **quiet())

    assert len(asyncio.run(generate_dataset())) == 10


def test_any_openai_client_sync_or_async_evaluates_the_same() -> None:
    from openai import AsyncOpenAI, OpenAI

    env = MathEnv(SUMS)
    with vf.FakeServer(solve) as server:
        for cls in (OpenAI, AsyncOpenAI):
            results = env.evaluate(client=cls(base_url=server.url, api_key="k"), model="m", num_examples=4, **quiet())
            assert sum(1 for r in results["rewards"] if r > 0.8) == 3
        with OpenAI(base_url=server.url, api_key="k") as client:
            completion, _ = env.rollout(client=client, model="m", prompt="2+2", answer="4", task="arithmetic")
    assert "4" in completion[0]["content"]


def test_the_common_configuration_as_it_is_written() -> None:
    env = SingleTurnEnv(
        dataset=SUMS,
        parser=XMLParser(["reasoning", "answer"]),
        rubric=Rubric(funcs=[lambda completion: 1.0]),
        system_prompt="Custom instructions...",
        few_shot_examples=[{"prompt": "1+0", "answer": "1"}],
        client=vf.FakeClient(solve),
        model="m",
        message_type="chat",
        max_retries=3,
        timeout=60,
        custom_param="value",
    )
    assert env.custom_param == "value"  # type: ignore[attr-defined]
    assert env.evaluate(**quiet())["rewards"] == [1.0] * 6
    text = SingleTurnEnv(dataset=SUMS, message_type="completion", client=vf.FakeClient(solve), model="m")
    assert text.evaluate(**quiet())["completions"][2] == solve("2+2")


# --- the hub ------------------------------------------------------------------------------------------------------


class Hub(BaseHTTPRequestHandler):
    """As much of a dataset hub as a push needs."""

    files: dict[str, bytes] = {}
    blobs: dict[str, bytes] = {}
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None: ...

    def say(self, value: Any, status: int = 200, **headers: str) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Length": str(len(body)), "Content-Type": "application/json", **headers}.items():
            self.send_header(name.replace("_", "-"), text)
        self.end_headers()
        self.wfile.write(body if self.command != "HEAD" else b"")

    def missing(self, code: str = "EntryNotFound") -> None:
        self.say({"error": "not found"}, 404, X_Error_Code=code)

    def do_GET(self) -> None:
        if self.path == "/api/whoami-v2":
            return self.say({"type": "user", "name": "me", "orgs": []})
        if "/tree/" in self.path:
            found = [{"type": "file", "path": k, "size": len(v), "oid": "0" * 40} for k, v in self.files.items()]
            return self.say(found) if found else self.missing()
        if self.path.startswith("/api/datasets/"):
            return self.say({"id": "me/sums", "sha": "1" * 40, "siblings": [], "tags": [], "private": False})
        return self.missing()

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        self.blobs[self.path.rsplit("/", 1)[-1]] = self.body()
        self.say({})

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def do_POST(self) -> None:
        body = self.body()
        host = f"http://{self.headers['Host']}"
        if self.path == "/api/repos/create":
            return self.say({"url": f"{host}/datasets/me/sums", "name": "me/sums", "id": "x"})
        if self.path == "/api/validate-yaml":
            return self.say({"errors": [], "warnings": []})
        if "/preupload/" in self.path:
            modes = [
                (f["path"], "lfs" if f["path"].endswith(".parquet") else "regular") for f in json.loads(body)["files"]
            ]
            return self.say(
                {"files": [{"path": p, "uploadMode": m, "shouldIgnore": False, "oid": None} for p, m in modes]}
            )
        if self.path.endswith("/lfs/objects/batch"):
            wanted = [
                {**x, "actions": {"upload": {"href": f"{host}/_lfs/{x['oid']}", "header": {}}}}
                for x in json.loads(body)["objects"]
            ]
            return self.say({"transfer": "basic", "objects": wanted}, Content_Type="application/vnd.git-lfs+json")
        if "/commit/" in self.path:
            self.commit(body)
            return self.say(
                {
                    "success": True,
                    "commitUrl": f"{host}/datasets/me/sums/commit/1",
                    "commitOid": "1" * 40,
                    "hookOutput": "",
                }
            )
        return self.say([]) if "/paths-info/" in self.path else self.missing("RepoNotFound")

    def commit(self, body: bytes) -> None:
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                self.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.files[value["path"]] = self.blobs[value["oid"]]


@contextmanager
def hub() -> Iterator[str]:
    Hub.files, Hub.blobs = {}, {}
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_results_are_pushed_to_the_hub_as_a_data_set(tmp_path: Path, repo: Path) -> None:
    code = """
import verifiers as vf
env = vf.SingleTurnEnv(dataset=[{"question": str(i), "answer": str(i)} for i in range(3)])
results = env.generate(client=vf.FakeClient(lambda m: m[-1]["content"]), model="m", n_samples=3, use_tqdm=False)
env.make_dataset(results, push_to_hub=True, hub_name="me/sums", token="hf_x")
"""
    with hub() as url:
        # In a process of its own: the hub's address is read once, at import.
        settings = {"HF_ENDPOINT": url, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=100,
            cwd=repo,
            env={**os.environ, **settings},
        )
    assert done.returncode == 0, done.stderr
    (pushed,) = [name for name in Hub.files if name.endswith(".parquet")]
    (tmp_path / "pushed.parquet").write_bytes(Hub.files[pushed])
    rows = SingleTurnEnv(dataset=tmp_path / "pushed.parquet").get_dataset()
    assert rows["answer"] == ["0", "1", "2"]
    assert [row["completion"][0]["content"] for row in rows] == ["0", "1", "2"]
    assert b"dataset_info" in Hub.files["README.md"]
