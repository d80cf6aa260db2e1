"""Reads a request's parameters and tools. Ignores none that matters without a word.

The learner trains on log-probs that were sampled at the run's temperature from the run's distribution. A parameter that
only ends an answer sooner, or does not change it, is honoured. One that asks for another distribution is not: what is
sampled is the run's, and the agent's author is told, or the request is refused (`agent.unenforced`). A form of the
answer is held where sampling masks are recorded (`rollout.top_k`), as the learner then knows what was left to sample.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from slipstream.protocol.config import RolloutSection
from slipstream.protocol.config.sections.sampling import StructuredOutputs, keeps_mask
from slipstream.protocol.config.text import nearest
from slipstream.protocol.versions import SERVED_MODEL_NAME
from slipstream.rollout_worker.agent.api.messages import ApiError, Faults, refusal
from slipstream.rollout_worker.tools.base import NAME

# OpenAI's bound on the number of tools.
MAX_TOOLS = 128

_MAX_BYTES = 256 * 1024

_STRICT = "the policy's arguments are not held to the schema; give false, and check them in the agent"

# Maximum answers to one request, and stop texts; OpenAI's bounds are 128 and 4.
MAX_ANSWERS = 16

MAX_STOPS = 16

_STOP_CHARACTERS = 1000

_SHOWN_CHARACTERS = 60

# Labels, and hints about price and speed: they do not change an answer.
HARMLESS_PARAMETERS = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prediction"),
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
    }
)

# Parameters of the distribution: accepted where they have the run's own value.
RUN_PARAMETERS = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)

_CONSTRAINED = "it would change what the policy samples, and so what log-probs mean"

# Parameters that are not followed, and the remedy.
_UNFOLLOWED: Mapping[str, str] = {
    "seed": "a row would be sampled alike each time that it comes; leave it out",
    "reasoning_effort": "set chat.chat_template_kwargs in the run file, if the model knows efforts; leave it out",
    "verbosity": "say in a message what is wanted; leave it out",
}

# Parameters that are never honoured, and the remedy.
REFUSED_PARAMETERS: Mapping[str, str] = {
    "functions": "it is deprecated; give tools",
    "function_call": "it is deprecated; give tool_choice",
    "audio": "the policy writes text alone; leave it out",
    "web_search_options": "the policy searches nothing; give a tool that does",
    "moderation": "nothing is moderated here; leave it out",
}

READ_PARAMETERS = frozenset(
    {
        *("messages", "model", "tools", "tool_choice", "parallel_tool_calls", "n", "stop", "stream", "stream_options"),
        *("max_tokens", "max_completion_tokens", "logprobs", "top_logprobs", "response_format", "logit_bias"),
        "modalities",
    }
)


@dataclass(frozen=True, slots=True)
class Reading:
    """What a request is checked against.

    Attributes:
        temperature: The episode's.
        refuse: Whether what cannot be followed is a fault (`agent.unenforced`).
    """

    rollout: RolloutSection
    temperature: float
    refuse: bool = False


@dataclass(frozen=True, slots=True)
class Asked:
    """The checked parameters of a request.

    Attributes:
        tools: JSON schemas for a chat format; empty where the policy is to call none.
        max_tokens: Maximum tokens of one answer; None for as many as the run allows.
        stop: Texts that end an answer.
        n: Number of answers.
        usage: Whether a streamed answer ends with the usage.
        form: What the answer is held to.
        must_call: Names of tools; the answer is to be one call of one of them. Empty where it may be anything.
        unenforced: What was asked for and is not followed, by the name under which it is counted.
    """

    tools: list[dict[str, Any]] = field(default_factory=list)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    logprobs: bool = False
    stream: bool = False
    usage: bool = False
    form: StructuredOutputs | None = None
    must_call: tuple[str, ...] = ()
    unenforced: Mapping[str, str] = field(default_factory=dict)


def as_object(body: Any) -> dict[str, Any]:
    """Return the fields of a body that are not null. Raises `ApiError`."""
    if not isinstance(body, dict):
        raise ApiError(400, f"the body is a {type(body).__name__}; send a JSON object", "invalid_body")
    return {name: value for name, value in body.items() if value is not None}


def schemas_digest(tools: Sequence[dict[str, Any]]) -> bytes:
    """Return a digest of schemas in their order, in which a prompt shows them."""
    return hashlib.blake2b(msgspec.json.encode(tools), digest_size=16).digest()


def read_parameters(
    given: Mapping[str, Any], reading: Reading, others: Faults, renamed: Callable[[str], str] = str
) -> Asked:
    """Read a request's fields but for its messages, or what another API's request says in the words of chat
    completions.

    Args:
        others: Faults that were found before.
        renamed: Maps the place of a fault here to its place in the other API's body.

    Raises:
        ApiError: It names all faults.
    """
    if given.get("model") != SERVED_MODEL_NAME:
        raise ApiError(
            404,
            f"the model {_short(given.get('model'))} does not exist here: this endpoint is the policy's, "
            f"{SERVED_MODEL_NAME!r}; a judge or another model has its own endpoint",
            "model_not_found",
            ["model"],
        )
    reader = _Reader({name: value for name, value in given.items() if value is not None}, reading)
    asked = reader.read()
    found = reader.faults
    # Of a tool's field, the field's name is counted.
    told = {each.param.rpartition(".")[2]: f"{each.param}: {each.text}" for each in others.unfollowed}
    told |= {each.param.rpartition(".")[2]: f"{renamed(each.param)}: {each.text}" for each in found.unfollowed}
    own = [*found.wrong, *(found.unfollowed if reading.refuse else ())]
    faults = [*others.wrong, *(others.unfollowed if reading.refuse else ())]
    if faults := faults + [replace(each, param=renamed(each.param)) for each in own]:
        raise refusal(faults)
    return replace(asked, unenforced=told)


class _Reader:
    """Reads the values of a request that are not null. Wrong ones are added to `faults`."""

    def __init__(self, given: Mapping[str, Any], reading: Reading) -> None:
        self.faults = Faults()
        self._given = given
        self._reading = reading
        self._keeps_mask = keeps_mask(reading.rollout)

    def read(self) -> Asked:
        self._check_names()
        self._check_distribution()
        form, tools = self._form(), self._tools()
        must_call = self._must_call(tools)
        if not self._flag("parallel_tool_calls", True) and self._given.get("tools") and not must_call:
            text = "the policy may always write several calls; leave it out, and take the first"
            self.faults.add_unfollowed("parallel_tool_calls", text)
        most = [self._number(name) for name in ("max_completion_tokens", "max_tokens")]
        return Asked(
            tools=[] if self._given.get("tool_choice") == "none" else tools,
            max_tokens=min((number for number in most if number is not None), default=None),
            stop=self._stop(),
            n=self._number("n", MAX_ANSWERS) or 1,
            logprobs=self._flag("logprobs"),
            stream=self._flag("stream"),
            usage=self._usage(),
            form=form,
            must_call=must_call,
        )

    def _check_names(self) -> None:
        for name in self._given:
            if name in _UNFOLLOWED:
                self.faults.add_unfollowed(name, _UNFOLLOWED[name], "unsupported_parameter")
            elif name in REFUSED_PARAMETERS:
                self.faults.add(name, REFUSED_PARAMETERS[name], "unsupported_parameter")
            elif name not in READ_PARAMETERS and name not in HARMLESS_PARAMETERS and name not in RUN_PARAMETERS:
                close = nearest(name, sorted(READ_PARAMETERS | HARMLESS_PARAMETERS | {*RUN_PARAMETERS, *_UNFOLLOWED}))
                remedy = f"did you mean {close}?" if close else "leave it out"
                self.faults.add(_short(name), f"it is not known here; {remedy}", "unknown_parameter")

    def _check_distribution(self) -> None:
        rollout, temperature = self._reading.rollout, self._reading.temperature
        for name in RUN_PARAMETERS:
            value = self._given.get(name)
            own = temperature if name == "temperature" else getattr(rollout, name)
            if value is None or (_is_number(value) and value == own):
                continue
            if name == "top_k" and own == 0 and value == -1:  # Servers, too, take -1 and 0 for all tokens.
                continue
            setting, remedy = f"rollout.{name}", "leave it out, or set it in the run file"
            if name == "temperature":  # The only parameter that an evaluation can set.
                setting = setting if own == rollout.temperature else "eval.temperature"
                remedy = "leave it out, or give endpoint.temperature"
            text = (
                f"{_short(value)} is not {own:g}, which this episode is sampled at ({setting}), and {_CONSTRAINED}; "
                f"{remedy}"
            )
            add = self.faults.add_unfollowed if _is_number(value) else self.faults.add
            add(name, text, "unsupported_value")
        if self._given.get("logit_bias"):
            self.faults.add("logit_bias", f"{_CONSTRAINED}; leave it out", "unsupported_parameter")
        if self._given.get("modalities", ["text"]) != ["text"]:
            self.faults.add("modalities", "the policy writes text alone; leave it out", "unsupported_value")
        if self._given.get("top_logprobs", 0) != 0:
            text = "only the sampled tokens' log-probs are known; leave it out, logprobs alone gives those"
            self.faults.add("top_logprobs", text, "unsupported_value")

    def _form(self) -> StructuredOutputs | None:
        """Return what `response_format` holds the answer to, if the learner can know what that leaves to sample."""
        form = self._given.get("response_format", {"type": "text"})
        if form == {"type": "text"}:
            return None
        kind = form.get("type") if isinstance(form, dict) else form
        named = form.get("json_schema") if kind == "json_schema" else None
        schema = named.get("schema") if isinstance(named, dict) else None
        if kind not in ("json_schema", "json_object") or (kind == "json_schema" and not isinstance(schema, dict)):
            text = f"{_short(kind)}; give text, json_object, or json_schema with a schema"
            self.faults.add("response_format", text, "unsupported_value")
            return None
        if not self._keeps_mask:
            text = f"{kind}: answers are not held to a form; set rollout.top_k = 64 in the run file, and they are"
            self.faults.add_unfollowed("response_format", text)
            return None
        return StructuredOutputs(json_object=True) if schema is None else StructuredOutputs(json=schema)

    def _tools(self) -> list[dict[str, Any]]:
        """Return the schemas of the tools."""
        tools = self._given.get("tools", [])
        if not isinstance(tools, list):
            self.faults.add("tools", "give a list of tools", "invalid_type")
            return []
        if len(tools) > MAX_TOOLS:
            self.faults.add("tools", f"{len(tools)} of them; at most {MAX_TOOLS} are shown")
            return []
        names: set[str] = set()
        read = [self._tool(tool, f"tools[{number}]", names) for number, tool in enumerate(tools)]
        schemas = [schema for schema in read if schema is not None]
        if len(msgspec.json.encode(schemas)) > _MAX_BYTES:
            self.faults.add("tools", f"their schemas are more than {_MAX_BYTES} bytes; shorten them")
        return schemas

    def _tool(self, tool: Any, where: str, names: set[str]) -> dict[str, Any] | None:
        if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
            self.faults.add(where, "only tools of type function are known: {type, function: {name, ...}}")
            return None
        function = {key: value for key, value in tool["function"].items() if value is not None}
        where = f"{where}.function"
        name, description = function.get("name"), function.get("description", "")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            self.faults.add(f"{where}.name", "give 1 to 128 ASCII letters, digits, _, - and dots")
            return None
        if name in names:
            self.faults.add(f"{where}.name", f"two tools are named {name!r}; rename one")
        names.add(name)
        if not isinstance(description, str):
            self.faults.add(f"{where}.description", "give text", "invalid_type")
        if not isinstance(function.get("parameters", {}), dict):
            self.faults.add(f"{where}.parameters", "give a JSON schema", "invalid_type")
        if function.pop("strict", False) is not False:
            self.faults.add_unfollowed(f"{where}.strict", _STRICT)
        empty = {"type": "object", "properties": {}}
        # Templates write all fields of a function in their order.
        function = {"description": description, **function, "parameters": function.get("parameters") or empty}
        return {"type": "function", "function": {"name": name, **function}}

    def _must_call(self, tools: Sequence[dict[str, Any]]) -> tuple[str, ...]:
        """Return the names of the tools of which `tool_choice` asks for one, if the learner can know what that
        leaves."""
        choice = self._given.get("tool_choice", "auto")
        if choice in ("auto", "none"):
            return ()
        names = tuple(tool["function"]["name"] for tool in tools)
        function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
        if isinstance(function, dict):
            name = function.get("name")
            if name not in names and not self.faults.wrong:
                self.faults.add("tool_choice", f"{_short(name)}: no tool has this name; name one of the tools")
                return ()
            names = tuple(each for each in names if each == name)
        elif choice != "required":
            if not isinstance(choice, dict) or not isinstance(choice.get("type"), str):
                text = f"{_short(choice)}; give auto, none, required, or {{type: function, function: {{name: ...}}}}"
                self.faults.add("tool_choice", text, "invalid_type")
                return ()
            names = ()
        if names and self._keeps_mask:
            return names
        remedy = "set rollout.top_k = 64 in the run file, and it is, or give auto" if names else "give auto"
        text = f"{_short(choice)}: the policy is not made to call a tool; {remedy}, and say in a message what is wanted"
        self.faults.add_unfollowed("tool_choice", text)
        return ()

    def _number(self, name: str, most: int | None = None) -> int | None:
        value = self._given.get(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or value < 1 or (most is not None and value > most):
            bound = "" if most is None else f" and at most {most}"
            self.faults.add(name, f"{_short(value)}; give a whole number, at least 1{bound}")
            return None
        return value

    def _flag(self, name: str, default: bool = False) -> bool:
        value = self._given.get(name, default)
        if not isinstance(value, bool):
            self.faults.add(name, f"{_short(value)}; give true or false", "invalid_type")
            return default
        return value

    def _stop(self) -> tuple[str, ...]:
        value = self._given.get("stop", [])
        texts = [value] if isinstance(value, str) else value
        fits: Callable[[Any], bool] = lambda text: isinstance(text, str) and 0 < len(text) <= _STOP_CHARACTERS  # noqa: E731
        if not isinstance(texts, list) or len(texts) > MAX_STOPS or not all(map(fits, texts)):
            shown = _short(value) or "an empty text"
            self.faults.add("stop", f"{shown}; give a text, or at most {MAX_STOPS} of them, none of them empty")
            return ()
        return tuple(texts)

    def _usage(self) -> bool:
        options = self._given.get("stream_options", {})
        if not isinstance(options, dict) or ("stream_options" in self._given and not self._given.get("stream")):
            self.faults.add("stream_options", "an object, given where stream is true")
            return False
        for name, value in options.items():
            # OpenAI pads chunks against eavesdroppers where it is true; here it changes nothing.
            if name not in ("include_usage", "include_obfuscation") or not isinstance(value, bool | None):
                self.faults.add(f"stream_options.{_short(name)}", "only include_usage is known, true or false")
        return options.get("include_usage") is True


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _short(value: Any) -> str:
    """Shorten a value for an error; a text has no quotes, as it may be a parameter's name."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
