"""Chat templates: Jinja in a sandbox, with the helpers that published templates expect."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, ClassVar

import jinja2
import jinja2.ext
import jinja2.filters
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox

from dspark_trt.runtime.sampling_params import RequestError, refuse

MAX_RENDERED = 4_000_000  # characters of a conversation
MAX_INDENT = 16
MAX_EXPONENT = 1024
# What a template may raise: broken, or on messages it was not written for.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,  # OverflowError too
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    SyntaxError,  # of the Python that Jinja makes
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
    _check_indent(indent)
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _check_indent(width: object) -> None:
    if isinstance(width, int) and not 0 <= width <= MAX_INDENT:
        raise jinja2.TemplateError(f"indent must be in [0, {MAX_INDENT}], got {width}")


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    _check_indent(len(width) if isinstance(width, str) else width)
    return jinja2.filters.do_indent(text, width, first, blank)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, with bounds on products and powers, which could take all memory or time."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        for value, times in ((left, right), (right, left)):
            if operator == "*" and isinstance(value, (str, bytes, list, tuple)):
                if isinstance(times, int) and len(value) * times > MAX_RENDERED:
                    raise jinja2.TemplateError(f"a product is over {MAX_RENDERED} long")
            elif isinstance(value, int) and abs(value) > 1 << MAX_EXPONENT:
                raise jinja2.TemplateError("a number is too large")
        if operator == "**" and isinstance(right, int) and right > MAX_EXPONENT:
            raise jinja2.TemplateError(f"an exponent is over {MAX_EXPONENT}")
        return super().call_binop(context, operator, left, right)


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
        environment = _Environment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlock, jinja2.ext.loopcontrols],
        )
        environment.filters["tojson"] = _to_json
        environment.filters["indent"] = _indent
        del environment.globals["lipsum"]  # as much text as it is asked for
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise RequestError(
                f"the model's chat template is not valid Jinja (line {error.lineno}: "
                f"{error.message}): use generate with a prompt"
            ) from None
        except _TEMPLATE_ERRORS as error:
            raise RequestError(
                f"the model's chat template cannot be compiled ({_reason(error)}): use generate "
                "with a prompt"
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
            return _joined(self._template.generate(scope))
        except RequestError:
            raise
        except _TEMPLATE_ERRORS as error:
            raise RequestError(
                f"messages do not fit the model's chat template ({_reason(error)}): "
                "change the roles or their order"
            ) from None


def _reason(error: BaseException) -> str:
    """What an error says, shortened; its kind where it says nothing."""
    return str(error)[:200] or type(error).__name__


def _joined(parts: Iterable[str]) -> str:
    """The parts as one text; `RequestError` once they are over `MAX_RENDERED` characters."""
    kept, length = [], 0
    for part in parts:
        kept.append(part)
        length += len(part)
        if length > MAX_RENDERED:
            raise RequestError(
                f"messages must render to at most {MAX_RENDERED} characters, got more: shorten them"
            )
    return "".join(kept)
