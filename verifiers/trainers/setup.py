"""The arguments of a trainer, checked, become the model, the tokenizer and the rows that it trains on."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from verifiers.chat import ChatWriter
from verifiers.engine.files import models
from verifiers.envs.env_group import EnvGroup, environment_of
from verifiers.envs.environment import Environment
from verifiers.envs.rows import Rows, as_rows
from verifiers.kernels.modules import is_quantised
from verifiers.messages import tools_of
from verifiers.rubrics import Rubric
from verifiers.trainers.config import GRPOConfig
from verifiers.trainers.distributed.processes import mixed_precision
from verifiers.trainers.memory.job import Job
from verifiers.trainers.memory.optimizers import bitsandbytes, check_optimizer
from verifiers.trainers.memory.plan import MemoryPlan, ModelSize
from verifiers.trainers.memory.quantized import in_4_bit, in_one_layout
from verifiers.types import Row

logger = logging.getLogger("verifiers.trainers")


def one_of(name: str, value: Any, other_name: str, other: Any) -> Any:
    """The value of an argument that may be passed under two names."""
    if value is not None and other is not None:
        raise TypeError(f"{name} and {other_name} are the same thing; pass one of them")
    return value if value is not None else other


def model_and_tokenizer(model: Any, tokenizer: Any, job: Job) -> tuple[Any, Any, MemoryPlan]:
    """The module to train, on its device and in its precision; its tokenizer; and the memory plan of the training."""
    if model is None:
        raise ValueError("no model to train; pass model='smollm2', a folder, a hub name or a module")
    config, device = job.config, job.device
    check_optimizer(config.optim, device.type, job.processes)
    _precision(job)
    if config.load_in_4bit:
        _check_4_bit(model, job)
    if isinstance(model, (str, Path)):
        model = _loaded(model, job)
    if tokenizer is None or isinstance(tokenizer, (str, Path)):
        tokenizer = models.get_tokenizer(model if tokenizer is None else tokenizer)
    _check_pad(tokenizer)
    model, dtype = _in_precision(model, job)
    if job.adapters is not None:
        model = with_adapters(model, job.adapters)
    if getattr(model.config, "output_router_logits", False):
        logger.warning("the router loss that output_router_logits=True asks for is not a part of the loss here")
    memory = job.plan_module(model, dtype=dtype, is_whole=True)
    if memory.told:
        logger.warning("to fit into %s: %s", device, ", ".join(memory.told))
    if memory.gradient_checkpointing:
        recompute_activations(model)
        # The hook on the embeddings is for reentrant checkpointing only, and models with hooks do not run in C.
        model.disable_input_require_grads()
    return model, tokenizer, memory


def recompute_activations(model: Any, *, use_reentrant: bool = False) -> None:
    """Enable gradient checkpointing, whose method has another name since transformers 5.23."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": use_reentrant})


def _loaded(name: str | Path, job: Job) -> Any:
    """Load a model by name, once its memory plan has been checked; to the host if it will be quantised."""
    dtype = torch.bfloat16 if job.device.type == "cuda" else None

    def check(config: Any, dtype: torch.dtype, device: torch.device) -> None:
        job.plan(ModelSize.of(config), weight_bytes=dtype.itemsize)

    if not job.config.load_in_4bit and job.home.type == job.device.type:
        return models.get_model(name, before_weights=check)
    return models.get_model(name, device="cpu", dtype=dtype, before_weights=check)


def _check_4_bit(model: Any, job: Job) -> None:
    if job.adapters is None and not hasattr(model, "peft_config"):
        raise ValueError(
            "load_in_4bit=True freezes the weights of the model, so that only adapters can be trained: pass "
            "peft_config=vf.lora_defaults() (--lora)"
        )
    bitsandbytes("load_in_4bit=True")


def _precision(job: Job) -> str | None:
    """The precision that was asked for, if any: fp16 or bf16."""
    said = "fp16" if job.config.fp16 else "bf16" if job.config.bf16 else mixed_precision()
    if said == "fp16" and job.device.type == "cpu":
        raise ValueError("fp16=True needs a GPU; leave it out to train in float32 on the CPU")
    return said


def _in_precision(model: Any, job: Job) -> tuple[Any, torch.dtype]:
    """The module on its device, and the dtype of its computation."""
    parameter, config, device = next(model.parameters()), job.config, job.device
    if getattr(model, "hf_device_map", None) and len(set(model.hf_device_map.values())) > 1:
        raise ValueError("this model is spread over several devices; load it onto one, without device_map")
    said = _precision(job)
    wanted = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(said or "", parameter.dtype)
    if parameter.device.type == "meta":
        raise ValueError("this model has no weights yet (they are on the meta device); load them first")
    if is_quantised(model):
        return in_one_layout(model), parameter.dtype
    job.plan_module(model, dtype=wanted, is_whole=job.adapters is None)
    if config.load_in_4bit:
        return in_4_bit(model, device, wanted), wanted
    return model.to(device=job.home, dtype=wanted), wanted


