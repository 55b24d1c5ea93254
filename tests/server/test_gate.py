"""Keys, ids, prefixes, CORS and log lines, as clients and readers of the log see them."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from octavo.cli.main import main
from octavo.core.errors import ConfigError
from octavo.server.settings import ServerSettings, read_api_keys, split_names
from tests.server.harness import ENVIRONMENT, ROOT, ServerProcess, fake_server, wait_until

ORIGIN = "https://app.example"
SECRET = "the words that nobody else may read"
ROUTES = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/echo"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/load"),
    ("GET", "/metrics"),
    ("GET", "/version"),
    ("GET", "/docs"),
    ("GET", "/nothing"),
    ("GET", "/health/"),
    ("GET", "//health"),
    ("GET", "/health%2f..%2fversion"),
    ("OPTIONS", "/v1/models"),
]


@pytest.fixture(scope="module")
def guarded_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Behind a proxy's prefix, with keys, CORS, and logs as JSON that have the prompts."""
    key_file = tmp_path_factory.mktemp("keys") / "keys"
    key_file.write_text("from-file\n\n  other \n")
    flags = ["--api-key", "one,two", "--api-key", "three", "--api-key-file", str(key_file), "--root-path", "/llm"]
    flags += ["--allowed-origins", json.dumps([ORIGIN]), "--log-format", "json"]
    flags += ["--enable-log-requests", "--max-log-len", "9", "--disable-access-log-for-endpoints", "/health,/ping"]
    yield from fake_server(flags=flags)


def base(server: ServerProcess) -> str:
    return server.url.removesuffix("/llm")


def key(name: str = "one") -> dict[str, str]:
    return {"Authorization": f"Bearer {name}"}


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_but_health_wants_a_key(guarded_server: ServerProcess, method: str, path: str) -> None:
    for headers in ({}, key("four"), key("on"), key("one,two"), {"Authorization": "Basic one"}, {"X-Api-Key": ""}):
        reply = httpx.request(method, base(guarded_server) + path, headers=headers)
        assert reply.status_code == 401, headers
        assert reply.headers["www-authenticate"] == "Bearer"
        error = reply.json()["error"]
        assert (error["code"], error["param"]) == ("invalid_api_key", None)
        assert "Authorization: Bearer" in error["message"]
    assert httpx.request(method, base(guarded_server) + path, headers=key()).status_code != 401


@pytest.mark.parametrize("path", ["/health", "/ready", "/ping"])
def test_health_is_open(guarded_server: ServerProcess, path: str) -> None:
    for prefix in ("", "/llm"):
        assert httpx.get(base(guarded_server) + prefix + path).status_code == 200


def test_each_key_of_flags_and_file_opens(guarded_server: ServerProcess) -> None:
    for name in ("one", "two", "three", "from-file", "other"):
        assert httpx.get(f"{guarded_server.url}/version", headers=key(name)).status_code == 200
        assert httpx.get(f"{guarded_server.url}/version", headers={"X-Api-Key": name}).status_code == 200
    assert httpx.get(f"{guarded_server.url}/version", headers={"Authorization": "bearer one"}).status_code == 200
    either = {**key("wrong"), "X-Api-Key": "one"}
    assert httpx.get(f"{guarded_server.url}/version", headers=either).status_code == 200


def test_anthropics_routes_say_in_their_own_shape_that_a_key_is_wanted(guarded_server: ServerProcess) -> None:
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        reply = httpx.post(guarded_server.url + path, headers={"X-Api-Key": "wrong", "X-Request-Id": "mine"})
        assert reply.status_code == 401
        assert reply.headers["request-id"] == "mine"
        error = reply.json()
        assert (error["type"], error["error"]["type"], error["request_id"]) == ("error", "authentication_error", "mine")


def test_the_openai_client_understands_the_refusal_of_its_key(guarded_server: ServerProcess) -> None:
    with pytest.raises(openai.AuthenticationError, match="wants an API key"):
        openai.OpenAI(base_url=f"{guarded_server.url}/v1", api_key="wrong", max_retries=0).models.list()
    client = openai.OpenAI(base_url=f"{guarded_server.url}/v1", api_key="two", max_retries=0)
    assert client.models.list().data[0].id == "echo"


