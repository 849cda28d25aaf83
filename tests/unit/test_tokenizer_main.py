"""The tokenizer process between a fake server and a fake engine, over real sockets."""

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq

from engine.api.messages import (
    Abort,
    AbortReason,
    AbortRequests,
    Accepted,
    AddRequest,
    CallError,
    ChatPrompt,
    Deltas,
    Detokenize,
    DetokenizeResult,
    EngineHello,
    FinishReason,
    Generate,
    Replies,
    RequestError,
    Sockets,
    Submit,
    TextPrompt,
    Tokenize,
    TokenizeResult,
    TokenizerReady,
    TokenPrompt,
    decoder,
    encoder,
)
from engine.api.sampling import SamplingParams
from tests.processes import is_alive
from tests.unit.test_encode import limits
from tests.unit.test_output import step
from tests.unit.tokenizers_for_tests import byte_level, save
from tests.waiting import wait_until
from tokenizer_proc.config import TokenizerConfig, write_config
from tokenizer_proc.errors import TokenizerLoadError
from tokenizer_proc.main import TokenizerLoop

ROOT = Path(__file__).parents[2]
TOKENIZER = byte_level()
EPOCH = 3


class Neighbours:
    """Fake server and fake engine: they send on ingress and tokens, and bind submit and replies."""

    def __init__(self, sockets):
        self.context = zmq.Context()
        self.ingress = self._connected(sockets.ingress)
        self.tokens = self._connected(sockets.tokens)
        self.submit = self._bound(sockets.submit)
        self.replies = self._bound(sockets.replies)
        self.encoder = encoder()

    def _connected(self, address):
        socket = self.context.socket(zmq.PUSH)
        socket.connect(address)
        return socket

    def _bound(self, address):
        socket = self.context.socket(zmq.PULL)
        socket.bind(address)
        return socket

    def to_tokenizer(self, message):
        self.ingress.send(self.encoder.encode(message))

    def from_engine(self, message):
        message.epoch = EPOCH
        self.tokens.send(self.encoder.encode(message))

    def hello(self, **changes):
        self.from_engine(EngineHello(epoch=EPOCH, limits=limits(**changes)))

    def reply(self, kind, timeout=20.0):
        return self._receive(self.replies, Replies, kind, timeout)

    def submitted(self, kind, timeout=20.0):
        return self._receive(self.submit, Submit, kind, timeout)

    def _receive(self, socket, union, kind, timeout):
        assert socket.poll(timeout * 1000), f"no {kind} came"
        message = decoder(union).decode(socket.recv())
        assert isinstance(message, kind), message
        return message

    def assert_silent(self):
        """Nothing more is said: a call and its answer overtake nothing, so all is out by then."""
        self.to_tokenizer(Detokenize(call_id=99, token_ids=b""))
        assert self.reply(DetokenizeResult).call_id == 99
        assert not self.submit.poll(0)

    def close(self):
        self.context.destroy(linger=0)


@pytest.fixture
def run_dir():
    with tempfile.TemporaryDirectory(prefix="sluice") as path:  # short: socket paths are limited
        yield path


@pytest.fixture
def served(run_dir):
    """A loop running in a thread, and its neighbours, ready to serve."""
    sockets = Sockets.in_directory(run_dir, EPOCH)
    loop = TokenizerLoop(TOKENIZER, sockets, EPOCH)
    thread = threading.Thread(target=loop.run)
    thread.start()
    neighbours = Neighbours(sockets)
    neighbours.hello()
    assert neighbours.reply(TokenizerReady).limits == limits()
    try:
        yield loop, neighbours
    finally:
        loop.stop()
        thread.join(20)
        neighbours.close()
        assert not thread.is_alive()


def generate(req_id, text="hello", prompt=None, **params):
    return Generate(
        req_id=req_id,
        prompt=prompt or TextPrompt(text=text),
        params=SamplingParams(**({"max_tokens": 8} | params)),
        arrival_ns=0,
    )


def ids_of(text):
    return TOKENIZER.encode(text)


def is_empty(loop):
    return not loop.encoding and not loop.pipeline.output.live


def test_a_request_from_prompt_to_its_end(served):
    loop, net = served
    net.to_tokenizer(generate(1, "hello world"))
    accepted = net.reply(Accepted)
    assert (accepted.req_id, accepted.prompt_text) == (1, None)
    request = net.submitted(AddRequest)
    ids = np.frombuffer(request.token_ids, np.int32).tolist()
    assert ids == ids_of("hello world")
    assert accepted.num_prompt_tokens == len(ids)
    net.from_engine(step({1: ids_of("Hi")}, started=[(1, 16, 70)]))
    deltas = net.reply(Deltas)
    assert (deltas.req_ids, deltas.texts, deltas.started) == ([1], ["Hi"], [(1, 16, 70)])
    net.from_engine(step({1: ([2], FinishReason.STOP, 2)}))
    deltas = net.reply(Deltas)
    assert deltas.finished == [(0, FinishReason.STOP, None)]
    assert deltas.counts == [1]
    net.from_engine(step({1: ids_of("late")}))  # an overlapped step's wasted row
    net.assert_silent()
    assert is_empty(loop)


