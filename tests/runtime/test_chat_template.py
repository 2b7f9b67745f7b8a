"""Chat templates render as Transformers renders them, in a sandbox, with clear refusals."""

from __future__ import annotations

from typing import Any

import pytest

from dspark_trt.runtime.chat_template import ChatTemplate
from dspark_trt.runtime.sampling_params import RequestError
from dspark_trt.runtime.tokenizer import Tokenizer

USER = {"role": "user", "content": "Why is the sky blue?\n"}
CONVERSATIONS: list[list[dict[str, str]]] = [
    [USER],
    [{"role": "system", "content": "Be brief."}, USER],
    [USER, {"role": "assistant", "content": "  Rayleigh — <b>é</b> "}, {**USER, "content": ""}],
]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TEMPLATES = [
    "{{ bos_token }}{% for m in messages %}\n  {% if m.role == 'user' %}\n"
    "[{{ m.content | trim }}]\n  {%- else %}\n({{ m['content'] }}){{ eos_token }}\n"
    "  {% endif %}\n{% endfor %}\n",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}{{ tools is none }}{{ extra }}",
    "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
    "{{ ns.n }}{% if add_generation_prompt %}>{% endif %}{{ unk_token is defined }}",
]


def with_transformers(
    template: str, messages: list[dict[str, str]], *, generation: bool, **variables: Any
) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template(
        conversations=[messages],
        chat_template=template,
        add_generation_prompt=generation,
        **TOKENS,
        **variables,
    )
    return str(rendered[0])


@pytest.mark.parametrize("messages", CONVERSATIONS, ids=["user", "system", "three turns"])
@pytest.mark.parametrize("generation", [True, False])
def test_smollm2_renders_as_in_transformers(
    smollm2: Tokenizer, messages: list[dict[str, str]], generation: bool
) -> None:
    template = smollm2.config.chat_template
    assert template is not None
    ours = smollm2.apply_chat_template(messages, add_generation_prompt=generation)
    assert ours == with_transformers(template, messages, generation=generation)
    assert ("<|im_start|>assistant\n" in ours[-22:]) is generation


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("messages", CONVERSATIONS, ids=["user", "system", "three turns"])
def test_templates_render_as_in_transformers(template: str, messages: list[dict[str, str]]) -> None:
    ours = ChatTemplate(template, TOKENS).render(messages, True, {"extra": "x"})
    assert ours == with_transformers(template, messages, generation=True, extra="x")


def test_the_date_of_today_is_at_hand() -> None:
    rendered = ChatTemplate("{{ strftime_now('%d') }}", {}).render([USER], True, {})
    assert len(rendered) == 2


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages must be a non-empty list"),
        ("hello", "messages must be a list of messages"),
        ({"role": "user", "content": "x"}, "messages must be a list of messages"),
        (["x"], r"messages\[0\] must be a mapping"),
        ([USER, {"role": "user"}], r"messages\[1\].content must be a string, got None"),
        ([{"role": 3, "content": "x"}], r"messages\[0\].role must be a string, got 3"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\].content must be"),
    ],
)
def test_bad_messages_are_refused(smollm2: Tokenizer, messages: Any, field: str) -> None:
    with pytest.raises(RequestError, match=field):
        smollm2.apply_chat_template(messages)


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ missing.field }}",
        "{{ 1 / 0 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{{ messages[9].role + 1 }}",
    ],
)
def test_what_a_template_refuses_is_the_requests_fault(template: str) -> None:
    made = ChatTemplate(template, {})
    try:
        rendered = made.render([USER], True, {})
    except RequestError as error:
        assert "messages do not fit the model's chat template" in str(error)
    else:
        assert rendered == ""  # a forbidden attribute is undefined and renders as nothing


def test_a_template_with_a_syntax_error_is_named() -> None:
    with pytest.raises(RequestError, match="not valid Jinja"):
        ChatTemplate("{% for %}", {})


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "cannot be compiled|not valid Jinja"),
        ("{% if x %}" * 200 + "{% endif %}" * 200, "cannot be compiled|not valid Jinja"),
        ("{{ " + "9" * 5000 + " }}", "cannot be compiled|not valid Jinja"),
    ],
    ids=["parentheses", "blocks", "digits"],
)
def test_a_template_that_breaks_the_compiler_is_named(template: str, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        ChatTemplate(template, {})


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ lipsum(n=1000000) }}", "'lipsum' is undefined"),
        ("{{ messages | tojson(indent=10 ** 9) }}", r"indent must be in \[0, 16\], got 1000000000"),
        ("{{ 'a\nb' | indent(10 ** 9) }}", r"indent must be in \[0, 16\], got 1000000000"),
        ("{{ 'x' * 10 ** 12 }}", "a product is over 4000000 long"),
        ("{{ 10 ** 100000 }}", "an exponent is over 1024"),
        ("{% for i in range(99999) %}{{ 'x' * 100 }}{% endfor %}", "at most 4000000 characters"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "do not fit .*recursion"),
        ("{{ '%d' | format(10.0 ** 400) }}", "do not fit"),
        ("{{ 'x'.center(10 ** 19) }}", "do not fit"),
    ],
)
def test_a_template_cannot_take_all_memory_or_time(template: str, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        ChatTemplate(template, {}).render([USER], True, {})


def test_a_model_without_template_says_so(sentencepiece: Tokenizer) -> None:
    with pytest.raises(RequestError, match="no chat template"):
        sentencepiece.apply_chat_template([USER])