def test_the_command_line_can_ask_a_server_that_wants_a_key(
    guarded_server: ServerProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["complete", "abc", "--max-tokens", "3", "--url", guarded_server.url]
    assert main([*command, "--api-key", "two"]) == 0
    assert main(command) == 2
    monkeypatch.setenv("OCTAVO_API_KEY", "three")
    assert main(command) == 0
    captured = capsys.readouterr()
    assert captured.out == "abc\nabc\n"
    assert "wants an API key" in captured.err


def test_routes_are_found_with_the_proxys_prefix_and_without(guarded_server: ServerProcess) -> None:
    for url in (base(guarded_server), base(guarded_server) + "/llm"):
        assert "version" in httpx.get(f"{url}/version", headers=key()).json()
    assert httpx.get(base(guarded_server) + "/llmore/version", headers=key()).status_code == 404
    assert "/llm/v1/completions" in httpx.get(f"{guarded_server.url}/docs", headers=key()).text


def test_pages_of_an_allowed_origin_may_ask_and_those_of_others_may_not(guarded_server: ServerProcess) -> None:
    url = f"{guarded_server.url}/v1/models"

    def preflight(origin: str) -> httpx.Response:
        headers = {"Access-Control-Request-Method": "GET", "Access-Control-Request-Headers": "authorization"}
        return httpx.options(url, headers={"Origin": origin, **headers})

    allowed = preflight(ORIGIN)
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == ORIGIN
    assert "authorization" in allowed.headers["access-control-allow-headers"]
    refused = preflight("https://evil.example")
    assert refused.status_code == 403
    assert "access-control-allow-origin" not in refused.headers
    assert httpx.get(url, headers={"Origin": ORIGIN}).headers["access-control-allow-origin"] == ORIGIN  # a 401
    evil = httpx.get(url, headers={"Origin": "https://evil.example", **key()})
    assert evil.status_code == 403
    assert "access-control-allow-origin" not in evil.headers


def test_without_allowed_origins_no_other_sites_page_may_ask(quick_server: ServerProcess) -> None:
    body = {"prompt": "abc", "max_tokens": 2}
    plain = {"Content-Type": "text/plain"}  # for which a browser does not ask first
    for origin in (ORIGIN, "null", "http://127.0.0.1", "http://127.0.0.1:1", "", "http://", quick_server.url + "0"):
        for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions"), ("POST", "/ping")):
            url = quick_server.url + path
            reply = httpx.request(method, url, content=json.dumps(body), headers={**plain, "Origin": origin})
            assert reply.status_code == 403, (origin, path)
            assert not [name for name in reply.headers if name.startswith("access-control")]
            assert "--allowed-origins" in reply.json()["error"]["message"]
    assert httpx.get(f"{quick_server.url}/health", headers={"Origin": ORIGIN}).status_code == 200
    message = httpx.post(f"{quick_server.url}/v1/messages", headers={"Origin": ORIGIN}).json()
    assert message["error"]["type"] == "permission_error"


def test_a_servers_own_pages_may_ask(quick_server: ServerProcess) -> None:
    for origin, host in ((quick_server.url, None), ("https://Llm.example", "llm.example")):
        headers = {"Origin": origin, **({"Host": host} if host else {})}
        body = {"prompt": "abc", "max_tokens": 2}
        assert httpx.post(f"{quick_server.url}/v1/completions", json=body, headers=headers).status_code == 200


def test_with_keys_too_requests_are_counted_by_route(guarded_server: ServerProcess) -> None:
    httpx.get(f"{guarded_server.url}/version", headers=key())
    httpx.get(f"{guarded_server.url}/version")
    shown = httpx.get(f"{guarded_server.url}/metrics", headers=key()).text
    for route, status in (("/version", "2xx"), ("none", "4xx")):
        assert f'http_requests_total{{handler="{route}",method="GET",status="{status}"}}' in shown


@pytest.mark.parametrize("chosen", ["mine-1", "x" * 128, "a/b:c+d=e"])
def test_a_clients_request_id_comes_back_on_every_kind_of_reply(quick_server: ServerProcess, chosen: str) -> None:
    headers = {"X-Request-Id": chosen}
    for path in ("/health", "/nothing", "/docs"):
        assert httpx.get(quick_server.url + path, headers=headers).headers.get_list("x-request-id") == [chosen]
    stream = {"prompt": "abc", "stream": True}
    reply = httpx.post(f"{quick_server.url}/v1/completions", json=stream, headers=headers)
    assert reply.headers["x-request-id"] == chosen
    assert f'"id":"cmpl-{chosen}"' in reply.text
    wait_until(lambda: "POST /v1/completions 200" in quick_server.log and f"[{chosen}]" in quick_server.log)


@pytest.mark.parametrize("chosen", [b"", b"x" * 129, b"with space", b"\xc3\xa9", b"a\tb"])
def test_an_id_that_is_not_fit_for_a_log_is_replaced(quick_server: ServerProcess, chosen: bytes) -> None:
    reply = httpx.get(f"{quick_server.url}/health", headers=[(b"X-Request-Id", chosen)])
    assert len(reply.headers["x-request-id"]) == 32
    assert reply.headers["x-request-id"] != httpx.get(f"{quick_server.url}/health").headers["x-request-id"]


def test_prompts_queries_and_keys_are_not_in_the_log(quick_server: ServerProcess) -> None:
    body = {"prompt": SECRET, "user": SECRET}
    httpx.post(f"{quick_server.url}/v1/completions?q=sesame", json=body, headers=key("s3cr3t"))
    httpx.post(f"{quick_server.url}/v1/completions", json={"prompt": SECRET, "temprature": 1})
    httpx.post(f"{quick_server.url}/tokenize", json={"prompt": SECRET})
    wait_until(lambda: "POST /tokenize 200" in quick_server.log)
    assert "POST /v1/completions 400" in quick_server.log
    for secret in (SECRET, "sesame", "s3cr3t"):
        assert secret not in quick_server.log


def log_lines(server: ServerProcess) -> list[dict[str, Any]]:
    return [json.loads(line) for line in list(server.lines)]  # every line is JSON


def test_json_logs_have_requests_with_shortened_prompts_and_access_lines(guarded_server: ServerProcess) -> None:
    headers = {"X-Request-Id": "logged-1", **key()}
    httpx.get(f"{guarded_server.url}/health", headers={"X-Request-Id": "not-logged"})
    httpx.post(f"{guarded_server.url}/v1/completions", json={"prompt": SECRET, "seed": 5}, headers=headers)
    wait_until(
        lambda: any("status" in line and line.get("request_id") == "logged-1" for line in log_lines(guarded_server))
    )
    lines = log_lines(guarded_server)
    mine = [line for line in lines if line.get("request_id") == "logged-1"]
    asked, answered = mine
    assert asked["logger"] == "octavo.requests"
    assert asked["prompt"] == SECRET[:9]
    assert len(asked["prompt_token_ids"]) == 9
    assert asked["num_prompt_tokens"] == len(SECRET)
    assert asked["params"]["seed"] == 5
    assert (answered["method"], answered["path"], answered["status"]) == ("POST", "/v1/completions", 200)
    assert answered["client"].startswith("127.0.0.1:")
    assert answered["seconds"] >= 0
    assert SECRET not in guarded_server.log
    assert "not-logged" not in guarded_server.log
    assert any("octavo serves" in line["message"] for line in lines)


def test_load_counts_what_is_being_generated(steady_server: ServerProcess) -> None:
    def load() -> int:
        return httpx.get(f"{steady_server.url}/load").json()["server_load"]

    before = load()
    with httpx.stream(
        "POST", f"{steady_server.url}/v1/completions", json={"prompt": "abc", "max_tokens": 900, "stream": True}
    ):
        wait_until(lambda: load() == before + 1)
    wait_until(lambda: load() == before)


@pytest.fixture(scope="module")
def canary_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, Path]]:
    """Tells whatever it opens with "canary" in the name; without ids of its own, access lines and docs."""
    folder = tmp_path_factory.mktemp("canary")
    (folder / "template.jinja").write_text("opened")
    flags = ["--canary", "canary", "--no-enable-request-id-headers", "--disable-uvicorn-access-log"]
    for server in fake_server(flags=[*flags, "--disable-fastapi-docs"]):
        yield server, folder


