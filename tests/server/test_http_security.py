"""Keys, browsers of other origins, TLS: who gets in, and what everybody else is told."""

import asyncio
import json
import logging
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from engine.api.config import ConfigError, EngineConfig
from server.access import Access, keys_of
from server.cli import main, parse
from server.config import ServerConfig, child_environment, shown_settings, with_environment
from server.cors import CorsPolicy
from server.http_server import bind, close_all, is_loopback
from server.launcher import log_settings
from server.settings_check import check_settings
from tests.server import certificates
from tests.server.conftest import Site, running_site, spawned

TEXT = "/v1/completions"
BODY = {"prompt": "x"}
KEY, ADMIN = "user-key-1", "admin-key-1"
OPEN = ("/live", "/health", "/ping", "/ready", "/version", "/metrics")
CLOSED = [
    ("GET", "/v1/models"), ("GET", "/v1/models/tiny"), ("GET", "/load"), ("POST", TEXT),
    ("POST", "/v1/chat/completions"), ("POST", "/tokenize"), ("POST", "/v1/detokenize"),
    ("POST", "/v1/embeddings"), ("GET", "/nothing"), ("DELETE", TEXT),
    ("OPTIONS", TEXT), ("GET", "/metrics/x"), ("GET", "/live/x"),
    ("GET", "/debug/kv"), ("GET", "/debug/requests/1/timeline"), ("GET", "/page/x"),
]  # fmt: skip
ADMIN_CALLS = [
    ("GET", "/server_info"), ("POST", "/admin/drain"), ("POST", "/admin/abort"),
    ("POST", "/admin/reset_prefix_cache"), ("POST", "/start_profile"), ("POST", "/stop_profile"),
]  # fmt: skip


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def ask(
    site: Site, method: str, path: str, headers: dict[str, str] | None = None
) -> tuple[int, Any, Any]:
    """Status, headers and decoded body ({} if empty)."""
    body = BODY if method == "POST" else None
    async with site.session.request(method, site.url + path, json=body, headers=headers) as answer:
        text = await answer.read()
        is_json = answer.content_type == "application/json"
        return answer.status, answer.headers, json.loads(text) if text and is_json else {}


# --- keys ---------------------------------------------------------------------------------------------


async def test_everything_is_closed_but_probes() -> None:
    async with running_site(api_key=[KEY, "second"]) as site:
        for path in OPEN:
            for spelling in (path, path + "/"):
                assert (await ask(site, "GET", spelling))[0] == 200
        for method, path in CLOSED:
            for headers in ({}, bearer("wrong"), {"Authorization": f"Basic {KEY}"}):
                status, answered, body = await ask(site, method, path, headers)
                assert (status, body["error"]["code"]) == (401, "invalid_api_key"), (method, path)
                assert body["error"]["type"] == "authentication_error"
                assert answered["WWW-Authenticate"] == "Bearer"
                assert answered["X-Request-Id"]
        assert site.backend.generates == []


@pytest.mark.parametrize(
    "headers",
    [
        bearer(KEY),
        bearer("second"),
        {"Authorization": f"bearer {KEY}"},
        {"Authorization": f"BEARER   {KEY} "},
        {"api-key": KEY},
        {"X-API-Key": KEY},
        {"Authorization": "Bearer wrong", "x-api-key": KEY},
    ],
)
async def test_spellings_of_a_key(headers: dict[str, str]) -> None:
    async with running_site(api_key=[KEY, "second"]) as site:
        assert (await ask(site, "POST", TEXT, headers))[0] == 200


@pytest.mark.parametrize("key", ["", "user", KEY + "x", KEY.upper(), "é", "a b"])
async def test_keys_that_are_not_quite_right(key: str) -> None:
    async with running_site(api_key=[KEY]) as site:
        assert (await ask(site, "GET", "/v1/models", {"x-api-key": key}))[0] == 401


