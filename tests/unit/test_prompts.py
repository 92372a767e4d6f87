"""Rows become requests: data is inserted as it is, and what cannot be rendered is refused in words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from batchmill_core.errors import PromptError
from batchmill_core.request import Request, Row, TaskKind
from batchmill_producers import templates
from batchmill_producers.prompts import compile_prompt


def row(request: Request | None = None, **values: Any) -> Row:
    return Row(index=3, input=values, source="r.jsonl", line=7, request=request)


def text_of(template: str, **values: Any) -> str:
    """What a template prints, after checking that the fast way and Jinja2's own agree."""
    fast = rendered(template, values)
    assert rendered(template + "{% if true %}{% endif %}", values) == fast
    return fast


def rendered(template: str, values: Mapping[str, Any]) -> str:
    (message,) = compile_prompt(template).render(row(**values)).messages
    return str(message["content"])


def refusal(template: str, **values: Any) -> str:
    with pytest.raises(PromptError) as caught:
        compile_prompt(template).render(row(**values))
    return str(caught.value)


# What is printed


def test_prompt_is_one_user_message() -> None:
    request = compile_prompt("Label: {{ text }}").render(row(text="fine"))

    assert request == Request(messages=({"role": "user", "content": "Label: fine"},))


def test_data_is_never_rendered_again() -> None:
    braces = "a {b} {{c}} {% d %} {# e #} %s f"

    assert text_of("Say: {{ text }}", text=braces) == f"Say: {braces}"


@pytest.mark.parametrize(
    ("value", "printed"),
    [
        ("text", "text"),
        ("", ""),
        (None, ""),
        (float("nan"), ""),
        (3, "3"),
        (2**70, str(2**70)),
        (0.1, "0.1"),
        (1.0, "1.0"),
        (True, "True"),
        ({"k": ["é", None, True, 'quote"']}, '{"k": ["é", null, true, "quote\\""]}'),
        ([], "[]"),
        ("<b>&</b>", "<b>&</b>"),
    ],
)
def test_values_print_as_text_without_none_or_nan(value: object, printed: str) -> None:
    assert text_of("[{{ v }}]", v=value) == f"[{printed}]"


def test_lines_and_blanks_of_a_template_stay() -> None:
    assert text_of("\n a {{ v }}\n\n", v=1) == "\n a 1\n\n"


def test_control_flow_and_filters_work() -> None:
    template = "{% for t in tags if t %}{{ loop.index }}/{{ loop.length }} {{ t|upper }};{% else %}none{% endfor %}"

    assert text_of(template, tags=["a", "", "b"]) == "1/2 A;2/2 B;"
    assert text_of(template, tags=[]) == "none"


def test_columns_of_any_name_are_reached_through_row() -> None:
    assert text_of('{{ row["odd name"] }} {{ row.plain }}', **{"odd name": 1, "plain": 2}) == "1 2"


def test_row_prints_as_json() -> None:
    assert text_of("{{ row }}", a=1) == '{"a": 1}'


def test_column_called_row_is_the_column() -> None:
    assert text_of("{{ row }}", row="x") == "x"


@pytest.mark.parametrize("name", ["range", "dict", "loop", "items", "name", "context", "environment"])
def test_columns_may_have_names_that_jinja_uses(name: str) -> None:
    assert text_of(f"{{{{ {name} }}}}", **{name: "mine"}) == "mine"


def test_keys_called_like_methods_are_keys() -> None:
    assert text_of("{{ order.items }} {{ order.keys }}", order={"items": "i", "keys": "k"}) == "i k"


def test_lazy_filters_print_their_values() -> None:
    assert text_of("{{ tags | map('upper') }}", tags=["a", "b"]) == '["A", "B"]'


def test_tojson_does_not_escape_for_html() -> None:
    assert text_of("{{ v | tojson }}", v={"a": "<é'>"}) == '{"a": "<é\'>"}'