def test_choices_are_accepted_once_and_end_one_by_one(served):
    loop, net = served
    net.to_tokenizer(generate(4, n=3))
    assert net.reply(Accepted).req_id == 4
    assert [net.submitted(AddRequest).req_id for _ in range(3)] == [4, 5, 6]
    net.from_engine(step({i: (ids_of("x"), FinishReason.LENGTH, None) for i in (4, 5)}))
    assert net.reply(Deltas).finished == [
        (0, FinishReason.LENGTH, None),
        (1, FinishReason.LENGTH, None),
    ]
    assert list(loop.pipeline.output.live) == [6]
    net.to_tokenizer(Abort(req_ids=[4, 5, 6]))
    assert net.submitted(AbortRequests).req_ids == [6]
    net.assert_silent()
    assert is_empty(loop)


def test_a_stop_string_ends_the_request_and_aborts_it_in_the_engine(served):
    loop, net = served
    net.to_tokenizer(generate(1, stop=["END"]))
    net.reply(Accepted)
    net.submitted(AddRequest)
    net.from_engine(step({1: ids_of("x END y")}))
    deltas = net.reply(Deltas)
    assert (deltas.texts, deltas.finished) == (["x "], [(0, FinishReason.STOP, "END")])
    abort = net.submitted(AbortRequests)
    assert (abort.req_ids, abort.reason) == ([1], AbortReason.STOP_STRING)
    net.from_engine(step({1: ([], FinishReason.ABORT, None)}))
    net.assert_silent()
    assert is_empty(loop)


@pytest.mark.parametrize("phase", ["unknown", "encoding", "submitted", "running", "finished"])
def test_an_abort_at_any_point_leaves_nothing_and_sends_no_terminal(served, phase, monkeypatch):
    loop, net = served
    may_encode, has_encoded = threading.Event(), threading.Event()
    encode = loop.encoder.encode

    def slow_encode(prompt, max_tokens):
        assert may_encode.wait(20)
        encoded = encode(prompt, max_tokens)
        has_encoded.set()
        return encoded

    monkeypatch.setattr(loop.encoder, "encode", slow_encode)
    if phase != "encoding":
        may_encode.set()
    if phase != "unknown":
        net.to_tokenizer(generate(1, n=2))
    if phase not in ("unknown", "encoding"):
        net.reply(Accepted)
        assert [net.submitted(AddRequest).req_id for _ in range(2)] == [1, 2]
    if phase == "running":
        net.from_engine(step({1: ids_of("a"), 2: ids_of("b")}))
        net.reply(Deltas)
    if phase == "finished":
        net.from_engine(step({i: ([2], FinishReason.STOP, 2) for i in (1, 2)}))
        net.reply(Deltas)

    net.to_tokenizer(Abort(req_ids=[1, 2]))
    net.to_tokenizer(Abort(req_ids=[2]))  # twice is no error
    if phase in ("submitted", "running"):
        abort = net.submitted(AbortRequests)
        assert (abort.req_ids, abort.reason) == ([1, 2], AbortReason.CLIENT)
        net.from_engine(step({1: ids_of("late"), 2: ([], FinishReason.ABORT, None)}))
    net.assert_silent()
    may_encode.set()
    if phase != "unknown":
        assert has_encoded.wait(20)
    for _ in range(3):  # one of the two threads is still naming blocks at the first
        net.assert_silent()
    assert is_empty(loop)


def test_what_is_aborted_before_a_thread_is_free_is_never_encoded(served, monkeypatch):
    loop, net = served
    may_encode, encoded = threading.Event(), []
    encode = loop.encoder.encode

    def slow_encode(prompt, max_tokens=None):
        encoded.append(prompt.text)
        assert may_encode.wait(20)
        return encode(prompt, max_tokens)

    monkeypatch.setattr(loop.encoder, "encode", slow_encode)
    net.to_tokenizer(generate(1, "busy"))
    net.to_tokenizer(generate(2, "busy"))
    wait_until(lambda: len(encoded) == 2)
    net.to_tokenizer(generate(3, "gone", n=2))
    net.to_tokenizer(Tokenize(call_id=5, prompt=TextPrompt(text="gone")))
    net.to_tokenizer(generate(6, "one choice gone", n=2))
    net.to_tokenizer(Abort(req_ids=[3, 4, 5, 6]))
    net.to_tokenizer(Tokenize(call_id=8, prompt=TextPrompt(text="last")))
    wait_until(lambda: loop.encoding == {1, 2, 7, 8})
    may_encode.set()
    replies = [net.reply(Accepted | TokenizeResult) for _ in range(4)]
    assert {r.req_id for r in replies if isinstance(r, Accepted)} == {1, 2, 6}
    assert encoded == ["busy", "busy", "one choice gone", "last"]
    assert {net.submitted(AddRequest).req_id for _ in range(3)} == {1, 2, 7}
    assert not loop.encoding


