"""Whole updates, in many combinations of the knobs, against the methods' definitions written out with plain PyTorch.

The oracle knows nothing of the package but what a rollout's state says: rewards, the tokens of each turn, and the
logprobs that they were sampled with.
"""

from __future__ import annotations

import math
import random
from statistics import fmean, pstdev
from typing import Any
from zlib import crc32

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import verifiers as vf  # noqa: E402
from tests.trainers import making  # noqa: E402

MOST_TOKENS = 8
KNOBS: dict[str, list[Any]] = {
    "loss_type": ["grpo", "dr_grpo", "dapo", "bnpo", "gspo", "cispo", "sapo"],
    "scale_rewards": [None, "none", "group", "batch"],
    "importance_sampling_level": [None, "token", "sequence"],
    "epsilon": [0.1],
    "epsilon_high": [0.3],
    "delta": [None, 1.5],
    "importance_cap": [None, 1.4],
    "importance_sampling_mode": [None, "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"],
    "importance_sampling_clip_min": [None, 0.8],
    "importance_sampling_clip_max": [1.3],
    "entropy_coef": [0.0, 0.3, -0.2],
    "top_entropy_quantile": [1.0, 0.37],
    "kl_coef": [0.0, 0.2],
    "mask_truncated_completions": [False, True],
    "temperature": [1.0, 0.7],
    "micro_batch_tokens": [40, 4096],
}


