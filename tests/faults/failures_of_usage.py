"""Failures with exit code 2: mistakes in the command line and in the job file."""

from __future__ import annotations

from functools import partial

from tests.faults.failures import JOB, Failure, Place


def _validate(text: str, options: tuple[str, ...], place: Place) -> list[str]:
    return ["validate", place.job(text), *options]


def _with(extra: str, *options: str) -> Failure:
    return partial(_validate, JOB + extra, options)


def _instead(old: str, new: str, *options: str) -> Failure:
    assert old in JOB
    return partial(_validate, JOB.replace(old, new), options)


def _command(*arguments: str) -> Failure:
    def failure(place: Place) -> list[str]:
        place.job()
        return list(arguments)

    return failure


def _run(old: str, new: str, *options: str) -> Failure:
    def failure(place: Place) -> list[str]:
        place.job(JOB.replace(old, new))
        place.data(prompt=["a", "b"], text=["x", "y"], status=[1, 2])
        return ["run", "job.yaml", *options]

    return failure


def _binary(place: Place) -> list[str]:
    (place.folder / "job.yaml").write_bytes(b"name: \xff\xfe\x00")
    return ["validate", "job.yaml"]


def _large(place: Place) -> list[str]:
    return ["validate", place.job(JOB + "#" * 300_000)]


def _chat_template(place: Place) -> list[str]:
    (place.folder / "chat.jinja").write_text("{% for m in messages %}")
    return ["validate", place.job(JOB.replace("none", "chat.jinja"))]


def _resume_overwrite(place: Place) -> list[str]:
    place.data()
    return ["run", place.job(), "--retry-errors", "--overwrite"]


def _input_in_output(place: Place) -> list[str]:
    place.data("out/data/part-00000.parquet")
    (place.folder / "in").symlink_to("out/data")
    return ["run", place.job(JOB.replace("in.parquet", "in/*.parquet"))]


USAGE: dict[str, Failure] = {
    "--shard": _command("run", "job.yaml", "--shard", "2/2"),
    "--set without a value": _command("validate", "job.yaml", "--set", "sampling.top_p"),
    "--set without a key": _command("validate", "job.yaml", "--set", "=3"),
    "--set with an empty value": _command("validate", "job.yaml", "--set", "model.dtype="),
    "--set of a key in a text": _command("validate", "job.yaml", "--set", "input.path.x=1"),
    "--set of an unknown key": _command("validate", "job.yaml", "--set", "sampling.topp=1"),
    "--set of half a list": _command("validate", "job.yaml", "--set", "sampling.stop=[a"),
    "--var without a value": _command("validate", "job.yaml", "--var", "ds"),
    "--var that is not declared": _command("validate", "job.yaml", "--var", "ds=1"),
    "--output that is empty": _command("run", "job.yaml", "--output", ""),
    "--retry-errors with --overwrite": _resume_overwrite,
    "plan for an unknown device": _command("plan", "job.yaml", "--device", "h300"),
    "no such job file": _command("validate", "jbo.yaml"),
    "a job file that is a folder": _command("validate", "."),
    "a job file that is binary": _binary,
    "a job file of 300 KB": _large,
    "a job file that is a list": partial(_validate, "- a\n- b\n", ()),
    "an empty job file": partial(_validate, "", ()),
    "a job file with a tab": _with("errors:\n\tmax_error_rate: 1\n"),
    "a YAML tag": _with("stats: !!python/object:os.system {}\n"),
    "a key twice": _with("version: 1\nversion: 1\n"),
    "an alias of nothing": _with("name: *there\n"),
    "an unknown section": _with("smapling: {}\n"),
    "an unknown key": _instead("max_tokens: 8", "max_tokens: 8, topp: 0.9"),
    "a key of another section": _instead("max_tokens: 8", "max_tokens: 8, num_kv_blocks: 9"),
    "a text for a number": _instead("8", "eight"),
    "a number out of range": _instead("8", "8, top_p: 1.5"),
    "several mistakes": _instead("8", "-8, n: 0, top_p: x, temperature: -1"),
    "no model": _instead("model: {name: NAME}\n", ""),
    "no max_tokens": _instead("max_tokens: 8", ""),
    "no seed": _instead("8", "8, seed: null"),
    "an alias and its name": _instead("8", "8, max_new_tokens: 9"),
    "a version of the future": _with("version: 2\n"),
    "two keys that exclude each other": _instead("8", "8, beam_width: 4, top_k: 5"),
    "an unknown preset": _with("engine: {preset: h300}\n"),
    "a size that is none": _with("engine: {kv_cache_memory: lots}\n"),
    "a variable that is not given": _with("vars: {ds: null}\n"),
    "a variable that is not declared": _instead("path: out", "path: 'out/{{ ds }}'"),
    "a template that does not compile": _instead("column: prompt", "template: '{{ a'"),
    "two sources of the prompt": _instead("column: prompt", "column: a, template: b"),
    "a chat template that is not there": _instead("none", "chat.jinja"),
    "a chat template that does not compile": _chat_template,
    "output in a place not built": _instead("path: out", "path: 'hf://a/b'"),
    "output in the root": _instead("path: out", "path: /"),
    "output that holds the input": _instead("path: out", "path: ."),
    "input and output are one": _input_in_output,
    "a column renamed to an output column": _instead("path: out", "path: out, rename: {a: status}"),
    "a template with an unknown column": _run("column: prompt", "template: '{{ txet }}'"),
    "a column with the name of an output column": _run("", ""),
    "a rename of a column that is not kept": _run(
        "path: out", "path: out, rename: {nope: n, status: s}"
    ),
    "logprobs that are not written": _instead("8", "8, logprobs: 1"),
}
