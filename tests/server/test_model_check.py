"""What is wrong with a model directory is told before any process is started."""

import json

import pytest

from engine.api.config import ConfigError
from server.model_check import check_vocabulary


def write_tokenizer(folder, vocab):
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}}))


@pytest.mark.parametrize(
    "vocab", [{f"t{i}": i for i in range(12)}, [[f"t{i}", -1.0] for i in range(12)]]
)
def test_ordinary_tokens_beyond_the_embedding_are_refused(tmp_path, vocab):
    write_tokenizer(tmp_path, vocab)
    check_vocabulary(tmp_path, 12)
    with pytest.raises(ConfigError, match="up to 11, but the model embeds only 10") as caught:
        check_vocabulary(tmp_path, 10)
    assert caught.value.exit_code == 2


def test_what_it_cannot_judge_is_left_to_the_tokenizer_process(tmp_path):
    check_vocabulary(tmp_path, 10)  # no tokenizer.json
    write_tokenizer(tmp_path, "odd")
    check_vocabulary(tmp_path, 10)
    write_tokenizer(tmp_path, {"a": 99})
    check_vocabulary(tmp_path, None)  # no vocab_size
