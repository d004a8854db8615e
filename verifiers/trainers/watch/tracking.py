"""Logs metrics of a training to Weights & Biases, Trackio or TensorBoard, as ``report_to`` selects."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import itertools
import math
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from verifiers.files import read_regular
from verifiers.store.config import normalise
from verifiers.store.plain import to_json

PROJECT = "verifiers"
_NO_NAMES = ("none", "")


class Histogram(NamedTuple):
    """Counts of bins, and their edges, of which there is one more than bins."""

    edges: list[float]
    counts: list[float]


def trackers(
    report_to: str | Sequence[str] | None,
    *,
    run_name: str | None,
    config: Mapping[str, Any],
    folder: str | os.PathLike[str],
) -> list[Guarded]:
    """Start the trackers that ``report_to`` names: None, "none", "all" (those installed), a name, or several.

    A tracker that cannot start is an error. One that fails later causes a single warning, and training continues. A run
    without a name is named after its folder.

    >>> trackers(None, run_name="first", config={}, folder=".")
    []
    >>> trackers("wandbb", run_name="first", config={}, folder=".")
    Traceback (most recent call last):
    ValueError: report_to='wandbb' is not known; choose wandb, trackio, tensorboard, all or none
    """
    started: list[Guarded] = []
    for name in check_report_to(report_to):
        try:
            started.append(Guarded(_TRACKERS[name](run_name or Path(folder).name, normalise(config), Path(folder))))
        except Exception as error:  # foreign code
            for other in started:
                other.close()
            raise RuntimeError(
                f"report_to={name!r} could not start: {_one_line(error)}{_HINTS.get(name, '')}"
            ) from error
    return started


def check_report_to(report_to: str | Sequence[str] | None) -> list[str]:
    """The trackers that ``report_to`` names; an error if one is unknown or not installed."""
    names: list[str] = []
    for name in [report_to] if isinstance(report_to, str) else report_to or ():
        if name == "all":
            names += [known for known in _TRACKERS if _is_installed(known)]
        elif name in _TRACKERS:
            names.append(name)
        elif name not in _NO_NAMES:
            raise ValueError(f"report_to={name!r} is not known; choose {', '.join(_TRACKERS)}, all or none")
    for name in names:
        if not _is_installed(name):
            raise ImportError(f"report_to={name!r} needs a package that is not installed; pip install {name}")
    return list(dict.fromkeys(names))


def flatten(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, float | Histogram]:
    """The finite numbers and histograms of nested mappings, by keys joined with slashes; other values are dropped.

    >>> flatten({"reward": 0.5, "kl": None, "metrics": {"format": 1.0}, "h": {"edges": [0, 1, 2], "counts": [3, 1]}})
    {'reward': 0.5, 'metrics/format': 1.0, 'h': Histogram(edges=[0.0, 1.0, 2.0], counts=[3.0, 1.0])}
    """
    flat: dict[str, float | Histogram] = {}
    for key, value in metrics.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            histogram = _histogram_of(value)
            flat |= flatten(value, f"{name}/") if histogram is None else {name: histogram}
        elif isinstance(value, (int, float)) and math.isfinite(value):
            flat[name] = value
    return flat


def _histogram_of(value: Mapping[str, Any]) -> Histogram | None:
    edges, counts = value.get("edges"), value.get("counts")
    if not isinstance(edges, Sequence) or not isinstance(counts, Sequence) or len(edges) != len(counts) + 1:
        return None
    return Histogram([float(edge) for edge in edges], [float(count) for count in counts]) if counts else None


def _is_installed(name: str) -> bool:
    spec = importlib.util.find_spec(name)
    # wandb leaves a folder "wandb" behind, which would be found as a namespace package (without an origin).
    return spec is not None and spec.origin is not None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


class Guarded:
    """A tracker whose failures do not stop the training: the first is a warning, later ones are ignored."""

    def __init__(self, inner: Wandb | Trackio | TensorBoard) -> None:
        self.inner = inner
        self.name = inner.name
        self._has_warned = False

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        figures = {name: value for name, value in metrics.items() if name not in ("step", "time")}
        self._try(lambda: self.inner.log(step, figures))

    def close(self) -> None:
        self._try(self.inner.close)

    def _try(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # foreign code, and often a network
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"{self.name} failed to log metrics ({type(error).__name__}: {_one_line(error)}); training "
                    "continues, and metrics.jsonl has all metrics",
                    RuntimeWarning,
                    stacklevel=3,
                )


class _Service:
    """A run of wandb or of a package with its interface; a resumed training continues its run."""

    name = ""

    def __init__(self, run_name: str, config: dict[str, Any], folder: Path) -> None:
        self._module = importlib.import_module(self.name)
        project = os.environ.get(f"{self.name.upper()}_PROJECT") or PROJECT
        file = folder / f".{self.name}-run"
        known = read_regular(file, most=4096).decode("utf-8", "replace").strip() if file.exists() else ""
        with contextlib.redirect_stdout(sys.stderr):  # stdout is reserved for the results of this program
            self._run: Any = self._module.init(
                project=project, name=run_name, config=config, **self._settings(folder, known)
            )
        file.write_text(f"{self._run.id if self.name == 'wandb' else run_name}\n", encoding="utf-8")

    def _settings(self, folder: Path, known: str) -> dict[str, Any]:
        raise NotImplementedError

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        make = self._module.Histogram
        figures = {
            name: make(np_histogram=(value.counts, value.edges)) if isinstance(value, Histogram) else value
            for name, value in flatten(metrics).items()
        }
        self._run.log(figures, step=step)

    def close(self) -> None:
        with contextlib.redirect_stdout(sys.stderr):
            self._run.finish()


class Wandb(_Service):
    """Weights & Biases, or its offline files in the run directory."""

    name = "wandb"

    def _settings(self, folder: Path, known: str) -> dict[str, Any]:
        quiet = self._module.Settings(console="off")  # otherwise wandb captures the live display
        resumed = {"id": known or None, "resume": "allow" if known else None}
        return {"dir": str(folder), "reinit": "create_new", "settings": quiet, **resumed}


class Trackio(_Service):
    """The local database of Trackio (``trackio show``)."""

    name = "trackio"

    def _settings(self, folder: Path, known: str) -> dict[str, Any]:
        return {"resume": "allow" if known else "never", "embed": False}

    def close(self) -> None:
        with contextlib.redirect_stdout(sys.stderr):
            self._module.finish()


class TensorBoard:
    """Event files in ``tensorboard/`` of the run directory (``tensorboard --logdir``)."""

    name = "tensorboard"

    def __init__(self, run_name: str, config: dict[str, Any], folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._make_writer = SummaryWriter
        self._folder = folder / "tensorboard"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._config = msgspec.json.format(to_json({"run_name": run_name, **config}), indent=2).decode()
        self._writer: Any = None

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        if self._writer is None:  # created late, because purge_step hides what was logged from a step on
            self._writer = self._make_writer(log_dir=str(self._folder), purge_step=step)
            self._writer.add_text("config", f"    {self._config}".replace("\n", "\n    "), global_step=step)
        for name, value in flatten(metrics).items():
            if isinstance(value, Histogram):
                self._add_histogram(name, value, step)
            else:
                self._writer.add_scalar(name, value, global_step=step)
        self._writer.flush()

    def _add_histogram(self, name: str, histogram: Histogram, step: int) -> None:
        edges, counts = histogram
        middles = [(low + high) / 2 for low, high in itertools.pairwise(edges)]
        first, second = (
            sum(middle**power * count for middle, count in zip(middles, counts, strict=True)) for power in (1, 2)
        )
        self._writer.add_histogram_raw(
            name, edges[0], edges[-1], sum(counts), first, second, edges[1:], counts, global_step=step
        )

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


_TRACKERS: dict[str, type[Wandb | Trackio | TensorBoard]] = {
    "wandb": Wandb,
    "trackio": Trackio,
    "tensorboard": TensorBoard,
}
_HINTS = {
    "wandb": "; run `wandb login`, set WANDB_MODE=offline, or leave it out of report_to",
    "tensorboard": "; it needs torch: pip install 'verifiers[train]'",
}
