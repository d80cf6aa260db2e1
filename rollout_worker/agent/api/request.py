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
from slipstream.rollout_worker.agent.api.messages import MAX_FAULTS, ApiError, ApiErrorKind, refusal
from slipstream.rollout_worker.tools.base import NAME

# OpenAI's bound on the number of tools.
MAX_TOOLS = 128

_MAX_BYTES = 256 * 1024

_STRICT = "the policy's arguments are not held to the schema; give false, and check them in the agent"

MAX_MESSAGES = 4096

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


def read_tools(tools: Any, faults: list[ApiErrorKind], unenforced: list[ApiErrorKind]) -> list[dict[str, Any]]:
    """Return the schemas of a request's tools. Faults are added to `faults`, what is not followed to `unenforced`."""
    if tools is None:
        return []
    if not isinstance(tools, list):
        faults.append(ApiErrorKind("tools", "give a list of tools", "invalid_type"))
        return []
    if len(tools) > MAX_TOOLS:
        faults.append(ApiErrorKind("tools", f"{len(tools)} of them; at most {MAX_TOOLS} are shown"))
        return []
    names: set[str] = set()
    read = [_read(tool, f"tools[{number}]", names, faults, unenforced) for number, tool in enumerate(tools)]
    schemas = [schema for schema in read if schema is not None]
    if len(msgspec.json.encode(schemas)) > _MAX_BYTES:
        faults.append(ApiErrorKind("tools", f"their schemas are more than {_MAX_BYTES} bytes; shorten them"))
    return schemas


def schemas_digest(tools: Sequence[dict[str, Any]]) -> bytes:
    """Return a digest of schemas in their order, in which a prompt shows them."""
    return hashlib.blake2b(msgspec.json.encode(tools), digest_size=16).digest()


def _read(
    tool: Any, where: str, names: set[str], faults: list[ApiErrorKind], unenforced: list[ApiErrorKind]
) -> dict[str, Any] | None:
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
        faults.append(ApiErrorKind(where, "only tools of type function are known: {type, function: {name, ...}}"))
        return None
    function = {key: value for key, value in tool["function"].items() if value is not None}
    name, description = function.get("name"), function.get("description", "")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        faults.append(ApiErrorKind(f"{where}.function.name", "give 1 to 128 ASCII letters, digits, _, - and dots"))
        return None
    if name in names:
        faults.append(ApiErrorKind(f"{where}.function.name", f"two tools are named {name!r}; rename one"))
    names.add(name)
    if not isinstance(description, str):
        faults.append(ApiErrorKind(f"{where}.function.description", "give text", "invalid_type"))
    if not isinstance(function.get("parameters", {}), dict):
        faults.append(ApiErrorKind(f"{where}.function.parameters", "give a JSON schema", "invalid_type"))
    if function.pop("strict", False) is not False:
        unenforced.append(ApiErrorKind(f"{where}.function.strict", _STRICT, "unsupported_value"))
    empty = {"type": "object", "properties": {}}
    # Templates write all fields of a function in their order.
    function = {"description": description, **function, "parameters": function.get("parameters") or empty}
    return {"type": "function", "function": {"name": name, **function}}


@dataclass(frozen=True, slots=True)
class Asked:
    """The checked parameters of a request.

    Attributes:
        messages: The messages, not read yet.
        tools: JSON schemas for a chat format; empty where the policy is to call none.
        max_tokens: Maximum tokens of one answer; None for as many as the run allows.
        stop: Texts that end an answer.
        n: Number of answers.
        usage: Whether a streamed answer ends with the usage.
        form: What the answer is held to.
        must_call: Names of tools; the answer is to be one call of one of them. Empty where it may be anything.
        unenforced: What was asked for and is not followed, by the name under which it is counted.
    """

    messages: list[Any]
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


