"""The loop: it learns, it is exact, it goes on where it was, and its steps can be replaced."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("accelerate")

import verifiers as vf  # noqa: E402
from tests.engine import tiny  # noqa: E402
from tests.trainers import making  # noqa: E402
from tests.trainers.test_processes import free_port  # noqa: E402
from verifiers.trainers.advantages import Estimator, flat_groups  # noqa: E402
from verifiers.trainers.batch import Reply, with_advantages  # noqa: E402
from verifiers.trainers.learning.micro_batches import micro_batches  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


# --- learning -------------------------------------------------------------------------------------------------------


def test_reward_rises(tmp_path):
    report = making.trainer(tmp_path, max_steps=25, batch_size=32, group_size=8).train()
    assert report.rewards[-1] > report.rewards[0] + 0.15


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "dapo", "bnpo", "gspo", "cispo"])
def test_every_loss_learns(tmp_path, kind):
    report = making.trainer(tmp_path, loss_type=kind, max_steps=15, batch_size=32, group_size=8).train()
    assert sum(report.rewards[-3:]) > sum(report.rewards[:3])


def test_on_policy_the_ratio_is_one_to_rounding(tmp_path):
    report = making.trainer(tmp_path, temperature=0.7).train()
    for step in report.steps:
        assert step["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
        assert step["ratio_max"] == pytest.approx(1.0, abs=1e-4)
        assert step["clip_fraction"] == 0


def test_a_second_pass_over_a_batch_is_off_policy(tmp_path):
    report = making.trainer(tmp_path, num_iterations=2, learning_rate=0.05).train()
    assert max(abs(step["ratio_max"] - 1) for step in report.steps) > 1e-3


def test_one_batch_ahead_trains_too(tmp_path):
    report = making.trainer(tmp_path, num_batches_ahead=1, max_steps=40, batch_size=32, group_size=8).train()
    assert report.rewards[-1] > report.rewards[0] + 0.15
    assert len(report.steps) == 40


def test_only_adapters_move_with_lora_and_the_reference_is_the_model_without_them(tmp_path):
    tokenizer = tiny.tokenizer()
    model = tiny.model(tokenizer)
    before = {name: value.clone() for name, value in model.named_parameters()}
    trainer = making.trainer(tmp_path, model=model, peft_config=vf.lora_defaults(r=4), kl_coef=0.1, learning_rate=0.02)
    report = trainer.train()
    assert report.steps[0]["kl"] == pytest.approx(0.0, abs=1e-6)  # adapters begin as nothing
    assert report.steps[-1]["kl"] > 0
    after = dict(trainer.model.get_base_model().named_parameters())
    assert all(
        torch.equal(after.get(name, after.get(name.replace(".weight", ".base_layer.weight"))), value)
        for name, value in before.items()
    )
    trainer.save_model(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize("begun", ["pissa", "olora"])
def test_the_reference_of_adapters_that_are_taken_from_the_weights_is_the_model_before_training(tmp_path, begun):
    adapters = vf.lora_defaults(r=4, init_lora_weights=begun)
    whole = making.trainer(tmp_path / "whole", peft_config=adapters, kl_coef=0.1).train()
    assert whole.steps[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    parts = {"peft_config": adapters, "kl_coef": 0.1, "save_steps": 1}
    making.trainer(tmp_path / "parts", max_steps=1, **parts).train()
    resumed = making.trainer(tmp_path / "parts", **parts).train(resume=True)
    assert [one["kl"] for one in resumed.steps] == pytest.approx([one["kl"] for one in whole.steps], abs=1e-6)


def test_the_divergence_holds_the_policy_back(tmp_path):
    free = making.trainer(tmp_path / "free", max_steps=10, kl_coef=1e-9).train()
    held = making.trainer(tmp_path / "held", max_steps=10, kl_coef=3.0).train()
    assert held.steps[-1]["kl"] < 0.7 * free.steps[-1]["kl"]


def test_a_reference_that_is_synchronised_is_the_policy_again(tmp_path):
    trainer = making.trainer(tmp_path, max_steps=4, kl_coef=0.1, sync_ref_model=True, ref_model_sync_steps=2)
    trainer.train()
    pairs = zip(trainer.update.reference.model.parameters(), trainer.model.parameters(), strict=True)
    assert all(torch.equal(mine, its) for mine, its in pairs)


def test_half_precision_moves_by_steps_smaller_than_its_grain(tmp_path):
    tokenizer = tiny.tokenizer()
    model = tiny.model(tokenizer).to(torch.bfloat16)
    trainer = making.trainer(tmp_path, model=model, max_steps=6, learning_rate=1e-5)
    trainer.train()
    masters = [(live, master) for live, master in zip(trainer.weights.live, trainer.weights.masters, strict=True)]
    assert all(live.dtype == torch.bfloat16 and master.dtype == torch.float32 for live, master in masters)
    assert all(torch.equal(live, master.to(torch.bfloat16)) for live, master in masters)
    assert any(not torch.equal(live.float(), master) for live, master in masters)  # kept where bfloat16 cannot hold it


def test_what_somebody_else_taught_the_model_in_between_is_not_undone(tmp_path):
    """The float32 copies of a model in half precision were made when the trainer was; then it was warmed up."""
    model = tiny.model(tiny.tokenizer()).to(torch.bfloat16)
    trainer = making.trainer(tmp_path, model=model, max_steps=1, learning_rate=0.0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    taught = [parameter.clone() for parameter in model.parameters()]
    trainer.train()
    assert all(torch.equal(mine, its) for mine, its in zip(model.parameters(), taught, strict=True))


# --- what counts ----------------------------------------------------------------------------------------------------


def test_failed_rollouts_are_in_no_mean_and_no_loss(tmp_path):
    def brittle(completion: Any, answer: str) -> float:
        if int(answer) % 2:
            raise ConnectionError("the judge is down")
        return making.share_of_e(completion)

    report = making.trainer(tmp_path, env=making.environment(rubric=vf.Rubric([brittle])), batch_size=64).train()
    assert (report.steps[0]["failed"], report.steps[0]["samples"]) == (32, 32)
    kept = [json.loads(line) for line in (tmp_path / "run" / "results.jsonl").read_text().splitlines()]
    assert any(record["error"] for record in kept)


def test_tokens_of_the_environment_have_no_influence(tmp_path):
    """Two turns; what the environment says between them is seen and not trained on."""

    class Twice(vf.MultiTurnEnv):
        def env_response(self, messages: Any, state: Any) -> Any:
            return [{"role": "user", "content": "again"}]

    env = Twice(
        dataset=[{"question": "say", "answer": ""}] * 1 and [{"question": f"say {i}"} for i in range(8)],
        rubric=vf.Rubric([making.share_of_e]),
        max_turns=2,
    )
    trainer = making.trainer(tmp_path, env=env, batch_size=8)
    batch = trainer.get_batch(0, 0)
    sequences = trainer.sequences(with_advantages(batch, Estimator("dr_grpo")))
    # (Where the random model says what no text can hold, history reads otherwise and a second sample begins.)
    assert any(0 in one.sample.completion_mask for one in sequences)
    (micro,) = micro_batches(sequences, max_tokens=10_000)
    assert len(micro.target_N) == sum(sum(one.sample.completion_mask) for one in sequences)
    logprobs = trainer.update.scorer.logprobs(micro)
    assert torch.allclose(logprobs, micro.old_N, atol=1e-4)  # over both turns: the very tokens that were sampled


def test_truncated_replies_can_be_left_out_of_the_loss(tmp_path):
    trainer = making.trainer(tmp_path, mask_truncated_completions=True)
    batch = trainer.get_batch(0, 0)
    kept = trainer.sequences(with_advantages(batch, Estimator("dr_grpo")))
    whole = [reply for reply in batch["completions"] if not reply.state["is_truncated"]]
    assert len(kept) == len(whole) < len(batch["completions"])


def test_groups_without_variance_are_replaced_by_other_rows(tmp_path):
    def only_some(completion: Any, answer: str) -> float:
        return making.share_of_e(completion) if int(answer) % 2 else 0.5

    env = making.environment(32, rubric=vf.Rubric([only_some]))
    plain = making.trainer(tmp_path / "a", env=env).get_batch(0, 0)
    varied = making.trainer(tmp_path / "b", env=env, dynamic_sampling=True, max_resamples=8).get_batch(0, 0)
    assert flat_groups(plain["rewards"], plain["groups"])
    assert not flat_groups(varied["rewards"], varied["groups"])
    assert len(varied["rewards"]) == 16


@pytest.mark.parametrize("n", [2, 4, 6])
def test_groups_without_variance_are_replaced_by_rows_that_the_row_sampler_offers(tmp_path, n):
    replies: list[tuple[str, str]] = []

    def flat(completion: Any, answer: str) -> float:
        replies.append((answer, completion[-1]["content"]))
        return 0.5

    def easy(rows: Any, epochs: float) -> list[Any]:
        return [rows[i] for i in range(n)]

    env = making.environment(rubric=vf.Rubric([flat]))
    trainer = making.trainer(tmp_path, env=env, dynamic_sampling=True, max_resamples=2, row_sampler=easy)
    assert len(trainer.get_batch(0, 0)["rewards"]) == 16
    assert {int(answer) for answer, _ in replies} <= set(range(n))
    first, second, third = (sorted(replies[i : i + 16]) for i in (0, 16, 32))
    assert first != second != third  # not the same rollouts once more


class Collecting(vf.GRPOTrainer):
    """Keeps what each call of `sample_batch` returned."""

    def sample_batch(self, rows: Any) -> Any:
        batch = super().sample_batch(rows)
        vars(self).setdefault("made", []).append(list(map(str, batch["completions"])))
        return batch


def test_batches_of_the_same_rows_within_a_step_are_not_the_same_rollouts_twice(tmp_path):
    class Twice(Collecting):
        def get_batch(self) -> Any:
            rows = [self.rows.all[0]] * self.rows_per_generation
            return self.sample_batch(rows) + self.sample_batch(rows)

    trainers = [making.trainer(tmp_path / name, Twice, max_steps=2) for name in ("a", "b")]
    for trainer in trainers:
        trainer.train()
    first, again, *later = trainers[0].made
    assert len({tuple(one) for one in (first, again, *later)}) == 4
    assert trainers[1].made == trainers[0].made


def test_batches_ahead_of_the_same_rows_are_not_the_same_rollouts_twice(tmp_path):
    trainer = making.trainer(
        tmp_path, Collecting, num_batches_ahead=2, max_steps=3, row_sampler=lambda rows, epochs: rows[:4]
    )
    trainer.train()
    assert len({tuple(one) for one in trainer.made}) == 3


def test_prompts_that_are_too_long_are_dropped_and_counted(tmp_path):
    rows = [{"question": "say", "answer": ""}, {"question": "say it " * 40, "answer": ""}]
    env = vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric([making.share_of_e]))
    trainer = making.trainer(tmp_path, env=env, max_prompt_length=64)
    assert (trainer.dropped_prompts, len(trainer.rows)) == (1, 1)
    with pytest.raises(ValueError, match="all 2 prompts are longer than max_prompt_length=4"):
        making.trainer(tmp_path, env=env, max_prompt_length=4)
    with pytest.raises(ValueError, match="all 2 prompts leave no room for a reply within max_seq_length=8 tokens"):
        making.trainer(tmp_path, env=env, max_seq_length=8)


# --- going on -------------------------------------------------------------------------------------------------------

SCRIPT = """
import sys, pathlib
sys.path.insert(0, {root!r})
from tests.trainers import making
folder = pathlib.Path(sys.argv[1])
trainer = making.trainer(folder, max_steps=8, save_steps=2, peft_config=None, temperature=0.9)
trainer.train(resume=sys.argv[2] == "resume")
"""


def run_script(folder: Path, how: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-W", "error", "-c", SCRIPT.format(root=str(ROOT)), str(folder), how]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE)


@pytest.mark.timeout(900)  # three processes, each of which imports torch
def test_losses_after_a_kill_equal_those_of_a_run_that_was_not_killed(tmp_path):
    whole, killed = run_script(tmp_path / "whole", "new"), run_script(tmp_path / "killed", "new")
    metrics = tmp_path / "killed" / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 400
    while not (metrics.exists() and metrics.read_text().count("\n") >= 5):
        assert killed.poll() is None, killed.communicate()[1].decode()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    resumed = run_script(tmp_path / "killed", "resume")
    for process in (whole, resumed):
        assert not process.communicate(timeout=400)[1].decode(), "it said something on stderr"
        assert process.returncode == 0
    wanted, found = lines(tmp_path / "whole"), lines(tmp_path / "killed")
    for name in ("step", "loss", "reward", "grad_norm", "entropy"):
        assert [one.get(name) for one in found if "loss" in one] == [one.get(name) for one in wanted if "loss" in one]
    assert [one["step"] for one in found if "loss" in one] == list(range(1, 9))


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    making.trainer(tmp_path, save_steps=3).train()
    other = making.trainer(tmp_path, model=tiny.model(tiny.tokenizer(), layers=3))
    with pytest.raises(ValueError, match=r"checkpoint of another model: model\.layers\.2"):
        other.train(resume=True)


def test_a_run_directory_in_use_is_refused(tmp_path):
    trainer = making.trainer(tmp_path)
    trainer.train()
    with pytest.raises(FileExistsError, match="resume"):
        making.trainer(tmp_path).train()
    with vf.RunDir.open(tmp_path / "run").lock(), pytest.raises(RuntimeError, match="process"):
        making.trainer(tmp_path).train(resume=True)


def test_resume_needs_something_to_resume(tmp_path):
    with pytest.raises(FileNotFoundError, match="no training to resume"):
        making.trainer(tmp_path).train(resume=True)
    with pytest.raises(ValueError, match="needs output_dir or run_name"):
        making.trainer(tmp_path, output_dir=None).train(resume=True)


def test_a_training_does_not_go_on_in_the_run_directory_of_an_evaluation(tmp_path):
    trainer = making.trainer(tmp_path)
    trainer.env.evaluate(client=vf.FakeClient("a"), model="m", results_path=tmp_path / "run")
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    with pytest.raises(ValueError, match="is the run of an evaluation, not of a training; use another folder"):
        trainer.train(resume=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


def test_old_checkpoints_are_removed(tmp_path):
    making.trainer(tmp_path, max_steps=4, save_steps=1, save_total_limit=2).train()
    assert sorted(one.name for one in (tmp_path / "run" / "checkpoints").iterdir()) == ["step-000003", "step-000004"]


def test_a_run_that_went_back_to_an_earlier_checkpoint_keeps_what_it_saves_and_goes_on_from_there(tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    making.trainer(tmp_path, max_steps=4, save_steps=2).train()
    back = making.trainer(tmp_path, max_steps=3, save_steps=1, save_total_limit=1)
    back.train(resume=folder / "step-000002")
    assert sorted(one.name for one in folder.iterdir()) == ["abandoned-step-000004", "step-000003"]
    report = making.trainer(tmp_path, max_steps=4).train(resume=True)
    assert [one["step"] for one in report.steps] == [1, 2, 3, 4]


def test_a_run_that_goes_back_twice_keeps_what_it_abandoned_each_time(tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    making.trainer(tmp_path, max_steps=2, save_steps=1).train()
    kept = [(folder / "step-000002" / "model.safetensors").read_bytes()]
    for rate in (1e-2, 2e-2):
        making.trainer(tmp_path, max_steps=2, save_steps=1, learning_rate=rate).train(resume=folder / "step-000001")
        kept.append((folder / "step-000002" / "model.safetensors").read_bytes())
    names = ["abandoned-step-000002", "abandoned-2-step-000002", "step-000002"]
    assert [(folder / name / "model.safetensors").read_bytes() for name in names] == kept
    assert len(set(kept)) == 3


def test_what_is_saved_can_be_loaded_and_says_the_same(tmp_path):
    trainer = making.trainer(tmp_path)
    trainer.train()
    trainer.save_model(tmp_path / "model")
    loaded, tokenizer = vf.get_model_and_tokenizer(str(tmp_path / "model"))
    for mine, its in zip(trainer.model.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(mine, its)
    assert tokenizer.chat_template == trainer.tokenizer.chat_template


# --- offline --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["columns", "rows", "pt", "jsonl", "results"])
def test_saved_rollouts_are_learned_from(tmp_path, form):
    env = making.environment()
    results = env.generate(model=None, client=vf.FakeClient(lambda messages: "eee"), n_samples=2, use_tqdm=False)
    prompts = [[{"role": "user", "content": f"say {i // 4}"}] for i in range(16)]
    completions = [[{"role": "assistant", "content": "e" * (i % 4) + "abc"}] for i in range(16)]
    rewards = [(i % 4) / 4 for i in range(16)]
    dataset: Any = {"prompts": prompts, "completions": completions, "rewards": rewards}
    if form == "pt":
        torch.save(dataset, tmp_path / "data.pt")
        dataset = tmp_path / "data.pt"
    elif form != "columns":
        rows = [
            {"prompt": prompt, "completion": completion, "reward": reward, "example_id": i}
            for i, (prompt, completion, reward) in enumerate(zip(prompts, completions, rewards, strict=True))
        ]
        dataset = rows
        if form == "jsonl":
            dataset = tmp_path / "data.jsonl"
            dataset.write_text("".join(json.dumps(row) + "\n" for row in rows))
        elif form == "results":
            for i, state in enumerate(results.rollouts):
                state["reward"] = float(i)
                state["input"]["prompt"] = prompts[0]
            dataset = results
    tokenizer = tiny.tokenizer()
    trainer = vf.GRPOTrainer(
        model=tiny.model(tokenizer), tokenizer=tokenizer, dataset=dataset, config=making.config(tmp_path, max_steps=6)
    )
    report = trainer.train()
    assert len(report.steps) == 6
    assert all(math.isfinite(step["loss"]) for step in report.steps)
    assert any(step["grad_norm"] > 0 for step in report.steps)


def test_a_file_that_could_run_code_is_not_read(tmp_path):
    torch.save({"prompts": [Path("x")], "completions": [""], "rewards": [0.0]}, tmp_path / "bad.pt")
    with pytest.raises(ValueError, match="more than plain data"):
        vf.GRPOTrainer(model="none", dataset=tmp_path / "bad.pt")


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.json", "{", r"a\.json is not JSON"),
        ("a.json", "[1, 2]", r"a\.json holds no rows"),
        (
            "a.json",
            '{"prompt": "a", "completion": "b"}',
            "each column of a data set must be a list; '(prompt|completion)' is",
        ),
        ("a.parquet", "PAR", r"a\.parquet is not a readable parquet file"),
        (
            "a.jsonl",
            '{"prompt": "a", "completion": "b", "reward": 1}\n{"completion": "b", "reward": 1}',
            "row 1 has no p",
        ),
    ],
)
def test_a_file_that_is_no_data_set_is_told_in_one_sentence(tmp_path, name, text, said):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=said):
        vf.GRPOTrainer(model="none", dataset=tmp_path / name)


def test_saved_rollouts_longer_than_the_model_has_positions_are_left_out_and_counted(tmp_path):
    saved = {"prompts": ["say"] * 4, "completions": ["e" * 600, "a", "e", "b"], "rewards": [1.0, 0.0, 1.0, 0.0]}
    report = making.trainer(tmp_path / "a", dataset=saved, batch_size=4, max_steps=1).train()
    assert report.last["refused"] == 1
    assert "it has 603 tokens, more than the limit of 512" in report.last["refused_reasons"][0]
    assert report.last["trained_tokens"] == 3
    with pytest.raises(ValueError, match=r"none of 4 rollouts can be trained on; \d of them: it has \d+ tokens"):
        making.trainer(tmp_path / "b", dataset=saved, batch_size=4, max_steps=1, max_seq_length=2).train()


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        ({"rewards": ["good", 0.0]}, "reward of saved rollout 0 is 'good'"),
        ({"completions": ["a", 2]}, "rollout 1 must be text"),
    ],
)
def test_saved_rollouts_with_odd_values_are_told_in_one_sentence(odd, said):
    with pytest.raises(ValueError, match=said):
        vf.GRPOTrainer(
            model="none", dataset={"prompts": ["a"] * 2, "completions": ["a", "b"], "rewards": [0, 1], **odd}
        )


def test_a_data_set_without_two_completions_to_a_prompt_is_refused():
    with pytest.raises(ValueError, match="no prompt in this data set has two completions"):
        vf.GRPOTrainer(model="none", dataset={"prompts": ["a", "b"], "completions": ["x", "y"], "rewards": [0.0, 1.0]})


# --- bad input ------------------------------------------------------------------------------------------------------


def test_bad_input_is_one_sentence_before_the_first_step(tmp_path):
    with pytest.raises(ValueError, match="must be a multiple of group_size = 3"):
        making.trainer(tmp_path, batch_size=16, group_size=3)
    with pytest.raises(ValueError, match="has no reward"):
        making.trainer(tmp_path, env=making.environment(rubric=vf.Rubric([])))
    with pytest.raises(TypeError, match="env must be an environment"):
        vf.GRPOTrainer(model="none", env="arithmetic")
    with pytest.raises(ValueError, match="no chat template"):
        vf.GRPOTrainer(
            model=tiny.model(tiny.tokenizer()),
            tokenizer=tiny.tokenizer(None),
            env=making.environment(),
            config=making.config(tmp_path),
        )
    tokenizer = tiny.tokenizer()
    tokenizer.pad_token = tokenizer.eos_token = None
    with pytest.raises(ValueError, match="neither a pad nor an end token"):
        vf.GRPOTrainer(model=tiny.model(tiny.tokenizer()), tokenizer=tokenizer, env=making.environment())
    with pytest.raises(ValueError, match="fp16=True needs a GPU"):
        making.trainer(tmp_path, fp16=True)
    with pytest.raises(ValueError, match="weight_server"):
        making.trainer(tmp_path, client=vf.FakeClient("x"))
    with pytest.raises(TypeError, match="the same thing"):
        vf.GRPOTrainer(model="none", env=making.environment(), config={}, args={})


def test_no_memory_for_it_is_said_with_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr("verifiers.trainers.memory.job.free_memory", lambda device: 1000)
    with pytest.raises(ValueError, match=r"needs .* at its peak .* but .* are free on cpu"):
        making.trainer(tmp_path)


def test_without_a_tokenizer_the_models_own_folder_is_asked(tmp_path):
    tokenizer = tiny.tokenizer()
    model = tiny.model(tokenizer)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    for given in (str(tmp_path / "model"), vf.get_model(str(tmp_path / "model"))):
        trainer = vf.GRPOTrainer(model=given, env=making.environment(), config=making.config(tmp_path / str(id(given))))
        assert trainer.tokenizer.chat_template == tokenizer.chat_template
        assert len(trainer.train().steps) == 3


# --- the rest of the interface --------------------------------------------------------------------------------------


def test_evaluation_and_callbacks_as_it_goes(tmp_path):
    seen: list[str] = []

    class Listens:
        def on_train_begin(self, trainer: Any) -> None:
            seen.append("begin")

        def on_evaluate(self, trainer: Any, results: Any) -> None:
            seen.append(f"eval {len(results.rollouts)}")

        def on_train_end(self, trainer: Any) -> None:
            seen.append("end")

    def stops(trainer: Any, figures: Any) -> None:
        trainer.should_stop = figures["step"] == 4

    making.trainer(
        tmp_path,
        max_steps=9,
        eval_steps=2,
        eval_examples=5,
        callbacks=[Listens(), stops],
        eval_dataset=[{"question": f"say {i}", "answer": ""} for i in range(8)],
    ).train()
    assert seen == ["begin", "eval 5", "eval 5", "end"]
    assert [(one["step"], one["eval"]["n"]) for one in lines(tmp_path) if "eval" in one] == [(2, 5), (4, 5)]


def test_generate_gives_text_with_its_messages(tmp_path):
    replies = making.trainer(tmp_path).generate(["hello", [{"role": "user", "content": "hello"}]])
    assert all(isinstance(reply, Reply) and reply.messages[0]["content"] == reply for reply in replies)


def test_a_row_sampler_and_a_weight_schedule_are_plain_arguments(tmp_path):
    asked: list[float] = []

    def easy_first(rows: Any, epochs: float) -> Any:
        asked.append(epochs)
        return [row for row in rows if row["difficulty"] == ("easy" if epochs < 0.5 else "hard")]

    def one(completion: Any) -> float:
        return 1.0

    rubric = vf.Rubric([making.share_of_e, one], [1.0, 0.0])
    env = making.environment(rubric=rubric)
    report = making.trainer(
        tmp_path, env=env, max_steps=4, row_sampler=easy_first, weight_schedule=lambda epochs: [1.0, 10.0 * epochs]
    ).train()
    assert asked == [0.0, 0.25, 0.5, 0.75]
    assert report.steps[2]["reward"] >= 5.0 > report.steps[0]["reward"]
    assert rubric.weights == [1.0, 0.0]
    records = [json.loads(line) for line in (tmp_path / "run" / "results.jsonl").read_text().splitlines()]
    odd = {record["step"]: set() for record in records}
    for record in records:
        odd[record["step"]].add(int(record["answer"]) % 2)
    assert odd == {1: {1}, 2: {1}, 3: {0}, 4: {0}}


# --- several processes ----------------------------------------------------------------------------------------------

SHARED = """
import json, sys, pathlib
sys.path.insert(0, {root!r})
from tests.trainers import making
folder = pathlib.Path(sys.argv[1])
trainer = making.trainer(folder, max_steps=3, batch_size=8, save_steps=3)
report = trainer.train()
total = float(sum(one.detach().double().sum() for one in trainer.model.parameters()))
trainer.rows.cursor = 0
rows = [row["example_id"] for row in trainer.rows.take(8)]
(folder / f"process-{{trainer.accelerator.process_index}}").write_text(json.dumps([total, rows]))
"""


@pytest.mark.slow
def test_two_processes_take_rows_of_their_own_and_end_with_the_same_weights(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SHARED.format(root=str(ROOT)))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", free_port()]
    done = subprocess.run(
        [*command, str(script), str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "ACCELERATE_USE_CPU": "true"},
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    first, second = (json.loads((tmp_path / f"process-{i}").read_text()) for i in (0, 1))
    assert first[0] == second[0]
    assert sorted(first[1] + second[1]) == list(range(16))
    assert len(lines(tmp_path)) >= 3
