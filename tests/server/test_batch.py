"""scripts/batch.py on a tiny model: the same answers as the server's code gives, whatever interrupts it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.api.messages import Generate
from scripts import batch
from scripts.operate.batch_file import open_output
from scripts.operate.batch_input import open_input
from tests.engine_cpu.tiny_models import make_tiny
from tests.waiting import wait_until
from tokenizer_proc.pipeline import TextPipeline
from tokenizer_proc.prepare import PreparedRequest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "batch.py"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SMALL = [
    "--dtype", "float32", "--num-blocks", "400", "--max-num-batched-tokens", "64", "--max-num-seqs", "4",
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny("llama", tmp_path_factory.mktemp("tiny"))


def line(custom_id: str, url: str = TEXT, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return path


def read(path: Path) -> dict[str, dict[str, Any]]:
    found = [json.loads(text) for text in path.read_bytes().splitlines()]  # str's splits at U+2028
    assert len({one["custom_id"] for one in found}) == len(found), "one answer for each"
    return {one["custom_id"]: one for one in found}


def run(model: str, source: Path, target: Path, *flags: str) -> int:
    files = ["-i", str(source), "-o", str(target)]
    return batch.main([*files, model, "--log-level", "error", *SMALL, *flags])


def body_of(answer: dict[str, Any]) -> dict[str, Any]:
    assert answer["error"] is None
    body: dict[str, Any] = answer["response"]["body"]
    return body


def test_answers_are_the_server_s(model: str, tmp_path: Path) -> None:
    hello = [{"role": "user", "content": "The capital of France"}]
    lines = [
        line("chat", CHAT, messages=hello, max_tokens=5, temperature=0, logprobs=True),
        line("seeded", prompt="One two", max_tokens=6, seed=7, n=3),
        line("again", prompt="One two", max_tokens=6, seed=7, n=3),
        line("two", prompt=["One two", "A server"], max_tokens=4, temperature=0, echo=True),
        line("echo", prompt="One two", max_tokens=1, echo=True, logprobs=0, temperature=0),
        line("range", prompt="x", temperature=-1),
        line("long", prompt=[5] * 600),
        line("stream", prompt="x", stream=True),
        line("name", prompt="x", model="other"),
        line("json", prompt="x", max_tokens=30, structured_outputs={"choice": ["yes", "no"]}),
        line("url", "/v1/embeddings", input="x"),
        {"custom_id": "nobody", "method": "POST", "url": TEXT},
    ]
    source, target = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    assert run(model, source, target, "--max-num-seqs", "2") == 1
    found = read(target)
    assert found.keys() == {one["custom_id"] for one in lines}

    chat = body_of(found["chat"])
    assert chat["object"] == "chat.completion"
    assert chat["choices"][0]["message"]["role"] == "assistant"
    assert len(chat["choices"][0]["logprobs"]["content"]) == chat["usage"]["completion_tokens"]
    seeded, again = body_of(found["seeded"]), body_of(found["again"])
    assert [c["text"] for c in seeded["choices"]] == [c["text"] for c in again["choices"]]
    assert len({c["text"] for c in seeded["choices"]}) > 1
    two = body_of(found["two"])["choices"]
    assert [c["text"].startswith(p) for c, p in zip(two, ["One two", "A server"], strict=True)]
    assert body_of(found["echo"])["choices"][0]["logprobs"]["tokens"]
    assert body_of(found["json"])["choices"][0]["text"] in ("yes", "no")

    for custom_id, status, param in [
        ("range", 400, "temperature"), ("long", 400, "prompt"),
        ("stream", 400, "stream"), ("name", 404, "model"),
    ]:  # fmt: skip
        assert found[custom_id]["response"]["status_code"] == status
        assert body_of(found[custom_id])["error"]["param"] == param
    for custom_id, word in [("url", "/v1/embeddings"), ("nobody", "body")]:
        assert found[custom_id]["response"] is None
        assert found[custom_id]["error"]["code"] == "invalid_request"
        assert word in found[custom_id]["error"]["message"]

    size = target.stat().st_size
    assert run(model, source, target) == 1, "the errors are still there"
    assert target.stat().st_size == size, "nothing is asked twice"


def test_one_broken_line_does_not_end_the_others(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(self: TextPipeline, generate: Generate) -> PreparedRequest:
        if generate.params.max_tokens == 3:
            raise RuntimeError("a tokenizer's bug")
        return real(self, generate)

    real = TextPipeline.prepare
    monkeypatch.setattr(TextPipeline, "prepare", prepare)
    lines = [line("bad", prompt="x", max_tokens=3), line("good", prompt="x", max_tokens=2)]
    source, target = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    assert run(model, source, target) == 1
    found = read(target)
    assert found["bad"]["response"]["status_code"] == 500
    assert body_of(found["bad"])["error"]["code"] == "internal_error"
    assert found["good"]["response"]["status_code"] == 200
    monkeypatch.undo()
    assert run(model, source, target, "--retry-failed") == 0


def test_a_cut_line_is_asked_again_and_failures_if_wanted(model: str, tmp_path: Path) -> None:
    lines = [line(f"r{i}", prompt=f"number {i}", max_tokens=3, temperature=0) for i in range(4)]
    source, target = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    assert run(model, source, target) == 0
    whole = read(target)
    target.write_bytes(target.read_bytes()[:-20])  # as a crash leaves it
    assert run(model, source, target) == 0
    text = {k: body_of(v)["choices"][0]["text"] for k, v in whole.items()}
    assert {k: body_of(v)["choices"][0]["text"] for k, v in read(target).items()} == text

    target.write_bytes(target.read_bytes()[:-1])  # whole, but for the end of the line
    with open_output(target) as output:
        assert set(output.answered) == set(text)
        output.error("r9", "invalid_request", "no")
    assert target.read_bytes().endswith(b"\n")
    with open_output(target, retry_failed=True) as output:
        assert "r9" not in output.answered
    assert set(read(target)) == set(text)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_keeps_what_was_answered(model: str, tmp_path: Path, number: int) -> None:
    lines = [line(f"r{i}", prompt=f"n {i}", max_tokens=200, ignore_eos=True) for i in range(200)]
    source, target = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    command = [sys.executable, str(SCRIPT), "-i", str(source), "-o", str(target), model]
    process = subprocess.Popen(
        [*command, *SMALL], stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )  # fmt: skip
    try:
        wait_until(
            lambda: process.poll() is not None or (target.exists() and target.stat().st_size),
            seconds=120,
        )
        process.send_signal(number)
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130
    assert b"run the same command again" in errors
    assert b"Traceback" not in errors
    assert 0 < len(read(target)) < 200


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([{"method": "POST"}], "line 1 has no custom_id"),
        ([line("a"), line("a")], "line 2: custom_id 'a' is that of line 1"),
        (["text"], "line 1 has no custom_id"),
    ],
)
def test_lines_that_cannot_be_told_apart_are_refused(
    tmp_path: Path, lines: list[Any], words: str
) -> None:
    source = write(tmp_path / "in.jsonl", lines)
    with pytest.raises(ValueError, match=f"in.jsonl, {words}"), open_input(source, 1 << 20):
        pass


def test_another_s_output_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "in.jsonl", [line("a", prompt="x")])
    other = tmp_path / "notes.txt"
    other.write_text("my notes")
    with pytest.raises(ValueError, match="is no line of a batch's output"), open_output(other):
        pass
    assert other.read_text() == "my notes"
    with pytest.raises(ValueError, match="is no line"), open_output(source):
        pass
    assert source.read_text().count("custom_id") == 1, "an input is no output"
    target = tmp_path / "out.jsonl"
    with open_output(target), pytest.raises(ValueError, match="another run"), open_output(target):
        pass
    assert batch.main(["-i", str(tmp_path / "none"), "-o", str(target)]) == 2
    assert "No such file" in capsys.readouterr().err
    assert batch.main(["-i", str(source), "-o", str(target), "--max-num-seq", "4"]) == 2
    assert "did you mean --max-num-seqs" in capsys.readouterr().err
