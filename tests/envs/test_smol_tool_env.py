"""SmolToolEnv with real tools of smolagents."""

from __future__ import annotations

from typing import Any

import pytest

smolagents = pytest.importorskip("smolagents")
tool = smolagents.tool

import verifiers as vf  # noqa: E402
from tests.support.tool_calls import call, calling, tool_texts  # noqa: E402

ROW = {"question": "How warm is it in Lund?", "answer": "3"}


class Weather(smolagents.Tool):  # type: ignore[misc, name-defined]
    name = "weather"
    description = "The temperature of a town."
    inputs = {
        "town": {"type": "string", "description": "The town."},
        "unit": {"type": "string", "description": "C or F.", "nullable": True},
    }
    output_type = "number"

    def setup(self) -> None:
        self.degrees = {"Lund": 3.0}
        self.is_initialized = True

    def forward(self, town: str, unit: str | None = None) -> float:
        return self.degrees[town] if unit != "F" else self.degrees[town] * 1.8 + 32


@tool
def shout(text: str) -> str:
    """Say it loudly.

    Args:
        text: What to say.
    """
    return text.upper()


def add(a: int, b: int) -> int:
    """Add."""
    return a + b


def make(**kwargs: Any) -> vf.SmolToolEnv:
    return vf.SmolToolEnv(tools=[Weather(), shout, add], dataset=[ROW], **kwargs)


def test_their_descriptions_become_schemas() -> None:
    env = make()
    assert env.oai_tools is not None
    weather, shouting, adding = (one["function"] for one in env.oai_tools)
    assert (weather["name"], weather["description"]) == ("weather", "The temperature of a town.")
    assert weather["parameters"]["required"] == ["town"]
    assert weather["parameters"]["properties"]["town"] == {"type": "string", "description": "The town."}
    assert (shouting["name"], adding["name"]) == ("shout", "add")


def test_they_are_called_like_any_tool_and_their_faults_are_told() -> None:
    calls = [
        call("weather", {"town": "Lund"}),
        call("weather", {"town": "Lund", "unit": "F"}),
        call("shout", {"text": "hej"}),
        call("add", {"a": 1, "b": 2}),
        call("weather", {"city": "Lund"}),
        call("weather", {"town": "Ystad"}),
    ]
    state = make().rollout(ROW, vf.FakeClient([calling(*calls), "3"]), "fake")
    assert tool_texts(state) == [
        "3.0",
        "37.4",
        "HEJ",
        "3",
        "Error: weather has no argument 'city'; it takes town, unit (optional)",
        "Error: KeyError: 'Ystad'",
    ]


def test_they_may_be_called_in_tags_too() -> None:
    env = make(parser=vf.XMLParser(["reasoning", ("tool", "answer")]))
    said = ['<tool>{"name": "weather", "arguments": {"town": "Lund"}}</tool>', "<answer>3</answer>"]
    state = env.rollout(ROW, vf.FakeClient(said), "fake")
    assert state["completion"][1]["content"] == "<result>\n3.0\n</result>"
    assert "weather: The temperature of a town." in state["prompt"][0]["content"]
