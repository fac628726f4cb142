"""A Hypothesis state machine: jobs on a file system that loses unsynced data at power failures.

It runs a job, simulates a power failure after any change to the file system, and resumes the job.
It also retries rows with errors and updates finished jobs. Each run must keep all rows that were
promised to be on disk, and the finished output must be right.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.faults.lossy_files import LossyFiles
from tests.faults.protocol import FAILING, Job
from tests.faults.violation import ViolationError

_STEPS = 8
_MOST_CHANGES = 90
"""A run makes at most about this many changes to the file system."""
SEEDS = st.integers(0, 2**32)


class PowerFailure(BaseException):
    """Ends a run as a power failure does."""


class CommitProtocol(RuleBasedStateMachine):
    """Runs of one job; see the module's docstring."""

    files_type: type[LossyFiles] = LossyFiles
    of_updates = False
    """Whether to begin with an update of a finished job."""
    num_crashes = 0

    @initialize(fails=st.booleans())
    def begin(self, fails: bool) -> None:
        self.files = self.files_type()
        self.failing = FAILING if fails else frozenset[int]()
        self.kept: set[int] = set()
        self.run: Callable[[Job], None] = Job.run
        self.is_finished = False
        if self.of_updates:
            self.failing = frozenset()
            self._run(Random(0), crash_at=0)
            self.update()

    @rule(crash_at=st.integers(1, _MOST_CHANGES), seed=SEEDS)
    def run_with_power_failure(self, crash_at: int, seed: int) -> None:
        self._run(Random(seed), crash_at)

    @rule(seed=SEEDS)
    def run_to_the_end(self, seed: int) -> None:
        self._run(Random(seed), crash_at=0)

    @precondition(lambda self: self.is_finished and self.run == Job.run and self.failing)
    @rule()
    def retry_errors(self) -> None:
        self.failing, self.kept = frozenset(), self.kept - FAILING
        self.run, self.is_finished = lambda job: job.run(retry=True), False

    @precondition(lambda self: self.is_finished and self.run != Job.update and not self.failing)
    @rule()
    def update(self) -> None:
        self.kept = set()
        self.run, self.is_finished = Job.update, False

    def teardown(self) -> None:
        if not self.is_finished and hasattr(self, "files"):
            self._run(Random(0), crash_at=0)

    def _run(self, random: Random, crash_at: int) -> None:
        """Run the job, until the power fails at the ``crash_at``-th change (0: never)."""
        job = Job(self.files, random, self.failing, set(self.kept))
        num_changes = 0

        def count_change() -> None:
            nonlocal num_changes
            num_changes += 1
            if num_changes == crash_at:
                raise PowerFailure

        self.files.after_change = count_change
        try:
            self.run(job)
            self.is_finished = True
        except PowerFailure:
            type(self).num_crashes += 1
            self.files, self.is_finished = self.files.after_power_loss(random), False
        except Exception as error:
            raise ViolationError(f"no run can resume from this state: {error}") from error
        self.files.after_change = lambda: None
        if again := self.kept & set(job.computed):
            raise ViolationError(f"rows {sorted(again)} were on disk and ran again")
        self.kept = job.kept
        try:
            if self.is_finished:
                job.check_finished()
            elif self.run == Job.update:
                Job(self.files, random, self.failing).check_one_generation()
        except Exception as error:
            raise ViolationError(f"the output is wrong: {error}") from error


def check_crash_states(
    num_examples: int,
    number: int,
    files_type: type[LossyFiles] = LossyFiles,
    *,
    of_updates: bool = False,
) -> int:
    """Run random sequences of runs and power failures; return the number of power failures.

    Args:
        number: the random seed.
        files_type: the file system.
        of_updates: update a finished job in every sequence.

    Raises:
        ViolationError: a run failed, or lost a row.
    """

    class Machine(CommitProtocol):
        pass

    Machine.files_type, Machine.of_updates = files_type, of_updates
    run_state_machine_as_test(
        seed(number)(Machine),
        settings=settings(
            max_examples=num_examples,
            stateful_step_count=_STEPS,
            phases=[Phase.generate],
            database=None,
            deadline=None,
            report_multiple_bugs=False,
            print_blob=False,
            suppress_health_check=list(HealthCheck),
        ),
    )
    return Machine.num_crashes
