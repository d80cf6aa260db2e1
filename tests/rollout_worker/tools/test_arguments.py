"""Arguments as policies write them: what is read, what is made to fit, and what stays an error that says what to do."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from slipstream.rollout_worker.tools import argument_text
from slipstream.rollout_worker.tools.argument_text import plain_check
from slipstream.rollout_worker.tools.arguments import MAX_DEPTH, MOST, Arguments, Parameters, small
from slipstream.rollout_worker.tools.base import ArgumentsError

INT, TEXT = {"type": "integer"}, {"type": "string"}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "n": INT,
        "x": {"type": "number"},
        "b": {"type": "boolean"},
        "s": TEXT,
        "ints": {"type": "array", "items": INT},
        "words": {"type": "array", "items": TEXT},
        "o": {"type": "object", "properties": {"n": INT, "deep": {"type": "array", "items": {"$ref": "#/$defs/pair"}}}},
        "counts": {"type": "object", "additionalProperties": INT},
        "maybe": {**INT, "nullable": True},
        "either": {"anyOf": [INT, {"type": "array", "items": INT}, {"type": "null"}]},
        "several": {"type": ["integer", "string"]},
        "kind": {**TEXT, "enum": ["a", "b"]},
        "level": {"enum": [1, 2, 3]},
        "pair": {"type": "array", "prefixItems": [INT, TEXT]},
        "any": {},
    },
    "$defs": {"pair": {"type": "object", "properties": {"n": INT}}},
}
PARAMETERS = Parameters(SCHEMA, strict=True)


def fit(given: Any) -> Arguments:
    return PARAMETERS.fit(given)


def outcome_of(parameters: Parameters, given: Any) -> Arguments | str:
    """Return the arguments that fit, or what the policy is told."""
    try:
        return parameters.fit(given)
    except ArgumentsError as error:
        return str(error)


@pytest.mark.parametrize(
    "text",
    [
        '{"n": 7, "s": "a, b: c"}',
        '```json\n{"n": 7, "s": "a, b: c"}\n```',
        '```\n{"n": 7, "s": "a, b: c"}\n```',
        '```json {"n": 7, "s": "a, b: c"}```',
        json.dumps('{"n": 7, "s": "a, b: c"}'),
        json.dumps(json.dumps('{"n": 7, "s": "a, b: c"}')),
        '"n": 7, "s": "a, b: c"',
        '{"n": 7, "s": "a, b: c",}',
        "{'n': 7, 's': 'a, b: c'}",
        "'n': 7, 's': 'a, b: c'",
        "n: 7, s: a, b: c",
        'n=7, s="a, b: c"',
        "n = 7; s = 'a, b: c'",
        "n: 7\ns: a, b: c",
        '{n: 7, s: "a, b: c"}',
        ' \n"n": 7,\n"s": "a, b: c",\n',
    ],
)
def test_text_is_read_as_what_it_is_meant_to_be(text: str) -> None:
    parameters = Parameters({"properties": {"n": INT, "s": TEXT}}, strict=True)
    found = parameters.fit(text)
    assert found.values == {"n": 7, "s": "a, b: c"}
    assert found.repairs[0] == "text", "it is counted"


@pytest.mark.parametrize(
    ("text", "s"),
    [
        ('{"s": "SELECT 1\nn: 2", "n": 7}', "SELECT 1\nn: 2"),
        ('"s": "a\tb,\nn = 2",\n"n": 7', "a\tb,\nn = 2"),
        ("s: echo 'a, n: 2', n: 7", "echo 'a, n: 2'"),
        ('s: ["x, n: 2"], n: 7', '["x, n: 2"]'),
        ("s: it's fine, n: 7", "it's fine"),
    ],
)
def test_no_pair_begins_inside_quotes(text: str, s: str) -> None:
    found = Parameters({"properties": {"n": INT, "s": {}}}, strict=True).fit(text).values
    assert found == {"s": json.loads(s) if s.startswith("[") else s, "n": 7}


@pytest.mark.parametrize(
    "text",
    [
        '{"s": "say("a, n: 2")", "n": 7}',
        "{'s': 'one\nn: 2', 'n': 7}",
        's: "one\nn: 2, n: 7',
        "s: [one, n: 2], n: 7",
        "s: rock 'n roll, n: 7",
        '{"n": 7} {"n": 8}',
        '{"n": 7}\n{"s": "x"}',
        '{"n": 7 "s": "x"}',
        '{"n": 7 /* "seven" */, "s": "x"}',
        '{"n": 7, "s": see [1]}',
        r'{"n": 7, "s": \t"x"}',
    ],
)
def test_a_value_that_cannot_be_told_from_the_next_pair_is_an_error(text: str) -> None:
    with pytest.raises(ArgumentsError, match="not a JSON object"):
        fit(text)


def test_backslashes_are_read_as_they_stand_unless_others_may_be_escapes() -> None:
    parameters = Parameters({"properties": {"s": TEXT}}, strict=True)
    assert parameters.fit(r'{"s": "a\.b\(c\\d"}').values == {"s": r"a\.b\(c\d"}
    assert parameters.fit(r'{"s": "one\ntwo"}').values == {"s": "one\ntwo"}
    for text in (r"D:\temp\Videos", r"\begin{x} \sigma", r"\xe9\d", "a \\\nb"):
        with pytest.raises(ArgumentsError, match="not a JSON object"):
            parameters.fit(f'{{"s": "{text}"}}')


@pytest.mark.parametrize("text", ["", "  ", "{}", "null", "```json\n{}\n```"])
def test_no_text_is_no_arguments(text: str) -> None:
    assert fit(text).values == {}


@pytest.mark.parametrize("text", ["what is this", "[1, 2]", "7", '"seven"', '{"n": 7', "unknown: 3", "{{{{", "\ud800"])
def test_text_that_cannot_be_read_is_told_with_what_is_expected(text: str) -> None:
    with pytest.raises(ArgumentsError, match=r"not a JSON object: .*write them as \{\"name\": value\}"):
        fit(text)


@pytest.mark.parametrize(
    ("name", "value", "fitted"),
    [
        ("n", "7", 7),
        ("n", " 7 ", 7),
        ("n", "-7.0", -7),
        ("n", 2.0, 2),
        ("n", "12345678901234567890", 12345678901234567890),
        ("x", "2.5", 2.5),
        ("x", "7", 7),
        ("b", "true", True),
        ("b", "False", False),
        ("ints", "[1, 2]", [1, 2]),
        ("ints", "(1, 2)", [1, 2]),
        ("ints", ["1", 2.0], [1, 2]),
        ("ints", 3, [3]),
        ("ints", "3", [3]),
        ("words", "pen", ["pen"]),
        ("words", '["pen", "ink"]', ["pen", "ink"]),
        ("o", '{"n": "7"}', {"n": 7}),
        ("o", {"deep": [{"n": "1"}, '{"n": 2.0}']}, {"deep": [{"n": 1}, {"n": 2}]}),
        ("counts", {"pens": "3"}, {"pens": 3}),
        ("maybe", "7", 7),
        ("maybe", "null", None),
        ("maybe", "None", None),
        ("either", "7", 7),
        ("either", "[1, '2']", [1, 2]),
        ("either", "null", None),
        ("level", "2", 2),
        ("pair", ["1", "one"], [1, "one"]),
        ("s", "a\ud800b", "a?b"),
        ("any", {"k\udfff": ["\ud800"]}, {"k?": ["?"]}),
    ],
)
def test_a_value_is_made_to_fit_and_counted(name: str, value: Any, fitted: Any) -> None:
    found = fit({name: value})
    assert found.values == {name: fitted}
    assert [type(each) for each in found.values.values()] == [type(fitted)]
    assert found.repairs


@pytest.mark.parametrize(
    ("schema", "text", "meant"),
    [
        ({**TEXT, "nullable": True}, "null", None),
        ({"anyOf": [TEXT, {"type": "null"}]}, "None", None),
        ({"type": ["integer", "string"], "enum": ["all", 1, 2]}, "2", 2),
        ({"enum": ["all", 1.5]}, "1.5", 1.5),
        ({"anyOf": [TEXT, {"type": "array", "items": TEXT}]}, '["pen", "ink"]', ["pen", "ink"]),
        ({"$ref": "#/$defs/either"}, '{"n": "7"}', {"n": 7}),
        ({"oneOf": [{"type": "array", "items": TEXT}, {"type": "boolean"}]}, "false", False),
        # The text stays where it alone fits, or where the schema cannot tell.
        (TEXT, "null", "null"),
        (TEXT, "[1]", "[1]"),
        ({"type": ["integer", "string"], "enum": ["2", 2]}, "2", "2"),
        ({"type": ["integer", "string"]}, "7", "7"),
        ({"anyOf": [TEXT, {"type": "array", "items": INT}]}, '["pen"]', '["pen"]'),
        ({"anyOf": [TEXT, {"type": "array"}]}, "[pen", "[pen"),
        ({}, "null", "null"),
    ],
)
def test_a_value_without_quotes_is_read_by_its_schema(schema: Any, text: str, meant: Any) -> None:
    either = {"anyOf": [TEXT, {"type": "object", "properties": {"n": INT}}]}
    parameters = Parameters({"properties": {"v": schema}, "$defs": {"either": either}}, strict=True)
    found = parameters.fit({"v": text}, as_text=True)
    assert found.values == {"v": meant}
    assert type(found.values["v"]) is type(meant)
    assert bool(found.repairs) == (meant != text)


@pytest.mark.parametrize("text", ["null", '["pen"]'])
def test_a_value_in_quotes_is_text(text: str) -> None:
    schema = {"anyOf": [TEXT, {"type": "null"}, {"type": "array", "items": TEXT}]}
    assert Parameters({"properties": {"v": schema}}, strict=True).fit({"v": text}).values == {"v": text}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 7),
        ("n", -(10**20)),
        ("x", 2),
        ("x", 2.5),
        ("s", "7"),
        ("s", "true"),
        ("s", "null"),
        ("s", "[1]"),
        ("s", "ünï – 🙂"),
        ("several", "7"),
        ("maybe", None),
        ("either", [1]),
        ("words", []),
        ("any", {"a": [None, 1.5, "7"]}),
    ],
)
def test_what_fits_is_not_touched(name: str, value: Any) -> None:
    assert fit({name: value}) == Arguments({name: value})


def test_null_for_a_parameter_with_a_default_leaves_the_default() -> None:
    assert fit({"n": None, "s": "x"}) == Arguments({"s": "x"}, ("null for a default",))
    with pytest.raises(ArgumentsError, match="n: None is not of type 'integer'"):
        Parameters({"properties": {"n": INT}, "required": ["n"]}, strict=True).fit({"n": None})


def test_a_required_argument_that_may_be_null_is_null_where_a_table_lost_it() -> None:
    schema = {"properties": {"city": TEXT, "unit": {"type": ["string", "null"]}, "day": TEXT}}
    parameters = Parameters({**schema, "required": ["city", "unit", "day"]}, strict=True)
    assert parameters.without_nulls({"city": "Rome"}) == {"city": "Rome", "unit": None}


@pytest.mark.parametrize(
    "shape", [{"kind": "box", "label": None, "r": None}, {"kind": "box"}, {"kind": "disc", "r": 1}]
)
def test_nulls_of_a_union_are_those_of_the_part_that_the_value_fits(shape: dict[str, Any]) -> None:
    disc = {"type": "object", "properties": {"kind": {"const": "disc"}, "r": INT}, "required": ["kind", "r"]}
    label = {"type": ["string", "null"]}
    box = {"type": "object", "properties": {"kind": {"const": "box"}, "label": label}, "required": ["kind", "label"]}
    parameters = Parameters({"properties": {"shape": {"anyOf": [disc, box]}}}, strict=True)
    kept = {"kind": "box", "label": None} if shape["kind"] == "box" else shape
    assert parameters.without_nulls({"shape": shape}) == {"shape": kept}


def test_nulls_of_a_union_in_itself_are_found_at_any_depth() -> None:
    def part(kind: str) -> dict[str, Any]:
        either = {"anyOf": [{"$ref": "#/$defs/leaf"}, {"$ref": "#/$defs/node"}]}
        return {"type": "object", "properties": {"kind": {"const": kind}, "child": either}}

    schema = {"properties": part("node")["properties"], "$defs": {kind: part(kind) for kind in ("leaf", "node")}}
    filled: dict[str, Any] = {"kind": "leaf", "other": None}
    meant: dict[str, Any] = {"kind": "leaf"}
    for _ in range(60):
        filled, meant = {"kind": "node", "child": filled, "other": None}, {"kind": "node", "child": meant}
    assert Parameters(schema, strict=True).without_nulls(filled) == meant


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ({"n": 1, "s": None, "other": None}, {"n": 1}),
        ({"maybe": None, "either": None, "any": None}, {"maybe": None, "either": None, "any": None}),
        ({"ints": None, "counts": {"pens": 3, "ink": None}}, {"counts": {"pens": 3}}),
        ({"o": {"n": None, "deep": [{"n": 1, "x": None}], "x": None}}, {"o": {"deep": [{"n": 1}]}}),
        ({"broken": None, "free": {"x": None}}, {"broken": None, "free": {"x": None}}),
        ({"perhaps": {"n": 1, "x": None}}, {"perhaps": {"n": 1}}),
    ],
)
def test_nulls_that_the_schema_does_not_allow_are_left_out(values: dict[str, Any], kept: dict[str, Any]) -> None:
    more = {
        "broken": {"$ref": "#/nowhere"},
        "free": {"type": "object"},
        "perhaps": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/pair"}]},
    }
    schema = {**SCHEMA, "properties": {**SCHEMA["properties"], **more}}
    assert Parameters(schema, strict=False).without_nulls(values) == kept


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"n": "seven"}, "n: 'seven' is not of type 'integer'"),
        ({"n": "7.5"}, "n: '7.5' is not of type 'integer'"),
        ({"n": True}, "n: True is not of type 'integer'"),
        ({"n": "1e400"}, "n: '1e400' is not of type 'integer'"),
        ({"x": "NaN"}, "x: 'NaN' is not of type 'number'"),
        ({"b": 1}, "b: 1 is not of type 'boolean'"),
        ({"s": 7}, "s: 7 is not of type 'string'"),
        ({"maybe": "deep"}, "maybe: 'deep' is not of type 'integer', 'null'"),
        ({"either": "x"}, "either: 'x' is not of type 'integer', 'array', 'null'"),
        ({"ints": [1, "two"]}, "ints: 1: 'two' is not of type 'integer'"),
        ({"words": '["pen", "in'}, "words: .* is not of type 'array'"),
        ({"o": {"deep": [{"n": "x"}]}}, "o: deep: 0: n: 'x' is not of type 'integer'"),
        ({"kind": "c"}, "kind: 'c' is not one of"),
        ({"other": 1}, "'other' was unexpected"),
        ({"x": float("nan")}, "x.*nan is not a number that JSON can write"),
        ({"any": [{"a": float("-inf")}]}, "'any': 'a': -inf is not a number"),
        ({"any": 1 << 5000}, "'any': the number is too long"),
        ({"s": b"x"}, "a bytes, which is not JSON"),
        ('{"x": 1e400}', "inf is not a number"),
        ("x = {1, 2}", "a set, which is not JSON"),
        ({"n": "x" * 10_000}, r"n: 'x{79}\.\.\. is not of type"),
    ],
)
def test_what_cannot_be_made_to_fit_names_the_argument_the_value_and_the_type(given: Any, message: str) -> None:
    with pytest.raises(ArgumentsError, match=message) as caught:
        fit(given)
    assert len(str(caught.value)) < 1000


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"any": [value]}
    return value


@pytest.mark.parametrize(
    "given",
    [
        nested(MAX_DEPTH),
        '{"any": ' * 100_000,
        '{"any": ' + "[" * 900 + "]" * 900 + "}",
        "any: " + "-" * 100_000 + "1",
        "any: " + "(" * 100_000,
        "```" + " " * 200_000 + "x",
        "\n" * 200_000 + "x",
        ", any" * 50_000,
        '{"n": ' + "9" * 100_000 + "}",
        '{"n": 0x' + "f" * 10_000 + "}",
    ],
)
def test_i9_no_nesting_and_no_length_raises_out_or_hangs(given: Any) -> None:
    outcome = outcome_of(PARAMETERS, given)
    assert not isinstance(outcome, str) or len(outcome) < 1000


def test_long_lists_are_no_nesting() -> None:
    assert len(fit({"ints": ["1"] * 20_000, "o": {"deep": [{"n": 1}] * 20_000}}).values["ints"]) == 20_000


def test_a_long_list_in_text_is_no_nesting() -> None:
    assert fit({"ints": json.dumps(["1"] * 20_000)}).values["ints"] == [1] * 20_000


@pytest.mark.parametrize(
    "given",
    [
        {"words": ["w"] * (MOST.values + 1)},
        {"s": "x" * (MOST.characters + 1)},
        "s: " + "x" * MOST.characters,
        {"ints": str([1] * MOST.values)},
    ],
)
def test_arguments_that_are_too_large_are_refused_saying_so(given: Any) -> None:
    with pytest.raises(ArgumentsError, match="too large, at most 100000 values and 1000000 characters"):
        fit(given)


def test_what_fits_as_it_is_asks_no_validator(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a hundred times as long."""
    monkeypatch.setattr(PARAMETERS, "_validator", None)
    values = {"ints": [1] * 16_000, "counts": {str(number): number for number in range(16_000)}, "either": [1, 2]}
    plain = Parameters({"properties": {name: SCHEMA["properties"][name] for name in values}}, strict=True)
    monkeypatch.setattr(plain, "_validator", None)
    assert plain.fit(values) == Arguments(values)


