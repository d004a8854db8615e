"""The facade: which names it has, that they are there, and that importing it costs next to nothing."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import verifiers as vf

ROOT = Path(__file__).resolve().parent.parent

# What is public is promised: a name is added or removed here on purpose.
PUBLIC = [
    "AccessRefusedError",
    "AgentEnv",
    "AnthropicClient",
    "AssistantMessage",
    "BadReplyError",
    "BaseRolloutInput",
    "CachedClient",
    "Cassette",
    "Chaos",
    "ChatMessage",
    "ChatMessages",
    "Client",
    "ClientConfig",
    "CodeMathEnv",
    "Completion",
    "ConnectionFailedError",
    "DatasetBuilder",
    "DeadlineError",
    "DoubleCheckEnv",
    "EmptyModelResponseError",
    "Endpoint",
    "EndpointDownError",
    "Endpoints",
    "EnvGroup",
    "Environment",
    "Error",
    "EvalConfig",
    "FakeClient",
    "FakeServer",
    "GenerateInputs",
    "GenerateMetadata",
    "GenerateOutputs",
    "GraderError",
    "GroupRewardFunc",
    "GymEnv",
    "HTTPClient",
    "HookError",
    "ImageUrlContentPart",
    "ImageUrlSource",
    "IndividualRewardFunc",
    "Info",
    "InfraError",
    "InputAudioContentPart",
    "InputAudioSource",
    "InvalidModelResponseError",
    "JSONParser",
    "JsonPrimitive",
    "JudgeError",
    "JudgeRubric",
    "MCPEnv",
    "MathRubric",
    "MaybeThinkParser",
    "Message",
    "MessageType",
    "Messages",
    "MissingKeyError",
    "ModelError",
    "ModelResponse",
    "MultiTurnEnv",
    "OpenEnv",
    "OverlongPromptError",
    "Parser",
    "ProcessedOutputs",
    "PythonEnv",
    "RateLimitError",
    "ReasoningGymEnv",
    "RemoteEnv",
    "Request",
    "RequestRefusedError",
    "Response",
    "ResponseMessage",
    "ResponseTokens",
    "ResponsesClient",
    "Results",
    "RewardFunc",
    "RolloutInput",
    "RolloutOutput",
    "RolloutScore",
    "RolloutScores",
    "RolloutTiming",
    "Row",
    "Rubric",
    "RubricGroup",
    "RunDeadlineError",
    "RunDir",
    "RunInterruptedError",
    "SamplingArgs",
    "Sandbox",
    "SandboxEnv",
    "SandboxError",
    "ServerError",
    "SingleTurnEnv",
    "SmolToolEnv",
    "State",
    "StatefulToolEnv",
    "SystemMessage",
    "TextArenaEnv",
    "TextContentPart",
    "TextMessage",
    "ThinkParser",
    "Tokens",
    "Tool",
    "ToolCall",
    "ToolCallError",
    "ToolEnv",
    "ToolError",
    "ToolMessage",
    "ToolParseError",
    "ToolRubric",
    "TrajectoryStep",
    "TrajectoryStepTokens",
    "Usage",
    "UserMessage",
    "WorkerError",
    "XMLParser",
    "__version__",
    "as_client",
    "check_environment",
    "cleanup",
    "cpu_bound",
    "ensure_keys",
    "export_parquet",
    "extract_boxed_answer",
    "extract_hash_answer",
    "group_reward",
    "load_endpoints",
    "load_environment",
    "load_example_dataset",
    "log_level",
    "print_prompt_completions_sample",
    "quiet_verifiers",
    "setup_logging",
    "stats",
    "stop",
    "teardown",
    "to_dpo",
    "to_hf_dataset",
    "to_sft",
]

HEAVY = ["torch", "transformers", "datasets", "openai", "numpy", "pyarrow", "rich", "aiohttp.web", "aiohttp", "msgspec"]


def imported_by(code: str) -> set[str]:
    """The modules in a fresh interpreter after it ran this code."""
    script = f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stderr == ""
    first, _, _ = done.stdout.partition("\n")
    return set(json.loads(first))  # anything else on stdout would not be JSON


def test_the_public_names_are_these_and_no_others() -> None:
    assert vf.__all__ == PUBLIC
    assert sorted(PUBLIC) == PUBLIC
    assert dir(vf) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(vf, name) is getattr(vf, name)


def test_importing_the_package_is_silent_and_imports_nothing_heavy() -> None:
    assert imported_by("import verifiers").isdisjoint(HEAVY)


def test_using_environments_imports_no_optional_package() -> None:
    code = "import verifiers as vf\nvf.SingleTurnEnv(dataset=[{'question': 'q'}], rubric=vf.Rubric([lambda answer: 1]))"
    heavy = {"torch", "transformers", "datasets", "openai", "numpy", "pyarrow", "rich", "aiohttp.web"}
    assert imported_by(code).isdisjoint(heavy)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("envs", "SingleTurnEnv"),
        ("envs", "MultiTurnEnv"),
        ("envs", "ToolEnv"),
        ("envs", "StatefulToolEnv"),
        ("envs", "SandboxEnv"),
        ("envs", "PythonEnv"),
        ("envs", "CodeMathEnv"),
        ("envs", "SmolToolEnv"),
        ("envs", "MCPEnv"),
        ("parsers", "XMLParser"),
        ("rubrics", "Rubric"),
        ("rubrics", "JudgeRubric"),
        ("clients", "FakeClient"),
        ("store", "RunDir"),
    ],
)
def test_the_folders_give_the_same_objects(module: str, name: str) -> None:
    assert getattr(importlib.import_module(f"verifiers.{module}"), name) is getattr(vf, name)


def test_an_unknown_name_is_an_attribute_error_that_says_so() -> None:
    with pytest.raises(AttributeError, match="module 'verifiers' has no attribute 'SingelTurnEnv'"):
        vf.SingelTurnEnv  # noqa: B018
    with pytest.raises(ImportError, match="NoSuchName"):
        from verifiers import NoSuchName  # noqa: F401


def test_modules_are_reached_by_attribute_without_importing_them_first() -> None:
    code = "import verifiers as vf\nvf.stats.mean_interval\nvf.utils.async_utils.maybe_await\nvf.types.State"
    assert "verifiers.stats" in imported_by(code)
