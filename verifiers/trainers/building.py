"""What a trainer is given becomes what it is made of, or one sentence that says why it cannot be."""

from __future__ import annotations

import hashlib
import inspect
import shutil
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from verifiers import calls
from verifiers.chat import ChatWriter
from verifiers.clients import HTTPClient, as_client
from verifiers.clients.exact import exact_tokens
from verifiers.clients.protocol import Request
from verifiers.engine import models, threads
from verifiers.engine.plan import free_memory, plan
from verifiers.envs.env_group import EnvGroup, environment_of
from verifiers.envs.environment import Environment
from verifiers.envs.rows import Rows, as_rows
from verifiers.envs.singleturn_env import SingleTurnEnv
from verifiers.messages import as_messages, tools_of
from verifiers.rubrics import Rubric, RubricGroup
from verifiers.trainers.batch import Batch
from verifiers.trainers.checkpoints import save_model
from verifiers.trainers.config import GRPOConfig, LearningKnobs
from verifiers.trainers.micro_batches import Trained
from verifiers.trainers.processes import gathered
from verifiers.trainers.sampler import Sampler
from verifiers.trainers.sampling import flat, merged
from verifiers.types import Row

if TYPE_CHECKING:
    from verifiers.trainers.grpo_trainer import GRPOTrainer
    from verifiers.trainers.update import PolicyUpdate

Put = Callable[[list[float]], None]
MOST_ROWS = {"cpu": 64, "cuda": 1024}
LARGEST_KEPT = 31 << 20  # bytes: what the C library looks at is a little larger, and must be below 32 MiB
TRAINED_BYTES = 16  # a trained parameter's gradient, and Adam's two averages, and a float32 copy of it


def one_of(name: str, value: Any, other_name: str, other: Any) -> Any:
    """The one of two names for the same thing that was passed."""
    if value is not None and other is not None:
        raise TypeError(f"{name} and {other_name} are the same thing; pass one of them")
    return value if value is not None else other


# --- the model ----------------------------------------------------------------------------------------------------


def model_and_tokenizer(
    model: Any, tokenizer: Any, config: LearningKnobs, device: torch.device, peft_config: Any
) -> tuple[Any, Any]:
    """The module to train, on its device and in its precision, and a tokenizer that can do what is asked of it."""
    if model is None:
        raise ValueError("there is no model to train; pass model='smollm2', a folder, a hub name or a module")
    if isinstance(model, (str, Path)):
        model = models.get_model(model)
    if tokenizer is None or isinstance(tokenizer, (str, Path)):
        tokenizer = models.get_tokenizer(model if tokenizer is None else tokenizer)
    _check_pad(tokenizer)
    model = _in_precision(model, config, device)
    if peft_config is not None:
        model = with_adapters(model, peft_config)
    _check_memory(model)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if hasattr(model, "enable_input_require_grads"):
            model.enable_input_require_grads()
    return model, tokenizer


def _in_precision(model: Any, config: LearningKnobs, device: torch.device) -> Any:
    parameter = next(model.parameters())
    if getattr(model, "hf_device_map", None) and len(set(model.hf_device_map.values())) > 1:
        raise ValueError("this model is spread over several devices; load it onto one, without device_map")
    if config.fp16 and device.type == "cpu":
        raise ValueError("fp16=True needs a GPU: on a CPU leave it out, and training is in float32")
    wanted = torch.float16 if config.fp16 else torch.bfloat16 if config.bf16 else parameter.dtype
    if parameter.device.type == "meta":
        raise ValueError("this model has no weights yet (they are on the meta device); load them first")
    return model.to(device=device, dtype=wanted)


def with_adapters(model: Any, peft_config: Any) -> Any:
    """The model with LoRA adapters, in its own precision (their float32 copies are with the optimizer)."""
    try:
        from peft import get_peft_model
    except ImportError:
        raise ImportError("LoRA needs: pip install 'verifiers[train]'") from None
    if hasattr(model, "peft_config"):
        raise ValueError("this model has adapters already; leave out peft_config")
    return get_peft_model(model, peft_config, autocast_adapter_dtype=False)


