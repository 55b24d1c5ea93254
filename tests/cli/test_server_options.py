from __future__ import annotations

from pathlib import Path

import pytest

from octavo.cli.parser import Parser
from octavo.cli.server_options import add_server_flags, server_settings
from octavo.core.errors import ConfigError
from octavo.server.settings import KEY_VARIABLES, ServerSettings


@pytest.fixture(autouse=True)
def no_keys_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KEY_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def settings_of(*flags: str) -> ServerSettings:
    parser = Parser(prog="octavo test")
    add_server_flags(parser)
    return server_settings(parser.parse_args(flags))


def test_without_flags_the_settings_are_the_defaults() -> None:
    assert settings_of() == ServerSettings()


def test_every_flag_reaches_its_setting(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("c\n")
    flags = (
        "--host 0.0.0.0 --port 9000 --uds /s --uds-mode 660 --root-path /llm --disable-fastapi-docs --api-key a,b "
        f"--api-key-file {tmp_path}/keys --ssl-certfile cert --ssl-keyfile key --ssl-ca-certs ca --ssl-cert-reqs 2 "
        "--ssl-ciphers HIGH --max-num-queued-reqs 9 --stream-interval 4 --disable-log-stats --uvicorn-log-level error "
        '--allowed-origins ["https://a"] --allowed-methods GET,POST --allowed-headers ["X-A"] --allow-credentials '
        "--limit-concurrency 1K --client-timeout 1.5 --h11-max-incomplete-event-size 8K --h11-max-header-count 50 "
        "--no-enable-request-id-headers --log-format json --disable-uvicorn-access-log "
        "--disable-access-log-for-endpoints /health,/metrics --enable-log-requests --max-log-len 100 "
        "--metrics-prefix vllm"
    )
    assert settings_of(*flags.split()) == ServerSettings(
        host="0.0.0.0",
        port=9000,
        uds="/s",
        uds_mode=0o660,
        root_path="/llm",
        api_keys=("a", "b", "c"),
        ssl_keyfile="key",
        ssl_certfile="cert",
        ssl_ca_certs="ca",
        ssl_cert_reqs=2,
        allowed_origins=("https://a",),
        allowed_methods=("GET", "POST"),
        allowed_headers=("X-A",),
        allow_credentials=True,
        max_header_bytes=8192,
        max_headers=50,
        limit_concurrency=1024,
        client_timeout=1.5,
        ssl_ciphers="HIGH",
        max_num_queued_reqs=9,
        stream_interval=4,
        log_stats=False,
        access_log_level="error",
        request_id_headers=False,
        access_log=False,
        unlogged_paths=frozenset({"/health", "/metrics"}),
        log_format="json",
        log_requests=True,
        max_log_len=100,
        metrics_prefix="vllm",
        docs=False,
    )


def test_every_setting_has_a_flag() -> None:
    parser = Parser(prog="octavo test")
    add_server_flags(parser)
    num_flags = sum(bool(action.option_strings) for action in parser._actions) - 1  # without --help
    num_settings = len(ServerSettings.__dataclass_fields__)
    assert num_flags == num_settings + 3  # keys have two, parsers three


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--stream-interval", "0"], "--stream-interval is 0; it must be at least 1"),
        (["--max-num-queued-reqs", "0"], "--max-num-queued-reqs is 0; it must be at least 1"),
        (["--ssl-ciphers", "HIGH"], "need --ssl-certfile"),
        (
            ["--allowed-origins", "foo"],
            "--allowed-origins has 'foo', which no browser sends; it must look like https://",
        ),
        (["--allowed-origins", "https://a.b/"], "scheme and host without a path"),
        (["--disable-access-log-for-endpoints", "/metrics,health"], "has 'health'; it must be a path, like /health"),
    ],
)
def test_settings_that_cannot_be_are_refused(flags: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        settings_of(*flags)


def test_the_flags_of_chat_templates_reach_their_settings(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text("{{ messages }} é")
    flags = f"--chat-template {tmp_path}/chat.jinja --chat-template-content-format openai --response-role bot"
    settings = settings_of(
        *flags.split(), "--trust-request-chat-template", "--default-chat-template-kwargs", '{"mood": "calm"}'
    )
    assert settings == ServerSettings(
        chat_template="{{ messages }} é",
        chat_template_content_format="openai",
        response_role="bot",
        trust_request_chat_template=True,
        default_chat_template_kwargs={"mood": "calm"},
    )
    assert settings_of("--chat-template", "{{ messages }}").chat_template == "{{ messages }}"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--chat-template", "no/such.jinja"], "--chat-template no/such.jinja cannot be read"),
        (["--default-chat-template-kwargs", '{"messages": 1}'], "sets 'messages'"),
        (["--response-role", ""], "--response-role is empty"),
    ],
)
def test_flags_of_chat_templates_that_cannot_be_are_refused(flags: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        settings_of(*flags)


def test_a_key_of_the_environment_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "v")
    assert settings_of().api_keys == ("v",)
    assert settings_of("--api-key", "a").api_keys == ("a",)


def test_an_empty_host_does_not_mean_every_address() -> None:
    with pytest.raises(ConfigError, match="--host is empty"):
        settings_of("--host", "")


@pytest.mark.parametrize("prefix", ["", "8-bit", "a:b", "vllm\n"])
def test_a_prefix_that_prometheus_would_refuse_is_one_clear_error(prefix: str) -> None:
    with pytest.raises(ConfigError, match="letters, digits and underscores"):
        settings_of("--metrics-prefix", prefix)


def test_an_empty_key_is_one_clear_error() -> None:
    with pytest.raises(ConfigError, match="--api-key has an empty key"):
        settings_of("--api-key", "")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--uds-mode", "9"], "octal"),
        (["--allowed-origins", "[1]"], "JSON list"),
        (["--log-format", "xml"], "text"),
        (["--client-timeout", "soon"], "not a number"),
        (["--uvicorn-log-level", "loud"], "'warning'"),
    ],
)
def test_values_that_cannot_be_are_refused(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        settings_of(*flags)
    assert words in capsys.readouterr().err
