"""Commands over saved runs: compare, power, export, rescore, replay, and how a run is named."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

import verifiers as vf
from verifiers.store import RunDir

TOY = """
import verifiers as vf

def exact(completion, answer): return completion[-1]["content"] == answer

def load_environment(n=6):
    rows = [{"question": f"say {i % 2}\\x1b[2J", "answer": str(i % 2)} for i in range(n)]
    return vf.SingleTurnEnv(eval_dataset=rows, rubric=vf.Rubric([exact]))
"""


@pytest.fixture
def runs(folder: Path) -> tuple[Path, Path]:
    """Two runs of a toy: one is right on the even examples, the other on all but the last."""
    home = folder / "mine" / "toy_runs"
    home.mkdir(parents=True)
    (home / "toy_runs.py").write_text(TOY)
    env = vf.load_environment("toy-runs", environments_dir=folder / "mine")
    replies = {"a": ["0"] * 6, "b": ["0", "1", "0", "1", "0", "0"]}
    paths = []
    for model, said in replies.items():
        path = Path("outputs/evals") / f"toy-runs--{model}" / f"{model * 8}"
        client = vf.FakeClient(said)
        env.evaluate(client=client, model=model, results_path=path, use_tqdm=False, max_concurrent=1)
        paths.append(path)
    return paths[0], paths[1]


@pytest.fixture
def repeated(folder: Path) -> Path:
    path = Path("outputs/evals/sums--m/cccccccc")
    run = RunDir.create_at(path, env_id="sums", model="m", config={})
    with run.appender() as out:
        for i in range(10):
            for k in range(4):
                reward = float((i + k) % 3 == 0)
                out.append(
                    {
                        "example_id": i,
                        "rollout": k,
                        "prompt": f"{i}",
                        "completion": f"{k}",
                        "reward": reward,
                        "error": None,
                        "metrics": {},
                    }
                )
    return path


# --- which run ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["outputs/evals/toy-runs--b/bbbbbbbb", "bbbb", "last", "outputs/evals/toy-runs--b"])
def test_a_run_is_named_by_its_folder_the_start_of_its_id_or_as_the_last(run, runs, name):
    assert run("export", name, "-o", "-").stdout.count("\n") == 6


def test_the_results_file_names_its_run(run, runs):
    assert run("export", f"{runs[0]}/results.jsonl", "-o", "-").stdout.count("\n") == 6


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bbbc", "there is no run 'bbbc'; the newest is outputs/evals/toy-runs--b/bbbbbbbb, and vf runs"),
        ("bbbbbbbc", "there is no run 'bbbbbbbc'; did you mean outputs/evals/toy-runs--b/bbbbbbbb?"),
        ("mine", "mine contains no run: a run has a results.jsonl or a metadata.json"),
    ],
)
def test_a_run_that_is_not_there_names_a_near_or_the_newest_one(run, runs, name, message):
    assert message in run("export", name, code=2).stderr


def test_without_any_run_one_sentence_says_how_to_make_one(run):
    assert "vf eval ENV saves one" in run("replay", "last", code=2).stderr


def test_a_damaged_run_is_used_as_far_as_it_can_be_read(run, runs):
    a, b = runs
    lines = (a / "results.jsonl").read_text().splitlines(keepends=True)
    (a / "results.jsonl").write_text("".join([lines[0], "{torn\n", *lines[1:]]))
    (b / "metadata.json").write_text("{")
    result = run("compare", str(a), str(b))
    assert "1 damaged line(s)" in result.stderr
    assert result.stderr.count("metadata.json is damaged") == 1
    assert "shared examples: 6" in result.stdout


# --- compare ------------------------------------------------------------------------------------------------------


def test_two_runs_are_compared_example_by_example(run, runs):
    shown = run("compare", *map(str, runs)).stdout
    assert "model: a → b" in shown
    assert "B - A = +0.333" in shown
    assert "p = 0.375 (sign-flip test)" in shown
    assert re.search(r"exact +0\.500 +0\.833 +\+0\.333 .* no difference shown", shown)
    assert re.search(r"num_turns .* – +–\n", shown), "a count gets no verdict"
    assert "B won 2 examples" in shown
    assert re.search(r"example 1 +0\.000 → 1\.000 +say 1", shown)
    assert "B lost no example" in shown
    assert "\x1b" not in shown


def test_the_table_of_a_comparison_fits_a_terminal_of_80_columns(in_terminal, runs):
    lines = in_terminal(80, "compare", *map(str, runs))
    at = lines.index("exact")
    assert re.search(r"^ +0\.500 +0\.833 +\+0\.333 .* no difference shown$", lines[at + 1])
    assert max(map(len, lines[at - 3 :])) <= 80


def test_a_comparison_is_one_json_object_for_a_script(run, runs):
    found = json.loads(run("compare", *map(str, runs), "--json", "--metric", "exact").stdout)
    assert list(found["metrics"]) == ["exact", "reward", "num_turns"]
    assert found["metrics"]["exact"]["won"] == [1, 3]


def test_runs_that_share_nothing_end_with_1(run, runs):
    (runs[1] / "results.jsonl").write_text("")
    shown = run("compare", *map(str, runs), code=1).stdout
    assert "no example has a score in both runs" in shown
    assert "no verdict: the two runs share no example" in shown


def test_runs_of_two_environments_get_no_verdict(run, runs, repeated):
    refused = run("compare", str(runs[0]), str(repeated), code=1).stdout
    assert "no verdict: A is a run of toy-runs and B of sums" in refused
    assert "p = " not in refused
    assert "--unpaired" not in refused


def test_runs_over_different_questions_get_no_verdict_unless_they_are_compared_as_two_samples(run, runs, repeated):
    RunDir.open(repeated).update_metadata({"env_id": "toy-runs"})
    refused = run("compare", str(runs[0]), str(repeated), code=1).stdout
    assert "no verdict: 6 of the examples with the same id ask something else in B (first: 0)" in refused
    assert "No verdict: B - A = " in refused
    assert "p = " not in refused
    data = json.loads(run("compare", str(runs[0]), str(repeated), "--json", code=1).stdout)
    assert "ask something else" in data["refusal"]
    assert {one["verdict"] for one in data["metrics"].values()} == {None}
    shown = run("compare", str(runs[0]), str(repeated), "--unpaired").stdout
    assert "No difference shown: B - A = -0.1" in shown
    assert "(Welch's t test)" in shown


def saved(folder: Path, name: str, rewards, system: str = "", fails=()) -> str:
    out = RunDir.create_at(folder / name, env_id="toy", model=name, config={})
    with out.appender() as appender:
        for i, reward in enumerate(rewards):
            prompt = [{"role": "system", "content": system}] * bool(system) + [{"role": "user", "content": f"q{i}"}]
            error = {"type": "JudgeError", "blame": "grader", "message": "down"} if i in fails else None
            record = {"example_id": i, "rollout": 0, "prompt": prompt, "completion": "", "error": error}
            metrics = {"exact": reward, "brief": 1.0 - reward}
            appender.append({**record, "reward": None if error else reward, "metrics": {} if error else metrics})
    return str(folder / name)


def test_another_system_prompt_asks_the_same_questions(run, folder):
    a = saved(folder, "a", [0.0] * 12, system="Think first.")
    b = saved(folder, "b", [1.0] * 12, system="Be quick.")
    assert "B is better: B - A = +1.000" in run("compare", a, b).stdout


def test_failed_rollouts_are_mentioned_and_a_margin_asks_whether_b_is_worse(run, folder):
    a = saved(folder, "a", [1.0] * 300, fails=(3, 4))
    b = saved(folder, "b", [1.0] * 299 + [0.0])
    shown = run("compare", a, b, "--margin", "0.04").stdout
    assert "B is not worse by 0.04 or more: B - A = -0.003" in shown
    assert "failed rollouts, left out: 2 in A, 0 in B" in shown
    assert "Not shown that B is not worse by 0.001 or more" in run("compare", a, b, "--margin", "0.001").stdout


def test_several_metrics_are_corrected_and_one_that_is_named_is_tested_alone(run, folder):
    a, b = saved(folder, "a", [0.0] * 5 + [1.0] * 10), saved(folder, "b", [1.0] * 15)
    shown = run("compare", a, b).stdout  # reward and exact are the same; brief is another
    assert "p = 0.0469 (sign-flip test); corrected for 2 metrics (Holm): 0.0938" in shown
    assert "No difference shown: B - A = +0.333 (97.5% interval" in shown
    alone = run("compare", a, b, "--metric", "reward").stdout
    assert "B is better: B - A = +0.333 (95% interval" in alone


def test_a_reward_function_called_reward_does_not_stand_for_the_reward(run, folder):
    for letter, right in (("a", 0.0), ("b", 1.0)):
        made = RunDir.create_at(folder / letter, env_id="e", model="m", config={})
        with made.appender() as out:
            for i in range(8):
                record = {"example_id": i, "rollout": 0, "prompt": f"q{i}", "error": None, "reward": right * i}
                out.append({**record, "metrics": {"reward": 0.5}})
    shown = run("compare", "a", "b").stdout
    assert "A 0.000, B 3.500" in shown
    assert re.search(r"reward\(\) +0\.500 +0\.500", shown)
    assert "examples" in run("power", "0.5", "--run", "b").stdout


def test_an_unknown_metric_names_those_there_are(run, runs):
    assert "these runs have reward, exact, num_turns" in run("compare", *map(str, runs), "--metric", "x", code=2).stderr


# --- power --------------------------------------------------------------------------------------------------------


def test_power_from_a_mean_a_spread_and_a_run(run, repeated):
    assert run("power", "0.03", "--sd", "0.5").stdout.startswith("1,070 examples to know a mean to ±0.03")
    shown = run("power", "0.03", "--mean", "0.5", "--correlation", "0.6", "--power", "0.8").stdout
    assert re.match(r"1,7\d\d examples to detect a difference of 0.03 with a chance of 0.8", shown)
    table = run("power", "0.05", "--run", str(repeated)).stdout.splitlines()
    assert table[0] == "to know a mean to ±0.05:"
    assert [line.split()[0] for line in table[2:]] == ["1", "2", "4", "8", "16"]
    assert json.loads(run("power", "0.03", "--sd", "0.5", "--json").stdout)["examples"] == {"1": 1070}


def test_power_for_a_difference_is_measured_on_two_runs(run, runs):
    shown = run("power", "0.1", "--run", str(runs[0]), "--against", str(runs[1]), "--power", "0.8").stdout
    assert "to detect a difference of 0.1" in shown
    assert "with one rollout of each" in shown


def test_runs_of_several_rollouts_say_how_many_rollouts_their_advice_is_for(run, repeated):
    other = Path(shutil.copytree(repeated, "outputs/evals/sums--m/dddddddd"))
    lines = (other / "results.jsonl").read_text().splitlines(keepends=True)
    changed = [line.replace('"reward":0.0', '"reward":1.0') if i % 5 == 0 else line for i, line in enumerate(lines)]
    (other / "results.jsonl").write_text("".join(changed))
    table = run("power", "0.1", "--run", str(repeated), "--against", str(other), "--power", "0.8").stdout.splitlines()
    assert table[0] == "to detect a difference of 0.1 with a chance of 0.8:"
    needed = [int(line.split()[1].replace(",", "")) for line in table[2:]]
    assert [line.split()[0] for line in table[2:]] == ["1", "2", "4", "8", "16"]
    assert needed == sorted(needed, reverse=True)


def test_power_near_1_asks_for_enough_examples(run):
    n = int(run("power", "0.1", "--mean", "0.98").stdout.split()[0])
    assert 15 < n < 30


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "specify how much scores vary, with one of"),
        (["--sd", "1", "--mean", "0.5"], "specify how much scores vary, with one of"),
        (["--mean", "1"], "equal scores do not vary"),
        (["--sd", "1", "--against", "last"], "--against needs --run"),
    ],
)
def test_power_that_cannot_be_told_says_what_is_missing(run, repeated, args, message):
    assert message in run("power", "0.1", *args, code=2).stderr


# --- export -------------------------------------------------------------------------------------------------------


def test_a_run_is_exported_in_every_form(run, repeated):
    assert "40 rollouts in cccccccc.jsonl" in run("export", "cccc").stdout
    assert "10 conversations in cccccccc-sft.jsonl" in run("export", "cccc", "-f", "sft", "--top-k", "1").stdout
    assert "10 pairs in pairs.jsonl" in run("export", "cccc", "-f", "dpo", "-o", "pairs.jsonl").stdout
    chosen = [json.loads(line) for line in Path("pairs.jsonl").read_text().splitlines()]
    assert all(pair["chosen_reward"] > pair["rejected_reward"] for pair in chosen)


def test_training_data_has_the_tools_of_the_run_and_an_old_run_says_that_it_has_none(run, folder):
    tools = [{"type": "function", "function": {"name": "add"}}]
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    record = {
        "example_id": 0,
        "prompt": [{"role": "user", "content": "?"}],
        "completion": [{"role": "assistant", "content": None, "tool_calls": [call]}],
        "reward": 1.0,
        "error": None,
    }
    for name, more in (("dddddddd", {"oai_tools": tools}), ("eeeeeeee", {})):
        saved = RunDir.create_at(Path("outputs/evals/sums--m") / name, env_id="sums", model="m", config={})
        with saved.appender() as out:
            out.append({**record, "rollout": 0, **more})
    done = run("export", "dddd", "-f", "sft")
    assert done.stderr == ""
    row = json.loads(Path("dddddddd-sft.jsonl").read_text())
    assert row["tools"] == tools
    assert row["messages"][-1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    old = run("export", "eeee", "-f", "sft")
    assert "warning: 1 rollouts call tools but do not say which tools were available" in old.stderr


def test_parquet_is_known_by_its_name(run, repeated):
    parquet = pytest.importorskip("pyarrow.parquet")
    run("export", "cccc", "-o", "run.parquet")
    assert parquet.read_table("run.parquet").num_rows == 40
    assert "parquet cannot be written to stdout" in run("export", "cccc", "-f", "parquet", "-o", "-", code=2).stderr


def test_an_export_into_a_file_whose_name_promises_another_format_is_refused(run, repeated):
    result = run("export", str(repeated), "-o", "rollouts.csv", code=2)
    assert "-o rollouts.csv: this format cannot be written; end the name in .jsonl or .parquet" in result.stderr
    assert not Path("rollouts.csv").exists()


def test_a_reader_that_has_seen_enough_of_an_export_is_no_error(start, repeated):
    rows = [{"example_id": i, "rollout": 0, "prompt": "x" * 1000, "completion": "y", "reward": 1.0} for i in range(999)]
    with RunDir.open(repeated).appender() as out:
        for row in rows:
            out.append({**row, "error": None, "metrics": {}})
    with start("export", "cccc", "-o", "-") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""


# --- rescore, replay ----------------------------------------------------------------------------------------------


def test_a_run_is_scored_with_another_rubric_into_a_run_of_its_own(run, runs):
    Path("strict.py").write_text(
        "import verifiers as vf\ndef half(completion): return 0.5\ndef make(): return vf.Rubric([half])\nname = 'x'\n"
    )
    shown = run("rescore", str(runs[0]), "-p", "mine", "--rubric", "strict.py:make").stdout
    assert "half       0.500" in shown
    assert "the reward was 0.500; nothing was sampled again" in shown
    assert re.search(r"compare with: vf compare \S+ \S+", shown)
    result = run("rescore", "aaaa", "-p", "mine", "--rubric", "strict.py:half", "-o", "new", "--json")
    found = json.loads(result.stdout)
    assert found["reward"]["mean"] == found["reward_before"] == 0.5
    assert RunDir.open("new").metadata["config"]["rescored_from"] == str(runs[0])
    assert "not finished" not in run("compare", "aaaa", "new").stdout
    assert "exists" in run("rescore", "aaaa", "-p", "mine", "-o", "new", code=2).stderr
    assert (
        "'name' must be or return a Rubric"
        in run("rescore", "aaaa", "-p", "mine", "--rubric", "strict.py:name", code=2).stderr
    )
    assert "it must be FILE:NAME" in run("rescore", "aaaa", "-p", "mine", "--rubric", "none.py:x", code=2).stderr


def test_rescore_says_what_a_function_looked_for_in_vain(run, runs):
    Path("lenient.py").write_text("def lenient(state): return state.get('board', 0.0)\n")
    result = run("rescore", "aaaa", "-p", "mine", "--rubric", "lenient.py:lenient")
    assert "read 'board' in the saved states, which was not saved" in result.stderr
    result = run("rescore", "aaaa", "-p", "mine", "--rubric", "lenient.py:lenient", "--json")
    assert json.loads(result.stdout)["not_saved"] == ["board"]


def test_rescore_says_that_the_data_set_has_other_answers_now_and_how_to_score_by_them(run, runs):
    assert run("rescore", "aaaa", "-p", "mine").stderr == ""
    corrected = Path("corrected/toy_runs/toy_runs.py")
    corrected.parent.mkdir(parents=True)
    corrected.write_text(TOY.replace('"answer": str(i % 2)', '"answer": "1"'))
    result = run("rescore", "aaaa", "-p", "corrected", "-o", "outputs/evals/toy-runs--a/saved")
    assert "the reward was 0.500" in result.stdout
    assert "now has another answer or info for 3 examples" in result.stderr
    assert "to use those of the data set: --dataset-answers" in result.stderr
    assert "scored: when it was run → again\n" in run("compare", "aaaa", "saved").stdout
    result = run("rescore", "aaaa", "-p", "corrected", "--dataset-answers", "-o", "outputs/evals/toy-runs--a/corrected")
    assert result.stderr == ""
    assert RunDir.open("outputs/evals/toy-runs--a/corrected").metadata["avg_reward"] == 0.0
    assert "when it was run → again, with answers of the data set\n" in run("compare", "aaaa", "corrected").stdout
    figures = json.loads(run("rescore", "aaaa", "-p", "corrected", "--json").stdout)
    assert (figures["examples_with_other_answers"], figures["examples_not_in_data_set"]) == (3, 0)


@pytest.mark.parametrize("more", [[], ["--dataset-answers"]], ids=["saved", "dataset"])
def test_rescore_says_that_examples_with_another_prompt_keep_their_saved_answers(run, runs, more):
    corrected = Path("corrected/toy_runs/toy_runs.py")
    corrected.parent.mkdir(parents=True)
    corrected.write_text(
        TOY.replace('"question": f"', '"question": f"New: ').replace('"answer": str(i % 2)', '"answer": ""')
    )
    result = run("rescore", "aaaa", "-p", "corrected", *more)
    assert "6 examples of the run were scored by the saved answers" in result.stderr
    assert "the reward was 0.500" in result.stdout


def test_a_run_that_was_scored_anew_is_as_finished_as_the_run_it_was_made_of(run, runs):
    run("rescore", "aaaa", "-p", "mine", "-o", "outputs/evals/toy-runs--a/whole")
    made = RunDir.open("outputs/evals/toy-runs--a/whole").metadata
    assert made["finished"]
    assert made["reward_weights"] == {"exact": 1.0}
    RunDir.open(runs[0]).update_metadata({"finished": False, "interrupted": "Ctrl-C"})
    run("rescore", "aaaa", "-p", "mine", "-o", "outputs/evals/toy-runs--a/half")
    listed = {one["id"]: one["status"] for one in json.loads(run("runs", "list", "--json").stdout)}
    assert (listed["whole"], listed["half"]) == ("finished", "interrupted")


def test_a_comparison_says_that_one_of_the_runs_was_scored_anew(run, runs):
    Path("strict.py").write_text("def half(completion): return 0.5\n")
    run("rescore", "aaaa", "-p", "mine", "-o", "same")
    run("rescore", "aaaa", "-p", "mine", "--rubric", "strict.py:half", "-o", "other")
    assert "   scored: when it was run → again\n" in run("compare", "aaaa", "same").stdout
    assert "   scored: when it was run → again, by strict.py:half\n" in run("compare", "aaaa", "other").stdout


def test_a_comparison_of_a_run_with_itself_says_so(run, runs):
    assert "   A and B are the same run\n" in run("compare", "aaaa", str(runs[0])).stdout


def test_a_score_that_cannot_be_given_ends_with_1(run, runs):
    Path("bad.py").write_text("def needs_more(state): return state['board']\n")
    result = run("rescore", "aaaa", "-p", "mine", "--rubric", "bad.py:needs_more", code=1)
    assert "6 × GraderError" in result.stdout


def test_a_run_is_replayed_with_no_network(run, runs):
    shown = run("replay", str(runs[1]), "-p", "mine").stdout
    assert shown == f"6 rollouts of {runs[1]} replayed: 6 as recorded\n"


def test_a_replay_that_goes_another_way_ends_with_1(run, runs):
    module = Path("mine/toy_runs/toy_runs.py")
    again = Path("changed/toy_runs/toy_runs.py")
    again.parent.mkdir(parents=True)
    again.write_text(module.read_text().replace("== answer", "!= answer"))
    shown = run("replay", "bbbb", "-p", "changed", code=1).stdout
    assert "0 as recorded, 6 different" in shown
    assert re.search(r"example 0 +rollout 0 +reward 1\.000 → 0\.000", shown)
    found = json.loads(run("replay", "bbbb", "-p", "changed", "--json", code=1).stdout)
    assert len(found["changes"]) == 6


def test_eval_records_what_judges_say_so_that_replay_needs_none_of_them(run, folder):
    with vf.FakeServer("yes") as judge:
        home = folder / "mine" / "toy_judge"
        home.mkdir(parents=True)
        (home / "toy_judge.py").write_text(
            "import verifiers as vf\n"
            "async def ok(judge, prompt, completion, answer, state):\n"
            "    return (await judge(prompt, completion, answer, state)) == 'yes'\n"
            "def load_environment():\n"
            "    rows = [{'question': 'x', 'answer': 'y'}]\n"
            f"    rubric = vf.JudgeRubric(judge_client={judge.url!r}, funcs=[ok])\n"
            "    return vf.SingleTurnEnv(dataset=rows, rubric=rubric)\n"
        )
        command = ["eval", "toy-judge", "-p", "mine", "-m", "fake", "-n", "1", "-r", "2", "--record"]
        assert "--record saves the replies of judges in the run directory" in run(*command, "--no-save", code=2).stderr
        run(*command, "-s")
    assert "2 as recorded" in run("replay", "last", "-p", "mine").stdout


def test_what_a_run_holds_cannot_move_the_cursor(run, runs):
    for path in runs:
        found = RunDir.open(path)
        found.update_metadata({"model": "m\x1b]0;owned\x07"})
    Path("bad.py").write_text("def bad(completion): raise RuntimeError('\\x1b[2J')\n")
    shown = [
        run("compare", *map(str, runs)).stdout,
        run("rescore", "aaaa", "-p", "mine", "--rubric", "bad.py:bad", code=1).stdout,
    ]
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "".join(shown))
    assert "\\x1b[2J" in shown[1]


CLASSES = """
import verifiers as vf

