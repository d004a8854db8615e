"""``vf train`` and ``vf sft``: what they train, what they print, what they leave behind, how they end."""

from __future__ import annotations

import json
import re
import shlex
import signal
import time
from pathlib import Path

import pytest

import verifiers as vf

ENV_ARGS = '{"length": 2, "alphabet": "abc", "use_tags": false, "system_prompt": "Go.", "num_eval_examples": 8}'
SMALL = ("--batch-size", "8", "--group-size", "4", "--max-new-tokens", "3", "--learning-rate", "1e-3")


@pytest.fixture
def model(folder: Path) -> str:
    """A folder with a model of a few thousand parameters."""
    made, tokenizer = vf.tiny_model("abcGo.", hidden_size=16, heads=2, layers=1)
    made.save_pretrained(folder / "tiny")
    tokenizer.save_pretrained(folder / "tiny")
    return "./tiny"


def train_words(model: str, *more: str) -> list[str]:
    return ["train", "reverse-text", "-m", model, "-a", ENV_ARGS, *SMALL, *more]


def metrics(path: str | Path) -> list[dict]:
    return [json.loads(line) for line in (Path(path) / "metrics.jsonl").read_text().splitlines()]


def steps(path: str | Path) -> list[int]:
    return [line["step"] for line in metrics(path) if "loss" in line]


# --- training -----------------------------------------------------------------------------------------------------


def test_a_training_leaves_a_run_and_a_model_and_says_where(run, model, folder):
    result = run(*train_words(model, "--max-steps", "2", "--output-dir", "out"))
    assert re.search(r"reward \d\.\d{3} → \d\.\d{3} in 2 steps", result.stdout)
    assert "model: out/model" in result.stdout
    assert "run: out (vf view out)" in result.stdout
    assert "step 2/2" in result.stderr
    assert steps("out") == [1, 2]
    assert json.loads((folder / "out" / "metadata.json").read_text())["finished"] is True
    assert vf.get_tokenizer(str(folder / "out" / "model")).eos_token == "<|end|>"


def test_a_short_training_is_told_by_its_first_and_its_last_step(run, model):
    said = run(*train_words(model, "--max-steps", "3", "--output-dir", "out")).stdout
    rewards = [line["reward"] for line in metrics("out") if "loss" in line]
    assert rewards[0] != rewards[-1]
    assert f"reward {rewards[0]:.3f} → {rewards[-1]:.3f} in 3 steps\n" in said


def test_a_training_of_one_step_has_one_reward(run, model):
    said = run(*train_words(model, "--max-steps", "1", "--output-dir", "out")).stdout
    assert re.match(r"reward \d\.\d{3} in 1 step\n", said)


def test_evaluations_before_and_after_are_told_with_their_intervals(run, model):
    result = run(*train_words(model, "--max-steps", "1", "--output-dir", "out", "--eval-before-after"))
    interval = r"\d\.\d{3} \(-?\d\.\d{3} to \d\.\d{3}\)"
    assert re.search(rf"evaluation before {interval}, after {interval}; 8 rollouts each", result.stdout)
    assert [line["step"] for line in metrics("out") if "eval" in line] == [0, 1]


def test_another_process_samples_where_the_command_line_says_so(run, model, folder):
    from verifiers.engine.server.server import LocalServer

    with vf.LocalModel(model) as local, LocalServer(local) as server:
        words = ("--sampler", server.url, "--num-batches-ahead", "1", "--output-dir", "out")
        run(*train_words(model, "--max-steps", "2", *words))
    assert [line["staleness_max"] for line in metrics("out") if "loss" in line] == [0, 1]


def test_a_sampler_that_is_not_there_is_one_sentence_and_leaves_no_run(run, model, folder):
    words = train_words(model, "--sampler", "http://127.0.0.1:9/v1", "--output-dir", "out")
    said = run(*words, code=2).stderr.splitlines()[-1]
    assert "the sampler http://127.0.0.1:9 cannot be trained with" in said
    assert not (folder / "out").exists()
    assert "this environment variable is not set" in run(*words, "--sampler-key-var", "NO_SUCH", code=2).stderr


def test_a_file_says_everything_and_the_command_line_wins(run, model, folder):
    (folder / "config.toml").write_text(
        f'model = "{model}"\nnum_generations = 2\n[train]\nbatch-size = 4\n'.replace("batch-size", "batch_size")
        + "max_steps = 9\nmax_tokens = 3\nbf16 = false\n"
        + '[env]\nid = "reverse-text"\nlength = 2\nalphabet = "abc"\nuse_tags = false\nsystem_prompt = "Go."\n'
        + "[lora]\nr = 2\n"
    )
    for words in (["@", "config.toml"], ["@config.toml"]):
        result = run("train", *words, "--max_steps", "3", "--dry-run")
        assert "2 prompts × 2 rollouts of at most 3 tokens" in result.stdout
        assert re.search(r"steps +3 ", result.stdout)
        assert re.search(r"trained +[\d,]+ of [\d,]+ parameters", result.stdout)
        assert "a dry run: nothing was trained or written" in result.stdout
    assert not (folder / "outputs").exists()