def lora_defaults(r: int = 8, alpha: int = 16, **kwargs: Any) -> Any:
    """A `peft.LoraConfig` for every linear layer but the head; further keywords go to it."""
    try:
        from peft import LoraConfig
    except ImportError:
        raise ImportError("LoRA needs: pip install 'verifiers[train]'") from None
    settings = {"target_modules": "all-linear", "lora_dropout": 0.0, "task_type": "CAUSAL_LM", **kwargs}
    return LoraConfig(r=r, lora_alpha=alpha, **settings)


def _check_pad(tokenizer: Any) -> None:
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ValueError("this tokenizer has neither a pad nor an end token; set tokenizer.pad_token")
        tokenizer.pad_token = tokenizer.eos_token


def check_template(tokenizer: Any, env: Environment | None) -> None:
    if env is not None and env.message_type == "chat" and not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "this tokenizer has no chat template, and the environment holds chats; set tokenizer.chat_template, "
            "or make the environment with message_type='completion'"
        )


def check_reference(model: Any, config: GRPOConfig) -> None:
    if config.sync_ref_model and hasattr(model, "disable_adapter"):
        raise ValueError("sync_ref_model needs a copy of the model, and with LoRA the reference is the base model")


def _check_memory(model: Any) -> None:
    parameter = next(model.parameters())
    trained = sum(one.numel() for one in model.parameters() if one.requires_grad)
    needed, free = trained * TRAINED_BYTES, free_memory(parameter.device)
    if needed > free:
        raise ValueError(
            f"training {trained:,} parameters needs about {needed / 1e9:.1f} GB beside the model, and "
            f"{free / 1e9:.1f} GB are free on {parameter.device}; train adapters instead "
            "(peft_config=vf.lora_defaults()), or a smaller model"
        )


# --- the sampler --------------------------------------------------------------------------------------------------


def sampler(model: Any, tokenizer: Any, config: GRPOConfig, env: Environment | None) -> Sampler:
    """The model as a client with room for a step's rollouts, as far as memory allows."""
    parameter = next(model.parameters())
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    asked = usual_sampling(config, env)
    length = config.max_seq_length
    if length is None and config.max_prompt_length is not None and isinstance(env, SingleTurnEnv):
        length = config.max_prompt_length + int(flat(asked)["max_tokens"])
    if length is not None and longest is not None:
        length = min(length, longest)
    fits = plan(model.config, length=length, dtype=parameter.dtype, device=parameter.device, weights_loaded=True)
    wanted = min(config.rollouts_per_step, MOST_ROWS.get(parameter.device.type, 64))
    rows = min(wanted, fits.rows)
    return Sampler(model, tokenizer, rows=rows, length=fits.length, remembers=8 * wanted, usual=asked)


def usual_sampling(config: GRPOConfig, env: Environment | None) -> dict[str, Any]:
    """What a model is asked for where nobody says otherwise."""
    return merged(config, None if env is None else env.sampling_args)


def sampling_args(config: GRPOConfig, env: Environment | None) -> dict[str, Any]:
    """What rollouts are asked for: the usual, less what environments of a group may say for their own."""
    return merged(config, None if env is None else env.sampling_args, [one.sampling_args for one in _members(env)])


def _members(env: Any) -> Iterator[Any]:
    for one in env.envs if isinstance(env, EnvGroup) else ():
        yield one
        yield from _members(one)