def right(completion, answer): return completion[-1]["content"] == answer

def load_environment():
    rows = [{"question": f"{i}?", "answer": "yes" if i % 4 else "no"} for i in range(24)]
    return vf.SingleTurnEnv(eval_dataset=rows, rubric=vf.Rubric([right]), aggregates=["balanced_accuracy"])
"""


def test_figures_of_all_rows_are_compared_with_an_interval_by_example_also_after_scoring_anew(run, folder):
    home = folder / "mine" / "classes"
    home.mkdir(parents=True)
    (home / "classes.py").write_text(CLASSES)
    (folder / "environments").unlink()
    (folder / "environments").symlink_to(folder / "mine")
    env = vf.load_environment("classes")
    gold = {row["question"]: row["answer"] for row in env.eval_dataset}
    replies = {"lazy": "yes", "good": lambda messages: gold[messages[-1]["content"]]}
    for model, reply in replies.items():
        path = Path("outputs/evals") / f"classes--{model}" / f"{model * 2}"
        env.evaluate(client=vf.FakeClient(reply), model=model, results_path=path, use_tqdm=False)
    shown = run("compare", "lazylazy", "goodgood").stdout
    assert re.search(r"balanced_accuracy +0.500 +1.000 +\+0.500 +\[\+0.500, \+0.500\]", shown)
    data = json.loads(run("compare", "lazylazy", "goodgood", "--json").stdout)["aggregates"]
    assert data["balanced_accuracy"]["difference"]["value"] == 0.5
    assert "balanced_accuracy" in run("rescore", "lazylazy", "-o", "again").stdout
    again = run("compare", "lazylazy", "again").stdout
    assert re.search(r"balanced_accuracy +0.500 +0.500 +\+?0.000 ", again), again
