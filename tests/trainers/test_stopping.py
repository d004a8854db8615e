"""A training that cannot go on stops with its cause, and leaves its last good checkpoint behind."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("accelerate")

from click.testing import CliRunner  # noqa: E402

import verifiers as vf  # noqa: E402
from tests.engine import tiny  # noqa: E402
from tests.trainers import making  # noqa: E402
from verifiers.cli.main import vf as program  # noqa: E402
from verifiers.trainers.checkpoints import checkpoints  # noqa: E402
from verifiers.trainers.stopping import NotFiniteError, TrainingStoppedError  # noqa: E402


def down(completion: Any) -> float:
    raise ConnectionError("the judge is down")


# --- nothing was scored ---------------------------------------------------------------------------------------------


def test_a_training_whose_every_rollout_fails_stops_with_the_first_cause(tmp_path):
    trainer = making.trainer(tmp_path, env=making.environment(rubric=vf.Rubric([down])))
    with pytest.raises(TrainingStoppedError, match=r"all 16 rollouts of a step failed.*the judge is down") as caught:
        trainer.train()
    assert "the judge is down" in str(caught.value.__cause__)
    kept = [json.loads(line) for line in (tmp_path / "run" / "results.jsonl").read_text().splitlines()]
    assert kept
    assert all("the judge is down" in json.dumps(record["error"]) for record in kept)
    assert trainer.step == 0


def test_one_rollout_that_was_scored_is_enough_to_go_on(tmp_path):
    seen: list[int] = []

    def nearly_down(completion: Any) -> float:
        seen.append(1)
        if len(seen) % 16:
            raise ConnectionError("the judge is down")
        return 1.0

    report = making.trainer(tmp_path, env=making.environment(rubric=vf.Rubric([nearly_down]))).train()
    assert [(step["failed"], step["samples"]) for step in report.steps] == [(15, 1)] * 3


def test_a_reward_of_ones_own_that_is_no_number_is_a_failure_and_trains_nothing(tmp_path):
    class Undecided(vf.GRPOTrainer):
        def compute_rewards(self, completions: Any, prompts: Any) -> Any:
            rewards = super().compute_rewards(completions, prompts)
            return [math.nan if i % 2 else reward for i, reward in enumerate(rewards)]

    trainer = making.trainer(tmp_path, Undecided)
    report = trainer.train()
    assert [(step["failed"], step["samples"]) for step in report.steps] == [(8, 8)] * 3
    assert all(math.isfinite(step["loss"]) and math.isfinite(step["grad_norm"]) for step in report.steps)


def test_vf_train_exits_with_1_and_the_cause_when_every_rollout_fails(tmp_path):
    package = tmp_path / "broken_env"
    package.mkdir()
    (package / "broken_env.py").write_text(
        "import verifiers as vf\n"
        "def down(completion):\n    raise ConnectionError('the judge is down')\n"
        "def load_environment():\n"
        "    rows = [{'question': f'say {i}', 'answer': ''} for i in range(8)]\n"
        "    return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric([down]))\n"
    )
    saved(tmp_path / "model")
    done = vf_train(tmp_path, "broken-env", "--env-dir-path", str(tmp_path))
    assert done.exit_code == 1
    assert "the judge is down" in done.output


def vf_train(folder: Path, *words: str) -> Any:
    sizes = ("--max-steps", "5", "--batch-size", "8", "--group-size", "4", "--max-new-tokens", "4")
    places = ("-m", str(folder / "model"), "--output-dir", str(folder / "run"))
    return CliRunner().invoke(program, ["train", *words, *sizes, *places])


def saved(folder: Path) -> None:
    tokenizer = tiny.tokenizer()
    tiny.model(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# --- weights --------------------------------------------------------------------------------------------------------


def spoil_after(step: int) -> Any:
    """A callback that puts a NaN into the weights after a step, so that the next one begins with it."""

    def callback(trainer: Any, figures: Any) -> None:
        if figures["step"] == step:
            with torch.no_grad():
                next(trainer.model.parameters()).view(-1)[0] = math.nan

    return callback


class Explodes(vf.GRPOTrainer):
    """Its third update leaves infinite weights behind."""

    def train_step(self, batch: Any) -> Any:
        if self.step == 2:
            with torch.no_grad():
                self.weights.masters[1].view(-1)[3] = math.inf
        return super().train_step(batch)


def test_a_training_stops_at_the_first_weight_that_is_not_finite_and_keeps_the_last_good_checkpoint(tmp_path):
    trainer = making.trainer(tmp_path, Explodes, max_steps=20, save_steps=1, save_total_limit=1)
    with pytest.raises(NotFiniteError, match=r"weights are not finite after a step: .* the last good checkpoint is"):
        trainer.train()
    (last,) = checkpoints(tmp_path / "run" / "checkpoints")
    assert last.name == "step-000002"
    tensors = torch.load(last / "trainer.pt", weights_only=True)
    assert all(bool(one.isfinite().all()) for one in tensors["masters"])
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2]
    assert any("not finite" in line.get("notice", "") for line in lines)
    report = making.trainer(tmp_path, max_steps=4).train(resume=True)  # and from there it goes on
    assert [step["step"] for step in report.steps] == [1, 2, 3, 4]


def test_weights_that_somebody_else_spoilt_are_not_saved(tmp_path):
    """A callback or a second trainer may write to them too; the checkpoint is due in the same step."""

    class Spoils:
        def on_evaluate(self, trainer: Any, figures: Any) -> None:
            spoil_after(2)(trainer, {"step": trainer.step})

    trainer = making.trainer(
        tmp_path, max_steps=6, eval_steps=1, eval_examples=1, save_steps=1, save_total_limit=1, callbacks=[Spoils()]
    )
    with pytest.raises(NotFiniteError, match="not finite before saving"):
        trainer.train()
    assert [one.name for one in checkpoints(tmp_path / "run" / "checkpoints")] == ["step-000001"]


def test_a_supervised_training_stops_as_well(tmp_path):
    tokenizer = tiny.tokenizer()
    config = {"max_steps": 9, "save_steps": 1, "output_dir": tmp_path / "run", "show_progress": False, "batch_size": 2}
    trainer = vf.SFTTrainer(
        model=tiny.model(tokenizer),
        tokenizer=tokenizer,
        dataset=[{"prompt": "say", "completion": "eee"}] * 4,
        config=config,
        callbacks=[spoil_after(2)],
    )
    with pytest.raises(NotFiniteError, match="step-000002"):
        trainer.train()


def test_a_model_that_is_not_finite_to_begin_with_is_refused(tmp_path):
    model = tiny.model(tiny.tokenizer())
    with torch.no_grad():
        model.model.norm.weight[0] = math.nan
    with pytest.raises(NotFiniteError, match=r"not finite before training: model\.norm\.weight"):
        making.trainer(tmp_path, model=model)


def test_vf_train_exits_with_1_when_the_weights_are_no_longer_finite(tmp_path, monkeypatch):
    saved(tmp_path / "model")
    monkeypatch.setattr("verifiers.trainers.GRPOTrainer", Explodes)
    done = vf_train(tmp_path, "reverse-text", "--save-steps", "1")
    assert done.exit_code == 1, done.output
    assert "not finite" in done.output
    assert "step-000002" in done.output
    assert not (tmp_path / "run" / "model").exists()


# --- dropout --------------------------------------------------------------------------------------------------------


def with_dropout() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    tokenizer = tiny.tokenizer()
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(tokenizer), n_embd=32, n_layer=2, n_head=4, n_positions=256, bos_token_id=0, eos_token_id=2
    )
    assert config.resid_pdrop == config.attn_pdrop == 0.1  # its own defaults
    return GPT2LMHeadModel(config).eval()


@pytest.mark.parametrize("recomputes", [False, True])
def test_dropout_is_off_while_a_policy_learns_and_so_ratios_are_1(tmp_path, recomputes):
    model = with_dropout()
    report = making.trainer(tmp_path, model=model, learning_rate=0.0, gradient_checkpointing=recomputes).train()
    for step in report.steps:
        assert step["grad_norm"] > 0
        assert step["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
        assert step["ratio_max"] == pytest.approx(1.0, abs=1e-3)
    assert not any(module.training for module in model.modules())


def test_dropout_can_be_asked_for(tmp_path):
    report = making.trainer(tmp_path, model=with_dropout(), learning_rate=0.0, disable_dropout=False).train()
    assert max(step["ratio_max"] for step in report.steps) > 1.01


def test_layers_that_drop_out_by_themselves_do_not_when_they_are_checkpointed(tmp_path):
    """OPT's layers call dropout as a function, and are the ones that must be in training mode to be checkpointed."""
    from transformers import OPTConfig, OPTForCausalLM

    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=len(tiny.tokenizer()),
        hidden_size=32,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        word_embed_proj_dim=32,
        max_position_embeddings=256,
        dropout=0.3,
        layerdrop=0.0,
    )
    model = OPTForCausalLM(config).eval()
    report = making.trainer(tmp_path, model=model, learning_rate=0.0, gradient_checkpointing=True).train()
    for step in report.steps:
        assert step["ratio_max"] == pytest.approx(1.0, abs=1e-3)
    assert model.model.decoder.layers[0].dropout == 0.3


