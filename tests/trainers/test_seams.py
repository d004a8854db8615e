"""Where people come to change a training: the advantage, the loss, and the knobs between them, in whole steps."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import verifiers as vf  # noqa: E402
from tests.engine import tiny  # noqa: E402
from tests.trainers import making, several  # noqa: E402
from verifiers import store  # noqa: E402
from verifiers.trainers.learning.micro_batches import micro_batches  # noqa: E402

QUIET = {"show_progress": False}


def trainer(folder: Any, kind: Any = None, **kwargs: Any) -> Any:
    extra = {name: kwargs.pop(name) for name in ("advantage", "loss") if callable(kwargs.get(name))}
    return making.trainer(folder, kind, extra=extra, **kwargs)


def prepared(made: Any) -> tuple[Any, list[Any], Any]:
    """A batch, what is learned of it, and that as one micro-batch."""
    batch = made._with_advantages(made._generate_batch(0))
    sequences = made.sequences(batch)
    (micro,) = micro_batches(sequences, max_tokens=100_000)
    return batch, sequences, micro


def gradients(made: Any) -> list[Any]:
    """What the last update made of the gradients: kept, because a step clears them."""
    return [one.clone() for one in made.seen]


def keep_gradients(made: Any) -> Any:
    step = made.weights.step

    def noting(rate: float) -> float:
        made.seen = [one.clone() for one in made.weights.gradients()]
        return float(step(rate))

    made.weights.step = noting
    return made


class TwoTurns(vf.MultiTurnEnv):
    """The first turn is worth something of its own, the second what the rubric says."""

    def env_response(self, messages: Any, state: Any) -> Any:
        state["trajectory"][0]["reward"] = float(len(messages[-1]["content"]))
        return [{"role": "user", "content": "more"}]


def two_turns() -> Any:
    rows = [{"question": f"say {i}", "answer": str(i)} for i in range(8)]
    return TwoTurns(dataset=rows, rubric=vf.Rubric([making.share_of_e]), max_turns=2)


# --- the advantage ------------------------------------------------------------------------------------------------


def test_a_function_takes_the_place_of_the_advantage_and_the_states_say_what_it_gave(tmp_path):
    def first_wins(rewards, states):
        assert [state["reward"] for state in states] == rewards
        return [3.0 if i == 0 else None for i, _ in enumerate(rewards)]

    made = trainer(tmp_path, advantage=first_wins)
    batch, sequences, _ = prepared(made)
    assert batch["advantages"] == [3.0, None, None, None] * 4
    assert [one.advantage for one in sequences] == [3.0] * 4  # the others do not train
    assert [reply.state["advantage"] for reply in batch["completions"][:2]] == [3.0, None]
    assert batch["completions"][0].state["trajectory"][0]["advantage"] == 3.0


@pytest.mark.parametrize("name", ["grpo", "rloo", "grpo_batch", "reinforce_plus_plus", "gdpo"])
def test_what_a_state_has_as_its_advantage_is_what_it_trains_with(tmp_path, name):
    batch, sequences, _ = prepared(trainer(tmp_path, advantage=name))
    noted = [reply.state["advantage"] for reply in batch["completions"]]
    assert noted == batch["advantages"] == [one.advantage for one in sequences]
    assert any(noted)


def test_a_batch_that_brings_its_advantages_keeps_them(tmp_path):
    class Own(vf.GRPOTrainer):
        def get_batch(self, epoch, step):
            batch = super().get_batch(epoch, step)
            batch["advantages"] = [0.25] * len(batch["rewards"])
            return batch

    _, sequences, _ = prepared(trainer(tmp_path, Own))
    assert {one.advantage for one in sequences} == {0.25}


def sampled(sequence: Any) -> list[float]:
    """The advantages of the tokens that the model sampled."""
    pairs = zip(sequence.advantage, sequence.sample.completion_mask, strict=True)
    return [advantage for advantage, is_own in pairs if is_own]


def test_the_tokens_of_a_turn_have_the_advantage_of_the_turn(tmp_path):
    made = trainer(tmp_path, env=two_turns(), advantage="per_turn", batch_size=8)
    batch, sequences, micro = prepared(made)
    rewards = [[step["reward"] for step in reply.state["trajectory"]] for reply in batch["completions"]]
    for first in (0, 4):  # groups of four
        for turn in (0, 1):
            of_turn = [rewards[i][turn] for i in range(first, first + 4)]
            found = [batch["advantages"][i][turn] for i in range(first, first + 4)]
            assert found == pytest.approx([one - sum(of_turn) / 4 for one in of_turn])
    wanted: list[float] = []
    for reply, advantages in zip(batch["completions"], batch["advantages"], strict=True):
        for step, advantage in zip(reply.state["trajectory"], advantages, strict=True):
            assert step["advantage"] == advantage
            wanted += [advantage] * len(step["tokens"]["completion_ids"])
    assert [one for sequence in sequences for one in sampled(sequence)] == pytest.approx(wanted)
    for place, member in enumerate(micro.members):
        assert micro.advantage_N[micro.sequence_N == place].tolist() == pytest.approx(sampled(sequences[member]))
    assert made.train_step(batch)["grad_norm"] > 0


def test_an_advantage_may_be_given_token_by_token_and_must_be_as_many(tmp_path):
    def by_token(rewards, states):
        return [[0.5] * len(state["trajectory"][0]["tokens"]["completion_ids"]) for state in states]

    _, _, micro = prepared(trainer(tmp_path, advantage=by_token))
    assert set(micro.advantage_N.tolist()) == {0.5}
    with pytest.raises(ValueError, match=r"17 advantages for a rollout with 1 turns and \d sampled tokens; return one"):
        prepared(trainer(tmp_path, advantage=lambda rewards: [[1.0] * 17] * len(rewards)))


def test_one_number_for_each_rollout_learns_as_the_same_number_for_each_token(tmp_path):
    def by_token(rewards, states):
        centered = [reward - sum(rewards) / len(rewards) for reward in rewards]
        sizes = [len(state["trajectory"][0]["tokens"]["completion_ids"]) for state in states]
        return [[one] * size for one, size in zip(centered, sizes, strict=True)]

    runs = [trainer(tmp_path / str(i), **more).train() for i, more in enumerate(({}, {"advantage": by_token}))]
    assert [step["grad_norm"] for step in runs[0].steps] == pytest.approx([step["grad_norm"] for step in runs[1].steps])


# --- the loss -----------------------------------------------------------------------------------------------------


def test_a_loss_of_ones_own_that_is_the_built_in_one_learns_the_same(tmp_path):
    def clipped(logprobs, old_logprobs, advantages):
        ratio = (logprobs - old_logprobs).exp()
        return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)

    settings = {"num_iterations": 2, "importance_cap": None, "loss_type": "grpo"}
    ours = trainer(tmp_path / "a", **settings).train()
    theirs = trainer(tmp_path / "b", **settings, loss=clipped).train()
    norms = [[one["grad_norm"] for one in report.steps] for report in (ours, theirs)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)
    assert "clipped (a function)" in str(theirs.run_dir.metadata)


def test_a_loss_may_learn_where_there_is_no_advantage_and_see_entropies(tmp_path):
    def spread(logprobs, entropies):
        assert entropies.shape == logprobs.shape
        return -entropies

    made = trainer(tmp_path, loss=spread, env=making.environment(rubric=vf.Rubric([lambda completion: 1.0])))
    figures = made.train_step(made._generate_batch(0))
    assert figures["grad_norm"] > 0
    assert 0 < figures["entropy"] < math.log(made.model.config.vocab_size)


def test_names_are_arguments_fields_and_aliases(tmp_path):
    assert vf.GRPOConfig(loss="cispo").loss_type == "cispo"
    made = making.trainer(tmp_path, extra={"advantage": "rloo", "loss": "sapo"})
    assert (made.config.advantage, made.config.loss_type) == ("rloo", "sapo")
    assert made.update.loss.objective.kind == "sapo"
    with pytest.raises(TypeError, match="loss='cispo' and loss_type='grpo' of the configuration differ"):
        making.trainer(tmp_path, loss_type="grpo", extra={"loss": "cispo"})
    with pytest.raises(TypeError, match="advantage= is a function, but the configuration also names an estimator"):
        making.trainer(tmp_path, scale_rewards="std", extra={"advantage": lambda rewards: rewards})


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"loss": "ppo"}, "loss_type must be one of grpo, dr_grpo, .*, sapo, got 'ppo'"),
        ({"advantage": "gae"}, "advantage must be one of grpo, .*, per_turn, got 'gae'"),
        ({"advantage": "rloo", "scale_rewards": "std"}, "advantage and scale_rewards both choose the estimator"),
        ({"scale_rewards": "some"}, "scale_rewards must be one of none, std"),
        ({"importance_sampling_level": "word"}, "importance_sampling_level must be one of token, sequence"),
        ({"importance_sampling_mode": "clip"}, "importance_sampling_mode must be one of token_truncate"),
        ({"importance_sampling_clip_min": 4.0}, "importance_sampling_clip_min=4.0 must be below"),
        ({"top_entropy_quantile": 1.5}, "top_entropy_quantile must be between 0 and 1"),
        ({"entropy_coef": math.nan}, "entropy_coef must be a finite number"),
        ({"max_concurrent": "4"}, "max_concurrent must be a whole number, got '4'"),
        ({"max_grad_norm": "1"}, "max_grad_norm must be a finite number or None, got '1'"),
        ({"top_p": "0.9"}, "top_p must be a finite number, got '0.9'"),
        ({"adam_beta2": 1.0}, "adam_beta2 must be 0 or more, and below 1, got 1.0"),
        ({"sampling_args": [1]}, r"sampling_args must be a mapping, got \[1\]"),
        ({"scale_rewards": 1}, "scale_rewards must be a string or True or False or None, got 1"),
        ({"sampling_args": {"seed": 3}}, "samples with seed=3: all rollouts of a prompt would be the same"),
        ({"sampling_args": {"extra_body": {"seed": 3}}}, "samples with seed=3"),
        ({"gradient_checkpointing": "false"}, "gradient_checkpointing must be True or False or None, got 'false'"),
        ({"sync_ref_model": 1}, "sync_ref_model must be True or False, got 1"),
        ({"weight_decay": math.nan}, "weight_decay must be a finite number, got nan"),
        ({"sapo_temperature_neg": 0.0}, "sapo_temperature_neg must be above 0"),
        ({"steps_per_generation": 3, "gradient_accumulation_steps": 2}, "steps_per_generation must be a multiple of"),
    ],
)
def test_what_cannot_be_is_said_when_the_trainer_is_built(wrong, said):
    with pytest.raises(ValueError, match=said):
        vf.GRPOConfig(**wrong).check()


def test_fields_that_a_subclass_adds_may_have_any_value_and_an_endless_norm_is_no_limit():
    @dataclass(init=False, repr=False)
    class Own(vf.GRPOConfig):
        floor: float = None
        ceiling: float = math.inf

    made = Own(max_grad_norm=math.inf)
    made.check()
    assert (made.floor, made.ceiling, made.max_grad_norm) == (None, math.inf, None)
    with pytest.raises(ValueError, match="temperature must be a finite number"):
        Own(temperature=math.inf).check()


class Workers:
    """As those of Ray; they play nothing here."""

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: Any) -> None: ...

    def player(self, *args: Any) -> Any:
        raise AssertionError("saved rollouts are not played")


def test_settings_that_are_no_json_are_saved_with_a_checkpoint(tmp_path):
    saved = [{"prompt": "a", "completion": one, "reward": float(one == "b")} for one in "bcde"]
    own = {"workers": Workers(), "sampling_args": {"stop_token_ids": {5, 6}}, "batch_size": 4, "save_steps": 1}
    making.trainer(tmp_path, dataset=saved, **own).train()
    report = making.trainer(tmp_path, dataset=saved, max_steps=4, **own | {"workers": Workers()}).train(resume=True)
    assert [one["notice"] for one in report.notices if "resumed" in one["notice"]] == [
        "resumed with changed settings: max_steps=4 (was 3)"
    ]


def test_a_function_in_the_configuration_is_pointed_to_the_trainer():
    with pytest.raises(TypeError, match=r"pass a function to GRPOTrainer\(loss=...\)"):
        vf.GRPOConfig(loss=lambda logprobs: logprobs).check()


def own_rewards(given: Any) -> Any:
    class Own(vf.GRPOTrainer):
        def compute_rewards(self, completions, prompts):
            return given(completions)

    return Own


def own_batch(change: Any) -> Any:
    class Own(vf.GRPOTrainer):
        def get_batch(self):
            batch = super().get_batch()
            return change(batch) or batch

    return Own


def test_what_is_kept_of_a_rollout_has_the_reward_that_it_was_learned_from_with(tmp_path: Any) -> None:
    kind = own_rewards(lambda completions: [len(set(text)) / 10 for text in completions])
    making.trainer(tmp_path, kind, max_steps=1).train()
    kept = [json.loads(line) for line in (tmp_path / "run" / "results.jsonl").read_text().splitlines()]
    assert len(kept) == 16
    for one in kept:
        assert one["reward"] == len(set(one["completion"][-1]["content"])) / 10


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (own_rewards(lambda completions: [1.0]), "compute_rewards returned 1 rewards for 16 completions"),
        (
            own_rewards(lambda completions: None),
            "compute_rewards returned None; it must return a list with a number for each of 16",
        ),
        (
            own_rewards(lambda completions: dict.fromkeys(range(16), 1.0)),
            r"compute_rewards returned \{0: 1.0, .*; it must return a",
        ),
        (
            own_rewards(lambda completions: ["good"] * 16),
            r"compute_rewards returned \['good', .*; it must return a list",
        ),
        (own_batch(lambda batch: batch.update(rewards=[math.nan] * 16)), "the reward of rollout 0 of a batch is nan"),
        (own_batch(lambda batch: batch.update(rewards=["x"] * 16)), "the reward of rollout 0 of a batch is 'x'"),
        (own_batch(lambda batch: batch.update(advantages=[1.0])), "advantages of the batch: got 1 values for 16"),
        (own_batch(lambda batch: batch.update(advantages=[math.nan] * 16)), "got nan for a rollout with reward"),
        (own_batch(lambda batch: batch.update(advantages=["x"] * 16)), r"\['x', .* is not a list with one entry"),
        (own_batch(lambda batch: {**batch, "advantages": [1.0]}), "1 advantages for 16 completions"),
    ],
)
def test_rewards_and_advantages_of_ones_own_that_are_none_are_told_in_one_sentence(tmp_path, kind, said):
    with pytest.raises(ValueError, match=said):
        trainer(tmp_path, kind).train()


def test_a_reward_of_ones_own_that_is_none_is_a_rollout_that_was_not_scored(tmp_path):
    kind = own_rewards(lambda completions: [None, *range(len(completions) - 1)])
    assert [step["failed"] for step in trainer(tmp_path, kind, max_steps=2).train().steps] == [1, 1]


@pytest.mark.parametrize("make", [torch.tensor, lambda values: torch.tensor(values).numpy(), list])
def test_advantages_that_a_batch_brings_may_be_in_an_array(tmp_path, make):
    given = [0.25 * (-1) ** i for i in range(16)]
    _, sequences, _ = prepared(trainer(tmp_path, own_batch(lambda batch: batch.update(advantages=make(given)))))
    assert [one.advantage for one in sequences] == given


# --- entropies ----------------------------------------------------------------------------------------------------


def full_entropies(made: Any, micro: Any, temperature: float = 1.0) -> Any:
    logits = made.model(input_ids=micro.ids_BT).logits.flatten(0, 1)[micro.logit_index_N] / temperature
    return torch.distributions.Categorical(logits=logits).entropy()


@pytest.mark.parametrize("loss_type", ["dr_grpo", "grpo"])
def test_the_entropy_bonus_is_the_mean_over_the_tokens_of_the_step_whatever_the_loss_averages_over(tmp_path, loss_type):
    settings = {"loss_type": loss_type, "max_grad_norm": None, "learning_rate": 0.0, "temperature": 0.7}
    plain, bonus = (
        keep_gradients(trainer(tmp_path / str(coef), entropy_coef=coef, micro_batch_tokens=64, **settings))
        for coef in (0.0, 0.5)
    )
    batch, _, micro = prepared(bonus)
    (-0.5 * full_entropies(bonus, micro, 0.7).mean()).backward()
    wanted = [one.grad.clone() for one in bonus.model.parameters()]
    for one in bonus.model.parameters():
        one.grad = None
    figures = bonus.train_step(batch)
    plain.train_step(plain._generate_batch(0))
    for with_bonus, without, own in zip(gradients(bonus), gradients(plain), wanted, strict=True):
        assert torch.allclose(with_bonus - without, own, atol=1e-6)
    assert figures["entropy"] == pytest.approx(full_entropies(bonus, micro, 0.7).mean().item(), abs=1e-4)


def test_only_the_most_uncertain_tokens_of_a_step_are_learned_from_however_it_is_cut(tmp_path):
    settings = {"top_entropy_quantile": 0.25, "max_grad_norm": None, "learning_rate": 0.0, "loss_type": "bnpo"}
    whole, cut = (keep_gradients(trainer(tmp_path / str(n), micro_batch_tokens=n, **settings)) for n in (100_000, 64))
    batch, _, micro = prepared(whole)
    with torch.no_grad():
        entropies = full_entropies(whole, micro)
    is_kept = entropies >= torch.quantile(entropies, 0.75)
    logits = whole.model(input_ids=micro.ids_BT).logits.flatten(0, 1)[micro.logit_index_N]
    logprobs = torch.log_softmax(logits, -1).gather(1, micro.target_N[:, None])[:, 0]
    (-(micro.advantage_N * is_kept * logprobs).sum() / len(logprobs)).backward()
    wanted = [one.grad.clone() for one in whole.model.parameters()]
    for one in whole.model.parameters():
        one.grad = None
    whole.train_step(batch)
    cut.train_step(cut._generate_batch(0))
    for one, other, own in zip(gradients(whole), gradients(cut), wanted, strict=True):
        assert torch.allclose(one, own, atol=2e-6)
        assert torch.allclose(other, own, atol=2e-6)


# --- the sampler --------------------------------------------------------------------------------------------------


def test_a_sampler_that_is_not_quite_the_policy_is_corrected_for(tmp_path):
    """Its logprobs are off by a little here; the figures tell by how much, and how many ratios the bound cut."""
    settings = {"importance_cap": None, "max_grad_norm": None, "learning_rate": 0.0, "loss_type": "bnpo"}
    made = keep_gradients(
        trainer(tmp_path, importance_sampling_mode="token_truncate", importance_sampling_clip_max=1.1, **settings)
    )
    batch, _, _ = prepared(made)
    for reply in batch["completions"]:
        tokens = reply.state["trajectory"][0]["tokens"]
        tokens["completion_logprobs"] = [one - 0.3 * (i % 2) for i, one in enumerate(tokens["completion_logprobs"])]
    (micro,) = micro_batches(made.sequences(batch), max_tokens=100_000)
    logits = made.model(input_ids=micro.ids_BT).logits.flatten(0, 1)[micro.logit_index_N]
    logprobs = torch.log_softmax(logits, -1).gather(1, micro.target_N[:, None])[:, 0]
    factor = (logprobs.detach() - micro.old_N).exp().clamp(max=1.1)
    assert factor.max() == pytest.approx(1.1)
    (-(micro.advantage_N * factor * logprobs).sum() / len(logprobs)).backward()
    wanted = [one.grad.clone() for one in made.model.parameters()]
    for one in made.model.parameters():
        one.grad = None
    figures = made.train_step(batch)
    assert figures["ratio_max"] == pytest.approx(math.exp(0.3), abs=1e-4)
    assert figures["clip_fraction"] == pytest.approx(float((factor >= 1.1).float().mean()))
    for one, own in zip(gradients(made), wanted, strict=True):
        assert torch.allclose(one, own, atol=2e-6)


@pytest.mark.parametrize(("mode", "is_clipped"), [(None, False), ("off", True)])
def test_what_was_sampled_ahead_is_weighed_by_its_ratio_and_not_left_out_by_the_clip(tmp_path, mode, is_clipped):
    settings = {"num_batches_ahead": 1, "importance_sampling_mode": mode, "learning_rate": 0.0}
    made = trainer(tmp_path, **settings)
    batch, _, _ = prepared(made)
    for reply in batch["completions"]:
        tokens = reply.state["trajectory"][0]["tokens"]
        tokens["completion_logprobs"] = [one - 0.5 for one in tokens["completion_logprobs"]]
    figures = made.train_step(batch)
    assert figures["ratio_mean"] == pytest.approx(math.exp(0.5), rel=1e-3)
    assert (figures["clip_fraction"] > 0) == is_clipped


def test_a_rollout_without_logprobs_leaves_the_ratios_of_the_others_as_they_are(tmp_path):
    """The trainer measures the old policy for it alone, whichever rollouts share its micro-batch."""
    made = trainer(tmp_path, learning_rate=0.0)
    batch, _, _ = prepared(made)
    for i, reply in enumerate(batch["completions"]):
        tokens = reply.state["trajectory"][0]["tokens"]
        tokens["completion_logprobs"] = [math.nan if i == 0 else one - 0.5 for one in tokens["completion_logprobs"]]
    made.train_step(batch)
    ratios = made.update.ratios_of(16)
    assert len(ratios) > 2
    for rollout, found in ratios.items():
        assert found == pytest.approx([1.0 if rollout == 0 else math.exp(0.5)] * len(found), rel=1e-3)


@pytest.mark.parametrize("logprob", [-math.inf, -9999.0])
@pytest.mark.parametrize(
    "settings",
    [
        {"loss_type": "grpo"},
        {"loss_type": "grpo", "importance_cap": None},
        {"loss_type": "gspo"},
        {"loss_type": "cispo"},
        {"loss_type": "sapo", "importance_cap": 2.0},
        {"importance_sampling_mode": "token_mask"},
        {"importance_sampling_mode": "sequence_truncate", "importance_sampling_clip_max": None},
    ],
)
def test_a_token_that_its_sampler_gave_no_chance_does_not_undo_the_step(tmp_path, settings, logprob):
    made = trainer(tmp_path, max_grad_norm=1.0, **settings)
    batch, _, _ = prepared(made)
    for reply in batch["completions"]:
        reply.state["trajectory"][0]["tokens"]["completion_logprobs"][0] = logprob
    before = [one.detach().clone() for one in made.model.parameters()]
    figures = made.train_step(batch)
    assert all(math.isfinite(figures[name]) for name in ("loss", "grad_norm", "ratio_mean", "ratio_max"))
    assert any(not torch.equal(one, old) for one, old in zip(made.model.parameters(), before, strict=True))


@pytest.mark.parametrize("token", [-1, 10**6])
@pytest.mark.parametrize("place", [0, -1])
def test_tokens_of_another_model_are_refused_before_they_are_looked_up(tmp_path, token, place):
    made = trainer(tmp_path)
    batch, _, _ = prepared(made)
    for reply in batch["completions"]:
        reply.state["trajectory"][0]["tokens"]["completion_ids"][place] = token
    with pytest.raises(
        ValueError,
        match=f"token id {token} is outside the model's vocabulary of 301 tokens: were these tokens made with",
    ):
        made.train_step(batch)


@pytest.mark.parametrize(
    ("settings", "is_told"),
    [({"loss_type": "gspo"}, True), ({"importance_sampling_mode": "sequence_mask"}, True), ({}, False)],
)
def test_a_ratio_of_sequences_that_are_learned_from_in_parts_is_told(tmp_path, caplog, settings, is_told):
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "rope_theta": 10000.0}
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    bounds = {"max_position_embeddings": 256, "original_max_position_embeddings": 64}
    rope |= {"factor": 4.0, "original_max_position_embeddings": 64}
    config = transformers.LlamaConfig(vocab_size=301, **small, **bounds, rope_parameters=rope)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with caplog.at_level("WARNING", logger="verifiers.trainers"):
        assert trainer(tmp_path, model=model, **settings).update is not None
    assert ("the rotary embedding of this model changes at 64 tokens" in caplog.text) == is_told


# --- several updates of one generation ----------------------------------------------------------------------------


def noted(made: Any) -> list[tuple[int, Any]]:
    seen: list[tuple[int, Any]] = []
    step = made.train_step

    def noting(batch: Any) -> Any:
        seen.append((made.step, batch))
        return step(batch)

    made.train_step = noting
    return seen


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_generation_is_shared_by_several_updates_in_whole_groups(tmp_path, ahead):
    made = trainer(tmp_path, steps_per_generation=2, batch_size=8, max_steps=3, num_batches_ahead=ahead)
    asked: list[int] = []
    rollouts = made._generate_args

    def counting(rows: Any, tally: Any) -> Any:
        asked.append(len(rows))
        return rollouts(rows, tally)

    made._generate_args = counting
    seen = noted(made)
    report = made.train()
    assert asked == ([1] * 8 if ahead else [4, 4])  # rows, of four rollouts each; ahead, groups are on their own
    assert [len(batch["rewards"]) for _, batch in seen] == [8, 8, 8]
    assert [sorted(set(batch["groups"])) for _, batch in seen] == [[0, 1], [2, 3], [0, 1]]
    assert [len(batch.rows_taken) if ahead else batch.cursor for _, batch in seen] == (
        [2, 2, 2] if ahead else [2, 4, 6]
    )
    assert made.cursor + len(made.learned) == 6  # all that was learned from
    assert len(report.steps) == 3
    assert seen[1][1]["advantages"] is not None


def test_what_is_normalised_over_the_batch_is_normalised_over_the_generation(tmp_path):
    made = trainer(tmp_path, steps_per_generation=2, batch_size=8, max_steps=2, advantage="reinforce_plus_plus")
    seen = noted(made)
    made.train()
    advantages = [one for _, batch in seen for one in batch["advantages"]]
    assert sum(advantages) == pytest.approx(0.0, abs=1e-9)
    assert sum(one * one for one in advantages) == pytest.approx(len(advantages))


def test_a_training_that_stopped_within_a_generation_goes_on_with_the_rows_it_has_not_learned_from(tmp_path):
    settings = {"steps_per_generation": 2, "batch_size": 8, "save_steps": 1}
    trainer(tmp_path, max_steps=1, **settings).train()
    made = trainer(tmp_path, max_steps=3, **settings)
    seen = noted(made)
    made.train(resume=True)
    assert [(step, batch.cursor) for step, batch in seen] == [(1, 4), (2, 6)]


@pytest.mark.parametrize(
    "several", [{}, {"num_iterations": 2, "loss_type": "cispo"}, {"advantage": "rloo", "batch_size": 16}]
)
def test_a_training_that_stopped_within_a_generation_goes_on_as_if_it_had_not(tmp_path, several):
    settings = {"steps_per_generation": 3, "batch_size": 8, "save_steps": 1, **several}
    whole = trainer(tmp_path / "whole", max_steps=6, **settings)
    learned = noted(whole)
    losses = [step["loss"] for step in whole.train().steps]
    for stop in (1, 2, 4):
        trainer(tmp_path / f"{stop}", max_steps=stop, **settings).train()
        made = trainer(tmp_path / f"{stop}", max_steps=6, **settings)
        seen = noted(made)
        assert [step["loss"] for step in made.train(resume=True).steps] == losses
        for (_, one), (_, other) in zip(seen, learned[stop:], strict=True):
            assert one.cursor == other.cursor
            assert (one.sampled, one["rewards"]) == (other.sampled, other["rewards"])
            assert one["advantages"] == other["advantages"]
            steps = [[step for state in batch.states for step in state["trajectory"]] for batch in (one, other)]
            assert len({store.encode([step["tokens"] for step in some]) for some in steps}) == 1


@pytest.mark.parametrize("further", [{}, {"is_truncated": [False] * 16}, {"info": [{"n": i} for i in range(16)]}])
def test_saved_rollouts_go_on_within_a_generation_as_if_the_training_had_not_stopped(tmp_path, caplog, further):
    settings = {"steps_per_generation": 3, "batch_size": 8, "save_steps": 1, "advantage": "reinforce_plus_plus"}

    def losses(folder: Path, steps: int, **how: Any) -> list[float]:
        tokenizer, saved = tiny.tokenizer(), several.saved_rollouts() | further
        config = making.config(folder, max_steps=steps, **settings)
        made = vf.GRPOTrainer(model=tiny.model(tokenizer), tokenizer=tokenizer, dataset=saved, config=config)
        return [step["loss"] for step in made.train(**how).steps]

    whole = losses(tmp_path / "whole", 6)
    for stop in (1, 2, 4):
        losses(tmp_path / f"{stop}", stop)
        assert losses(tmp_path / f"{stop}", 6, resume=True) == whole
    assert not caplog.messages


def test_the_reward_of_all_that_was_sampled_is_of_the_rollouts_of_the_step_itself(tmp_path):
    def picky(completion: Any) -> float:
        if len(completion[-1]["content"]) % 3 == 0:
            raise RuntimeError("the grader is down")
        return making.share_of_e(completion)

    env = making.environment(8, rubric=vf.Rubric([picky]))
    report = making.trainer(tmp_path, env=env, steps_per_generation=3, batch_size=8, max_steps=6).train()
    assert any(step["failed"] for step in report.steps)
    assert report.rewards_sampled == []  # each step learned from all that it scored
    for step in report.steps:
        assert step["reward_sampled"] == step["reward"]
        assert step["sampled"] == step["samples"] + step["failed"]


def test_failures_and_tokens_of_a_generation_count_the_same_after_a_stop_within_it(tmp_path):
    def picky(completion: Any) -> float:
        text = vf.messages.content_text(completion[-1]["content"]) if not isinstance(completion, str) else completion
        if len(text) % 3 == 0:
            raise RuntimeError("the grader is down")
        return float(text.count("e"))

    def env() -> Any:
        return vf.SingleTurnEnv(dataset=[{"question": f"say {i}"} for i in range(8)], rubric=vf.Rubric([picky]))

    settings = {"steps_per_generation": 3, "batch_size": 8, "save_steps": 1}
    names = ("loss", "failed", "sampled", "sampled_tokens", "total_tokens")
    first = trainer(tmp_path / "w", env=env(), max_steps=3, **settings).train()
    whole = [[step[name] for name in names] for step in first.steps]
    assert sum(step[1] for step in whole) > 1
    trainer(tmp_path / "s", env=env(), max_steps=1, **settings).train()
    again = trainer(tmp_path / "s", env=env(), max_steps=3, **settings).train(resume=True)
    assert [[step[name] for name in names] for step in again.steps] == whole


@pytest.mark.parametrize("odd", ["[[{", "[3]", '[[{"columns": {}}]]', '[[{"states": [{}], "columns": 1}]]'])
def test_a_rest_of_a_generation_that_was_damaged_is_one_sentence(tmp_path, odd):
    settings = {"steps_per_generation": 2, "batch_size": 8, "save_steps": 1}
    trainer(tmp_path, max_steps=1, **settings).train()
    (saved,) = tmp_path.rglob("unlearned.json")
    saved.write_text(odd)
    with pytest.raises(ValueError, match=r"is damaged and cannot be read .*; resume from an earlier"):
        trainer(tmp_path, max_steps=2, **settings).train(resume=True)


def test_a_rest_of_a_generation_that_was_not_saved_is_sampled_anew_and_that_is_said(tmp_path, caplog):
    class Bare(vf.GRPOTrainer):
        def get_batch(self) -> Any:
            batch = super().get_batch()
            return {name: [*map(str, batch[name])] if name == "completions" else batch[name] for name in batch}

    settings = {"steps_per_generation": 2, "batch_size": 8, "save_steps": 1}
    trainer(tmp_path, Bare, max_steps=1, **settings).train()
    assert len(trainer(tmp_path, Bare, max_steps=3, **settings).train(resume=True).steps) == 3
    assert "sampled again" in caplog.text


def test_a_training_that_stopped_between_generations_goes_on_as_if_it_had_not(tmp_path):
    settings = {"steps_per_generation": 2, "batch_size": 8, "num_iterations": 2, "save_steps": 2}
    whole = trainer(tmp_path / "whole", max_steps=4, **settings).train()
    trainer(tmp_path, max_steps=2, **settings).train()
    resumed = trainer(tmp_path, max_steps=4, **settings).train(resume=True)
    assert [step["loss"] for step in resumed.steps] == [step["loss"] for step in whole.steps]


def test_a_generation_of_which_a_group_failed_is_not_said_to_have_failed_as_a_whole(tmp_path):
    def brittle(answer: Any, completion: Any) -> float:
        if answer == "1":
            raise ConnectionError("the judge is down")
        return making.share_of_e(completion)

    env = making.environment(2, rubric=vf.Rubric([brittle]))
    report = trainer(tmp_path, env=env, steps_per_generation=2, batch_size=4, max_steps=4).train()
    assert [(step["samples"], step["failed"]) for step in report.steps] == [(4, 4), (0, 0), (4, 4), (0, 0)]


def test_the_parts_of_a_generation_say_the_weights_it_was_scored_with(tmp_path):
    made = trainer(tmp_path, steps_per_generation=2, batch_size=8, max_steps=2, weight_schedule=lambda epochs: [0.5])
    assert [step["reward_weights"] for step in made.train().steps] == [{"share_of_e": 0.5}] * 2


@pytest.mark.parametrize("kind", ["grpo", "sft"])
def test_a_model_whose_configuration_has_no_limit_of_positions_is_trained(kind, tmp_path):
    tokenizer = tiny.tokenizer()
    model = tiny.model(tokenizer)
    model.config.max_position_embeddings = -1  # as some configurations say it
    if kind == "grpo":
        report = making.trainer(tmp_path, model=model, max_steps=1).train()
    else:
        rows = [{"prompt": f"say {i}", "completion": "e" * (1 + i)} for i in range(4)]
        config = {"batch_size": 4, "max_steps": 1, "show_progress": False, "output_dir": tmp_path / "run"}
        report = vf.SFTTrainer(model=model, tokenizer=tokenizer, dataset=rows, config=config).train()
    assert len(report.steps) == 1
    assert math.isfinite(report.steps[0]["loss"])
