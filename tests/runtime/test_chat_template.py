"""Chat templates: what Hugging Face makes of them, bounds, and failures that are the request's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models

from pageframe.runtime import template_sandbox
from pageframe.runtime.chat_template import ChatTemplate, load_chat_template
from pageframe.runtime.errors import InvalidRequestError, ModelError
from pageframe.runtime.models.source import ModelSource, resolve_source
from pageframe.runtime.template_sandbox import MAX_OUTPUT_CHARS
from pageframe.runtime.tokenizer import load_tokenizer

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "<b>Ünï</b> & 'quotes' \"double\" 日本 🙂"},
    {"role": "assistant", "content": "Yes.\n"},
    {"role": "user", "content": "More"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"é": [1, 2.5, None, True]}}}]

TEMPLATES = {
    "blocks are trimmed": "{% for m in messages %}\n  {% if true %}\n{{ m['role'] }}:{{ m.content }}\n  {% endif %}\n"
    "{% endfor %}",
    "tokens": "{{ bos_token }}{% for m in messages %}{{ m.content + eos_token }}{% endfor %}",
    "tojson": "{{ tools | tojson }} {{ messages | tojson(indent=2) }}",
    "loop controls": "{% for m in messages %}{% if loop.index0 == 1 %}{% continue %}{% endif %}"
    "{% if loop.last %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "prompt": "{{ messages | length }}{% if add_generation_prompt %}<assistant>{% endif %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "absent names": "{{ tools is none }}{{ documents is none }}{{ nothing is defined }}",
    "methods": "{{ messages[1].content.strip().split(' ') | join('|') }}{{ messages[0].items() | list }}",
    "date": "{{ strftime_now('%Y') | length }}",
    "extra": "{{ enable_thinking is defined and enable_thinking }}",
    "generation scope": "{% set x = 'out' %}{% generation %}{{ x }}{% set x = 'in' %}{{ x }}{% endgeneration %}{{ x }}"
    "{% generation %}{% set y = 1 %}{% endgeneration %}{{ y is defined }}",
    "joins": "{{ messages[0].role ~ 1 ~ none ~ nothing ~ '<' }}{{ [1] + [2] }}{{ 'ab' * 2 + 'c' }}{{ 3 * 2 ** 5 }}",
    "macros": "{% macro f(x) %}{% if x %}{{ x }}{{ f(x - 1) }}{% endif %}{% endmacro %}{{ f(3) }}"
    "{% for m in messages recursive %}{{ m.role[0] }}{% else %}none{% endfor %}",
    "loop": "{% for m in messages %}{{ loop.index }}{{ loop.previtem.role if loop.previtem }}{{ loop.cycle('a', 'b') }}"
    "{% endfor %}{% for m in messages if m.role == 'user' %}{{ loop.length }}{% endfor %}",
    "tojson options": "{{ tools | tojson(indent=4) }}{{ messages[1] | tojson(separators=(',', ':'), sort_keys=true) }}"
    "{{ 'é<' | tojson(ensure_ascii=true) }}",
}


DOUBLING = "{{% for i in range(99) %}}{{% set ns.s = {} %}}{{% endfor %}}"


@pytest.fixture(scope="module")
def oracle() -> Any:
    """transformers' own rendering."""
    import transformers

    inner = Inner(models.WordLevel({"a": 0}, unk_token="a"))
    inner.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("kwargs", [{}, {"tools": TOOLS, "enable_thinking": True}], ids=["plain", "with tools"])
@pytest.mark.parametrize("prompt", [True, False])
def test_renders_as_transformers_does(oracle: Any, name: str, kwargs: dict[str, Any], prompt: bool) -> None:
    text = TEMPLATES[name]
    expected = oracle.apply_chat_template(
        MESSAGES, chat_template=text, tokenize=False, add_generation_prompt=prompt, **kwargs
    )
    assert ChatTemplate(text, "<s>", "</s>").render(MESSAGES, add_generation_prompt=prompt, **kwargs) == expected


