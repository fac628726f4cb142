"""The job file as frozen records: names, meanings and valid values of all keys.

``batchinfer.job.spec.load`` reads a file into them (lines, variables, presets, paths) and
``batchinfer.job.spec.json_schema`` describes them to editors.
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
    """Raise for the first key that is used and not supported."""
    for key, is_asked in asked.items():
        if is_asked:
            raise ValueError(f"not yet: {key} is not supported by this version")


def _check_place(key: str, path: str, stores: Collection[str] = ()) -> None:
    """Raise if ``path`` is empty, invalid, or a URL of an unknown store."""
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
    """The model, and how to load it."""

    name: Text
    """Hub id or local directory; safetensors only."""
    revision: Text | None = None
    """Branch, tag or commit on the hub."""
    tokenizer: Text | None = None
    """Hub id or local directory; null: the model's own."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto: the checkpoint's."""
    max_model_len: int | None = Field(default=None, ge=1)
    """Most tokens of prompt and output together; null: the limit in the model's config."""
    quantization: Text | None = None
    """Quantize the linear layers' weights on load: int8 or int4 (the project's own, with int8
    activations; on a CPU), fp8 (the project's own, in blocks of 128 x 128; on a CUDA device, with
    fp8 activations from compute capability 8.9 on), int8_weight_only or int4_weight_only (torchao).
    null: keep torchao's quantization and dequantize other checkpoints. int8, int4 and fp8 use the
    saved weights of a quantized checkpoint as they are if the format fits."""
    adapters: Mapping[Text, Text] = {}
    """LoRA adapters in peft's format: folder or hub id by name. ``prompt.adapter`` names one for
    all rows, ``prompt.adapter_column`` one per row; a request of an OpenAI batch file names one as
    its model."""
    trust_remote_code: bool = False
    """Run code from the model folder. Not yet."""
    served_model_name: Text | tuple[Text, ...] | None = None
    """Names that requests of an OpenAI batch file must use for the model, or the last path
    components of one; answers to requests without a model use the first. null: model.name, and
    requests for other models are answered with a warning, or refused if there are adapters."""

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
        """The keys of the section that decide which model is loaded, and how."""
        keys = (name for name in field_names(ModelConfig) if name != "runner")
        return ModelConfig(**{name: getattr(self, name) for name in keys}, runner=runner)

    @property
    def served_names(self) -> tuple[str, ...]:
        """``served_model_name``, or the model's name, as a tuple."""
        names = self.served_model_name or self.name
        return (names,) if isinstance(names, str) else names


