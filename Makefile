.PHONY: setup demo test

# Everything goes into .venv; nothing else on the machine is touched.
setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt .ci/setup
	.ci/setup

demo: setup
	.venv/bin/batchinfer run jobs/quickstart.yaml
	.venv/bin/python jobs/quickstart/score.py out/quickstart

test: setup
	.venv/bin/python -m pytest