def test_no_path_or_url_in_a_request_is_ever_opened(canary_server: tuple[ServerProcess, Path]) -> None:
    server, folder = canary_server
    with socket.create_server(("127.0.0.1", 0)) as trap, httpx.Client() as client:
        trap.settimeout(0.3)
        url = f"http://127.0.0.1:{trap.getsockname()[1]}/canary.png"
        for bait in (str(folder / "template.jinja"), f"file://{folder}/template.jinja", url, "http://canary.invalid/x"):
            image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": bait}}]}
            include = "{% include '" + bait + "' %}"
            said = [{"role": "user", "content": bait, "name": bait}]
            for path, body in [
                ("chat/completions", {"messages": [image]}),
                ("chat/completions", {"messages": said, "chat_template": bait}),
                ("chat/completions", {"messages": said, "chat_template_kwargs": {"template": include}}),
                ("chat/completions", {"messages": said, "cache_salt": bait, "user": bait, "max_tokens": 3}),
                ("chat/completions", {"messages": said, "mm_processor_kwargs": {"path": bait}}),
                ("chat/completions", {"messages": said, "response_format": {"type": "json_schema", "$ref": bait}}),
                ("completions", {"prompt": bait, "model": bait}),
                ("completions", {"prompt": bait, "request_id": bait, "stop": bait, "max_tokens": 3}),
                ("completions", {"prompt": bait, "prompt_embeds": bait}),
                ("../tokenize", {"prompt": bait, "model": "echo", "return_token_strs": True}),
                ("../tokenize", {"messages": said, "chat_template": bait}),
            ]:
                client.post(f"{server.url}/v1/{path}", json=body, headers={"X-Request-Id": "a", "Referer": bait})
            client.get(f"{server.url}/v1/models/{bait}")
            client.get(f"{server.url}/docs?url={bait}")
        with pytest.raises(TimeoutError):
            trap.accept()
    assert "CANARY" not in server.log
    assert "Traceback" not in server.log


