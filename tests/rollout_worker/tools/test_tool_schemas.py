"""What the policy is told of a function, and what the function gets."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import functools
import json
from typing import Annotated, Any, Literal, TypedDict

import pytest
from pydantic import BaseModel, Field, field_validator
from transformers.utils import get_json_schema

from slipstream.protocol import reasons
from slipstream.protocol.config import ConfigError
from slipstream.rollout_worker.chat.parsers.base import ToolCall
from slipstream.rollout_worker.tools.function import FunctionTool, callables
from slipstream.rollout_worker.tools.toolbox import ToolBox
from slipstream.rollout_worker.user_code import UserCodeError


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Item(BaseModel):
    name: str
    price: float = Field(1.0, ge=0, description="In euros.")
    colour: Colour = Colour.RED

    @field_validator("name")
    @classmethod
    def _known(cls, value: str) -> str:
        if value == "exit":
            raise SystemExit(3)
        if value != value.lower():
            raise ValueError("write it in lower case")
        return value


class Tree(BaseModel):
    value: int
    kids: list[Tree] = []


@dataclasses.dataclass
class Point:
    x: int
    y: int = 3


class Size(TypedDict, total=False):
    width: int


def plain(a: int, b: float | None = None, c: Literal["x", "y"] = "x", d: dict[str, list[int]] | None = None) -> str:
    """Do something.

    Args:
        a: One,
            over two lines.
        b: Two.
        c: Three. (choices: ["x", "y"])
        d: Four.

    Returns:
        What was done.
    """
    return f"{a} {b} {c} {d}"


def rich(
    item: Item,
    tree: Tree | None = None,
    point: Point = Point(1),  # noqa: B008
    size: Size | None = None,
    colour: Colour = Colour.BLUE,
    day: datetime.date | None = None,
    by_number: dict[int, str] | None = None,
    unique: set[int] = frozenset(),  # type: ignore[assignment]
    small: Annotated[int, Field(lt=10)] = 1,
    items: list[Item] | None = None,
    sizes: list[Size] | None = None,
) -> dict[str, Any]:
    """Do much.

    Args:
        item: An item.
        tree: A tree.
        point: A point.
        size: A size.
        colour: A colour.
        day: A day.
        by_number: Names.
        unique: Numbers.
        small: A number.
        items: More.
        sizes: More.
    """
    return dict(locals())


async def call(tool: Any, arguments: Any, **options: Any):
    (result,) = await ToolBox([tool], **options).run([ToolCall(FunctionTool(tool).name, arguments, "call-1")])
    return result


def test_a_plain_function_is_described_as_transformers_describes_it() -> None:
    assert ToolBox([plain]).schemas == [get_json_schema(plain)]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"item": {"name": "pen"}}, {"item": Item(name="pen"), "point": Point(1), "colour": Colour.BLUE}),
        (
            {
                "item": '{"name": "pen", "price": "2", "colour": "blue"}',
                "tree": {"value": "1", "kids": [{"value": 2.0}]},
                "point": {"x": "7"},
                "size": {"width": "3"},
                "colour": "red",
                "day": "2024-02-29",
                "by_number": {"1": "one"},
                "unique": [1, 1, 2],
                "small": "9",
                "items": [{"name": "ink"}],
                "sizes": [{"width": 1}],
            },
            {
                "item": Item(name="pen", price=2, colour=Colour.BLUE),
                "tree": Tree(value=1, kids=[Tree(value=2)]),
                "point": Point(7, 3),
                "size": {"width": 3},
                "colour": Colour.RED,
                "day": datetime.date(2024, 2, 29),
                "by_number": {1: "one"},
                "unique": {1, 2},
                "small": 9,
                "items": [Item(name="ink")],
                "sizes": [{"width": 1}],
            },
        ),
    ],
)
@pytest.mark.parametrize("asynchronous", [False, True])
async def test_rich_types_get_instances_and_defaults_stay(arguments: Any, expected: Any, asynchronous: bool) -> None:
    seen: dict[str, Any] = {}

    def note(**given: Any) -> str:
        seen.update(rich(**given))
        return "noted"

    async def note_async(**given: Any) -> str:
        return note(**given)

    tool = functools.wraps(rich)(note_async if asynchronous else note)
    result = await call(tool, arguments)
    assert result.content == "noted"
    assert {name: seen[name] for name in expected} == expected


def test_rich_types_are_described_without_references_but_where_they_refer_to_themselves() -> None:
    (schema,) = ToolBox([rich]).schemas
    parameters = schema["function"]["parameters"]
    assert parameters["properties"]["item"] == {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "price": {"type": "number", "default": 1.0, "minimum": 0, "description": "In euros."},
            "colour": {"type": "string", "enum": ["red", "blue"], "default": "red"},
        },
        "required": ["name"],
        "description": "An item.",
    }
    assert list(parameters["$defs"]) == ["Tree"]
    assert parameters["required"] == ["item"]
    json.dumps(schema)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"item": {"name": "Pen"}}, "bad arguments: item: name: 'Pen': Value error, write it in lower case"),
        ({"item": {"name": "pen", "price": -1}}, "bad arguments: item: price: -1 is less than the minimum of 0"),
        ({"item": {"name": "pen"}, "day": "tomorrow"}, "bad arguments: day: 'tomorrow': "),
        ({"item": {"name": "pen"}, "small": 10}, "bad arguments: small: 10 is greater than or equal to the maximum"),
        ({}, "bad arguments: 'item' is a required property"),
    ],
)
async def test_what_a_type_refuses_is_bad_arguments(arguments: Any, error: str) -> None:
    result = await call(rich, arguments)
    assert result.reason == reasons.TOOL_ARGUMENTS
    assert json.loads(result.content)["error"].startswith(error)


async def test_i9_a_check_in_a_type_is_user_code() -> None:
    result = await call(rich, {"item": {"name": "exit"}})
    assert (result.reason, result.call_id) == (reasons.TOOL_RAISED, "call-1")
    assert "SystemExit" in result.content


class Shop:
    """A shop."""

    def buy(self, item: str, count: int = 1) -> str:
        """Buy.

        Args:
            item: What.
            count: How many.
        """
        return f"{count} {item}"

    @staticmethod
    def hours() -> str:
        """Say when."""
        return "always"

    @classmethod
    def name(cls) -> str:
        """Say its name."""
        return cls.__name__

    def __call__(self, item: str) -> str:
        """Ask for an item.

        Args:
            item: What.
        """
        return f"no {item}"


def logged(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


async def fetch(page: int, site: str) -> str:
    """Fetch a page.

    Args:
        page: Which.
        site: Where.
    """
    return f"{site}/{page}"


@pytest.mark.parametrize(
    ("tool", "name", "parameters", "arguments", "content"),
    [
        (Shop().buy, "buy", ["item", "count"], {"item": "pen"}, "1 pen"),
        (Shop.hours, "hours", [], {}, "always"),
        (Shop.name, "name", [], {}, "Shop"),
        (Shop(), "Shop", ["item"], {"item": "pen"}, "no pen"),
        (functools.partial(Shop().buy, count=3), "buy", ["item"], {"item": "pen"}, "3 pen"),
        (functools.partial(Shop().buy, "ink"), "buy", ["count"], {"count": "2"}, "2 ink"),
        (functools.partial(functools.partial(fetch, 7), site="x"), "fetch", [], {}, "x/7"),
        (functools.partial(fetch, site="x"), "fetch", ["page"], {"page": 1}, "x/1"),
        (logged(Shop().buy), "buy", ["item", "count"], {"item": "pen"}, "1 pen"),
    ],
)
async def test_methods_partials_and_callables_are_tools(
    tool: Any, name: str, parameters: list[str], arguments: Any, content: str
) -> None:
    (schema,) = ToolBox([tool]).schemas
    assert schema["function"]["name"] == name
    assert list(schema["function"]["parameters"]["properties"]) == parameters
    assert schema["function"]["description"]
    assert (await call(tool, arguments)).content == content


def many(*values: int) -> int:
    """Add.

    Args:
        values: What.
    """
    return sum(values)


def by_place(a: int, /) -> int:
    """Give back.

    Args:
        a: What.
    """
    return a


def of_a_class(shop: Shop) -> str:
    """Take a shop.

    Args:
        shop: Which.
    """
    return str(shop)


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        (lambda x: x, "a lambda cannot be described.*write it as a def"),
        (Shop, "cannot be made into a tool; give a function"),
        (3, "cannot be made into a tool"),
        (many, r"'many' has the parameter '\*values.*give every parameter a name"),
        (by_place, "'by_place' has the parameter 'a.*give every parameter a name"),
        (of_a_class, "'shop' of the tool 'of_a_class' is a .*Shop.*cannot write; take int, float"),
    ],
)
def test_what_cannot_be_described_is_refused_with_the_reason(tool: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ToolBox([tool])


class Search:
    """A tool of one's own: schema and call."""

    schema = {  # noqa: RUF012
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search.",
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
        },
    }

    async def call(self, arguments: dict[str, Any], timeout_s: float) -> str:
        if arguments["query"] == "exit":
            raise SystemExit(3)
        return f"{arguments['query']} {timeout_s:g}"