def test_a_choice_aborted_while_encoding_is_not_submitted_and_the_others_are(served, monkeypatch):
    loop, net = served
    may_encode = threading.Event()
    encode = loop.encoder.encode
    monkeypatch.setattr(
        loop.encoder, "encode", lambda prompt, limit: may_encode.wait(20) and encode(prompt, limit)
    )
    net.to_tokenizer(generate(1, n=3))
    net.to_tokenizer(Abort(req_ids=[2]))
    net.assert_silent()
    may_encode.set()
    assert net.reply(Accepted).req_id == 1
    assert [net.submitted(AddRequest).req_id for _ in range(2)] == [1, 3]
    net.to_tokenizer(Abort(req_ids=[1, 3]))
    net.submitted(AbortRequests)
    net.assert_silent()
    assert is_empty(loop)


def test_a_prompt_that_cannot_be_served_gets_one_error(served):
    loop, net = served
    net.to_tokenizer(generate(1, "word " * 100, n=2))
    error = net.reply(RequestError)
    assert (error.req_id, error.n, error.status) == (1, 2, 400)
    assert (error.code, error.param) == ("context_length_exceeded", "prompt")
    chat = ChatPrompt(messages=[{"role": "user"}], chat_template_kwargs={"tools": 1})
    net.to_tokenizer(generate(5, prompt=chat))
    assert net.reply(RequestError).code == "invalid_value"
    net.assert_silent()
    assert is_empty(loop)


def test_an_unexpected_failure_is_a_500_and_the_process_lives(served, monkeypatch, caplog):
    loop, net = served
    encode = loop.encoder.encode

    def fail(prompt, max_tokens):
        if prompt == TextPrompt(text="boom"):
            raise BaseException("the Rust side panicked")
        return encode(prompt, max_tokens)

    monkeypatch.setattr(loop.encoder, "encode", fail)
    net.to_tokenizer(generate(1, "boom"))
    error = net.reply(RequestError)
    assert (error.status, error.code) == (500, "internal_error")
    assert "panicked" not in error.message
    assert "panicked" in caplog.text
    net.to_tokenizer(generate(2, "fine"))
    assert net.reply(Accepted).req_id == 2
    assert 1 not in loop.encoding


def test_requests_that_the_engine_refuses_get_one_error(served):
    loop, net = served
    net.to_tokenizer(generate(1))
    net.reply(Accepted)
    net.submitted(AddRequest)
    message = step({}, rejected=[(1, "queue_full", "try later")])
    net.from_engine(message)
    net.from_engine(message)
    error = net.reply(RequestError)
    assert (error.req_id, error.n, error.status) == (1, 1, 429)
    net.assert_silent()
    assert is_empty(loop)


def test_messages_of_another_epoch_and_garbage_are_dropped(served):
    loop, net = served
    net.to_tokenizer(generate(1))
    net.reply(Accepted)
    net.submitted(AddRequest)
    old = step({1: ids_of("old")})
    old.epoch = EPOCH - 1
    net.tokens.send(net.encoder.encode(old))
    net.tokens.send(b"\xc1 garbage")
    net.ingress.send(b"garbage")
    net.from_engine(step({1: ids_of("new")}))
    assert net.reply(Deltas).texts == ["new"]
    assert list(loop.pipeline.output.live) == [1]


def test_tokenize_and_detokenize_calls(served):
    _, net = served
    prompt = TextPrompt(text="hello 👩")
    net.to_tokenizer(Tokenize(call_id=1, prompt=prompt, return_token_strs=True))
    result = net.reply(TokenizeResult)
    ids = np.frombuffer(result.token_ids, np.int32)
    assert ids.tolist() == ids_of("hello 👩")
    assert (result.call_id, result.max_model_len) == (1, 32)
    assert result.token_strs == TOKENIZER.convert_ids_to_tokens(ids.tolist())
    net.to_tokenizer(Detokenize(call_id=2, token_ids=ids.tobytes()))
    assert net.reply(DetokenizeResult).text == "hello 👩"
    bad = np.array([1, -5], np.int32).tobytes()
    net.to_tokenizer(Detokenize(call_id=3, token_ids=bad))
    error = net.reply(CallError)
    assert (error.call_id, error.status, error.code) == (3, 400, "invalid_token_id")
    assert error.param == "tokens[1]"
    assert "tokens[1]" in error.message
    net.to_tokenizer(Tokenize(call_id=4, prompt=TokenPrompt(token_ids=bad)))
    assert net.reply(CallError).call_id == 4


