"""Run in an environment with Tinker's SDK: it trains against our server, and our trainer trains through it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["TINKER_API_KEY"] = "tml-local"
os.environ["TINKER_TELEMETRY"] = "0"

import tinker
import torch
from click.testing import CliRunner
from tinker import types

import verifiers as vf
from tests.support.doc_blocks import unrun_blocks
from verifiers.cli.main import vf as command
from verifiers.integrations.tinker import TinkerServer, TinkerTrainer

torch.set_num_threads(1)
ONE = types.SamplingParams(max_tokens=8, temperature=1.0)


def digit_share(text: str) -> float:
    return sum(char.isdigit() for char in text) / 8


def digits(completion: Any) -> float:
    return digit_share(completion[-1]["content"])


class World:
    """A tiny model saved in a folder, a server over it, and the SDK's client of that."""

    def __init__(self, folder: Path) -> None:
        self.home, self.saved = folder / "tiny", folder / "saved"
        model, self.tokenizer = vf.tiny_model(hidden_size=64)
        model.save_pretrained(self.home)
        self.tokenizer.save_pretrained(self.home)
        self.prompts = [self.tokenizer.encode(f"<|user|>{i}?<|end|><|assistant|>") for i in range(2)]

    def serve(self) -> TinkerServer:
        return TinkerServer(str(self.home), name="org/tiny", folder=self.saved)

    def sampled(self, sampler: Any, n: int = 8) -> list[tuple[list[int], Any]]:
        asked = [sampler.sample(types.ModelInput.from_ints(prompt), n, ONE) for prompt in self.prompts]
        return [(p, one) for p, found in zip(self.prompts, asked, strict=True) for one in found.result().sequences]

    def data(self, pairs: list[tuple[list[int], Any]], n: int = 8) -> tuple[list[types.Datum], list[float]]:
        rewards = [digit_share(self.tokenizer.decode(one.tokens, skip_special_tokens=True)) for _, one in pairs]
        data = []
        for i, (prompt, one) in enumerate(pairs):
            group = rewards[i // n * n : i // n * n + n]
            advantage, before, full = rewards[i] - sum(group) / n, len(prompt) - 1, [*prompt, *one.tokens]
            inputs = {
                "target_tokens": torch.tensor(full[1:]),
                "logprobs": torch.tensor([0.0] * before + list(one.logprobs)),
                "advantages": torch.tensor([0.0] * before + [advantage] * len(one.tokens)),
            }
            data.append(types.Datum(model_input=types.ModelInput.from_ints(full[:-1]), loss_fn_inputs=inputs))
        return data, rewards


def gap(data: list[types.Datum], found: Any) -> float:
    """How far the trainer's logprobs are from the sampler's."""
    worst = 0.0
    for one, out in zip(data, found.loss_fn_outputs, strict=True):
        old, new = one.loss_fn_inputs["logprobs"].to_torch(), out["logprobs"].to_torch()
        worst = max(worst, float((new - old)[old != 0].abs().max()))
    return worst


def learn(world: World, service: Any, loss: str = "importance_sampling") -> None:
    """The reward rises, and at each step the trainer's logprobs are those of sampling."""
    training = service.create_lora_training_client(base_model="org/tiny", rank=16, seed=0).result()
    assert len(training.get_tokenizer()) == len(world.tokenizer)
    means = []
    for _ in range(12):
        data, rewards = world.data(world.sampled(training.save_weights_and_get_sampling_client().result()))
        learning = training.forward_backward(data, loss)
        stepping = training.optim_step(types.AdamParams(learning_rate=1e-2))
        assert gap(data, learning.result()) < 1e-5
        assert stepping.result().metrics["grad_norm"] >= 0
        means.append(sum(rewards) / len(rewards))
    assert means[-1] > means[0] + 0.4, means


def every_loss(world: World, service: Any) -> None:
    """Each loss of the SDK has the value of its formula, and moves the weights."""
    base = service.create_sampling_client(base_model="org/tiny").result()
    data, _ = world.data(world.sampled(base))
    shifted = []  # as if another policy had sampled, so that ratios are not 1
    for i, one in enumerate(data):
        inputs = {name: value.to_torch() for name, value in one.loss_fn_inputs.items()}
        is_sampled = inputs["logprobs"] != 0
        inputs["logprobs"] = inputs["logprobs"] + is_sampled * 0.3 * (-1) ** i
        inputs["advantages"] = inputs["advantages"] + is_sampled * (0.1 + 0.05 * i)
        shifted.append(types.Datum(model_input=one.model_input, loss_fn_inputs=inputs))

    def formulas(lp: Any, q: Any, a: Any) -> dict[str, Any]:
        r, mask = (lp - q).exp(), q != 0
        s = ((lp - q)[mask].mean()).exp()
        return {
            "importance_sampling": -(r * a).sum(),
            "ppo": -torch.minimum(r * a, r.clamp(0.8, 1.2) * a).sum(),
            "cispo": -(r.clamp(0.8, 1.2) * a * lp).sum(),
            "dro": -(lp * a - 0.025 * (lp - q) ** 2).sum(),
            "gspo": -torch.minimum(s * a, s.clamp(0.8, 1.2) * a).sum(),
            "stable_reinforce": (-r.clamp(max=2) * a * lp + 0.01 * ((q - lp).exp() - (q - lp) - 1) * mask).sum(),
        }

    def by_formula(name: str, found: Any) -> float:
        total = 0.0
        for one, out in zip(shifted, found.loss_fn_outputs, strict=True):
            q, a = (one.loss_fn_inputs[key].to_torch() for key in ("logprobs", "advantages"))
            total += float(formulas(out["logprobs"].to_torch(), q, a)[name])
        return total

    for name in ("importance_sampling", "ppo", "cispo", "dro", "gspo", "stable_reinforce"):
        training = service.create_lora_training_client(base_model="org/tiny", rank=4, seed=1).result()
        found = training.forward_backward(shifted, name).result()
        wanted = by_formula(name, found)
        assert abs(found.metrics["loss:sum"] - wanted) < 1e-3 * max(1.0, abs(wanted)), (name, found.metrics, wanted)
        assert training.optim_step(types.AdamParams(learning_rate=1e-3)).result().metrics["grad_norm"] > 0, name
    wide = {"clip_high_threshold": 100.0, "clip_low_threshold": 0.0}
    found = training.forward_backward(shifted, "ppo", wide).result()
    unclipped, clipped = (by_formula(name, found) for name in ("importance_sampling", "ppo"))
    assert abs(found.metrics["loss:sum"] - unclipped) < 1e-3 * max(1.0, abs(unclipped)) < abs(clipped - unclipped)


def cross_entropy_and_custom(world: World, service: Any) -> None:
    """A loss written in the client, one traced and run by the server, and cross-entropy give the same gradients."""
    ids = world.tokenizer.encode("3141592653")
    weights = torch.tensor([0.0, 0.0] + [1.0] * (len(ids) - 3))
    inputs = {"target_tokens": torch.tensor(ids[1:]), "weights": weights}
    datum = types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)

    def in_client(data: Any, logprobs: Any) -> Any:
        return -sum(
            (lp * one.loss_fn_inputs["weights"].to_torch()).sum() for lp, one in zip(logprobs, data, strict=True)
        ), {"n": 1.0}

    def traced(logprobs: Any, weights: Any) -> Any:
        loss = -(logprobs * weights).sum()
        return loss, {"custom/loss:sum": loss.detach()}

    handle = service.create_custom_loss(traced, {"logprobs": 1, "weights": 1}).result()
    norms, sums = [], []
    for run in (
        lambda one: one.forward_backward([datum], "cross_entropy"),
        lambda one: one.forward_backward_custom([datum], in_client),
        lambda one: one.forward_backward_custom([datum], handle),
    ):
        training = service.create_lora_training_client(base_model="org/tiny", rank=4, seed=2).result()
        sums.append(run(training).result().metrics["loss:sum"])
        norms.append(training.optim_step(types.AdamParams(learning_rate=1e-3)).result().metrics["grad_norm"])
    assert handle.loss_id is not None
    assert max(sums) - min(sums) < 1e-4, sums
    assert max(norms) - min(norms) < 1e-4, norms
    forward = training.forward([datum], "cross_entropy").result()
    assert abs(forward.metrics["loss:sum"] - sums[0]) > 1e-6  # a step was made
    several = types.Datum(
        model_input=datum.model_input,
        loss_fn_inputs={
            "target_tokens": torch.tensor([[one, 5] for one in ids[1:]]),
            "weights": torch.stack([weights, 0 * weights], 1),
        },
    )
    both = training.forward_backward([several, datum], "cross_entropy").result()
    wide, narrow = (one["logprobs"].to_torch() for one in both.loss_fn_outputs)
    wide = wide.reshape(len(ids) - 1, 2)
    assert torch.allclose(wide[:, 0], narrow.reshape(-1), atol=1e-5)
    assert abs(both.metrics["loss:sum"] - 2 * forward.metrics["loss:sum"]) < 1e-4


