"""Environments, honest evaluation and reinforcement learning for language models: ``import verifiers as vf``."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.2.0"

_NAMES = {
    "checks": "check_environment",
    "clients": "AnthropicClient CachedClient Cassette Chaos FakeClient FakeServer HTTPClient ResponsesClient as_client "
    "load_endpoints",
    "clients.protocol": "Client Completion Request Tokens",
    "envs": "EnvGroup Environment MultiTurnEnv SingleTurnEnv load_environment",
    "envs.agent_env": "AgentEnv",
    "envs.code_math_env": "CodeMathEnv",
    "envs.double_check_env": "DoubleCheckEnv",
    "envs.example_data": "load_example_dataset",
    "envs.gym_env": "GymEnv",
    "envs.keys": "MissingKeyError ensure_keys",
    "envs.mcp_env": "MCPEnv",
    "envs.python_env": "PythonEnv",
    "envs.reasoning_gym_env": "ReasoningGymEnv",
    "envs.remote.env": "RemoteEnv",
    "envs.sandbox_env": "SandboxEnv",
    "envs.smol_tool_env": "SmolToolEnv",
    "envs.stateful_tool_env": "StatefulToolEnv",
    "envs.textarena_env": "TextArenaEnv",
    "envs.tool_env": "ToolEnv",
    "errors": "AccessRefusedError BadReplyError ConnectionFailedError DeadlineError EmptyModelResponseError "
    "EndpointDownError Error GraderError HookError InfraError InvalidModelResponseError JudgeError ModelError "
    "OverlongPromptError RateLimitError RequestRefusedError RunDeadlineError SandboxError "
    "ServerError ToolCallError ToolError ToolParseError WorkerError",
    "integrations.openenv.env": "OpenEnv",
    "message_types": "AssistantMessage ImageUrlContentPart ImageUrlSource InputAudioContentPart InputAudioSource "
    "Response ResponseMessage ResponseTokens SystemMessage TextContentPart TextMessage Tool ToolCall ToolMessage "
    "UserMessage",
    "logs": "log_level print_prompt_completions_sample quiet_verifiers setup_logging",
    "parsers": "JSONParser MaybeThinkParser Parser ThinkParser XMLParser extract_boxed_answer extract_hash_answer",
    "results": "Results",
    "rollout": "cleanup stop teardown",
    "rubrics": "JudgeRubric MathRubric Rubric RubricGroup ToolRubric cpu_bound group_reward",
    "runner": "RunInterruptedError",
    "sandbox": "Sandbox",
    "store": "RunDir export_parquet to_dpo to_hf_dataset to_sft",
    "types": "BaseRolloutInput ChatMessage ChatMessages ClientConfig DatasetBuilder Endpoint Endpoints EvalConfig "
    "GenerateInputs GenerateMetadata GenerateOutputs GroupRewardFunc IndividualRewardFunc Info JsonPrimitive Message "
    "MessageType Messages ModelResponse ProcessedOutputs RewardFunc RolloutInput RolloutOutput RolloutScore "
    "RolloutScores RolloutTiming Row SamplingArgs State TrajectoryStep TrajectoryStepTokens Usage",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}
# Names that need an extra or OpenAI's package, and stand-ins for classes of classic. They are not in __all__, so that a
# star import works without those packages.
_EXTRA_NAMES = {
    "envs.agent_stand_ins": "CliAgentEnv HarborEnv",
    "engine": "LocalModel LocalServer get_model get_model_and_tokenizer get_tokenizer",
    "trainers": "GRPOConfig GRPOTrainer Samplers SFTConfig SFTTrainer grpo_defaults lora_defaults tiny_model",
    "rl.trainer": "RLConfig RLTrainer",
    "types": "AsyncOpenAI ChatCompletion ChatCompletionMessageParam ChatCompletionMessageToolCall ChatCompletionRole "
    "ChatCompletionToolParam FunctionDefinition FunctionParameters",
}
_EXTRA_HOME = {name: module for module, names in _EXTRA_NAMES.items() for name in names.split()}
# Names of the classic package's later releases (0.1.11 and newer) that do not exist here.
_LATER = (
    "BrowserEnv Env EnvConfig Harness HarnessConfig MCPTool OpenEnvEnv RLMEnv Task Taskset TasksetConfig Toolset "
    "ToolsetConfig User UserConfig advantage metric reward setup update"
)
_MODULES = (
    "calls",
    "clients",
    "decorators",
    "engine",
    "envs",
    "errors",
    "messages",
    "parsers",
    "results",
    "rubrics",
    "runner",
    "samples",
    "sandbox",
    "stats",
    "store",
    "tools",
    "trainers",
    "types",
    "utils",
)

__all__ = sorted([*_HOME, "stats", "__version__"])


def __getattr__(name: str) -> Any:
    home = _HOME.get(name) or _EXTRA_HOME.get(name)
    if home is not None:
        value = getattr(importlib.import_module(f"verifiers.{home}"), name)
    elif name in _MODULES:
        value = importlib.import_module(f"verifiers.{name}")
    else:
        hint = ", which is of the classic package's releases 0.1.11 and newer and does not exist here"
        raise AttributeError(f"module 'verifiers' has no attribute {name!r}{hint if name in _LATER.split() else ''}")
    globals()[name] = value
    return value


def load_ipython_extension(shell: Any) -> None:
    """``%load_ext verifiers`` in a notebook: then ``%vf view --inline`` shows runs in a cell."""
    importlib.import_module("verifiers.cli.view").load_magic(shell)


def __dir__() -> list[str]:
    return __all__
