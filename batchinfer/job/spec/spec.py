"""The job file as frozen records: what every key is called, means and may be.

These check single values. ``batchinfer.job.spec.load`` reads a file into them (lines, variables,
presets, paths); ``batchinfer.job.spec.json_schema`` describes them to editors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from batchinfer.config import (
    QUANTIZATIONS,
    AcceptConfig,
    ClassifyConfig,
    EmbedConfig,
    EngineConfig,
    ModelConfig,
    PromptConfig,
    Runner,
    ScoreConfig,
    field_names,
)
from batchinfer.console.format import did_you_mean, printable
from batchinfer.job.spec.sections import (
    ErrorsSpec,
    JobSampling,
    OnEndSpec,
    ReasoningSpec,
    ScaleSpec,
    Section,
    StatsSpec,
    Text,
)
from batchinfer.job.spec.tasks import TASK_SPECS, TaskName, TaskSpec, check_task
from batchinfer.job.storage.urls import STORES
from batchinfer.text.tools.formats import FORMATS

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_PROMPT_COLUMNS = (
    *("column", "template", "messages", "token_ids_column", "adapter", "adapter_column"),
    *("tools", "tools_column"),
)
_PLANNED_STORES = (*STORES, "hf")


def _refuse_not_yet(asked: Mapping[str, bool]) -> None:
    """Raise for the first key that is asked for and not built."""
    for key, is_asked in asked.items():
        if is_asked:
            raise ValueError(f"not yet: {key} is not supported by this version")


def _check_place(key: str, path: str, stores: Collection[str] = ()) -> None:
    """Raise where ``path`` is empty, a URL of no known store, or what no file system takes."""
    if not path or "\0" in path:
        raise ValueError(f"{key} must be a path, not {json.dumps(path)}")
    match = _URL.match(path)
    if match is None:
        return
    if "@" in path[match.end() :].partition("/")[0]:
        raise ValueError(f"{key} holds credentials; give them in the environment instead")
    if match.group(1) in stores:
        return
    if match.group(1) in _PLANNED_STORES:
        _refuse_not_yet({f"{key}: {match.group()}": True})
    raise ValueError(f"{key}: {match.group()} is not a place this version can use; give a path")


class ModelSpec(Section):
    """The model and how its weights are loaded."""

    name: Text
    """Hub id or local directory; safetensors only."""
    revision: Text | None = None
    """Branch, tag or commit on the hub."""
    tokenizer: Text | None = None
    """Hub id or local directory; null: the model's own."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto: what the checkpoint says."""
    max_model_len: int | None = Field(default=None, ge=1)
    """Most tokens of prompt and output together; null: what the model's config allows."""
    quantization: Text | None = None
    """How to quantize the linear layers' weights as they are loaded: int8 or int4 (the project's
    own, rows are rounded to int8; on a CPU), fp8 (the project's own, in blocks of 128 x 128; on a
    CUDA device, rows as well from compute capability 8.9 on), int8_weight_only or int4_weight_only
    (torchao). null: as the checkpoint has them, dequantized where others than torchao quantized
    them. Of such a checkpoint int8, int4 and fp8 take what fits as it was saved."""
    adapters: Mapping[Text, Text] = {}
    """LoRA adapters as peft saves them: a name, and a folder or hub id, each.
    ``prompt.adapter`` says which one all rows run through, ``prompt.adapter_column`` which row runs
    through which; requests of OpenAI batch files name one in place of the model."""
    trust_remote_code: bool = False
    """Run code from the model folder. Not yet."""
    served_model_name: Text | tuple[Text, ...] | None = None
    """What requests of an OpenAI batch file must call the model; the first is what answers call it
    where the request names none. The last parts of a name will do. null: model.name, and requests
    for other models are answered too, with a warning; with adapters they are refused."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        method = self.quantization
        unknown = method is not None and method not in QUANTIZATIONS
        _refuse_not_yet(
            {
                f"model.quantization: {printable(method or '', 60)}": unknown,
                "model.trust_remote_code": self.trust_remote_code,
            }
        )
        _check_place("model.name", self.name)
        if self.tokenizer is not None:
            _check_place("model.tokenizer", self.tokenizer)
        if self.served_model_name == ():
            raise ValueError("served_model_name is an empty list; name the model, or leave it out")
        return self

    def config(self, runner: Runner = "generate") -> ModelConfig:
        """What of the section says which model is loaded, and how."""
        keys = (name for name in field_names(ModelConfig) if name != "runner")
        return ModelConfig(**{name: getattr(self, name) for name in keys}, runner=runner)

    @property
    def served_names(self) -> tuple[str, ...]:
        """``served_model_name`` as a tuple, however it was written."""
        names = self.served_model_name or self.name
        return (names,) if isinstance(names, str) else names


class InputSpec(Section):
    """The rows to run."""

    path: str | tuple[str, ...]
    """File, list of files, glob or directory, local, s3://, gs:// or hf://datasets/; globs and
    directories in path order. As loaded: absolute; a path that exists is itself, otherwise it is a
    glob."""
    format: Literal[
        "auto", "parquet", "jsonl", "csv", "arrow", "delta", "iceberg", "openai-batch"
    ] = "auto"
    """auto: as files are named: jsonl for .jsonl and .ndjson, csv for .csv and .tsv (each also .gz,
    .zst, .bz2), arrow for .arrow, .arrows, .feather and .ipc, else parquet; delta and iceberg for
    folders of such tables. In another folder CSV and Arrow are only looked for where there is no
    Parquet and no JSON Lines."""
    version: int | None = Field(default=None, ge=0)
    """Version of a Delta table, or snapshot id of an Iceberg table; null: the latest, which the job
    then keeps to until it has ended."""
    schema_mode: Literal["strict", "union"] = Field(default="strict", alias="schema")
    """What to do about files that differ in a column that is kept or used. strict: refuse them.
    union: one column of all of them, of a type that holds every value unchanged (int64 for int32
    and int64, string for dictionaries of strings), null where a file does not have it; types that
    have none in common, like text and number, are refused. JSON Lines are united either way."""
    id_column: Text | None = None
    """A column that identifies rows. A row without a value, or with the value of an earlier row, is
    an error row: missing_id, duplicate_id."""
    filter: Text | None = None
    """Condition on a row's columns, in SQL: lang = 'en' and length(text) > 10. Rows that do not
    meet it, or where it is null, are not run; the others keep their row_id."""
    keep_columns: Literal["*"] | tuple[Text, ...] = "*"
    """Input columns to copy to the output; "*": all."""
    limit: int | None = Field(default=None, ge=0)
    """Run this many rows from the start, of those that filter selects."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.paths:
            raise ValueError("path is an empty list; name at least one file")
        for path in self.paths:
            _check_place("input.path", path, (*STORES, "hf"))
        return self

    @property
    def paths(self) -> tuple[str, ...]:
        """``path`` as a tuple, however it was written."""
        return (self.path,) if isinstance(self.path, str) else self.path


