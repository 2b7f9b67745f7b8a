"""Prompts files: every shape that is read, every fault with file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from dspark_trt.tools.prompts import Prompt, PromptsError, read_prompts


def test_the_three_shapes_are_read_with_their_line_numbers(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"prompt": "one", "id": 7}\r\n\n'
        b'{"turns": ["two", "not used"]}\n'
        b'{"messages": [{"role": "system", "content": ""}, {"role": "user", "content": "three"}]}'
    )
    prompts = read_prompts(path)
    assert [(p.line, p.text) for p in prompts] == [(1, "one"), (3, "two"), (4, None)]
    assert prompts[0].as_messages() == [{"role": "user", "content": "one"}]
    assert prompts[2].as_messages()[1] == {"role": "user", "content": "three"}


def test_line_separators_inside_a_text_do_not_end_the_line(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a\u2028b\u0085c"}\n', encoding="utf-8")
    assert read_prompts(path) == [Prompt(1, text="a\u2028b\u0085c")]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"\xff{}", "not UTF-8 at byte 1"),
        (b'{"prompt": "a"', "not JSON: .* at column 15"),
        (b"[" * 200_000, "not JSON"),
        (b'["a"]', "must be an object, got list"),
        (b"{}", "needs exactly one of prompt, turns, messages, has none"),
        (b'{"prompt": "a", "turns": ["b"]}', "needs .*, has prompt, turns"),
        (b'{"prompt": ""}', "prompt is empty"),
        (b'{"prompt": 3}', "prompt must be a text, got int"),
        (b'{"prompt": "\\ud800"}', "prompt has half a surrogate pair at character 1"),
        (b'{"prompt": "a", "id": NaN}', "not JSON: NaN is not a number of JSON"),
        (b'{"messages": [{"role": "user", "content": "a", "x": -Infinity}]}', "not JSON: -Inf"),
        (
            b'{"messages": [{"role": "user", "content": "a", "name": "\\udc00"}]}',
            r"messages\[0\].name has half a surrogate pair",
        ),
        (b'{"prompt": "a", "\\ud800": 1}', r"key '\\ud800' has half a surrogate pair"),
        (
            b'{"prompt": "a", "temperature": 1, "max_tokens": 5}',
            "has unknown keys 'max_tokens', 'temperature': allowed are one of prompt, turns, "
            "messages, and id, question_id, category, reference",
        ),
        (b'{"turns": []}', "turns must be a list of texts"),
        (b'{"turns": "a"}', "turns must be a list of texts"),
        (b'{"turns": [null]}', "turns must be a text, got NoneType"),
        (b'{"messages": []}', "messages must be a list"),
        (b'{"messages": ["a"]}', r"messages\[0\] must be an object"),
        (b'{"messages": [{"role": "user"}]}', r"messages\[0\].content must be a text"),
        (b'{"messages": [{"role": "", "content": "a"}]}', r"messages\[0\].role is empty"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, words: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "good"}\n' + line + b"\n")
    with pytest.raises(PromptsError, match=rf"p\.jsonl:2: {words}"):
        read_prompts(path)


def test_a_file_without_prompts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PromptsError, match=r"cannot read prompts .*absent"):
        read_prompts(tmp_path / "absent")
    (tmp_path / "empty").write_bytes(b"\n \n")
    with pytest.raises(PromptsError, match="holds no prompts"):
        read_prompts(tmp_path / "empty")
