"""GGUF files: read, served as they are, and converted, with the values of the original checkpoint."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from engine.api.config import ConfigError
from engine.models.config import ModelConfig
from engine.weights.gguf import convert_gguf
from engine.weights.gguf_file import read_gguf
from engine.weights.gguf_model import LAYER_NAMES, TOP_LEVEL_NAMES
from engine.weights.loader import load_model
from tests.engine_cpu.naive_attention import Sequences
from tests.engine_cpu.tiny_models import CHAT_TEMPLATE, SPECIAL_TOKENS, make_tiny, write_tokenizer

PROMPT = list(range(3, 33))
ARCHITECTURES = {"llama": "llama", "llama_biases": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
NORMAL, CONTROL = 1, 3
Q8_0 = gguf.GGMLQuantizationType.Q8_0


def write_gguf(
    model_dir: str,
    file: Path,
    arch: str,
    quantize: bool = False,
    rope_factors: list[float] | None = None,
    **metadata: Any,
) -> str:
    """A checkpoint as llama.cpp's converter writes it: other names, q and k permuted for llama."""
    config = json.loads((Path(model_dir) / "config.json").read_text())
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    writer = gguf.GGUFWriter(file, arch)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads["attn_q"])
    writer.add_head_count_kv(heads["attn_k"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
    add_tokenizer(writer, file.parent)
    for key, value in metadata.items():
        name = key.replace("__", ".")
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        else:
            writer.add_float32(name, value)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(rope_factors, np.float32))
    top = {hf: name for name, hf in TOP_LEVEL_NAMES.items()}
    parts = {hf: name for name, hf in LAYER_NAMES.items()}
    for hf_name, tensor in load_file(Path(model_dir) / "model.safetensors").items():
        values = tensor.numpy()
        if hf_name in top:
            name = top[hf_name]
        else:
            _, _, layer, rest = hf_name.split(".", 3)
            part, kind = parts[rest.rsplit(".", 1)[0]], rest.rsplit(".", 1)[1]
            name = f"blk.{layer}.{part}.{kind}"
            if arch == "llama" and part in heads:
                halves = values.reshape(heads[part], 2, -1, *values.shape[1:])
                values = halves.swapaxes(1, 2).reshape(values.shape).copy()
        if quantize and values.ndim == 2:
            writer.add_tensor(name, gguf.quantize(values, Q8_0), raw_dtype=Q8_0)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(file)


def add_tokenizer(writer: gguf.GGUFWriter, directory: Path) -> None:
    write_tokenizer(directory)
    model = json.loads((directory / "tokenizer.json").read_text())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL if t in SPECIAL_TOKENS else NORMAL for t in tokens])
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)


def logits(path: str) -> torch.Tensor:
    config = ModelConfig.from_directory(path)
    model = load_model(path, config, torch.float32, torch.device("cpu"))
    return Sequences(model).run({0: PROMPT})[0]


def their_logits(path: str) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([PROMPT])).logits[0]


@pytest.fixture
def llama_file(tmp_path: Path) -> str:
    model = make_tiny("llama_tied", tmp_path / "hf", tokenizer=False)
    return write_gguf(model, tmp_path / "tiny.gguf", "llama")


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_a_file_is_served_like_its_checkpoint(family: str, tmp_path: Path) -> None:
    model = make_tiny(family, tmp_path / "hf", tokenizer=False)
    file = write_gguf(model, tmp_path / "tiny.gguf", ARCHITECTURES[family])
    torch.testing.assert_close(logits(file), logits(model), rtol=0, atol=1e-5)


def test_quantized_values_are_those_of_the_gguf_package(tmp_path: Path) -> None:
    model = make_tiny("llama", tmp_path / "hf", tokenizer=False)
    file = write_gguf(model, tmp_path / "tiny.gguf", "llama", quantize=True)
    ours = read_gguf(file)
    for tensor in gguf.GGUFReader(file).tensors:
        want = gguf.dequantize(tensor.data, tensor.tensor_type)
        got = ours.tensors[tensor.name].to_float32()
        np.testing.assert_array_equal(got, want.reshape(got.shape))
    assert ours.tensors["blk.0.attn_q.weight"].type == Q8_0
    assert (logits(file) - logits(model)).abs().mean() < 0.2


