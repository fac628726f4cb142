"""Who makes which parts of a job: one run all of them, or each of several shards its own.

``shard`` says which parts, ``locks`` who may write beside whom, ``fresh_start`` which shards start
over together. ``claim`` puts them together for a run.

May import: errors, console, job.
"""
