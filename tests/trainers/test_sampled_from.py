"""The update uses what was really sampled from, whoever said so: at a learning rate of 0 every ratio is 1."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("accelerate")

import verifiers as vf  # noqa: E402
from tests.engine import tiny  # noqa: E402
from tests.trainers import making  # noqa: E402
from verifiers.clients.protocol import Tokens  # noqa: E402
from verifiers.samples import Sample  # noqa: E402
from verifiers.trainers import sampling  # noqa: E402
from verifiers.trainers.advantages import Estimator  # noqa: E402
from verifiers.trainers.batch import with_advantages  # noqa: E402
from verifiers.trainers.learning import target_logprobs  # noqa: E402
from verifiers.trainers.learning.logprobs import TokenScorer  # noqa: E402
from verifiers.trainers.learning.micro_batches import TrainSample, micro_batches  # noqa: E402
from verifiers.trainers.learning.target_logprobs import score_logits  # noqa: E402
from verifiers.trainers.sampling import Distribution, flat, read_distribution  # noqa: E402

SETTINGS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6},
    "top_p": {"top_p": 0.5},
    "top_k": {"extra_body": {"top_k": 4}},
    "top_k, not in extra_body": {"top_k": 4},
    "min_p": {"extra_body": {"min_p": 0.3}},
    "logit_bias": {"logit_bias": {"70": 4.0, "71": -3.0}},
    "all of them": {
        "temperature": 0.8,
        "top_p": 0.8,
        "logit_bias": {70: 3.0},
        "extra_body": {"top_k": 20, "min_p": 0.02},
    },
}


def check_on_policy(report: Any, within: float = 1e-3) -> None:
    """Ratios of 1 to rounding; where a distribution is cut off, rounding may once put a token on the other side."""
    learned = [step for step in report.steps if step["trained_tokens"]]
    assert learned, "no step had a group whose rewards differ"
    for step in learned:
        assert step["ratio_mean"] == pytest.approx(1.0, abs=within)
        assert step["ratio_max"] == pytest.approx(1.0, abs=30 * within)
        assert step["clip_fraction"] == 0
        if step["kl"] is not None:
            assert step["kl"] == pytest.approx(0.0, abs=1e-6)


def records_of(trainer: Any) -> list[dict[str, Any]]:
    """How the turns of a fresh batch were drawn, as it is recorded with them."""
    states = [reply.state for reply in trainer.get_batch(0, 0)["completions"]]
    return [step["tokens"]["sampling"] for state in states for step in state["trajectory"]]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("source", ["configuration", "environment"])
def test_at_a_learning_rate_of_0_every_ratio_is_1_whatever_is_set_and_where(tmp_path, setting, source):
    given = SETTINGS[setting]
    env = making.environment(sampling_args=given) if source == "environment" else making.environment()
    more = {"sampling_args": given} if source == "configuration" else {}
    trainer = making.trainer(tmp_path, env=env, learning_rate=0.0, kl_coef=0.1, **more)
    wanted = read_distribution(given)
    assert {read_distribution(record) for record in records_of(trainer)} == {wanted}
    check_on_policy(trainer.train(), within=1e-3 if wanted.truncates else 1e-5)


@pytest.mark.parametrize("kind", ["grpo", "gspo", "cispo"])
def test_fields_of_the_configuration_are_learned_from_alike(tmp_path, kind):
    trainer = making.trainer(
        tmp_path, learning_rate=0.0, temperature=0.7, top_p=0.7, top_k=12, min_p=0.01, loss_type=kind
    )
    check_on_policy(trainer.train())


def test_what_an_environment_passes_call_by_call_is_what_is_learned_from(tmp_path):
    """Two turns, each with arguments of its own, which nobody but the record of the turn knows."""

    class TwoMinds(vf.MultiTurnEnv):
        def env_response(self, messages: Any, state: Any) -> Any:
            return [{"role": "user", "content": "again"}]

        async def get_model_response(self, state: Any, prompt: Any, **kwargs: Any) -> Any:
            turn = len(state["trajectory"])
            asked = {"temperature": (0.5, 1.4)[turn], "top_p": (1.0, 0.6)[turn], "max_tokens": 8}
            return await super().get_model_response(state, prompt, **{**kwargs, "sampling_args": asked})

    env = TwoMinds(
        dataset=[{"question": f"say {i}"} for i in range(8)], rubric=vf.Rubric([making.share_of_e]), max_turns=2
    )
    trainer = making.trainer(tmp_path, env=env, learning_rate=0.0)
    assert {record["temperature"] for record in records_of(trainer)} == {0.5, 1.4}
    check_on_policy(trainer.train())


def test_an_overridden_rollout_with_arguments_of_its_own_is_learned_from_as_it_was_sampled(tmp_path):
    class Own(vf.SingleTurnEnv):
        async def rollout(self, input: Any, client: Any, model: Any, sampling_args: Any = None) -> Any:
            cold = {**sampling_args, "temperature": 0.4 + 0.2 * (int(input["answer"]) % 3)}
            return await super().rollout(input, client, model, cold)

    rows = [{"question": f"say {i}", "answer": str(i)} for i in range(16)]
    env = Own(dataset=rows, rubric=vf.Rubric([making.share_of_e]))
    trainer = making.trainer(tmp_path, env=env, learning_rate=0.0)
    assert len({record["temperature"] for record in records_of(trainer)}) > 1
    check_on_policy(trainer.train())


def test_a_rollout_that_asks_once_more_after_the_librarys_own_is_learned_from_whole(tmp_path):
    class Again(vf.SingleTurnEnv):
        async def rollout(self, input: Any, client: Any, model: Any, sampling_args: Any = None) -> Any:
            state = await super().rollout(input, client, model, sampling_args)
            more = [*state["completion"], {"role": "user", "content": "again"}]
            reply = await client.chat.completions.create(messages=[*input["prompt"], *more], temperature=0.6)
            state["completion"] = [*more, reply.message]
            return state

    env = Again(dataset=[{"question": f"say {i}"} for i in range(8)], rubric=vf.Rubric([making.share_of_e]))
    trainer = making.trainer(tmp_path, env=env, learning_rate=0.0)
    assert {record["temperature"] for record in records_of(trainer)} == {0.6, 1.0}
    report = trainer.train()
    check_on_policy(report)
    assert all("refused" not in step for step in report.steps)


def test_each_environment_of_a_group_may_sample_in_its_own_way(tmp_path):
    first, second = (
        making.environment(4, sampling_args={"temperature": 0.5, "max_tokens": 3}),
        making.environment(4, sampling_args={"extra_body": {"top_k": 3}}),
    )
    env = vf.EnvGroup([first, second], env_names=["cold", "narrow"])
    trainer = making.trainer(tmp_path, env=env, learning_rate=0.0, batch_size=32, temperature=1.0)
    found = {(record["temperature"], record["top_k"]) for record in records_of(trainer)}
    assert found == {(1.0, 0), (1.0, 3)}  # what the configuration says is for all of them
    tokenizer = tiny.tokenizer()
    given = vf.GRPOConfig(
        batch_size=32, group_size=4, output_dir=tmp_path / "run", show_progress=False, max_steps=2, learning_rate=0.0
    )
    trainer = vf.GRPOTrainer(model=tiny.model(tokenizer), tokenizer=tokenizer, env=env, config=given)
    lengths: dict[float, int] = {}
    for reply in trainer.get_batch(0, 0)["completions"]:
        (step,) = reply.state["trajectory"]
        temperature, length = step["tokens"]["sampling"]["temperature"], len(step["tokens"]["completion_ids"])
        lengths[temperature] = max(length, lengths.get(temperature, 0))
    assert lengths[0.5] <= 3 < lengths[1.0]
    found = {(record["temperature"], record["top_k"]) for record in records_of(trainer)}
    assert found == {(0.5, 0), (1.0, 3)}
    check_on_policy(trainer.train())


def test_the_configuration_is_for_every_environment_of_a_group_however_they_wrote_theirs(tmp_path):
    first = making.environment(4, sampling_args={"extra_body": {"temperature": 0.5}, "max_completion_tokens": 3})
    second = making.environment(4, sampling_args={"top_k": 3, "temperature": 0.3})
    env = vf.EnvGroup([first, second], env_names=["one", "other"])
    trainer = making.trainer(tmp_path, env=env, learning_rate=0.0, batch_size=32, temperature=0.9, top_k=7)
    found = {(record["temperature"], record["top_k"]) for record in records_of(trainer)}
    assert found == {(0.9, 7)}
    check_on_policy(trainer.train())


def test_a_truncated_policy_learns(tmp_path):
    report = making.trainer(tmp_path, max_steps=25, batch_size=32, group_size=8, top_p=0.9).train()
    assert report.rewards[-1] > report.rewards[0] + 0.15


# --- which argument is in force -------------------------------------------------------------------------------------


def test_the_configuration_goes_before_the_environment_and_that_before_the_defaults():
    own = {"temperature": 0.5, "max_tokens": 7, "top_p": 0.9}
    assert flat(vf.GRPOConfig().sampling()) == {"temperature": 1.0, "max_tokens": 512}
    assert flat(vf.GRPOConfig().sampling(own)) == own
    assert flat(vf.GRPOConfig(temperature=1.0).sampling(own)) == {**own, "temperature": 1.0}
    assert flat(vf.GRPOConfig(max_completion_length=9, top_p=1.0).sampling(own)) == {
        "temperature": 0.5,
        "max_tokens": 9,
        "top_p": 1.0,
    }
    assert flat(vf.GRPOConfig(sampling_args={"temperature": 0.7}).sampling(own))["temperature"] == 0.7


def test_an_argument_replaces_the_environments_by_whatever_name_that_had():
    """Were it written under another name beside it, which one counts would be for the engine to decide."""
    asked = vf.GRPOConfig(max_new_tokens=9, temperature=0.9, top_k=3).sampling(
        {"max_completion_tokens": 100, "extra_body": {"temperature": 0.5}, "top_k": 5}
    )
    assert asked == {"max_completion_tokens": 9, "extra_body": {"temperature": 0.9}, "top_k": 3}


def test_arguments_for_the_engine_alone_stay_where_they_were_written():
    config = vf.GRPOConfig(
        top_p=0.9, sampling_args={"stop": ["x"], "top_k": 4, "extra_body": {"return_token_ids": True}}
    )
    assert config.sampling() == {
        "temperature": 1.0,
        "max_tokens": 512,
        "top_p": 0.9,
        "stop": ["x"],
        "extra_body": {"return_token_ids": True, "top_k": 4},
    }


def test_an_environment_that_says_the_same_in_other_words_is_trained_with_the_configurations_values(tmp_path):
    env = making.environment(
        sampling_args={"top_k": 50, "extra_body": {"temperature": 0.3}, "max_completion_tokens": 99}
    )
    trainer = making.trainer(tmp_path, env=env, learning_rate=0.0, temperature=0.8, top_k=5)
    found = {(record["temperature"], record["top_k"]) for record in records_of(trainer)}
    assert found == {(0.8, 5)}
    check_on_policy(trainer.train())


def test_two_values_for_one_thing_are_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"temperature=0.7 and sampling_args\['temperature'\]=0.9"):
        making.trainer(tmp_path, temperature=0.7, sampling_args={"temperature": 0.9})
    with pytest.raises(ValueError, match=r"max_new_tokens=8 and sampling_args\['max_tokens'\]=9"):
        making.trainer(tmp_path, sampling_args={"max_completion_tokens": 9})
    with pytest.raises(ValueError, match=r"top_k=5 and extra_body.top_k=6"):
        making.trainer(tmp_path, sampling_args={"top_k": 5, "extra_body": {"top_k": 6}})
    making.trainer(tmp_path, temperature=0.7, sampling_args={"temperature": 0.7})


def test_what_cannot_be_trained_with_is_refused_before_the_first_step(tmp_path):
    with pytest.raises(ValueError, match="temperature 0: training needs a temperature above 0"):
        making.trainer(tmp_path, env=making.environment(sampling_args={"temperature": 0}))
    with pytest.raises(ValueError, match="temperature 0"):
        making.trainer(tmp_path, sampling_args={"temperature": 0.0})
    with pytest.raises(ValueError, match=r"presence_penalty=0\.5: the update cannot compute"):
        making.trainer(tmp_path, sampling_args={"presence_penalty": 0.5})
    with pytest.raises(ValueError, match="top_p"):
        making.trainer(tmp_path, sampling_args={"top_p": 0.0})


def test_the_length_that_dr_grpo_divides_by_is_the_one_that_was_sampled_with(tmp_path):
    env = making.environment(sampling_args={"max_tokens": 4})
    given = vf.GRPOConfig(batch_size=16, group_size=4, output_dir=tmp_path / "run", show_progress=False)
    tokenizer = tiny.tokenizer()
    trainer = vf.GRPOTrainer(model=tiny.model(tokenizer), tokenizer=tokenizer, env=env, config=given)
    assert trainer.update._max_new_tokens == 4


def test_evaluation_takes_its_own_arguments_whatever_they_are_called(tmp_path):
    trainer = making.trainer(
        tmp_path, temperature=0.7, eval_sampling_args={"max_completion_tokens": 2, "temperature": 0.0}, eval_examples=2
    )
    (step,) = trainer.evaluate().rollouts[0]["trajectory"]
    assert len(step["tokens"]["completion_ids"]) <= 2
    assert step["tokens"]["sampling"]["temperature"] == 0.0


# --- engines that are elsewhere -------------------------------------------------------------------------------------


class Elsewhere:
    """A served copy of a model: it gives tokens and logprobs and does not say how it drew."""

    needs_no_model = True

    def __init__(self, model: Any, tokenizer: Any, is_raw: bool = True) -> None:
        self._inner = vf.LocalModel(model, tokenizer)
        self.is_raw = is_raw

    async def complete(self, request: Any) -> Any:
        found = await self._inner.complete(replace(request, sampling={**request.sampling, "raw_logprobs": True}))
        drawn = found.tokens
        logprobs = found.raw["choices"][0]["raw_logprobs"] if self.is_raw else drawn.logprobs
        tokens = Tokens(prompt_ids=drawn.prompt_ids, completion_ids=drawn.completion_ids, logprobs=logprobs)
        return replace(found, tokens=tokens)

    def reload_weights(self, folder: Any) -> None:
        self._inner.update_weights(folder)


def served(tmp_path: Any, **kwargs: Any) -> Any:
    tokenizer = tiny.tokenizer()
    return making.trainer(tmp_path, client=Elsewhere(tiny.model(tokenizer), tokenizer), learning_rate=0.0, **kwargs)


@pytest.mark.parametrize("setting", ["top_p", "top_k", "min_p", "logit_bias"])
def test_the_old_policy_is_measured_where_a_servers_logprobs_may_be_of_another_distribution(tmp_path, setting):
    check_on_policy(served(tmp_path, sampling_args=SETTINGS[setting]).train())


def test_a_server_whose_logprobs_leave_out_the_temperature_is_refused(tmp_path):
    with pytest.raises(ValueError, match="without the sampling temperature"):
        served(tmp_path / "raw", temperature=0.6).train()
    tokenizer = tiny.tokenizer()
    client = Elsewhere(tiny.model(tokenizer), tokenizer, is_raw=False)
    check_on_policy(making.trainer(tmp_path / "whole", client=client, learning_rate=0.0, temperature=0.6).train())


def test_what_a_server_may_understand_differently_is_refused(tmp_path):
    with pytest.raises(ValueError, match="more than one of top_p, top_k and min_p by an engine that does not report"):
        served(tmp_path / "a", top_p=0.9, top_k=5).train()
    with pytest.raises(ValueError, match="num_batches_ahead"):
        served(tmp_path / "b", top_p=0.9, num_batches_ahead=1).train()
    with pytest.raises(ValueError, match="steps_per_generation"):
        served(tmp_path / "c", top_p=0.9, steps_per_generation=2).train()


# --- the arithmetic -------------------------------------------------------------------------------------------------


def narrowed(logits: Any, target: int, drawn: Distribution) -> Any:
    """The logprob of one token, written out plainly."""
    scaled = logits.clone()
    for token, value in drawn.logit_bias:
        scaled[token] = scaled[token] + value
    scaled = scaled / drawn.temperature
    order = scaled.argsort(descending=True).tolist()
    probabilities = scaled.detach().softmax(-1)
    kept, mass = [], 0.0
    for rank, token in enumerate(order):
        if (drawn.top_k and rank >= drawn.top_k) or mass >= drawn.top_p:
            break
        if probabilities[token] >= drawn.min_p * probabilities[order[0]]:
            kept.append(token)
        mass += float(probabilities[token])
    kept = sorted({*kept, target})
    return scaled[target] - torch.logsumexp(scaled[kept], -1)


@pytest.mark.parametrize(
    "drawn",
    [
        Distribution(top_p=0.6),
        Distribution(top_k=3, temperature=0.7),
        Distribution(min_p=0.2),
        Distribution(top_p=0.7, top_k=5, min_p=0.05, temperature=1.3, logit_bias=((3, 2.0), (5, -2.0))),
    ],
)
def test_logprobs_and_gradients_are_those_of_the_distribution_written_out(drawn):
    torch.manual_seed(0)
    logits = (torch.randn(64, 40) * 2).double().requires_grad_()
    targets = torch.randint(0, 40, (64,))  # most of them outside what is kept: they are kept all the same
    found = score_logits(logits.float(), targets, drawn).logprob_N
    wanted = torch.stack([narrowed(row, int(target), drawn) for row, target in zip(logits, targets, strict=True)])
    assert torch.allclose(found.double(), wanted, atol=1e-5)
    weights = torch.randn(64).double()
    (mine,) = torch.autograd.grad((found.double() * weights).sum(), logits)
    (plain,) = torch.autograd.grad((wanted * weights).sum(), logits)
    assert torch.allclose(mine, plain, atol=1e-5)


def test_tokens_of_one_batch_may_be_of_several_distributions_in_chunks_or_not(monkeypatch):
    model = tiny.model(tiny.tokenizer())
    kinds = [Distribution(), Distribution(temperature=0.5), Distribution(top_p=0.8), Distribution(top_k=2)]
    draw = torch.Generator().manual_seed(1)
    trained = []
    for i in range(6):
        ids = torch.randint(3, 300, (12,), generator=draw).tolist()
        sample = Sample(
            prompt_ids=ids[:4], completion_ids=ids[4:], completion_mask=[1] * 8, completion_logprobs=[0.0] * 8
        )
        trained.append(
            TrainSample(sample=sample, advantage=1.0, drawn_from=((3, kinds[i % 4]), (5, kinds[(i + 1) % 4])))
        )
    (micro,) = micro_batches(trained, max_tokens=10_000)
    scorer = TokenScorer(model)
    found = scorer.logprobs(micro)
    with torch.no_grad():
        whole = scorer._head(scorer.outputs(micro))
    for i, row in enumerate(whole):
        sequence = trained[micro.members[int(micro.sequence_N[i])]]
        place = i - int((micro.sequence_N < micro.sequence_N[i]).sum())
        kind = sequence.drawn_from[0][1] if place < 3 else sequence.drawn_from[1][1]
        wanted = score_logits(row[None], micro.target_N[i][None], kind).logprob_N
        assert found[i].item() == pytest.approx(wanted.item(), abs=1e-5)
    grads = torch.autograd.grad(found.sum(), list(model.parameters()))
    monkeypatch.setattr(target_logprobs, "FREE_LOGITS", 1)
    monkeypatch.setattr(target_logprobs, "CHUNK_BYTES_ELSEWHERE", 320 * 4 * 3 * 4)
    again = scorer.score(micro)
    assert again.recomputes
    again = again.logprob_N
    assert torch.allclose(again, found, atol=1e-6)
    for mine, its in zip(torch.autograd.grad(again.sum(), list(model.parameters())), grads, strict=True):
        assert torch.allclose(mine, its, atol=1e-4)


def test_the_record_of_a_sample_survives_being_saved_and_trained_on_later(tmp_path):
    env = making.environment(sampling_args={"top_p": 0.5, "max_tokens": 8})
    tokenizer = tiny.tokenizer()
    model = tiny.model(tokenizer)
    client = vf.LocalModel(model, tokenizer)
    results = env.generate(client=client, rollouts_per_example=4, use_tqdm=False)
    trainer = vf.GRPOTrainer(
        model=model, tokenizer=tokenizer, dataset=results, config=making.config(tmp_path, learning_rate=0.0)
    )
    batch = with_advantages(trainer.get_batch(0, 0), Estimator("dr_grpo"))
    assert {drawn.top_p for one in trainer.sequences(batch) for _, drawn in one.drawn_from} == {0.5}
    check_on_policy(trainer.train())


def test_saved_replies_that_were_taken_greedily_are_learned_from_as_texts(tmp_path):
    tokenizer = tiny.tokenizer()
    client = vf.LocalModel(tiny.model(tokenizer, seed=1), tokenizer)
    env = making.environment(4, sampling_args={"temperature": 0.0, "max_tokens": 8})
    results = env.generate(client=client, rollouts_per_example=2, use_tqdm=False)
    for i, state in enumerate(results.rollouts):
        state["reward"] = float(i % 2)
    trainer = vf.GRPOTrainer(
        model=tiny.model(tokenizer),
        tokenizer=tokenizer,
        dataset=results,
        config=making.config(tmp_path, learning_rate=0.0, temperature=0.7, batch_size=8, group_size=2, max_steps=1),
    )
    batch = with_advantages(trainer.get_batch(0, 0), Estimator("dr_grpo"))
    assert {drawn for one in trainer.sequences(batch) for _, drawn in one.drawn_from} == {Distribution(temperature=0.7)}
    assert all(step["ratio_mean"] == pytest.approx(1.0, abs=1e-6) for step in trainer.train().steps)


def test_arguments_that_an_engine_draws_by_and_an_update_cannot_compute_are_named():
    with pytest.raises(ValueError, match=r"repetition_penalty=1\.1"):
        sampling.read_distribution({"asked": {"extra_body": {"repetition_penalty": 1.1}}})
    assert sampling.read_distribution({"asked": {"frequency_penalty": 0, "stop": ["x"]}}) == Distribution(
        is_requested=True
    )
