"""A training as one of several processes, or alone: what `test_processes` starts."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

import verifiers as vf
from tests.engine import tiny
from tests.trainers import making


def saved_rollouts() -> dict[str, Any]:
    """Replies of very different lengths, so that the processes' token counts differ."""
    return {
        "prompts": [[{"role": "user", "content": f"say {i // 4}"}] for i in range(16)],
        "completions": [[{"role": "assistant", "content": "e" * (1 + 3 * (i % 4) * (1 + i // 8))}] for i in range(16)],
        "rewards": [((i * 7) % 5) / 4 for i in range(16)],
    }


def offline(folder: Path, processes: int, kind: str, **more: Any) -> Any:
    tokenizer = tiny.tokenizer()
    config = making.config(folder, max_steps=2, batch_size=16 // processes, loss_type=kind, **more)
    return vf.GRPOTrainer(model=tiny.model(tokenizer), tokenizer=tokenizer, dataset=saved_rollouts(), config=config)


def recomputing(folder: Path, processes: int) -> Any:
    """Activations computed again in the backward pass, in several micro-batches."""
    return offline(folder, processes, "grpo", gradient_checkpointing=True, micro_batch_tokens=64)


def half_precision(folder: Path, processes: int) -> Any:
    return offline(folder, processes, "grpo", bf16=True)


def batch_wide(folder: Path, processes: int) -> Any:
    """What is normalised, ranked or averaged over a batch is so over that of all processes."""
    settings = {"advantage": "reinforce_plus_plus", "entropy_coef": 0.1, "top_entropy_quantile": 0.5}
    return offline(folder, processes, "sapo", **settings)


def online(folder: Path, processes: int, **kwargs: Any) -> Any:
    given = {"max_steps": 2, "batch_size": 16 // processes, "loss_type": "dapo", "eval_steps": 1, "eval_examples": 4}
    return making.trainer(folder, **{**given, **kwargs})


def same_prompts(folder: Path, processes: int) -> Any:
    """All rows have the same prompt."""
    rows = [{"question": "say it", "answer": str(i)} for i in range(16)]
    env = vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric([making.share_of_e]))
    return online(folder, processes, env=env, eval_steps=None, max_steps=1, log_rollouts=16)


class Prepared(vf.GRPOTrainer):
    """As the documents have it: Accelerate wraps the model once more."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)


def prepared(folder: Path, processes: int) -> Any:
    return online(folder, processes, kind=Prepared)


def adapters(folder: Path, processes: int) -> Any:
    torch.manual_seed(torch.randint(1 << 30, ()).item() + _rank())  # each process draws adapters of its own
    return online(folder, processes, peft_config=vf.lora_defaults(r=4), learning_rate=0.02, kl_coef=0.1)


def imitation(folder: Path, processes: int) -> Any:
    tokenizer = tiny.tokenizer()
    config = {
        "batch_size": 8 // processes,
        "max_steps": 2,
        "learning_rate": 1e-2,
        "output_dir": folder / "run",
        "show_progress": False,
    }
    rows = [{"prompt": f"say {i}", "completion": "e" * (1 + 5 * i)} for i in range(8)]
    return vf.SFTTrainer(model=tiny.model(tokenizer), tokenizer=tokenizer, dataset=rows, config=config)


def imitation_in_turns(folder: Path, processes: int) -> Any:
    """Two steps more than were made before by however many processes, with all rows that they took."""
    tokenizer = tiny.tokenizer()
    made = 2 * len(list((folder / "run" / "checkpoints").glob("step-*")))
    config = {
        "batch_size": 1 if processes > 1 else 3,
        "max_steps": made + 2,
        "save_steps": made + 2,
        "output_dir": folder / "run",
        "show_progress": False,
    }
    rows = [{"prompt": f"say {i}", "completion": "e"} for i in range(40)]
    trainer = vf.SFTTrainer(model=tiny.model(tokenizer), tokenizer=tokenizer, dataset=rows, config=config)
    trainer.taken, take = [], trainer.rows.take

    def noted(n: int) -> list[Any]:
        samples = take(n)
        trainer.taken += [tokenizer.decode(one.prompt_ids) for one in samples]
        return samples

    trainer.rows.take = noted
    return trainer


def accumulating(folder: Path, processes: int) -> Any:
    """Two batches an update."""
    return online(folder, processes, batch_size=8 // processes, group_size=2, gradient_accumulation_steps=2)


class WeightServer:
    """A server elsewhere, that notes which weights it was given."""

    def __init__(self) -> None:
        self.given: list[float] = []

    def reload_weights(self, folder: str) -> None:
        from safetensors.torch import load_file

        tensors = load_file(Path(folder) / "model.safetensors")
        self.given.append(sum(float(one.double().abs().sum()) for one in tensors.values()))


def sent(folder: Path, processes: int) -> Any:
    """Another process samples, and gets the weights after each step."""
    server, client = WeightServer(), vf.FakeClient("e")
    made = making.trainer(
        folder, dataset=saved_rollouts(), client=client, extra={"weight_server": server}, batch_size=16 // processes
    )
    made.server = server
    return made


def saving(folder: Path, processes: int, **more: Any) -> Any:
    """Four steps, which are interrupted by nobody, and a checkpoint after two of them."""
    return online(folder, processes, max_steps=4, save_steps=2, eval_steps=None, **more)


def saved_adapters(folder: Path, processes: int) -> Any:
    return saving(folder, processes, peft_config=vf.lora_defaults(r=4), learning_rate=0.02)


def resumed(folder: Path, processes: int) -> Any:
    """The same from the checkpoint of a folder that is there, of another number of processes."""
    return saving(folder, processes)


def shared(folder: Path, processes: int) -> Any:
    """Two updates of each generation, and a checkpoint after each."""
    return online(folder, processes, max_steps=4, save_steps=1, steps_per_generation=2, eval_steps=None)


def half_down(folder: Path, processes: int, **more: Any) -> Any:
    """Every rollout of the second process fails, and of the first none."""

    def brittle(completion: Any) -> float:
        if _rank():
            raise ConnectionError("the judge is down")
        return making.share_of_e(completion)

    return online(folder, processes, env=making.environment(rubric=vf.Rubric([brittle])), eval_steps=None, **more)


def half_down_batch_wide(folder: Path, processes: int) -> Any:
    """The same where all that is measured over the batch is measured over that of all processes."""
    settings = {"advantage": "gdpo", "entropy_coef": 0.1, "top_entropy_quantile": 0.5, "num_iterations": 2}
    return half_down(folder, processes, steps_per_generation=2, num_batches_ahead=1, **settings)


def all_down(folder: Path, processes: int) -> Any:
    def brittle(completion: Any) -> float:
        raise ConnectionError("the judge is down")

    return online(folder, processes, env=making.environment(rubric=vf.Rubric([brittle])))


class Edited(vf.SingleTurnEnv):
    """Its replies are not those that were sampled: in the second process, or in both."""

    first = 1

    async def rollout(self, input: Any, client: Any, model: Any, sampling_args: Any = None) -> Any:
        reply = await client.chat.completions.create(messages=input["prompt"])
        text = f"{reply.text}!" if _rank() >= self.first else reply.text
        return [{"role": "assistant", "content": text}]


class AllEdited(Edited):
    first = 0


def half_refused(folder: Path, processes: int, kind: type[Edited] = Edited) -> Any:
    rows = [{"question": f"say {i}"} for i in range(16)]
    env = kind(dataset=rows, rubric=vf.Rubric([making.share_of_e]))
    return online(folder, processes, env=env, eval_steps=None)


def all_refused(folder: Path, processes: int) -> Any:
    return half_refused(folder, processes, AllEdited)


def stopped(folder: Path, processes: int) -> Any:
    """The second process alone wants to stop."""

    def stop(trainer: Any, figures: Any) -> None:
        trainer.should_stop = trainer.accelerator.process_index == processes - 1

    return online(folder, processes, max_steps=9, eval_steps=None, callbacks=[stop])


def _rank() -> int:
    return int(os.environ.get("RANK", 0))


MADE = {
    "online": online,
    "same_prompts": same_prompts,
    "prepared": prepared,
    "adapters": adapters,
    "batch_wide": batch_wide,
    "imitation": imitation,
    "saving": saving,
    "accumulating": accumulating,
    "imitation_in_turns": imitation_in_turns,
    "sent": sent,
    "recomputing": recomputing,
    "half_precision": half_precision,
    "saved_adapters": saved_adapters,
    "resumed": resumed,
    "shared": shared,
    "resumed_shared": shared,
    "half_down": half_down,
    "half_down_batch_wide": half_down_batch_wide,
    "all_down": all_down,
    "stopped": stopped,
    "half_refused": half_refused,
    "all_refused": all_refused,
    **{kind: lambda folder, processes, kind=kind: offline(folder, processes, kind) for kind in ("grpo", "dapo")},
}


def parts_of_zero3(processes: int) -> dict[str, Any]:
    """The most that a device holds until DeepSpeed has taken its parts of a model, and makes its optimizer."""
    import deepspeed

    from tests.trainers import measuring

    tokenizer = tiny.tokenizer()
    model, initialize = measuring.model_of(64, 24, len(tokenizer)), deepspeed.initialize
    found: dict[str, Any] = {"whole": 4 * sum(one.numel() for one in model.parameters())}

    def noted(*args: Any, **kwargs: Any) -> Any:
        found["peak"] = allocated.peak
        return initialize(*args, **kwargs)

    deepspeed.initialize = noted
    rows = [{"prompt": "say", "completion": "e"}]
    config = {"batch_size": 8 // processes, "max_seq_length": 64, "show_progress": False}
    with measuring.Allocated("cpu", model) as allocated:
        vf.SFTTrainer(model=model, tokenizer=tokenizer, dataset=rows, config=config)
    deepspeed.initialize = initialize
    return found


def outcome(what: str, folder: Path, processes: int) -> dict[str, Any]:
    if what == "parts_of_zero3":
        return parts_of_zero3(processes)
    trainer = MADE[what](folder / what, processes)
    try:
        goes_on = (folder / what / "run" / "checkpoints").is_dir() and what == "imitation_in_turns"
        report = trainer.train(resume=what.startswith("resumed") or goes_on)
    except Exception as error:
        return {"error": str(error)}
    weights = sum(float(one.detach().double().abs().sum()) for one in trainer.model.parameters())
    return {
        "steps": report.steps,
        "evals": report.evals,
        "weights": weights,
        "taken": getattr(trainer, "taken", None),
        "given": trainer.server.given if what == "sent" else None,
        "held": sum(one.numel() for one in trainer.weights.masters),
        "trained": sum(one.numel() for one in trainer.model.parameters() if one.requires_grad),
        "processes": trainer.accelerator.num_processes,
    }


def main(folder: str, processes: str, *names: str) -> None:
    found = {what: outcome(what, Path(folder), int(processes)) for what in names}
    (Path(folder) / f"process-{_rank()}.json").write_text(json.dumps(found))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