async def test_a_tool_object_is_a_tool_and_user_code() -> None:
    box = ToolBox([Search()], timeout_s=7)
    good, exits, bad = await box.run([ToolCall("search", {"query": query}) for query in ("x", "exit", 3)])
    assert good.content == "x 7"
    assert (exits.reason, bad.reason) == (reasons.TOOL_RAISED, reasons.TOOL_ARGUMENTS)


def test_a_tool_object_whose_schema_is_none_is_refused() -> None:
    tool = Search()
    tool.schema = {"function": {"name": "search", "parameters": {"type": "objekt"}}}  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match="from a Search of the task is not a tool's JSON schema: 'objekt'"):
        ToolBox([tool])


class Isolating:
    """The face of `UserCode` that calls in child processes."""

    def __init__(self, error: UserCodeError | None = None) -> None:
        self.calls: list[Any] = []
        self.error = error

    async def call_isolated(self, tool_name: str, arguments: dict[str, Any], timeout_s: float) -> str:
        self.calls.append((tool_name, arguments, timeout_s))
        if self.error is not None:
            raise self.error
        return "from the child"


async def test_isolated_functions_are_called_by_name_with_json() -> None:
    code = Isolating()
    result = await call(rich, {"item": {"name": "pen", "price": "2"}}, timeout_s=5, code=code, isolated=True)
    assert result.content == "from the child"
    assert code.calls == [("rich", {"item": {"name": "pen", "price": 2}}, 5)]