def test_default_models_template() -> None:
    source = resolve_source("default")
    template = load_chat_template(source, load_tokenizer(source))
    assert template is not None
    assert template.render([{"role": "user", "content": "Hi"}]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert template.render(MESSAGES[:2], add_generation_prompt=False) == (
        f"<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n{MESSAGES[1]['content']}<|im_end|>\n"
    )


@pytest.mark.parametrize(
    ("text", "messages", "message"),
    [
        ("{{ raise_exception('Roles must alternate') }}", MESSAGES, "Roles must alternate"),
        ("{{ messages[0].content + 'x' }}", [{"role": "user", "content": None}], "unsupported operand"),
        ("{{ messages[9].content }}", MESSAGES, "has no element 9"),
        ("{{ messages[0].missing.more }}", MESSAGES, "has no attribute 'missing'"),
        ("{{ ''.__class__.__mro__ }}", MESSAGES, "unsafe"),
        ("{{ messages.append(1) }}", MESSAGES, "append"),
        ("{{ 1 / 0 }}", MESSAGES, "division"),
        ("{{ messages | tojson }}", [{"role": object()}], "not JSON serializable"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", MESSAGES, "recursion"),
        ("{{ range(10 ** 9) | list }}", MESSAGES, "too big"),
        ("{% for a in range(9999) %}{{ 'x' * 9999 }}{% endfor %}", MESSAGES,
         f"more than {MAX_OUTPUT_CHARS} characters"),
        ("{{ 'x' * 10 ** 9 }}", MESSAGES, "would make a text or list of 1000000000 items"),
        ("{{ 10 ** 8 * [0] }}", MESSAGES, "would make a text or list of 100000000 items"),
        ("{{ 9 ** 99999 }}", MESSAGES, "would make a number of"),
        ("{{ (2 ** 4000) * (2 ** 4000) }}", MESSAGES, "would make a number of"),
        (f"{{% set ns = namespace(s='x') %}}{DOUBLING.format('ns.s + ns.s')}", MESSAGES, "would make a text or list"),
        (f"{{% set ns = namespace(s='x') %}}{DOUBLING.format('ns.s ~ ns.s')}", MESSAGES, "would make a text or list"),
        (f"{{% set ns = namespace(s=[1]) %}}{DOUBLING.format('ns.s + ns.s')}", MESSAGES, "would make a text or list"),
        ("{{ raise_exception('x' * 9999) }}", MESSAGES, "^the model's chat template failed: x{500}$"),
    ],
)  # fmt: skip
def test_failures_are_the_requests(text: str, messages: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        ChatTemplate(text).render(messages)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "text",
    [
        "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% set r = range(99999) %}{% for a in r %}{% for b in r if false %}{% endfor %}{% endfor %}",
    ],
)
def test_a_rendering_takes_a_bounded_time(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.02)
    with pytest.raises(InvalidRequestError, match=r"template took more than 0\.02 seconds") as caught:
        ChatTemplate(text).render(MESSAGES)
    assert caught.value.param == "messages"


def test_each_rendering_has_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.role }}{% endfor %}")
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", -1.0)
    with pytest.raises(InvalidRequestError, match="seconds"):
        template.render(MESSAGES * 100)
    monkeypatch.undo()
    assert template.render(MESSAGES[:2]) == "systemuser"


def test_a_requests_names_hide_none_of_the_bounds() -> None:
    text = "{% for m in messages %}{{ m.role ~ m.content }}{% endfor %}"
    hidden = dict.fromkeys(("look at the budget", "join within bounds", "environment", "t_1", "budget"))
    assert ChatTemplate(text).render([{"role": "a", "content": "b"}], **hidden) == "ab"


@pytest.mark.parametrize("text", ["{% for %}", "{{ x", "{% unknown %}", "{% generation %}"])
def test_invalid_template_is_the_models_error(text: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "t.gguf", text)
    source = ModelSource("gguf", path, "t")
    with pytest.raises(ModelError, match="chat template is not valid") as caught:
        load_chat_template(source, load_tokenizer(resolve_source("default")))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def write_gguf(path: Path, template: str | list[dict[str, str]] | None) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    if template is not None:
        writer.add_chat_template(template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_where_a_template_comes_from(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(resolve_source("default"))

    def rendered(source: ModelSource) -> str | None:
        template = load_chat_template(source, tokenizer)
        return None if template is None else template.render([])

    assert rendered(ModelSource("gguf", write_gguf(tmp_path / "a.gguf", None), "a")) is None
    assert rendered(ModelSource("gguf", write_gguf(tmp_path / "b.gguf", "gguf {{ bos_token }}"), "b")) == (
        "gguf <|im_start|>"
    )
    folder = ModelSource("folder", tmp_path, "folder")
    assert rendered(folder) is None
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({"chat_template": None}))
    assert rendered(folder) is None
    path.write_text(json.dumps({"chat_template": "config {{ eos_token }}"}))
    assert rendered(folder) == "config <|im_end|>"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "named"}]
    path.write_text(json.dumps({"chat_template": named}))
    assert rendered(folder) == "named"
    template = load_chat_template(folder, tokenizer)
    assert template is not None
    assert template.render([], tools=TOOLS) == template.tool_source_text == "tools"
    assert template.render([], tools=[]) == "named"
    (tmp_path / "chat_template.jinja").write_text("file é", encoding="utf-8")
    assert rendered(folder) == "file é"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools | length }} tools")
    template = load_chat_template(folder, tokenizer)
    assert template is not None
    assert template.render([], tools=TOOLS) == "1 tools"
    assert template.render([]) == "file é"
    assert template.reads_tools


def test_a_gguf_file_may_have_a_template_for_tools(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with {{ tools | length }}"}]
    source = ModelSource("gguf", write_gguf(tmp_path / "a.gguf", named), "a")
    template = load_chat_template(source, load_tokenizer(resolve_source("default")))
    assert template is not None
    assert (template.render([]), template.render([], tools=TOOLS)) == ("plain", "with 1")


@pytest.mark.parametrize(
    ("text", "reads_tools"),
    [
        ("{{ messages }}", False),
        ("{% if tools %}{{ tools | tojson }}{% endif %}", True),
        ("{% if custom_tools is defined %}{% set tools = custom_tools %}{% endif %}{{ tools }}", True),
        ("{% set tools = [] %}{{ tools }}", False),
        ("{% macro f(tools) %}{{ tools }}{% endmacro %}{{ f(1) }}", False),
    ],
)
def test_whether_a_template_shows_tools(text: str, reads_tools: bool) -> None:
    assert ChatTemplate(text).reads_tools is reads_tools


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([{"name": "tool_use", "template": "x"}], "no template named 'default'"),
        ([["default"]], "no template named 'default'"),
        (5, "neither a text nor a list"),
        ([{"name": "default", "template": 5}], "neither a text nor a list"),
        ([{"name": "default", "template": "x"}, {"name": "tool_use", "template": 5}], "neither a text nor a list"),
    ],
)
def test_odd_chat_template_entries(value: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
    with pytest.raises(ModelError, match=message):
        load_chat_template(ModelSource("folder", tmp_path, "x"), load_tokenizer(resolve_source("default")))