def several_loras(world: World, service: Any) -> None:
    """Trainings of different ranks go on side by side, and what is sampled from each is its own."""
    ids = world.tokenizer.encode("0123456789")
    prompt = types.ModelInput.from_ints(ids)
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={"target_tokens": torch.tensor(ids[1:]), "weights": torch.ones(len(ids) - 1)},
    )
    base = service.create_sampling_client(base_model="org/tiny").result()
    trainings = [service.create_lora_training_client("org/tiny", rank=rank, seed=rank).result() for rank in (4, 8, 16)]
    trainings.append(service.create_lora_training_client("org/tiny", rank=4, seed=9, train_unembed=False).result())
    samplers = []
    for i, training in enumerate(trainings):
        for _ in range(i + 1):
            training.forward_backward([datum], "cross_entropy")
            training.optim_step(types.AdamParams(learning_rate=3e-3))
        samplers.append(training.save_weights_and_get_sampling_client().result())
    wanted = [
        one.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_torch() for one in trainings
    ]
    trainings[0].forward_backward([datum], "cross_entropy")
    trainings[0].optim_step(types.AdamParams(learning_rate=1e-2)).result()  # samplers stay what they were
    busy = [one.sample(prompt, 4, ONE) for one in (*samplers, base)] + [one.sample(prompt, 4, ONE) for one in samplers]
    asked = [one.compute_logprobs(prompt) for _ in range(3) for one in samplers]  # mixed up on purpose
    for i, found in enumerate(asked):
        got = torch.tensor(found.result()[1:])
        assert torch.allclose(got, wanted[i % len(wanted)], atol=1e-5), i
    assert all(len(one.result().sequences) == 4 for one in busy)
    unchanged = torch.tensor(base.compute_logprobs(prompt).result()[1:])
    assert all(float((unchanged - one).abs().max()) > 1e-3 for one in wanted)
    seeded = types.SamplingParams(max_tokens=8, temperature=1.0, seed=7)
    twice = [samplers[1].sample(prompt, 3, seeded).result() for _ in range(2)]
    assert [one.tokens for one in twice[0].sequences] == [one.tokens for one in twice[1].sequences]
    top = samplers[1].sample(
        prompt, 1, seeded, include_prompt_logprobs=True, topk_prompt_logprobs=3, topk_sample_logprobs=2
    )
    assert top.result().topk_prompt_logprobs_np.logprobs.shape == (len(ids), 3)
    targets = types.TensorData.from_torch(torch.tensor([[one, -1] for one in ids[1:]]))
    scored = samplers[1].sample(prompt, 1, seeded, target_prompt_logprobs=targets).result().target_prompt_logprobs
    assert torch.allclose(scored.to_torch()[:, 0], wanted[1], atol=1e-5)


