"""A chat template cannot take all memory; templates of real models render as transformers renders them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from jinja2.exceptions import TemplateError
from transformers.utils import chat_template_utils

from megatron_gvpo.core.errors import DataError
from megatron_gvpo.huggingface import bounded_templates
from megatron_gvpo.huggingface.bounded_templates import LONGEST, compiled
from megatron_gvpo.huggingface.tokenizer import load_tokenizer, rendered

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " What is 1+1? "},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]},
    {"role": "tool", "content": "2"},
]
DOUBLE = "{% set n = namespace(x='xxxxxxxxxxxxxxxx') %}{% for i in range(60) %}BODY{% endfor %}"
BOMBS = {
    "a product": "{{ 'x' * 1000000000 }}",
    "a product from the left": "{{ 1000000000 * 'x' }}",
    "a product of lists": "{{ ([0] * 1000000000) | length }}",
    "a product of what a message says": "{{ messages[0].content * 100000000 }}",
    "sums": DOUBLE.replace("BODY", "{% set n.x = n.x + n.x %}"),
    "sums of lists": DOUBLE.replace("BODY", "{% set n.x = (n.x | list) + (n.x | list) %}"),
    "concatenations": DOUBLE.replace("BODY", "{% set n.x = n.x ~ n.x %}"),
    "blocks": DOUBLE.replace("BODY", "{% set y %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = y %}"),
    "joins": DOUBLE.replace("BODY", "{% set n.x = [n.x, n.x] | join %}"),
    "joins by a method": DOUBLE.replace("BODY", "{% set n.x = ''.join([n.x, n.x]) %}"),
    "a join of a generator": "{{ range(90000) | map('string') | join('x' * 1000000) }}",
    "replacements": DOUBLE.replace("BODY", "{% set n.x = n.x | replace('x', 'xxxx') %}"),
    "replacements by a method": DOUBLE.replace("BODY", "{% set n.x = n.x.replace('x', n.x) %}"),
    "a width": "{{ 'x' | center(1000000000) }}",
    "a width by a method": "{{ 'x'.ljust(1000000000) }}",
    "a width of a format": "{{ '{:1000000000}'.format(1) }}",
    "a width given to a format": "{{ '{:{}}'.format(1, 1000000000) }}",
    "a width of %": "{{ '%1000000000d' % 1 }}",
    "a width given to %": "{{ '%*d' % (1000000000, 1) }}",
    "a width of a filter": "{{ '%1000000000d' | format(1) }}",
    "an indentation": "{{ ('a\n' * 1000) | indent(1000000) }}",
    "an indentation of JSON": "{{ messages | tojson(indent=1000000000) }}",
    "a power": "{{ (10 ** (10 ** 9)) % 7 }}",
    "squares": "{% set n = namespace(x=3) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "an output without end": (
        "{% for i in range(90000) %}{% for i in range(90000) %}xxxxxxxx{% endfor %}{% endfor %}"
    ),
    "a lorem ipsum": "{{ lipsum(n=100000) }}",
    "a macro": "{% macro m(t) %}{{ t }}{{ t }}{% endmacro %}"
    + DOUBLE.replace("BODY", "{% set n.x = m(n.x) %}"),
}
HONEST = {
    "ChatML": (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + (m['content'] | trim) }}"
        "{{ '<|im_end|>' ~ '\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "tools and JSON": (
        "{%- for t in tools or [] %}{{ t | tojson(indent=4) }}{% endfor %}"
        "{%- for m in messages %}{%- if m.tool_calls is defined %}{% for c in m.tool_calls %}"
        "{{ c.function.arguments | tojson }}{% endfor %}{% continue %}{% endif %}"
        "{{ m.content.replace('\n', ' ').strip().split(' ') | join(', ') }}{% endfor %}"
    ),
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "arithmetic": (
        "{{ 7 * 6 }} {{ 2 ** 10 }} {{ 0.5 ** 2 }} {{ 17 % 5 }} {{ [1] + [2] }} {{ '-' * 20 }}"
        "{{ '%s: %d' % ('a', 3) }} {{ 1.5 * 2 }} {{ 1 + 0.5 }} {{ 2 ** -1 }}"
    ),
    "filters": (
        "{{ 'a\nb' | indent(4) }}{{ 'x' | center(9) }}{{ '%s' | format('y') }}{{ [1, 2] | join('/') }}"
        "{{ messages | map(attribute='role') | join(' ') }}{{ messages | join('-', attribute='role') }}"
        "{{ 'aab' | replace('a', 'c', 1) }}{{ '{} {:>4}'.format(1, 2) }}{{ 'x'.ljust(3) }}"
        "{{ 'a'.join(['1', '2']) }}{{ '%d' % 1700000000 }}{{ '{}'.format(1700000000) }}"
    ),
    "macros and blocks": (
        "{% macro show(m) -%}[{{ m.content }}]{%- endmacro %}{% set all %}"
        "{% for m in messages %}{{ show(m) }}{% endfor %}{% endset %}{{ all | upper }}"
    ),
    "loops": (
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}"
        "{{ (loop.previtem or {}).role }}{{ (loop.nextitem or {}).role }}{% else %}none{% endfor %}"
        "{% for k, v in messages[0].items() %}{{ k ~ v }}"
        "{% endfor %}{% for i in range(9) if i is odd %}{{ loop.cycle('a', 'b') }}{{ i }}{% endfor %}"
        "{% for x in nothing %}{{ x }}{% else %}empty{% endfor %}{% for c in 'ab' %}{{ c }}{% endfor %}"
        "{% for x in [[1, [2]], [3]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}"
    ),
    "the date": "{% set day = strftime_now('%d %b') %}{{ day is string }}",
}


ENDLESS = {
    "loops": "{% for i in range(90000) %}{% for i in range(90000) %}{% endfor %}{% endfor %}",
    "loops that write little": (
        "{% for i in range(90000) %}{% for i in range(90000) %}x{% endfor %}{% endfor %}"
    ),
    "loops over a message": (
        "{% set t = messages[0].content * 9999 %}{% for a in t %}{% for b in t %}{% endfor %}{% endfor %}"
    ),
    "a macro that calls itself twice": (
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}"
    ),
    "a loop that calls itself": (
        "{% for i in range(9) recursive %}{{ loop(range(9)) if loop.depth < 30 else '' }}{% endfor %}"
    ),
    "methods of a long text": (
        "{% set t = 'x' * 60000000 %}{% for i in range(90000) %}{% if t.upper() is none %}y{% endif %}"
        "{% endfor %}"
    ),
}
PROGRAM = """
import json, resource, sys
from jinja2.exceptions import SecurityError
from megatron_gvpo.huggingface.bounded_templates import bound_templates
from transformers.utils import chat_template_utils
bound_templates()
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 3 * 2**30, used + 3 * 2**30))
chat = [{"role": "user", "content": "What is 1+1?"}]
for name, template in json.load(sys.stdin).items():
    try:
        chat_template_utils.render_jinja_template([chat], chat_template=template)
        print(name, "rendered")
    except SecurityError:
        pass
    except Exception as error:
        print(name, repr(error))
