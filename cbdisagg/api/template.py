"""Chat templates: a list of messages to the text that the model was trained to continue.

A template comes with a model from anywhere, so it is foreign code: it runs in jinja2's immutable sandbox, sees plain
values only, and has a budget of work and of text. What it renders equals `transformers`' apply_chat_template (held by
tests) but for one thing: a message to be continued keeps its trailing white space, also if the template strips it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from functools import wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_WORK = 1_000_000
"""Calls and turns of loops that one rendering may take: a second or so."""
MAX_CHARS = 32_000_000
"""Length of the rendered text, and of any string that the template computes."""

_HERE = "\ue0f0continue\ue0f1"  # private characters: no message means them, and no strip() takes them away
_REASONING = ("reasoning_content", "thinking", "reasoning")
_WRONG_DATA = (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError)
"""What a template raises by itself when messages do not have the shape it expects."""


class TemplateError(Exception):
    """The template refuses these messages, or is wrong itself; the message is its own words where it has some."""


class ChatTemplate:
    """One model's template. `special` holds `bos_token` and its like, as templates name them."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        self._source = source
        self._special = dict(special)
        self._environment = _Environment()
        self._compiled: jinja2.Template | None = None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The prompt. `continue_final_message` ends it exactly where the last message's text ends.

        `variables` reach the template by their names (`tools`, `enable_thinking`). Raises TemplateError.
        """
        if not messages:
            raise TemplateError("messages is empty; a chat needs at least one message")
        chat = [_message(message) for message in messages]
        if continue_final_message:
            if add_generation_prompt:
                raise TemplateError("continue_final_message and add_generation_prompt exclude each other")
            _mark_end(chat[-1])
        context = {"tools": None, "documents": None, **self._special, **_plain(variables)}
        text = self._run({**context, "messages": chat, "add_generation_prompt": add_generation_prompt})
        if not continue_final_message:
            return text
        end = text.rfind(_HERE)
        if end < 0:
            raise TemplateError("the chat template leaves out the final message's text, so it cannot be continued")
        return text[:end]

    def _run(self, context: dict[str, Any]) -> str:
        parts, length = list[str](), 0
        _work_left.set([MAX_WORK])
        try:
            if self._compiled is None:
                self._compiled = self._environment.from_string(self._source)
            for part in self._compiled.generate(context):
                length += len(part)
                _check_length(length)
                parts.append(part)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"the model's chat template, line {error.lineno}: {error.message}") from None
        except jinja2.TemplateError as error:
            raise TemplateError(error.message or type(error).__name__) from None
        except _WRONG_DATA as error:
            raise TemplateError(f"the chat template cannot use these messages: {error}") from None
        return "".join(parts)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with loops and calls counted and strings bounded, and with what chat templates expect to find.

    Counting is by the syntax tree (each loop's iterable) and by the sandbox's own hooks (calls, operators), because a
    loop that renders nothing never comes back to us.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        for name in ("center", "indent", "wordwrap", "batch", "slice"):
            self.filters[name] = _narrow(self.filters[name])
        self.filters |= {"tojson": _tojson, _COUNTED: _counted, _JOINED: _joined}
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "dict": _Dict(),
            "namespace": _Namespace,
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        for loop in list(template.find_all(nodes.For)):
            loop.iter = _filtered(_COUNTED, loop.iter)
        for concat in list(template.find_all(nodes.Concat)):
            concat.nodes = [_filtered(_JOINED, nodes.List(concat.nodes, lineno=concat.lineno))]
        return template

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        _spend()
        for value in args:
            _check_width(value)
        if isinstance(function, LoopContext):  # a recursive loop goes on with other values than the tree shows
            args = (_Counted(args[0]), *args[1:])
        return _checked(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for text, times in ((left, right), (right, left)):
                if isinstance(text, (str, list, tuple)) and isinstance(times, int):
                    _check_length(len(text) * times)
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_width(left.bit_length() * right)
        if operator == "%" and isinstance(left, str) and _WIDE_FORMAT.search(left):
            raise jinja2.TemplateRuntimeError("the chat template formats with too great a width")
        return _checked(super().call_binop(context, operator, left, right))


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks what an assistant wrote, for training; here it is its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)  # what is set inside stays inside, as in transformers


class _Dict:
    """`dict(a=1)`, without the attributes of the real type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _Namespace(Namespace):
    """`namespace(...)` without names that begin with an underscore, which reach into the interpreter."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, rest = args[0], args[1:]  # as in jinja2, so that a template may say namespace(self=...)
        values = dict(*rest, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


_COUNTED, _JOINED = "counted loop", "bounded ~"  # names that no template can write
_WIDE_FORMAT = re.compile(r"%[^a-zA-Z%]*(\d{4}|\*)")
_work_left: ContextVar[list[int]] = ContextVar("work_left")


def _filtered(name: str, value: nodes.Node) -> nodes.Filter:
    return nodes.Filter(value, name, [], [], None, None, lineno=value.lineno)


def _spend() -> None:
    left = _work_left.get()
    left[0] -= 1
    if left[0] < 0:
        raise jinja2.TemplateRuntimeError(f"the chat template takes more than {MAX_WORK:,} steps")


@jinja2.pass_context  # without it the optimiser would apply the filter to a constant, once, at compile time
def _counted(_: Context, values: Iterable[Any]) -> Iterable[Any]:
    if isinstance(values, jinja2.Undefined) or not isinstance(values, Iterable):
        return values  # the loop itself then says what is wrong
    return _Counted(values)


class _Counted:
    """An iterable that spends the budget; it has a length where the original has one, for `loop.length`."""

    def __init__(self, values: Iterable[Any]) -> None:
        self._values = values

    def __iter__(self) -> Iterator[Any]:
        for value in self._values:
            _spend()
            yield value

    def __len__(self) -> int:
        return len(self._values)  # type: ignore[arg-type]  # TypeError where there is none, as for the original


@jinja2.pass_context
def _joined(_: Context, values: list[Any]) -> str:
    parts = [str(value) for value in values]
    _check_length(sum(map(len, parts)))
    return "".join(parts)


def _narrow(function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, refusing widths that only serve to fill the memory."""

    @wraps(function)  # keeps the marks that jinja2 reads from the function
    def narrowed(*args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            _check_width(value)
        return function(*args, **kwargs)

    return narrowed


def _check_width(value: Any) -> None:
    if isinstance(value, int) and abs(value) > MAX_WORK:
        raise jinja2.TemplateRuntimeError(f"the chat template uses a number beyond {MAX_WORK:,}")


def _check_length(length: int) -> None:
    if length > MAX_CHARS:
        raise jinja2.TemplateRuntimeError(f"the chat template makes a text of more than {MAX_CHARS:,} characters")


def _checked(value: Any) -> Any:
    if isinstance(value, (str, list, tuple)):
        _check_length(len(value))
    return value


def _check_name(name: Any) -> None:
    if str(name).startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}: it begins with an underscore")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers has it: jinja2's own escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Without fields that are null, which most templates would print, and with reasoning under all names it goes by."""
    plain = {str(name): _plain(value) for name, value in message.items() if value is not None}
    reasoning = next((plain[name] for name in _REASONING if name in plain), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    return plain


def _plain(value: Any) -> Any:
    """JSON values only: other objects have methods that the sandbox cannot judge."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return f"<{type(value).__name__}>"


def _mark_end(message: dict[str, Any]) -> None:
    """Put the mark where the message's text ends."""
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + _HERE
        return
    for part in reversed(content if isinstance(content, list) else []):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            part["text"] += _HERE
            return
    raise TemplateError("continue_final_message needs a final message with text to continue")