def test_pairs_of_one_name_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def plain(text: str) -> str:
        read.append(text)
        return text

    monkeypatch.setattr(argument_text, "_plain", plain)
    assert argument_text.read_arguments("s: 1, " * 10_000, ["s"]) == {"s": "1"}
    assert read == ["1"]


def test_small_arguments_are_told_from_large_ones() -> None:
    assert small({"ints": [1] * 200})
    assert small("n: 7")
    assert not small({"ints": [1] * 300})
    assert not small({"s": "x" * 3000})
    assert not small("x" * 3000)


def test_i9_a_schema_that_refers_to_itself_in_two_ways_is_bounded() -> None:
    """Its check is exponential in the depth of the value."""
    tree = {"type": "object", "properties": {"kid": {"anyOf": [{"$ref": "#"}, {"$ref": "#", "required": ["x"]}]}}}
    value: Any = 1
    for _ in range(30):
        value = {"kid": value}
    with pytest.raises(ArgumentsError, match="too many steps"):
        Parameters(tree, strict=False).fit(value)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"s": {"type": "string", "pattern": "^(a+)+$"}}},
        {"properties": {"s": {"$ref": "http://127.0.0.1:9/schema.json"}}},
        {"properties": {"s": {"$ref": "#/$defs/nowhere"}}},
        {"properties": {"s": {"$ref": "#/$defs/loop"}}, "$defs": {"loop": {"$ref": "#/$defs/loop"}}},
        {"$schema": "http://json-schema.org/draft-04/schema#", "$id": "http://127.0.0.1:9/", "properties": {"s": {}}},
        {},
        {"type": "object"},
    ],
)
def test_i9_a_server_s_schema_makes_no_check_hang_and_no_request(schema: dict[str, Any]) -> None:
    values = {"s": "a" * 40 + "!"}
    outcome = outcome_of(Parameters(schema, strict=False), values)
    assert outcome in (Arguments(values), "bad arguments: they are nested too deeply to be checked")


