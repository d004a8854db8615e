"""An environment → a model trained by Tinker: rollouts, scores and advantages here, sampling and updates there."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from verifiers.integrations.tinker.client import DEFAULT_LENGTH, TinkerClient
from verifiers.integrations.tinker.update import TinkerUpdate, check_config
from verifiers.trainers import sampling, setup
from verifiers.trainers.config import GRPOConfig
from verifiers.trainers.distributed.remote_weights import RemoteWeights
from verifiers.trainers.functions import Function, RowSampler, WeightSchedule, own_function
from verifiers.trainers.grpo_trainer import GRPOTrainer
from verifiers.trainers.weights import Weights

PATHS = "tinker.json"


class RemotePolicy(torch.nn.Module):  # type: ignore[misc]  # torch is not typed here
    """Represents a model whose weights and optimizer are at Tinker; saving and loading store their paths."""

    def __init__(self, service: Any, training: Any, name: str, length: int) -> None:
        super().__init__()
        self.service, self.training_client, self.name_or_path = service, training, name
        self.config = SimpleNamespace(max_position_embeddings=length)
        self.nothing = torch.nn.Parameter(torch.zeros(1))  # in place of the weights: `Weights` keeps parameters
        self.paths: dict[str, str] = {}

    def save_pretrained(self, path: str | Path) -> None:
        """Save the weights at Tinker, for sampling and for resuming; their paths are written to a file."""
        name = f"vf-{uuid.uuid4().hex[:12]}"
        state = self.training_client.save_state(name)
        sampler = self.training_client.save_weights_for_sampler(name)
        self.paths = {"state_path": state.result().path, "sampler_path": sampler.result().path}
        Path(path).mkdir(parents=True, exist_ok=True)
        (Path(path) / PATHS).write_text(json.dumps({"base_model": self.name_or_path, **self.paths}, indent=1))

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return dict(self.paths)

    def load_state_dict(self, saved: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        """Resume from a checkpoint."""
        path = saved["state_path"]
        self.training_client = self.service.create_training_client_from_state_with_optimizer(path).result()


class FreshWeights:
    """Switches the sampling client to the new weights after each update."""

    def __init__(self, client: TinkerClient) -> None:
        self._client, self.version = client, 0

    def start(self, model: RemotePolicy, tokenizer: Any, version: int, *, is_sender: bool) -> None:
        """Send the weights if a training is resumed: the sampler was created before they were loaded."""
        self._policy, self.version = model, version
        if version:
            self.send(version)

    def send(self, version: int) -> None:
        self._client.remote.sampling = self._policy.training_client.save_weights_and_get_sampling_client().result()

    def close(self) -> None:
        """Do nothing: nothing is kept open."""


class TinkerTrainer(GRPOTrainer):
    """Like `GRPOTrainer`, with the model at Tinker: ``TinkerTrainer("Qwen/Qwen3-8B", env, config).train()``.

    ``base_url`` is the server (default: TINKER_BASE_URL, or Tinker's own); TINKER_API_KEY has the key. A LoRA adapter
    with this ``rank`` is trained. The temperature is 1, because Tinker's losses use the model's own distribution.
    """

    def __init__(
        self,
        model: str,
        env: Any = None,
        config: Any = None,
        *,
        rank: int = 32,
        base_url: str | None = None,
        tokenizer: Any = None,
        eval_dataset: Any = None,
        callbacks: Sequence[Any] = (),
        row_sampler: RowSampler | None = None,
        weight_schedule: WeightSchedule | None = None,
        advantage: str | Function | None = None,
        loss: str | Callable[..., Any] | None = None,
    ) -> None:
        self.config = GRPOConfig.of(config)
        self._own_loss = own_function(self.config, "loss", "loss_type", loss)
        self._own_advantage = own_function(self.config, "advantage", "advantage", advantage)
        self._check_config()
        check_config(self.config, self.accelerator.num_processes)
        setup.check_env(env)
        self.env, self.offline = env, None
        check_sampling(sampling.default_args(self.config, env))
        tinker, where = _sdk(), {} if base_url is None else {"base_url": base_url}
        self.backend = f"Tinker at {base_url or 'its service'}"
        length = _context_of(tinker.RestClient(**where), model)
        service = tinker.ServiceClient(**where)
        training = service.create_lora_training_client(base_model=model, rank=rank, seed=self.config.seed).result()
        self.tokenizer = training.get_tokenizer() if tokenizer is None else tokenizer
        setup.check_template(self.tokenizer, env)
        self.model = policy = RemotePolicy(service, training, model, length)
        self.weights = Weights(policy, self.config)
        self.weights.optimizer = self.optimizer = policy
        sampler = training.save_weights_and_get_sampling_client().result()
        self.client = TinkerClient(sampler, self.tokenizer, name=model, length=length)
        self._remote = RemoteWeights(FreshWeights(self.client), policy, self.tokenizer)
        self.callbacks, self.row_sampler, self.weight_schedule = list(callbacks), row_sampler, weight_schedule
        self._prepare_loop(None, eval_dataset)
        self._update = TinkerUpdate(  # type: ignore[assignment]
            policy, self.config, max_new_tokens=sampling.max_new_tokens(self.config, env), loss=self._own_loss
        )

    def save_model(self, path: str | Path) -> None:
        """Save the weights at Tinker; the folder has their paths there (tinker.json) and the tokenizer."""
        self.model.save_pretrained(path)
        self.tokenizer.save_pretrained(path)


def check_sampling(args: Mapping[str, Any]) -> None:
    """Raise for arguments with which Tinker's logprobs are not those of the sampling distribution."""
    drawn = sampling.read_distribution(args, "the configuration")
    if drawn.temperature != 1.0:
        raise ValueError(f"temperature must be 1.0 with Tinker, got {drawn.temperature!r}: its losses support no other")
    if replace(drawn, temperature=1.0) != sampling.PLAIN:
        raise ValueError(
            "with Tinker, training samples from the whole distribution: leave out top_p, top_k, min_p and bias"
        )


def _sdk() -> Any:
    try:
        import tinker
    except ImportError:
        raise ImportError("--backend tinker needs the Tinker SDK: pip install 'verifiers[tinker]'") from None
    return tinker


def _context_of(rest: Any, model: str) -> int:
    served = {one.model_name: one for one in rest.get_server_capabilities().result().supported_models}
    if model not in served:
        names = ", ".join(sorted(str(name) for name in served)[:20])
        raise ValueError(f"Tinker has no model {model!r}; it has {names}")
    return int(served[model].max_context_length or DEFAULT_LENGTH)
