.PHONY: setup demo test gpu

# Installs everything into .venv. If run as root, also installs Chromium with apt-get, for tests of the
# report.
setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt .ci/setup
	.ci/setup

demo: setup
	.venv/bin/batchinfer run jobs/quickstart.yaml
	.venv/bin/python jobs/quickstart/score.py out/quickstart

# Generates the job file's schema and reference, and the table of models, from the code.
.PHONY: reference
reference: setup
	.venv/bin/python docs/make_reference.py
	.venv/bin/python docs/make_models.py

# Builds the documentation site in out/site; `.venv/bin/mkdocs serve` shows it in a browser.
.PHONY: docs
docs: setup
	.venv/bin/mkdocs build --strict

PYTEST = .venv/bin/python -m pytest -n logical --maxprocesses 8 --dist worksteal

test: setup
	$(PYTEST) -m "not long"

# Runs the tests that `make test` skips: kills, clusters, emulated processors, all kernels compiled.
.PHONY: test-long
test-long: setup
	$(PYTEST) -m long

# Runs clients of vLLM (lm-eval, EvalPlus, distilabel) on batchinfer, and compares their results with
# transformers. On first use, creates an environment of 3 GB in out/clients.
.PHONY: clients
clients: setup
	.venv/bin/python -m tests.clients

# Builds a wheel, to install elsewhere with `pip install 'dist/batchinfer-...whl[s3]'`.
.PHONY: wheel
wheel: setup
	.venv/bin/python -m pip wheel --quiet --no-deps --wheel-dir dist .

# Shows within ten minutes on a machine with a GPU whether the code for GPUs works, and how fast it is.
# Installs nothing, because such a machine may have no network. Uses PYTHON, or else .venv if it exists,
# or else python3. OUT is the folder of results.
.PHONY: first-light
GPU_PYTHON = $(or $(PYTHON),$(wildcard .venv/bin/python),python3)
first-light:
	$(GPU_PYTHON) benchmarks/first_light.py $(if $(STAGES),--stages $(STAGES)) $(if $(OUT),--out $(OUT)) \
	  $(GPU_FLAGS)

# Runs the whole GPU benchmark, which takes half an hour. Uses PYTHON as above. OUT=FOLDER is the folder of
# results. If OUT is only an environment variable, a copy of the results goes there.
gpu:
	$(GPU_PYTHON) benchmarks/gpu.py \
	  $(if $(STAGES),--stages $(STAGES)) $(if $(MODELS),--models $(MODELS)) \
	  $(if $(WORKLOADS),--workloads $(WORKLOADS)) \
	  $(if $(filter command,$(firstword $(origin OUT))),--out $(OUT)) $(GPU_FLAGS)

# Compiles the kernels with the installed Triton and the oldest supported one, and updates the table
# benchmarks/compiled.csv. Takes two minutes if attention has changed.
.PHONY: compile-report
compile-report: setup .venv/triton-3.6
	.venv/bin/python benchmarks/compile_report.py --update --check
	PYTHONPATH=.venv/triton-3.6 .venv/bin/python benchmarks/compile_report.py --update --check

.venv/triton-3.6:
	.venv/bin/python -m pip install --quiet --no-deps --target $@ triton==3.6.0

# Runs 720 jobs with faults, and compares each row with an undisturbed run (docs/proof.md). Takes about
# an hour, and continues where it stopped. OPTIONS="--models qwen3" runs some of the jobs.
.PHONY: proof
proof: setup
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 .venv/bin/python -m tests.proof $(OPTIONS)

# Takes hours: kills and stops jobs, fuzzes files, checks crash states. OPTIONS="kills updates --kills 20"
.PHONY: faults
faults: setup
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 HF_HUB_OFFLINE=1 .venv/bin/python -m tests.faults $(OPTIONS)
