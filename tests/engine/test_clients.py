"""Clients of other makers against `vf serve`, each in an environment of its own, as their documentation has them.

The model is random: what it says means nothing, and has to have the form that each client asked for. `make clients`
runs these alone; they need a package registry.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("llguidance")

from tests.engine.support.served import NAME, Served, save_model, serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

Play = Callable[..., str]
PYDANTIC = """
from typing import Literal
from pydantic import BaseModel

class City(BaseModel):
    name: str
    size: Literal["small", "large"]
    districts: list[int]
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("clients") / "model"
    save_model(folder)
    with serving(folder, "--name", NAME, "--rows", "4", "--length", "16384") as running:
        yield running


@pytest.fixture
def play(server: Served, tmp_path: Path) -> Play:
    """Install packages into a fresh environment and run a script there; what it printed."""

    def play(code: str, *packages: str) -> str:
        venv = tmp_path / "venv"
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        python = venv / "bin" / "python"
        _run([str(python), "-m", "pip", "install", "--quiet", "--no-compile", *packages], tmp_path, server)
        script = tmp_path / "client.py"
        script.write_text(f"import os\nURL, ROOT, FOLDER = (os.environ[n] for n in ('URL', 'ROOT', 'FOLDER'))\n{code}")
        said = _run([str(python), str(script)], tmp_path, server)
        shutil.rmtree(venv)
        return said

    return play


