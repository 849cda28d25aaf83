"""`suffix` through the three real processes, with a model whose vocabulary has the marks."""

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tokenizers import AddedToken, Tokenizer

from tests.engine_cpu.tiny_models import VOCAB_SIZE, make_tiny
from tests.server.conftest import live_server

PREFIX, SUFFIX, MIDDLE = MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
FLAGS = ["--dtype", "float32", "--cpu-threads", "1", "--max-num-seqs", "4", "--num-blocks", "64"]
FLAGS += ["--max-num-batched-tokens", "512"]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = make_tiny("llama", tmp_path_factory.mktemp("tiny"), vocab_size=VOCAB_SIZE + len(MARKS))
    file = str(Path(folder, "tokenizer.json"))
    tokenizer = Tokenizer.from_file(file)
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    tokenizer.save(file)
    with live_server(folder, *FLAGS) as running:
        yield running


async def post(server: Any, **body: Any) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(server.url + "/v1/completions", json=body) as response,
    ):
        return response.status, await response.json()


async def test_the_prompt_is_that_of_the_training(server) -> None:
    """Both texts of a request are what its client could have written with the marks."""
    common = {"max_tokens": 8, "temperature": 0, "return_token_ids": True, "n": 2}
    prompts = ["def main():", "é"]
    _, given = await post(server, prompt=prompts, suffix=" return", **common)
    by_hand = [f"{PREFIX}{prompt}{SUFFIX} return{MIDDLE}" for prompt in prompts]
    _, wanted = await post(server, prompt=by_hand, **common)
    for key in ("text", "token_ids", "prompt_token_ids", "finish_reason"):
        assert [c[key] for c in given["choices"]] == [c[key] for c in wanted["choices"]]
    tokens = {tuple(c["prompt_token_ids"]) for c in given["choices"]}
    assert given["usage"]["prompt_tokens"] == sum(map(len, tokens))


async def test_a_mark_ends_the_completion_and_is_not_in_it(server) -> None:
    bias = {str(VOCAB_SIZE + 2): 100}
    _, answer = await post(server, prompt="a", suffix="b", logit_bias=bias, max_tokens=5)
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")
    assert choice["stop_reason"] == VOCAB_SIZE + 2
    assert answer["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize(
    "fields", [{"echo": True}, {"truncate_prompt_tokens": 3}, {"prompt": [5, 6]}], ids=json.dumps
)
async def test_what_has_no_meaning_with_a_suffix_is_refused(server, fields) -> None:
    status, answer = await post(server, **{"prompt": "a", "suffix": "b", **fields})
    error = answer["error"]
    assert (status, error["code"], error["param"]) == (400, "unsupported_value", "suffix")
