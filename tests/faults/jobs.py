"""Small jobs on a tiny random model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from batchinfer.job.spec.spec import JobSpec
from tests.job.datasets import write_parquet

_MAKE_MODEL = "import sys; from pathlib import Path; from tests.models import make_text_model; "
_MAKE_MODEL += "make_text_model(Path(sys.argv[1]))"


def tiny_job(folder: Path, num_rows: int, rows_per_part: int) -> JobSpec:
    """Write data and a model; return a greedy job in which every tenth row has the same prompt."""
    # Use a new process, because this one must not compute before it forks.
    model = folder / "model"
    subprocess.run([sys.executable, "-c", _MAKE_MODEL, str(model)], check=True)
    prompts = [f"Row {row if row % 10 else 0} asks" for row in range(num_rows)]
    write_parquet(folder / "in" / "x.parquet", {"prompt": prompts})
    return JobSpec.model_validate(
        {
            "model": {"name": str(model)},
            "input": {"path": str(folder / "in")},
            "prompt": {"column": "prompt", "chat_template": "none"},
            "sampling": {"max_tokens": 16, "temperature": 0.0, "ignore_eos": True},
            "engine": {"num_kv_blocks": 256, "max_num_seqs": 64},
            "output": {"path": str(folder / "unused"), "rows_per_part": rows_per_part},
        }
    )


def import_model_code() -> None:
    """Import the code that these jobs need, so that forked processes start at once."""
    import transformers.models.llama.modeling_llama
    import transformers.models.llama.tokenization_llama

    import batchinfer.builders.engine
    import batchinfer.worker.attention.attention

    assert transformers.models
    assert batchinfer.builders.engine
