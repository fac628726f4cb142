"""The job file as frozen records: names, meanings and valid values of all keys.

``batchinfer.job.spec.load`` reads a job file into these records, and
``batchinfer.job.spec.json_schema`` makes a JSON Schema of them for editors.
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
from batchinfer.job.spec.task_keys import TASK_SPECS, TaskName, TaskSpec, check_task
from batchinfer.job.spec.text_options import delimiter_character, encoding_name
from batchinfer.job.storage.urls import STORES
from batchinfer.text.tools.formats import FORMATS

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_PROMPT_COLUMNS = (
    *("column", "template", "messages", "token_ids_column", "adapter", "adapter_column"),
    *("tools", "tools_column"),
)
_PLANNED_STORES = (*STORES, "hf")


def _refuse_not_yet(used: Mapping[str, bool]) -> None:
    """Raise an error for the first key that is used but not supported."""
    for key, is_asked in used.items():
        if is_asked:
            raise ValueError(f"{key} is not yet supported by this version")


def _check_place(key: str, path: str, stores: Collection[str] = ()) -> None:
    if not path or "\0" in path:
        raise ValueError(f"{key} must be a path, not {json.dumps(path)}")
    match = _URL.match(path)
    if match is None:
        return
    if "@" in path[match.end() :].partition("/")[0]:
        raise ValueError(f"{key} contains credentials; set them in the environment instead")
    if match.group(1) in stores:
        return
    if match.group(1) in _PLANNED_STORES:
        _refuse_not_yet({f"{key}: {match.group()}": True})
    raise ValueError(f"{key}: this version cannot use {match.group()}; give a path")


class ModelSpec(Section):
    """The model and how to load it."""

    name: Text
    """Hub id or local directory. Weights must be in safetensors."""
    revision: Text | None = None
    """Branch, tag or commit on the hub."""
    tokenizer: Text | None = None
    """Hub id or local directory. null: the tokenizer of the model."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of the weights and activations. auto: the data type of the checkpoint."""
    max_model_len: int | None = Field(default=None, ge=1)
    """Maximum number of tokens in a prompt and its output together. null: the limit in the model's
    config."""
    quantization: Text | None = None
    """Method that quantizes the weights of linear layers when they are loaded. int8 and int4:
    batchinfer's methods for CPUs, with int8 activations; on CUDA devices, int4 keeps the data type
    of activations. fp8: batchinfer's method for CPUs and CUDA devices, in blocks of 128 x 128; on
    CUDA devices with compute capability 8.9 or higher, activations are fp8 too. int8_weight_only
    and int4_weight_only: torchao's methods. null: keep the weights that torchao quantized, and
    dequantize other quantized checkpoints. If a checkpoint is already quantized, int8, int4 and fp8
    use its weights unchanged if their format allows it."""
    adapters: Mapping[Text, Text] = {}
    """LoRA adapters in peft's format: a folder or hub id for each name. ``prompt.adapter`` selects
    an adapter for all rows, ``prompt.adapter_column`` for each row. A request in an OpenAI batch
    file selects an adapter by naming it as the model."""
    trust_remote_code: bool = False
    """Run code from the model folder. Not supported yet."""
    served_model_name: Text | tuple[Text, ...] | None = None
    """Names of the model that requests in an OpenAI batch file may use. If a name is a path, the
    last components of the path are enough in a request. Answers to requests without a model use the
    first name. null: model.name; requests for other models are then answered with a warning, or are
    refused if model.adapters is set."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        method = self.quantization
        if method is not None and method not in QUANTIZATIONS:
            raise ValueError(
                f"model.quantization: {printable(method, 60)} is not yet supported by this "
                f"version; known: {', '.join(QUANTIZATIONS)}"
            )
        _refuse_not_yet({"model.trust_remote_code": self.trust_remote_code})
        _check_place("model.name", self.name)
        if self.tokenizer is not None:
            _check_place("model.tokenizer", self.tokenizer)
        if self.served_model_name == ():
            raise ValueError("served_model_name is an empty list; name the model, or leave it out")
        return self

    def config(self, runner: Runner = "generate") -> ModelConfig:
        keys = (name for name in field_names(ModelConfig) if name != "runner")
        return ModelConfig(**{name: getattr(self, name) for name in keys}, runner=runner)

    @property
    def served_names(self) -> tuple[str, ...]:
        """Values of ``served_model_name``, or else the model's name."""
        names = self.served_model_name or self.name
        return (names,) if isinstance(names, str) else names