def stable(world: World, service: Any) -> None:
    """stable_reinforce finds the logprobs of what was sampled by the ids of its sequences."""
    training = service.create_lora_training_client("org/tiny", rank=4, seed=1).result()
    sampler = training.save_weights_and_get_sampling_client(record_stability_info=True).result()
    prompt = world.prompts[0]
    one = sampler.sample(types.ModelInput.from_ints(prompt), 1, ONE).result().sequences[0]
    full, before = [*prompt, *one.tokens], len(prompt) - 1
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(full[:-1]),
        loss_fn_inputs={
            "target_tokens": torch.tensor(full[1:]),
            "advantages": torch.tensor([0.0] * before + [1.0] * len(one.tokens)),
        },
    )
    spans = [
        types.PromptProvenanceSpan(sequence_id=one.sequence_id, length=before),
        types.SampledProvenanceSpan(sequence_id=one.sequence_id, length=len(one.tokens)),
    ]
    inputs = [
        types.PromptProvenanceSpan(sequence_id=one.sequence_id, length=before + 1),
        types.SampledProvenanceSpan(sequence_id=one.sequence_id, length=len(one.tokens) - 1),
    ]
    found = training.forward_backward([datum.with_provenance(inputs, spans)], "stable_reinforce").result()
    assert abs(found.metrics["loss:sum"] + sum(one.logprobs)) < 1e-4  # ratio 1, no divergence
    _refused(lambda: training.forward_backward([datum], "stable_reinforce").result(), "logprobs")


def _refused(call: Callable[[], Any], *words: str) -> None:
    said = ""
    try:
        call()
    except Exception as error:
        said = str(error)
    assert said, f"not refused: {words}"
    assert all(word in said for word in words), said