async def test_the_official_client_sends_its_key() -> None:
    async with running_site(api_key=[KEY]) as site:
        for key, refused in ((KEY, False), ("wrong", True)):
            client = openai.AsyncOpenAI(base_url=site.url + "/v1", api_key=key, max_retries=0)
            if refused:
                with pytest.raises(openai.AuthenticationError):
                    await client.models.list()
            else:
                assert (await client.models.list()).data[0].id == "tiny"
            await client.close()


async def test_a_refused_body_is_not_asked_for() -> None:
    """Expect: 100-continue without a key gets 401, and no 100 before it."""
    async with running_site(api_key=[KEY]) as site:
        host, port = site.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\n"
            b"Content-Length: 15\r\nConnection: close\r\n\r\n"
        )
        assert (await reader.readline()).split(b" ")[1] == b"401"
        writer.close()


async def test_admin_paths_do_not_exist_without_an_admin_key(site: Site) -> None:
    for method, path in ADMIN_CALLS:
        status, _, body = await ask(site, method, path)
        assert (status, body["error"]["code"]) == (404, "unknown_url"), path


async def test_admin_paths_need_the_admin_key() -> None:
    async with running_site(api_key=[KEY], admin_key=ADMIN) as site:
        for method, path in ADMIN_CALLS:
            for spelling in (path, path + "/"):
                assert (await ask(site, method, spelling))[0] == 401
                status, _, body = await ask(site, method, spelling, bearer(KEY))
                assert (status, body["error"]["code"]) == (403, "forbidden")
                assert body["error"]["type"] == "permission_error"
        assert (await ask(site, "GET", "/server_info", bearer(ADMIN)))[0] == 200
        assert (await ask(site, "POST", TEXT, bearer(ADMIN)))[0] == 200, "it opens all"
        assert site.backend.controls == []


async def test_an_admin_key_alone_leaves_the_rest_open() -> None:
    async with running_site(admin_key=ADMIN) as site:
        assert (await ask(site, "POST", TEXT))[0] == 200
        for method, path in ADMIN_CALLS:
            status, _, body = await ask(site, method, path)
            assert (status, body["error"]["code"]) == (401, "invalid_api_key")
        assert (await ask(site, "GET", "/%61dmin/abort"))[0] == 401, "however it is spelled"


@pytest.mark.parametrize("keys", [{"api_key": [KEY]}, {"admin_key": KEY}])
async def test_protected_metrics(keys: dict[str, Any]) -> None:
    async with running_site(protect_metrics=True, **keys) as site:
        assert (await ask(site, "GET", "/metrics"))[0] == 401
        assert (await ask(site, "GET", "/metrics/"))[0] == 401
        assert (await ask(site, "GET", "/metrics", bearer(KEY)))[0] == 200
        assert (await ask(site, "GET", "/live"))[0] == 200


