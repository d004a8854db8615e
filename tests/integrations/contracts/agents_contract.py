"""Agents of openai-agents and of LangGraph as they are written anywhere, played by `vf.AgentEnv` with exact tokens.

Run by tests/integrations/test_agents.py in an environment with those packages.
"""

from __future__ import annotations

import asyncio
import json
import operator
import sys
from typing import Annotated, Any, TypedDict

import verifiers as vf
from verifiers.clients.fake import encode_prompt
from verifiers.integrations.vllm import exact_tokens
from verifiers.samples import samples_of

ROWS = [{"question": "What is 2+2?", "answer": "4"}]


def correct(completion: Any, answer: str) -> float:
    return float(answer in completion[-1]["content"])


def called(*calls: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    made = [
        {"id": f"call_{n}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for n, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": None, "tool_calls": made}


def play(run: Any, reply: Any, **kwargs: Any) -> vf.State:
    env = vf.AgentEnv(run=run, dataset=ROWS, rubric=vf.Rubric([correct]), **kwargs)
    (state,) = env.evaluate(client=vf.FakeClient(reply, tokens=True), model="policy", use_tqdm=False).rollouts
    assert state["error"] is None, state["error"]
    assert state["reward"] == 1.0, state["completion"]
    for step in state["trajectory"]:
        assert step["tokens"]["prompt_ids"] == encode_prompt(step["prompt"])
    trained = sum(sum(sample.completion_mask) for sample in samples_of(state["trajectory"]))
    assert trained == sum(len(step["tokens"]["completion_ids"]) for step in state["trajectory"])
    return state


# --- openai-agents ------------------------------------------------------------------------------------------------


def openai_agents() -> None:
    from agents import (
        Agent,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)

    @function_tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    def make_agent(model: Any) -> Any:
        helper = Agent(name="helper", instructions="You help.", model=model)
        ask = helper.as_tool(tool_name="ask_helper", tool_description="Ask the helper.")
        return Agent(name="lead", instructions="You lead.", model=model, tools=[add, ask])

    def lead(request: vf.Request) -> Any:
        system = request.prompt[0]["content"]
        if system == "You help.":
            return "2+2 is easy"
        answers = [message["content"] for message in request.prompt if message["role"] == "tool"]
        if not answers:
            return called(("add", {"a": 1, "b": 3}), ("ask_helper", {"input": "What is 2+2?"}))
        return f"It is {answers[0]}"

    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):

        async def run(base_url: str, api_key: str, prompt: Any, kind: Any = kind) -> str:
            async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
                agent = make_agent(kind(model="gpt-5", openai_client=client))
                return (await Runner.run(agent, prompt[-1]["content"])).final_output

        async def streamed(base_url: str, api_key: str, prompt: Any, kind: Any = kind) -> str:
            async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
                result = Runner.run_streamed(
                    make_agent(kind(model="gpt-5", openai_client=client)), prompt[-1]["content"]
                )
                async for _ in result.stream_events():
                    pass
                return result.final_output

        for agent in (run, streamed):
            state = play(agent, lead)
            assert len(state["trajectory"]) == 3
            assert [step["extras"]["branch"] for step in state["trajectory"]] == [0, 1, 0]
            assert len(state["trajectory"][0]["extras"]["tools"]) == 2
    print("openai-agents done")


# --- LangGraph ----------------------------------------------------------------------------------------------------


class Conversation(TypedDict):
    messages: Annotated[list[Any], operator.add]


def langgraph() -> None:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.graph import END, START, StateGraph
    from langgraph.prebuilt import ToolNode

    @tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    def build(model: Any) -> Any:
        bound = model.bind_tools([add])

        async def speak(state: Conversation) -> Any:
            return {"messages": [await bound.ainvoke(state["messages"])]}

        graph = StateGraph(Conversation)
        graph.add_node("speak", speak)
        graph.add_node("act", ToolNode([add]))
        graph.add_edge(START, "speak")
        graph.add_conditional_edges("speak", lambda state: "act" if state["messages"][-1].tool_calls else END)
        graph.add_edge("act", "speak")
        return graph.compile()

    async def run(base_url: str, api_key: str, model: str, prompt: Any, is_streaming: bool = False) -> str:
        chat = ChatOpenAI(base_url=base_url, api_key=api_key, model=model, streaming=is_streaming)
        ended = await build(chat).ainvoke({"messages": [HumanMessage(prompt[-1]["content"])]})
        assert sum(isinstance(message, ToolMessage) for message in ended["messages"]) == 2
        return ended["messages"][-1].content

    async def streamed(base_url: str, api_key: str, model: str, prompt: Any) -> str:
        return await run(base_url, api_key, model, prompt, is_streaming=True)

    def think(request: vf.Request) -> Any:
        answers = [message["content"] for message in request.prompt if message["role"] == "tool"]
        return f"It is {answers[0]}" if answers else called(("add", {"a": 2, "b": 2}), ("add", {"a": 0, "b": 1}))

    for agent in (run, streamed):
        state = play(agent, think)
        assert len(state["trajectory"]) == 2
        assert state["metrics"]["num_branches"] == 1.0
    print("langgraph done")


# --- a model that samples -----------------------------------------------------------------------------------------


async def gathered_agents(base_url: str, api_key: str, prompt: Any) -> str:
    """Two of openai-agents at the same time; then the first goes on, as a stream."""
    from agents import Agent, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        model = OpenAIChatCompletionsModel(model="gpt-5", openai_client=client)
        one, other = (Agent(name=name, instructions=f"You are {name}.", model=model) for name in ("one", "other"))
        asked = prompt[-1]["content"]
        first, _ = await asyncio.gather(Runner.run(one, asked), Runner.run(other, asked))
        result = Runner.run_streamed(one, [*first.to_input_list(), {"role": "user", "content": "more"}])
        async for _ in result.stream_events():
            pass
        return str(result.final_output)


async def gathered_nodes(base_url: str, api_key: str, model: str, prompt: Any) -> str:
    """Two nodes of a LangGraph at the same time, then a third on what they said; all stream."""
    from langchain_core.messages import HumanMessage
    from langchain_openai import ChatOpenAI
    from langgraph.graph import END, START, StateGraph

    chat = ChatOpenAI(base_url=base_url, api_key=api_key, model=model, streaming=True)

    async def speak(state: Conversation) -> Any:
        return {"messages": [await chat.ainvoke(state["messages"])]}

    async def sum_up(state: Conversation) -> Any:
        said = " ".join(str(message.content) for message in state["messages"])
        return {"messages": [await chat.ainvoke([HumanMessage(said)])]}

    graph = StateGraph(Conversation)
    graph.add_node("a", speak)
    graph.add_node("b", speak)
    graph.add_node("end", sum_up)
    for start, end in ((START, "a"), (START, "b"), ("a", "end"), ("b", "end"), ("end", END)):
        graph.add_edge(start, end)
    ended = await graph.compile().ainvoke({"messages": [HumanMessage(prompt[-1]["content"])]})
    return str(ended["messages"][-1].content)


def sampled(url: str) -> None:
    """Both with a model that samples, behind `url`: a line with the tokens of each call, which the test checks."""
    for agent in (gathered_agents, gathered_nodes):
        env = vf.AgentEnv(run=agent, dataset=ROWS, rubric=vf.Rubric([lambda completion: 1.0]))
        args = {**exact_tokens(), "temperature": 1.0, "max_tokens": 8, "seed": 3}
        results = env.evaluate(client=url, model="tiny", sampling_args=args, rollouts_per_example=2, use_tqdm=False)
        assert not results.failed, results.failed[0]["error"]
        for state in results.rollouts:
            assert len(state["trajectory"]) == 3
            assert state["metrics"]["num_branches"] >= 2.0
            learned = sum(sum(sample.completion_mask) for sample in samples_of(state["trajectory"]))
            assert learned == sum(len(step["tokens"]["completion_ids"]) for step in state["trajectory"])
            for step in state["trajectory"]:
                print(json.dumps(step["tokens"]))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sampled(sys.argv[1])
    else:
        openai_agents()
        langgraph()