# --- the reference --------------------------------------------------------------------------------------------------


def figures_of(report: Any) -> list[tuple[Any, ...]]:
    return [(step["loss"], step["kl"], step["grad_norm"]) for step in report.steps]


@pytest.mark.parametrize(
    "more", [{}, {"sync_ref_model": True, "ref_model_sync_steps": 3, "ref_model_mixup_alpha": 0.5}]
)
@pytest.mark.parametrize("model", ["the same", "trained"])
def test_a_resumed_training_measures_the_divergence_from_the_same_reference(tmp_path, more, model):
    """From what training began with, or what a synced reference had become; whatever weights are handed in."""
    common = {"kl_coef": 0.1, "learning_rate": 0.02, "save_steps": 2, **more}
    whole = making.trainer(tmp_path / "whole", max_steps=6, **common).train()
    first = making.trainer(tmp_path / "cut", max_steps=4, **common)
    first.train()
    given = first.model if model == "trained" else None
    resumed = making.trainer(tmp_path / "cut", max_steps=6, model=given, **common).train(resume=True)
    assert figures_of(resumed) == figures_of(whole)
    assert resumed.steps[-1]["kl"] > 0.01


def test_with_lora_the_reference_is_the_base_model_before_and_after(tmp_path):
    def trainer(folder: str, steps: int) -> Any:
        torch.manual_seed(0)
        return making.trainer(
            tmp_path / folder,
            max_steps=steps,
            kl_coef=0.1,
            learning_rate=0.02,
            save_steps=2,
            peft_config=vf.lora_defaults(r=4),
        )

    whole = trainer("whole", 4).train()
    trainer("cut", 2).train()
    resumed = trainer("cut", 4).train(resume=True)
    assert figures_of(resumed) == figures_of(whole)
    assert not list((tmp_path / "cut").rglob("reference.pt"))


