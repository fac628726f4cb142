"""A shard of a job in a process of its own.

``python -m tests.job.shards.program FOLDER I/N``, and keys of ``output`` as ``NAME=VALUE``.
"""

from __future__ import annotations

import sys
from pathlib import Path

from batchinfer.errors import JobError
from batchinfer.job.output import part_writer
from batchinfer.job.run.run import run_job
from batchinfer.job.shards.shard import parse_shard
from tests.job.fakes import FakeBuild, job

if __name__ == "__main__":
    part_writer.FLUSH_ROWS = 2
    folder, shard, options = Path(sys.argv[1]), parse_shard(sys.argv[2], {}), sys.argv[3:]
    output = dict(option.split("=") for option in options)
    spec = job(folder, output=output)
    try:
        code = run_job(spec, shard=shard, build=FakeBuild(max_num_seqs=4))
    except JobError as error:
        print(error, file=sys.stderr)
        code = error.exit_code
    sys.exit(int(code))
