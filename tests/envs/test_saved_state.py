"""Rollouts of a resumed run: on disk until somebody reads them, and the same states as ever when somebody does."""

from __future__ import annotations

import copy
import json
import pickle
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import verifiers as vf
from verifiers.envs.saved_state import SavedState
from verifiers.envs.states import restored_state
from verifiers.store import SavedRollouts, encode, read_records


def evaluate(path: Path, *, says: Any = "4", rows: int = 4, repeats: int = 2, **options: Any) -> vf.Results:
    given = [{"question": f"{i}+{i}?", "answer": str(2 * i), "info": {"level": i}} for i in range(rows)]
    env = vf.SingleTurnEnv(dataset=given, rubric=vf.Rubric([scored, lambda answer: float(len(answer))]))
    return env.evaluate(
        client=vf.FakeClient(says),
        model="m",
        rollouts_per_example=repeats,
        results_path=path,
        use_tqdm=False,
        state_columns=["trajectory"],
        **options,
    )


def scored(state: vf.State) -> float:
    return state["example_id"] / 4


@pytest.fixture
def saved(tmp_path: Path) -> list[SavedState]:
    evaluate(tmp_path / "run")
    results = evaluate(tmp_path / "run", resume=True)
    assert all(type(state) is SavedState for state in results.rollouts)
    return results.rollouts  # type: ignore[return-value]


def is_loaded(state: SavedState) -> bool:
    return state._saved is None


def test_a_resumed_run_gives_the_figures_of_the_first_without_loading_a_rollout(tmp_path: Path) -> None:
    first = evaluate(tmp_path / "run")
    resumed = evaluate(tmp_path / "run", resume=True)
    assert str(first) == str(resumed)
    for column in ("reward", "example_id", "task", "stop_condition", "is_truncated", *first.metric_names):
        assert first[column] == resumed[column], column
    assert first.metric_names == resumed.metric_names
    assert first.usage == resumed.usage
    assert not any(is_loaded(state) for state in resumed.rollouts)  # type: ignore[arg-type]
    assert [state["advantage"] for state in first.rollouts] == [state["advantage"] for state in resumed.rollouts]
    assert first["completion"] == resumed["completion"]
    assert first["prompt"] == resumed["prompt"]


@pytest.mark.parametrize(
    "use",
    [
        dict,
        lambda state: {**state},
        copy.copy,
        copy.deepcopy,
        lambda state: pickle.loads(pickle.dumps(state)),
        lambda state: json.loads(json.dumps({k: v for k, v in state.items() if k not in ("usage", "error")})),
        lambda state: state.copy(),
        lambda state: state | {},
        lambda state: {} | state,
        lambda state: (lambda **fields: fields)(**state),
        lambda state: {key: state[key] for key in state},
    ],
    ids=["dict", "stars", "copy", "deepcopy", "pickle", "json", ".copy", "or", "ror", "call", "keys"],
)
def test_whoever_uses_it_as_a_dict_finds_all_of_it(use: Callable[[Any], Any], saved: list[SavedState]) -> None:
    found = use(saved[1])
    assert found["completion"] == [{"role": "assistant", "content": "4"}]
    assert found["input"]["info"] == {"level": 0}
    assert found["timing"].keys() == {"generation_ms", "scoring_ms", "total_ms"}
    assert found["trajectory"][0]["advantage"] == 0.0


def test_what_is_written_into_it_stays(saved: list[SavedState]) -> None:
    state = saved[0]
    state["metrics"]["mine"] = 1.0
    state["note"] = "kept"
    assert state["metrics"]["mine"] == 1.0
    assert state["note"] == "kept"
    assert "note" in state
    assert len(state) == len(dict(state))
    assert state == dict(state) == state.load()
    assert state.pop("note") == "kept"
    assert state.setdefault("note", "new") == "new"


def test_it_is_the_state_that_was_restored_before(saved: list[SavedState], tmp_path: Path) -> None:
    records = {(record["example_id"], record["rollout"]): record for record in read_records(tmp_path / "run")}
    record = records[2, 1]
    state = next(state for state in saved if state["example_id"] == 2 and state.load()["rollout"] == 1)
    row = dict.__getitem__(state, "input")
    assert {**dict(restored_state(record, row)), "advantage": 0.0, "trajectory": state["trajectory"]} == state


def test_what_does_not_fit_into_columns_is_loaded_at_once(tmp_path: Path) -> None:
    lines = [
        {"example_id": 0, "rollout": 0, "reward": 1.0, "metrics": {"a": 1.0}},
        {"example_id": 1, "rollout": 0, "reward": 1.0, "metrics": {"a": None}},
        {"example_id": 2, "rollout": 0, "reward": 1.0, "usage": {"prompt_tokens": 2**70}},
        {"example_id": 3, "rollout": 0, "reward": 1.0, "error": {"type": "ToolError", "blame": "policy"}},
        *({"example_id": 4 + i, "rollout": 0, "metrics": {f"metric {i}": 1.0}} for i in range(300)),
    ]
    path = tmp_path / "results.jsonl"
    path.write_bytes(b"".join(map(encode, lines)))
    found = dict(SavedRollouts(path).read({(line["example_id"], 0) for line in lines}))
    assert len(found) == 304
    assert isinstance(found[0, 0], int)
    assert all(isinstance(found[example, 0], dict) for example in (1, 2, 3))
    assert sum(isinstance(one, int) for one in found.values()) == 256  # a file of new names does not fill the memory


def test_the_memory_of_a_resumed_run_does_not_depend_on_the_size_of_its_replies(tmp_path: Path) -> None:
    """60 replies of 1 MB each would be 60 MB: a few figures of each are held, and the line that is being read."""
    path = tmp_path / "run"
    evaluate(path, says="word " * 200_000, rows=30)
    tracemalloc.start()
    try:
        results = evaluate(path, rows=30, resume=True)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(results.rollouts) == 60
    assert peak < 12e6
    assert results.rollouts[7]["completion"][0]["content"] == "word " * 200_000
