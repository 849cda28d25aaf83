"""Convert a GGUF file into a Hugging Face model directory.

    python -m engine.weights.gguf SRC.gguf OUT_DIR [--dtype bfloat16] [--json-progress]

The result has config.json, generation_config.json, model.safetensors (dense, dequantized) and the
tokenizer's files. A GGUF file can also be served as it is (`--model file.gguf`); converting once
saves the dequantization at every start. config.json is written last, so that an interrupted
conversion leaves nothing that looks like a model.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.api.config import ConfigError
from engine.weights.gguf_file import GgufFile, read_gguf
from engine.weights.gguf_model import hf_config, hf_names, hf_values, stop_token_ids
from engine.weights.gguf_tokenizer import tokenizer_files

Progress = Callable[[float, str], None]
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def convert_gguf(
    path: str, out_dir: str, dtype: str = "bfloat16", progress: Progress | None = None
) -> None:
    """Write the model and tokenizer in `path` to `out_dir` (created if need be).

    `progress(fraction, what)` is called as work goes on. Needs memory for the whole model in `dtype`.
    Raises ConfigError if the file is damaged or of a kind that cannot be converted exactly.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r}: expected one of {', '.join(DTYPES)}")
    report = progress or (lambda fraction, what: None)
    report(0.0, "reading the GGUF header")
    gguf = read_gguf(path)
    config = {**hf_config(gguf), "torch_dtype": dtype}
    tokenizer = tokenizer_files(gguf)  # fails before the long part
    out = Path(out_dir)
    out.mkdir(parents=True, exist_ok=True)
    tensors = dequantize_all(gguf, DTYPES[dtype], lambda share: report(0.9 * share, "dequantizing"))
    report(0.9, "writing model.safetensors")
    weights = out / "model.safetensors"
    save_file(tensors, str(weights), metadata={"format": "pt"})
    weights.chmod(0o644)  # save_file leaves it readable by its owner only
    generation = {f"{key}_token_id": config[f"{key}_token_id"] for key in ("bos", "pad")}
    generation["eos_token_id"] = stop_token_ids(gguf)
    for name, contents in {**tokenizer, "generation_config.json": generation}.items():
        write_json(out / name, contents)
    write_json(out / "config.json", config)
    report(1.0, "done")


def dequantize_all(
    gguf: GgufFile, dtype: torch.dtype, report: Callable[[float], None]
) -> dict[str, Tensor]:
    """Every weight under its Hugging Face name, in `dtype`."""
    total = sum(tensor.data.size for tensor in gguf.tensors.values())
    done = 0
    tensors = {}
    for hf_name, name in hf_names(gguf).items():
        values = np.ascontiguousarray(hf_values(gguf, name))
        # copy: the file's mapping is read-only, and may be what `values` looks at
        tensors[hf_name] = torch.from_numpy(values.copy()).to(dtype)
        done += gguf.tensors[name].data.size
        report(done / total)
    return tensors


def write_json(path: Path, contents: dict[str, Any]) -> None:
    path.write_text(json.dumps(contents, ensure_ascii=False, indent=1), encoding="utf-8")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m engine.weights.gguf", description=str(__doc__).splitlines()[0]
    )
    parser.add_argument("source", metavar="SRC", help="the .gguf file")
    parser.add_argument("out_dir", metavar="OUT", help="directory to write")
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(DTYPES))
    parser.add_argument(
        "--json-progress",
        action="store_true",
        help='print lines like {"progress": 0.5, "detail": "dequantizing"}',
    )
    args = parser.parse_args(argv)
    last = -1

    def show(fraction: float, what: str) -> None:
        nonlocal last
        percent = int(100 * fraction)
        if percent == last:
            return
        last = percent
        if args.json_progress:
            line = json.dumps({"progress": round(fraction, 3), "detail": what})
        else:
            line = f"{percent:3d} % {what}"
        print(line, flush=True)

    try:
        convert_gguf(args.source, args.out_dir, args.dtype, show)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
