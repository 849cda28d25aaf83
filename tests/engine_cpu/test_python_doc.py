"""docs/python.md, word for word, but for a tiny model in place of the default one."""

import re
from pathlib import Path

import pytest

from tests.engine_cpu.tiny_models import make_tiny

PAGE = Path(__file__).resolve().parents[2] / "docs" / "python.md"


def test_the_examples_run_one_after_the_other(tmp_path, capsys):
    text = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 7
    assert blocks[0].count("LLM(kv_cache_gib") == 1
    blocks[0] = blocks[0].replace("LLM(kv_cache_gib", "LLM(MODEL, kv_cache_gib")
    names = {"MODEL": make_tiny("llama", tmp_path)}
    printed = []
    for block in blocks:  # the third one parses what it got as JSON
        exec(compile(block, str(PAGE), "exec"), names)
        printed.append(capsys.readouterr().out)

    generated, chat, structured, choice, logprobs, several, errors = printed
    assert re.match(r"The capital of France is -> .*Water boils at -> ", generated, re.DOTALL)
    assert chat.strip()
    assert re.match(r"\{'name': '.*', 'continent': '(Africa|America|Asia|Europe)'\}$", structured)
    assert choice in ("yes\n", "no\n")
    assert logprobs.count(" of [(") == 3
    assert re.search(r"^sum -\d", logprobs, re.MULTILINE)
    assert "prompt [None, {" in logprobs
    assert [line.split()[0] for line in several.splitlines()] == ["0", "1", "2"]
    assert "largest max_tokens that fits is" in errors
    with pytest.raises(RuntimeError, match="shut down"):
        names["llm"].generate("x")
