"""The import paths of classic 0.1.x, and the helpers behind them."""

from __future__ import annotations

import asyncio
import importlib
import json
import textwrap
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

import verifiers as vf
from tests.support.classic import chat_completion, quiet, with_tokens


def echo(**kwargs: Any) -> vf.Environment:
    def same(completion: vf.Messages, answer: str) -> float:
        return float(completion[-1]["content"] == answer)

    rows = [{"question": f"{i}?", "answer": str(i)} for i in range(2)]
    return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[same]), **kwargs)


PACKAGE = """
import verifiers as vf
from datasets import Dataset


def load_environment(n: int = 2, **kwargs) -> vf.Environment:
    dataset = Dataset.from_list([{"question": f"{i}?", "answer": str(i)} for i in range(n)])

    def same(completion, answer, **kwargs) -> float:
        return 1.0 if completion[-1]["content"] == answer else 0.0

    return vf.SingleTurnEnv(dataset=dataset, rubric=vf.Rubric(funcs=[same]), **kwargs)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "environments" / "echo_env"
    folder.mkdir(parents=True)
    (folder / "echo_env.py").write_text(PACKAGE)
    monkeypatch.chdir(tmp_path)
    return folder


def test_run_evaluation_loads_evaluates_prints_and_saves(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from verifiers.types import ClientConfig, EvalConfig
    from verifiers.utils.eval_utils import run_evaluation

    with vf.FakeServer("1") as server:
        config = EvalConfig(
            env_id="echo-env",
            env_args={"n": 3},
            env_dir_path="./environments",
            model="m",
            client_config=ClientConfig(api_key_var="NO_KEY", api_base_url=server.url),
            sampling_args={"temperature": 0.0},
            num_examples=2,
            rollouts_per_example=2,
            max_concurrent=4,
            print_results=True,
            save_results=True,
        )
        results = asyncio.run(run_evaluation(config))
    assert results["reward"] == [0.0, 0.0, 1.0, 1.0]
    path = results["metadata"]["path_to_save"]
    assert path.parent == Path("environments/echo_env/outputs/evals/echo-env--m")
    assert len((path / "results.jsonl").read_text().splitlines()) == 4
    assert "4 rollouts of 2 examples, 0 failed" in capsys.readouterr().out


PATHS = {
    "types": "State Messages SamplingArgs RolloutInput TrajectoryStep TrajectoryStepTokens GenerateOutputs "
    "GenerateMetadata ClientConfig EvalConfig Endpoints RewardFunc ModelResponse ChatCompletion "
    "DatasetBuilder GenerateInputs "
    "ChatCompletionToolParam Completion AsyncOpenAI Info MessageType ProcessedOutputs RolloutScore RolloutScores "
    "RolloutTiming BaseRolloutInput IndividualRewardFunc GroupRewardFunc JsonPrimitive ChatMessage ChatMessages",
    "errors": "Error ModelError EmptyModelResponseError OverlongPromptError ToolError ToolParseError ToolCallError "
    "InfraError SandboxError InvalidModelResponseError",
    "decorators": "stop cleanup teardown",
    "envs": "Environment SingleTurnEnv MultiTurnEnv EnvGroup",
    "envs.environment": "Environment get_results_path",
    "envs.singleturn_env": "SingleTurnEnv",
    "envs.multiturn_env": "MultiTurnEnv",
    "envs.env_group": "EnvGroup EnvGroupRubric",
    "envs.experimental.cli_agent_env": "CliAgentEnv",
    "envs.experimental.gym_env": "EpisodicSumRubric GymEnv",
    "envs.experimental.harbor_env": "HarborEnv",
    "parsers": "Parser XMLParser ThinkParser MaybeThinkParser",
    "parsers.parser": "Parser",
    "parsers.xml_parser": "XMLParser",
    "parsers.think_parser": "ThinkParser",
    "parsers.maybe_think_parser": "MaybeThinkParser",
    "rubrics": "Rubric RubricGroup JudgeRubric MathRubric",
    "rubrics.rubric": "Rubric",
    "rubrics.rubric_group": "RubricGroup",
    "rubrics.judge_rubric": "JudgeRubric",
    "rubrics.math_rubric": "MathRubric",
    "utils.async_utils": "maybe_await maybe_semaphore NullAsyncContext",
    "utils.data_utils": "extract_boxed_answer extract_hash_answer strip_non_numeric load_example_dataset "
    "BOXED_SYSTEM_PROMPT THINK_BOXED_SYSTEM_PROMPT",
    "utils.env_utils": "load_environment",
    "utils.error_utils": "ErrorChain get_vf_error_chain",
    "utils.eval_utils": "load_endpoints make_dataset print_results quiet_datasets run_evaluation save_rollout_results",
    "utils.logging_utils": "setup_logging log_level quiet_verifiers print_prompt_completions_sample",
    "utils.message_utils": "concat_messages from_raw_content_part from_raw_message maybe_normalize_messages "
    "messages_to_printable normalize_messages sanitize_tool_calls strip_nones_from_content",
    "utils.path_utils": "get_results_path get_eval_results_path",
    "utils.save_utils": "load_outputs make_serializable save_outputs state_to_output states_to_outputs",
    "utils.client_utils": "setup_client setup_openai_client",
    "utils.response_utils": "parse_response_message parse_response_tokens parse_response_messages parse_is_truncated",
    "utils.processing_utils": "parse_chat_completion_tokens parse_chat_completion_logprobs",
    # of 0.1.5, 0.1.8 and 0.1.10
    "envs.reasoninggym_env": "ReasoningGymEnv",
    "inference.vllm_server": "main",
    "rl.inference.server": "main",
    "rl.trainer": "RLConfig RLTrainer GRPOConfig GRPOTrainer grpo_defaults lora_defaults get_model_and_tokenizer",
    "rl.trainer.config": "RLConfig",
    "rl.trainer.trainer": "RLTrainer",
    "scripts.init": "init_environment main",
    "scripts.train": "main",
    "scripts.tui": "main",
    "scripts.vllm": "main",
    "trainers.grpo_config": "GRPOConfig",
    "utils": "config_utils model_utils save_utils tool_utils tools",
    "utils.config_utils": "MissingKeyError ensure_keys",
    "utils.decorators": "stop cleanup teardown",
    "utils.model_utils": "get_model get_model_and_tokenizer get_tokenizer",
}


@pytest.mark.parametrize("path", PATHS)
def test_the_import_paths_of_classic_lead_to_its_names(path: str) -> None:
    module = importlib.import_module(f"verifiers.{path}")
    assert [name for name in PATHS[path].split() if not hasattr(module, name)] == []


@pytest.mark.parametrize("path", ["types", "errors"])
def test_what_types_and_errors_hold_is_reachable_from_the_package(path: str) -> None:
    assert [name for name in PATHS[path].split() if not hasattr(vf, name)] == []


def test_response_utils_read_what_an_engine_sent() -> None:
    from verifiers.utils.response_utils import parse_is_truncated, parse_response_messages, parse_response_tokens

    async def main() -> None:
        cut = chat_completion("4", finish_reason="length")
        assert await parse_is_truncated(cut, "chat") is True
        assert await parse_response_messages(cut, "chat") == [{"role": "assistant", "content": "4"}]
        assert await parse_response_tokens(cut, "chat") is None
        tokens = await parse_response_tokens(with_tokens("4", [1, 2], [3, 4]), "chat", 3)
        assert tokens is not None
        assert (tokens["completion_ids"], tokens["is_truncated"]) == ([3], True)

    asyncio.run(main())


def test_processing_utils_read_tokens_and_make_one_batch() -> None:
    from verifiers.utils import processing_utils

    response = with_tokens("0", [1, 2], [3, 4])
    assert processing_utils.parse_chat_completion_tokens(response) == [3, 4]
    assert processing_utils.parse_chat_completion_logprobs(response) == [-0.5, -0.5]
    with pytest.raises(ValueError, match="no token ids"):
        processing_utils.parse_chat_completion_tokens(chat_completion("4"))
    results = echo().evaluate(vf.FakeClient("0", tokens=True), **quiet())
    columns = (results[name] for name in ("prompt", "completion", "state", "reward"))
    batch = processing_utils.process_env_results_vllm(*columns, None)
    assert batch["completion_mask"] == [[1] * len(ids) for ids in batch["completion_ids"]]
    assert batch["rewards"] == [1.0, 0.0]


def test_semaphores_may_be_none() -> None:
    from verifiers.utils.async_utils import NullAsyncContext, maybe_await, maybe_semaphore

    async def main() -> None:
        for limit in (None, 0, -1):
            assert isinstance(await maybe_semaphore(limit), NullAsyncContext)
        async with await maybe_semaphore(1) as inside:
            assert inside is None
        async with NullAsyncContext():
            assert await maybe_await(lambda x: x + 1, 1) == 2
        assert await maybe_await(AsyncMock(return_value=3)) == 3

    asyncio.run(main())


def test_error_chains_are_counted_by_their_kinds() -> None:
    from verifiers.utils.error_utils import ErrorChain, get_vf_error_chain

    def failure(message: str) -> Exception:
        try:
            try:
                raise KeyError(message)
            except KeyError as cause:
                raise vf.SandboxError("down") from cause
        except vf.SandboxError as error:
            return error

    one, two = ErrorChain(failure("a")), ErrorChain(failure("b"))
    assert one == two
    assert len({one, two}) == 1
    assert one != ErrorChain(KeyError())
    assert repr(one) == "SandboxError -> KeyError"
    assert str(one) == "SandboxError('down'), caused by KeyError('a')"
    assert vf.InfraError in one
    assert ValueError not in one
    assert [type(error) for error in get_vf_error_chain(one.root_error)] == [vf.SandboxError]


def test_results_can_be_made_from_columns_shown_and_turned_into_a_dataset(capsys: pytest.CaptureFixture[str]) -> None:
    from verifiers.types import GenerateMetadata, GenerateOutputs
    from verifiers.utils.eval_utils import make_dataset, print_results

    results = GenerateOutputs(
        prompt=[[{"role": "user", "content": f"q{i}"}] for i in range(2)],
        completion=[[{"role": "assistant", "content": f"a{i}"}] for i in range(2)],
        answer=["", ""],
        state=[{"custom": i, "timing": {"generation_ms": 0.0, "scoring_ms": 0.0, "total_ms": 0.0}} for i in range(2)],
        task=["default"] * 2,
        info=[{}] * 2,
        example_id=[0, 1],
        reward=[0.25, 0.75],
        metrics={"exact": [0.0, 1.0]},
        stop_conditions=[None] * 2,
        is_truncated=[False] * 2,
        metadata=GenerateMetadata(env_id="e", model="m", state_columns=["custom"]),
    )
    assert (results["reward"], results.metrics, results.info) == ([0.25, 0.75], {"exact": [0.0, 1.0]}, [{}, {}])
    dataset = make_dataset(results)
    assert (list(dataset["custom"]), list(dataset["exact"])) == ([0, 1], [0.0, 1.0])
    print_results(results)
    shown = capsys.readouterr().out
    assert "q0" in shown
    assert "2 rollouts of 2 examples, 0 failed" in shown
    with pytest.raises(TypeError, match="there is no column 'rewrad'"):
        GenerateOutputs(rewrad=[1.0])


def test_unsaved_results_can_be_saved_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from verifiers.utils.eval_utils import save_rollout_results

    monkeypatch.chdir(tmp_path)
    results = echo(env_id="echo").evaluate(vf.FakeClient("0"), **quiet(rollouts_per_example=2))
    save_rollout_results(results)
    path = results["metadata"]["path_to_save"]
    saved = [json.loads(line) for line in (path / "results.jsonl").read_text().splitlines()]
    assert [(row["example_id"], row["rollout"]) for row in saved] == [(i, r) for i in range(2) for r in range(2)]
    save_rollout_results(results)
    assert len((path / "results.jsonl").read_text().splitlines()) == 4


@pytest.mark.parametrize("by_position", [True, False])
def test_a_sample_prints_in_the_argument_order_of_0_1_9_too(
    by_position: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, completions = [[{"role": "user", "content": "2+2?"}]], [[{"role": "assistant", "content": "four"}]]
    if by_position:
        vf.print_prompt_completions_sample(prompts, completions, [None], [0.5], 3)
    else:
        vf.print_prompt_completions_sample(prompts, completions, errors=[None], rewards=[0.5], step=3)
    shown = capsys.readouterr().out
    assert "2+2?" in shown
    assert "four" in shown
    assert "0.500" in shown
    assert "3" in shown


def test_an_environment_module_may_import_all_of_classic_at_once(tmp_path: Path) -> None:
    """Star imports, annotations evaluated at definition time, and names only found in the old modules."""
    source = textwrap.dedent(
        """
        from verifiers import *
        from verifiers.types import *
        import verifiers as vf

        class Quiet(vf.MultiTurnEnv):
            async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs) -> vf.Messages:
                return []

        def tools(schema: vf.ChatCompletionToolParam, r: vf.ModelResponse, m: ChatMessage) -> vf.GenerateOutputs: ...
        client: vf.AsyncOpenAI | None = None
        """
    )
    names: dict[str, Any] = {}
    exec(compile(source, "classic_env.py", "exec"), names)
    assert names["SingleTurnEnv"] is vf.SingleTurnEnv
    assert names["State"] is vf.State


def test_a_schema_is_written_as_classic_wrote_it() -> None:
    from verifiers.utils.tool_utils import convert_func_to_oai_tool

    def look_up(first_name: str, times: int = 1) -> str:
        """Look somebody up."""
        return first_name * times

    assert convert_func_to_oai_tool(look_up)["function"] == {
        "name": "look_up",
        "description": "Look somebody up.",
        "parameters": {
            "type": "object",
            "properties": {
                "first_name": {"type": "string", "title": "First Name"},
                "times": {"type": "integer", "default": 1, "title": "Times"},
            },
            "required": ["first_name", "times"],
            "title": "look_up_args",
            "additionalProperties": False,
        },
    }


def test_a_package_is_made_by_the_function_of_0_1_9(tmp_path: Path) -> None:
    from verifiers.scripts.init import init_environment

    home = init_environment("my-env", str(tmp_path), rewrite_readme=False)
    assert home == tmp_path / "my_env"
    assert isinstance(vf.load_environment("my-env", environments_dir=str(tmp_path)), vf.Environment)
    (home / "README.md").write_text("")
    assert init_environment("my-env", str(tmp_path), rewrite_readme=True) == home
    assert (home / "README.md").read_text()