def seed_of(*parts: object) -> int:
    """A number made of these."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


class RemoteWeights:
    """The weights as a folder that a server reads after each step."""

    def __init__(self, server: Any, model: Any, tokenizer: Any) -> None:
        self._server, self._model, self._tokenizer = server, model, tokenizer
        self._folder = tempfile.mkdtemp(prefix="verifiers-weights-")
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)

    def send(self) -> None:
        save_model(self._model, self._tokenizer, self._folder)
        sent = self._server.reload_weights(self._folder)
        if inspect.isawaitable(sent):
            calls.run(lambda: _awaited(sent))


async def _awaited(value: Any) -> Any:
    return await value


def remote_weights(client: Any, server: Any, model: Any, tokenizer: Any) -> RemoteWeights | None:
    """How a model that is served elsewhere gets its new weights; None where it is this very one."""
    if client is None or isinstance(client, Sampler) or getattr(client, "engine_model", None) is model:
        return None
    server = server if server is not None else client if hasattr(client, "reload_weights") else None
    if server is None:
        raise ValueError(
            "client answers from elsewhere, and would go on with the old weights; pass weight_server= (VLLMServer, or "
            "any object with reload_weights(folder)), or leave client out to sample in this process"
        )
    return RemoteWeights(server, model, tokenizer)


def exact_sampling(sampling: dict[str, Any], client: Any, env: Environment) -> dict[str, Any]:
    """Sampling arguments with which a served model too gives the tokens it sampled; without them nothing is learned."""
    is_served = not isinstance(client, Sampler) and isinstance(as_client(client), HTTPClient)
    return exact_tokens(sampling, message_type=env.message_type) if is_served else sampling


def request(prompt: Any, sampling: dict[str, Any], *, is_chat: bool) -> Request:
    asked = as_messages(prompt) if is_chat else prompt
    return Request(model="", prompt=asked, sampling=sampling, message_type="chat" if is_chat else "completion")


# --- rows ---------------------------------------------------------------------------------------------------------


def check_env(env: Any) -> None:
    """An environment that scores nothing teaches nothing."""
    if not isinstance(env, Environment):
        raise TypeError(f"env is an environment (vf.load_environment('…')), not a {type(env).__name__}")
    rubric = env.rubric
    is_plain = type(rubric) is Rubric and not rubric.scores_its_own_way and not isinstance(env, EnvGroup)
    if is_plain and not any(rubric.weights) and env._hook("score_rollout") is None:
        raise ValueError("this environment rewards nothing: give its rubric a reward function with a weight above 0")


def short_enough(rows: Any, tokenizer: Any, config: GRPOConfig, env: Environment) -> tuple[Any, int]:
    """The rows whose prompt has at most ``max_prompt_length`` tokens, and how many were dropped."""
    if config.max_prompt_length is None:
        return rows, 0
    writer = ChatWriter(tokenizer)
    kept = [i for i in range(len(rows)) if _length(rows[i], writer, env) <= config.max_prompt_length]
    if not kept:
        raise ValueError(f"all {len(rows)} prompts are longer than max_prompt_length={config.max_prompt_length} tokens")
    return (rows.select(kept) if isinstance(rows, Rows) else [rows[i] for i in kept]), len(rows) - len(kept)


def _length(row: Row, writer: ChatWriter, env: Environment) -> int:
    prompt = row["prompt"]
    _, ids = writer.text_prompt(prompt) if isinstance(prompt, str) else writer.prompt(prompt, tools_for(env, row))
    return len(ids)


def tools_for(env: Environment | None, row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The tools that a rollout of this row has: the row's own, or those of the environment that plays it."""
    if (own := tools_of(row)) is not None:
        return own
    return getattr(environment_of(env, row.get("task")), "oai_tools", None)


def rows_of(env: Environment, given: Any) -> Rows:
    """Rows for an environment: those handed in, in its format, or its own."""
    return env.get_dataset() if given is None else as_rows(given, env._format)


def eval_rows(env: Environment | None, given: Any) -> Any:
    if env is None:
        return []
    return env.get_eval_dataset() if given is None else as_rows(given, env._format)


