"""Chat templates render as in transformers, and a foreign template can neither reach out nor run away."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from cbdisagg.api import template as module
from cbdisagg.api.template import ChatTemplate, TemplateError
from cbdisagg.api.tokenizer import Tokenizer

CHATML = """\
{% for message in messages %}
    {% if loop.first and message['role'] != 'system' %}
{{ '<|im_start|>system\nBe helpful<|im_end|>\n' }}
    {% endif %}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

TRIMMING = """{{ bos_token }}{% for m in messages -%}
[{{ m.role | upper }}] {{ m.content | trim }}{{ eos_token }}
{%- endfor %}{{ '[ASSISTANT]' if add_generation_prompt }}"""

RICH = """\
{%- macro show(content) -%}
{%- if content is string %}{{ content }}{% else %}
{%- for part in content %}{{ part.text if part.type == 'text' else '<' ~ part.type ~ '>' }}{% endfor %}
{%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(count=0, seen=[]) -%}
{%- for m in messages %}
{%- if m.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('no role called ' ~ m.role) }}{% endif -%}
{%- set ns.count = ns.count + 1 -%}
{%- if loop.index0 % 2 == 5 %}{% continue %}{% endif -%}
{{ loop.index }}/{{ loop.length }}/{{ loop.revindex }} {{ m.role.title() }}: \
{% generation %}{{ show(m.content) }}{% endgeneration %}{{ ' last' if loop.last }}
{% endfor -%}
count={{ ns.count }} {{ {'b': '<é>', 'a': [1, none, true]} | tojson }} {{ messages | tojson(indent=2) }} {{ dict(x=1) }}
{%- for a in range(3) %}{% if a == 2 %}{% break %}{% endif %}{{ a }}{{ '%02d' % a }}{{ 'ab' * a }}{% endfor %}
{%- if tools is not none %}{{ tools }}{% endif %}{{ messages | map(attribute='role') | join(',') }}\
{{ '-' ~ ns.count ~ '-' }}{{ add_generation_prompt }}"""

RECURSIVE = """\
{%- for m in messages recursive %}({{ m.role }}{{ loop.depth }}{{ loop(m.kids) if m.kids }}){% endfor -%}
{%- for m in messages %}{{ m.content }}\
{{ loop.previtem.role if not loop.first }}{{ loop.cycle('x', 'y') }}{% endfor %}"""

TEMPLATES = {"chatml": CHATML, "trimming": TRIMMING, "rich": RICH, "recursive": RECURSIVE}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "You are\n terse. "},
    {"role": "user", "content": "<b>Hi</b> \U0001f600 ", "name": None},
    {"role": "assistant", "content": "OK!"},
]


