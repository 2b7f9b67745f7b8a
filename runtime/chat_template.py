"""Chat templates: Jinja in a sandbox, with the helpers that published templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, ClassVar

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from dspark_trt.runtime.sampling_params import RequestError, refuse

# What a template may raise on messages it was not written for.
_RENDER_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}` marks the assistant's part; it renders as is."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format_: str) -> str:
    return datetime.now().strftime(format_)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter would escape characters for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def checked_messages(messages: object) -> list[dict[str, Any]]:
    """A non-empty list of mappings with `role` and `content` strings; further keys are kept."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        advice = 'give for example [{"role": "user", "content": "Hello"}]'
        raise refuse("messages", messages, "a list of messages", advice)
    if not messages:
        raise refuse("messages", messages, "a non-empty list", "give at least one message")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise refuse(f"messages[{i}]", message, "a mapping", "give role and content")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                value = message.get(key)
                raise refuse(f"messages[{i}].{key}", value, "a string", "give text")
    return [dict(message) for message in messages]


class ChatTemplate:
    """A compiled template; `tokens` are the special tokens it may name."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlock, jinja2.ext.loopcontrols],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise RequestError(
                f"the model's chat template is not valid Jinja (line {error.lineno}: "
                f"{error.message}): use generate with a prompt"
            ) from None
        self._tokens = dict(tokens)

    def render(
        self,
        messages: object,
        add_generation_prompt: bool,
        variables: Mapping[str, object],
    ) -> str:
        """The conversation as one string; a template's own refusal becomes a `RequestError`."""
        checked = checked_messages(messages)
        scope = {
            "tools": None,
            "documents": None,
            **self._tokens,
            **variables,
            "messages": checked,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(scope)
        except _RENDER_ERRORS as error:
            raise RequestError(
                f"messages do not fit the model's chat template ({error}): "
                "change the roles or their order"
            ) from None
