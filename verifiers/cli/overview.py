"""One table for several evaluations, models × environments, with intervals and the models' paired differences."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from verifiers import stats
from verifiers.cli.tables import heading, table, terminal_width
from verifiers.results import Results

Cells = dict[tuple[str, str], Results]  # (environment, model) → its evaluation


def overview(found: Sequence[Results]) -> list[str]:
    """A matrix if there are several models, else a line for each environment."""
    cells = by_name(found)
    models = list(dict.fromkeys(model for _, model in cells))
    if len(models) < 2:
        return _lines(cells)
    lines = _matrix(cells, models)
    if differences := compare_models(cells):
        first = next(iter(differences.values()))
        lines += ["", heading(f"against {models[0]}, example by example ({_level(first)})"), *_differences(differences)]
    return lines


def overview_data(found: Sequence[Results]) -> dict[str, Any]:
    """The paired differences as plain data."""
    keys = ("mean_a", "mean_b", "difference", "low", "high", "level", "p_value", "adjusted_p", "verdict", "examples")
    cells = by_name(found)
    return {
        "differences": [
            {"env_id": env_id, "a": a, "b": b, **{key: dataclasses.asdict(one)[key] for key in keys}}
            for (env_id, a, b), one in compare_models(cells).items()
        ]
    }


def by_name(found: Sequence[Results]) -> Cells:
    """Evaluations by environment and model; repeated pairs get a number."""
    cells: Cells = {}
    for results in found:
        env_id, model = (str(results.metadata.get(key, "?")) for key in ("env_id", "model"))
        label, number = env_id, 1
        while (label, model) in cells:
            number += 1
            label = f"{env_id}#{number}"
        cells[label, model] = results
    return cells


def compare_models(cells: Cells) -> dict[tuple[str, str, str], stats.Comparison]:
    """Each model compared with the first on the same environment, with Holm's correction over all comparisons."""
    models = list(dict.fromkeys(model for _, model in cells))
    names = list(dict.fromkeys(env_id for env_id, _ in cells))
    pairs = [
        (env_id, models[0], model)
        for env_id in names
        for model in models[1:]
        if (env_id, models[0]) in cells and (env_id, model) in cells
    ]
    labels = {pair: f"{i}" for i, pair in enumerate(pairs)}
    a = {label: _scores(cells[pair[0], pair[1]], label) for pair, label in labels.items()}
    b = {label: _scores(cells[pair[0], pair[2]], label) for pair, label in labels.items()}
    found = stats.compare_metrics(a, b, tested=labels.values())
    return {pair: found[label] for pair, label in labels.items()}


def _scores(results: Results, label: str) -> dict[Any, list[float | None]]:
    """The rewards by (label, example id): the label distinguishes comparisons whose scores are equal."""
    scores: dict[Any, list[float | None]] = {}
    for state in results.rollouts:
        reward = None if state.get("error") is not None else state.get("reward")
        scores.setdefault((label, state.get("example_id")), []).append(reward)
    return scores


# --- as text ------------------------------------------------------------------------------------------------------


def _lines(cells: Cells) -> list[str]:
    rows = [
        [env_id, model, f"{len(results.rollouts):,}", f"{len(results.failed):,}", *_figure(results)]
        for (env_id, model), results in cells.items()
    ]
    return table(rows, header=["environment", "model", "rollouts", "failed", "reward", ""], right=[2, 3, 4])


def _matrix(cells: Cells, models: Sequence[str]) -> list[str]:
    names = list(dict.fromkeys(env_id for env_id, _ in cells))
    rows = [[model, *(_cell(cells.get((env_id, model))) for env_id in names)] for model in models]
    lines = table(rows, header=["reward", *names])
    return lines if max(map(len, lines)) <= terminal_width() else _lines(cells)


def _cell(results: Results | None) -> str:
    if results is None:
        return "–"
    failed = f" {len(results.failed)} failed" if results.failed else ""
    return f"{' '.join(_figure(results))}{failed}".rstrip()


def _figure(results: Results) -> tuple[str, str]:
    found = results.interval()
    interval = "" if found.low is None or found.high is None else f"[{found.low:.3f}, {found.high:.3f}]"
    return "–" if found.mean is None else f"{found.mean:.3f}", interval


def _differences(found: Mapping[tuple[str, str, str], stats.Comparison]) -> list[str]:
    rows = []
    for (env_id, _, model), one in found.items():
        if one.difference is None:
            rows.append([model, env_id, "–", "", "", "no example was scored in both"])
            continue
        interval = "" if one.low is None or one.high is None else f"[{one.low:+.3f}, {one.high:+.3f}]"
        p_value = "" if one.adjusted_p is None else f"p {one.adjusted_p:.3g}"
        rows.append([model, env_id, f"{one.difference:+.3f}", interval, p_value, one.verdict or "–"])
    return table(rows, right=[2])


def _level(one: stats.Comparison) -> str:
    together = f", Holm over {one.metrics}" if one.metrics > 1 else ""
    return f"95%{together}"