def test_a_child_finds_the_functions_by_name_and_they_take_json() -> None:
    found = callables([plain, functools.partial(rich, small=3), Search()])
    assert list(found) == ["plain", "rich"]
    assert found["rich"](item={"name": "pen"})["item"] == Item(name="pen")
    assert found["rich"](item={"name": "pen"})["small"] == 3


async def test_arguments_that_the_child_refuses_are_bad_arguments() -> None:
    code = Isolating(UserCodeError("InvalidArguments: item: no", "InvalidArguments", None))
    result = await call(rich, {"item": {"name": "pen"}}, code=code, isolated=True)
    assert (result.reason, json.loads(result.content)["error"]) == (reasons.TOOL_ARGUMENTS, "bad arguments: item: no")


def test_a_tool_object_cannot_be_isolated() -> None:
    with pytest.raises(
        ConfigError, match=r"worker\.tool_isolation = process: a Search .*give a function, or set thread"
    ):
        ToolBox([Search()], code=Isolating(), isolated=True)  # type: ignore[arg-type]


def test_types_in_a_docstring_are_googles_and_not_shown():
    def book(city: str, nights: dict[str, int] | None = None, note: str = "") -> str:
        """Book a room (city is required): soon.

        Args:
            city (str): The city (in English): no code.
            nights (Optional[Dict[str, int]], optional): Nights by
                kind (if any).
            note(:class:`str`, (default: "")) : A note.

        Returns:
            str: The booking.
        """
        return city

    function = ToolBox([book]).schemas[0]["function"]
    assert function["description"] == "Book a room (city is required): soon."
    told = {name: field["description"] for name, field in function["parameters"]["properties"].items()}
    assert told == {
        "city": "The city (in English): no code.",
        "nights": "Nights by kind (if any).",
        "note": "A note.",
    }