"""


def test_a_text_without_bound_is_refused_before_it_is_written() -> None:
    """Fails on the old code, which took up to 19 GB. Here they may have 3 GB: the bound, and a few copies."""
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, input=json.dumps(BOMBS), capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.returncode) == ("", 0), done.stderr[-800:]


@pytest.mark.parametrize("template", ENDLESS.values(), ids=ENDLESS)
def test_a_template_without_end_is_refused(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails on the old code, which renders for years. A second chat has its own time."""
    monkeypatch.setattr(bounded_templates, "SECONDS", 0.5)
    for _ in range(2):
        begin = time.thread_time()
        with pytest.raises(TemplateError, match=r"it goes on without end: 0\.5 seconds is the most"):
            compiled(template).render(messages=CHAT)
        assert 0.5 <= time.thread_time() - begin < 5


def test_a_slow_template_has_less_time_for_its_next_chats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five callers gave an endless template 20 seconds each, in which the command said nothing."""
    monkeypatch.setattr(bounded_templates, "SECONDS", 0.4)
    monkeypatch.setattr(bounded_templates, "AGAIN", 0.05)
    text = "{% for a in range(n) %}{% for b in range(n) %}{% for c in range(n) %}{% endfor %}{% endfor %}"
    template, spent = compiled(text + "{% endfor %}next"), []
    for _ in range(2):
        begin = time.thread_time()
        with pytest.raises(TemplateError, match="without end"):
            template.render(n=90000)
        spent.append(time.thread_time() - begin)
    assert spent[0] > 0.4 and spent[1] < 0.3
    assert template.render(n=2) == "next"
    begin = time.thread_time()
    with pytest.raises(TemplateError, match="without end"):
        template.render(n=90000)
    assert time.thread_time() - begin > 0.4, "it has been quick in between"


@pytest.mark.parametrize("template", HONEST.values(), ids=HONEST)
def test_an_honest_template_is_rendered_as_transformers_renders_it(template: str) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"x": "integer"}}}]
    variables = {"messages": CHAT, "tools": tools, "documents": None, "add_generation_prompt": True}
    expected = bounded_templates._compile(template).render(**variables)
    assert expected and compiled(template).render(**variables) == expected


def test_a_long_prompt_is_still_written() -> None:
    chat = [{"role": "user", "content": "x" * (LONGEST // 4)}]
    text = compiled(HONEST["ChatML"]).render(messages=chat, add_generation_prompt=True)
    assert len(text) > LONGEST // 4


def test_every_tokenizer_is_bounded(task: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(task / "model"))
    assert chat_template_utils._compile_jinja_template is compiled
    tokenizer.chat_template = BOMBS["a product"]
    with pytest.raises(TemplateError, match="1,000,000,000"):
        rendered(tokenizer, CHAT[:2])


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
@pytest.mark.parametrize("kind", ["FIFO", "directory", "device"])
def test_a_file_of_the_tokenizer_that_is_none_is_named(
    task: Path, tmp_path: Path, name: str, kind: str
) -> None:
    """Fails on the old code: "the tokenizer knows none of" the prompt, or a wait for a writer."""
    for file in (task / "model").iterdir():
        if file.name != name:
            (tmp_path / file.name).symlink_to(file)
    match kind:
        case "FIFO":
            os.mkfifo(tmp_path / name)
        case "directory":
            (tmp_path / name).mkdir()
        case _:
            (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises(DataError, match=f"^model.path={tmp_path}: {name} there is not a regular file$"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("text", ["{{ [1, 2]|random }}", "{{ messages | map('random') | join }}"])
def test_a_template_that_writes_something_else_each_time_is_refused(text: str) -> None:
    """The prompt that was trained would not be the one that was sampled from."""
    with pytest.raises(TemplateError, match="No filter named 'random'"):
        compiled(text).render(messages=["ab"])
