#!/usr/bin/env python3
"""Run another engine on the load of bench_cpu.py and print its figures as one JSON object.

    python scripts/bench_cpu_peers.py transformers MODEL_DIR --threads 2
    python scripts/bench_cpu_peers.py llama.cpp MODEL.gguf --threads 2

In a process of its own, so that neither torch nor its threads stay with the caller. Names and units are
those of bench_cpu.py: "batch N, tok/s" counts prompt processing in, as a client sees it.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm

PROMPT_IDS = range(100, 10_000)

# (prompts, tokens out) -> (seconds to the first token, seconds to the last)
Generate = Callable[[list[list[int]], int], tuple[float, float]]


def transformers_engine(model_dir: Path, threads: int) -> Generate:
    """`model.generate` in float32, greedy, exact lengths."""
    import torch
    from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model.eval()
    model.generation_config.eos_token_id = None  # the load wants exact lengths

    class Clock(StoppingCriteria):  # type: ignore[misc]
        """Never stops anything; notes when each step was done."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            self.times.append(time.perf_counter())
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    def generate(prompts: list[list[int]], num_out: int) -> tuple[float, float]:
        clock = Clock()
        ids = torch.tensor(prompts)
        start = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=num_out,
                max_new_tokens=num_out,
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([clock]),
            )
        end = time.perf_counter()
        assert out.shape == (len(prompts), len(prompts[0]) + num_out), "generate stopped early"
        return clock.times[0] - start, end - start

    return generate


def llama_cpp_engine(gguf: Path, threads: int) -> Generate | None:
    """llama-cpp-python, one sequence at a time; None if it is not installed."""
    try:
        from llama_cpp import Llama
    except ImportError as error:
        print(f"llama.cpp: not measured, llama_cpp cannot be imported ({error})", file=sys.stderr)
        return None
    model = Llama(
        model_path=str(gguf), n_ctx=2048, n_threads=threads, n_threads_batch=threads, verbose=False
    )

    def generate(prompts: list[list[int]], num_out: int) -> tuple[float, float]:
        (prompt,) = prompts
        model.reset()
        start = time.perf_counter()
        stream = model.generate(prompt, temp=0.0)
        next(stream)
        first = time.perf_counter()
        for _ in range(num_out - 1):
            next(stream)
        return first - start, time.perf_counter() - start

    return generate


def run(generate: Generate, name: str, batches: tuple[int, ...], args: argparse.Namespace) -> Any:
    """The figures of one engine: medians over `args.repeats` rounds."""
    rng = random.Random(1)

    def prompts(count: int, length: int) -> list[list[int]]:
        return [rng.choices(PROMPT_IDS, k=length) for _ in range(count)]

    figures = {}
    rounds = args.repeats * (len(batches) + 1)
    with tqdm(total=rounds, desc=name, leave=False, disable=not sys.stderr.isatty()) as bar:
        generate(prompts(1, args.prompt_tokens), 8)  # warm up
        for batch in batches:
            firsts, rates = [], []
            for _ in range(args.repeats):
                first, total = generate(prompts(batch, args.prompt_tokens), args.output_tokens)
                firsts.append(first)
                rates.append(batch * args.output_tokens / total)
                bar.update()
            figures[f"batch {batch}, tok/s"] = statistics.median(rates)
            if batch == 1:
                figures["TTFT, s"] = statistics.median(firsts)
        seconds = []
        for _ in range(args.repeats):
            seconds.append(generate(prompts(1, args.long_prompt), 1)[0])
            bar.update()
        rate = args.long_prompt / statistics.median(seconds)
        figures[f"prefill {args.long_prompt}, tok/s"] = rate
    return figures


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "engine",
        choices=("transformers", "llama.cpp"),
        help="what to measure; llama.cpp needs llama-cpp-python, which is not in requirements.txt",
    )
    parser.add_argument(
        "model",
        type=Path,
        help="directory of weights (in memory as float32) for transformers, a .gguf file for "
        "llama.cpp",
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        help="CPU threads; more than there are cores slow it down (default: %(default)s)",
    )
    parser.add_argument(
        "--prompt-tokens",
        type=int,
        default=64,
        help="tokens of each prompt, random ids (default: %(default)s)",
    )
    parser.add_argument(
        "--output-tokens",
        type=int,
        default=64,
        help="tokens of each answer, exactly; time grows with them (default: %(default)s)",
    )
    parser.add_argument(
        "--long-prompt",
        type=int,
        default=1000,
        help="tokens of the prompt of the prefill measurement (default: %(default)s)",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=2,
        help="runs of each measurement, of which the median is printed (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    generate: Generate | None
    batches: tuple[int, ...]
    if args.engine == "transformers":
        generate, batches = transformers_engine(args.model, args.threads), (1, 16)
    else:
        generate, batches = llama_cpp_engine(args.model, args.threads), (1,)
    if generate is None:
        return 1
    print(json.dumps(run(generate, args.engine, batches, args)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