async def test_keys_are_never_logged_nor_shown(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    settings = {"api_key": [KEY], "admin_key": ADMIN, "log_requests": "prompts"}
    log_settings(ServerConfig(**settings), EngineConfig())
    async with running_site(**settings) as site:
        await ask(site, "POST", TEXT, bearer(KEY))
        await ask(site, "POST", TEXT, bearer("stray-key"))
        _, _, info = await ask(site, "GET", "/server_info", bearer(ADMIN))
    told = caplog.text + json.dumps(info)
    assert "api_key" in told
    assert [key for key in (KEY, ADMIN, "stray-key") if key in told] == []


def test_key_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the team\none\n\n  two  \n")
    access = Access.from_config(ServerConfig(api_key=["zero"], api_key_file=str(file)))
    assert len(access.user_keys) == 3
    access.check(TEXT, bearer("two"))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"api_key": [" "]}, "--api-key: the key is empty"),
        ({"api_key": ["a b"]}, "no spaces"),
        ({"api_key": ["clé"]}, "ASCII"),
        ({"api_key_file": "/nowhere"}, "/nowhere"),
        ({"admin_key": "k", "api_key": ["k"]}, "--admin-key is also"),
        ({"protect_metrics": True}, "--protect-metrics needs a key"),
    ],
)
def test_keys_that_cannot_work(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        check_settings(ServerConfig(**settings), EngineConfig())
    assert caught.value.exit_code == 2
    assert "clé" not in str(caught.value)


def test_an_empty_key_file_does_not_open_the_server(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# nothing yet\n")
    with pytest.raises(ConfigError, match="leave the server open"):
        Access.from_config(ServerConfig(api_key_file=str(file)))


def test_keys_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLUICE_API_KEY", "from-env")
    monkeypatch.setenv("SLUICE_ADMIN_KEY", "admin-env")
    config = with_environment(ServerConfig(api_key=["a"]))
    assert (config.api_key, config.admin_key) == (["a", "from-env"], "admin-env")
    assert with_environment(ServerConfig(admin_key="flag")).admin_key == "flag"
    assert not {"SLUICE_API_KEY", "SLUICE_ADMIN_KEY"} & set(child_environment())
    monkeypatch.setenv("SLUICE_API_KEY", "")
    assert main([]) == 2
    assert "SLUICE_API_KEY is empty" in capsys.readouterr().err


def test_key_flags_add_up(tmp_path: Path) -> None:
    server, engine = parse(["--api-key", "a", "--api-key=b", "/m"])
    assert (server.api_key, engine.model) == (["a", "b"], "/m")
    file = tmp_path / "c.yaml"
    file.write_text("api-key: [a, b]\nallowed-origins: 'https://x.org'\n")
    server, _ = parse(["--config", str(file)])
    assert (server.api_key, server.allowed_origins) == (["a", "b"], ["https://x.org"])
    assert shown_settings(server)["api_key"] == "set"


def test_scheme_without_a_key_is_no_key() -> None:
    assert keys_of({"Authorization": "Bearer "}) == []
    assert keys_of({"Authorization": ""}) == []


@pytest.mark.parametrize(
    ("host", "is_local"), [("127.0.0.1", True), ("localhost", True), ("0.0.0.0", False)]
)
def test_addresses_that_others_can_reach(host: str, is_local: bool) -> None:
    listeners = bind(host, 0)
    assert all(is_loopback(listener) for listener in listeners) is is_local
    close_all(listeners)


def test_an_open_door_is_told_at_the_start(tmp_path: Path) -> None:
    """The engine cannot start here, which takes long enough for the first lines of the log."""
    for name, text in (("config.json", "{}"), ("model.safetensors", ""), ("tokenizer.json", "{}")):
        (tmp_path / name).write_text(text)
    with spawned(str(tmp_path), "--host", "0.0.0.0") as server:
        server.process.wait(60)
        log = server.log.read_text()
    assert "others can reach http://0.0.0.0:" in log
    assert "no key is set" in log


# --- browsers -----------------------------------------------------------------------------------------

ORIGIN = "https://chat.example.org"
PREFLIGHT = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST"}


async def test_no_cors_unless_asked_for(site: Site) -> None:
    _, headers, _ = await ask(site, "POST", TEXT, {"Origin": ORIGIN})
    assert not [name for name in headers if name.lower().startswith("access-control")]
    status, headers, body = await ask(site, "OPTIONS", TEXT, PREFLIGHT)
    assert (status, headers["Allow"], body["error"]["code"]) == (405, "POST", "method_not_allowed")


async def test_answers_to_allowed_origins() -> None:
    async with running_site(allowed_origins=[ORIGIN, "https://b.org"], api_key=[KEY]) as site:
        for method, path, key, expected in (
            ("POST", TEXT, KEY, 200),
            ("POST", TEXT, "wrong", 401),
            ("GET", "/nothing", KEY, 404),
            ("DELETE", TEXT, KEY, 405),
            ("GET", "/live", "", 200),
        ):
            status, headers, _ = await ask(
                site, method, path, {"Origin": ORIGIN, **(bearer(key) if key else {})}
            )
            assert status == expected
            assert headers["Access-Control-Allow-Origin"] == ORIGIN
            assert headers["Vary"] == "Origin"
            exposed = headers["Access-Control-Expose-Headers"]
            assert {"X-Request-Id", "Retry-After"} <= set(exposed.split(", "))
            assert "Access-Control-Allow-Credentials" not in headers
        for origin in ("https://evil.org", ORIGIN + ".evil.org", "null", ""):
            _, headers, _ = await ask(site, "GET", "/live", {"Origin": origin})
            assert "Access-Control-Allow-Origin" not in headers
            assert headers["Vary"] == "Origin", "caches must not give it to others"


async def test_streams_carry_cors_headers_too() -> None:
    async with running_site(allowed_origins=["*"]) as site:
        body = {**BODY, "stream": True}
        async with site.session.post(
            site.url + TEXT, json=body, headers={"Origin": ORIGIN}
        ) as answer:
            assert answer.headers["Access-Control-Allow-Origin"] == "*"
            assert "Vary" not in answer.headers
            assert (await answer.text()).endswith("data: [DONE]\n\n")


async def test_preflight_needs_no_key() -> None:
    async with running_site(allowed_origins=[ORIGIN], api_key=[KEY]) as site:
        wish = {**PREFLIGHT, "Access-Control-Request-Headers": "authorization, content-type"}
        status, headers, _ = await ask(site, "OPTIONS", TEXT, wish)
        assert status == 204
        assert headers["Access-Control-Allow-Origin"] == ORIGIN
        assert headers["Access-Control-Allow-Methods"] == "GET, HEAD, POST"
        assert headers["Access-Control-Allow-Headers"] == "authorization, content-type"
        assert int(headers["Access-Control-Max-Age"]) > 0
        status, headers, _ = await ask(site, "OPTIONS", TEXT, {**wish, "Origin": "https://c.org"})
        assert status == 204
        assert not [name for name in headers if name.startswith("Access-Control")]
        assert (await ask(site, "OPTIONS", TEXT))[0] == 401, "no preflight: a request like others"


async def test_narrow_methods_and_headers_and_credentials() -> None:
    async with running_site(
        allowed_origins=[f'["{ORIGIN}"]'],
        allowed_methods=["post"],
        allowed_headers=['["Content-Type"]'],
        allow_credentials=True,
    ) as site:
        wish = {**PREFLIGHT, "Access-Control-Request-Headers": "x-other,content-type"}
        _, headers, _ = await ask(site, "OPTIONS", TEXT, wish)
        assert headers["Access-Control-Allow-Methods"] == "POST"
        assert headers["Access-Control-Allow-Headers"] == "content-type"
        assert headers["Access-Control-Allow-Credentials"] == "true"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"allowed_origins": ["*"], "allow_credentials": True}, "name the origins"),
        ({"allowed_origins": ['["*"]'], "allow_credentials": True}, "name the origins"),
        ({"allowed_origins": ["chat.example.org"]}, "an origin is like"),
        ({"allowed_origins": ["https://a.org/"]}, "without a slash"),
        ({"allowed_origins": ["[1]"]}, "strings"),
        ({"allowed_origins": ["[x"]}, "no JSON list"),
        ({"allowed_methods": ["A\r\nB"]}, "--allowed-methods"),
    ],
)
def test_cors_settings_that_cannot_work(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_settings(ServerConfig(**settings), EngineConfig())


async def test_pages_cannot_send_bodies_without_a_type(site: Site) -> None:
    """Browsers do not ask before they send these, so any page could make the server work."""
    data = json.dumps(BODY).encode()
    for headers, expected in (({}, 200), ({"Origin": ORIGIN}, 415)):
        async with site.session.post(
            site.url + TEXT, data=data, headers=headers, skip_auto_headers=["Content-Type"]
        ) as answer:
            assert answer.status == expected
    assert len(site.backend.generates) == 1


def test_no_policy_without_origins() -> None:
    assert CorsPolicy.from_config(ServerConfig()) is None


# --- TLS ----------------------------------------------------------------------------------------------


def client_context(*certificate: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=certificates.FIRST_CERTIFICATE)
    context.load_verify_locations(cadata=certificates.SECOND_CERTIFICATE)
    if certificate:
        context.load_cert_chain(*certificate)
    return context


async def test_https(tmp_path: Path) -> None:
    cert, key = certificates.write_first(tmp_path)
    async with running_site(ssl_certfile=cert, ssl_keyfile=key) as site:
        context = client_context()
        async with site.session.post(
            site.url + TEXT, json={**BODY, "stream": True}, ssl=context
        ) as answer:
            assert (await answer.text()).endswith("data: [DONE]\n\n")
        plain = site.url.replace("https", "http")
        with pytest.raises(aiohttp.ClientError):
            await site.session.get(plain + "/live")
        async with site.session.get(site.url + "/live", ssl=context) as answer:
            assert answer.status == 200


async def test_certificates_of_clients(tmp_path: Path) -> None:
    cert, key = certificates.write_first(tmp_path)
    folder = tmp_path / "client"
    folder.mkdir()
    client = certificates.write_second(folder)
    settings = {"ssl_certfile": cert, "ssl_keyfile": key, "ssl_ca_certs": client[0]}
    async with running_site(**settings, ssl_cert_reqs=2) as site:
        with pytest.raises((aiohttp.ClientError, ssl.SSLError)):
            async with site.session.get(site.url + "/live", ssl=client_context()) as answer:
                await answer.read()
        async with site.session.get(site.url + "/live", ssl=client_context(*client)) as answer:
            assert answer.status == 200


async def test_a_certificate_is_read_again(tmp_path: Path) -> None:
    """New connections see the new one; files that do not fit change nothing."""
    cert, key = certificates.write_first(tmp_path)
    async with running_site(ssl_certfile=cert, ssl_keyfile=key) as site:
        assert site.tls is not None
        assert await served_certificate(site) == certificates.FIRST_CERTIFICATE
        certificates.write_second(tmp_path)
        assert await served_certificate(site) == certificates.FIRST_CERTIFICATE
        site.tls.reload()
        assert await served_certificate(site) == certificates.SECOND_CERTIFICATE
        certificates.write(tmp_path, certificates.FIRST_CERTIFICATE, certificates.SECOND_KEY)
        with pytest.raises(ConfigError, match="do not belong together"):
            site.tls.reload()
        assert await served_certificate(site) == certificates.SECOND_CERTIFICATE


async def served_certificate(site: Site) -> str:
    """In PEM."""
    port = int(site.url.rpartition(":")[2])
    return await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port))


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"ssl_keyfile": "k"}, "needs --ssl-certfile"),
        ({"ssl_cert_reqs": 2}, "needs --ssl-certfile"),
        ({"ssl_cert_reqs": 5}, "choose 0, 1 or 2"),
        ({"ssl_certfile": "/nowhere"}, "no such file"),
        ({"ssl_certfile": "CERT"}, "no usable PEM"),
        ({"ssl_certfile": "CERT", "ssl_keyfile": "OTHER"}, "do not belong together"),
        ({"ssl_certfile": "CERT", "ssl_keyfile": "LOCKED"}, "encrypted"),
        ({"ssl_certfile": "CERT", "ssl_keyfile": "KEY", "ssl_cert_reqs": 2}, "--ssl-ca-certs"),
        ({"ssl_certfile": "CERT", "ssl_keyfile": "KEY", "ssl_ca_certs": "KEY"}, "--ssl-ca-certs"),
    ],
)
def test_tls_settings_that_cannot_work(tmp_path: Path, files: dict[str, Any], words: str) -> None:
    cert, key = certificates.write_first(tmp_path)
    other, locked = tmp_path / "other.key", tmp_path / "locked.key"
    other.write_text(certificates.SECOND_KEY)
    locked.write_text(certificates.ENCRYPTED_KEY)
    names = {"CERT": cert, "KEY": key, "OTHER": str(other), "LOCKED": str(locked)}
    settings = {name: names.get(value, value) for name, value in files.items()}
    with pytest.raises(ConfigError, match=words):
        check_settings(ServerConfig(**settings), EngineConfig())