def test_a_big_number_and_a_fraction_to_divide_by_are_left_to_the_tool() -> None:
    found = Parameters({"properties": {"n": {"type": "integer", "multipleOf": 0.5}}}, strict=False).fit({"n": 10**400})
    assert found.values == {"n": 10**400}


TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=[])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)
NAMES = st.sampled_from(sorted(SCHEMA["properties"]))


@given(st.dictionaries(NAMES, TREES, max_size=4) | st.text() | st.builds(str, st.dictionaries(NAMES, TREES)))
def test_i9_whatever_is_sampled_the_arguments_fit_or_the_policy_is_told(given: Any) -> None:
    found = outcome_of(PARAMETERS, given)
    if isinstance(found, str):
        assert 0 < len(found) < 2000
        return
    json.dumps(found.values, allow_nan=False, ensure_ascii=False).encode("utf-8")
    assert fit(found.values).values == found.values, "what fits is not touched again"


VALUES = {
    "n": st.integers(-(2**100), 2**100),
    "x": st.floats(allow_nan=False, allow_infinity=False),
    "b": st.booleans(),
    "ints": st.lists(st.integers(), max_size=4),
    "maybe": st.none() | st.integers(),
    "o": st.fixed_dictionaries({"n": st.integers()}),
}


@given(st.fixed_dictionaries({}, optional=VALUES))
def test_what_is_written_as_text_is_what_was_meant(values: dict[str, Any]) -> None:
    quoted = {name: json.dumps(value) for name, value in values.items()}
    for written in (quoted, json.dumps(values), json.dumps(quoted), str(values), json.dumps(values)[1:-1]):
        found = fit(written).values
        assert found == values
        for name, value in found.items():
            assert name != "n" or type(value) is int
            assert not isinstance(value, float) or math.isfinite(value)


