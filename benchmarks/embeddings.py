"""Compares rows per second of embedding jobs with sentence-transformers' ``encode``.

python benchmarks/embeddings.py --python PATH --rounds 3 --json out/embeddings.json
python benchmarks/embeddings.py --python PATH --texts 2000 --models minilm --dtypes float32

PATH is a Python interpreter with sentence-transformers. Models have random weights and the shapes
of all-MiniLM-L6-v2 (22 M) and bge-base-en (110 M). Texts are random words; the number of words in a
text is lognormal with a mean of 33 and at most 400. Both programs are timed from texts to vectors
with a loaded model. ``encode`` runs batches of 32 texts, which it sorts by length. A job's time,
from its first step to its last, comes from ``summary.json``. Vectors are compared by cosine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from result_files import write_results

SHAPES = {
    "minilm": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12},
    "bge-base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12},
}
POOLING = {"minilm": "mean", "bge-base": "cls"}
LONGEST = {"minilm": 256, "bge-base": 512}
_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
_VOCABULARY = 30522

Run = dict[str, Any]


def words(count: int) -> list[str]:
    """Return ``count`` different words. Every call returns the same words."""
    draw, distinct = random.Random(0), dict[str, None]()
    while len(distinct) < count:
        syllables = range(draw.randint(1, 4))
        distinct[
            "".join(draw.choice("bdfgklmnprstvz") + draw.choice("aeiou") for _ in syllables)
        ] = None
    return list(distinct)


def make_texts(count: int) -> list[str]:
    draw, known = random.Random(1), words(20_000)
    lengths = (min(400, max(3, int(draw.lognormvariate(3.2, 0.8)))) for _ in range(count))
    return [" ".join(draw.choice(known) for _ in range(length)) for length in lengths]


def make_model(folder: Path, name: str) -> None:
    """Save a random model in the folder layout of sentence-transformers."""
    import torch
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    torch.manual_seed(0)
    shape = SHAPES[name]
    config = BertConfig(vocab_size=_VOCABULARY, intermediate_size=4 * shape["hidden_size"], **shape)
    BertModel(config).save_pretrained(folder)
    letters = "abcdefghijklmnopqrstuvwxyz"
    pieces = [*_SPECIAL, *letters, *(f"##{letter}" for letter in letters), *words(20_000)]
    pieces = list(dict.fromkeys(pieces))
    backend = Tokenizer(models.WordPiece({p: at for at, p in enumerate(pieces)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    names = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(
        tokenizer_object=backend, model_max_length=LONGEST[name], **names
    ).save_pretrained(folder)
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [
        {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for at, (kind, path) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "sentence_bert_config.json").write_text(
        json.dumps({"max_seq_length": LONGEST[name], "do_lower_case": False})
    )
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": shape["hidden_size"], "pooling_mode": POOLING[name]}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


_THEIRS = """
import json, sys, time
import numpy as np, torch
torch.set_num_threads(int(sys.argv[5]))
from sentence_transformers import SentenceTransformer
model = SentenceTransformer(sys.argv[1], device="cpu",
                            model_kwargs={"dtype": getattr(torch, sys.argv[2])})
texts = json.load(open(sys.argv[3]))
model.encode(texts[:32])
began, busy = time.perf_counter(), time.process_time()
vectors = model.encode(texts, batch_size=32, convert_to_numpy=True)
print(json.dumps({"seconds": time.perf_counter() - began, "cpu_s": time.process_time() - busy}))
np.save(sys.argv[4], vectors.astype(np.float32))
"""


def theirs(model: Path, dtype: str, texts: Path, args: argparse.Namespace) -> tuple[Run, Any]:
    """Run ``encode`` in a new process. Return the seconds and the vectors."""
    out = args.folder / "theirs.npy"
    command = [args.python, "-c", _THEIRS, str(model), dtype, str(texts), str(out)]
    done = subprocess.run([*command, str(args.threads)], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1]), np.load(out)


def ours(model: Path, dtype: str, texts: Path, args: argparse.Namespace) -> tuple[Run, Any]:
    """Run a job in a new process. Return the seconds that its rows take, and the vectors."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = args.folder / "job"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    pq.write_table(pa.table({"prompt": json.loads(texts.read_text())}), folder / "rows.parquet")
    job = folder / "job.yaml"
    job.write_text(
        f"task: embed\nmodel: {{name: {model}, dtype: {dtype}}}\ninput: {{path: rows.parquet}}\n"
        "prompt: {on_too_long: truncate_right}\noutput: {path: out}\n"
        f"engine: {{device: cpu, num_threads: {args.threads}}}\n"
    )
    command = [sys.executable, "-m", "batchinfer", "run", "--quiet", str(job)]
    subprocess.run(command, capture_output=True, text=True, check=True)
    summary = json.loads((folder / "out" / "summary.json").read_text())
    parts = sorted((folder / "out" / "data").glob("*.parquet"))
    vectors = np.concatenate(
        [
            np.asarray(pq.read_table(part)["embedding"].combine_chunks().flatten()).reshape(
                -1, SHAPES[model.name]["hidden_size"]
            )
            for part in parts
        ]
    )
    return {"seconds": len(vectors) / summary["throughput"]["rows_per_s"]}, vectors


def measure(args: argparse.Namespace) -> list[Run]:
    """Run both programs alternately on each model and dtype."""
    texts = args.folder / "texts.json"
    texts.write_text(json.dumps(make_texts(args.texts)))
    runs: list[Run] = []
    for name in args.models:
        model = args.folder / name
        shutil.rmtree(model, ignore_errors=True)
        make_model(model, name)
        for dtype in args.dtypes:
            for _ in range(args.rounds):
                facts = {"model": name, "dtype": dtype, "load": os.getloadavg()[0]}
                (one, expected), (other, found) = (
                    side(model, dtype, texts, args) for side in (theirs, ours)
                )
                cosine = (expected * found).sum(1) / np.linalg.norm(expected, axis=1)
                rates = {
                    "theirs_rows_per_s": args.texts / one["seconds"],
                    "ours_rows_per_s": args.texts / other["seconds"],
                }
                ratio = one["seconds"] / other["seconds"]
                runs.append({**facts, **rates, "ratio": ratio, "least_cosine": float(cosine.min())})
                print(json.dumps(runs[-1]), flush=True)
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--texts", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--folder", type=Path, default=Path("out/embeddings"))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    args.folder = args.folder.resolve()
    began = time.perf_counter()
    runs = measure(args)
    for name in args.models:
        for dtype in args.dtypes:
            ratios = [r["ratio"] for r in runs if (r["model"], r["dtype"]) == (name, dtype)]
            print(f"{name} {dtype}: {statistics.median(ratios):.2f}x, median of {len(ratios)}")
    if args.json is not None:
        facts = {"date": str(date.today()), "threads": args.threads, "texts": args.texts}
        facts |= {"seconds": time.perf_counter() - began}
        write_results(args.json, {**facts, "runs": runs})


if __name__ == "__main__":
    main()
