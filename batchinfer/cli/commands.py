"""Commands and options of the program.

Each command imports its code only when it runs, so that the program starts quickly.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from enum import StrEnum
from functools import wraps
from inspect import signature
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer

from batchinfer.cli.program import crash_directory, log_as_json, run_program, to_json
from batchinfer.cli.usage_errors import Commands
from batchinfer.config.options import BatchOptions, BenchOptions
from batchinfer.console.stdout import print_stdout
from batchinfer.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from batchinfer.job.run.run_job import RunFleet
    from batchinfer.job.spec.spec import JobSpec

_Options = TypeVar("_Options", BatchOptions, BenchOptions)


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


app = typer.Typer(
    cls=Commands,
    help="Run a language model over a whole dataset.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["--help", "-h"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

JobFile = Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key, e.g. sampling.top_p=0.9."),
]
Variables = Annotated[
    list[str] | None,
    typer.Option("--var", metavar="NAME=TEXT", help="Set a variable of the job file."),
]
Output = Annotated[
    str | None, typer.Option("--output", metavar="DIR", help="Override the output directory.")
]
Folder = Annotated[str, typer.Argument(metavar="OUT", help="The output directory, or its URL.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
PricePerHour = Annotated[
    float | None, typer.Option(min=0, metavar="PRICE", help="Hourly price of one device.")
]
Currency = Annotated[
    str, typer.Option("--currency", metavar="CODE", help="Currency of --price-per-hour, e.g. EUR.")
]
Limit = Annotated[
    int | None, typer.Option("--limit", metavar="N", min=0, help="Run only the first N rows.")
]
Reuse = Annotated[
    list[str] | None,
    typer.Option("--reuse", metavar="DIR", help="Reuse matching rows from another output."),
]


def _read_job(
    job: Path, overrides: list[str] | None, variables: list[str] | None, **others: Any
) -> JobSpec:
    from batchinfer.job.spec.load import load_job, parse_variables

    values = parse_variables(variables or ())
    return load_job(job, overrides=overrides or (), variables=values, **others)


def _takes(
    record: type[_Options],
) -> Callable[[Callable[[_Options], None]], Callable[..., None]]:
    """Return a decorator that passes a command its options as one object of class ``record``."""

    def decorate(command: Callable[[_Options], None]) -> Callable[..., None]:
        @wraps(command)
        def take(**values: Any) -> None:
            command(record(**values))

        take.__annotations__ = get_type_hints(record, include_extras=True)
        take.__signature__ = signature(record, eval_str=True)  # type: ignore[attr-defined]
        return take

    return decorate


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print_stdout(f"batchinfer {version('batchinfer')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass


@app.command(short_help="Run or resume a job.")
def run(
    job: JobFile,
    overrides: Overrides = None,
    variables: Variables = None,
    output: Output = None,
    limit: Limit = None,
    shard: Annotated[
        str | None,
        typer.Option(
            "--shard", metavar="I/N", help="Run shard I of N; auto: use the Slurm array task."
        ),
    ] = None,
    worker: Annotated[
        bool,
        typer.Option("--worker", help="Run as one of several workers on one output."),
    ] = False,
    workers: Annotated[
        str | None,
        typer.Option("--workers", metavar="N|auto", help="Number of workers."),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option("--cluster", metavar="WHERE", help="Ray cluster: local, auto or HOST:PORT."),
    ] = None,
    reuse: Reuse = None,
    retry_errors: Annotated[
        bool, typer.Option("--retry-errors", help="Retry failed rows.")
    ] = False,
    update: Annotated[
        bool, typer.Option("--update", help="Recompute only rows that changed.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Delete existing output and start over.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Hide progress.")] = False,
    no_report: Annotated[
        bool, typer.Option("--no-report", help="Do not write report.html.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print summary.json at the end.")] = False,
    log_format: Annotated[
        LogFormat,
        typer.Option(
            "--log-format", help="Log format: text, or json (an object per line) on stderr."
        ),
    ] = LogFormat.TEXT,
    metrics: Annotated[
        str | None,
        typer.Option(
            "--metrics",
            metavar="PORT|FILE",
            help="Serve Prometheus metrics on PORT, or write them to FILE.",
        ),
    ] = None,
) -> None:
    """Run a job, or resume one that stopped."""
    display = own_shard = None
    if log_format is LogFormat.JSON:
        from batchinfer.console.json_log import JsonDisplay

        display = JsonDisplay(log_as_json(keep_stdout=as_json), quiet=quiet)
    if shard is not None:
        from batchinfer.job.claims.shard import parse_shard

        own_shard = parse_shard(shard, os.environ)
    scale = {"workers": workers, "cluster": cluster}
    options = {
        f"--{key} {quote(value)}": f"scale.{key}={value}"
        for key, value in scale.items()
        if value is not None
    }
    spec = _read_job(
        *(job, overrides, variables),
        output=output,
        limit=limit,
        options=options,
        reuse=reuse or (),
    )
    if quiet:
        logging.getLogger("batchinfer").setLevel(logging.ERROR)
    with crash_directory(Path(spec.output.path) / "_batchinfer"):
        from batchinfer.job.claims.shared_claim import Role
        from batchinfer.job.run.run_job import run_job
        from batchinfer.report.write import report_at_end

        code = run_job(
            spec,
            overwrite=overwrite,
            retry_errors=retry_errors,
            update=update,
            role=Role(shard=own_shard, is_worker=worker)
            if worker or own_shard is not None
            else None,
            quiet=quiet,
            as_json=as_json,
            report=None if no_report else report_at_end,
            fleet=None if worker else _fleet_of(spec),
            metrics=metrics,
            display=display,
        )
    raise typer.Exit(int(code))


def _fleet_of(spec: JobSpec) -> RunFleet | None:
    """Return the function that runs several workers; None if one process runs the job."""
    if spec.scale.workers == 1:
        return None
    from batchinfer.job.fleet.run_fleet import is_fleet, run_fleet

    return run_fleet if is_fleet(spec) else None


@app.command("run-batch", short_help="Run or resume an OpenAI batch file.")
@_takes(BatchOptions)
def run_batch(options: BatchOptions) -> None:
    """Answer an OpenAI batch file, or resume one that stopped."""
    if options.quiet:
        logging.getLogger("batchinfer").setLevel(logging.ERROR)
    from batchinfer.job.run.run_batch import run_batch, state_directory

    with crash_directory(Path(state_directory(options)) / "_batchinfer"):
        code = run_batch(options)
    raise typer.Exit(int(code))


@app.command(short_help="Check a job file without data or weights.")
def validate(job: JobFile, overrides: Overrides = None, variables: Variables = None) -> None:
    """Check a job file and its templates, without data or weights."""
    _read_job(job, overrides, variables)
    print_stdout(f"{job}: OK")


@app.command(short_help="Estimate time, memory and cost of a job.")
def plan(
    job: JobFile,
    overrides: Overrides = None,
    variables: Variables = None,
    output: Output = None,
    limit: Limit = None,
    reuse: Reuse = None,
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            metavar="NAME",
            help="h200, h100, a100-80g, l40s or cpu (default: this machine).",
        ),
    ] = None,
    expect_output_tokens: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Tokens per answer (default: max_tokens)."),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Estimate the time on N devices."),
    ] = None,
    price_per_hour: PricePerHour = None,
    currency: Currency = "USD",
    as_json: AsJson = False,
) -> None:
    """Estimate time, memory and cost from data, tokenizer and model config; needs no GPU."""
    spec = _read_job(job, overrides, variables, output=output, limit=limit, reuse=reuse or ())
    from batchinfer.console.table import render_table
    from batchinfer.job.plan.plan import plan_job
    from batchinfer.job.plan.plan_summary import plan_facts

    planned = plan_job(
        spec,
        device=device,
        expect_output_tokens=expect_output_tokens,
        workers=workers,
        price_per_hour=price_per_hour,
    )
    print_stdout(
        to_json(planned) if as_json else render_table("plan", plan_facts(planned, currency))
    )


@app.command(short_help="Show the progress of a job.")
def status(
    out: Folder,
    as_json: AsJson = False,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh until the job ends.")] = False,
    every: Annotated[
        float | None,
        typer.Option(
            "--every", min=0.1, metavar="S", help="Refresh interval of --watch (default: 2)."
        ),
    ] = None,
) -> None:
    """Show the progress of a running or stopped job, read from its files."""
    import time

    from batchinfer.console.format import printable
    from batchinfer.console.table import render_table
    from batchinfer.job.output.open import output_at
    from batchinfer.job.stats.status import follow_status, read_status

    if watch:
        if as_json:
            raise UsageError("--watch refreshes the screen and cannot be combined with --json")
        follow_status(output_at(out), 2.0 if every is None else every)
        return
    if every is not None:
        raise UsageError("--every needs --watch: without --watch, the status is shown once")
    progress = read_status(output_at(out), time.time())
    print_stdout(
        to_json(progress.data())
        if as_json
        else render_table(f"status of {printable(out)}", progress.facts())
    )


@app.command(short_help="Check every byte of an output.")
def verify(out: Folder, as_json: AsJson = False) -> None:
    """Check the files of an output: checksums, rows, columns, fingerprint."""
    from batchinfer.console.format import printable
    from batchinfer.console.table import render_table
    from batchinfer.job.output.open import output_at
    from batchinfer.job.output.verify import verify as check

    verification = check(output_at(out))
    print_stdout(
        to_json(verification.data())
        if as_json
        else render_table(f"{printable(out)}, verified", verification.facts(), verification.lines())
    )
    raise typer.Exit(int(ExitCode.DATA if verification.problems else ExitCode.OK))


@app.command(short_help="Write an HTML report of a running or finished job.")
def report(
    out: Folder,
    price_per_hour: Annotated[
        float | None,
        typer.Option(min=0, metavar="PRICE", help="Hourly price of the machine."),
    ] = None,
    currency: Currency = "USD",
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="FILE", help="File to write (default: OUT/report.html)."),
    ] = None,
) -> None:
    """Write an HTML report of a running or finished job: memory, speed, errors, cost."""
    import time

    from batchinfer.console.format import printable
    from batchinfer.job.output.open import output_at
    from batchinfer.report.report_data import Price
    from batchinfer.report.write import write_report

    price = None if price_per_hour is None else Price(price_per_hour, currency)
    path = write_report(output_at(out), time.time(), price=price, to=output)
    print_stdout(printable(str(path)))


@app.command(short_help="Print the JSON Schema of the job file.")
def schema() -> None:
    """Print the JSON Schema of the job file, for editors."""
    from batchinfer.job.spec.json_schema import json_schema

    print_stdout(to_json(json_schema()))


@app.command(short_help="Write a job file for a dataset.")
def init(
    data: Annotated[
        str, typer.Argument(metavar="PROMPTS.parquet", help="File, glob or directory of prompts.")
    ],
    model: Annotated[
        str | None, typer.Option("--model", metavar="MODEL", help="Hub id or local directory.")
    ] = None,
    output: Output = None,
    job: Annotated[Path, typer.Option("--job", metavar="FILE", help="The file to write.")] = Path(
        "job.yaml"
    ),
    prompt_column: Annotated[
        str | None, typer.Option(metavar="NAME", help="Prompt column (default: detected).")
    ] = None,
    id_column: Annotated[
        str | None, typer.Option(metavar="NAME", help="Id column (default: detected).")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    encoding: Annotated[
        str, typer.Option(metavar="NAME", help="Encoding of text files, by its Python name.")
    ] = "utf-8",
) -> None:
    """Write a commented job file that can run as is."""
    from batchinfer.job.init.job_file import InitOptions, write_job_file

    options = InitOptions(data, model, output, job, prompt_column, id_column, force, encoding)
    print_stdout("\n".join(write_job_file(options)))


@app.command(short_help="Measure throughput.")
@_takes(BenchOptions)
def bench(options: BenchOptions) -> None:
    """Measure throughput on synthetic or given prompts."""
    from batchinfer.cli.bench import run_bench

    run_bench(options, show=print_stdout)


def main() -> None:
    run_program(app)