def test_names_are_taken_with_dashes_underscores_and_aliases(run, model):
    result = run(
        *train_words(model, "--num_train_epochs", "0.5", "--beta", "0.1", "--max-grad-norm", "none", "--dry-run")
    )
    assert "num_epochs=0.5" in result.stdout
    assert "kl_coef=0.1" in result.stdout


def test_the_advantage_and_the_loss_are_named_on_the_command_line_and_in_a_file(run, model, folder):
    (folder / "job.toml").write_text('advantage = "rloo"\nloss = "sapo"\n')
    shown = run(*train_words(model, "--dry-run", "--advantage", "rloo", "--loss", "cispo")).stdout
    assert "loss_type='cispo'" in shown
    assert "advantage='rloo'" in shown
    shown = run(*train_words(model, "--dry-run", "--config", "job.toml", "--entropy-coef", "0.01")).stdout
    assert "loss_type='sapo'" in shown
    assert "advantage='rloo'" in shown
    assert "entropy_coef=0.01" in shown


def test_a_stopped_training_goes_on_where_it_was(run, model):
    run(*train_words(model, "--max-steps", "4", "--output-dir", "out", "--save-steps", "2"))
    whole = {line["step"]: line["loss"] for line in metrics("out") if "loss" in line}
    run(*train_words(model, "--max-steps", "2", "--output-dir", "part", "--save-steps", "2"))
    run(*train_words(model, "--max-steps", "4", "--resume", "part"))
    assert {line["step"]: line["loss"] for line in metrics("part") if "loss" in line} == whole


@pytest.mark.parametrize("command", ["train", "sft"])
def test_a_folder_to_resume_that_does_not_exist_is_refused_before_anything_is_loaded(run, command):
    for words in (["--resume", "nowhere"], ["--resume", "--output-dir", "nowhere"]):
        said = run(command, "no-such-environment", "-m", "./no-such-model", *words, code=2).stderr
        assert "--resume nowhere: there is no training to resume there" in said
        assert "loading" not in said
    assert not Path("nowhere").exists()


@pytest.mark.timeout(300)
def test_ctrl_c_saves_a_checkpoint_and_says_how_to_go_on(start, run, model):
    process = start(*train_words(model, "--max-steps", "100000", "--output-dir", "out"))
    wait_for(lambda: Path("out/metrics.jsonl").is_file() and steps("out"), process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    done = int(re.search(r"stopped by Ctrl-C after step (\d+); continue with: (.+)", out)[1])
    assert Path(f"out/checkpoints/step-{done:06d}/model.safetensors").is_file()
    assert json.loads(Path("out/metadata.json").read_text())["finished"] is False
    again = shlex.split(re.search(r"continue with: vf (.+)", out)[1])
    assert again[-2:] == ["--resume", "out"]
    run(*[str(done + 1) if word == "100000" else word for word in again])
    assert steps("out") == list(range(1, done + 2))


def wait_for(is_so, process, seconds: int = 60) -> None:
    for _ in range(10 * seconds):
        if is_so():
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    process.kill()
    raise AssertionError(f"nothing was trained within {seconds} seconds")


# --- what is wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "reverse-text"], "no model to train"),
        (["train", "-m", "./tiny"], "no environment to train on"),
        (["train", "reverse-text", "-m", "./tiny", "--group-size", "3"], "must be a multiple of group_size = 3"),
        (["train", "reverse-text", "-m", "./tiny", "--group-size", "x"], "'x' is not a whole number"),
        (["train", "reverse-text", "-m", "./tiny", "--groupsize", "3"], "--group-size"),
        (["train", "reverse-text", "-m", "./tiny", "--loss-type", "magic"], "loss_type must be one of grpo"),
        (["train", "reverse-text", "-m", "./tiny", "--advantage", "gae"], "advantage must be one of grpo"),
        (["train", "@", "missing.toml"], "missing.toml cannot be read"),
        (["train", "reverse-text", "-m", "./tiny", "--resume"], "--resume needs the path of a run"),
        (["sft", "-m", "./tiny"], "no examples to train on"),
        (["sft", "-m", "./tiny", "-d", "nowhere.jsonl"], "there is no data set at nowhere.jsonl"),
    ],
    ids=["model", "env", "group", "number", "unknown", "choice", "advantage", "file", "resume", "data", "path"],
)
def test_what_is_wrong_is_one_sentence(run, model, words, message):
    result = run(*words, code=1 if "-d" in words else 2)
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_processes_that_cannot_share_a_batch_are_refused_before_any_is_started(run, model):
    words = train_words(model, "--launch", "ddp", "--processes")
    said = run(*words, "3", code=2).stderr
    assert (
        "batch_size = 8 cannot be divided among 3 processes, each with whole groups of group_size = 4: use 12" in said
    )
    assert "use 16, or another number of processes" in run(*words, "4", code=2).stderr
    alone = run(*train_words(model, "--processes", "2"), code=2)
    assert "--processes needs --launch" in alone.stderr