def refuse(world: World, service: Any) -> None:
    """What is wrong is said in a sentence, and what comes after it is served."""
    _refused(lambda: service.create_lora_training_client("org/other", rank=4).result(), "org/other", "org/tiny")
    _refused(lambda: service.create_lora_training_client("org/tiny", rank=100000).result(), "rank")
    _refused(lambda: service.create_sampling_client(model_path="tinker://no/weights/x").result(), "no saved weights")
    training = service.create_lora_training_client("org/tiny", rank=4, seed=0).result()
    ids = world.prompts[0]

    def datum(**inputs: Any) -> types.Datum:
        return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)

    targets = torch.tensor(ids[1:])
    learn_from = training.forward_backward
    _refused(lambda: learn_from([datum(target_tokens=targets)], "ppo").result(), "logprobs", "ppo")
    _refused(lambda: learn_from([datum(target_tokens=targets)], "reinforce").result(), "reinforce", "cispo")
    _refused(lambda: learn_from([datum(target_tokens=targets[1:])], "cross_entropy").result(), "target_tokens")
    strange = datum(target_tokens=targets + 100000)
    _refused(lambda: learn_from([strange], "cross_entropy").result(), "not tokens of this model")
    nans = torch.full((len(targets),), float("nan"))
    _refused(lambda: learn_from([datum(target_tokens=targets, weights=nans)], "cross_entropy").result(), "finite")
    _refused(lambda: learn_from([datum(target_tokens=targets)], "cross_entropy", {"beta": 1.0}).result(), "beta")
    _refused(lambda: training.optim_step(types.AdamParams(learning_rate=-1.0)).result(), "learning_rate")
    _refused(lambda: training.save_state("a/b").result(), "name")
    sampler = training.save_weights_and_get_sampling_client().result()
    _refused(lambda: sampler.sample(types.ModelInput.from_ints([1] * 300), 1, ONE).result(), "300 tokens")
    hot = types.SamplingParams(max_tokens=4, temperature=-1.0)
    _refused(lambda: sampler.sample(types.ModelInput.from_ints(ids), 1, hot).result(), "temperature")
    assert learn_from([datum(target_tokens=targets)], "cross_entropy").result().metrics["loss:sum"] > 0
    assert len(sampler.sample(types.ModelInput.from_ints(ids), 2, ONE).result().sequences) == 2


