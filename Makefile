# make demo and make test do all set-up themselves; nothing else is needed.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
LATEST ?= .venv-latest
VLLM   ?= .venv-vllm
FLOWER ?= .venv-flower
NETWORK ?= configs/network.yaml
# images of containers often forbid bytecode: each start would compile what it imports
OFFLINE := HF_HUB_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1 PYTHONDONTWRITEBYTECODE=

.DEFAULT_GOAL := help
.PHONY: help install dev demo network-demo test test-slow test-latest test-vllm test-flower lint types contract check bench gpu figures pictures docs release clean

help: ## List the targets.
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

install: $(VENV)/.installed ## Make the virtual environment and install what a run needs, under constraints.txt.

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e .
	touch $@

dev: $(VENV)/.dev ## Install what the tests and checks need, too.

$(VENV)/.dev: $(VENV)/.installed
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

demo: install ## Align the miniature world to two objectives and write runs/<name>/report.html.
	$(OFFLINE) $(BIN)/firm demo

network-demo: dev ## Align the miniature world across three sites and a server, over mutual TLS on this machine.
	$(OFFLINE) $(BIN)/firm network demo --config $(NETWORK) --out runs/network-demo-$$(date +%Y%m%d-%H%M%S)

test: dev ## Run the first tier of the tests: every promise by its cheapest test, without network.
	$(OFFLINE) $(BIN)/python -m pytest -q -n 2 --dist loadfile

test-slow: dev ## Run the second tier: kills, processes, networks, all parameters; TESTS names folders.
	$(OFFLINE) $(BIN)/python -m pytest -q -n 3 --dist loadfile -m slow $(TESTS) || [ $$? -eq 5 ] # 5: no tests there
	@[ -n "$(TESTS)" ] || $(BIN)/python -m tests.parts --passed

test-latest: ## Run the test suite on the newest releases, installed beside: gigabytes with CUDA's torch.
	$(PYTHON) -m venv $(LATEST)
	$(LATEST)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade --upgrade-strategy eager -e ".[dev]"
	$(LATEST)/bin/python -m pip list --disable-pip-version-check | grep -E "^(torch|transformers|trl|peft|accelerate|datasets|cvxpy|wandb|nvflare) "
	$(OFFLINE) $(LATEST)/bin/python -m pytest -q -n 2 --dist loadfile

# vLLM pins older releases than constraints.txt, and the wheel for CPUs asks for torch's own index
$(VLLM)/.installed: pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r constraints-vllm.txt -e .
	touch $@

test-vllm: $(VLLM)/.installed ## Test rollouts and exported fronts in vLLM on SmolLM2, in an environment of its own: 4 GB of memory.
	test -n "$(FIRM_MODEL)" || $(VLLM)/bin/firm fetch smollm2
	$(OFFLINE) $(VLLM)/bin/python -m pytest -q tests/alignment/rollout_engines tests/jobs/test_export_engines.py

# Flower caps what other extras and constraints.txt have in newer releases
$(FLOWER)/.installed: pyproject.toml constraints-flower.txt
	$(PYTHON) -m venv $(FLOWER)
	$(FLOWER)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(FLOWER)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-flower.txt -e ".[flower]" pytest hypothesis
	touch $@

test-flower: $(FLOWER)/.installed ## Test the Flower app, simulated and on two SuperNodes, in an environment of its own.
	$(OFFLINE) $(FLOWER)/bin/python -m pytest -q -m "" tests/recipes/test_flower.py

lint: dev ## Check style and formatting.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: dev ## Check types.
	$(BIN)/pyright

contract: dev ## Check that imports only go down the layers.
	$(BIN)/lint-imports

check: lint types contract test ## What to run before every commit.

bench: dev ## Time a local step by stage, beside TRL's own trainer.
	$(OFFLINE) $(BIN)/python benchmarks/local_step.py

gpu: dev ## Run all that needs an accelerator, within eleven minutes, and write docs/gpu.md.
	$(OFFLINE) $(BIN)/python benchmarks/gpu.py --shape tiny --budget 60 # what would fail does so here
	$(OFFLINE) $(BIN)/python benchmarks/gpu.py --out docs/gpu.md

figures: install ## Replay the paper's figures into docs/figures: hours, and it may be stopped and called again.
	$(OFFLINE) $(BIN)/firm study --config configs/figures.yaml --out runs/figures --num_workers 2 --resume auto
	$(OFFLINE) $(BIN)/python -m recipes.paper --study runs/figures --out docs/figures

pictures: dev ## Take the guide's pictures of pages, with Chromium.
	$(OFFLINE) $(BIN)/firm demo --out runs/pictures/demo --resume auto
	$(OFFLINE) $(BIN)/firm align --config miniature_front --out runs/pictures/front --resume auto
	rm -rf runs/pictures/theory # it is not resumed
	$(OFFLINE) $(BIN)/python -m recipes.theory --out runs/pictures/theory
	$(OFFLINE) $(BIN)/python -m tests.docs.pictures --demo runs/pictures/demo --explore runs/pictures/front --theory runs/pictures/theory

$(VENV)/.docs: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	touch $@

docs: $(VENV)/.docs ## Build guide, results and API documentation into build/docs.
	$(OFFLINE) TRL_EXPERIMENTAL_SILENCE=1 $(BIN)/python -m sphinx -W --keep-going -q -E docs build/docs
	@echo build/docs/index.html

release: ## Build the wheel and the sdist, check them, and run the demo from the wheel alone.
	rm -rf build/release
	$(PYTHON) -m venv build/release/tools
	build/release/tools/bin/python -m pip install --quiet --disable-pip-version-check "build>=1.2,<2" "twine>=7,<8"
	build/release/tools/bin/python -m build --outdir build/release/dist .
	build/release/tools/bin/python -m twine check --strict build/release/dist/*
	$(PYTHON) -m venv build/release/venv
	build/release/venv/bin/python -m pip install --disable-pip-version-check -c constraints.txt build/release/dist/*.whl
	cd build/release && $(OFFLINE) venv/bin/firm demo --out demo
	@echo "publish with: build/release/tools/bin/python -m twine upload build/release/dist/*"

clean: ## Remove the virtual environment and caches; runs/ stays.
	rm -rf $(VENV) $(LATEST) $(VLLM) $(FLOWER) .pytest_cache .ruff_cache .hypothesis *.egg-info
