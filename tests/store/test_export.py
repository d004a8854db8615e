"""Any run becomes a parquet file and a dataset; good rollouts become training data, failed ones never."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import verifiers as vf
from verifiers.store import RunDir, export_parquet, read_records, to_dpo, to_hf_dataset, to_sft, write_jsonl

Make = Callable[..., dict[str, Any]]
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def read_parquet(path: Path) -> Any:
    return pytest.importorskip("pyarrow.parquet").read_table(path)


def test_a_run_exports_to_parquet_with_its_types(run: RunDir, make_record: Make, tmp_path: Path) -> None:
    with run.appender() as out:
        out.append(make_record(0, info={"a": 1}, exact=1.0))
        out.append(make_record(1, info={"b": [2]}, exact=0))
        out.append(make_record(2, fails=True))
    assert export_parquet(run, tmp_path / "run.parquet") == 2
    table = read_parquet(tmp_path / "run.parquet")
    first, second = table.to_pylist()
    assert first["prompt"] == [{"role": "user", "content": "2+2?"}]
    assert (first["reward"], first["exact"], second["exact"], first["error"]) == (1.0, 1.0, 0.0, None)
    assert msgspec.json.decode(second["info"]) == {"b": [2]}
    assert table.schema.field("info").metadata == {b"encoding": b"json"}
    assert table.schema.field("prompt").metadata is None


def test_failed_rollouts_are_exported_only_on_request(run: RunDir, make_record: Make, tmp_path: Path) -> None:
    with run.appender() as out:
        out.append(make_record(0, fails=True))
    assert export_parquet(run.path, tmp_path / "x.parquet") == 0
    assert export_parquet(run.path, tmp_path / "x.parquet", include_failed=True) == 1
    [row] = read_parquet(tmp_path / "x.parquet").to_pylist()
    assert row["reward"] is None
    assert msgspec.json.decode(row["error"])["type"] == "JudgeError"


def test_tool_calls_and_mixed_content_export_as_json_text(make_record: Make) -> None:
    picture = [{"type": "text", "text": "a cat"}, {"type": "image_url", "image_url": {"url": "x"}}]
    records = [
        make_record(0, completion=[{"role": "assistant", "content": None, "tool_calls": [CALL]}]),
        make_record(1, prompt=[{"role": "user", "content": picture}], completion=[]),
    ]
    dataset = to_hf_dataset(records)
    assert msgspec.json.decode(dataset[0]["completion"][0]["tool_calls"]) == [CALL]
    assert dataset[1]["completion"] == []
    assert msgspec.json.decode(dataset[1]["prompt"]) == [{"role": "user", "content": picture}]


def test_a_dataset_is_a_real_one(run: RunDir, make_record: Make) -> None:
    datasets = pytest.importorskip("datasets")
    with run.appender() as out:
        for number in range(5):
            out.append(make_record(number, fails=number == 3))
    dataset = to_hf_dataset(run)
    assert isinstance(dataset, datasets.Dataset)
    assert dataset["example_id"][:] == [0, 1, 2, 4]
    assert len(to_hf_dataset([])) == 0


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()) | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60)
@given(rows=st.lists(st.dictionaries(st.sampled_from("abc"), values), max_size=4))
def test_any_records_export(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]]) -> None:
    path = tmp_path_factory.getbasetemp() / "any.parquet"
    assert export_parquet(rows, path) == len(rows)
    if rows and any(rows):
        assert read_parquet(path).num_rows == len(rows)


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for export in (lambda: export_parquet([], tmp_path / "x"), lambda: to_hf_dataset([])):
        with pytest.raises(ImportError, match=r"needs pyarrow; install it with: pip install 'verifiers\[data\]'"):
            export()


def test_jsonl_is_written_whole_and_read_back(tmp_path: Path) -> None:
    assert write_jsonl(({"n": n} for n in range(3)), tmp_path / "sft.jsonl") == 3
    assert list(read_records(tmp_path / "sft.jsonl")) == [{"n": 0}, {"n": 1}, {"n": 2}]


# --- training data --------------------------------------------------------------------------------------------------


def reply(text: str) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": text}]


def test_good_conversations_become_sft_examples(run: RunDir, make_record: Make) -> None:
    with run.appender() as out:
        out.append(make_record(0, reward=1.0))
        out.append(make_record(0, 1, reward=0.2))
        out.append(make_record(1, fails=True))
    [row] = to_sft(run, min_reward=0.5)
    assert row["messages"] == [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    assert (row["example_id"], row["reward"]) == (0, 1.0)
    assert len(to_sft(run)) == 2


def test_sft_takes_the_best_of_each_example(make_record: Make) -> None:
    records = [make_record(e, r, reward=r / 10 + e, completion=reply(str(r))) for e in range(2) for r in range(4)]
    assert [row["reward"] for row in to_sft(records, top_k_per_example=2)] == [0.3, 0.2, 1.3, 1.2]
    with pytest.raises(ValueError, match="at least 1"):
        to_sft(records, top_k_per_example=0)


def test_text_completions_stay_text(make_record: Make) -> None:
    good = make_record(prompt="2+2=", completion="4", reward=1.0)
    bad = make_record(prompt="2+2=", completion="5", reward=0.0)
    assert [(row["prompt"], row["completion"]) for row in to_sft([good], min_reward=1)] == [("2+2=", "4")]
    [pair] = to_dpo([bad, good])
    assert (pair["prompt"], pair["chosen"], pair["rejected"]) == ("2+2=", "4", "5")


def test_unscored_rollouts_pass_no_bar(make_record: Make) -> None:
    record = make_record(reward=None)
    assert to_sft([record], min_reward=-100) == []
    assert to_dpo([record, make_record(reward=1.0, completion=reply("x"))]) == []
    assert len(to_sft([record])) == 1


def test_dpo_pairs_the_best_with_the_worst_of_one_prompt(make_record: Make) -> None:
    records = [
        make_record(0, r, reward=reward, completion=reply(text))
        for r, (reward, text) in enumerate([(0.0, "a"), (1.0, "b"), (0.5, "c")])
    ]
    [pair] = to_dpo(records)
    assert (pair["prompt"], pair["chosen"], pair["rejected"]) == (records[0]["prompt"], reply("b"), reply("a"))
    assert (pair["chosen_reward"], pair["rejected_reward"]) == (1.0, 0.0)
    every = to_dpo(records, max_pairs_per_example=None)
    assert [(p["chosen_reward"], p["rejected_reward"]) for p in every] == [(1.0, 0.0), (1.0, 0.5), (0.5, 0.0)]
    assert len(to_dpo(records, min_margin=0.6, max_pairs_per_example=None)) == 1
    with pytest.raises(ValueError, match="chosen rollout is the better one"):
        to_dpo(records, min_margin=-1)


def test_dpo_never_pairs_equals_failures_or_different_prompts(make_record: Make) -> None:
    good, other = make_record(reward=1.0, completion=reply("b")), [{"role": "user", "content": "3+3?"}]
    assert to_dpo([good, make_record(reward=1.0, completion=reply("c"))]) == []
    assert to_dpo([good, make_record(reward=0.0, completion=reply("b"))]) == []
    assert to_dpo([good, make_record(fails=True, completion=reply("c"))]) == []
    assert to_dpo([good, make_record(reward=0.0, completion=reply("c"), prompt=other)]) == []
    assert to_dpo([good, make_record(1, reward=0.0, completion=reply("c"))]) == []


def test_the_tools_on_offer_go_with_the_conversation(make_record: Make) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    assert to_sft([make_record(oai_tools=tools)])[0]["tools"] == tools
    assert to_sft([make_record(info={"oai_tools": tools})])[0]["tools"] == tools
    assert "tools" not in to_sft([make_record()])[0]
    assert "tools" not in to_sft([make_record(tools=["a column of one's own"])])[0]
    pair = to_dpo([make_record(oai_tools=tools), make_record(oai_tools=tools, reward=0.0, completion=reply("x"))])[0]
    assert pair["tools"] == tools


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def calling(arguments: str) -> list[dict[str, Any]]:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "5"},
        {"role": "assistant", "content": "5"},
    ]


def test_calls_are_exported_with_their_arguments_as_objects_as_templates_want_them(make_record: Make) -> None:
    good = make_record(completion=calling('{"a": 2, "b": null}'), oai_tools=TOOLS)
    bad = make_record(completion=calling('{"a": '), oai_tools=TOOLS, reward=0.0)
    (row, odd) = to_sft([good, bad])
    call = row["messages"][1]["tool_calls"][0]
    assert call == {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": None}}}
    assert row["messages"][1]["content"] == ""
    assert odd["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"a": '  # what was said is not mended
    [pair] = to_dpo([good, bad])
    assert pair["chosen"] == row["messages"][1:]
    assert isinstance(good["completion"][0]["tool_calls"][0]["function"]["arguments"], str)  # the record stays


def test_content_parts_are_exported_as_they_are(make_record: Make) -> None:
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:…"}}]}
    assert to_sft([make_record(prompt=[image])])[0]["messages"][0] == image


def test_rollouts_that_call_tools_nobody_wrote_down_are_exported_with_a_warning(make_record: Make) -> None:
    with pytest.warns(
        UserWarning, match="1 rollouts call tools but do not say which tools were available .*older version"
    ):
        (row,) = to_sft([make_record(completion=calling("{}"))])
    assert "tools" not in row


def test_a_run_keeps_its_tools_and_results_export_as_their_run_does(tmp_path: Path) -> None:
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}
    env = vf.ToolEnv(tools=[add], dataset=[{"question": "2+3?"}], rubric=vf.Rubric([lambda: 1.0]))
    client = vf.FakeClient([{"content": None, "tool_calls": [call]}, "5"])
    results = env.evaluate(client=client, model="fake", results_path=tmp_path / "run", use_tqdm=False)
    assert next(iter(read_records(tmp_path / "run")))["oai_tools"] == env.oai_tools
    (row,) = to_sft(results)
    assert row["tools"] == env.oai_tools
    assert row["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"a": 2, "b": 3}
    assert to_sft(tmp_path / "run") == to_sft(RunDir.open(tmp_path / "run")) == [row]
    again = env.evaluate(client=client, model="fake", resume=tmp_path / "run", use_tqdm=False)
    assert to_sft(again) == [row]
    assert to_dpo(results) == []
    plain = vf.SingleTurnEnv(dataset=[{"question": "2+3?"}], rubric=vf.Rubric([lambda: 1.0]))
    results = plain.evaluate(client=client, model="fake", results_path=tmp_path / "plain", use_tqdm=False)
    assert "oai_tools" not in next(iter(read_records(tmp_path / "plain")))
    assert export_parquet(results, tmp_path / "plain.parquet") == 1
    assert to_hf_dataset(results)[0]["reward"] == 1.0