class OutputSpec(Section):
    """Where the answers go and what comes with them."""

    path: Text
    """Directory for the output, local or a folder in an object store: s3://, gs://."""
    format: Literal["parquet", "openai-batch"] = "parquet"
    """openai-batch: OpenAI's files besides, openai/output.jsonl and openai/errors.jsonl."""
    rows_per_part: int = Field(default=4096, ge=1)
    """Rows in one output file."""
    if_exists: Literal["resume", "error", "overwrite"] = "resume"
    """What to do when the directory holds output already."""
    explode: bool = False
    """One output row per sample, in outputs and generated_text; all else is repeated."""
    include: tuple[Literal["prompt", "token_ids", "logprobs", "prompt_logprobs"], ...] = ()
    """More to write for each row."""
    rename: Mapping[str, Text] = {}
    """Input column: its name in the output, where it collides with an output column."""
    reuse: tuple[Text, ...] = ()
    """Output directories of other jobs, finished or not: rows whose answers follow from the same
    (prompt, parameters, model) are copied from there and not computed."""
    partition_by: tuple[Text, ...] = ()
    """Write the rows once more in the end, to partitioned/column=value/, by these output columns:
    kept input columns of texts, whole numbers, dates or true and false, or status."""
    reasoning: Literal["auto", "none"] | ReasoningSpec = "none"
    """Split what the model thinks from its answer, into columns reasoning and num_reasoning_tokens;
    structured outputs and accept then judge the answer alone. auto: by the markers that the chat
    template or the tokenizer has. none: the text has both."""
    tool_parser: Text | None = None
    """How the model writes calls of tools, which go to the column tool_calls. auto: as its chat
    template says. none: they stay in the text. Else vLLM's name of the format: hermes, qwen3_coder,
    seed_oss, minimax_m2, glm45, mistral, llama3_json, pythonic, olmo3, lfm2, granite,
    phi4_mini_json, deepseek_v3, deepseek_v31, kimi_k2 or openai. null: auto where prompt has tools,
    else none."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_place("output.path", self.path, STORES)
        for path in self.reuse:
            _check_place("output.reuse", path, STORES)
        known, name = ("auto", "none", *FORMATS), self.tool_parser
        if name is not None and name not in known:
            raise ValueError(f"tool_parser {name!r} is not known{did_you_mean(name, known)}")
        if len(set(self.include)) < len(self.include):
            raise ValueError("include names something twice")
        if len(set(self.rename.values())) < len(self.rename):
            raise ValueError("rename gives two columns the same name")
        if len(set(self.partition_by)) < len(self.partition_by):
            raise ValueError("partition_by names a column twice")
        return self

    @property
    def written(self) -> tuple[str, ...]:
        """``include``, and what the format and other keys need besides."""
        written: dict[str, None] = dict.fromkeys(self.include)
        if self.format == "openai-batch":
            written |= {"logprobs": None, "prompt_logprobs": None}
        if self.reasoning != "none":
            written["reasoning"] = None
        return tuple(written)

    @property
    def asked_reasoning(self) -> str | Mapping[str, str]:
        """``reasoning`` as plain data."""
        asked = self.reasoning
        return asked if isinstance(asked, str) else asked.model_dump()


def _check_version(version: int) -> int:
    if version != 1:
        raise ValueError(f"version is {version}; this batchinfer knows version 1")
    return version


def _check_messages(prompt: PromptConfig) -> PromptConfig:
    for message in prompt.messages or ():
        if set(message) != {"role", "content"}:
            raise ValueError("messages: each needs a role and a content, and nothing else")
    return prompt


class JobSpec(Section):
    """A batchinfer job."""

    version: Annotated[
        int, AfterValidator(_check_version), Field(json_schema_extra={"minimum": 1, "maximum": 1})
    ] = 1
    """Version of the job-file format."""
    name: str = ""
    """What the job is called; default: the file's name. May use {{ vars }}."""
    task: TaskName = "generate"
    """score: how likely given completions of the prompts are, or the prompts themselves. embed: a
    vector for each prompt. classify: labels and scores, of prompts or of queries and documents."""
    vars: Mapping[str, str | None] = {}
    """Texts for {{ }} in name and paths; null: must be given with --var."""
    model: ModelSpec
    input: InputSpec
    prompt: Annotated[PromptConfig, AfterValidator(_check_messages)] = PromptConfig()
    sampling: JobSampling
    """How the output tokens of a row are chosen. Names and meanings are vLLM's. Required, but left
    out with the other tasks, which choose none."""
    accept: AcceptConfig | None = None
    """Which samples to keep."""
    score: ScoreConfig | None = None
    """What to score, with task: score."""
    embed: EmbedConfig | None = None
    """How embeddings are made, with task: embed."""
    classify: ClassifyConfig | None = None
    """What is classified, with task: classify."""
    engine: EngineConfig = EngineConfig()
    output: OutputSpec
    errors: ErrorsSpec = ErrorsSpec()
    stats: StatsSpec = StatsSpec()
    scale: ScaleSpec = ScaleSpec()
    on_end: OnEndSpec = OnEndSpec()

    @property
    def tool_parser(self) -> str:
        """``output.tool_parser``, with what null means."""
        return self.output.tool_parser or ("auto" if self.prompt.has_tools else "none")

    @property
    def written(self) -> tuple[str, ...]:
        """``output.written``, and what the tools need besides."""
        calls = () if self.tool_parser == "none" else ("tool_calls",)
        return (*self.output.written, *calls)

    @property
    def task_spec(self) -> TaskSpec:
        """What the task asks of the other keys, and its output columns."""
        return TASK_SPECS[self.task]

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_task(self)
        if self.accept is not None:
            self._check_accept(self.accept)
        if self.sampling.key == "id":
            self._check_keyed_by_id()
        self._check_batch()
        return self

    def _check_batch(self) -> None:
        if self.output.explode and self.output.format == "openai-batch":
            raise ValueError("output.explode: OpenAI's files have all choices of a request in one")
        if self.input.format == "openai-batch":
            for name in _PROMPT_COLUMNS:
                if getattr(self.prompt, name) is not None:
                    raise ValueError(
                        f"prompt.{name}: with input.format: openai-batch, prompts are in the "
                        "requests; leave it out"
                    )
        elif self.output.format == "openai-batch":
            raise ValueError("output.format: openai-batch needs input.format: openai-batch")

    def _check_keyed_by_id(self) -> None:
        if self.input.id_column is None:
            raise ValueError("sampling.key: id needs input.id_column; name the column of ids")
        is_batch = self.input.format == "openai-batch"
        _refuse_not_yet({"sampling.key: id with input.format: openai-batch": is_batch})

    def _check_accept(self, accept: AcceptConfig) -> None:
        if accept.k is not None and self.sampling.n > 1:
            raise ValueError("accept.k and sampling.n both say how many to keep; leave one out")
        if self.sampling.n > accept.max_tries:
            raise ValueError("accept.max_tries is less than sampling.n; raise it")
        _refuse_not_yet(
            {
                "accept with sampling.beam_width": self.sampling.beam_width is not None,
                "accept with output.explode": self.output.explode,
                "accept with output.format: openai-batch": self.output.format == "openai-batch",
                "accept with sampling.prompt_logprobs": self.sampling.prompt_logprobs is not None,
            }
        )


def resolved(spec: JobSpec) -> dict[str, Any]:
    """Every key of the job with its value, defaults included, as JSON data; no secrets of
    ``on_end``."""
    return spec.model_dump(mode="json")