def _run(command: list[str], folder: Path, server: Served) -> str:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    places = {"URL": server.url, "ROOT": server.root, "FOLDER": str(server.folder)}
    keys = {"OPENAI_API_KEY": "none", "OPENAI_BASE_URL": server.url, "ANTHROPIC_API_KEY": "none"}
    quiet = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "OPENAI_AGENTS_DISABLE_TRACING": "1", "HOME": str(folder)}
    quiet |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    cache = {"PIP_CACHE_DIR": os.environ.get("PIP_CACHE_DIR", str(Path.home() / ".cache" / "pip"))}
    done = subprocess.run(
        command,
        cwd=folder,
        env={**kept, **places, **keys, **quiet, **cache},
        capture_output=True,
        text=True,
        timeout=1400,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done.stdout


def test_the_openai_sdk_parses_responds_and_streams(play: Play) -> None:
    code = """
from openai import OpenAI
client = OpenAI()
asked = [{"role": "user", "content": "Which city?"}]
reply = client.chat.completions.parse(model="tiny", messages=asked, response_format=City, seed=1)
assert isinstance(reply.choices[0].message.parsed, City)
with client.chat.completions.stream(model="tiny", messages=asked, response_format=City, seed=2) as stream:
    events = list(stream)
assert isinstance(stream.get_final_completion().choices[0].message.parsed, City)
reply = client.responses.create(model="tiny", input="Hello", instructions="Be brief.")
assert reply.status in ("completed", "incomplete") and isinstance(reply.output_text, str)
again = client.responses.create(model="tiny", input="And then?", previous_response_id=reply.id)
assert again.usage.input_tokens > reply.usage.input_tokens
assert isinstance(client.responses.parse(model="tiny", input="Which city?", text_format=City).output_parsed, City)
with client.responses.stream(model="tiny", input="Which city?", text_format=City) as stream:
    kinds = [event.type for event in stream]
    assert isinstance(stream.get_final_response().output_parsed, City)
assert kinds[0] == "response.created" and kinds[-1] == "response.completed", kinds
tool = {"type": "function", "name": "find", "parameters": City.model_json_schema(), "strict": False}
with client.responses.stream(model="tiny", input="Find", tools=[tool], tool_choice="required") as stream:
    list(stream)
    call = stream.get_final_response().output[0]
City.model_validate_json(call.arguments)
print("done")
"""
    assert "done" in play(PYDANTIC + code, "openai")


def test_openai_agents_calls_tools_and_gives_its_output_type(play: Play) -> None:
    code = """
from agents import Agent, ModelSettings, Runner, function_tool
called = []

@function_tool
def look(size: Literal["small", "large"]) -> str:
    "Look for cities of a size."
    called.append(size)
    return "Ulm"

settings = ModelSettings(tool_choice="required")
agent = Agent(name="a", instructions="Look.", model="tiny", tools=[look], model_settings=settings, output_type=City)
result = Runner.run_sync(agent, "Which city?", max_turns=30)
assert isinstance(result.final_output, City), result
assert called
print("done")
"""
    assert "done" in play(PYDANTIC + code, "openai-agents")


def test_smolagents_tool_calling_agent_reaches_a_final_answer(play: Play) -> None:
    code = """
from smolagents import OpenAIServerModel, ToolCallingAgent
model = OpenAIServerModel(model_id="tiny", api_base=URL, api_key="none", max_tokens=1500)
found = ToolCallingAgent(tools=[], model=model, max_steps=4).run("Say anything.", return_full_result=True)
assert found.state == "success", found
print("done")
"""
    assert "done" in play(code, "smolagents[openai]")


def test_pydantic_ai_gives_its_output_type(play: Play) -> None:
    code = """
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
model = OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=URL, api_key="none"))
assert isinstance(Agent(model, output_type=City).run_sync("Which city?").output, City)
assert isinstance(Agent(model, output_type=NativeOutput(City)).run_sync("Which city?").output, City)
print("done")
"""
    assert "done" in play(PYDANTIC + code, "pydantic-ai-slim[openai]")


def test_instructor_gives_its_response_model(play: Play) -> None:
    code = """
import instructor
from openai import OpenAI
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(OpenAI(), mode=mode)
    asked = [{"role": "user", "content": "Which?"}]
    found = client.chat.completions.create(model="tiny", response_model=City, messages=asked)
    assert isinstance(found, City)
print("done")
"""
    assert "done" in play(PYDANTIC + code, "instructor")


def test_langchain_gives_structured_output(play: Play) -> None:
    code = """
from functools import reduce
from operator import add
from langchain_openai import ChatOpenAI
model = ChatOpenAI(model="tiny", base_url=URL, api_key="none", max_tokens=1500)
for method in ("json_schema", "function_calling"):
    assert isinstance(model.with_structured_output(City, method=method).invoke("Which city?"), City)
assert isinstance(model.with_structured_output(None, method="json_mode").invoke("Which city, as JSON?"), dict)
whole = reduce(add, model.stream("Hello"))
assert whole.response_metadata["finish_reason"] in ("stop", "length"), whole
assert whole.usage_metadata is None or whole.usage_metadata["output_tokens"] > 0, whole
print("done")
"""
    assert "done" in play(PYDANTIC + code, "langchain-openai")


def test_langgraph_runs_a_graph_with_a_forced_tool(play: Play) -> None:
    code = """
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode

@tool
def look(size: Literal["small", "large"]) -> str:
    "Look for cities of a size."
    return f"a {size} city"

model = ChatOpenAI(model="tiny", base_url=URL, api_key="none").bind_tools([look], tool_choice="any")
graph = StateGraph(MessagesState)
graph.add_node("model", lambda state: {"messages": [model.invoke(state["messages"])]})
graph.add_node("tools", ToolNode([look]))
graph.add_edge(START, "model")
graph.add_edge("model", "tools")
graph.add_edge("tools", END)
last = graph.compile().invoke({"messages": [("user", "Which city?")]})["messages"][-1]
assert last.content in ("a small city", "a large city"), last
print("done")
"""
    assert "done" in play(PYDANTIC + code, "langgraph", "langchain-openai")


def test_litellm_completes_streams_and_parses(play: Play) -> None:
    code = """
import litellm
asked = dict(model="openai/tiny", api_base=URL, api_key="none", messages=[{"role": "user", "content": "Which city?"}])
City.model_validate_json(litellm.completion(**asked, response_format=City, seed=1).choices[0].message.content)
assert list(litellm.completion(**asked, stream=True, max_tokens=8))
tool = {"type": "function", "function": {"name": "find", "parameters": City.model_json_schema()}}
call = litellm.completion(**asked, tools=[tool], tool_choice="required", seed=1).choices[0].message.tool_calls[0]
City.model_validate_json(call.function.arguments)
asked |= {"model": "anthropic/tiny", "api_base": ROOT}
assert litellm.completion(**asked, max_tokens=8).choices[0].finish_reason
print("done")
"""
    assert "done" in play(PYDANTIC + code, "litellm", "mcp")  # it imports the latter with the first tool


def test_dspys_model_answers_and_keeps_to_a_format(play: Play) -> None:
    code = """
import dspy
model = dspy.LM("openai/tiny", api_base=URL, api_key="none", max_tokens=1500, temperature=1.0)
assert isinstance(model("Hello")[0], str)
City.model_validate_json(model("Which city?", response_format=City)[0])
print("done")
"""
    assert "done" in play(PYDANTIC + code, "dspy")


def test_inspect_ai_evaluates_a_task(play: Play) -> None:
    code = """
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, ResponseSchema, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate
from inspect_ai.util import json_schema
schema = ResponseSchema(name="city", json_schema=json_schema(City))
for api in ("openai", "openai-api/local"):
    os.environ["LOCAL_API_KEY"], os.environ["LOCAL_BASE_URL"] = "none", URL
    model = get_model(f"{api}/tiny", config=GenerateConfig(max_tokens=1500, response_schema=schema))
    task = Task(dataset=[Sample(input="Which?", target="{")], solver=[generate()], scorer=includes())
    (log,) = eval(task, model=model, display="none")
    assert log.status == "success", log.error
    City.model_validate_json(log.samples[0].output.completion)
print("done")
"""
    assert "done" in play(PYDANTIC + code, "inspect_ai", "openai")


def test_the_anthropic_sdk_talks_streams_and_calls_tools(play: Play) -> None:
    code = """
from anthropic import Anthropic, NotFoundError
client = Anthropic(base_url=ROOT)
asked = dict(model="tiny", max_tokens=1500, system="Be brief.", messages=[{"role": "user", "content": "Which city?"}])
reply = client.messages.create(**asked, stop_sequences=["}"])
assert reply.stop_reason in ("end_turn", "stop_sequence", "max_tokens") and reply.content[0].type == "text"
with client.messages.stream(**asked) as stream:
    text = "".join(stream.text_stream)
    last = stream.get_final_message()
assert text == "".join(block.text for block in last.content) and last.usage.output_tokens > 0
tool = {"name": "find", "description": "Find it.", "input_schema": City.model_json_schema()}
reply = client.messages.create(**asked, tools=[tool], tool_choice={"type": "any"})
assert reply.stop_reason == "tool_use"
City.model_validate(reply.content[0].input)
result = {"type": "tool_result", "tool_use_id": reply.content[0].id, "content": "Ulm"}
history = [*asked["messages"], {"role": "assistant", "content": reply.content}, {"role": "user", "content": [result]}]
assert client.messages.create(**{**asked, "messages": history}, tools=[tool]).content
assert client.messages.count_tokens(model="tiny", messages=asked["messages"]).input_tokens > 10
try:
    client.messages.create(**{**asked, "model": "other"})
except NotFoundError as error:
    assert "not served here" in str(error)
else:
    raise AssertionError("a model that is not served was answered for")
print("done")
"""
    assert "done" in play(PYDANTIC + code, "anthropic")


def test_lm_eval_scores_continuations(play: Play) -> None:
    code = """
import json, urllib.request
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI
settings = dict(model="tiny", tokenizer=FOLDER, tokenizer_backend="huggingface", max_length=2048)
model = LocalCompletionsAPI(base_url=URL + "/completions", **settings)
pairs = [("the answer is", " four"), ("the answer is", " world"), ("hello", " world, hello")]
found = model.loglikelihood([Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)])
def ask(prompt, **body):
    sent = json.dumps({"model": "tiny", "prompt": prompt, **body}).encode()
    request = urllib.request.Request(URL + "/completions", sent, {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request))
for (before, after), (logprob, is_greedy) in zip(pairs, found):
    scored = ask(before + after, echo=True, logprobs=0, max_tokens=0)["choices"][0]["logprobs"]
    own = sum(p for p, at in zip(scored["token_logprobs"], scored["text_offset"]) if at >= len(before))
    assert abs(own - logprob) < 1e-3, (own, logprob)
assert model.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, ("hello world",), 0)])[0] < 0
print("done")
"""
    assert "done" in play(code, "lm-eval[api]", "transformers")


# --- Node -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def play_node(server: Served, tmp_path: Path) -> Play:
    """Install packages from npm into a fresh folder and run a module there; what it printed."""
    if shutil.which("npm") is None:
        pytest.skip("there is no npm on this machine")

    def play(code: str, *packages: str) -> str:
        (tmp_path / "package.json").write_text('{"type": "module"}')
        _run(["npm", "install", "--silent", "--no-audit", "--no-fund", *packages], tmp_path, server)
        (tmp_path / "client.mjs").write_text(code)
        return _run(["node", "client.mjs"], tmp_path, server)

    return play


def test_openais_node_client_parses_and_streams(play_node: Play) -> None:
    code = """
import OpenAI from "openai";
const client = new OpenAI({ baseURL: process.env.URL, apiKey: "none" });
const messages = [{ role: "user", content: "Which city?" }];
const properties = { size: { enum: ["small", "large"] } };
const schema = { type: "object", properties, required: ["size"], additionalProperties: false };
const response_format = { type: "json_schema", json_schema: { name: "city", schema, strict: true } };
const reply = await client.chat.completions.parse({ model: "tiny", messages, response_format });
if (!["small", "large"].includes(JSON.parse(reply.choices[0].message.content).size)) throw new Error("no size");
const events = await client.responses.create({ model: "tiny", input: "Hello", stream: true });
for await (const event of events) console.log(event.type);
console.log("done");
"""
    said = play_node(code, "openai")
    assert "response.created" in said
    assert "done" in said


def test_vercels_ai_sdk_generates_an_object(play_node: Play) -> None:
    code = """
import { createOpenAI } from "@ai-sdk/openai";
import { generateObject, generateText, tool } from "ai";
import { z } from "zod";
const provider = createOpenAI({ baseURL: process.env.URL, apiKey: "none" });
const schema = z.object({ size: z.enum(["small", "large"]), districts: z.array(z.number().int()) });
for (const model of [provider.chat("tiny"), provider.responses("tiny")]) {
  const { object } = await generateObject({ model, schema, prompt: "Which city?" });
  schema.parse(object);
  const find = tool({ description: "Find.", inputSchema: schema });
  const { toolCalls } = await generateText({ model, tools: { find }, toolChoice: "required", prompt: "Find it." });
  schema.parse(toolCalls[0].input);
}
console.log("done");
"""
    assert "done" in play_node(code, "ai", "@ai-sdk/openai", "zod")
