# The two commands of the README: `make quickstart` and `make test`.
# Both create the environment in .venv when it is missing or out of date.

SHELL := bash
VENV := .venv
PYTHON := $(VENV)/bin/python
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM := false

.PHONY: quickstart test slow docs lint format venv clean

quickstart: venv  ## GVPO on a small model, from nothing to a better policy, in minutes
	OMP_NUM_THREADS=2 $(PYTHON) examples/quickstart/run.py

test: venv  ## the whole test suite, with real megatron-core under gloo
	$(PYTHON) -m pytest $(OPTIONS)

slow: venv  ## longer proofs on real servers, with their results under benchmarks/results/
	$(PYTHON) benchmarks/rollout_faults.py --engine sglang --schedules 20 --out benchmarks/results/rollout_faults_sglang.json
	$(PYTHON) benchmarks/rollout_faults.py --engine vllm --schedules 20 --out benchmarks/results/rollout_faults_vllm.json
	$(PYTHON) benchmarks/delta_steps.py --out benchmarks/results/delta_steps_cpu.json
	IMAGE_QUICKSTART=whole $(PYTHON) -m pytest tests/shipping/test_images.py

docs: venv  ## the documentation site, in site/; fails on any broken link
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet

lint: venv
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/hadolint docker/*.Dockerfile

format: venv
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

venv: $(VENV)/.complete

$(VENV)/.complete: pyproject.toml constraints.txt megatron_gvpo/versions.txt tools/make_venv.sh
	tools/make_venv.sh $(VENV)
	touch $@

clean:
	rm -rf $(VENV) runs