def test_an_unchanged_reference_is_on_disk_once(tmp_path):
    making.trainer(tmp_path, max_steps=4, kl_coef=0.1, save_steps=1, save_total_limit=2).train()
    files = [one / "reference.pt" for one in checkpoints(tmp_path / "run" / "checkpoints")]
    assert len(files) == 2
    assert files[0].samefile(files[1])


def test_a_checkpoint_without_a_reference_is_not_resumed_with_one(tmp_path):
    making.trainer(tmp_path, save_steps=3).train()
    with pytest.raises(ValueError, match="holds no reference model for kl_coef"):
        making.trainer(tmp_path, kl_coef=0.1, max_steps=5).train(resume=True)


def test_a_reference_that_cannot_follow_is_refused_before_the_first_step(tmp_path):
    with pytest.raises(ValueError, match="sync_ref_model needs kl_coef above 0"):
        making.trainer(tmp_path, sync_ref_model=True)
    with pytest.raises(ValueError, match="does not work with LoRA: there the reference is the base model"):
        making.trainer(tmp_path, sync_ref_model=True, kl_coef=0.1, peft_config=vf.lora_defaults(r=4))


# --- small print ----------------------------------------------------------------------------------------------------


def test_an_override_of_compute_rewards_may_pass_the_epoch_on(tmp_path):
    epochs: list[int] = []

    class Later(vf.GRPOTrainer):
        def compute_rewards(self, completions: Any, prompts: Any, epoch: int) -> Any:
            epochs.append(epoch)
            return super().compute_rewards(completions, prompts, epoch)

    making.trainer(tmp_path / "whole", Later, max_steps=5).train()
    assert epochs == [0, 0, 0, 0, 1]
    epochs.clear()
    making.trainer(tmp_path / "ahead", Later, max_steps=7, num_batches_ahead=1).train()  # scored group by group
    assert set(epochs) == {0, 1}


def test_a_run_that_is_resumed_within_an_epoch_knows_which_one_it_is(tmp_path):
    making.trainer(tmp_path, max_steps=5, save_steps=5).train()  # four steps are an epoch
    epochs: list[int] = []
    again = making.trainer(tmp_path, max_steps=6, callbacks=[lambda trainer, _: epochs.append(trainer.epoch)])
    again.train(resume=True)
    assert epochs == [1]


@pytest.mark.parametrize("passes_on", [True, False])
def test_an_override_of_get_batch_may_pass_its_arguments_on_or_have_none(tmp_path, passes_on):
    asked: list[float] = []

    class Own(vf.GRPOTrainer):
        def get_batch(self, *args: Any) -> Any:
            return super().get_batch(*(args if passes_on else ()))

    def rows(every: Any, epochs: float) -> Any:
        asked.append(epochs)
        return every

    making.trainer(tmp_path, Own, max_steps=5, row_sampler=rows).train()
    assert asked == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_a_knob_without_effect_can_be_read_and_is_none_where_nobody_set_it():
    with pytest.warns(UserWarning, match="gamma has no effect"):
        config = vf.GRPOConfig(gamma=0.99)
    assert config.gamma == 0.99
    assert config.gae_lambda is None
    for name in vf.GRPOConfig.without_effect:
        with pytest.warns(UserWarning, match=f"{name} has no effect"):
            setattr(config, name, 0.5)
        assert getattr(config, name) == 0.5
