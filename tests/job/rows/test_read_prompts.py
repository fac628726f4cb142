from __future__ import annotations

from pathlib import Path

import pytest

from batchinfer.config import PromptConfig, SamplingParams
from batchinfer.errors import RowError
from batchinfer.job.input.dataset import open_source
from batchinfer.job.row_ranges import Part
from batchinfer.job.rows.read_prompts import ColumnReader, RowAdapters, read_prompts
from batchinfer.job.rows.sampling_params import RowParams
from batchinfer.requests.requests import PromptRow
from batchinfer.text.prompts import PromptBuilder
from tests.job.datasets import write_parquet
from tests.job.fakes import byte_tokenizer, grammars

PARAMS = RowParams(SamplingParams(seed=0), 257, grammars())


@pytest.mark.parametrize("keeps_text", [True, False])
def test_rows_become_prompts(tmp_path: Path, keeps_text: bool) -> None:
    path = write_parquet(tmp_path / "x.parquet", {"prompt": ["a", "", "c", "d"], "n": range(4)})
    source = open_source(str(path))
    config = PromptConfig(chat_template="none")
    builder = PromptBuilder(
        config, byte_tokenizer(), max_model_len=100, columns=source.schema.names
    )
    reader = ColumnReader(builder, PARAMS, RowAdapters(), source.schema.names)
    parts = [Part(0, range(2)), Part(2, range(3, 4))]
    read = source.batches(reader.columns, parts)
    rows = [r for batch in read_prompts(read, reader, keeps_text=keeps_text) for r in batch]
    assert [r.row_id for r in rows] == [0, 1, 3]
    shown = [r.prompt.code if isinstance(r.prompt, RowError) else r.prompt.text for r in rows]
    assert shown == (["a", "empty_prompt", "d"] if keeps_text else [None, "empty_prompt", None])


def test_an_error_does_not_keep_its_row_in_memory() -> None:
    def fail() -> None:
        text = b"\xff" * 100
        try:
            text.decode()
        except UnicodeDecodeError as error:
            raise RowError("invalid_utf8", "column prompt") from error

    with pytest.raises(RowError) as raised:
        fail()
    row = PromptRow(0, raised.value)
    assert row.prompt is raised.value
    assert raised.value.__traceback__ is raised.value.__cause__ is raised.value.__context__ is None
