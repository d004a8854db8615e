"""What is learned from is what was sampled: engine, GRPO and SFT write the same conversation as the same tokens."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import verifiers as vf
from tests.chat import templates
from tests.engine import tiny
from tests.trainers import making
from verifiers.clients.protocol import Completion, Request
from verifiers.engine import LocalModel, LocalServer
from verifiers.samples import Sample, samples_of
from verifiers.store import read_records
from verifiers.trainers.sft_rows import read_samples
from verifiers.trainers.staleness import versions_of


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def tokenizer_of(template: str) -> Any:
    return tiny.tokenizer(template, special=templates.LLAMA_SPECIAL if template is templates.LLAMA31 else ())


class Told:
    """A local model that says these texts one after the other, sampled token by token as any other reply."""

    needs_no_model = True

    def __init__(self, template: str, end: str, replies: Sequence[str]) -> None:
        self.tokenizer = tokenizer_of(template)
        module = tiny.model(self.tokenizer, context=2048)
        self.script = tiny.Scripted(module)
        self.local = LocalModel(module, self.tokenizer, rows=2, name="tiny")
        self.replies, self.end = iter(replies), end
        self.shown: list[int] = []  # what the model is shown, where that is not simply the conversation

    async def complete(self, request: Request) -> Completion:
        shown = self.shown or self.local.load().writer.prompt(request.prompt, request.tools)[1]
        ids = self.tokenizer.encode(next(self.replies) + self.end, add_special_tokens=False)
        self.script.say(ids, after=len(shown))
        return await self.local.complete(request)


@pytest.fixture
def told() -> Iterator[Any]:
    made: list[Told] = []

    def make(*args: Any) -> Told:
        made.append(Told(*args))
        return made[-1]

    yield make
    for one in made:
        one.local.close()


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
TWO = CALL + "\n" + CALL.replace("2", "4")
BARE = '{"name": "add", "parameters": {"a": 2, "b": 3}}'


@pytest.mark.parametrize(
    ("template", "end", "first"),
    [
        (templates.QWEN25, "<|im_end|>", CALL),
        (templates.QWEN25, "<|im_end|>", "I add.\n" + TWO),
        (templates.QWEN3, "<|im_end|>", TWO),
        (templates.LLAMA31, "<|eot_id|>", BARE),
        (templates.NO_TOOLS, "<|im_end|>", "I add.\n" + CALL),
        (tiny.HERMES, "<|im_end|>", CALL),
    ],
    ids=["qwen2.5", "qwen2.5-two", "qwen3-two", "llama3.1", "no-tools", "hermes"],
)
def test_a_saved_conversation_with_tools_is_imitated_by_the_very_tokens_that_were_sampled(
    told: Any, tmp_path: Any, template: str, end: str, first: str
) -> None:
    client = told(template, end, [first, "the answer is 5"])
    env = vf.ToolEnv(tools=[add], dataset=[{"question": "2 + 3?", "answer": "5"}], rubric=vf.Rubric([lambda: 1.0]))
    results = env.evaluate(
        client=client,
        model="tiny",
        sampling_args={"temperature": 0, "max_tokens": 400},
        results_path=tmp_path / "run",
        use_tqdm=False,
    )
    state = results.rollouts[0]
    assert state["error"] is None
    assert [message["role"] for message in state["completion"]][:2] == ["assistant", "tool"]
    (sampled,) = samples_of(state["trajectory"])
    rows = [{**row, "trajectory": []} for row in results.rollouts]
    exported = tmp_path / "sft.jsonl"
    exported.write_text("".join(json.dumps(row) + "\n" for row in vf.to_sft(results)))
    for source in (rows, tmp_path / "run", exported):  # in memory, from disk, and as other trainers get it
        (learned,) = read_samples(source, client.tokenizer).samples
        assert learned.prompt_ids == sampled.prompt_ids
        assert learned.completion_ids == sampled.completion_ids
        assert learned.completion_mask == sampled.completion_mask
    text = client.tokenizer.decode(
        [t for t, m in zip(sampled.completion_ids, sampled.completion_mask, strict=True) if m]
    )
    assert text == f"{first}{end}the answer is 5{end}"


def test_a_reply_that_was_cut_off_is_not_imitated_as_one_that_ended(told: Any, tmp_path: Any) -> None:
    client = told(templates.QWEN25, "", ["the answer is four"])
    env = vf.SingleTurnEnv(dataset=[{"question": "2 + 2?"}], rubric=vf.Rubric([lambda: 1.0]))
    sampling = {"temperature": 0, "max_tokens": 3}
    results = env.evaluate(
        client=client, model="tiny", sampling_args=sampling, results_path=tmp_path / "run", use_tqdm=False
    )
    (sampled,) = samples_of(results.rollouts[0]["trajectory"])
    (learned,) = read_samples(tmp_path / "run", client.tokenizer).samples
    assert len(sampled.completion_ids) == 3
    assert learned.completion_ids == sampled.completion_ids


def test_variables_of_the_template_are_kept_with_the_run_and_written_with_again(told: Any, tmp_path: Any) -> None:
    loud = templates.NO_TOOLS.replace("assistant\\n'", "assistant\\n' + ('!' if loud else '')")
    client = told(loud, "<|im_end|>", ["hello"])
    asked = [{"role": "user", "content": "2 + 3?"}]
    client.shown = client.local.load().writer.prompt(asked, loud=True)[1]
    env = vf.SingleTurnEnv(dataset=[{"prompt": asked}], rubric=vf.Rubric([lambda: 1.0]))
    sampling = {"temperature": 0, "extra_body": {"chat_template_kwargs": {"loud": True}}}
    results = env.evaluate(
        client=client, model="tiny", sampling_args=sampling, results_path=tmp_path / "run", use_tqdm=False
    )
    (sampled,) = samples_of(results.rollouts[0]["trajectory"])
    assert sampled.prompt_ids == client.shown
    assert vf.to_sft(results)[0]["chat_template_kwargs"] == {"loud": True}
    for source in (tmp_path / "run", vf.to_sft(results)):
        (learned,) = read_samples(source, client.tokenizer).samples
        assert learned.prompt_ids + learned.completion_ids == sampled.prompt_ids + sampled.completion_ids


def test_grpo_learns_the_same_tokens_from_saved_text_with_tools_as_from_what_was_sampled(
    told: Any, tmp_path: Any
) -> None:
    client = told(templates.QWEN25, "<|im_end|>", [CALL, "the answer is 5", CALL, "hello"])
    rubric = vf.Rubric([lambda completion: float("5" in completion[-1]["content"])])
    env = vf.ToolEnv(tools=[add], dataset=[{"question": "2 + 3?", "answer": "5"}], rubric=rubric)
    results = env.evaluate(
        client=client,
        model="tiny",
        rollouts_per_example=2,
        max_concurrent=1,
        sampling_args={"temperature": 0.01, "max_tokens": 400},
        results_path=tmp_path / "run",
        use_tqdm=False,
    )
    learned = []
    for number, source in enumerate((results, tmp_path / "run")):
        trainer = vf.GRPOTrainer(
            model=tiny.model(client.tokenizer, context=2048),
            tokenizer=client.tokenizer,
            dataset=source,
            config=making.config(tmp_path / str(number), max_steps=1, batch_size=2, group_size=2),
        )
        batch = trainer.sample_batch(trainer.offline.groups)
        batch["advantages"] = [1.0] * len(batch["rewards"])
        learned.append([one.sample for one in trainer.sequences(batch)])
        assert trainer.train().last["grad_norm"] > 0
    for exact, written in zip(*learned, strict=True):
        assert exact.prompt_ids == written.prompt_ids
        assert exact.completion_ids == written.completion_ids
        assert exact.completion_mask == written.completion_mask


class Spoken(vf.SingleTurnEnv):
    """Asks by itself, with a system message of its own."""

    async def rollout(self, input: Any, client: Any, model: str, sampling_args: Any = None) -> Any:
        messages = [{"role": "system", "content": "hello"}, *input["prompt"]]
        reply = await client.chat.completions.create(model=model, messages=messages, **(sampling_args or {}))
        return [{"role": "assistant", "content": self.edit(reply.choices[0].message.content, input)}]

    def edit(self, text: str, row: Any) -> str:
        return text


def spoken(kind: type[Spoken] = Spoken) -> Any:
    rows = [{"question": f"say {i}", "answer": str(i)} for i in range(8)]
    return kind(dataset=rows, rubric=vf.Rubric([making.share_of_e]))


def test_training_on_a_rollout_of_ones_own_learns_the_tokens_of_the_calls_that_it_made(tmp_path: Any) -> None:
    generated: list[tuple[list[int], list[int], list[float]]] = []

    class Watched(vf.GRPOTrainer):
        def sequences(self, batch: Any) -> Any:
            trained = super().sequences(batch)
            samples: list[Sample] = [one.sample for one in trained]
            asked = "<|im_start|>system\nhello<|im_end|>\n<|im_start|>user\nsay "
            assert all(self.tokenizer.decode(sample.prompt_ids).startswith(asked) for sample in samples)
            assert all(
                (s.prompt_ids, s.completion_ids, s.completion_logprobs) in generated and set(s.completion_mask) == {1}
                for s in samples
            )
            assert len(samples) == 16
            return trained

    trainer = making.trainer(tmp_path, Watched, env=spoken(), max_steps=2)
    finish = trainer.client._choice

    def watch(loaded: Any, prompt: Any, sampled: Any) -> Any:
        generated.append((sampled.prompt_ids, sampled.ids, sampled.logprobs))
        return finish(loaded, prompt, sampled)

    trainer.client._choice = watch
    report = trainer.train()
    for step in report.steps:  # on-policy: the ratio of what was sampled to what is learned is one
        assert step["ratio_max"] == pytest.approx(1.0, abs=1e-4)
        assert step["sampled_tokens"] > 0
        assert "refused" not in step


def test_rollouts_whose_tokens_are_not_known_are_counted_and_shown_and_move_no_weight(tmp_path: Any) -> None:
    class SomeEdited(Spoken):
        def edit(self, text: str, row: Any) -> str:
            return text + " edited" if int(row["answer"]) % 2 else text

    trainer = making.trainer(tmp_path, env=spoken(SomeEdited), max_steps=1, batch_size=32)
    report = trainer.train()
    (step,) = report.steps
    assert step["refused"] == 16
    (reason,) = step["refused_reasons"]
    assert reason.startswith("16 × its completion contains a reply that no call of the policy returned")
    (notice,) = [one["notice"] for one in report.notices if "not trained on" in one["notice"]]
    assert notice.startswith("16 rollouts were not trained on")

    class AllEdited(Spoken):
        def edit(self, text: str, row: Any) -> str:
            return "made up"

    trainer = making.trainer(tmp_path / "all", env=spoken(AllEdited), max_steps=1)
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    with pytest.raises(ValueError, match=r"none of 16 rollouts can be trained on.*no call of the policy returned"):
        trainer.train()
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


def test_calls_with_sampling_of_their_own_are_learned_under_what_they_were_drawn_from(tmp_path: Any) -> None:
    class Cold(vf.SingleTurnEnv):
        def rollout(self, client: Any, model: str, prompt: Any, answer: str, **kwargs: Any) -> Any:
            own = {"temperature": 0.3, "top_p": 0.8, "max_tokens": 8}
            reply = client.chat.completions.create(model=model, messages=prompt, **own)
            return [reply.message], {}

    env = Cold(dataset=[{"question": "say 1", "answer": "1"}], rubric=vf.Rubric([making.share_of_e]))
    report = making.trainer(tmp_path, env=env, max_steps=1, batch_size=4).train()
    assert report.last["ratio_max"] == pytest.approx(1.0, abs=1e-3)
    assert report.last["clip_fraction"] == 0.0


@pytest.mark.parametrize("kind", [vf.SingleTurnEnv, Spoken])
def test_a_served_model_is_asked_for_its_tokens_and_they_are_learned_as_it_sampled_them(
    tmp_path: Any, kind: Any
) -> None:
    class Weights:
        def reload_weights(self, folder: str) -> None:
            local.update_weights(folder)

    tokenizer = tiny.tokenizer()
    env = spoken(kind)
    env.model = "tiny"
    with LocalModel(tiny.model(tokenizer), tokenizer, rows=4, name="tiny") as local, LocalServer(local) as server:
        trainer = vf.GRPOTrainer(
            model=tiny.model(tokenizer),
            tokenizer=tokenizer,
            env=env,
            client=vf.HTTPClient(server.url),
            weight_server=Weights(),
            config=making.config(tmp_path, max_steps=2),
        )
        report = trainer.train()
    for step in report.steps:
        assert step["ratio_max"] == pytest.approx(1.0, abs=1e-3)
        assert step["sampled_tokens"] > 0
        assert "refused" not in step


@pytest.mark.parametrize("ahead", [0, 1])
def test_tokens_of_a_server_that_names_no_weights_have_the_version_of_when_they_were_asked_for(
    tmp_path: Any, ahead: int
) -> None:
    class Mute(vf.HTTPClient):
        async def complete(self, request: Any) -> Any:
            completion = await super().complete(request)
            return replace(completion, tokens=replace(completion.tokens, weight_versions=()))

    class Weights:
        def reload_weights(self, folder: str) -> None:
            local.update_weights(folder)

    class Kept(vf.GRPOTrainer):
        def train_step(self, batch: Any) -> Any:
            seen.append([version for state in batch.states for _, version in versions_of(state)])
            return super().train_step(batch)

    seen: list[list[int]] = []
    tokenizer = tiny.tokenizer()
    env = making.environment()
    env.model = "tiny"
    with LocalModel(tiny.model(tokenizer), tokenizer, rows=4, name="tiny") as local, LocalServer(local) as server:
        trainer = Kept(
            model=tiny.model(tokenizer),
            tokenizer=tokenizer,
            env=env,
            client=Mute(server.url),
            weight_server=Weights(),
            config=making.config(tmp_path, max_steps=3, num_batches_ahead=ahead),
        )
        report = trainer.train()
    assert [len(versions) for versions in seen] == [16, 16, 16]
    for step, versions in enumerate(seen):  # a batch that is asked for late, after an update, is of its weights
        assert all(step - ahead <= version <= step for version in versions)
    oldest = [step - min(versions) for step, versions in enumerate(seen)]
    assert [step["staleness_max"] for step in report.steps] == oldest


def test_weights_that_are_sent_as_a_folder_take_the_room_of_one_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    sent: list[str] = []

    class Weights:
        def reload_weights(self, folder: str) -> None:
            local.update_weights(folder)
            sent.append(folder)

    tokenizer = tiny.tokenizer()
    env, model = making.environment(), tiny.model(tokenizer)
    env.model = "tiny"
    save = model.save_pretrained

    def alone(folder: Any) -> None:
        assert list(tmp_path.rglob("*.safetensors")) == []
        save(folder)

    monkeypatch.setattr(model, "save_pretrained", alone)
    with LocalModel(tiny.model(tokenizer), tokenizer, rows=4, name="tiny") as local, LocalServer(local) as server:
        vf.GRPOTrainer(
            model=model,
            tokenizer=tokenizer,
            env=env,
            client=vf.HTTPClient(server.url),
            weight_server=Weights(),
            config=making.config(tmp_path / "run", max_steps=2),
        ).train()
    assert len(sent) == 2


def test_a_batch_of_texts_that_the_policy_never_said_is_refused_and_those_it_said_are_exact(tmp_path: Any) -> None:
    class Own(vf.GRPOTrainer):
        texts = ("made", "up")

        def get_batch(self) -> Any:
            prompts = [[{"role": "user", "content": "say 1"}]] * 2
            return prompts, [[{"role": "assistant", "content": text}] for text in self.texts], [0.0, 1.0]

    class Asked(Own):
        def get_batch(self) -> Any:
            prompts = [[{"role": "user", "content": "say 1"}]] * 4
            return prompts, self.generate(prompts), [0.0, 1.0, 2.0, 3.0]

    with pytest.raises(ValueError, match=r"none of 2 rollouts can be trained on.*its text is not a known reply"):
        making.trainer(tmp_path / "a", Own, max_steps=1).train()
    (step,) = making.trainer(tmp_path / "b", Asked, max_steps=1).train().steps
    assert step["ratio_max"] == pytest.approx(1.0, abs=1e-4)


def test_the_same_text_sampled_as_different_tokens_is_learned_as_each_was_sampled() -> None:
    from verifiers.clients.protocol import Tokens
    from verifiers.trainers.sampler import Sampler

    tokenizer = tiny.tokenizer()
    sampler = Sampler(tiny.model(tokenizer), tokenizer)
    prompt, message = [{"role": "user", "content": "a"}], {"role": "assistant", "content": "the"}
    for ids in ([5], [6, 7]):
        tokens = Tokens(prompt_ids=[1], completion_ids=ids, logprobs=[-1.0] * len(ids))
        sampler.keep(Request(model="", prompt=prompt), message, tokens)
    found = [sampler.samples(prompt, [message])[0].completion_ids for _ in range(4)]
    assert found == [[6, 7], [5], [6, 7], [5]]


def test_equal_replies_are_found_one_after_the_other_while_others_are_sampled_and_the_oldest_are_forgotten() -> None:
    from verifiers.clients.protocol import Tokens
    from verifiers.trainers.sampler import Sampler

    tokenizer = tiny.tokenizer()
    sampler = Sampler(tiny.model(tokenizer), tokenizer, remembers=4)

    def keep(text: str, ids: list[int]) -> None:
        tokens = Tokens(prompt_ids=[1], completion_ids=ids, logprobs=[-1.0] * len(ids))
        sampler.keep(Request(model="", prompt="say"), {"role": "assistant", "content": text}, tokens)

    def find(text: str) -> list[list[int]]:
        return [list(one.completion_ids) for one in sampler.samples("say", text)]

    keep("ab", [5])
    keep("ab", [6, 7])
    found = find("ab")
    keep("other", [8])
    assert found + find("ab") == [[6, 7], [5]]
    keep("other", [9])
    keep("ab", [5, 5])  # in the place of the oldest
    assert [find("ab")[0] for _ in range(3)] == [[5, 5], [6, 7], [5, 5]]
    for i in range(3):
        keep("other", [i])
    assert (find("ab"), len(find("other"))) == ([[5, 5]], 1)
    keep("other", [3])
    assert (find("ab"), find("other")) == ([], [[3]])


def test_replies_of_a_batch_larger_than_what_is_sampled_at_once_are_all_known(tmp_path: Any) -> None:
    class Own(vf.GRPOTrainer):
        def get_batch(self) -> Any:
            prompts = [[{"role": "user", "content": f"say {i}"}] for i in range(600)]
            texts = [str(one) for one in self.generate(prompts)]
            return {
                "prompts": prompts,
                "completions": [[{"role": "assistant", "content": text}] for text in texts],
                "rewards": [float(i % 2) for i in range(600)],
                "groups": [i // 4 for i in range(600)],
            }

    report = making.trainer(tmp_path, Own, batch_size=600, max_new_tokens=1, max_steps=1).train()
    assert report.last.get("refused", 0) == 0


@pytest.mark.parametrize("ahead", [{"steps_per_generation": 2}, {"num_batches_ahead": 1}], ids=str)
def test_texts_that_wait_to_be_learned_from_are_known_whatever_is_evaluated_meanwhile(
    ahead: dict[str, int], tmp_path: Any
) -> None:
    class Texts(vf.GRPOTrainer):
        def get_batch(self) -> Any:
            prompts = [row["prompt"] for row in self.rows.take(self.rows_per_generation)]
            texts = [text for prompt in prompts for text in self.generate([prompt] * 4)]
            return {"prompts": prompts, "completions": texts, "rewards": [i % 4 / 4 for i in range(len(texts))]}

    often = {"eval_steps": 1, "eval_rollouts_per_example": 16}
    report = making.trainer(tmp_path, Texts, batch_size=8, max_steps=4, **often, **ahead).train()
    assert [step.get("refused") for step in report.steps] == [None] * 4


def test_a_text_that_the_policy_says_again_after_an_update_has_the_logprobs_of_this_time(tmp_path: Any) -> None:
    class Own(vf.GRPOTrainer):
        def get_batch(self) -> Any:
            prompts = [[{"role": "user", "content": "say 1"}]] * 64
            texts = [str(one) for one in self.generate(prompts)]
            said.append(set(texts))
            return prompts, [[{"role": "assistant", "content": text}] for text in texts], list(map(score, texts))

    def score(text: str) -> float:
        return float(sum(map(ord, text)) % 7)

    said: list[set[str]] = []
    settings = {"batch_size": 64, "max_new_tokens": 1, "learning_rate": 3e-2, "max_steps": 3}
    report = making.trainer(tmp_path, Own, **settings).train()
    assert said[0] & said[1]
    assert [step["ratio_max"] for step in report.steps] == pytest.approx([1.0] * 3, abs=1e-4)


def test_a_reply_that_was_changed_after_it_was_sampled_is_not_taken_for_what_the_policy_said() -> None:
    from verifiers.clients.protocol import Tokens
    from verifiers.trainers.sampler import Sampler

    tokenizer = tiny.tokenizer()
    sampler = Sampler(tiny.model(tokenizer), tokenizer)
    prompt, message = [{"role": "user", "content": "hi"}], {"role": "assistant", "content": "a, b"}
    sampler.keep(Request(model="", prompt=prompt), message, Tokens(prompt_ids=[1], completion_ids=[2], logprobs=[-0.5]))
    said = dict(message)
    message["content"] = "a"
    prompt.append(message)  # the loop goes on with its list
    prompt = prompt[:1]
    assert sampler.samples(prompt, [message]) == []
    assert [one.completion_ids for one in sampler.samples(prompt, [said])] == [[2]]


def test_a_sampling_argument_that_is_none_is_the_usual_one() -> None:
    from verifiers.trainers.sampler import Sampler

    tokenizer = tiny.tokenizer()
    with Sampler(tiny.model(tokenizer), tokenizer, default_args={"temperature": 0.5, "max_tokens": 3}) as sampler:
        asked = {"temperature": None, "max_completion_tokens": 2}
        request = Request(model="", prompt=[{"role": "user", "content": "hello"}], sampling=asked)
        tokens = asyncio.run(sampler.complete(request)).tokens
    assert tokens is not None
    assert tokens.sampling is not None
    assert tokens.sampling["temperature"] == 0.5
    assert len(tokens.completion_ids) <= 2


def test_saved_tokens_are_learned_as_they_are_and_those_of_another_tokenizer_are_not(tmp_path: Any) -> None:
    trainer = making.trainer(tmp_path, max_steps=1)
    results = trainer.env.generate(
        client=trainer.client,
        n_samples=8,
        rollouts_per_example=4,
        sampling_args={"max_tokens": 4},
        state_columns=["trajectory"],
        results_path=tmp_path / "saved",
        use_tqdm=False,
    )
    exact = sorted(sample.completion_ids for state in results.rollouts for sample in samples_of(state["trajectory"]))
    for source in (results, tmp_path / "saved"):
        offline = vf.GRPOTrainer(
            model=trainer.model,
            tokenizer=trainer.tokenizer,
            dataset=source,
            config=making.config(tmp_path, max_steps=1),
        )
        batch = offline.sample_batch(offline.offline.groups)
        batch["advantages"] = [1.0] * len(batch["rewards"])
        assert sorted(one.sample.completion_ids for one in offline.sequences(batch)) == exact
    bytewise = trainer.env.generate(
        client=vf.FakeClient("the answer", tokens=True), model="m", n_samples=1, use_tqdm=False
    )
    (sample,) = read_samples(bytewise, trainer.tokenizer).samples
    assert trainer.tokenizer.decode(sample.completion_ids) == "the answer<|im_end|>"


# --- what other programs make of it -------------------------------------------------------------------------------


def tool_results(tmp_path: Any, replies: Sequence[Any], **kwargs: Any) -> Any:
    env = vf.ToolEnv(tools=[add], dataset=[{"question": "2 + 3?", "answer": "5"}], rubric=vf.Rubric([lambda: 1.0]))
    client = vf.FakeClient(list(replies))
    return env.evaluate(client=client, model="fake", results_path=tmp_path / "run", use_tqdm=False, **kwargs)


def called(arguments: str) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return {"content": None, "tool_calls": [call]}


@pytest.mark.parametrize("template", [templates.QWEN25, templates.QWEN3, templates.LLAMA31], ids=["2.5", "3", "3.1"])
def test_an_exported_conversation_is_written_by_another_trainer_as_by_ours(tmp_path: Any, template: str) -> None:
    results = tool_results(tmp_path, [called('{"a": 2, "b": 3}'), "it is 5"])
    (row,) = vf.to_sft(results)
    tokenizer = tokenizer_of(template)
    theirs = tokenizer.apply_chat_template(row["messages"], tools=row["tools"], tokenize=False)
    (ours,) = read_samples(results, tokenizer).samples
    text = tokenizer.decode(ours.prompt_ids + ours.completion_ids)
    assert theirs.rstrip("\n") == text
    assert '{"a": 2, "b": 3}' in text


def test_a_run_from_disk_a_table_and_a_data_set_are_imitated_with_their_tools(tmp_path: Any) -> None:
    datasets = pytest.importorskip("datasets")
    results = tool_results(tmp_path, [called('{"a": 2, "b": 3}'), "it is 5"])
    tokenizer = tokenizer_of(templates.QWEN25)
    (expected,) = read_samples(results, tokenizer).samples
    assert '"name": "add"' in tokenizer.decode(expected.prompt_ids)
    vf.export_parquet(results, tmp_path / "run.parquet")
    other = {"type": "function", "function": {"name": "look", "parameters": {"properties": {"at": {"type": "string"}}}}}
    look = {"type": "function", "function": {"name": "look", "arguments": {"at": "x"}}}
    stranger = {
        "messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [look]}],
        "tools": [other],
    }
    mixed = datasets.Dataset.from_list([*vf.to_sft(results), stranger])
    sources: list[Any] = [tmp_path / "run", tmp_path / "run" / "results.jsonl", tmp_path / "run.parquet", mixed]
    for source in sources:
        found = read_samples(source, tokenizer).samples[0]
        assert found.prompt_ids + found.completion_ids == expected.prompt_ids + expected.completion_ids
        assert found.completion_mask == expected.completion_mask
    second = tokenizer.decode(read_samples(mixed, tokenizer).samples[1].completion_ids)
    assert '"arguments": {"at": "x"}}' in second  # without the nulls that the table has there


def test_a_template_without_tools_can_be_trained_on_calls(tmp_path: Any) -> None:
    results = tool_results(tmp_path, [called('{"a": 2, "b": 3}'), "it is 5"])
    tokenizer = tokenizer_of(templates.NO_TOOLS)
    config = vf.SFTConfig(
        max_steps=2, batch_size=1, learning_rate=1e-2, show_progress=False, output_dir=tmp_path / "sft"
    )
    for source in (results, tmp_path / "run"):
        config.output_dir = tmp_path / f"sft-{len(str(source))}"
        model = tiny.model(tokenizer, context=2048)
        trainer = vf.SFTTrainer(model=model, tokenizer=tokenizer, dataset=source, config=config)
        (sample,) = trainer.examples.samples
        assert "You may call one or more" in tokenizer.decode(sample.prompt_ids)
        report = trainer.train()
        assert report.steps[1]["loss"] < report.steps[0]["loss"]


def test_an_old_run_without_its_tools_says_so_and_takes_those_of_its_environment(tmp_path: Any) -> None:
    results = tool_results(tmp_path, [called('{"a": 2, "b": 3}'), "it is 5"])
    tokenizer = tokenizer_of(templates.QWEN25)
    old = [
        {name: value for name, value in row.items() if name != "oai_tools"} for row in read_records(tmp_path / "run")
    ]
    with pytest.warns(UserWarning, match="1 rollouts call tools but do not say which tools were available .*pass env="):
        (without,) = read_samples(old, tokenizer).samples
    assert "<tools>" not in tokenizer.decode(without.prompt_ids)
    env = vf.ToolEnv(tools=[add], dataset=[{"question": "2 + 3?"}], rubric=vf.Rubric([lambda: 1.0]))
    (with_them,) = read_samples(old, tokenizer, env=env).samples
    assert with_them.prompt_ids == read_samples(results, tokenizer).samples[0].prompt_ids


def test_prompts_are_measured_with_the_tools_that_the_engine_will_show(tmp_path: Any) -> None:
    tokenizer = tokenizer_of(templates.NO_TOOLS)
    env = vf.ToolEnv(tools=[add], dataset=[{"question": "2 + 3?"}], rubric=vf.Rubric([lambda: 1.0]))
    config = making.config(tmp_path, max_prompt_length=30)
    with pytest.raises(ValueError, match="all 1 prompts are longer than max_prompt_length=30"):
        vf.GRPOTrainer(model=tiny.model(tokenizer), tokenizer=tokenizer, env=env, config=config)