class InputSpec(Section):
    """The dataset, and which of its rows to run."""

    path: str | tuple[str, ...]
    """File, list of files, glob or directory: local, s3://, gs:// or hf://datasets/. Globs and
    directories are read in path order. A path that exists is never treated as a glob."""
    format: Literal[
        "auto", "parquet", "jsonl", "json", "csv", "arrow", "delta", "iceberg", "openai-batch"
    ] = "auto"
    """Format of the files. auto chooses by file name: jsonl for .jsonl and .ndjson, json for .json,
    csv for .csv and .tsv (each also with .gz, .zst or .bz2), arrow for .arrow, .arrows, .feather
    and .ipc, and parquet for all other names. Folders of Delta and Iceberg tables are detected. In
    other folders, CSV and Arrow files are read only if the folder has no Parquet and no JSON Lines
    files, and .json files only if it has no files of other formats."""
    version: int | None = Field(default=None, ge=0)
    """Version of a Delta table, or snapshot id of an Iceberg table. null: the latest version when
    the job is planned."""
    schema_mode: Literal["strict", "union"] = Field(default="strict", alias="schema")
    """What to do if files differ in a column that the job uses or keeps. strict: refuse the files.
    union: use a type that holds every value unchanged (int64 for int32 and int64, string for
    dictionaries of strings), and null if a file does not have the column; refuse columns without a
    common type, like string and number. JSON and JSON Lines files are always read with union."""
    encoding: Annotated[Text, AfterValidator(encoding_name)] = "utf-8"
    """Encoding of CSV, JSON and JSON Lines files, by its Python name, like cp1252 or mac_roman."""
    encoding_errors: Literal["strict", "replace"] = "strict"
    """What to do with bytes that are not valid in the encoding, or in the UTF-8 text of Parquet and
    Arrow files. strict: refuse the file, and name the line or row, and the column; in a prompt of a
    Parquet or Arrow file, only the row fails. replace: read such bytes as U+FFFD; summary.json and
    the report count the affected cells."""
    delimiter: Annotated[str, AfterValidator(delimiter_character)] | None = None
    """Character that separates the cells of CSV files, like ; or |. null: a tab in .tsv files, and
    a comma in others."""
    json_field: Text | None = None
    """Key of the list of rows in .json files that hold one object. null: the files are arrays of
    objects, or JSON Lines."""
    id_column: Text | None = None
    """A column that identifies rows. A row without a value fails with missing_id, and a row with
    the value of an earlier row fails with duplicate_id."""
    filter: Text | None = None
    """SQL condition on a row's columns, like lang = 'en' and length(text) > 10. A row runs only if
    the condition is true. Rows keep their row_id."""
    media_root: Text | None = None
    """Folder of the images that rows name by path: local, s3://, gs:// or hf://datasets/. A path
    that leads out of this folder, even through a link, is an error. null: the folder of the first
    input file."""
    media_urls: bool = False
    """Download images that rows name by http:// or https:// addresses. false: such a row fails."""
    keep_columns: Literal["*"] | tuple[Text, ...] = "*"
    """Input columns to copy to the output; "*": all."""
    limit: int | None = Field(default=None, ge=0)
    """Run only this many rows: the first rows that filter selects."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.paths:
            raise ValueError("path is an empty list; name at least one file")
        for path in self.paths:
            _check_place("input.path", path, (*STORES, "hf"))
        if self.media_root is not None:
            _check_place("input.media_root", self.media_root, (*STORES, "hf"))
        return self

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.path,) if isinstance(self.path, str) else self.path


class OutputSpec(Section):
    """The output directory, and the columns and files to write."""

    path: Text
    """Output directory, local or in an object store (s3://, gs://)."""
    format: Literal["parquet", "openai-batch"] = "parquet"
    """Format of the output. openai-batch: also write the files openai/output.jsonl and
    openai/errors.jsonl in OpenAI's format."""
    rows_per_part: int = Field(default=4096, ge=1)
    """Number of rows in an output file."""
    if_exists: Literal["resume", "error", "overwrite"] = "resume"
    """What to do if the directory already has output."""
    explode: bool = False
    """Write one row per sample: the columns about samples, like outputs and generated_text,
    describe only this sample, and other columns are repeated."""
    include: tuple[Literal["prompt", "token_ids", "logprobs", "prompt_logprobs"], ...] = ()
    """Additional columns to write."""
    rename: Mapping[str, Text] = {}
    """New names of input columns, keyed by old name. Use this key for input columns that have the
    name of an output column."""
    reuse: tuple[Text, ...] = ()
    """Output directories of other jobs, finished or not. Rows with the same prompt, parameters and
    model are copied from there instead of computed."""
    partition_by: tuple[Text, ...] = ()
    """Columns by which to partition a copy of the output, in partitioned/column=value/: status, or
    kept input columns of strings, integers, dates or booleans."""
    reasoning: Literal["auto", "none"] | ReasoningSpec = "none"
    """Write the reasoning to the column reasoning and its length to num_reasoning_tokens, and
    remove it from the text. Structured outputs and accept then apply to the answer only. auto: use
    the markers of the chat template or the tokenizer. none: keep the reasoning in the text."""
    tool_parser: Text | None = None
    """Format of the model's tool calls, which are written to the column tool_calls. auto: the
    format of the model's chat template. none: keep tool calls in the text. Any other value: vLLM's
    name of the format: hermes, qwen3_coder, seed_oss, minimax_m2, glm45, mistral, llama3_json,
    pythonic, olmo3, lfm2, granite, phi4_mini_json, deepseek_v3, deepseek_v31, kimi_k2 or openai.
    null: auto if prompt has tools, else none."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_place("output.path", self.path, STORES)
        for path in self.reuse:
            _check_place("output.reuse", path, STORES)
        known, name = ("auto", "none", *FORMATS), self.tool_parser
        if name is not None and name not in known:
            raise ValueError(f"tool_parser {name!r} is not known{did_you_mean(name, known)}")
        if len(set(self.include)) < len(self.include):
            raise ValueError("include contains a name twice")
        if len(set(self.rename.values())) < len(self.rename):
            raise ValueError("rename gives two columns the same name")
        if len(set(self.partition_by)) < len(self.partition_by):
            raise ValueError("partition_by names a column twice")
        return self

    @property
    def written(self) -> tuple[str, ...]:
        """Columns of ``include``, and columns that the format and other keys add."""
        batch = ("logprobs", "prompt_logprobs") if self.format == "openai-batch" else ()
        reasoning = () if self.reasoning == "none" else ("reasoning",)
        return tuple(dict.fromkeys((*self.include, *batch, *reasoning)))

    @property
    def asked_reasoning(self) -> str | Mapping[str, str]:
        reasoning = self.reasoning
        return reasoning if isinstance(reasoning, str) else reasoning.model_dump()


def _check_version(version: int) -> int:
    if version != 1:
        raise ValueError(
            f"version is {version}, but this version of batchinfer reads only version 1"
        )
    return version


def _check_messages(prompt: PromptConfig) -> PromptConfig:
    for message in prompt.messages or ():
        if set(message) != {"role", "content"}:
            raise ValueError(
                "messages: each message must have a role and a content, and nothing else"
            )
    return prompt


class JobSpec(Section):
    """A batchinfer job."""

    version: Annotated[
        int, AfterValidator(_check_version), Field(json_schema_extra={"minimum": 1, "maximum": 1})
    ] = 1
    """Version of the job-file format."""
    name: str = ""
    """Name of the job; default: the name of the job file. The name may use {{ vars }}."""
    task: TaskName = "generate"
    """What to compute for each row. generate: completions of the prompt. score: log-probabilities
    of completions from the input, or of the prompt. embed: a vector for the prompt. classify:
    labels and scores of the prompt, or of a query with a document."""
    vars: Mapping[str, str | None] = {}
    """Values for {{ }} in name and paths. A variable that is null needs the option --var."""
    model: ModelSpec
    input: InputSpec
    prompt: Annotated[PromptConfig, AfterValidator(_check_messages)] = PromptConfig()
    sampling: JobSampling
    """Sampling parameters, with vLLM's names and meanings. Required for task: generate. Not allowed
    for other tasks, because they draw no tokens."""
    accept: AcceptConfig | None = None
    """Conditions on the samples to keep."""
    score: ScoreConfig | None = None
    """Settings of task: score."""
    embed: EmbedConfig | None = None
    """Settings of task: embed."""
    classify: ClassifyConfig | None = None
    """Settings of task: classify."""
    engine: EngineConfig = EngineConfig()
    output: OutputSpec
    errors: ErrorsSpec = ErrorsSpec()
    stats: StatsSpec = StatsSpec()
    scale: ScaleSpec = ScaleSpec()
    on_end: OnEndSpec = OnEndSpec()

    @property
    def tool_parser(self) -> str:
        """Value of ``output.tool_parser``, or the default if it is null."""
        return self.output.tool_parser or ("auto" if self.prompt.has_tools else "none")

    @property
    def written(self) -> tuple[str, ...]:
        """Columns of ``output.written``, with the column of tool calls if they are parsed."""
        calls = () if self.tool_parser == "none" else ("tool_calls",)
        return (*self.output.written, *calls)

    @property
    def task_spec(self) -> TaskSpec:
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
            raise ValueError(
                "output.explode cannot be combined with output.format: openai-batch, "
                "which has all choices of a request in one line"
            )
        if self.input.format == "openai-batch":
            for name in _PROMPT_COLUMNS:
                if getattr(self.prompt, name) is not None:
                    raise ValueError(
                        f"prompt.{name} cannot be combined with input.format: "
                        "openai-batch, because the requests contain the prompts; "
                        "leave it out"
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
            raise ValueError(
                "accept.k and sampling.n both say how many samples to keep; leave one out"
            )
        if self.sampling.n > accept.max_tries:
            raise ValueError("accept.max_tries is less than sampling.n; raise accept.max_tries")
        _refuse_not_yet(
            {
                "accept with sampling.beam_width": self.sampling.beam_width is not None,
                "accept with output.explode": self.output.explode,
                "accept with output.format: openai-batch": self.output.format == "openai-batch",
                "accept with sampling.prompt_logprobs": self.sampling.prompt_logprobs is not None,
            }
        )


def resolved(spec: JobSpec) -> dict[str, Any]:
    """Return all keys of the job as JSON data, without the secrets of ``on_end``."""
    return spec.model_dump(mode="json")
