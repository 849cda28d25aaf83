"""docs/troubleshooting.md quotes what the server really says: what needs no engine is provoked here."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from server.cli import main
from server.http_server import bind, close_all
from tests.server.conftest import ROOT, Site, eventually, running_site
from tests.server.fake_backend import Script

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
QUOTES = set(re.findall(r"`([^`]+)`", PAGE))
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


def quoted(text: str) -> str:
    assert text in QUOTES, "the page does not quote this"
    return text


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What a start that is refused says, on its one line."""
    assert main(argv) in (2, 75)
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--tensor-parallel-size 4", "not available here: one device computes"),
        ("--quantization awq", "not available here"),
        ("--max-modle-len 5", "unknown flag --max-modle-len: did you mean --max-model-len?"),
        ("--preemption-mode swap", "--preemption-mode swap needs host memory for KV blocks"),
        (
            "--max-num-batched-tokens 4 --max-num-seqs 8",
            "--max-num-batched-tokens 4 is less than --max-num-seqs 8",
        ),
    ],
)
def test_flags(capsys: pytest.CaptureFixture[str], argv: str, message: str) -> None:
    if message.startswith("not available"):
        message = f"{argv}: {message}"
    assert quoted(message) in refusal(capsys, *argv.split())


def test_model_folders(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def says(message: str) -> None:
        pattern = quoted(message).replace("--model X", f"--model {tmp_path}")
        assert pattern in refusal(capsys, "--model", str(tmp_path))

    says("--model X: no config.json in this directory")
    (tmp_path / "config.json").write_text('{"vocab_size": 4}')
    (tmp_path / "pytorch_model.bin").touch()
    says(
        "no *.safetensors (nor model.safetensors.index.json) in this directory; it holds "
        "pytorch_model.bin, which is another format"
    )
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    index = {"weight_map": {"a": shards[0], "b": shards[1]}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / shards[0]).touch()
    says(f"{shards[1]} missing (1 of 2 files named in model.safetensors.index.json)")
    (tmp_path / shards[1]).touch()
    says("--model X: no tokenizer here; looked for tokenizer.json and tokenizer_config.json")
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 9}}}')
    says("has token ids up to 9, but the model embeds only 4 (vocab_size in config.json)")


def test_no_model_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = str(tmp_path / "none")
    message = quoted(
        "--model X: no such directory; looked for config.json, *.safetensors and a tokenizer in it"
    )
    assert message.replace("X", model) in refusal(capsys, "--model", model)


def test_port_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    listeners = bind("127.0.0.1", 0)
    port = listeners[0].getsockname()[1]
    message = quoted("port 8000 on 127.0.0.1 is in use").replace("8000", str(port))
    try:
        assert message in refusal(capsys, "--port", str(port))
    finally:
        close_all(listeners)


async def error_of(site: Site, body: Any, path: str = CHAT, **more: Any) -> tuple[int, str, str]:
    status, answer = await site.post(path, body, **more)
    return status, answer["error"]["code"], answer["error"]["message"]


async def test_requests() -> None:
    async with running_site(served_model_name=["smol"]) as site:
        status, code, text = await error_of(site, {"messages": MESSAGES, "model": "Smol"})
        assert f"{status} `{code}`" in PAGE
        assert quoted("The model 'Smol' does not exist; served are 'smol'.") == text
        image = [{"type": "image_url", "image_url": {"url": "x"}}]
        status, code, text = await error_of(
            site, {"messages": [{"role": "user", "content": image}]}
        )
        assert f"{status} `{code}`" in PAGE
        message = "messages[0].content[0].type is 'image_url', but this model takes text only"
        assert quoted(message) == text
        assert (await error_of(site, {}, "/v1/chat"))[2] == quoted("There is no POST /v1/chat.")
        headers = {"Content-Type": "text/plain"}
        _, _, text = await error_of(site, None, data=b"{}", headers=headers)
        assert text.startswith(quoted("Content-Type must be application/json, got"))
        tools = [{"type": "function", "function": {"name": "f"}}]
        _, code, text = await error_of(site, {"messages": MESSAGES, "tools": tools})
        assert code == "unsupported_value"
        assert text.startswith(quoted("tools need to know how this model writes calls"))
        site.service.client.status.set_draining()
        _, code, text = await error_of(site, {"messages": MESSAGES})
        assert code == "draining"
        assert text.startswith(quoted("The server is draining: it takes no new requests."))


async def test_keys_and_loading() -> None:
    async with running_site(ready=False, api_key=["k"]) as site:
        assert (await error_of(site, {}))[2].startswith(quoted("An API key is required."))
        headers = {"Authorization": "Bearer wrong"}
        _, _, text = await error_of(site, {}, headers=headers)
        assert text.startswith(quoted("The API key is not valid."))
        headers = {"Authorization": "Bearer k"}
        site.service.client.status.starting("loading weights", 0.42)
        _, code, text = await error_of(site, {"messages": MESSAGES}, headers=headers)
        assert code == "not_ready"
        assert text.startswith(quoted("The server is starting: loading weights 42%"))


async def test_queue_full(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_site(max_queued_requests=1) as site:
        site.backend.script = lambda generate: Script(hold="queued")
        waiting = asyncio.create_task(site.post(CHAT, {"messages": MESSAGES}))
        await eventually(lambda: site.service.client.num_queued == 1)
        monkeypatch.setattr(type(site.service.client), "num_startable", 0)
        _, code, text = await error_of(site, {"messages": MESSAGES})
        assert code == "queue_full"
        assert text.startswith(quoted("1 requests wait already, and 1 more are too many"))
        waiting.cancel()


async def test_death() -> None:
    async with running_site() as site:
        site.service.client.status.set_dead("the engine process (pid 7) was killed by SIGKILL")
        _, code, text = await error_of(site, {"messages": MESSAGES})
        assert code == "engine_dead"
        message = "The engine has stopped: the engine process (pid 7) was killed by SIGKILL"
        assert text.startswith(quoted(message))