class InputSpec(Section):
    """The rows to run."""

    path: str | tuple[str, ...]
    """File, list of files, glob or directory: local, s3://, gs:// or hf://datasets/. Globs and
    directories are read in path order. A path that exists is not taken as a glob."""
    format: Literal[
        "auto", "parquet", "jsonl", "csv", "arrow", "delta", "iceberg", "openai-batch"
    ] = "auto"
    """auto: by file name: jsonl for .jsonl and .ndjson, csv for .csv and .tsv (each also .gz, .zst,
    .bz2), arrow for .arrow, .arrows, .feather and .ipc, else parquet; delta and iceberg for folders
    of such tables. In other folders CSV and Arrow files count only if there are no Parquet and JSON
    Lines files."""
    version: int | None = Field(default=None, ge=0)
    """Version of a Delta table, or snapshot id of an Iceberg table; null: the latest when the job
    is planned."""
    schema_mode: Literal["strict", "union"] = Field(default="strict", alias="schema")
    """What to do if files differ in a column that is kept or used. strict: refuse them. union: use
    a type that holds every value unchanged (int64 for int32 and int64, string for dictionaries of
    strings), with null where a file lacks the column; types without a common one, like string and
    number, are refused. JSON Lines files always form a union."""
    id_column: Text | None = None
    """A column that identifies rows. A row without a value, or with the value of an earlier row,
    fails with missing_id or duplicate_id."""
    filter: Text | None = None
    """SQL condition on a row's columns: lang = 'en' and length(text) > 10. Rows for which it is
    false or null are not run; the others keep their row_id."""
    keep_columns: Literal["*"] | tuple[Text, ...] = "*"
    """Input columns to copy to the output; "*": all."""
    limit: int | None = Field(default=None, ge=0)
    """Run only this many rows, the first that filter selects."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.paths:
            raise ValueError("path is an empty list; name at least one file")
        for path in self.paths:
            _check_place("input.path", path, (*STORES, "hf"))
        return self

    @property
    def paths(self) -> tuple[str, ...]:
        """``path`` as a tuple."""
        return (self.path,) if isinstance(self.path, str) else self.path


class OutputSpec(Section):
    """Where the answers go, and what comes with them."""

    path: Text
    """Output directory, local or in an object store (s3://, gs://)."""
    format: Literal["parquet", "openai-batch"] = "parquet"
    """openai-batch: also write OpenAI's files openai/output.jsonl and openai/errors.jsonl."""
    rows_per_part: int = Field(default=4096, ge=1)
    """Rows in one output file."""
    if_exists: Literal["resume", "error", "overwrite"] = "resume"
    """What to do if the directory already holds output."""
    explode: bool = False
    """Write one row per sample, in outputs and generated_text; other columns are repeated."""
    include: tuple[Literal["prompt", "token_ids", "logprobs", "prompt_logprobs"], ...] = ()
    """More columns to write."""
    rename: Mapping[str, Text] = {}
    """New names of input columns by name, for those that collide with an output column."""
    reuse: tuple[Text, ...] = ()
    """Output directories of other jobs, finished or not. Rows with the same prompt, parameters and
    model are copied from there instead of computed."""
    partition_by: tuple[Text, ...] = ()
    """At the end also write the rows to partitioned/column=value/ by these output columns: kept
    input columns of strings, integers, dates or booleans, or status."""
    reasoning: Literal["auto", "none"] | ReasoningSpec = "none"
    """Split reasoning from the answer, into columns reasoning and num_reasoning_tokens; structured
    outputs and accept then apply to the answer alone. auto: by the markers of the chat template or
    the tokenizer. none: keep both in the text."""
    tool_parser: Text | None = None
    """Format of the model's tool calls, which go to the column tool_calls. auto: as in its chat
    template. none: they stay in the text. Else vLLM's name of the format: hermes, qwen3_coder,
    seed_oss, minimax_m2, glm45, mistral, llama3_json, pythonic, olmo3, lfm2, granite,
    phi4_mini_json, deepseek_v3, deepseek_v31, kimi_k2 or openai. null: auto if prompt has tools,
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
        """``include``, and what the format and other keys add to it."""
        batch = ("logprobs", "prompt_logprobs") if self.format == "openai-batch" else ()
        reasoning = () if self.reasoning == "none" else ("reasoning",)
        return tuple(dict.fromkeys((*self.include, *batch, *reasoning)))

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
    """Name of the job; default: the file's name. May use {{ vars }}."""
    task: TaskName = "generate"
    """score: log-probabilities of given completions, or of the prompts. embed: a vector for each
    prompt. classify: labels and scores of prompts, or of queries with documents."""
    vars: Mapping[str, str | None] = {}
    """Values for {{ }} in name and paths; null: must be given with --var."""
    model: ModelSpec
    input: InputSpec
    prompt: Annotated[PromptConfig, AfterValidator(_check_messages)] = PromptConfig()
    sampling: JobSampling
    """How the output tokens of a row are chosen. Names and meanings are vLLM's. Required for task:
    generate, and not allowed for the other tasks, which draw no tokens."""
    accept: AcceptConfig | None = None
    """Which samples to keep."""
    score: ScoreConfig | None = None
    """What to score, for task: score."""
    embed: EmbedConfig | None = None
    """How to compute embeddings, for task: embed."""
    classify: ClassifyConfig | None = None
    """What to classify, for task: classify."""
    engine: EngineConfig = EngineConfig()
    output: OutputSpec
    errors: ErrorsSpec = ErrorsSpec()
    stats: StatsSpec = StatsSpec()
    scale: ScaleSpec = ScaleSpec()
    on_end: OnEndSpec = OnEndSpec()

    @property
    def tool_parser(self) -> str:
        """``output.tool_parser``, with null resolved."""
        return self.output.tool_parser or ("auto" if self.prompt.has_tools else "none")

    @property
    def written(self) -> tuple[str, ...]:
        """``output.written``, with tool calls."""
        calls = () if self.tool_parser == "none" else ("tool_calls",)
        return (*self.output.written, *calls)

    @property
    def task_spec(self) -> TaskSpec:
        """The task's requirements and output columns."""
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
    """All keys of the job with their values as JSON data, without secrets of ``on_end``."""
    return spec.model_dump(mode="json")