FORGETFUL = (  # shows the last message alone: every turn is a sample of its own
    "{% for m in messages[-1:] %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Conversation(vf.MultiTurnEnv):
    """Two turns, the words of the environment between them; some rollouts fail, and one row is always a 1."""

    @vf.stop
    async def is_enough(self, state: Any) -> bool:
        """Some rollouts end after their first turn."""
        said = state["trajectory"][-1:]
        return bool(said) and sum(said[0]["tokens"]["completion_ids"]) % 3 == 0

    def env_response(self, messages: Any, state: Any) -> Any:
        return [{"role": "user", "content": "and more of it"}]


def environment() -> Any:
    def score(completion: Any, answer: Any) -> float:
        # By what was said, not by who is scored first: the same rollouts fail in every run.
        if crc32(f"{answer} {completion[0]['content']}".encode()) % 5 == 4:
            raise ConnectionError("the judge is down")
        return 1.0 if answer == "1" else making.share_of_e(completion)

    rows = [{"question": f"say {i}", "answer": str(i)} for i in range(4)]
    return Conversation(dataset=rows, rubric=vf.Rubric([score]), max_turns=2)


# --- the oracle ---------------------------------------------------------------------------------------------------


def sequences_of(state: Any) -> list[tuple[list[int], dict[int, float]]]:
    """All tokens of a rollout and, for each place that was sampled, its logprob: one list while it only grows."""
    found: list[tuple[list[int], dict[int, float]]] = []
    for step in state["trajectory"]:
        tokens = step["tokens"]
        before, reply = list(tokens["prompt_ids"]), list(tokens["completion_ids"])
        sampled = dict(enumerate(tokens["completion_logprobs"], len(before)))
        if found and before[: len(found[-1][0])] == found[-1][0]:
            sampled |= found.pop()[1]
        found.append((before + reply, sampled))
    return found


def advantages(config: Any, rewards_of: dict[int, list[float]]) -> dict[int, list[float]]:
    """GRPO: (R − mean) / std of the group or of the batch; Dr. GRPO: R − mean."""
    scale = config.scale_rewards or ("none" if config.loss_type == "dr_grpo" else "group")
    everyone = [reward for rewards in rewards_of.values() for reward in rewards]
    found = {}
    for group, rewards in rewards_of.items():
        std = {"none": 1.0, "group": pstdev(rewards), "batch": pstdev(everyone)}[scale]
        mean = fmean(rewards)
        found[group] = [(one - mean) / std if std > 1e-6 else 0.0 for one in rewards]
    return found


def clipped_loss(config: Any, ratio: Any, a: float, logprob: Any) -> Any:
    """What one token adds to the policy's loss; the importance cap bounds the weight, without a gradient."""
    low, high = 1 - config.epsilon, 1 + config.epsilon_high
    cap = config.importance_cap if config.importance_cap is not None else math.inf
    if config.loss_type == "cispo":
        return -min(ratio.item(), high, cap) * a * logprob
    if config.loss_type == "sapo":
        tau = config.sapo_temperature_pos if a > 0 else config.sapo_temperature_neg
        weight = torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    else:
        bounded = ratio if config.delta is None else ratio.clamp(max=config.delta)
        weight = torch.stack([bounded, ratio.clamp(low, high)])
        weight = (weight * a).min() / a if a else ratio * 0
    return -weight * a * min(1.0, cap / weight.item()) if a else weight * 0


def wanted_gradients(trainer: Any, reference: Any, states: dict[int, list[Any]]) -> list[Any]:
    config, model = trainer.config, trainer.model
    of_group = advantages(config, {group: [one["reward"] for one in members] for group, members in states.items()})
    samples, n = [], 0
    for group, members in states.items():
        for state, a in zip(members, of_group[group], strict=True):
            if not (config.mask_truncated_completions and state["is_truncated"]):
                own = sequences_of(state)
                length = sum(len(sampled) for _, sampled in own)  # of the rollout, which counts once
                samples += [(ids, sampled, a, length) for ids, sampled in own]
                n += 1
    scored = []
    for ids, sampled, a, length in samples:
        places = sorted(sampled)
        found = []
        for one in (model, reference):
            logits = one(input_ids=torch.tensor([ids])).logits[0, [place - 1 for place in places]] / config.temperature
            found.append(torch.log_softmax(logits, -1))
        target = torch.tensor([[ids[place]] for place in places])
        new, ref = (one.gather(1, target)[:, 0] for one in found)
        scored.append(
            (new, ref.detach(), -(found[0].exp() * found[0]).sum(-1), [sampled[p] for p in places], a, length)
        )
    entropies = torch.cat([one[2] for one in scored])
    least = torch.quantile(entropies.detach(), 1 - config.top_entropy_quantile)
    total = 0.0
    all_tokens = len(entropies)
    kept_entropies = entropies[entropies >= least]
    for new, ref, entropy, sampler, a, length in scored:
        weight = {
            "dr_grpo": 1 / (n * MOST_TOKENS),
            **dict.fromkeys(("grpo", "gspo", "sapo"), 1 / (n * length)),
        }.get(config.loss_type, 1 / all_tokens)
        gap = new.detach() - torch.tensor(sampler)
        mode = config.importance_sampling_mode
        old = torch.tensor(sampler) if mode is None else new.detach()
        log_ratio = new - old
        level = config.importance_sampling_level or ("sequence" if config.loss_type == "gspo" else "token")
        if level == "sequence":
            log_ratio = log_ratio.mean().expand(len(new))
        for t in range(len(new)):
            loss = clipped_loss(config, log_ratio[t].exp(), a, new[t])
            if mode is not None:
                ratio = math.exp(float(gap.sum() if mode.startswith("sequence") else gap[t]))
                low, high = config.importance_sampling_clip_min or 0.0, config.importance_sampling_clip_max
                is_inside = low <= ratio <= high
                loss = loss * (min(max(ratio, low), high) if mode.endswith("truncate") else ratio * is_inside)
            loss = loss * bool(entropy[t] >= least)
            k3 = torch.exp(ref[t] - new[t]) - (ref[t] - new[t]) - 1
            total = total + weight * (loss + config.kl_coef * k3)
    tokens = len(kept_entropies) if config.top_entropy_quantile < 1 else all_tokens
    total = total - config.entropy_coef * kept_entropies.sum() / tokens
    model.zero_grad(set_to_none=True)
    total.backward()
    found = [one.grad.clone() for one in model.parameters()]
    model.zero_grad(set_to_none=True)
    return found


# --- the test -----------------------------------------------------------------------------------------------------


def combination(seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    chosen = {name: draw.choice(values) for name, values in KNOBS.items()}
    return {**chosen, "loss_type": KNOBS["loss_type"][seed % 7]}


@pytest.mark.filterwarnings("ignore:.* has no effect")  # some combinations leave knobs unread
@pytest.mark.parametrize("seed", range(21))
def test_an_update_is_the_gradient_of_the_methods_written_out(tmp_path: Any, seed: int) -> None:
    settings, tokenizer = combination(seed), making.tiny.tokenizer(FORGETFUL if seed >= 14 else making.tiny.CHATML)
    config = making.config(tmp_path, learning_rate=0.0, max_grad_norm=None, **settings)
    model = making.tiny.model(tokenizer)
    made = vf.GRPOTrainer(model=model, tokenizer=tokenizer, env=environment(), config=config)
    batch = made._generate_batch(0)
    draw = random.Random(seed)
    states: dict[int, list[Any]] = {}
    for group, reply in zip(batch["groups"], batch["completions"], strict=True):
        states.setdefault(group, []).append(reply.state)
        reply.state["is_truncated"] = draw.random() < 0.3
        for step in reply.state["trajectory"]:  # a sampler that is not quite the policy
            tokens = step["tokens"]
            tokens["completion_logprobs"] = [one + draw.gauss(0, 0.2) for one in tokens["completion_logprobs"]]
    assert batch.failed
    assert len(states) == 4
    reference = making.tiny.model(made.tokenizer)
    assert made.update  # has taken its reference
    with torch.no_grad():  # somewhere else than the policy
        for one in made.model.parameters():
            one.add_(0.02 * torch.randn(one.shape, generator=torch.Generator().manual_seed(seed)))
    wanted = wanted_gradients(made, reference, states)
    seen: list[Any] = []
    step = made.weights.step
    made.weights.step = lambda rate: (seen.extend(one.clone() for one in made.weights.gradients()), step(rate))[1]
    made.train_step(batch)
    if not seen:
        seen = [torch.zeros_like(one) for one in wanted]
    largest = max(float(one.abs().max()) for one in wanted)
    for found, own in zip(seen, wanted, strict=True):
        assert torch.allclose(found, own, atol=1e-5 * max(largest, 1e-3), rtol=1e-3), settings