def refusals(batch: Batch, trained: Sequence[Trained], processes: Any) -> dict[str, Any]:
    """What a step says of rollouts that no process learned from; ValueError in all where there are no others."""
    found = gathered(processes, (list(batch.refused), len(trained)))
    reasons = Counter(reason for refused, _ in found for reason in refused)
    if not reasons:
        return {}
    if not any(count for _, count in found):
        reason, count = reasons.most_common(1)[0]
        raise ValueError(
            f"none of {reasons.total()} rollouts can be learned from, as it is not known which tokens were sampled; "
            f"{count} of them: {reason}"
        )
    told = [f"{count} × {reason}" for reason, count in reasons.most_common()]
    return {"refused": reasons.total(), "refused_reasons": told}


# --- the run ------------------------------------------------------------------------------------------------------


def fitting(function: Callable[..., Any], *args: Any) -> Any:
    """Call a method with as many of these arguments as it takes: ``get_batch()`` and ``get_batch(epoch, step)``.

    >>> fitting(lambda epoch: epoch, 1, 2)
    1
    """
    parameters = inspect.signature(function).parameters.values()
    if any(one.kind is one.VAR_POSITIONAL for one in parameters):
        return function(*args)
    places = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    return function(*args[: len(places)])


def is_due(config: LearningKnobs, what: str, step: int, is_epoch_end: bool) -> bool:
    """Whether to evaluate or save after this step."""
    strategy = config.strategy(what)
    return is_epoch_end if strategy == "epoch" else strategy == "steps" and step % getattr(config, f"{what}_steps") == 0


def tell(trainer: Any, event: str, *what: Any) -> None:
    """Call the method of this name of a trainer's callbacks; a plain function is told of each step."""
    for callback in trainer.callbacks:
        method = getattr(callback, event, None)
        if method is not None:
            method(trainer, *what)
        elif event == "on_step_end" and callable(callback):
            callback(trainer, *what)


@contextmanager
def rubric_weights(
    env: Environment | None, schedule: Callable[[float], Sequence[float]] | None, epochs: float
) -> Iterator[None]:
    """While this lasts the environment's rubric has the weights that a schedule gives it."""
    if env is None or schedule is None:
        yield
        return
    rubric, weights = env.rubric, [float(weight) for weight in schedule(epochs)]
    if isinstance(rubric, RubricGroup):
        before, put = rubric.get_group_weights(), cast("Put", rubric.set_group_weights)
    else:
        if len(weights) != len(rubric.weights):
            raise ValueError(f"{len(rubric.weights)} reward functions but {len(weights)} weights from weight_schedule")
        before, put = list(rubric.weights), lambda values: rubric.weights.__setitem__(slice(None), values)
    put(weights)
    try:
        yield
    finally:
        put(before)


def _keep_memory() -> None:
    """Let the C library keep what a step gives back: new pages from the system take as long as what is done on them.

    It learns from the largest block that it ever gave back to the system (of up to 32 MiB) not to do so with less.
    """
    torch.empty(LARGEST_KEPT, dtype=torch.uint8)


@contextmanager
def sensible_threads(model: Any) -> Iterator[None]:
    """Tiny models on a CPU are trained by one thread: more would wait for one another longer than they compute."""
    before = torch.get_num_threads()
    if next(model.parameters()).device.type == "cpu":
        _keep_memory()
        if threads.wants_one(model):
            torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def update(trainer: GRPOTrainer) -> PolicyUpdate:
    """How a trainer's policy learns, from what the trainer has now."""
    from verifiers.trainers.update import PolicyUpdate

    processes = trainer.accelerator
    model = processes.unwrap_model(trainer.model)
    return PolicyUpdate(
        model,
        trainer.weights,
        trainer.config,
        lock=trainer.client.engine.lock if isinstance(trainer.client, Sampler) else nullcontext(),
        pad_id=trainer.tokenizer.pad_token_id,
        max_new_tokens=int(flat(usual_sampling(trainer.config, trainer.env))["max_tokens"]),
        processes=processes,
    )
