# Every target does its own set-up, and does it once: a stamp in the environment says what it holds, and goes stale
# with the files that decide it. PYTHON is any interpreter from 3.11 to 3.13.

PYTHON ?= python3
ARGS ?=
SLOW ?=
OUT ?=
INTO := $(if $(OUT),--out '$(OUT)')
JOBS ?= 2
SELECTED = -n $(JOBS) --dist worksteal $(if $(SLOW),$(if $(filter nightly,$(SLOW)),,-m 'not nightly'),-m 'not slow and not nightly') $(ARGS)
STAGE ?= 1
FROM ?=
VENV := .venv
COMPAT := .compat
NEWEST := .newest
DOCS := .docs
RELEASE := .release
# What the benchmarks and `make smoke` run with: BASE=.newest takes the versions that pip installs today.
BASE := $(VENV)
PEERS := $(if $(filter $(NEWEST),$(BASE)),$(NEWEST)-peers,.peers)
export PEERS
PEER_NAMES := torchrl cpprb flashbax rlox sb3 sbx holosoma lerobot
READY := $(PEER_NAMES:%=$(PEERS)/%/.ready)
DECIDES := pyproject.toml setup.py constraints.txt

# pip splits these on blanks, so a checkout under "my code/" needs the URL form. pip 25.3 and later read the second one
# for isolated builds, earlier ones the first; both are exported so that no step escapes the constraints.
empty :=
blank := $(empty) $(empty)
PIP_FILE := file://$(subst $(blank),%20,$(CURDIR))/constraints.txt
export PIP_CONSTRAINT := $(PIP_FILE)
export PIP_BUILD_CONSTRAINT := $(PIP_CONSTRAINT)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help train test compat newest smoke torchrl ray jax rsl_rl bench gpu report docs dist clean

help:
	@echo "make train   train SAC on Pendulum-v1; options: ARGS='--env NAME --prioritized --seed 1 ...'"
	@echo "make test    ruff, mypy and the tests; ARGS go to pytest; with SLOW=1 also the tests marked slow,"
	@echo "             with SLOW=nightly every test"
	@echo "make compat  the tests on the oldest torch, triton, tensordict and numba supported (downloads gigabytes);"
	@echo "             ARGS and SLOW as above"
	@echo "make newest  the same on the newest ones, those that pip installs today"
	@echo "make smoke   a minute's work with what is installed: buffers, training, mapped files; BASE=.compat or .newest"
	@echo "make torchrl run programs and losses on TorchRL and on gpubuf, and compare what they give"
	@echo "make ray     the tests of buffers in actors of Ray"
	@echo "make jax     the tests of arrays of JAX, in the environment of flashbax"
	@echo "make rsl_rl  the tests of the algorithms in rsl_rl's runner"
	@echo "make bench   all benchmarks beside TorchRL, cpprb, flashbax and rlox, each in its environment;"
	@echo "             writes benchmarks/results/<device>-<date>.json and its like, or into OUT=folder;"
	@echo "             BASE=.newest: with the versions that pip installs today, as the figures in README.md"
	@echo "make gpu STAGE=1|2|3|4  tests and benchmarks on an NVIDIA GPU, each stage within seven minutes; OUT=folder"
	@echo "             (make gpu PYTHON=python3 uses that interpreter's own packages: for a machine without an index)"
	@echo "make report  write the figures of benchmarks/results/ into README.md and the pages of docs/;"
	@echo "             FROM='folders' of make gpu are brought there first"
	@echo "make docs    build the documentation site into site/; warnings are errors"
	@echo "make dist    build sdist and wheels into dist/, on Linux on x86-64 also that with machine code, and check them"
	@echo "make clean   remove environments, caches and build products"

train: $(VENV)/.train
	$(VENV)/bin/python -m gpubuf train $(ARGS)

test: $(VENV)/.test
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/python -m mypy
	$(VENV)/bin/python -m pytest $(SELECTED)

compat: $(COMPAT)/.test
	$(COMPAT)/bin/python -m pytest $(SELECTED)

newest: $(NEWEST)/.test
	$(NEWEST)/bin/python -m pytest $(SELECTED)

smoke: $(BASE)/.test
	cd "$$(mktemp -d)" && '$(CURDIR)/$(BASE)/bin/python' '$(CURDIR)/tests/support/smoke.py' mapped

torchrl: $(PEERS)/torchrl/.ready
	$(PEERS)/torchrl/bin/python -m pytest -n 0 tests/contracts/test_torchrl.py tests/objectives/test_torchrl_losses.py \
	  tests/integrations/test_torchrl*.py tests/integrations/test_training_loops.py $(ARGS)

ray: $(PEERS)/ray/.ready
	$(PEERS)/ray/bin/python -m pytest -n 0 -W default tests/integrations/test_ray.py $(ARGS)

jax: $(PEERS)/flashbax/.ready
	$(PEERS)/flashbax/bin/python -m pytest -n 0 tests/integrations/test_jax.py $(ARGS)

rsl_rl: $(PEERS)/rsl_rl/.ready
	$(PEERS)/rsl_rl/bin/python -m pytest -n 0 tests/integrations/test_rsl_rl_runner.py $(ARGS)

bench: $(BASE)/.test $(READY)
	$(BASE)/bin/python -m benchmarks --device cpu --huge $(or $(INTO),--out benchmarks/results) $(ARGS)

