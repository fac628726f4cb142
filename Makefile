.PHONY: setup demo test gpu

# Everything goes into .venv; nothing else on the machine is touched, but that root gets Chromium by
# apt-get where there is none: tests of the report look at it.
setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt .ci/setup
	.ci/setup

demo: setup
	.venv/bin/batchinfer run jobs/quickstart.yaml
	.venv/bin/python jobs/quickstart/score.py out/quickstart

# What is generated from the code: the schema of the job file and its reference.
.PHONY: reference
reference: setup
	.venv/bin/python docs/make_reference.py
	.venv/bin/python docs/make_models.py

# The documentation as pages with a search, in out/site; `.venv/bin/mkdocs serve` shows them.
.PHONY: docs
docs: setup
	.venv/bin/mkdocs build --strict

PYTEST = .venv/bin/python -m pytest -n logical --maxprocesses 8 --dist worksteal

test: setup
	$(PYTEST) -m "not long"

# Kills, clusters, emulated processors, all kernels compiled: what `make test` leaves out.
.PHONY: test-long
test-long: setup
	$(PYTEST) -m long

# One file with all of the program, for `pip install 'dist/batchinfer-...whl[s3]'` elsewhere.
.PHONY: wheel
wheel: setup
	.venv/bin/python -m pip wheel --quiet --no-deps --wheel-dir dist .

# Nothing is installed: a machine with a GPU may have no network. PYTHON, else the project's own
# environment if there is one, else python3. OUT is the folder of results.
gpu:
	$(or $(PYTHON),$(wildcard .venv/bin/python),python3) benchmarks/gpu.py \
	  $(if $(STAGES),--stages $(STAGES)) $(if $(MODELS),--models $(MODELS)) \
	  $(if $(WORKLOADS),--workloads $(WORKLOADS)) $(if $(OUT),--out $(OUT)) $(GPU_FLAGS)

# What the kernels compile to, by the installed Triton and by the oldest that is supported: a table,
# kept in benchmarks/compiled.csv. Two minutes where attention has changed.
.PHONY: compile-report
compile-report: setup .venv/triton-3.6
	.venv/bin/python benchmarks/compile_report.py --update --check
	PYTHONPATH=.venv/triton-3.6 .venv/bin/python benchmarks/compile_report.py --update --check

.venv/triton-3.6:
	.venv/bin/python -m pip install --quiet --no-deps --target $@ triton==3.6.0

# Hours: jobs killed and stopped, files fuzzed, crash states. OPTIONS="kills updates --kills 20"
.PHONY: faults
faults: setup
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 HF_HUB_OFFLINE=1 .venv/bin/python -m tests.faults $(OPTIONS)
