"""A data set in any form becomes formatted rows; formatting twice is formatting once, and the input stays as it was."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset, DatasetDict, IterableDataset
from hypothesis import given
from hypothesis import strategies as st

import verifiers as vf
from verifiers.envs.rows import RowFormat, Rows, as_rows, few_shot_messages

RAW = [{"question": "2+2?", "answer": "4"}, {"question": "3+3?", "answer": "6"}]


def env(dataset: Any, **kwargs: Any) -> vf.SingleTurnEnv:
    return vf.SingleTurnEnv(dataset=dataset, **kwargs)


# --- every form of a data set -------------------------------------------------------------------------------------


def jsonl(folder: Path) -> Path:
    path = folder / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, RAW)) + "\n\n")
    return path


def parquet(folder: Path) -> Path:
    Dataset.from_list(RAW).to_parquet(str(folder / "data.parquet"))
    return folder / "data.parquet"


def array(folder: Path) -> Path:
    path = folder / "data.json"
    path.write_text(json.dumps(RAW))
    return path


def table(folder: Path) -> Path:
    path = folder / "data.csv"
    path.write_bytes('\ufeffquestion,answer\r\n"2+2?",4\r\n\r\n3+3?,6\r\n'.encode())  # as a spreadsheet saves it
    return path


@pytest.mark.parametrize(
    "source",
    [
        lambda _: RAW,
        lambda _: tuple(RAW),
        lambda _: Dataset.from_list(RAW),
        lambda _: Dataset.from_list(RAW).to_pandas(),
        lambda _: {"question": ["2+2?", "3+3?"], "answer": ["4", "6"]},
        lambda _: (row for row in RAW),
        lambda _: lambda: RAW,
        lambda _: lambda: (row for row in RAW),
        lambda _: lambda: Dataset.from_list(RAW),
        lambda _: IterableDataset.from_generator(lambda: iter(RAW)),
        jsonl,
        parquet,
        array,
        table,
        lambda folder: str(jsonl(folder)),
    ],
)
def test_rows_are_the_same_whatever_they_come_from(source: Any, tmp_path: Path) -> None:
    rows = env(source(tmp_path)).get_dataset()
    assert [(row["prompt"], row["answer"], row["example_id"], row["task"]) for row in rows] == [
        ([{"role": "user", "content": "2+2?"}], "4", 0, "default"),
        ([{"role": "user", "content": "3+3?"}], "6", 1, "default"),
    ]
    assert len(list(rows)) == len(list(rows)) == 2


def test_a_callable_and_a_generator_are_not_touched_before_rows_are_wanted() -> None:
    touched: list[int] = []

    def stream() -> Iterator[dict[str, str]]:
        touched.append(1)
        yield from RAW

    one, two = env(stream), env(stream())
    assert touched == []
    assert repr(one.dataset) == "Rows(not loaded yet)"
    assert len(one.get_dataset()) == len(two.get_dataset()) == 2
    assert len(one.get_dataset()) == 2
    assert touched == [1, 1]


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ([{"question": "x"}, {"text": "y"}], r"row 1 .*'prompt'.*'question'.*text"),
        (Dataset.from_list([{"text": "y"}]), r"'prompt'.*'question'.*text"),
        ({"text": ["y"]}, r"row 0 .*'prompt'"),
        ([{"question": "x"}, 7], r"row 1 .*int"),
        ([{"prompt": [{"content": "no role"}]}], r"row 0.*'role'"),
        ([{"prompt": 7}], r"row 0.*int"),
        ([{"question": "x", "example_id": 3}, {"question": "y", "example_id": 3}], r"example_id 3 .*rows 0 and 1"),
        ({"question": ["a", "b"], "answer": ["c"]}, r"differ in length.*'question': 2.*'answer': 1"),
        (DatasetDict({"train": Dataset.from_list(RAW)}), r"splits \(train\)"),
        (7, "got int"),
        (None, "needs a dataset"),
    ],
)
def test_a_data_set_that_cannot_work_is_refused_when_the_environment_is_built(dataset: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        env(dataset)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("question,answer\n2+2?\n", ":2 has 1 values for 2 columns"),
        ("question,question\n2+2?,4\n", ":1 names a column twice"),
        ('question,answer\n"2+2?"x,4\n', ":2 is not CSV"),
    ],
)
def test_a_csv_file_with_a_mistake_is_refused_with_its_line(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "broken.csv").write_text(text)
    with pytest.raises(ValueError, match=rf"broken\.csv{words}"):
        len(env(tmp_path / "broken.csv").get_dataset())


def test_a_file_that_is_not_there_or_not_readable_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere\.jsonl"):
        env("nowhere.jsonl")
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"question": "x"}\n{"question": ')
    with pytest.raises(ValueError, match=r"broken\.jsonl:2 is not JSON"):
        len(env(broken).get_dataset())
    other = tmp_path / "data.xml"
    other.write_text("<question>x</question>")
    with pytest.raises(ValueError, match=r"data\.xml.*\.jsonl"):
        len(env(other).get_dataset())


def test_a_prompt_in_messages_with_completion_type_is_refused() -> None:
    with pytest.raises(ValueError, match=r"row 0.*'completion'.*string"):
        env([{"prompt": [{"role": "user", "content": "x"}]}], message_type="completion")


def test_an_empty_data_set_evaluates_to_an_empty_result_with_a_warning() -> None:
    for dataset in ([], Dataset.from_list([]), list):
        with pytest.warns(UserWarning, match="empty"):
            results = env(dataset).evaluate(client=vf.FakeClient("x"), model="m", use_tqdm=False)
        assert len(results) == 0
        assert results["rewards"] == []
        assert results.mean_reward is None
    with pytest.raises(ValueError, match="empty"):
        env([]).sample_prompts(3)


# --- ids ----------------------------------------------------------------------------------------------------------


def test_whole_numbers_are_kept_as_ids_and_anything_else_is_numbered() -> None:
    kept = env([{"question": "a", "example_id": 7}, {"question": "b", "example_id": 3}]).get_dataset()
    assert kept["example_id"] == [7, 3]
    named = env([{"question": "a", "example_id": "x-7"}, {"question": "b", "example_id": "x-3"}]).get_dataset()
    assert named["example_id"] == [0, 1]
    assert named["src_id"] == ["x-7", "x-3"]


def test_ids_stay_with_their_rows_when_they_are_shuffled_or_picked() -> None:
    rows = env([{"question": str(i)} for i in range(20)]).get_dataset()
    shuffled = rows.shuffle(1)
    assert sorted(shuffled["example_id"]) == list(range(20))
    assert shuffled["example_id"] != list(range(20))
    assert all(row["prompt"][0]["content"] == str(row["example_id"]) for row in shuffled)
    assert shuffled[3:5][1] == shuffled[4]
    assert rows["example_id"] == list(range(20))  # shuffled in a new object, never in place


# --- as a data set ------------------------------------------------------------------------------------------------


def test_rows_slice_iterate_and_answer_as_a_data_set_does() -> None:
    rows = env(RAW).dataset
    assert rows is not None
    assert [sample["answer"] for sample in rows[:1]] == ["4"]
    assert [sample["answer"] for sample in rows[-1:]] == ["6"]
    assert rows[-1]["answer"] == "6"
    assert rows["answer"] == ["4", "6"]
    assert [d for d in rows if d.get("difficulty", "easy") == "easy"] == rows.to_list()
    with pytest.raises(IndexError):
        rows[2]
    assert "answer" in rows.column_names
    assert len(rows.filter(lambda row: row["answer"] == "4")) == 1
    assert rows.to_hf()["answer"][:] == ["4", "6"]


def test_get_dataset_takes_the_first_n_or_a_seeded_n_and_falls_back_for_evaluation() -> None:
    made = env([{"question": str(i)} for i in range(10)])
    assert made.get_dataset(3)["example_id"] == [0, 1, 2]
    assert made.get_dataset(3, seed=5)["example_id"] == made.get_dataset(3, seed=5)["example_id"]
    assert len(made.get_dataset(-1)) == len(made.get_dataset(99)) == 10
    assert made.get_eval_dataset(2)["example_id"] == [0, 1]
    both = env(RAW, eval_dataset=[{"question": "eval"}])
    assert both.get_eval_dataset()[0]["prompt"][0]["content"] == "eval"
    with pytest.raises(ValueError, match="only an eval_dataset"):
        vf.SingleTurnEnv(eval_dataset=RAW).get_dataset()


def test_sampled_prompts_repeat_only_when_there_are_too_few() -> None:
    made = env([{"question": str(i), "answer": ""} for i in range(5)])
    assert sorted(row["example_id"] for row in made.sample_prompts(5)) == [0, 1, 2, 3, 4]
    assert len(made.sample_prompts(12)) == 12
    assert made.sample_prompts(3, seed=1) == made.sample_prompts(3, seed=1)


# --- formatting ---------------------------------------------------------------------------------------------------


def test_a_prompt_gets_the_system_prompt_and_the_examples() -> None:
    shots = [{"question": "1+1?", "answer": "2"}]
    made = env(RAW, system_prompt="Be brief.", few_shot_examples=shots)
    assert made.dataset is not None
    assert [(m["role"], m["content"]) for m in made.dataset[0]["prompt"]] == [
        ("system", "Be brief."),
        ("user", "1+1?"),
        ("assistant", "2"),
        ("user", "2+2?"),
    ]
    text = env(RAW, system_prompt="Be brief.", few_shot=shots, message_type="completion").dataset
    assert text is not None
    assert text[0]["prompt"] == "Be brief.\n\n1+1?\n\n2\n\n2+2?"


def test_a_prompt_with_a_system_message_of_its_own_keeps_it() -> None:
    own = [{"role": "system", "content": "Own."}, {"role": "user", "content": "x"}]
    rows = env([{"prompt": own}], system_prompt="Be brief.").dataset
    assert rows is not None
    assert rows[0]["prompt"] == own


@pytest.mark.parametrize(
    ("examples", "n"),
    [
        (None, 0),
        ([{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], 2),
        ([{"prompt": "q", "completion": "a"}], 2),
        ([("q", "a"), ("r", "b")], 4),
        ([{"question": [{"role": "user", "content": "q"}], "answer": "a"}], 2),
    ],
)
def test_examples_are_messages_pairs_or_rows(examples: Any, n: int) -> None:
    messages = few_shot_messages(examples)
    assert len(messages) == n
    assert [m["role"] for m in messages] == ["user", "assistant"] * (n // 2)


def test_an_example_without_an_answer_is_refused_by_number() -> None:
    with pytest.raises(ValueError, match="few-shot example 1"):
        env(RAW, few_shot=[("q", "a"), {"question": "q"}])
    with pytest.raises(TypeError, match="same argument"):
        env(RAW, few_shot=[("q", "a")], few_shot_examples=[("q", "a")])


def test_prompts_may_be_numpy_arrays() -> None:
    array = np.array([{"role": "user", "content": "x"}], dtype=object)
    rows = env([{"prompt": array}]).dataset
    assert rows is not None
    assert rows[0]["prompt"] == [{"role": "user", "content": "x"}]


def test_content_parts_pass_untouched_from_a_row_to_the_model() -> None:
    parts = [
        {"type": "text", "text": "what?"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA", "detail": "low"}},
        {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}},
    ]
    client = vf.FakeClient("a cat")
    prompt = [{"role": "user", "content": parts}]
    env([{"prompt": prompt}]).evaluate(client=client, model="m", use_tqdm=False)
    columnar = Dataset.from_list([{"prompt": prompt}])  # fills what a part lacks with None
    env(columnar).evaluate(client=client, model="m", use_tqdm=False)
    assert [request.prompt for request in client.requests] == [prompt, prompt]


def test_the_rows_of_one_environment_take_the_format_of_another() -> None:
    first = env(RAW, system_prompt="First.")
    second = env(env(RAW).dataset, system_prompt="Second.")
    kept = env(first.dataset[1:], system_prompt="Second.")  # type: ignore[index]
    assert second.dataset is not None
    assert kept.dataset is not None
    assert second.dataset[0]["prompt"][0] == {"role": "system", "content": "Second."}
    assert kept.dataset[0]["prompt"][0] == {"role": "system", "content": "First."}
    assert kept.dataset["example_id"] == [1]


texts = st.text(max_size=12)
chat = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": texts}),
    min_size=1,
    max_size=3,
)
extras = {"answer": texts, "info": st.dictionaries(texts, texts, max_size=2), "difficulty": texts, "task": texts}
raw_rows = st.lists(
    st.one_of(
        st.fixed_dictionaries({"question": texts}, optional=extras),
        st.fixed_dictionaries({"prompt": texts}, optional=extras),
        st.fixed_dictionaries({"prompt": chat}, optional={**extras, "example_id": texts}),
    ),
    max_size=4,
    unique_by=lambda row: row.get("example_id", id(row)),  # two rows of one id are refused
)
formats = st.builds(
    RowFormat,
    system_prompt=st.none() | texts,
    few_shot=st.lists(st.tuples(texts, texts), max_size=2).map(few_shot_messages),
    task=texts,
)


@given(raw_rows, formats)
def test_formatting_formatted_rows_changes_nothing_and_the_input_never_changes(
    raw: list[dict[str, Any]], row_format: RowFormat
) -> None:
    before = copy.deepcopy(raw)
    once = Rows(raw, row_format).to_list()
    twice = Rows(once, row_format).to_list()
    assert twice == once
    assert as_rows(Rows(raw, row_format), row_format).to_list() == once
    for row in once:
        row["prompt"].append({"role": "user", "content": "changed by a hook"})
        row["prompt"][0]["content"] = "changed by a hook"
    assert raw == before


@given(
    st.lists(st.fixed_dictionaries({"question": texts}, optional={"answer": texts}), min_size=1, max_size=3),
    st.builds(
        RowFormat,
        message_type=st.just("completion"),
        system_prompt=st.none() | texts,
        few_shot=st.lists(st.tuples(texts, texts), max_size=2).map(few_shot_messages),
    ),
)
def test_text_prompts_are_formatted_once_too(raw: list[dict[str, Any]], row_format: RowFormat) -> None:
    once = Rows(raw, row_format).to_list()
    assert Rows(once, row_format).to_list() == once
    assert all(row["prompt"].endswith(given["question"]) for row, given in zip(once, raw, strict=True))


def test_a_rollout_cannot_change_the_row_it_was_made_from() -> None:
    class Vandal(vf.SingleTurnEnv):
        def setup_state(self, state: vf.State) -> None:
            state["prompt"][0]["content"] = "changed"
            state["info"]["list"].append(1)
            state["answer"] = "changed"

    raw = [{"prompt": [{"role": "user", "content": "x"}], "answer": "4", "info": {"list": []}}]
    before = copy.deepcopy(raw)
    made = Vandal(dataset=raw)
    client = vf.FakeClient("y")
    made.evaluate(client=client, model="m", rollouts_per_example=3, use_tqdm=False)
    assert raw == before
    assert made.dataset is not None
    assert made.dataset[0]["prompt"] == before[0]["prompt"]
    assert [r.prompt[0]["content"] for r in client.requests] == ["changed"] * 3  # type: ignore[index]


def test_a_generator_that_never_ends_is_refused_before_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verifiers.envs.rows.MOST_STREAMED", 1000)
    assert len(as_rows((dict(RAW[0]) for _ in range(1000)), RowFormat())) == 1000
    with pytest.raises(ValueError, match=r"has more than 1,000 rows.*islice"):
        len(as_rows((dict(RAW[0]) for _ in itertools.count()), RowFormat()))