# An interpreter named on the command line is used as it is, with whatever torch it has.
ifeq ($(origin PYTHON),command line)
GPU_PYTHON := $(PYTHON)
gpu:
else
GPU_PYTHON := $(VENV)/bin/python
gpu: $(VENV)/.test
endif

gpu:
	$(GPU_PYTHON) -m benchmarks.stages $(STAGE) $(INTO) $(ARGS)

report: $(VENV)/.test
	$(if $(FROM),$(VENV)/bin/python -m benchmarks.stages --gather $(FROM))
	$(VENV)/bin/python -m benchmarks.report

# Without the variable mkdocs-material prints a notice about a later MkDocs.
docs: $(DOCS)/.ready
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --quiet $(ARGS)
	@echo "open site/index.html"

# The kernels are compiled by Numba in the environment of the tests. auditwheel finds out the tag that is true: it looks
# for patchelf on the PATH. The recipe is for conda-forge, which builds from the sdist.
dist: $(VENV)/.test $(RELEASE)/.ready
	rm -rf dist build
	$(RELEASE)/bin/python -m build
ifeq ($(shell uname -sm),Linux x86_64)
	GPUBUF_MACHINE_CODE=1 $(VENV)/bin/python -m build --no-isolation --wheel --outdir build/wheel
	PATH="$(CURDIR)/$(RELEASE)/bin:$$PATH" $(RELEASE)/bin/python -m auditwheel repair --wheel-dir dist build/wheel/*.whl
endif
	$(RELEASE)/bin/python -m twine check --strict dist/*
	GPUBUF_DIST=dist $(VENV)/bin/python -m pytest -n 0 -m 'not network' tests/test_packaging.py $(ARGS)
	$(VENV)/bin/python release/recipe.py > build/recipe.yaml

clean:
	rm -rf $(VENV) $(COMPAT) $(NEWEST) $(NEWEST)-peers $(DOCS) $(RELEASE) $(PEERS) site build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

define create_venv
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
  { echo "gpubuf needs Python 3.11 or newer; name one with make PYTHON=..." >&2; exit 2; }
$(PYTHON) -m venv --clear $(@D)
@touch $@
endef

$(VENV)/.created $(COMPAT)/.created $(NEWEST)/.created $(DOCS)/.created $(RELEASE)/.created:
	$(create_venv)

# The two ends of the window of versions that is supported. Neither torch has a build for the CPU alone on PyPI: the CUDA
# packages take about 5 GB each. What constraints-<end>.txt names takes the place of the same names in constraints.txt.
$(COMPAT)/.test $(NEWEST)/.test: export PIP_CONSTRAINT = $(dir $(PIP_FILE))$(@D)/constraints.txt
$(COMPAT)/.test $(NEWEST)/.test: export PIP_BUILD_CONSTRAINT = $(PIP_CONSTRAINT)
$(COMPAT)/.test: constraints-compat.txt
$(NEWEST)/.test: constraints-newest.txt
$(COMPAT)/.test $(NEWEST)/.test: %/.test: %/.created $(DECIDES)
	grep -vE "^($$(sed -n 's/==.*//p' constraints-$(@D:.%=%).txt | paste -sd '|'))==" constraints.txt \
	  | cat - constraints-$(@D:.%=%).txt > $(@D)/constraints.txt
	$(@D)/bin/python -m pip install -q -e '.[train,test]'
	@touch $@

# One environment, two stamps: training needs no test tools. The tests train, so theirs holds both.
$(VENV)/.train: $(VENV)/.created $(DECIDES)
	$(VENV)/bin/python -m pip install -q -e '.[train]'
	@touch $@

$(VENV)/.test: $(VENV)/.created $(DECIDES)
	$(VENV)/bin/python -m pip install -q -e '.[train,test]'
	@touch $@ $(VENV)/.train

# The API reference is read from the sources, so this environment needs no torch.
$(DOCS)/.ready: $(DOCS)/.created docs/requirements.txt constraints.txt
	$(DOCS)/bin/python -m pip install -q -r docs/requirements.txt
	@touch $@

$(RELEASE)/.ready: $(RELEASE)/.created constraints.txt
	$(RELEASE)/bin/python -m pip install -q build twine auditwheel patchelf
	@touch $@

# A peer's environment holds what the peer needs beside ours, and sees the rest there, so that all are measured on one
# torch. TorchRL's wheel asks for an older tensordict, and works with ours: without its dependencies, then. A peer that
# can't be installed stops nobody: its benchmarks say that they are missing.
ifeq ($(BASE),$(NEWEST))
$(PEERS)/%/.ready: export PIP_CONSTRAINT = $(dir $(PIP_FILE))$(NEWEST)/constraints.txt
endif
$(PEERS)/%/.ready: benchmarks/peers/%.txt $(DECIDES) | $(BASE)/.test
	@rm -rf $(@D)
	@if $(BASE)/bin/python -m venv $(@D) && $(BASE)/bin/python benchmarks/peers/share.py $(@D) \
	  && $(@D)/bin/python -m pip install -q -r $< \
	  && { [ ! -e benchmarks/peers/$*-no-deps.txt ] || \
	       $(@D)/bin/python -m pip install -q --no-deps -r benchmarks/peers/$*-no-deps.txt; }; \
	then touch $@; else rm -rf $(@D); echo "$* can't be installed here: its benchmarks will be left out" >&2; fi
