"""What a trainer is given becomes what it is made of (a model, a tokenizer, rows), or one sentence of why not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from verifiers.chat import ChatWriter
from verifiers.engine.files import models
from verifiers.engine.plan import free_memory
from verifiers.envs.env_group import EnvGroup, environment_of
from verifiers.envs.environment import Environment
from verifiers.envs.rows import Rows, as_rows
from verifiers.messages import tools_of
from verifiers.rubrics import Rubric
from verifiers.trainers.base_config import TrainingConfig
from verifiers.trainers.config import GRPOConfig
from verifiers.trainers.processes import mixed_precision
from verifiers.types import Row

TRAINED_BYTES = 16  # a trained parameter's gradient, and Adam's two averages, and a float32 copy of it


def one_of(name: str, value: Any, other_name: str, other: Any) -> Any:
    """The one of two names for the same thing that was passed."""
    if value is not None and other is not None:
        raise TypeError(f"{name} and {other_name} are the same thing; pass one of them")
    return value if value is not None else other


# --- the model ----------------------------------------------------------------------------------------------------


def model_and_tokenizer(
    model: Any, tokenizer: Any, config: TrainingConfig, device: torch.device, peft_config: Any
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


def _in_precision(model: Any, config: TrainingConfig, device: torch.device) -> Any:
    parameter = next(model.parameters())
    if getattr(model, "hf_device_map", None) and len(set(model.hf_device_map.values())) > 1:
        raise ValueError("this model is spread over several devices; load it onto one, without device_map")
    said = "fp16" if config.fp16 else "bf16" if config.bf16 else mixed_precision()
    if said == "fp16" and device.type == "cpu":
        raise ValueError("fp16=True needs a GPU: on a CPU leave it out, and training is in float32")
    wanted = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(said or "", parameter.dtype)
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


def column_batches(rows: Any, size: int) -> Iterator[dict[str, list[Any]]]:
    """Rows, so many at a time, as columns.

    >>> list(column_batches([{"prompt": "2+2?", "answer": "4"}], 8))
    [{'prompts': ['2+2?'], 'answers': ['4'], 'tasks': [None], 'infos': [None]}]
    """
    for i in range(0, len(rows), size):
        part = [rows[j] for j in range(i, min(i + size, len(rows)))]
        yield {f"{name}s": [row.get(name) for row in part] for name in ("prompt", "answer", "task", "info")}