def test_what_is_switched_off_is_off(canary_server: tuple[ServerProcess, Path]) -> None:
    server, _ = canary_server
    assert "x-request-id" not in httpx.get(f"{server.url}/health").headers
    assert httpx.get(f"{server.url}/health", headers={"X-Request-Id": "a"}).headers["x-request-id"] == "a"
    missing = httpx.get(f"{server.url}/docs")
    assert missing.status_code == 404
    assert "/docs," not in missing.json()["error"]["message"]
    assert "octavo.access" not in server.log


def test_the_canary_sings_when_a_file_is_opened() -> None:
    code = "from tests.server.fake_server import watch_for; watch_for('canary'); open('/tmp/canary-not-there')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert "CANARY in open" in done.stderr


def test_keys_come_from_the_environment_only_if_no_other_is_given(tmp_path: Path) -> None:
    both = {"OCTAVO_API_KEY": "a, b", "VLLM_API_KEY": "c"}
    assert read_api_keys([], None, both) == ("a", "b")
    assert read_api_keys([], None, {"OCTAVO_API_KEY": "", "VLLM_API_KEY": "c"}) == ("c",)
    assert read_api_keys(["d"], None, both) == ("d",)
    assert read_api_keys([], None, {}) == ()
    file = tmp_path / "keys"
    file.write_text("e\n")
    assert read_api_keys(["d"], str(file), both) == ("d", "e")


@pytest.mark.parametrize("flags", [[""], ["a,"], [" "], ["a b"], ["é"], ["a\nb"]])
def test_a_key_that_cannot_be_is_refused_rather_than_left_out(flags: list[str]) -> None:
    with pytest.raises(ConfigError, match="--api-key"):
        read_api_keys(flags, None, {})


def test_a_key_file_that_says_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n\n")
    for name in ("empty", "missing", "."):
        with pytest.raises(ConfigError, match="--api-key-file"):
            read_api_keys([], str(tmp_path / name), {})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"port": 70000}, "70000; it must be between 0 and 65535"),
        ({"root_path": "llm"}, "begin with a slash"),
        ({"root_path": "/llm/"}, "not end with one"),
        ({"ssl_keyfile": "k"}, "--ssl-certfile"),
        ({"ssl_cert_reqs": 2}, "--ssl-certfile"),
        ({"ssl_certfile": "c", "ssl_cert_reqs": 2}, "--ssl-ca-certs"),
        ({"ssl_certfile": "c", "ssl_cert_reqs": 5}, "is 5"),
        ({"allow_credentials": True}, "--allowed-origins"),
        ({"allow_credentials": True, "allowed_origins": ("*",)}, "name the origins"),
        ({"client_timeout": 0.0}, "--client-timeout is 0.0"),
        ({"client_timeout": float("nan")}, "--client-timeout"),
        ({"limit_concurrency": 0}, "--limit-concurrency is 0"),
        ({"max_headers": 1}, "--h11-max-header-count"),
        ({"max_header_bytes": 1}, "--h11-max-incomplete-event-size"),
        ({"max_log_len": 5}, "--enable-log-requests"),
        ({"shutdown_timeout": -1.0}, "--shutdown-timeout is -1.0; it must be at least 0"),
        ({"shutdown_timeout": float("inf")}, "--shutdown-timeout is inf; it must be a number that ends"),
        ({"engine_timeout": float("nan")}, "--engine-timeout"),
        ({"max_engine_restarts": -1}, "--max-engine-restarts is -1"),
        ({"uds_mode": 0o1777}, "octal"),
    ],
)
def test_settings_that_cannot_be_are_refused_with_the_remedy(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ServerSettings(**fields)


def test_keys_are_not_in_what_is_printed_of_the_settings() -> None:
    assert "sesame" not in repr(ServerSettings(api_keys=("sesame",)))


def test_lists_are_json_or_have_commas() -> None:
    assert split_names('["a", "b"]') == split_names("a, b") == ("a", "b")
    for wrong in ("[1]", "[", '["a"'):
        with pytest.raises(ValueError, match=r"Expecting|list of texts"):
            split_names(wrong)
