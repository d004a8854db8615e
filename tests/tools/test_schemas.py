"""Functions become schemas: every kind of hint, every style of docstring, and functions that cannot be tools."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import functools
import json
from collections import Counter, OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, NewType, NotRequired, Optional, TypedDict, Union

import jsonschema
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import TypeAliasType

from verifiers.tools import as_tool, convert_func_to_oai_tool
from verifiers.tools.docstrings import read_docstring
from verifiers.tools.faults import WrongTypeError
from verifiers.tools.schemas import fit, schema_of, with_common_definitions


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Place(TypedDict):
    town: str
    zip: NotRequired[int]


@dataclasses.dataclass
class Point:
    x: float
    y: float = 0.0


@dataclasses.dataclass
class Node:
    value: int
    children: list[Node] = dataclasses.field(default_factory=list)


SCHEMAS = [
    (str, {"type": "string"}),
    (bool, {"type": "boolean"}),
    (Optional[int], {"anyOf": [{"type": "integer"}, {"type": "null"}]}),  # noqa: UP045
    (Union[int, str], {"anyOf": [{"type": "integer"}, {"type": "string"}]}),  # noqa: UP007
    (Literal["a", "b"], {"type": "string", "enum": ["a", "b"]}),
    (Literal["a", 1], {"enum": ["a", 1]}),
    (list, {"type": "array"}),
    (list[list[int]], {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}}),
    (tuple[int, ...], {"type": "array", "items": {"type": "integer"}}),
    (dict[str, float], {"type": "object", "additionalProperties": {"type": "number"}}),
    (dict[str, Any], {"type": "object"}),
    (Colour, {"type": "string", "enum": ["red", "blue"]}),
    (Annotated[int, "how many"], {"type": "integer", "description": "how many"}),
    (datetime.date, {"type": "string", "format": "date"}),
    (Any, {}),
    (object, {}),
]


@pytest.mark.parametrize(("hint", "schema"), SCHEMAS, ids=[str(i) for i in range(len(SCHEMAS))])
def test_a_hint_has_its_schema(hint: Any, schema: dict[str, Any]) -> None:
    assert schema_of(hint) == schema


def test_typed_dicts_and_dataclasses_are_objects_with_their_fields() -> None:
    assert schema_of(Place) == {
        "type": "object",
        "properties": {"town": {"type": "string"}, "zip": {"type": "integer"}},
        "required": ["town"],
    }
    assert schema_of(Point)["required"] == ["x"]


def test_a_type_that_contains_itself_has_an_end() -> None:
    assert schema_of(Node)["properties"]["children"]["items"]["properties"]["value"] == {"type": "integer"}


def everything(
    query: str,
    where: Place,
    colour: Colour = Colour.RED,
    limit: Annotated[int, "at most so many"] = 5,
    *,
    mode: Literal["fast", "slow"] = "fast",
    point: Point | None = None,
) -> str:
    """Look something up.

    It takes a while.

    Args:
        query: What to look for,
            on one line.
        where (Place): The town.
        colour: Its colour: red or blue.

    Returns:
        str: What was found.

    Raises:
        ValueError: never.

    Examples:
        everything("otters", {"town": "Lund"}) -> "none"
    """
    return query


def test_a_function_becomes_openais_schema() -> None:
    schema = convert_func_to_oai_tool(everything)
    assert schema["type"] == "function"
    function = schema["function"]
    assert function["name"] == "everything"
    assert function["description"] == (
        "Look something up.\n\nIt takes a while.\n\nReturns: str: What was found.\n\n"
        'Examples:\neverything("otters", {"town": "Lund"}) -> "none"'
    )
    parameters = function["parameters"]
    assert parameters["required"] == ["query", "where"]
    assert parameters["additionalProperties"] is False
    properties = parameters["properties"]
    assert properties["query"] == {"type": "string", "description": "What to look for, on one line."}
    assert properties["where"]["description"] == "The town."
    assert properties["colour"]["description"] == "Its colour: red or blue."
    assert properties["limit"] == {"type": "integer", "description": "at most so many", "default": 5}
    assert properties["mode"] == {"type": "string", "enum": ["fast", "slow"], "default": "fast"}


def test_arguments_to_skip_are_not_shown_and_must_exist() -> None:
    shown = convert_func_to_oai_tool(everything, args_to_skip=["where", "point"])["function"]["parameters"]
    assert set(shown["properties"]) == {"query", "colour", "limit", "mode"}
    with pytest.raises(ValueError, match=r"args_to_skip has \['stat'\]"):
        as_tool(everything, args_to_skip=["stat"])


def numpy_style(a, b, c=1):
    """Do it.

    Parameters
    ----------
    a : int
        The first.
    b, c : int, optional
        The others,
        both.

    Returns
    -------
    int
        A sum.
    """


def rest_style(a, b):
    """Do it.

    :param a: The first.
    :param int b: The second.
    :returns: A sum.
    """


def test_numpys_and_rests_docstrings_are_read_too() -> None:
    numpy = read_docstring(numpy_style)
    assert (numpy.summary, numpy.returns) == ("Do it.", "int A sum.")
    assert numpy.args == {"a": "The first.", "b": "The others, both.", "c": "The others, both."}
    rest = read_docstring(rest_style)
    assert (rest.summary, rest.args, rest.returns) == ("Do it.", {"a": "The first.", "b": "The second."}, "A sum.")


@given(st.text(alphabet=st.sampled_from("Args: Returns\n-=:ab(*)`\t,"), max_size=300))
def test_no_docstring_makes_it_raise(text: str) -> None:
    def function(a: int) -> None: ...

    function.__doc__ = text
    convert_func_to_oai_tool(function)


def test_methods_partials_and_callable_objects_are_tools() -> None:
    class Shop:
        def buy(self, item: str, count: int = 1) -> str:
            """Buy something."""
            return item * count

        def __call__(self, item: str) -> str:
            """Sell something."""
            return item

    assert as_tool(Shop().buy).schema["function"]["parameters"]["required"] == ["item"]
    assert set(as_tool(functools.partial(Shop().buy, count=2)).schema["function"]["parameters"]["properties"]) == {
        "item"
    }
    called = as_tool(Shop(), name="sell")
    assert (called.name, called.description) == ("sell", "Sell something.")


class Item(pydantic.BaseModel):
    price: float
    parts: list[Item] = []


class Mixed(enum.Enum):
    RED = "red"
    TWO = 2
    PAIR = (1, 2)


class Opaque(enum.Enum):
    ONE = object()


UserId = NewType("UserId", int)
Numbers = TypeAliasType("Numbers", list[int])
OPEN = float("inf")


def shop(
    item: Item,
    more: list[Item],
    other: Item | None = None,
    by_name: dict[str, Item] | None = None,
    budget: float = OPEN,
) -> str:
    """Buy items."""
    return f"{[type(one).__name__ for one in (item, *more, other, *(by_name or {}).values())]}"


def test_the_references_in_a_schema_lead_to_its_definitions() -> None:
    """`#/$defs/…` counts from the top of the arguments, not from the argument that has it."""
    parameters = json.loads(json.dumps(as_tool(shop).schema["function"]["parameters"], allow_nan=False))
    jsonschema.Draft202012Validator.check_schema(parameters)
    valid = jsonschema.Draft202012Validator(parameters)
    assert valid.is_valid({"item": {"price": 1, "parts": [{"price": 2}]}, "more": [{"price": 3}], "other": None})
    assert not valid.is_valid({"item": {"price": 1, "parts": [{"price": "x"}]}, "more": []})
    assert not valid.is_valid({"item": {"price": 1}, "more": [{}]})


def test_definitions_of_the_same_name_stay_apart() -> None:
    def definition(kind: str) -> dict[str, Any]:
        return {"$defs": {"A": {"type": kind}}, "$ref": "#/$defs/A"}

    merged = with_common_definitions({"x": definition("integer"), "y": definition("string"), "z": definition("string")})
    assert merged["$defs"] == {"A": {"type": "integer"}, "A_2": {"type": "string"}}
    assert [merged[name]["$ref"] for name in "xyz"] == ["#/$defs/A", "#/$defs/A_2", "#/$defs/A_2"]


def test_models_inside_of_lists_dicts_and_options_are_made() -> None:
    item = {"price": "2.5"}
    checked = as_tool(shop).check({"item": item, "more": [item], "other": item, "by_name": {"tea": item}})
    made = [checked["item"], *checked["more"], checked["other"], checked["by_name"]["tea"]]
    assert made == [Item(price=2.5)] * 4
    with pytest.raises(WrongTypeError):
        as_tool(shop).check({"item": item, "more": [{"price": "much"}]})


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        ("red", Mixed, Mixed.RED),
        (2, Mixed, Mixed.TWO),
        ([1, 2], Mixed | None, Mixed.PAIR),
        ("3", UserId, 3),
        (["1", 2], Numbers, [1, 2]),
        ({"a": "1"}, OrderedDict[str, int], OrderedDict(a=1)),
        ({"a": 1}, Counter[str], Counter(a=1)),
        (["x"], list[Path], ["x"]),
        ([1], Iterable[int], [1]),
        ("anything", Opaque, "anything"),
        ("anything", Literal[b"x"], "anything"),
    ],
)
def test_what_a_hint_describes_can_be_given(value: Any, hint: Any, expected: Any) -> None:
    fitted = fit(value, hint)
    assert fitted == expected
    assert type(fitted) is type(expected)


@pytest.mark.parametrize(("value", "hint"), [("green", Mixed), ([2, 1], Mixed), (5, Iterable[int]), ("x", Numbers)])
def test_what_a_hint_does_not_describe_is_refused(value: Any, hint: Any) -> None:
    with pytest.raises(ValueError, match="expected"):
        fit(value, hint)


@pytest.mark.parametrize("hint", [Mixed, Opaque, Literal[b"x"], Numbers, UserId])
def test_every_schema_is_json(hint: Any) -> None:
    assert json.loads(json.dumps(schema_of(hint), allow_nan=False)) == json.loads(json.dumps(schema_of(hint)))


def test_a_function_that_yields_is_refused_as_a_tool_because_a_model_would_read_its_repr() -> None:
    def numbers(n: int) -> Any:
        """Count."""
        yield from range(n)

    async def later(n: int) -> Any:
        """Count."""
        yield n

    for function in (numbers, later):
        with pytest.raises(
            TypeError, match=f"the tool '{function.__name__}' yields, but a tool must return its result"
        ):
            as_tool(function)


def test_what_cannot_be_a_tool_is_refused_when_it_is_made() -> None:
    with pytest.raises(ValueError, match="'<lambda>' is not a valid tool name"):
        as_tool(lambda x: x)
    with pytest.raises(TypeError, match="a tool must be a function"):
        as_tool("calculator")
    with pytest.raises(TypeError, match="positional only"):
        as_tool(lambda x, /: x, name="f")
    with pytest.raises(ValueError, match="timeout_s=0"):
        as_tool(everything, timeout_s=0)


# --- values -------------------------------------------------------------------------------------------------------

FITS = [
    ("3", int, 3),
    (3.0, int, 3),
    (3, float, 3.0),
    ("2.5", float, 2.5),
    ("true", bool, True),
    (7, str, "7"),
    (True, str, "true"),
    ('["a", "b"]', list[str], ["a", "b"]),
    ('{"a": 1}', dict[str, int], {"a": 1}),
    ('{"a": 1}', dict, {"a": 1}),
    (["1", "2"], list[int], [1, 2]),
    ("5", int | str, "5"),
    (None, int | None, None),
    ("null", int | None, None),
    ("red", Colour, Colour.RED),
    ({"x": 1}, Point, Point(1.0, 0.0)),
    ({"town": "Lund"}, Place, {"town": "Lund"}),
    ({"x": 1}, Point | dict[str, int], Point(1.0)),
    ("anything", Any, "anything"),
    ({"any": "thing"}, object, {"any": "thing"}),
]


@pytest.mark.parametrize(("value", "hint", "expected"), FITS, ids=[str(i) for i in range(len(FITS))])
def test_slips_of_models_are_forgiven(value: Any, hint: Any, expected: Any) -> None:
    fitted = fit(value, hint)
    assert fitted == expected
    assert type(fitted) is type(expected)


MISFITS = [
    ("three", int, "expected integer, got 'three'"),
    (2.5, int, "expected integer, got 2.5"),
    ("green", Colour, 'expected one of "red", "blue", got \'green\''),
    ([1, "x"], list[int], r"expected array of integer, got \[1, 'x'\]"),
    ({"y": 1}, Point, "expected object with x, y"),
    (None, str, "expected string, got None"),
    ({"a": 1}, str, "expected string"),
    ("x" * 500, int, "expected integer, got 'xxx"),
]


@pytest.mark.parametrize(("value", "hint", "message"), MISFITS, ids=[str(i) for i in range(len(MISFITS))])
def test_a_value_of_another_type_is_named(value: Any, hint: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(value, hint)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
HINTS = [
    int,
    float,
    str,
    bool,
    list[int],
    dict[str, float],
    int | str | None,
    Colour,
    Point,
    Place,
    Literal["a", 1],
    Any,
]


def complaint(value: Any, hint: Any) -> str:
    try:
        fit(value, hint)
    except ValueError as error:
        return str(error)
    return ""


@given(JSON, st.sampled_from(HINTS))
def test_any_value_fits_or_is_a_short_value_error(value: Any, hint: Any) -> None:
    assert len(complaint(value, hint)) < 300
