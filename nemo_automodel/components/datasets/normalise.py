# SPDX-License-Identifier: Apache-2.0
"""A raw record in any of the usual spellings -> role/content messages and tools."""

from __future__ import annotations

import json
from typing import Any, Mapping

COLUMNS = ("messages", "conversations", "conversation")
# Spellings of roles -> the four that chat templates know. Other roles of role/content rows are left to the template.
ROLES = {
    "human": "user", "user": "user", "prompter": "user", "gpt": "assistant", "assistant": "assistant",
    "chatgpt": "assistant", "bot": "assistant", "model": "assistant", "function_call": "assistant",
    "function-call": "assistant", "system": "system", "tool": "tool", "observation": "tool",
    "function_response": "tool", "function-response": "tool", "function": "tool",
}  # fmt: skip
CALL_ROLES = ("function_call", "function-call")  # ShareGPT: the value is the call as JSON
# One question and one answer in two fields.
PAIRS = (
    ("prompt", "completion"), ("prompt", "response"), ("instruction", "output"), ("instruction", "response"),
    ("question", "answer"), ("query", "response"),
)  # fmt: skip
SYSTEM_FIELDS = ("system", "system_prompt")
# Parts of a message in OpenAI's form; only text can be trained on.
PART_TYPES = ("text", "image", "image_url", "input_image", "audio", "input_audio", "video", "video_url", "file")

Messages = tuple[Mapping[str, Any], ...]


def normalise(raw: Any, column: str | None) -> tuple[Messages, Messages]:
    """The messages of one record, and its tools.

    Raises:
        ValueError: what is wrong with the record, in one clause.
    """
    if not isinstance(raw, Mapping):
        raise ValueError(f"an object is wanted, found {type(raw).__name__}")
    messages = _messages(raw, column)
    system = next((raw[name] for name in SYSTEM_FIELDS if isinstance(raw.get(name), str) and raw[name].strip()), None)
    if system is not None and messages[0]["role"] != "system":
        messages = ({"role": "system", "content": system}, *messages)
    return messages, _tools(raw.get("tools"))


def _messages(raw: Mapping[str, Any], column: str | None) -> Messages:
    name = column or next((c for c in COLUMNS if raw.get(c) is not None), None)
    if name is None:
        pair = next((p for p in PAIRS if all(raw.get(field) is not None for field in p)), None)
        if pair is not None:
            return _pair(raw, *pair)
    if name is None or raw.get(name) is None:
        wanted = f"field {column!r}" if column else "field 'messages' or 'conversations'"
        raise ValueError(f"no {wanted} (it has: {', '.join(map(str, raw)) or 'nothing'})")
    turns = _parsed(raw[name], name)
    if not isinstance(turns, (list, tuple)) or not turns:
        raise ValueError(f"{name!r} must be a list of at least one turn")
    return tuple(_turn(turn, index) for index, turn in enumerate(turns))


def _pair(raw: Mapping[str, Any], asked: str, answered: str) -> Messages:
    """`prompt` and `completion`, each a text or a list of turns; Alpaca's `input` belongs to the instruction."""
    messages: list[Mapping[str, Any]] = []
    for field, role in ((asked, "user"), (answered, "assistant")):
        value = raw[field]
        if isinstance(value, (list, tuple)):
            messages += [_turn(turn, len(messages) + i) for i, turn in enumerate(value)]
        elif isinstance(value, str):
            more = raw.get("input") if field == "instruction" else None
            text = f"{value}\n\n{more}" if isinstance(more, str) and more.strip() else value
            messages.append({"role": role, "content": text})
        else:
            raise ValueError(f"{field!r} is neither text nor a list of turns")
    if not messages:
        raise ValueError(f"{asked!r} and {answered!r} hold no turn")
    return tuple(messages)