def save(world: World, service: Any) -> tuple[str, str, Any, Any]:
    """A training that is saved, and what its next step would give."""
    training = service.create_lora_training_client("org/tiny", rank=8, seed=3, user_metadata={"by": "test"}).result()
    ids = world.tokenizer.encode("27182818")
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs={"target_tokens": torch.tensor(ids[1:])}
    )
    for _ in range(3):
        training.forward_backward([datum], "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=3e-3)).result()
    state, sampler = (
        training.save_state("three").result().path,
        training.save_weights_for_sampler("three").result().path,
    )
    _refused(lambda: training.save_state("three").result(), "already exists")
    assert training.save_state("three", overwrite=True).result().path == state
    training.forward_backward([datum], "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=3e-3)).result()
    wanted = training.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_torch()
    return state, sampler, datum, wanted


def restart(world: World, service: Any, state: str, sampler: str, datum: Any, wanted: Any) -> None:
    """After a restart the saved weights are there, and a training goes on exactly where it was."""
    training = service.create_training_client_from_state_with_optimizer(state).result()
    training.forward_backward([datum], "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=3e-3)).result()
    got = training.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_torch()
    assert torch.allclose(got, wanted, atol=1e-6), float((got - wanted).abs().max())
    fresh = service.create_training_client_from_state(state).result()
    start = fresh.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_torch()
    sampled = service.create_sampling_client(model_path=sampler).result()
    ids = [*datum.model_input.to_ints(), int(datum.loss_fn_inputs["target_tokens"].to_torch()[-1])]
    assert torch.allclose(
        torch.tensor(sampled.compute_logprobs(types.ModelInput.from_ints(ids)).result()[1:]), start, atol=1e-5
    )
    rest = service.create_rest_client()
    run = rest.get_training_run_by_tinker_path(state).result()
    assert (run.base_model, run.lora_rank, run.user_metadata) == ("org/tiny", 8, {"by": "test"})
    assert {one.tinker_path for one in rest.list_checkpoints(run.training_run_id).result().checkpoints} == {
        state,
        sampler,
    }
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(world.home)
    adapted = PeftModel.from_pretrained(base, world.saved / sampler.removeprefix("tinker://"))
    logits = adapted(torch.tensor([ids[:-1]])).logits[0].log_softmax(-1)
    theirs = logits.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert torch.allclose(theirs, start, atol=1e-5)
    rest.delete_checkpoint_from_tinker_path(sampler).result()
    _refused(lambda: service.create_sampling_client(model_path=sampler).result(), "no saved weights")


def backend(folder: Path, url: str) -> None:
    """``vf train --backend tinker`` over the SDK: the reward rises, a stopped run goes on, temperature is 1."""
    rows = [{"question": name, "answer": ""} for name in "abcd"]
    env = vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric([digits]))
    settings = {
        "batch_size": 16,
        "group_size": 8,
        "max_new_tokens": 8,
        "learning_rate": 1e-2,
        "show_progress": False,
        "save_steps": 4,
    }
    for wrong in ({"temperature": 0.7}, {"top_p": 0.9}, {"kl_coef": 0.1}, {"bf16": True}):
        _refused(
            lambda wrong=wrong: TinkerTrainer("org/tiny", env, {**settings, **wrong}, base_url=url),
            next(iter(wrong)),
        )
    _refused(lambda: TinkerTrainer("org/none", env, settings, base_url=url), "org/none", "org/tiny")
    for loss, steps in (("dr_grpo", 1), ("gspo", 1), ("cispo", 1), ("sapo", 1)):
        place = folder / f"run-{loss}"
        config = {**settings, "loss_type": loss, "max_steps": steps, "output_dir": str(place)}
        trainer = TinkerTrainer("org/tiny", env, config, base_url=url, rank=8)
        report = trainer.train()
        assert abs(report.steps[0]["ratio_mean"] - 1.0) < 1e-4, report.steps[0]
        assert report.steps[0]["grad_norm"] > 0
    config = {**settings, "output_dir": str(folder / "first")}
    first = TinkerTrainer("org/tiny", env, {**config, "max_steps": 12}, base_url=url, rank=8)
    rewards = first.train().rewards
    assert sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + 0.3, rewards
    more = TinkerTrainer("org/tiny", env, {**config, "max_steps": 13}, base_url=url, rank=8)
    went_on = more.train(resume=True)
    assert len(went_on.steps) == 13
    assert went_on.steps[-1]["reward"] > rewards[0] + 0.3
    first.save_model(folder / "kept")
    assert '"sampler_path"' in (folder / "kept" / "tinker.json").read_text()


def by_command(folder: Path, url: str) -> None:
    said = CliRunner().invoke(
        command,
        ["train", "arithmetic", "-m", "org/tiny", "--backend", "tinker", "--base-url", url, "--lora-r", "4",
         "--max-steps", "1", "--batch-size", "4", "--group-size", "2", "--max-new-tokens", "4",
         "--output-dir", str(folder / "by-command")],
    )  # fmt: skip
    assert said.exit_code == 0, said.output
    assert (folder / "by-command" / "model" / "tinker.json").is_file(), said.output
    plan = CliRunner().invoke(
        command, ["train", "arithmetic", "-m", "org/tiny", "--backend", "tinker", "--base-url", url, "--dry-run"]
    )
    assert plan.exit_code == 0, plan.output
    assert "Tinker at http://127.0.0.1" in plan.output
    hot = CliRunner().invoke(
        command,
        ["train", "arithmetic", "-m", "org/tiny", "--backend", "tinker", "--base-url", url, "--temperature", "0.5"],
    )
    assert hot.exit_code == 2, hot.output
    assert "temperature must be 1.0" in hot.output


def documented(folder: Path, url: str) -> None:
    """The page's own blocks, with the model that is served here and smaller batches."""
    small = '"group_size": 4, "batch_size": 8, "max_new_tokens": 4, "max_steps": 1, "show_progress": False'
    put = {
        "Qwen/Qwen3-8B": "org/tiny",
        "gsm8k": "arithmetic",
        '"group_size": 16, "batch_size": 64': f'{small}, "output_dir": "{folder / "documented"}"',
        "rank=32)": f'rank=8, base_url="{url}")',
        '"trained"': f'"{folder / "trained"}"',
        "http://127.0.0.1:8001": url,
        "smollm2": "org/tiny",
    }
    for code in unrun_blocks("tinker.md", "needs Tinker's SDK", put):
        exec(code, {})
    assert (folder / "trained" / "tinker.json").is_file()


def main(folder: Path) -> None:
    world = World(folder)
    with world.serve() as server:
        service = tinker.ServiceClient(base_url=server.url)
        for part in (learn, every_loss, cross_entropy_and_custom, several_loras, stable, refuse):
            part(world, service)
            print(f"{part.__name__}: holds", flush=True)
        kept = save(world, service)
    with world.serve() as server:
        restart(world, tinker.ServiceClient(base_url=server.url), *kept)
        print("restart: holds", flush=True)
        backend(folder, server.url)
        by_command(folder, server.url)
        print("backend: holds", flush=True)
        documented(folder, server.url)
        print("documented: holds", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)  # the SDK's threads outlive the servers that they ask
