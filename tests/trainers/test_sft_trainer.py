"""`SFTTrainer`: what it imitates, what it leaves out, that it learns, and that it can be stopped and resumed."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

import verifiers as vf
from verifiers.kernels import autograd
from verifiers.kernels.cpu import matmul
from verifiers.trainers.sft_rows import gold_reply, read_samples

LETTERS = "abcdefghij"
ROWS = [{"prompt": a, "completion": b + a} for a in LETTERS for b in LETTERS[:2]]


def tiny(**kwargs: Any) -> tuple[Any, Any]:
    return vf.tiny_model(LETTERS + "0123456789?", **{"hidden_size": 32, "layers": 1, **kwargs})


def trainer(tmp_path: Any, dataset: Any = ROWS, *, model: Any = None, **kwargs: Any) -> vf.SFTTrainer:
    own = {name: kwargs.pop(name) for name in ("env", "eval_dataset", "callbacks", "peft_config") if name in kwargs}
    usual = {"batch_size": 8, "max_steps": 4, "learning_rate": 1e-2, "show_progress": False}
    made, tokenizer = tiny()
    config = vf.SFTConfig(**{**usual, "output_dir": tmp_path / "run", **kwargs})
    return vf.SFTTrainer(model=model or made, tokenizer=tokenizer, dataset=dataset, config=config, **own)


def said(samples: Any, tokenizer: Any) -> list[str]:
    """The trained text of each sample."""
    return [
        tokenizer.decode([token for token, is_on in zip(s.completion_ids, s.completion_mask, strict=True) if is_on])
        for s in samples
    ]


# --- what is imitated ---------------------------------------------------------------------------------------------


def test_texts_are_imitated_to_their_end_and_prompts_are_not():
    _, tokenizer = tiny()
    found = read_samples([{"prompt": "ab", "completion": "c"}], tokenizer)
    assert said(found.samples, tokenizer) == ["c<|end|>"]
    assert tokenizer.decode(found.samples[0].prompt_ids) == "ab"


def test_every_assistant_turn_of_a_chat_is_imitated_and_no_other():
    _, tokenizer = tiny()
    chat = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "bb"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "dd"},
    ]
    found = read_samples([{"messages": chat}], tokenizer)
    assert said(found.samples, tokenizer) == ["bb<|end|>dd<|end|>"]


def test_what_a_template_writes_after_the_end_of_a_reply_is_not_imitated():
    _, tokenizer = tiny()
    tokenizer.chat_template = tokenizer.chat_template.replace("'<|end|>'", "'<|end|>00'")
    found = read_samples([{"prompt": [{"role": "user", "content": "a"}], "completion": "b"}], tokenizer)
    assert said(found.samples, tokenizer) == ["b<|end|>"]


def test_a_template_that_rewrites_history_gives_a_sample_for_each_reply():
    _, tokenizer = tiny()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}"
        "{% if m['role'] == 'assistant' and not loop.last %}{{ '?' }}{% else %}{{ m['content'] }}{% endif %}"
        "{{ '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    turns = [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 2, "abcd", strict=True)]
    found = read_samples([{"messages": turns}], tokenizer)
    assert said(found.samples, tokenizer) == ["b<|end|>", "d<|end|>"]
    assert "?" in tokenizer.decode(found.samples[1].prompt_ids)


def test_gold_answers_are_written_as_the_parser_wants_them():
    def env(parser: Any) -> vf.Environment:
        return vf.SingleTurnEnv(dataset=[{"question": "2+2?", "answer": "4"}], parser=parser, rubric=vf.Rubric([]))

    row = {"answer": "4", "reasoning": "two and two"}
    tagged = "<reasoning>\ntwo and two\n</reasoning>\n<answer>\n4\n</answer>"
    assert gold_reply(env(vf.XMLParser(["reasoning", "answer"])), row) == tagged
    assert gold_reply(env(vf.Parser()), row) == "4"
    assert gold_reply(env(vf.Parser(vf.extract_boxed_answer)), row) in ("4", "\\boxed{4}")
    assert gold_reply(env(vf.ThinkParser()), row).endswith("4")
    with pytest.raises(ValueError, match="does not find the answer '4' in any common form of reply; pass rows with"):
        gold_reply(env(vf.Parser(lambda text: None)), row)


def test_an_environment_alone_is_enough_and_its_prompts_are_used():
    _, tokenizer = vf.tiny_model()
    env = vf.SingleTurnEnv(
        dataset=[{"question": "2+2?", "answer": "4"}], system_prompt="Add.", parser=vf.Parser(), rubric=vf.Rubric([])
    )
    found = read_samples(None, tokenizer, env=env)
    assert said(found.samples, tokenizer) == ["4<|end|>"]
    prompt = tokenizer.decode(found.samples[0].prompt_ids)
    assert prompt == "<|system|>Add.<|end|><|user|>2+2?<|end|><|assistant|>"


def test_rollouts_of_a_run_are_imitated_if_they_were_good_enough(tmp_path):
    def right(completion: Any, answer: str) -> bool:
        return completion[-1]["content"] == answer

    _, tokenizer = vf.tiny_model()
    rows = [{"question": str(i), "answer": str(i % 3)} for i in range(6)]
    env = vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric([right]))
    results = env.evaluate(client=vf.FakeClient("1"), model="fake", save_results=True, results_path=tmp_path / "run")
    for source in (results, tmp_path / "run", tmp_path / "run" / "results.jsonl"):
        found = read_samples(source, tokenizer, min_reward=1.0)
        assert said(found.samples, tokenizer) == ["1<|end|>"] * 2
        assert (found.below, found.failed) == (4, 0)
    with pytest.raises(ValueError, match=r"no row has a reward of at least min_reward=2.0: the best reward is 1"):
        read_samples(results, tokenizer, min_reward=2.0)


def test_failed_rollouts_are_never_imitated():
    _, tokenizer = tiny()
    rows = [{**ROWS[0], "error": "the judge is down", "reward": None}, {**ROWS[1], "reward": 0.5}]
    found = read_samples(rows, tokenizer)
    assert (len(found.samples), found.failed, found.dropped) == (1, 1, 1)
    with pytest.raises(ValueError, match="all 1 rollouts failed"):
        read_samples(rows[:1], tokenizer)


def test_sampled_tokens_are_taken_as_they_are():
    _, tokenizer = tiny()
    tokens = {"prompt_ids": [9, 8], "completion_ids": [7, 8, 9], "completion_logprobs": [-1.0, -1.0, -1.0]}
    row = {"prompt": "a", "completion": "b", "trajectory": [{"tokens": tokens}]}
    assert read_samples([row], tokenizer).samples[0].completion_ids == [7, 8, 9]


def test_long_examples_are_cut_and_those_without_room_are_counted():
    _, tokenizer = tiny()
    rows = [{"prompt": "abcdef", "completion": "abc"}, {"prompt": "a", "completion": "abcdefghij"}]
    found = read_samples(rows, tokenizer, max_length=5)
    assert said(found.samples, tokenizer) == ["abcd"]
    assert found.overlong == 1
    with pytest.raises(ValueError, match="all 1 rows are too long: no reply begins within max_seq_length=5 tokens"):
        read_samples(rows[:1], tokenizer, max_length=5)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "the dataset has no rows to imitate"),
        ([{"question": "a", "answer": "b"}], r"row 0 has nothing to imitate: .*pass env="),
        ([{"text": "a"}], r"row 0 has nothing to imitate: it needs prompt and completion.*its columns: text"),
        ([{"completion": "a"}], "row 0 has a completion but neither a 'prompt' nor a 'question'"),
        ([{"messages": [{"role": "user", "content": "a"}]}], "none of its 1 messages is the assistant's"),
        (["a"], "a row must be a mapping with prompt and completion"),
        ([{"prompt": "a", "completion": 4}], "row 0: its completion must be a text or messages, not 4"),
        ([{"messages": [{"role": "assistant", "content": "a"}]}], "row 0 begins with an assistant message"),
    ],
    ids=["none", "answers", "columns", "prompt", "turns", "text", "number", "greeting"],
)
def test_rows_without_anything_to_imitate_are_refused(rows, message):
    _, tokenizer = tiny()
    with pytest.raises((ValueError, TypeError), match=message):
        read_samples(rows, tokenizer)


def test_min_reward_without_rewards_is_refused():
    _, tokenizer = tiny()
    with pytest.raises(ValueError, match=r"min_reward=0\.5 needs rows with a reward"):
        read_samples(ROWS, tokenizer, min_reward=0.5)
    with pytest.raises(ValueError, match=r"rewards that are numbers, but a row has 'high'"):
        read_samples([{**ROWS[0], "reward": "high"}], tokenizer, min_reward=0.5)


# --- learning -----------------------------------------------------------------------------------------------------


def test_the_loss_is_the_mean_of_minus_logprob_over_the_replies(tmp_path):
    one = trainer(tmp_path, ROWS[:3])
    with torch.no_grad():
        values = []
        for sample in one.examples.samples:
            ids = torch.tensor([sample.prompt_ids + sample.completion_ids])
            logprobs = one.model(ids).logits.log_softmax(-1)[0]
            start = len(sample.prompt_ids)
            values += [float(logprobs[start + i - 1, token]) for i, token in enumerate(sample.completion_ids)]
    figures = one.train_step(one.examples.samples)
    assert figures["loss"] == pytest.approx(-sum(values) / len(values), rel=1e-5)
    assert figures["tokens"] == len(values)


def test_a_text_without_a_prompt_is_learned_from_its_second_token_on_and_the_mean_is_of_these(tmp_path):
    one = trainer(tmp_path, [{"prompt": "", "completion": "abc"}])
    (sample,) = one.examples.samples
    ids = torch.tensor([sample.completion_ids])
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(one.model(ids).logits[0, :-1], ids[0, 1:])
    figures = one.train_step([sample])
    assert figures["tokens"] == 3  # b, c and the end
    assert figures["loss"] == pytest.approx(float(expected), rel=1e-5)


def test_the_loss_goes_down_and_the_run_is_written(tmp_path):
    one = trainer(tmp_path, max_steps=40)
    report = one.train()
    losses = [line["loss"] for line in report.steps]
    assert len(losses) == 40
    assert losses[-1] < 0.5 * losses[0]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 41))
    assert {"loss", "grad_norm", "learning_rate", "tokens_per_s", "epoch"} <= lines[0].keys()
    assert (tmp_path / "run" / "plot.svg").read_text().startswith("<svg")
    assert "loss" in repr(report)
    assert report.picture()


def test_what_another_trainer_taught_a_model_in_half_precision_is_not_undone_by_the_next_step(tmp_path):
    model = tiny()[0].to(torch.bfloat16)
    first, second = (trainer(tmp_path / name, model=model, max_steps=1) for name in ("first", "second"))
    first.train()
    second.train()
    taught = [parameter.clone() for parameter in model.parameters()]
    first.config.learning_rate = 0.0
    first.train_step(first.get_batch())
    assert all(torch.equal(mine, its) for mine, its in zip(model.parameters(), taught, strict=True))


def test_tokens_that_are_not_trained_have_no_influence(tmp_path):
    """The same chat with another middle turn, masked: the gradient of the reply before it is the same."""
    one = trainer(tmp_path)
    gradients = []
    for middle in ("cc", "dd"):
        chat = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "bb"},
            {"role": "user", "content": middle},
        ]
        samples = read_samples([{"messages": chat}], one.tokenizer).samples
        ((loss, _),) = one._losses(samples)
        one.weights.backward(loss)
        gradients.append([gradient.clone() for gradient in one.weights.gradients()])
        one.weights.clear()
    for left, right in zip(*gradients, strict=True):
        assert torch.allclose(left, right, atol=1e-7)


def in_half(tmp_path, dtype=torch.float16, **kwargs):
    """A training in half precision with a loss scale that is far below the largest one."""
    model = tiny()[0].to(dtype)
    made = trainer(tmp_path, model=model, save_steps=3, max_steps=5, learning_rate=1e-4, **kwargs)
    made.weights.scale = min(made.weights.scale, 1024.0)
    return made


def test_the_loss_scale_grows_after_a_resume_as_if_the_training_had_not_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr("verifiers.trainers.weights.SCALE_GROWS_AFTER", 4)
    whole = in_half(tmp_path)
    losses = [line["loss"] for line in whole.train().steps]
    assert whole.weights.scale == 2048.0
    resumed = in_half(tmp_path / "again")
    report = resumed.train(resume=tmp_path / "run" / "checkpoints" / "step-000003")
    assert [line["loss"] for line in report.steps] == losses
    assert resumed.weights.scale == 2048.0


@pytest.mark.parametrize(("before", "after", "scale"), [("float16", "float32", 1.0), ("float32", "float16", 1024.0)])
def test_a_training_that_goes_on_in_another_precision_has_the_loss_scale_of_that(tmp_path, before, after, scale):
    in_half(tmp_path, getattr(torch, before)).train()
    resumed = in_half(tmp_path / "again", getattr(torch, after))
    resumed.train(resume=tmp_path / "run" / "checkpoints" / "step-000003")
    assert resumed.weights.scale == scale


def test_losses_after_a_resume_equal_those_of_a_run_that_was_not_stopped(tmp_path):
    whole = trainer(tmp_path / "whole", max_steps=6, save_steps=3).train()
    trainer(tmp_path / "parts", max_steps=6, save_steps=3, callbacks=[Stop(at=4)]).train()
    resumed = trainer(tmp_path / "parts", max_steps=6, save_steps=3).train(resume=True)
    assert [line["loss"] for line in resumed.steps] == [line["loss"] for line in whole.steps]
    assert resumed.last["total_tokens"] == whole.last["total_tokens"]


class Stop:
    def __init__(self, at: int) -> None:
        self.at = at

    def on_step_end(self, trainer: Any, figures: dict[str, Any]) -> None:
        trainer.should_stop = figures["step"] == self.at


def test_the_evaluation_loss_is_told_when_it_is_due(tmp_path):
    seen = []

    class Watch:
        def on_evaluate(self, trainer: Any, figures: dict[str, Any]) -> None:
            seen.append(figures)

    one = trainer(tmp_path, eval_dataset=ROWS[:4], eval_steps=2, callbacks=[Watch()])
    report = one.train()
    assert [line["step"] for line in report.evals] == [2, 4]
    assert seen[0]["n"] == 4
    assert math.isclose(one.evaluate()["loss"], seen[-1]["loss"], rel_tol=1e-6)
    with pytest.raises(ValueError, match="pass eval_dataset="):
        trainer(tmp_path).evaluate()


def test_adapters_alone_are_trained_and_saved(tmp_path):
    model, _ = tiny()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    one = trainer(tmp_path, model=model, peft_config=vf.lora_defaults(r=2))
    one.train()
    base = one.model.get_base_model().state_dict()
    for name, value in before.items():
        assert torch.equal(base.get(name, base.get(name.replace(".weight", ".base_layer.weight"))), value)
    one.save_model(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()


def test_the_saved_model_can_be_trained_on(tmp_path):
    one = trainer(tmp_path)
    one.train()
    one.save_model(tmp_path / "model")
    config = vf.SFTConfig(max_steps=1, show_progress=False, output_dir=tmp_path / "again")
    again = vf.SFTTrainer(model=str(tmp_path / "model"), dataset=ROWS, config=config)
    assert again.train_step(again.get_batch())["loss"] < math.log(20)


def test_both_dialects_of_arguments_are_understood():
    model, tokenizer = tiny()
    args = vf.SFTConfig(per_device_train_batch_size=3, num_train_epochs=2, max_seq_len=64)
    one = vf.SFTTrainer(model=model, processing_class=tokenizer, args=args, dataset=ROWS)
    assert (one.rows_per_step, one.num_steps_per_epoch, one.total_steps) == (3, 7, 14)
    with pytest.raises(TypeError, match="config and args are the same thing"):
        vf.SFTTrainer(model=model, tokenizer=tokenizer, args=args, config=args, dataset=ROWS)
    with pytest.raises(TypeError, match=r"SFTConfig has no 'group_size'"):
        vf.SFTConfig(group_size=4)


def test_a_tokenizer_of_another_model_is_told_before_its_tokens_are_looked_up(tmp_path):
    model, _ = vf.tiny_model("ab", hidden_size=32)
    _, tokenizer = vf.tiny_model("abcdefghijklmnopqrstuvwxyz", hidden_size=32)
    rows = [{"prompt": "ab", "completion": "xyz"}] * 4
    config = vf.SFTConfig(max_steps=1, batch_size=2, output_dir=tmp_path, show_progress=False)
    with pytest.raises(
        ValueError, match=r"token id \d+ is outside the model's vocabulary of \d+ tokens: were these tokens made with"
    ):
        vf.SFTTrainer(model=model, tokenizer=tokenizer, dataset=rows, config=config).train()


# --- another library's matrix products ------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [False, True], ids=["all weights", "LoRA"])
def test_layers_of_a_real_width_learn_by_onednn_what_they_learn_by_mkl(lora, tmp_path, monkeypatch):
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this PyTorch has no oneDNN")
    multiply, products = matmul._onednn, []
    monkeypatch.setattr(matmul, "_onednn", lambda *args: products.append(args) or multiply(*args))

    def steps(is_onednn: bool) -> list[float]:
        for module in (matmul, autograd):
            monkeypatch.setattr(module, "uses_onednn", lambda: is_onednn)
        torch.manual_seed(0)
        model, _ = tiny(hidden_size=256, layers=2)
        adapters = vf.lora_defaults() if lora else None
        report = trainer(tmp_path / str(is_onednn), model=model, max_steps=2, peft_config=adapters).train()
        return [value for line in report.steps for value in (line["loss"], line["grad_norm"])]

    expected = steps(False)
    assert not products
    assert steps(True) == pytest.approx(expected, rel=1e-4)
    assert len(products) > 20