def read_parameters(
    body: Any,
    model: str,
    rollout: RolloutSection,
    temperature: float,
    refuse: bool = False,
    others: Sequence[ApiErrorKind] = (),
    unfollowed: Sequence[ApiErrorKind] = (),
    renamed: Callable[[str], str] = str,
) -> Asked:
    """Read a request's body, decoded from JSON, or what another API's body says in the words of chat completions.

    Args:
        temperature: The episode's.
        refuse: Whether what cannot be followed is a fault (`agent.unenforced`).
        others: Faults that were found before.
        unfollowed: What is not followed and was found before.
        renamed: Maps the place of a fault here to its place in the other API's body.

    Raises:
        ApiError: It names all faults.
    """
    if not isinstance(body, dict):
        raise ApiError(400, f"the body is a {type(body).__name__}; send a JSON object", "invalid_body")
    given = {name: value for name, value in body.items() if value is not None}
    _check_model(given, model)
    faults: list[ApiErrorKind] = []
    unenforced = faults if refuse else []
    reader = _Reader(given, faults)
    for name in given:
        if name in _UNFOLLOWED:
            unenforced.append(ApiErrorKind(name, _UNFOLLOWED[name], "unsupported_parameter"))
        elif name in REFUSED_PARAMETERS:
            faults.append(ApiErrorKind(name, REFUSED_PARAMETERS[name], "unsupported_parameter"))
        elif name not in READ_PARAMETERS and name not in HARMLESS_PARAMETERS and name not in RUN_PARAMETERS:
            faults.append(ApiErrorKind(_short(name), _unknown(name), "unknown_parameter"))
    _check_distribution(given, rollout, temperature, faults, unenforced)
    form = _form(given, rollout, faults, unenforced)
    tools = read_tools(given.get("tools"), faults, unenforced)
    choice = given.get("tool_choice", "auto")
    must_call = _must_call(choice, tools, rollout, faults, unenforced)
    _check_form(given, must_call, faults, unenforced)
    told = {_counted(each.param): f"{each.param}: {each.text}" for each in unfollowed}
    told |= {_counted(each.param): f"{renamed(each.param)}: {each.text}" for each in unenforced}
    asked = Asked(
        messages=reader.messages(),
        tools=[] if choice == "none" else tools,
        max_tokens=reader.max_tokens(),
        stop=reader.stop(),
        n=reader.number("n", MAX_ANSWERS) or 1,
        logprobs=reader.flag("logprobs"),
        stream=reader.flag("stream"),
        usage=reader.usage(),
        form=form,
        must_call=must_call,
        unenforced={} if refuse else told,
    )
    faults = [*others, *(unfollowed if refuse else ()), *(replace(each, param=renamed(each.param)) for each in faults)]
    if faults:
        more = [ApiErrorKind("others", f"{len(faults) - MAX_FAULTS} more")] if len(faults) > MAX_FAULTS else []
        raise refusal([*faults[:MAX_FAULTS], *more])
    return asked


def _check_model(given: Mapping[str, Any], model: str) -> None:
    asked = given.get("model")
    if asked != model:
        raise ApiError(
            404,
            f"the model {_short(asked)} does not exist here: this endpoint is the policy's, {model!r}; a judge or "
            f"another model has an endpoint of its own",
            "model_not_found",
            ["model"],
        )


def _counted(param: str) -> str:
    """Return the name under which a parameter that is not followed is counted: of a tool's field, the field's."""
    return param.rpartition(".")[2]


def _check_distribution(
    given: Mapping[str, Any],
    rollout: RolloutSection,
    temperature: float,
    faults: list[ApiErrorKind],
    unenforced: list[ApiErrorKind],
) -> None:
    for name in RUN_PARAMETERS:
        value = given.get(name)
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
        (unenforced if _is_number(value) else faults).append(ApiErrorKind(name, text, "unsupported_value"))
    if given.get("logit_bias"):
        faults.append(ApiErrorKind("logit_bias", f"{_CONSTRAINED}; leave it out", "unsupported_parameter"))


def _form(
    given: Mapping[str, Any], rollout: RolloutSection, faults: list[ApiErrorKind], unenforced: list[ApiErrorKind]
) -> StructuredOutputs | None:
    """Return what `response_format` holds the answer to, if the learner can know what that leaves to sample."""
    form = given.get("response_format", {"type": "text"})
    if form == {"type": "text"}:
        return None
    kind = form.get("type") if isinstance(form, dict) else form
    named = form.get("json_schema") if kind == "json_schema" else None
    schema = named.get("schema") if isinstance(named, dict) else None
    if kind not in ("json_schema", "json_object") or (kind == "json_schema" and not isinstance(schema, dict)):
        text = f"{_short(kind)}; give text, json_object, or json_schema with a schema"
        faults.append(ApiErrorKind("response_format", text, "unsupported_value"))
        return None
    if not keeps_mask(rollout):
        text = f"{kind}: answers are not held to a form; set rollout.top_k = 64 in the run file, and they are"
        unenforced.append(ApiErrorKind("response_format", text, "unsupported_value"))
        return None
    return StructuredOutputs(json_object=True) if schema is None else StructuredOutputs(json=schema)


def _must_call(
    choice: Any,
    tools: Sequence[dict[str, Any]],
    rollout: RolloutSection,
    faults: list[ApiErrorKind],
    unenforced: list[ApiErrorKind],
) -> tuple[str, ...]:
    """Return the names of the tools of which `tool_choice` asks for one, if the learner can know what that leaves."""
    if choice in ("auto", "none"):
        return ()
    names = tuple(tool["function"]["name"] for tool in tools)
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    if isinstance(function, dict):
        name = function.get("name")
        if name not in names and not faults:
            faults.append(ApiErrorKind("tool_choice", f"{_short(name)}: no tool has this name; name one of the tools"))
        names = tuple(each for each in names if each == name)
    elif choice != "required":
        if not isinstance(choice, dict) or not isinstance(choice.get("type"), str):
            text = f"{_short(choice)}; give auto, none, required, or {{type: function, function: {{name: ...}}}}"
            faults.append(ApiErrorKind("tool_choice", text, "invalid_type"))
            return ()
        names = ()
    if names and keeps_mask(rollout):
        return names
    remedy = "set rollout.top_k = 64 in the run file, and it is, or give auto" if names else "give auto"
    text = f"{_short(choice)}: the policy is not made to call a tool; {remedy}, and say in a message what is wanted"
    unenforced.append(ApiErrorKind("tool_choice", text, "unsupported_value"))
    return ()


