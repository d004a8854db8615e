"""``vf plan``: a configuration and some cards → a table and a line to launch."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128, "hidden_size": 4096,
    "intermediate_size": 12288, "max_position_embeddings": 40960, "num_attention_heads": 32, "num_hidden_layers": 36,
    "num_key_value_heads": 8, "tie_word_embeddings": False, "vocab_size": 151936,
}  # fmt: skip


@pytest.fixture
def model(folder):
    (folder / "qwen").mkdir()
    (folder / "qwen" / "config.json").write_text(json.dumps(QWEN3_8B))
    return "./qwen"


def test_a_model_and_cards_give_a_table_and_the_line_that_launches_the_best_that_fits(run, model):
    shown = run("plan", model, "--gpus", "4x24GB", "--length", "4096").stdout
    assert "./qwen: 8.19B parameters in bfloat16; 4 × 24.0 GB (GPU)" in shown
    rows = {tuple(line.split()[:4]): line for line in shown.splitlines()}
    header = next(line for line in shown.splitlines() if line.startswith("trained"))
    for part in ("weights", "gradients", "optimizer", "KV cache", "activations", "logits", "peak", "fits"):
        assert part in header
    assert rows["all", "weights", "adamw", "fsdp2"].rstrip().endswith("no")
    assert "yes" in rows["LoRA", "adamw", "fsdp2", "4.1"]
    launch = shown.splitlines()[-1]
    assert launch.startswith("launch: vf train ENV -m ./qwen --lora --max-seq-length 4096")
    assert launch.endswith("--launch fsdp2 --processes 4")


def test_in_a_terminal_too_narrow_for_the_parts_the_plan_shows_the_peak(in_terminal, model):
    lines = in_terminal(80, "plan", model, "--gpus", "4x24GB")
    assert max(len(line) for line in lines if not line.startswith("launch: ")) <= 80
    assert any(line.split() == ["trained", "optim", "sharding", "peak", "host", "fits"] for line in lines)
    assert any("logits" in line for line in in_terminal(140, "plan", model, "--gpus", "4x24GB"))


def test_more_memory_lets_all_weights_learn_and_one_card_needs_no_launcher(run, model):
    assert run("plan", model, "--gpus", "8x80GB").stdout.splitlines()[-1].endswith("--launch zero2 --processes 8")
    alone = run("plan", f"{model}/config.json", "--gpus", "141GB", "--length", "2048").stdout.splitlines()[-1]
    assert "--optim adamw_8bit" in alone
    assert " -m qwen " in alone
    assert "--launch" not in alone


def test_the_line_that_is_printed_is_one_that_vf_train_understands(run, model):
    from click.testing import CliRunner

    from verifiers.cli.train import train

    launch = run("plan", model, "--gpus", "24GB").stdout.splitlines()[-1]
    words = launch.removeprefix("launch: vf train ").split()
    assert "--load-in-4bit" in words
    result = CliRunner().invoke(train, [*words, "--help"])
    assert result.exit_code == 0, result.output
    with train.make_context("train", words) as context:
        assert context.params["max_seq_length"] == 4096
        assert context.params["load_in_4bit"] is True


def test_what_fits_nowhere_is_said_and_fails(run, model):
    assert "nothing fits" in run("plan", model, "--gpus", "1x4GB", code=1).stdout


def test_bad_input_is_one_sentence(run, model, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert (
        "'4by8' is not a number of GPUs with their memory: write 4x24GB"
        in run("plan", model, "--gpus", "4by8", code=2).stderr
    )
    assert (
        "is more than the context length of" in run("plan", model, "--gpus", "80GB", "--length", "99999", code=2).stderr
    )
    assert "no such file or folder" in run("plan", "./nothing", "--gpus", "80GB", code=1).stderr
    said = run("plan", "some/model", "--gpus", "80GB", code=1).stderr
    assert "the configuration of some/model cannot be loaded" in said


def test_a_model_of_few_positions_is_planned_for_as_many(run, folder):
    (folder / "short.json").write_text(json.dumps({**QWEN3_8B, "max_position_embeddings": 1024}))
    assert "sequences of 1,024 tokens" in run("plan", "short.json", "--gpus", "8x80GB").stdout


@pytest.mark.parametrize(("gpus", "rollouts", "batch"), [("3x80GB", "32", "48"), ("4x80GB", "1", "32")])
def test_the_batch_of_the_printed_line_is_whole_groups_on_each_card(run, model, gpus, rollouts, batch):
    from verifiers.cli.launch import _check_batch
    from verifiers.trainers.config import GRPOConfig

    shown = run("plan", model, "--gpus", gpus, "--rollouts", rollouts).stdout
    assert f" {batch} rollouts a step" in shown
    words = shown.splitlines()[-1].split()
    assert words[words.index("--batch-size") + 1] == batch
    _check_batch(GRPOConfig(batch_size=int(batch)), int(gpus[0]))  # what vf train asks of it


def test_a_configuration_of_which_no_model_can_be_made_and_cards_past_counting_are_refused(run, model, folder):
    (folder / "wrong.json").write_text(json.dumps({**QWEN3_8B, "hidden_size": -4}))
    said = run("plan", "wrong.json", "--gpus", "80GB", code=1).stderr
    assert "the configuration of wrong.json does not define a valid model" in said
    assert len(said.strip().splitlines()) == 1
    assert "not a number of GPUs" in run("plan", model, "--gpus", "999999999x80GB", code=2).stderr
