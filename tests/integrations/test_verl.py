"""Our environments in verl: rows, rewards, tokens, and (slow) its real agent loop worker under Ray."""

from __future__ import annotations

import asyncio
import datetime
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import pyarrow.parquet
import pytest
from click.testing import CliRunner

import verifiers as vf
from tests.support.venvs import python_with, run_contract
from verifiers.cli.main import vf as program
from verifiers.clients.protocol import Request
from verifiers.clients.token_client import Sampled, TokenClient
from verifiers.integrations.verl import compute_score, export_rows
from verifiers.integrations.verl.output import fit, last_sample

EXAMPLES = Path(__file__).parents[2] / "examples" / "verl"


def rows_in(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
    return rows


def test_rows_become_parquet_files_in_verls_columns(tmp_path: Path) -> None:
    env = vf.load_environment("arithmetic", num_train_examples=3, num_eval_examples=2)
    files = export_rows(env, tmp_path, env_id="arithmetic", env_args={"seed": 1})
    train, test = rows_in(files["train"]), rows_in(files["test"])
    assert (len(train), len(test)) == (3, 2)
    row = train[0]
    assert {"data_source", "prompt", "ability", "reward_model", "extra_info", "agent_name"} == row.keys()
    assert row["agent_name"] == "verifiers"
    assert row["reward_model"]["ground_truth"] == env.get_dataset()[0]["answer"]
    assert json.loads(row["extra_info"]["vf_row"])["answer"] == env.get_dataset()[0]["answer"]


def test_vf_export_verl_writes_them_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(program, ["export", "verl", "arithmetic", "-n", "2", "-a", '{"seed": 3}'])
    assert done.exit_code == 0, done.output
    assert len(rows_in(tmp_path / "data" / "arithmetic" / "train.parquet")) == 2
    assert "verl ENV" in CliRunner().invoke(program, ["export", "--help"]).output


def test_compute_score_gives_the_rubrics_reward_and_its_metrics(tmp_path: Path) -> None:
    env = vf.load_environment("arithmetic", num_train_examples=2)
    (row, *_) = rows_in(export_rows(env, tmp_path, env_id="arithmetic")["train"])
    answer = row["reward_model"]["ground_truth"]
    right = compute_score("verifiers/arithmetic", f"<answer>{answer}</answer>", answer, extra_info=row["extra_info"])
    wrong = compute_score("verifiers/arithmetic", "I do not know.", answer, extra_info=row["extra_info"])
    assert right["score"] > wrong["score"]
    assert right.keys() - {"score"}
    named = {"vf_env_id": "arithmetic"}
    rows: list[Any] = [{}, None, "x", named, {**named, "vf_row": "5"}, {**named, "vf_row": "{"}, {**named, "vf_row": 5}]
    for wrong in (*rows, {**row["extra_info"], "vf_env_args": "[1]"}):
        with pytest.raises(ValueError, match="vf export verl"):
            compute_score("elsewhere", "4", "4", extra_info=wrong)  # type: ignore[arg-type]


def test_a_reward_function_called_score_is_not_taken_for_the_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "two_scores"
    folder.mkdir()
    (folder / "two_scores.py").write_text(
        "import verifiers as vf\n"
        "def score(completion): return 1.0\n"
        "def load_environment():\n"
        "    return vf.SingleTurnEnv(dataset=[{'question': '?'}], rubric=vf.Rubric([score], weights=[0.25]))\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    (row,) = rows_in(export_rows(vf.load_environment("two-scores"), tmp_path, env_id="two-scores")["train"])
    assert compute_score("verifiers/two-scores", "x", "", extra_info=row["extra_info"])["score"] == 0.25


def test_prompts_of_parts_of_text_alone_and_of_calls_alone_are_exported_side_by_side(tmp_path: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    prompts: list[Any] = [
        [{"role": "user", "content": [{"type": "text", "text": "in parts"}]}],
        [{"role": "user", "content": "whole"}, {"role": "assistant", "tool_calls": [call]}],
    ]
    env = vf.SingleTurnEnv(
        dataset=[{"prompt": one, "answer": ""} for one in prompts], rubric=vf.Rubric([lambda completion: 1.0])
    )
    rows = rows_in(export_rows(env, tmp_path, env_id="x")["train"])
    assert [[message["content"] for message in row["prompt"]] for row in rows] == [["in parts"], ["whole", ""]]
    assert json.loads(rows[0]["extra_info"]["vf_row"])["prompt"] == prompts[0], "the row itself is kept as it is"


def test_arrays_and_dates_in_a_row_reach_the_rubric_as_plain_values_and_what_cannot_be_written_is_refused(
    tmp_path: Path,
) -> None:
    def exported(info: Any, answer: Any = None) -> dict[str, Any]:
        rows = [{"question": "q", "answer": answer, "info": info}]
        env = vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric([lambda completion: 1.0]))
        (row,) = rows_in(export_rows(env, tmp_path, env_id="x")["train"])
        return row

    row = exported({"tests": numpy.array([1, 2]), "n": numpy.int64(3), "day": datetime.date(2026, 1, 2)})
    assert json.loads(row["extra_info"]["vf_row"])["info"] == {"tests": [1, 2], "n": 3, "day": "2026-01-02"}
    assert row["reward_model"]["ground_truth"] == ""
    for odd in ({1, 2}, b"ab", object()):
        with pytest.raises(TypeError, match=f"a {type(odd).__name__}, which cannot be written: make it plain data"):
            exported({"odd": odd})


class Counting:
    """Continues every prompt with the digits 7 and 8 and the end of a turn, and keeps the prompts it was asked."""

    def __init__(self, tokenizer: Any, *, text: str = "78", is_ended: bool = True) -> None:
        self.ids = [*tokenizer.encode(text, add_special_tokens=False), *([tokenizer.eos_token_id] * is_ended)]
        self.prompts: list[list[int]] = []

    async def generate(self, prompt_ids: list[int], sampling: Mapping[str, Any]) -> Sampled:
        self.prompts.append(prompt_ids)
        return Sampled(ids=self.ids, logprobs=[-0.5] * len(self.ids))


def test_a_token_client_goes_on_from_the_ids_that_were_sampled() -> None:
    _, tokenizer = vf.tiny_model(characters="abmore0123456789", hidden_size=32)
    engine = Counting(tokenizer)
    client = TokenClient(tokenizer, engine.generate)

    async def main() -> tuple[Any, Any]:
        asked: list[Any] = [{"role": "user", "content": "a"}]
        first = await client.complete(Request(model="m", prompt=asked))
        asked += [first.message, {"role": "user", "content": "more"}]
        return first, await client.complete(Request(model="m", prompt=asked))

    first, second = asyncio.run(main())
    assert (first.text, first.finish_reason) == ("78", "stop")
    sampled = engine.prompts[0] + engine.ids
    assert engine.prompts[1][: len(sampled)] == sampled
    assert second.tokens.prompt_ids == engine.prompts[1]
    whole = last_sample({"trajectory": [{"tokens": _tokens(first)}, {"tokens": _tokens(second)}]})
    assert whole.completion_ids[: len(engine.ids)] == whole.completion_ids[-len(engine.ids) :] == engine.ids
    assert sum(whole.completion_mask) == 2 * len(engine.ids)


def _tokens(completion: Any) -> dict[str, Any]:
    tokens = completion.tokens
    return {
        "prompt_ids": tokens.prompt_ids,
        "completion_ids": tokens.completion_ids,
        "completion_logprobs": tokens.logprobs,
    }


def test_a_reply_without_an_end_was_cut_and_tool_calls_are_read_out_of_its_text() -> None:
    _, tokenizer = vf.tiny_model(hidden_size=32)
    cut = TokenClient(tokenizer, Counting(tokenizer, is_ended=False).generate)
    asked = Request(model="m", prompt=[{"role": "user", "content": "a"}])
    assert asyncio.run(cut.complete(asked)).finish_reason == "length"
    text = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    calling = TokenClient(tokenizer, Counting(tokenizer, text=text).generate)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    reply = asyncio.run(calling.complete(Request(model="m", prompt=asked.prompt, tools=tools)))
    assert reply.finish_reason == "tool_calls"
    assert reply.message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}


def test_a_response_is_cut_to_verls_tensors_and_one_that_never_began_is_an_error() -> None:
    tokens = {"prompt_ids": [1], "completion_ids": [2, 3, 4], "completion_logprobs": [0.0, -1.0, -2.0]}
    sample = fit(last_sample({"trajectory": [{"tokens": tokens}]}), 2)
    assert (sample.completion_ids, sample.completion_logprobs, sample.is_truncated) == ([2, 3], [0.0, -1.0], True)
    with pytest.raises(ValueError, match="before the model was asked"):
        last_sample({"trajectory": [], "example_id": 7})


def test_the_launch_script_names_our_agent_loop_and_asks_for_logprobs() -> None:
    loops, script = (EXAMPLES / "agent_loops.yaml").read_text(), (EXAMPLES / "train.sh").read_text()
    assert "_target_: verifiers.integrations.verl.agent_loop.VerifiersAgentLoop" in loops
    assert re.search(r"agent_loop_config_path=.*agent_loops\.yaml", script)
    assert "calculate_log_probs=True" in script
    assert "default_agent_loop=verifiers" in script


# The trainer of verl 0.9 imports TransferQueue, which is part of none of its packages but `verl[verl-core]`.
VERL = ("torch==2.13.0", "verl==0.9.1", "TransferQueue>=0.1.10", "cachetools", "fastapi", "uvicorn")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_verls_agent_loop_worker_under_ray_plays_turns_and_tools_token_for_token(tmp_path: Path) -> None:
    said = run_contract(python_with("verl", *VERL), "verl_contract.py", str(tmp_path))
    assert [line for line in said.splitlines() if line.endswith(": holds")] == [
        "play_turns: holds",
        "play_tools: holds",
    ]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_verl_takes_the_settings_of_our_launch_script_and_reads_our_rows(tmp_path: Path) -> None:
    assert "launch: holds" in run_contract(python_with("verl", *VERL), "verl_launch_contract.py", str(tmp_path))
