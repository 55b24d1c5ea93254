"""/tokenize, /detokenize, and the page about the API."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest

from octavo.server import tokenize
from octavo.server.app import route_entries
from octavo.server.reading import UNSUPPORTED
from tests.server.harness import ServerProcess

HELLO = [{"role": "user", "content": "hé"}]


def post(server: ServerProcess, route: str, body: Any) -> Any:
    reply = httpx.post(server.url + route, json=body, timeout=20)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_a_prompt_is_counted_and_tokenized(quick_server: ServerProcess) -> None:
    expected = {"count": 2, "max_model_len": 1024, "tokens": [104, 105], "token_strs": None}
    assert post(quick_server, "/tokenize", {"prompt": "hi", "model": "echo"}) == expected
    with_strings = post(quick_server, "/tokenize", {"prompt": "hé", "return_token_strs": True})
    assert with_strings["token_strs"] == ["h", "\N{REPLACEMENT CHARACTER}", "\N{REPLACEMENT CHARACTER}"]


def test_messages_are_tokenized_as_chat_would(quick_server: ServerProcess) -> None:
    reply = post(quick_server, "/tokenize", {"messages": HELLO})
    assert bytes(reply["tokens"]).decode() == "user:hé\n>"
    without = post(quick_server, "/tokenize", {"messages": HELLO, "add_generation_prompt": False})
    assert bytes(without["tokens"]).decode() == "user:hé\n"
    opened = {"messages": [*HELLO, {"role": "assistant", "content": "so"}], "continue_final_message": True}
    assert bytes(post(quick_server, "/tokenize", opened)["tokens"]).decode() == "user:hé\nassistant:so"
    chat = httpx.post(f"{quick_server.url}/v1/chat/completions", json={"messages": HELLO, "max_tokens": 1}).json()
    assert chat["usage"]["prompt_tokens"] == reply["count"]


def test_a_text_longer_than_any_prompt_is_counted_too(quick_server: ServerProcess) -> None:
    assert post(quick_server, "/tokenize", {"prompt": "x" * 100_000})["count"] == 100_000
    assert post(quick_server, "/tokenize", {"prompt": ""})["count"] == 0


def test_tokens_become_the_text_they_came_from(quick_server: ServerProcess) -> None:
    tokens = post(quick_server, "/tokenize", {"prompt": "naïve ☃"})["tokens"]
    assert post(quick_server, "/detokenize", {"tokens": tokens}) == {"prompt": "naïve ☃"}
    assert post(quick_server, "/detokenize", {"tokens": [104, 256]}) == {"prompt": "h<eos>"}
    assert post(quick_server, "/detokenize", {"tokens": []}) == {"prompt": ""}
    assert post(quick_server, "/detokenize", {"tokens": [104] * 20_000}) == {"prompt": "h" * 20_000}


@pytest.mark.parametrize(
    ("route", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HELLO}, 400, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"messages": [{"role": "user"}]}, 400, "messages[0].content"),
        ("/tokenize", {"prompt": "a", "add_specials": True}, 400, "add_specials"),
        ("/tokenize", {"prompt": "a", "chat_template": "x"}, 400, "chat_template"),
        ("/tokenize", {"messages": HELLO, "chat_template": "x"}, 400, "chat_template"),
        (
            "/tokenize",
            {"messages": HELLO, "continue_final_message": True, "add_generation_prompt": True},
            400,
            "continue_final_message",
        ),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/tokenize", {"prompt": "x" * (tokenize.MAX_TEXT_CHARACTERS + 1)}, 400, "prompt"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [257]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [2**70]}, 400, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [1] * (tokenize.MAX_TOKENS + 1)}, 400, "tokens"),
        ("/detokenize", {"tokens": [1], "model": "other"}, 404, "model"),
    ],
)
def test_what_cannot_be_tokenized_is_refused_by_name(
    quick_server: ServerProcess, route: str, body: Any, status: int, param: str
) -> None:
    reply = httpx.post(quick_server.url + route, json=body, timeout=20)
    assert reply.status_code == status, reply.text
    assert reply.json()["error"]["param"] == param
    assert len(reply.json()["error"]["message"]) < 500


def test_version_ready_and_ping_answer(quick_server: ServerProcess) -> None:
    assert set(httpx.get(f"{quick_server.url}/version").json()) == {"version"}
    for method, path in (("GET", "/ready"), ("GET", "/ping"), ("POST", "/ping"), ("HEAD", "/health")):
        reply = httpx.request(method, quick_server.url + path)
        assert (reply.status_code, reply.content) == (200, b"")


def test_one_model_is_shown_by_its_name_and_no_other(quick_server: ServerProcess) -> None:
    card = httpx.get(f"{quick_server.url}/v1/models/echo").json()
    assert (card["id"], card["object"], card["root"], card["max_model_len"]) == ("echo", "model", "echo", 1024)
    missing = httpx.get(f"{quick_server.url}/v1/models/org/other")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


def test_the_page_about_the_api_has_every_route_and_field_and_loads_nothing(quick_server: ServerProcess) -> None:
    reply = httpx.get(f"{quick_server.url}/docs")
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    assert reply.headers["content-security-policy"].startswith("default-src 'none'")
    page = reply.text
    for entry in route_entries(with_docs=True):
        assert f"</b> {entry.path.replace(':path', '')}<" in page
        for field in entry.body.__struct_fields__ if entry.body else ():
            assert f"<td>{field}</td>" in page
    assert all(f"<code>{name}</code>" in page for name in UNSUPPORTED)
    assert not re.search(r"(?:src|href|url|import|script)\s*[=(:]", page)
    assert "octavo.server" not in page
    assert f"curl {quick_server.url}/v1/chat/completions" in page
    strange = httpx.get(f"{quick_server.url}/docs", headers={"Host": "<b>"}).text
    assert "curl http://&lt;b&gt;/v1" in strange


def test_an_idle_page_reader_cannot_put_markup_into_it(quick_server: ServerProcess) -> None:
    missing = httpx.get(f"{quick_server.url}/docs/<script>")
    assert missing.headers["content-type"] == "application/json"