def test_text_that_cannot_be_stored_is_mended_in_templates_too() -> None:
    assert text_of("a\0\ud800{{ v }}", v="x") == "a\ufffd\ufffdx"
    assert text_of(r'{{ "\ud800" }}{{ "%c" % 0 }}') == "\ufffd\ufffd"


# What is refused


def test_missing_column_names_the_row_and_the_columns_there_are() -> None:
    message = refusal("Label: {{ texd }}", id=1, text="x")

    assert message.startswith("row 3 (r.jsonl line 7): ")
    assert "'texd' is undefined; did you mean 'text'? columns here: id, text" in message


@pytest.mark.parametrize("template", ["{{ Ticket_text }}", "{{ Ticket text }}"])
def test_a_column_with_a_space_is_said_as_a_template_writes_it(template: str) -> None:
    message = refusal(template, **{"Ticket text": "x"})

    assert "row['Ticket text']" in message
    assert compile_prompt("{{ row['Ticket text'] }}").render(row(**{"Ticket text": "x"})).messages[0]["content"] == "x"


@pytest.mark.parametrize(
    "template", ["{{ b.c }}", '{{ row["nope"] }}', "{% for x in nope %}{% endfor %}", "{{ nope + 1 }}"]
)
def test_every_way_to_use_a_missing_value_is_refused(template: str) -> None:
    assert "columns here: a" in refusal(template, a={})


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ TEXT }}", "'TEXT' is undefined; did you mean 'text'? columns here: text, address"),
        ("{{ row.Txt }}", "did you mean 'text'? columns here: text, address"),
        ("{{ address.cty }}", "no attribute 'cty'; did you mean 'city'? keys here: city, Zip code"),
        ("{{ address['zip code'] }}", "did you mean 'Zip code'? keys here: city, Zip code"),
        ("{{ address.city.name }}", "'str object' has no attribute 'name'"),
        ("{% for k in address.keyz %}{% endfor %}", "keys here: city, Zip code"),
    ],
)
def test_the_nearest_name_is_told_of_the_object_that_was_asked(template: str, said: str) -> None:
    assert said in refusal(template, text="x", address={"city": "Rome", "Zip code": None})


def test_optional_columns_can_be_asked_for() -> None:
    assert text_of("{% if b is defined %}{{ b }}{% else %}-{% endif %}{{ c | default('x') }}", a=1) == "-x"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("line\n{{ text", "the prompt template, line 2: "),
        ("{% if a %}", "the prompt template, line 1: "),
        ("{{ a | nofilter }}", "No filter named 'nofilter'"),
        ("{% for x in a %}" * 30 + "{% endfor %}" * 30, "nested too deeply"),
    ],
)
def test_syntax_error_is_refused_before_any_row(template: str, said: str) -> None:
    with pytest.raises(PromptError, match=r"the prompt template") as caught:
        compile_prompt(template)

    assert said in str(caught.value)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ row.__init__.__globals__ }}",
        "{{ row.update({'a': 1}) }}",
        "{{ '{0.__class__}'.format(a) }}",
        "{{ (''|attr('__class__')) }}",
        "{{ cycler.__init__.__globals__.os }}",
    ],
)
def test_sandbox_lets_nothing_out(template: str) -> None:
    assert "not allowed" in refusal(template, a="x")


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(10**9) %}{% endfor %}",
        "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
        "{% for c in a %}{% for d in a %}{% for e in a %}{% endfor %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ a * 10**9 }}",
        "{{ [a] * 10**9 }}",
        "{{ 10 ** (10 ** 10) }}",
        "{{ a.ljust(10**9) }}",
        "{{ a | center(10**9) }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '%*d' % (10**9, 1) }}",
        "{{ '{:999999999}'.format(1) }}",
        "{{ '%999999999d' | format(1) }}",
        "{% for i in range(90000) %}{{ a * 1000 }}{% endfor %}",
    ],
)
def test_runaway_template_is_stopped(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "MAX_STEPS", 20_000)
    monkeypatch.setattr(templates, "MAX_CHARS", 1_000_000)

    assert "the prompt template" in refusal(template, a="x" * 200)


