"""The options of ``vf eval``, and the keyword arguments of one evaluation made from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click

from verifiers.cli.answering import Wanted
from verifiers.cli.arguments import (
    Integer,
    Number,
    read_count,
    read_half_width,
    read_headers,
    read_json,
    read_names,
    read_range,
)
from verifiers.cli.defaults import Defaults
from verifiers.cli.environments import env_dir_option
from verifiers.cli.runs import complete_runs

ABOVE_0 = Integer(min=1)
SECONDS = Number(min=0, min_open=True)


@dataclass(frozen=True, kw_only=True)
class Flags:
    """The values of the options; None if an option was not given."""

    env_id: str
    env_args: dict[str, Any]
    env_dir_path: str
    endpoints_path: str | None
    model: str | None
    api_key_var: str | None
    api_base_url: str | None
    header: dict[str, str]
    num_examples: int | None
    rollouts_per_example: int | None
    max_concurrent: int | None
    max_concurrent_generation: int | None
    max_concurrent_scoring: int | None
    max_tokens: int | None
    temperature: float | None
    sampling_args: dict[str, Any] | None
    verbose: bool
    no_interleave_scoring: bool
    state_columns: list[str]
    save_results: bool
    save_every: int
    independent_scoring: bool
    save_to_hf_hub: bool
    hf_hub_dataset_name: str
    extra_env_kwargs: dict[str, Any]
    resume: str | None
    record: bool
    until: float | None
    reward_range: str | None
    shuffle: bool
    seed: int
    dry_run: bool
    max_retries: int | None
    timeout: float | None
    reward_timeout: float | None
    hook_timeout: float | None
    deadline: float | None
    workers: str | None
    down_after: float | None
    max_reply_bytes: int | None
    as_json: bool
    max_failure_rate: float

    def wanted(self) -> Wanted:
        return Wanted(
            model=self.model,
            api_key_var=self.api_key_var,
            api_base_url=self.api_base_url,
            headers=self.header,
            endpoints_path=self.endpoints_path,
            max_retries=self.max_retries,
            down_after_s=self.down_after,
            max_reply_bytes=self.max_reply_bytes,
        )

    def run_options(self, defaults: Defaults) -> dict[str, Any]:
        """The keyword arguments of ``env.evaluate``, without client and model."""
        single = {
            "max_tokens": defaults.max_tokens if self.max_tokens is None else self.max_tokens,
            "temperature": defaults.temperature if self.temperature is None else self.temperature,
        }
        num_examples = defaults.num_examples if self.until is None else -1  # --until decides when to stop
        sampling = {**{key: value for key, value in single.items() if value is not None}, **(self.sampling_args or {})}
        return {
            "sampling_args": sampling,
            "num_examples": num_examples if self.num_examples is None else self.num_examples,
            "rollouts_per_example": self.rollouts_per_example or defaults.rollouts_per_example,
            "max_concurrent": defaults.max_concurrent if self.max_concurrent is None else self.max_concurrent,
            "max_concurrent_generation": self.max_concurrent_generation,
            "max_concurrent_scoring": self.max_concurrent_scoring,
            "state_columns": self.state_columns,
            "independent_scoring": self.independent_scoring,
            "save_every": self.save_every,
            "save_results": self.save_results and self.resume is None and not self.record,
            "resume": self.resume or False,
            "deadline_s": self.deadline,
            "reward_timeout_s": self.reward_timeout,
            "hook_timeout_s": self.hook_timeout,
            "until": self.until,
            "workers": self.workers,
            "reward_range": None if self.reward_range is None else tuple(map(float, self.reward_range.split(","))),
        }


OPTIONS: list[Callable[..., Any]] = [
    click.option(
        "-m",
        "--model",
        metavar="MODEL",
        multiple=True,
        help="A name in the registry, a model at the endpoint, smollm2, ./folder, x.gguf, fake; repeat to compare.",
    ),
    click.option(
        "-n",
        "--num-examples",
        type=int,
        callback=read_count,
        metavar="N",
        help="Examples to evaluate; -1 for all (default 5).",
    ),
    click.option("-r", "--rollouts-per-example", type=ABOVE_0, metavar="N", help="Rollouts per example (default 3)."),
    click.option(
        "--until",
        metavar="±X",
        callback=read_half_width,
        help="Stop as soon as the mean reward is known to ±X; -n is then the maximum (default all).",
    ),
    click.option(
        "--reward-range",
        metavar="LEAST,MOST",
        callback=read_range,
        help="With --until: the bounds of rewards (default: from the weights, each function from 0 to 1).",
    ),
    click.option("--shuffle", is_flag=True, help="Draw the examples at random instead of taking the first."),
    click.option("--seed", type=int, metavar="N", default=0, help="Seed of --shuffle (default 0)."),
    click.option(
        "-a", "--env-args", metavar="JSON", callback=read_json, default="{}", help="Arguments of load_environment()."
    ),
    click.option(
        "-x",
        "--extra-env-kwargs",
        metavar="JSON",
        callback=read_json,
        default="{}",
        help="Attributes to set on the environment.",
    ),
    env_dir_option,
    click.option(
        "-b",
        "--api-base-url",
        metavar="URL",
        help="URL of an OpenAI-compatible server; the registry is then not used.",
    ),
    click.option(
        "-k", "--api-key-var", metavar="NAME", help="Environment variable with the key (default OPENAI_API_KEY)."
    ),
    click.option(
        "-e",
        "--endpoints-path",
        metavar="PATH",
        help="Registry of endpoints: a file or its folder (default ./configs).",
    ),
    click.option(
        "--header",
        metavar="NAME:VALUE",
        callback=read_headers,
        multiple=True,
        help="Header to send with each request (repeat).",
    ),
    click.option("-t", "--max-tokens", type=ABOVE_0, metavar="N", help="Maximum tokens of a reply."),
    click.option("-T", "--temperature", type=float, metavar="T", help="Sampling temperature."),
    click.option(
        "-S",
        "--sampling-args",
        metavar="JSON",
        callback=read_json,
        help="Further sampling arguments; they override -t and -T.",
    ),
    click.option(
        "-c",
        "--max-concurrent",
        type=int,
        callback=read_count,
        metavar="N",
        help="Concurrent rollouts; -1 for no limit (default 32).",
    ),
    click.option("--max-concurrent-generation", type=ABOVE_0, metavar="N", help="Concurrently generated rollouts."),
    click.option("--max-concurrent-scoring", type=ABOVE_0, metavar="N", help="Concurrently scored rollouts."),
    click.option("--max-retries", type=Integer(min=0), metavar="N", help="Retries of a failed request (default 8)."),
    click.option("--timeout", type=SECONDS, metavar="S", help="Seconds a request may take (default 600)."),
    click.option("--reward-timeout", type=SECONDS, metavar="S", help="Seconds a reward function may take (600)."),
    click.option("--hook-timeout", type=SECONDS, metavar="S", help="Seconds a hook may take (default 3600)."),
    click.option(
        "--deadline", type=SECONDS, metavar="S", help="Seconds for the whole run; finished rollouts are kept."
    ),
    click.option(
        "--workers",
        metavar="ray[:ADDRESS]",
        help="Run and score rollouts on the workers of a Ray cluster: the one here, a new one, or that at HOST:PORT.",
    ),
    click.option(
        "--down-after",
        type=SECONDS,
        metavar="S",
        help="Seconds of only refused requests after which an endpoint counts as down (default 120).",
    ),
    click.option("--max-reply-bytes", type=ABOVE_0, metavar="N", help="Maximum bytes of a reply (default 64 MiB)."),
    click.option(
        "-s",
        "--save-results/--no-save",
        "save_results",
        default=True,
        help="Save each rollout under outputs/evals when it is done (default); --no-save saves nothing.",
    ),
    click.option(
        "--resume",
        metavar="RUN",
        shell_complete=complete_runs,
        help="Continue a saved run (its folder, the start of its id, last): run missing and failed rollouts.",
    ),
    click.option("--record", is_flag=True, help="Also save the replies of judges, for vf replay."),
    click.option(
        "-C",
        "--state-columns",
        metavar="NAMES",
        callback=read_names,
        default="",
        help="State keys to save, separated by commas.",
    ),
    click.option("-H", "--save-to-hf-hub", is_flag=True, help="Push the scored rollouts to the Hugging Face hub."),
    click.option(
        "-D",
        "--hf-hub-dataset-name",
        metavar="NAME",
        default="",
        help="Name of that data set (default env_model_nN_rR).",
    ),
    click.option("-R", "--independent-scoring", is_flag=True, help="Group rewards see one rollout at a time."),
    click.option(
        "--dry-run", is_flag=True, help="Load everything but the model, show the plan and a prompt, and exit."
    ),
    click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON object."),
    click.option(
        "--max-failure-rate",
        type=Number(0, 1),
        metavar="SHARE",
        default=0.0,
        help="Exit with 1 if a larger share of rollouts failed (default 0).",
    ),
    click.option("-v", "--verbose", is_flag=True, help="Show the log and tracebacks."),
    click.option("-N", "--no-interleave-scoring", is_flag=True, help="Accepted for 0.1.x; it has no effect."),
    click.option(
        "-f",
        "--save-every",
        type=int,
        metavar="N",
        default=-1,
        help="Accepted for 0.1.x; each rollout is saved anyway.",
    ),
]


def eval_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add all options, in this order."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command
