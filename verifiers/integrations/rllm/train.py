"""An environment → a training with rLLM: ``python -m verifiers.integrations.rllm.train +verifiers.env_id=NAME``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verifiers.envs import Environment
from verifiers.envs.loading import load_environment

BACKENDS = ("verl", "tinker")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The configuration keys that are read here: ``verifiers.*`` and ``backend``."""

    env_id: str
    env_args: dict[str, Any] = field(default_factory=dict)
    sampling_args: dict[str, Any] = field(default_factory=dict)
    max_samples: int | None = None
    backend: str = "verl"

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, not {self.backend!r}")
        if self.max_samples is not None and self.max_samples < 1:
            raise ValueError(f"verifiers.max_samples={self.max_samples} must be 1 or more; leave it out for all rows")


def read_settings(config: Mapping[str, Any]) -> Settings:
    """The settings in a whole configuration of plain containers.

    >>> read_settings({"verifiers": {"env_id": "arithmetic", "max_samples": 20}, "backend": "tinker", "data": {}})
    Settings(env_id='arithmetic', env_args={}, sampling_args={}, max_samples=20, backend='tinker')
    """
    own = {name: value for name, value in (config.get("verifiers") or {}).items() if value is not None}
    if not own.get("env_id"):
        raise ValueError("verifiers.env_id is missing; add +verifiers.env_id=NAME")
    if unknown := own.keys() - Settings.__dataclass_fields__.keys():
        raise ValueError(
            f"unknown setting verifiers.{min(unknown)}; there are env_id, env_args, sampling_args, max_samples"
        )
    return Settings(**own, backend=config.get("backend") or "verl")


def register(env: Environment, settings: Settings, registry: Any) -> tuple[Any, Any]:
    """Register the environment's rows as data sets of rLLM, for training and for validation."""
    name = settings.env_id.rpartition("/")[2]
    rows = {"train": env.get_dataset(), "test": env.get_eval_dataset()}
    n = -1 if settings.max_samples is None else settings.max_samples
    made = {split: registry.register_dataset(name, _plain(some, n), split) for split, some in rows.items()}
    return made["train"], made["test"]


def _plain(rows: Any, n: int) -> list[dict[str, Any]]:
    chosen = rows if n < 0 else rows[:n]
    return [{name: value for name, value in row.items() if value is not None and value != {}} for row in chosen]


def make_trainer(config: Any, settings: Settings) -> Any:
    """rLLM's trainer for a backend; newer versions of rLLM have a separate class for Tinker."""
    from rllm.data.dataset import DatasetRegistry

    from verifiers.integrations.rllm.workflow import VerifiersWorkflow

    if settings.backend == "verl":
        from rllm.trainer.agent_trainer import AgentTrainer
    else:
        from rllm.trainer import AgentTrainer
    env = load_environment(settings.env_id, **settings.env_args)
    train, validation = register(env, settings, DatasetRegistry)
    return AgentTrainer(
        workflow_class=VerifiersWorkflow,
        workflow_args={"vf_env": env, "sampling_args": settings.sampling_args},
        train_dataset=train,
        val_dataset=validation,
        config=config,
        backend=settings.backend,
    )


def main() -> None:
    """Train as the command line says. For Tinker it starts with ``--config-name=unified rllm/backend=tinker``."""
    try:
        import hydra
        from omegaconf import OmegaConf
    except ImportError as error:
        raise SystemExit("rLLM's command line needs Hydra: pip install 'verifiers[rllm]'") from error

    def train(config: Any) -> None:
        plain: dict[str, Any] = {
            "verifiers": OmegaConf.to_container(
                OmegaConf.select(config, "verifiers") or OmegaConf.create(), resolve=True
            ),
            "backend": OmegaConf.select(config, "backend"),
        }
        make_trainer(config, read_settings(plain)).train()

    read = hydra.main(config_path="pkg://rllm.trainer.config", config_name="agent_ppo_trainer", version_base=None)
    read(train)()


if __name__ == "__main__":
    main()