@given(st.dictionaries(NAMES, TREES, max_size=4))
def test_what_is_valid_is_not_changed_in_value(values: dict[str, Any]) -> None:
    """Whatever the schema takes as it is goes through as it is; 2.0 for an integer is the same number."""
    try:
        text = json.dumps(values, allow_nan=False)
        text.encode("utf-8")
        json.dumps(values, ensure_ascii=False).encode("utf-8")
    except ValueError:
        return
    if Draft202012Validator(SCHEMA).is_valid(values) and "maybe" not in values:
        assert fit(values).values == values


PLAIN_SCHEMAS = st.recursive(
    st.sampled_from(
        [
            True,
            {},
            {"type": ["integer", "null"]},
            {"enum": ["a", None]},
            *({"type": name} for name in ("string", "boolean", "integer", "number", "array", "object", "null")),
        ]
    ),
    lambda parts: st.one_of(
        st.builds(lambda part: {"type": "array", "items": part}, parts),
        st.builds(lambda several: {"anyOf": several}, st.lists(parts, min_size=1, max_size=3)),
        st.builds(
            lambda part, others, required: {
                "properties": {"a": part},
                "additionalProperties": others,
                "required": required,
            },
            parts,
            st.one_of(st.booleans(), parts),
            st.sampled_from([[], ["a"]]),
        ),
    ),
    max_leaves=6,
)


@given(
    PLAIN_SCHEMAS,
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.sampled_from(["a", "b", 1.0, 2.5])),
        lambda parts: st.one_of(st.lists(parts, max_size=3), st.dictionaries(st.sampled_from("ab"), parts)),
        max_leaves=6,
    ),
)
def test_the_fast_check_decides_as_the_validator(schema: Any, value: Any) -> None:
    exact, as_written = plain_check(schema, as_written=False), plain_check(schema, as_written=True)
    assert exact is not None
    assert as_written is not None
    valid = Draft202012Validator(schema).is_valid(value)
    assert exact(value) == valid
    assert valid or not as_written(value)