def _turn(turn: Any, index: int) -> dict[str, Any]:
    if not isinstance(turn, Mapping):
        raise ValueError(f"turn {index} is no object")
    turn = _without_nulls(turn)
    speaker = turn.get("role", turn.get("from"))
    if not isinstance(speaker, str) or ("role" not in turn and "value" not in turn and "content" not in turn):
        raise ValueError(f"turn {index} has neither role/content nor from/value")
    role = ROLES.get(speaker.strip().lower(), speaker if "role" in turn else None)
    if role is None:
        raise ValueError(f"turn {index} is from {speaker!r}, known are {', '.join(ROLES)}")
    rest = {key: value for key, value in turn.items() if key not in ("from", "value", "role", "content")}
    if "function_call" in rest:  # OpenAI's older form of one call
        rest.setdefault("tool_calls", [rest.pop("function_call")])
    content = turn.get("content", turn.get("value", ""))
    if speaker.strip().lower() in CALL_ROLES:
        rest["tool_calls"], content = _parsed(content, f"turn {index}"), ""
    text = _answer_of(content, index) if role == "tool" else _text_of(content, index)
    if (weight := rest.get("weight", 1)) not in (0, 1):
        raise ValueError(f"the weight of turn {index} is {weight!r}; known are 0 (not trained on) and 1")
    made = {"role": role, "content": text, **rest}
    if "tool_calls" in made:
        made["tool_calls"] = _calls(made["tool_calls"], index)
        if not made["tool_calls"]:  # an empty list means none; some templates ask only whether the key is there
            del made["tool_calls"]
    return made


def _calls(calls: Any, index: int) -> list[dict[str, Any]]:
    """Tool calls in OpenAI's form, arguments as objects: most templates print them as JSON themselves."""
    calls = _parsed(calls, f"tool_calls of turn {index}")
    calls = [calls] if isinstance(calls, Mapping) else calls
    if not isinstance(calls, (list, tuple)) or not all(isinstance(call, Mapping) for call in calls):
        raise ValueError(f"the tool calls of turn {index} are no list of objects")
    made = []
    for call in calls:
        function = call.get("function", call)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(f"a tool call of turn {index} has no function name")
        arguments = function.get("arguments", function.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = _object_or_text(arguments)
        outer = {key: value for key, value in call.items() if call is not function and key != "function"}
        made.append({"type": "function", **outer, "function": {"name": function["name"], "arguments": arguments}})
    return made


def _object_or_text(text: str) -> Any:
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return text
    return value if isinstance(value, Mapping) else text


def _parsed(value: Any, what: str) -> Any:
    """JSON text as what it says; anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"{what} is a string but not JSON ({error})") from error


def _without_nulls(value: Any) -> Any:
    """Drop null keys at every depth: Parquet and Arrow give each object every key of its column, and a template would
    render those as arguments. Nulls in lists stay: nothing pads lists."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _text_of(content: Any, index: int) -> str:
    """Text as it is; a list of text parts joined; anything else (images, audio) refused."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, (list, tuple)) else [None]
    if all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts):
        return "".join(part["text"] for part in parts)
    raise ValueError(f"the content of turn {index} is not text")


def _answer_of(content: Any, index: int) -> str:
    """What a tool answered: as `_text_of`; an object, a number and their like as JSON text, media refused."""
    items = content if isinstance(content, (list, tuple)) else [content]
    parts = [item for item in items if isinstance(item, Mapping) and item.get("type") in PART_TYPES]
    if isinstance(content, str) or parts or not items:
        return _text_of(content, index)
    return json.dumps(content, ensure_ascii=False, default=str)  # str: dates of Parquet


def _tools(tools: Any) -> Messages:
    if not isinstance(tools, str):
        tools = _without_nulls(tools)
    else:  # JSON text: its nulls are the author's
        tools = _parsed(tools, "'tools'") if tools.strip() else None
    if tools is None:
        return ()
    if isinstance(tools, (list, tuple)) and all(isinstance(tool, str) for tool in tools):
        tools = [_parsed(tool, "a tool") for tool in tools]
    if not isinstance(tools, (list, tuple)) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ValueError("'tools' must be a list of objects")
    return tuple(tools)