def with_adapters(model: Any, peft_config: Any) -> Any:
    """The model with LoRA adapters in the model's dtype (the optimizer holds float32 copies of them)."""
    if hasattr(model, "peft_config"):
        raise ValueError("this model already has adapters; leave out peft_config")
    dtype = next(one.dtype for one in model.parameters() if one.is_floating_point())
    adapted = _peft().get_peft_model(model, peft_config, autocast_adapter_dtype=False)
    for one in adapted.parameters():
        if one.requires_grad:  # peft creates them in float32 on 4-bit weights
            one.data = one.data.to(dtype)
    return adapted


def lora_defaults(r: int = 8, alpha: int = 16, **kwargs: Any) -> Any:
    """A `peft.LoraConfig` for every linear layer except the head; further keywords are passed to it."""
    settings = {"target_modules": "all-linear", "lora_dropout": 0.0, "task_type": "CAUSAL_LM", **kwargs}
    return _peft().LoraConfig(r=r, lora_alpha=alpha, **settings)


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise ImportError("LoRA needs: pip install 'verifiers[train]'") from None
    return peft


def _check_pad(tokenizer: Any) -> None:
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ValueError("this tokenizer has neither a pad nor an end token; set tokenizer.pad_token")
        tokenizer.pad_token = tokenizer.eos_token


def check_template(tokenizer: Any, env: Environment | None) -> None:
    if env is not None and env.message_type == "chat" and not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "this tokenizer has no chat template, but the environment's prompts are chats; set "
            "tokenizer.chat_template, or create the environment with message_type='completion'"
        )


def check_reference(model: Any, config: GRPOConfig) -> None:
    if config.sync_ref_model and hasattr(model, "disable_adapter"):
        raise ValueError("sync_ref_model does not work with LoRA: there the reference is the base model, not a copy")


def check_env(env: Any) -> None:
    """Refuse an environment without a reward: there would be nothing to train on."""
    if not isinstance(env, Environment):
        raise TypeError(f"env must be an environment (vf.load_environment('…')), not a {type(env).__name__}")
    rubric = env.rubric
    is_plain = type(rubric) is Rubric and not rubric.scores_its_own_way and not isinstance(env, EnvGroup)
    if is_plain and not any(rubric.weights) and env._hook("score_rollout") is None:
        raise ValueError("this environment has no reward: give its rubric a reward function with a nonzero weight")


def training_rows(env: Environment, given: Any, tokenizer: Any, config: GRPOConfig) -> tuple[Any, int]:
    """The given rows, or the environment's own, in its format; and how many of them were dropped.

    A row is dropped if its prompt has more than ``max_prompt_length`` tokens.
    """
    rows: Any = env.get_dataset() if given is None else as_rows(given, env._format)
    writer, most = ChatWriter(tokenizer), config.max_seq_length
    if most is not None and all(_length(rows[i], writer, env) >= most for i in range(len(rows))):
        raise ValueError(f"all {len(rows)} prompts leave no room for a reply within max_seq_length={most} tokens")
    if config.max_prompt_length is None:
        return rows, 0
    kept = [i for i in range(len(rows)) if _length(rows[i], writer, env) <= config.max_prompt_length]
    if not kept:
        raise ValueError(f"all {len(rows)} prompts are longer than max_prompt_length={config.max_prompt_length} tokens")
    return (rows.select(kept) if isinstance(rows, Rows) else [rows[i] for i in kept]), len(rows) - len(kept)


def _length(row: Row, writer: ChatWriter, env: Environment) -> int:
    prompt = row["prompt"]
    _, ids = writer.text_prompt(prompt) if isinstance(prompt, str) else writer.prompt(prompt, tools_for(env, row))
    return len(ids)


def tools_for(env: Environment | None, row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The tools of a rollout of this row: the row's own, else those of the row's environment."""
    if (own := tools_of(row)) is not None:
        return own
    return getattr(environment_of(env, row.get("task")), "oai_tools", None)


def eval_rows(env: Environment | None, given: Any) -> Any:
    if env is None:
        return []
    return env.get_eval_dataset() if given is None else as_rows(given, env._format)


def column_batches(rows: Any, size: int) -> Iterator[dict[str, list[Any]]]:
    """Rows in batches of ``size``, each as columns.

    >>> list(column_batches([{"prompt": "2+2?", "answer": "4"}], 8))
    [{'prompts': ['2+2?'], 'answers': ['4'], 'tasks': [None], 'infos': [None]}]
    """
    for i in range(0, len(rows), size):
        part = [rows[j] for j in range(i, min(i + size, len(rows)))]
        yield {f"{name}s": [row.get(name) for row in part] for name in ("prompt", "answer", "task", "info")}