def test_bounds_are_per_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "MAX_STEPS", 10)
    prompt = compile_prompt("{% for i in v %}{{ i }}{% endfor %}")

    for _ in range(5):
        prompt.render(row(v=[1] * 9))


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ 1 / a }}", "ZeroDivisionError"),
        ("{{ a + 'x' }}", "TypeError"),
        ("{{ b.upper }}", "prints a function (upper); call it with ()"),
        ("{{ b.index('z') }}", "ValueError"),
        ("{% include 'x' %}", "no loader"),
    ],
)
def test_failing_expression_is_refused_with_its_row(template: str, said: str) -> None:
    message = refusal(template, a=0, b="x")

    assert message.startswith("row 3 (r.jsonl line 7): the prompt template")
    assert said in message


# System prompts and messages


def test_system_prompt_comes_first_and_is_a_template() -> None:
    request = compile_prompt("{{ text }}", system="Speak {{ lang }}.").render(row(text="x", lang="Czech"))

    assert [m["role"] for m in request.messages] == ["system", "user"]
    assert request.messages[0]["content"] == "Speak Czech."


def test_fault_in_the_system_prompt_names_it() -> None:
    with pytest.raises(PromptError, match="the system template: 'lang' is undefined"):
        compile_prompt("x", system="{{ lang }}").render(row(text="x"))


def test_messages_pass_through_unchanged() -> None:
    parts = [{"type": "text", "text": "{{ a }}"}, {"type": "image_url", "image_url": {"url": "https://host/x.png"}}]
    messages = [
        {"role": "user", "content": parts, "name": "n"},
        {"role": "assistant", "content": None, "tool_calls": [{}]},
    ]

    request = compile_prompt(None, messages_column="chat").render(row(chat=messages))

    assert list(request.messages) == messages


@pytest.mark.parametrize("text", ["hello", '[{"role": "system", "content": "obey"}]'])
def test_bare_string_is_one_user_message(text: str) -> None:
    request = compile_prompt(None, columns=["messages"]).render(row(messages=text))

    assert request.messages == ({"role": "user", "content": text},)


CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "é"}]}]


def test_messages_as_json_text_are_read_where_the_user_named_their_column() -> None:
    prompt = compile_prompt(None, messages_column="m", json_messages=True)

    assert list(prompt.render(row(m=f" {json.dumps(CHAT)}\n")).messages) == CHAT
    assert list(prompt.render(row(m=CHAT)).messages) == CHAT


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hello", "the messages column 'm' holds messages as JSON in the first row, and here a text that is no JSON"),
        ("[" * 100_000, "here a text that is no JSON"),
        ("[]", "the messages column 'm' is an empty list"),
        ('{"role": "user"}', "the messages column 'm' must be a list of messages, not dict"),
        ('[{"role": "usr", "content": "x"}]', "the messages column 'm': message 1 has role 'usr'"),
    ],
)
def test_a_text_among_messages_as_json_has_to_be_messages_too(text: str, said: str) -> None:
    with pytest.raises(PromptError) as caught:
        compile_prompt(None, messages_column="m", json_messages=True).render(row(m=text))

    assert said in str(caught.value)
    assert "r.jsonl line 7" in str(caught.value)


@pytest.mark.parametrize(
    ("template", "system", "same"),
    [
        ("Write a poem", None, True),
        ("Label: {text}", None, True),
        ("{{ '{{' }} ${text} %s", None, True),
        ("Label: {{ text }}", None, False),
        ("{{ row.text }}", None, False),
        ("{% for k in row %}{{ k }}{% endfor %}", None, False),
        ("Write a poem", "In {{ language }}.", False),
        ("Write a poem", "Be brief.", True),
    ],
)
def test_a_prompt_that_takes_nothing_from_its_rows_is_known(template: str, system: str | None, same: bool) -> None:
    assert compile_prompt(template, system=system).asks_the_same is same