def _check_form(
    given: Mapping[str, Any], must_call: Sequence[str], faults: list[ApiErrorKind], unenforced: list[ApiErrorKind]
) -> None:
    """Check that the answer is to be text, with any number of calls; `must_call`: with one call of these."""
    if given.get("modalities", ["text"]) != ["text"]:
        faults.append(ApiErrorKind("modalities", "the policy writes text alone; leave it out", "unsupported_value"))
    parallel = given.get("parallel_tool_calls", True)
    if not isinstance(parallel, bool):
        faults.append(ApiErrorKind("parallel_tool_calls", f"{_short(parallel)}; give true or false", "invalid_type"))
    elif not parallel and given.get("tools") and not must_call:
        text = "the policy may always write several calls; leave it out, and take the first"
        unenforced.append(ApiErrorKind("parallel_tool_calls", text, "unsupported_value"))
    if given.get("top_logprobs", 0) != 0:
        text = "only the sampled tokens' log-probs are known; leave it out, logprobs alone gives those"
        faults.append(ApiErrorKind("top_logprobs", text, "unsupported_value"))


class _Reader:
    """Reads values of a request, and adds wrong ones to `faults`."""

    def __init__(self, given: Mapping[str, Any], faults: list[ApiErrorKind]) -> None:
        self._given = given
        self._faults = faults

    def number(self, name: str, most: int | None = None) -> int | None:
        value = self._given.get(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or value < 1 or (most is not None and value > most):
            bound = "" if most is None else f" and at most {most}"
            self._faults.append(ApiErrorKind(name, f"{_short(value)}; give a whole number, at least 1{bound}"))
            return None
        return value

    def flag(self, name: str) -> bool:
        value = self._given.get(name, False)
        if not isinstance(value, bool):
            self._faults.append(ApiErrorKind(name, f"{_short(value)}; give true or false", "invalid_type"))
            return False
        return value

    def max_tokens(self) -> int | None:
        found = [self.number(name) for name in ("max_completion_tokens", "max_tokens")]
        return min((number for number in found if number is not None), default=None)

    def messages(self) -> list[Any]:
        value = self._given.get("messages")
        if not isinstance(value, list) or not value:
            self._faults.append(ApiErrorKind("messages", "give a list of at least one message", "invalid_type"))
            return []
        if len(value) > MAX_MESSAGES:
            self._faults.append(ApiErrorKind("messages", f"{len(value)} of them; at most {MAX_MESSAGES} are read"))
        return value

    def stop(self) -> tuple[str, ...]:
        value = self._given.get("stop", [])
        texts = [value] if isinstance(value, str) else value
        fits: Callable[[Any], bool] = lambda text: isinstance(text, str) and 0 < len(text) <= _STOP_CHARACTERS  # noqa: E731
        if not isinstance(texts, list) or len(texts) > MAX_STOPS or not all(map(fits, texts)):
            text = (
                f"{_short(value) or 'an empty text'}; give a text, or at most {MAX_STOPS} of them, none of them empty"
            )
            self._faults.append(ApiErrorKind("stop", text))
            return ()
        return tuple(texts)

    def usage(self) -> bool:
        options = self._given.get("stream_options")
        if options is None:
            return False
        if not isinstance(options, dict) or not self._given.get("stream"):
            self._faults.append(ApiErrorKind("stream_options", "an object, given where stream is true"))
            return False
        for name, value in options.items():
            # OpenAI pads chunks against eavesdroppers where it is true; here it changes nothing.
            if name not in ("include_usage", "include_obfuscation") or not isinstance(value, bool | None):
                self._faults.append(
                    ApiErrorKind(f"stream_options.{_short(name)}", "only include_usage is known, true or false")
                )
        return options.get("include_usage") is True


def _unknown(name: str) -> str:
    known = sorted(READ_PARAMETERS | HARMLESS_PARAMETERS | {*RUN_PARAMETERS, *_UNFOLLOWED})
    close = nearest(name, known)
    return f"it is not known here; did you mean {close}?" if close else "it is not known here; leave it out"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _short(value: Any) -> str:
    """Shorten a value for an error; a text has no quotes, as it may be a parameter's name."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