@pytest.mark.timeout(400)
def test_what_fails_in_every_process_is_one_sentence_and_none_is_left(start, model):
    """The model is a folder without one; both processes say so, and the first is heard."""
    process = start(*train_words("./nowhere", "--launch", "fsdp2", "--processes", "2"))
    said = process.communicate(timeout=300)[1]
    assert process.returncode == 1
    assert "there is no model at nowhere" in said
    assert said.count("the training cannot start") == 1
    assert "Traceback" not in said


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_processes_of_one_command_train_what_one_does(run, start, model, folder):
    """The batch stays that of all; a training that two began is gone on with by one."""
    words = train_words(model, "--max-steps", "2", "--save-steps", "2")
    run(*words, "--output-dir", "one")
    losses = [line["loss"] for line in metrics("one") if "loss" in line]
    for engine in ("ddp", "fsdp2"):
        process = start(*words, "--output-dir", engine, "--launch", engine, "--processes", "2")
        said = process.communicate(timeout=600)
        assert process.returncode == 0, said[1]
        assert said[0].count(f"model: {engine}/model") == 1
        assert [line["loss"] for line in metrics(engine) if "loss" in line] == pytest.approx(losses, abs=5e-5)
        assert vf.get_model(str(folder / engine / "model")) is not None
        (checkpoint,) = (folder / engine / "checkpoints").iterdir()
        assert f"model: {engine}-exported" in run("export", "model", str(checkpoint), "-o", f"{engine}-exported").stdout
        assert vf.get_model(str(folder / f"{engine}-exported")) is not None
        run(*words[:-4], "--max-steps", "3", "--output-dir", engine, "--resume")
        assert steps(engine) == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_launched_processes_stop_together(start, model, folder, number):
    """Ctrl-C finishes the step of all and saves; a process that is killed takes the others with it."""
    import psutil

    words = train_words(model, "--max-steps", "5000", "--output-dir", "out", "--launch", "fsdp2", "--processes", "2")
    process = start(*words)
    wait_for(lambda: Path("out/metrics.jsonl").is_file() and steps("out"), process, seconds=300)
    ranks = [one for one in psutil.Process(process.pid).children() if "verifiers" in one.cmdline()]
    assert len(ranks) == 2
    if number == signal.SIGINT:
        process.send_signal(number)
    else:
        ranks[1].send_signal(number)
    said = process.communicate(timeout=300)
    assert not any(one.is_running() for one in ranks)
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert "stopped by Ctrl-C after step" in said[0]
        assert "--launch fsdp2 --processes 2" in said[0]
        assert list((folder / "out" / "checkpoints").glob("step-*/shards"))
    else:
        assert process.returncode == 137
        assert "process 1 was ended by SIGKILL, and the others with it" in said[1]


def test_an_unknown_key_of_a_file_is_named_with_the_nearest(run, model, folder):
    (folder / "config.toml").write_text("[train]\ngroupsize = 4\n")
    result = run("train", "reverse-text", "-m", model, "@config.toml", code=2)
    assert "config.toml: GRPOConfig has no 'groupsize'; did you mean 'group_size'?" in result.stderr
    (folder / "config.toml").write_text("max_steps = = 4\n")
    result = run("train", "reverse-text", "-m", model, "@config.toml", code=2)
    assert "config.toml is not TOML: Invalid value (at line 1, column 13)" in result.stderr


# --- imitation ----------------------------------------------------------------------------------------------------


def test_the_answers_of_an_environment_are_imitated(run, model):
    words = ("--max-steps", "3", "--batch-size", "8", "--output-dir", "out", "--learning-rate", "1e-2")
    result = run("sft", "reverse-text", "-m", model, "-a", ENV_ARGS, *words)
    assert re.search(r"loss \d\.\d{3} → \d\.\d{3} in 3 steps", result.stdout)
    assert steps("out") == [1, 2, 3]
    run("train", "reverse-text", "-m", "out/model", "-a", ENV_ARGS, *SMALL, "--max-steps", "1", "--output-dir", "next")


def test_rows_of_a_file_are_imitated_and_a_dry_run_counts_them(run, model, folder):
    rows = [{"prompt": "ab", "completion": "ba", "reward": i % 2} for i in range(6)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = run("sft", "-m", model, "-d", "rows.jsonl", "--min-reward", "1", "--dry-run")
    assert "3 with 9 tokens to train on (left out: 3 below min_reward)" in result.stdout
    run("sft", "-m", model, "-d", "rows.jsonl", "--max-steps", "1", "--output-dir", "out", "--save-model", "kept")
    assert (folder / "kept" / "model.safetensors").is_file()