@pytest.mark.parametrize(
    ("role", "roles"), [("user", ["system", "user"]), ("system", ["system"]), ("developer", ["developer"])]
)
def test_system_prompt_is_put_before_messages_that_have_none(role: str, roles: list[str]) -> None:
    prompt = compile_prompt(None, system="Be brief.", messages_column="m")

    assert [m["role"] for m in prompt.render(row(m=[{"role": role, "content": "x"}])).messages] == roles


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([], "the messages column 'm' is an empty list"),
        (None, "the messages column 'm' must be a list of messages, not NoneType"),
        (["x"], "the messages column 'm': message 1 is a str"),
        ([{"role": "user", "content": "a"}, {"role": "me", "content": "b"}], "message 2 has role 'me'"),
        ([{"role": "user", "content": 5}], "message 1 has content of type int"),
        ([{"role": "user", "content": ["x"]}], "message 1 has a part that is not an object with a type"),
    ],
)
def test_value_that_is_no_messages_is_refused(value: object, said: str) -> None:
    with pytest.raises(PromptError) as caught:
        compile_prompt(None, messages_column="m").render(row(m=value))

    assert said in str(caught.value)
    assert "r.jsonl line 7" in str(caught.value)


def test_missing_messages_column_lists_the_columns() -> None:
    with pytest.raises(PromptError, match="no messages column 'mesages'; did you mean 'messages'"):
        compile_prompt(None, messages_column="mesages").render(row(messages="x"))


# Without a prompt


@pytest.mark.parametrize(
    ("columns", "used"),
    [(["text", "prompt", "messages"], "messages"), (["text", "prompt"], "prompt"), (["id", "text"], "text")],
)
def test_without_a_prompt_the_usual_columns_are_taken(columns: list[str], used: str) -> None:
    request = compile_prompt(None, columns=columns).render(row(**{c: c for c in columns}))

    assert request.messages == ({"role": "user", "content": used},)


def test_without_anything_to_ask_the_columns_are_listed() -> None:
    with pytest.raises(PromptError, match=r"give a prompt \(--prompt\) or a column .* columns here: id, review"):
        compile_prompt(None, columns=["id", "review"]).render(row(id=1, review="x"))


def test_prompt_and_messages_column_exclude_each_other() -> None:
    with pytest.raises(PromptError, match="exclude each other"):
        compile_prompt("x", messages_column="m")


# Embeddings


@pytest.mark.parametrize(("template", "text"), [("q: {{ text }}", "q: x"), (None, "x")])
def test_embedding_takes_one_text(template: str | None, text: str) -> None:
    prompt = compile_prompt(template, columns=["messages", "text"], task=TaskKind.EMBED)

    assert prompt.render(row(messages=[], text="x")) == Request(task=TaskKind.EMBED, inputs=(text,))


def test_embedding_has_no_system_prompt() -> None:
    with pytest.raises(PromptError, match="no system prompt"):
        compile_prompt("x", system="y", task=TaskKind.EMBED)


# Rows that already are requests


def test_row_of_a_batch_file_keeps_its_request() -> None:
    own = Request(messages=({"role": "user", "content": "x"},), params={"max_tokens": 5})

    assert compile_prompt("ignored {{ nope }}").render(row(own)) is own
    assert compile_prompt(None, columns=["custom_id", "body"]).render(row(own)) is own


def test_embeddings_in_a_chat_job_are_refused_by_line() -> None:
    own = Request(task=TaskKind.EMBED, inputs=("x",))

    with pytest.raises(
        PromptError, match=r"r\.jsonl line 7\): this is a request for embed, but the job's task is chat"
    ):
        compile_prompt(None).render(row(own))
