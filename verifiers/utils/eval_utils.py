"""Classic import path: an evaluation from a configuration, its report and its files."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from verifiers.clients import load_endpoints
from verifiers.envs.evaluation import make_dataset
from verifiers.envs.loading import load_environment
from verifiers.logs import print_prompt_completions_sample, setup_logging
from verifiers.results import Results
from verifiers.store import DEFAULT_ROOT, RunDir, is_run_dir, to_record
from verifiers.types import EvalConfig
from verifiers.utils.client_utils import setup_client
from verifiers.utils.path_utils import get_eval_results_path
from verifiers.utils.save_utils import get_hf_hub_dataset_name, sanitize_metadata, save_to_disk

__all__ = [
    "get_hf_hub_dataset_name",
    "load_endpoints",
    "make_dataset",
    "print_results",
    "quiet_datasets",
    "run_evaluation",
    "sanitize_metadata",
    "save_rollout_results",
    "save_to_disk",
]


@contextmanager
def quiet_datasets() -> Iterator[None]:
    """Within the block, the datasets package shows warnings only, and no progress bars."""
    from datasets.utils import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled, logging

    before, had_bars = logging.get_verbosity(), is_progress_bar_enabled()
    logging.set_verbosity_warning()
    disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if had_bars:
            enable_progress_bar()


async def run_evaluation(config: EvalConfig) -> Results:
    """Load the environment, evaluate it, and show, save and push the results as the configuration says."""
    if config.verbose:
        setup_logging("DEBUG")
    env = load_environment(config.env_id, environments_dir=config.env_dir_path, **config.env_args)
    env.set_kwargs(**config.extra_env_kwargs)
    results: Results = await env.evaluate_async(
        client=setup_client(config.client_config),
        model=config.model,
        sampling_args=config.sampling_args,
        num_examples=config.num_examples,
        rollouts_per_example=config.rollouts_per_example,
        max_concurrent=config.max_concurrent,
        max_concurrent_generation=config.max_concurrent_generation,
        max_concurrent_scoring=config.max_concurrent_scoring,
        independent_scoring=config.independent_scoring,
        results_path=get_eval_results_path(config) if config.save_results else None,
        state_columns=config.state_columns,
        save_every=config.save_every,
    )
    if config.print_results:
        print_results(results)
    if config.save_results:
        save_rollout_results(results, config.save_to_hf_hub, config.hf_hub_dataset_name)
    return results


def print_results(results: Results, event_loop_lags: list[float] | None = None, num_samples: int = 1) -> None:
    """Print the first rollouts and the report."""
    shown = results.rollouts[:num_samples]
    prompts, completions, rewards, errors = (
        [state.get(name) for state in shown] for name in ("prompt", "completion", "reward", "error")
    )
    print_prompt_completions_sample(prompts, completions, rewards, num_samples=num_samples, errors=errors)
    sys.stdout.write(f"{results}\n")
    _print_repeats(results)
    if event_loop_lags:
        sys.stdout.write(f"event loop lag: at most {max(event_loop_lags) * 1000:.0f} ms\n")


def _print_repeats(results: Results) -> None:
    """Print every score column, one line per repeat: ``r1`` has the first rollout of each example."""
    seen: Counter[object] = Counter()
    repeats: list[int] = []
    for example in results["example_id"]:
        repeats.append(seen[example])
        seen[example] += 1
    for name in ("reward", *results.metric_names):
        sys.stdout.write(f"{name}:\n")
        for repeat in range(max(repeats, default=-1) + 1):
            values = [_rounded(value) for value, i in zip(results[name], repeats, strict=True) if i == repeat]
            sys.stdout.write(f"r{repeat + 1}: {values}\n")


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def save_rollout_results(
    results: Results, push_to_hf_hub: bool = False, hf_hub_dataset_name: str | None = None
) -> None:
    """Save the rollouts unless they are saved already; push the scored ones to the hub if requested."""
    metadata = results.metadata
    path = metadata.get("path_to_save")
    if path is None or not is_run_dir(path):
        metadata["path_to_save"] = _save(results).path
    if push_to_hf_hub:
        make_dataset(results, push_to_hub=True, hub_name=hf_hub_dataset_name or get_hf_hub_dataset_name(results))


def _save(results: Results) -> RunDir:
    metadata = {key: value for key, value in results.metadata.items() if key != "path_to_save"}
    env_id, model = str(metadata.get("env_id") or "environment"), str(metadata.get("model") or "model")
    given = results.metadata.get("path_to_save")
    if given is None:
        run = RunDir.create(DEFAULT_ROOT, env_id=env_id, model=model, config=metadata)
    else:
        run = RunDir.create_at(given, env_id=env_id, model=model, config=metadata)
    seen: dict[object, int] = {}
    with run.appender() as appender:
        for state in results.rollouts:
            rollout = seen.get(state.get("example_id"), 0)
            seen[state.get("example_id")] = rollout + 1
            columns = results.metadata.get("state_columns") or ()
            appender.append(to_record(state, rollout=rollout, state_columns=columns))
    run.update_metadata(metadata)
    return run