def test_conversion_is_a_model_that_transformers_reads(llama_file: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    seen: list[float] = []
    convert_gguf(llama_file, str(out), "float32", lambda fraction, what: seen.append(fraction))
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (0.0, 1.0)
    original = load_file(tmp_path / "hf/model.safetensors")
    converted = load_file(out / "model.safetensors")
    assert original.keys() == converted.keys()
    for name, tensor in original.items():
        assert torch.equal(converted[name], tensor), name
    torch.testing.assert_close(their_logits(str(out)), logits(llama_file), rtol=0, atol=1e-4)
    config = ModelConfig.from_directory(str(out))
    assert config.eos_token_ids == [2]
    assert config.tie_word_embeddings
    generation = json.loads((out / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": [2], "pad_token_id": 2}


def test_converted_tokenizer_equals_the_original(llama_file: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert_gguf(llama_file, str(out))
    ours = transformers.AutoTokenizer.from_pretrained(out)
    theirs = transformers.AutoTokenizer.from_pretrained(Path(llama_file).parent)
    for text in ("Hello, wörld 😀", "1234  x\n\n y", "<|im_start|>user\nhi<|im_end|>", "日本語 ok"):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == text
    messages = [{"role": "user", "content": "hi"}]
    chat = ours.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert (ours.bos_token_id, ours.eos_token_id, ours.pad_token_id) == (1, 2, 2)
    special = json.loads((out / "special_tokens_map.json").read_text())
    assert special["eos_token"] == "<|im_end|>"


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "ab 1234!", ["ab", "Ġ1234", "!"]),
        ("smollm", "ab 1234!", ["ab", "Ġ", "1", "2", "3", "4", "!"]),
        ("llama-bpe", "ab 1234!", ["ab", "Ġ", "123", "4", "!"]),
        ("qwen2", "ab 1234!", ["ab", "Ġ", "1", "2", "3", "4", "!"]),
    ],
)
def test_pre_tokenizers(pre: str, text: str, pieces: list[str], tmp_path: Path) -> None:
    model = make_tiny("llama", tmp_path / "hf", tokenizer=False)
    file = write_gguf(model, tmp_path / "t.gguf", "llama", tokenizer__ggml__pre=pre)
    convert_gguf(file, str(tmp_path / "out"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out").backend_tokenizer
    assert [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)] == pieces
    first = tokenizer.encode("ab").ids[0]
    assert (first == 1) == (pre == "llama-bpe"), "Llama 3 puts its bos token first"


def test_llama3_frequency_list_and_yarn(tmp_path: Path) -> None:
    model = make_tiny("llama3", tmp_path / "hf", tokenizer=False)
    config = transformers.LlamaConfig.from_pretrained(model)
    scaled, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config, None)
    plain = 1.0 / 10000.0 ** (torch.arange(0, 16, 2) / 16)
    file = write_gguf(model, tmp_path / "a.gguf", "llama", rope_factors=(plain / scaled).tolist())
    torch.testing.assert_close(logits(file), logits(model), rtol=0, atol=1e-3)

    settings = {"factor": 4.0, "original_max_position_embeddings": 128}
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, **settings}
    model = make_tiny("llama", tmp_path / "yarn", tokenizer=False, rope_parameters=rope)
    file = write_gguf(
        model,
        tmp_path / "b.gguf",
        "llama",
        llama__rope__scaling__type="yarn",
        llama__rope__scaling__factor=4.0,
        llama__rope__scaling__original_context_length=128,
    )
    torch.testing.assert_close(logits(file), logits(model), rtol=0, atol=1e-4)


def test_command_line_prints_json_progress(llama_file: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "engine.weights.gguf", llama_file, str(tmp_path / "out")]
    done = subprocess.run([*command, "--json-progress"], capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines[-1] == {"progress": 1.0, "detail": "done"}
    assert all(set(line) == {"progress", "detail"} for line in lines)
    failed = subprocess.run([*command[:3], str(tmp_path), "x"], capture_output=True, text=True)
    assert failed.returncode == 2
    assert "not a GGUF file" in failed.stderr


# --- what cannot be read -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (
            {"tokenizer__ggml__pre": "falcon"},
            "pre-tokenizer 'falcon' is not known exactly; known: gp",
        ),
        ({"tokenizer__ggml__model": "llama"}, "tokenizer of kind 'llama' cannot be taken"),
        ({"llama__expert_count": 8}, "mixture-of-experts"),
        ({"split__count": 3}, "one of 3 parts; join them first"),
        ({"llama__rope__scaling__type": "longrope"}, "rope scaling 'longrope' is not supported"),
    ],
)
def test_conversion_refuses_what_is_not_exact(
    metadata: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = make_tiny("llama", tmp_path / "hf", tokenizer=False)
    file = write_gguf(model, tmp_path / "tiny.gguf", "llama", **metadata)
    with pytest.raises(ConfigError, match=message):
        convert_gguf(file, str(tmp_path / "out"))
    assert not (tmp_path / "out/config.json").exists()


def test_unknown_architecture(tmp_path: Path) -> None:
    model = make_tiny("llama", tmp_path / "hf", tokenizer=False)
    file = write_gguf(model, tmp_path / "tiny.gguf", "gemma")
    with pytest.raises(
        ConfigError, match="architecture 'gemma' is not supported; supported: llama"
    ):
        ModelConfig.from_directory(file)


def test_damaged_files(llama_file: str, tmp_path: Path) -> None:
    data = Path(llama_file).read_bytes()
    damaged = tmp_path / "damaged.gguf"
    for size in (12, 1000, len(data) - 1000):
        damaged.write_bytes(data[:size])
        with pytest.raises(ConfigError, match="damaged or truncated"):
            read_gguf(str(damaged))
    damaged.write_bytes(b"GGUF\x01" + data[5:])
    with pytest.raises(ConfigError, match="version 1; versions 2 and 3"):
        read_gguf(str(damaged))
    damaged.write_bytes(b"PK" + data[2:])
    with pytest.raises(ConfigError, match="not a GGUF file"):
        ModelConfig.from_directory(str(damaged))