def test_requests_wait_for_the_engine(run_dir):
    sockets = Sockets.in_directory(run_dir, EPOCH)
    loop = TokenizerLoop(TOKENIZER, sockets, EPOCH)
    thread = threading.Thread(target=loop.run)
    thread.start()
    net = Neighbours(sockets)
    try:
        net.to_tokenizer(generate(1))
        assert not net.replies.poll(100)
        net.hello()
        ready = net.reply(TokenizerReady)
        assert "messages" in ready.chat_template
        assert net.reply(Accepted).req_id == 1
    finally:
        loop.stop()
        thread.join(20)
        net.close()


def test_a_hello_that_does_not_fit_ends_the_loop(run_dir):
    sockets = Sockets.in_directory(run_dir, EPOCH)
    loop = TokenizerLoop(TOKENIZER, sockets, EPOCH)
    net = Neighbours(sockets)
    net.hello(vocab_size=10)
    with pytest.raises(TokenizerLoadError, match="embeds only 10"):
        loop.run()
    net.close()


# --- the process --------------------------------------------------------------------------------------


def config_file(run_dir, tokenizer_dir, **changes):
    values = {"tokenizer_dir": str(tokenizer_dir), "run_dir": run_dir, "epoch": EPOCH}
    path = f"{run_dir}/tokenizer.json"
    write_config(TokenizerConfig(**(values | changes)), path)
    return path


def command(path):
    return [sys.executable, "-m", "tokenizer_proc", "--config", path]


def test_the_process_serves_ignores_ctrl_c_and_ends_on_sigterm(run_dir, tmp_path):
    path = config_file(run_dir, save(TOKENIZER, tmp_path / "t"), parent_pid=os.getpid())
    process = subprocess.Popen(command(path), cwd=ROOT, stderr=subprocess.PIPE)
    net = Neighbours(Sockets.in_directory(run_dir, EPOCH))
    try:
        net.hello()
        net.reply(TokenizerReady, timeout=60)
        process.send_signal(signal.SIGINT)
        net.to_tokenizer(generate(1))
        assert net.reply(Accepted).req_id == 1
        process.terminate()
        assert process.wait(20) == 0
        assert process.stderr.read() == b""
    finally:
        process.kill()
        process.communicate()
        net.close()


def test_the_process_says_in_one_line_why_it_cannot_start(run_dir, tmp_path):
    path = config_file(run_dir, tmp_path / "absent")
    result = subprocess.run(command(path), cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1
    assert "absent: no such directory" in result.stderr
    Path(path).write_bytes(msgspec.json.encode({"tokenizer_dir": 5}))
    result = subprocess.run(command(path), cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert "tokenizer_dir" in result.stderr


def test_the_process_exits_with_2_when_the_vocabulary_does_not_fit(run_dir, tmp_path):
    path = config_file(run_dir, save(TOKENIZER, tmp_path / "t"))
    process = subprocess.Popen(command(path), cwd=ROOT, stderr=subprocess.PIPE, text=True)
    net = Neighbours(Sockets.in_directory(run_dir, EPOCH))
    try:
        net.hello(vocab_size=100)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 2
        assert len(errors.splitlines()) == 1
        assert "embeds only 100" in errors
    finally:
        process.kill()
        process.communicate()
        net.close()


def test_the_process_dies_with_its_parent(run_dir, tmp_path):
    """A parent that starts the process, prints its id, and is then killed without warning."""
    path = config_file(run_dir, save(TOKENIZER, tmp_path / "t"), parent_pid=0)
    program = f"""
        import os, subprocess, time
        import msgspec
        from tokenizer_proc.config import read_config, write_config
        config = read_config({path!r})
        config.parent_pid = os.getpid()
        write_config(config, {path!r})
        child = subprocess.Popen({command(path)!r})
        print(child.pid, flush=True)
        time.sleep(600)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    net = Neighbours(Sockets.in_directory(run_dir, EPOCH))
    try:
        pid = int(parent.stdout.readline())
        net.hello()
        net.reply(TokenizerReady, timeout=60)
        assert is_alive(pid)
        parent.kill()
        wait_until(lambda: not is_alive(pid))
    finally:
        parent.kill()
        parent.communicate()
        net.close()


def test_a_child_whose_parent_is_already_gone_ends_at_once(run_dir, tmp_path):
    path = config_file(run_dir, tmp_path, parent_pid=2**22 + 1)  # no process has this id
    result = subprocess.run(command(path), cwd=ROOT, timeout=60)
    assert result.returncode == -signal.SIGKILL