def theirs(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    library = Library(models.WordLevel({"<s>": 0, "</s>": 1}, unk_token="<s>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=library, chat_template=template, **SPECIAL)
    return tokenizer.apply_chat_template(messages, tokenize=False, **options)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("prompt", [False, True])
def test_renders_as_transformers_does(name: str, prompt: bool) -> None:
    ours = ChatTemplate(TEMPLATES[name], SPECIAL).render(CHAT, add_generation_prompt=prompt)
    assert ours == theirs(TEMPLATES[name], CHAT, add_generation_prompt=prompt)


@pytest.mark.parametrize("name", TEMPLATES)
@settings(deadline=None)
@given(data=st.data())
def test_any_messages_render_as_in_transformers(name: str, data: st.DataObject) -> None:
    texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
    contents: st.SearchStrategy[Any] = texts
    if name == "rich":
        part = texts.map(lambda text: {"type": "text", "text": text}) | st.just({"type": "image"})
        contents = texts | st.lists(part, max_size=3)
    message = st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant"]), "content": contents},
        optional={"name": st.none() | texts, "reasoning": texts},
    )
    messages = data.draw(st.lists(message, min_size=1, max_size=4))
    assert ChatTemplate(TEMPLATES[name], SPECIAL).render(messages) == theirs(TEMPLATES[name], messages)


@pytest.mark.parametrize("tail", ["OK!", "OK! ", "OK!\n", "OK!\t\n ", " OK", "", "a\u3000"])
def test_continues_the_final_message_as_transformers_does_where_nothing_is_trimmed(tail: str) -> None:
    messages = [*CHAT[:2], {"role": "assistant", "content": tail}]
    ours = ChatTemplate(CHATML, SPECIAL).render(messages, continue_final_message=True)
    assert ours == theirs(CHATML, messages, continue_final_message=True)
    assert ours.endswith("<|im_start|>assistant\n" + tail)


@pytest.mark.parametrize("tail", ["OK!", "OK! ", "OK!\n", "OK!\t\n "])
def test_continues_with_trailing_white_space_also_if_the_template_trims(tail: str) -> None:
    ours = ChatTemplate(TRIMMING, SPECIAL).render([{"role": "assistant", "content": tail}], continue_final_message=True)
    assert ours == "<s>[ASSISTANT] " + tail


def test_continues_the_last_text_part() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two "}, {"type": "image"}]
    source = "{% for m in messages %}{% for p in m.content %}{{ p.text }}|{% endfor %}{% endfor %}"
    ours = ChatTemplate(source, {}).render([{"role": "assistant", "content": parts}], continue_final_message=True)
    assert ours == "one|two "


@pytest.mark.parametrize(
    ("messages", "options", "words"),
    [
        ([], {}, "messages is empty"),
        (CHAT, {"continue_final_message": True, "add_generation_prompt": True}, "exclude each other"),
        ([{"role": "assistant"}], {"continue_final_message": True}, "with text to continue"),
        ([{"role": "assistant", "content": [{"type": "image"}]}], {"continue_final_message": True}, "with text"),
        ([{"role": "user", "content": None}], {}, "cannot use these messages|no attribute 'content'"),
        ([{"role": "user", "content": ["x"]}], {}, "cannot use these messages"),
    ],
)
def test_refuses_what_cannot_be_rendered(messages: list[Any], options: dict[str, Any], words: str) -> None:
    with pytest.raises(TemplateError, match=words):
        ChatTemplate(CHATML, SPECIAL).render(messages, **options)


def test_a_message_that_the_template_drops_cannot_be_continued() -> None:
    with pytest.raises(TemplateError, match="leaves out the final message"):
        ChatTemplate("{{ messages[0].role }}", {}).render(CHAT, continue_final_message=True)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "^roles must alternate$"),
        ("{% for %}", "line 1"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ messages[0].nothing.at_all }}", "nothing"),
        ("{{ messages[0].content + 1 }}", "cannot use"),
        ("{{ no_such_function() }}", "no_such_function"),
        ("{{ messages | no_such_filter }}", "no_such_filter"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_errors_say_what_the_template_says(source: str, words: str) -> None:
    with pytest.raises(TemplateError, match=words):
        ChatTemplate(source, {}).render(CHAT)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ (messages.append)(1) }}",
        "{{ messages[0].update({'a': 1}) }}",
        "{{ raise_exception.__globals__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ self._TemplateReference__context }}",
        "{{ cycler.__init__.__globals__.os.system('id') }}",
        "{{ lipsum.__globals__ }}",
        "{{ dict.__call__.__func__ }}",
        "{{ dict.__class__.__mro__ }}",
        "{{ strftime_now.__globals__['json'] }}",
        "{% set n = namespace(__class__=1) %}{{ n }}",
        "{% set n = namespace() %}{% set n._x = 1 %}",
        "{{ '{0.__class__.__init__.__globals__}'.format(raise_exception) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
    ],
)
def test_a_hostile_template_reaches_nothing(source: str) -> None:
    with contextlib.suppress(TemplateError):  # what is unsafe to do is refused
        assert not ChatTemplate(source, SPECIAL).render(CHAT)  # what is unsafe to see is undefined: it prints nothing


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(100001) %}{% endfor %}",
        "{% for a in messages * 99999999 %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for k in [range(9999)] * 999 recursive %}{{ loop(k) if k is iterable else '' }}{% endfor %}",
        "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
        "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
        "{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}",
        "{{ 'x' * 999999999 }}",
        "{{ 10 ** (10 ** 10) }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '%*d' % (999999999, 1) }}",
        "{{ 'x' | center(999999999) }}",
        "{{ 'x\ny' | indent(999999999) }}",
        "{{ 'x'.ljust(999999999) }}",
    ],
)
def test_a_runaway_template_is_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WORK", 100_000)  # the bounds as they are would take seconds to reach
    monkeypatch.setattr(module, "MAX_CHARS", 1_000_000)
    with pytest.raises(TemplateError):
        ChatTemplate(source, {}).render(CHAT)


def test_the_budget_is_for_one_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WORK", 50)
    template = ChatTemplate("{% for m in range(40) %}{{ m }}{% endfor %}", {})
    assert template.render(CHAT) == template.render(CHAT)


def test_the_template_comes_from_its_file_or_the_config(tmp_path: Path) -> None:
    Library(models.WordLevel({"<s>": 0}, unk_token="<s>")).save(str(tmp_path / "tokenizer.json"))
    options = {"add_generation_prompt": False, "continue_final_message": False}
    with pytest.raises(TemplateError, match="no chat template"):
        Tokenizer(tmp_path).render_chat(CHAT, **options)
    config: dict[str, Any] = {"bos_token": {"content": "<s>"}, "chat_template": "{{ bos_token }} config"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer(tmp_path).render_chat(CHAT, **options) == "<s> config"
    config["chat_template"] = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "named"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer(tmp_path).render_chat(CHAT, **options) == "named"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert Tokenizer(tmp_path).render_chat(CHAT, **options) == "file"
