"""What a run keeps to be looked at: judges' replies with what they were asked, tokens of trainings with ratios."""

from __future__ import annotations

import math

import pytest

from tests.viewer import making
from verifiers.viewer.library import run_id_of


def test_a_judges_reply_and_what_it_was_asked_are_kept_with_the_rollout(ask, root):
    path = making.judged_run(root)
    rollout = ask(f"runs/{run_id_of(path)}/rollouts/0")["rollout"]
    [one] = rollout["judged"]
    assert "Why is the sky blue? (reader" in one["asked"]
    assert one["replied"].endswith(("yes", "no"))
    assert "judge_response" not in rollout["columns"]


def test_judges_replies_of_the_wrong_kind_are_no_crash(ask, make_run, make_record):
    for odd in ([1], "text", {"asked": {"deep": [1]}}, None):
        run = make_run(make_record(judge_response=odd))
        judged = ask.run(run, "/rollouts/0")["rollout"]["judged"]
        assert judged == ([{"asked": "asked", "replied": {"deep": [1]}}] if isinstance(odd, dict) else [])


def test_tokens_of_a_training_have_logprob_advantage_and_the_ratio_of_the_last_pass(ask, root):
    torch = pytest.importorskip("torch")
    from tests.trainers import making as trainers

    trainer = trainers.trainer(root / "t", num_iterations=2, learning_rate=0.05, max_steps=1)
    trainer.train()
    run = f"runs/{run_id_of(root / 't' / 'run')}"
    rows = ask(f"{run}/rollouts")["rows"]
    learned = [row for row in rows if row["advantage"]]
    assert learned, "a group that scored differently"
    for row in learned:
        [turn] = ask(f"{run}/rollouts/{row['number']}")["rollout"]["turns"]
        assert len(turn["ids"]) == len(turn["logprobs"]) == len(turn["ratios"]) > 0
        assert turn["prompt_tokens"] > 0
        assert any(abs(ratio - 1) > 1e-3 for ratio in turn["ratios"]), "the first pass moved the policy"
    del torch


def test_a_ratio_is_the_probability_after_over_the_probability_when_drawn(root):
    torch = pytest.importorskip("torch")
    from tests.trainers import making as trainers
    from verifiers.trainers.batch import as_batch

    trainer = trainers.trainer(root / "t", num_iterations=2, learning_rate=0.05, max_steps=1)
    batch = as_batch(trainer.get_batch())
    probabilities = []

    class Watching(type(trainer.update.weights)):
        def step(self, rate):
            found = super().step(rate)
            if not probabilities:
                probabilities.append({key: one.detach().clone() for key, one in trainer.model.state_dict().items()})
            return found

    trainer.update.weights.__class__ = Watching
    trainer.train_step(batch)
    trainer.model.load_state_dict(probabilities[0])  # as it was for the second, last pass
    place, ratios = next(iter(batch.ratios.items()))
    tokens = batch["completions"][place].state["trajectory"][0]["tokens"]
    ids = torch.tensor([[*tokens["prompt_ids"], *tokens["completion_ids"]]])
    with torch.no_grad():
        logits = trainer.model(input_ids=ids).logits[0, len(tokens["prompt_ids"]) - 1 : -1]
    new = torch.log_softmax(logits.float(), -1).gather(1, ids[0, len(tokens["prompt_ids"]) :, None])[:, 0]
    expected = [math.exp(a - b) for a, b in zip(new.tolist(), tokens["completion_logprobs"], strict=True)]
    assert ratios == pytest.approx(expected, rel=2e-3)


def test_a_rollout_that_was_not_learned_from_has_no_ratios(ask, root):
    pytest.importorskip("torch")
    import verifiers as vf
    from tests.trainers import making as trainers

    def same(completion):
        return 1.0

    trainers.trainer(root / "t", env=trainers.environment(rubric=vf.Rubric([same])), max_steps=1).train()
    run = f"runs/{run_id_of(root / 't' / 'run')}"
    [turn] = ask(f"{run}/rollouts/0")["rollout"]["turns"]
    assert turn["logprobs"]
    assert turn["ratios"] == []


def test_log_rollouts_of_none_keeps_no_tokens(root):
    pytest.importorskip("torch")
    from tests.trainers import making as trainers

    trainer = trainers.trainer(root / "t", log_rollouts=0, max_steps=1)
    trainer.train()
    assert not (root / "t" / "run" / "results.jsonl").read_bytes()
