# Needs make, g++ and a Python of 3.10 or newer; everything else, nvcc included, comes from
# Python packages into $(VENV). The first target that is run installs them, once; it does so
# again when pyproject.toml changes.
#
#   make lab PYTHON=python3.12         another Python than python3
#   make test VENV=/some/where/venv    another place for the environment
#   make test PYTESTFLAGS='-k tree'    options for pytest
#   make run NOTEBOOKS=notebooks/02*   some notebooks only
#   make lab LABFLAGS='--no-browser --port 9000'

PYTHON ?= python3
VENV ?= .venv
PYTESTFLAGS ?=
NOTEBOOKS ?=
LABFLAGS ?=

PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev
SGLANG_STAMP := $(VENV)/.installed-sglang
BROWSER_STAMP := $(VENV)/.installed-browser
# JupyterLab refuses to start as root without this, and root is who one is on rented machines.
ROOTFLAG := $(if $(filter 0,$(shell id -u)),--allow-root)
# An environment whose Python has gone (an upgrade removed it, the folder was moved) is made
# again although its stamp is there. A Python named on the command line is compared with the
# environment's, so that it is not silently passed over.
REDO := $(if $(wildcard $(STAMP)),$(shell "$(PY)" -c '' 2>/dev/null || echo FORCE))
ifeq ($(origin PYTHON),command line)
REDO += $(if $(wildcard $(STAMP)),$(shell \
  test "$$("$(PY)" -V 2>&1)" = "$$("$(PYTHON)" -V 2>&1)" || echo FORCE))
endif

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help lab test run figures browser lint sglang clean clean-all FORCE

help: ## list these targets
	@echo "Usage: make TARGET [PYTHON=python3.12] [VENV=.venv]"
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  \1|\2/p' $(firstword $(MAKEFILE_LIST)) \
	  | while IFS='|' read -r name what; do printf '%-12s %s\n' "$$name" "$$what"; done

lab: $(STAMP) ## install if needed, then open JupyterLab on the first notebook
	"$(PY)" -m jupyterlab $(ROOTFLAG) $(LABFLAGS) notebooks/00_start_here.ipynb

test: $(STAMP) ## install if needed, then run all tests
	"$(PY)" -m pytest $(PYTESTFLAGS)

run: $(STAMP) ## install if needed, then execute every notebook into build/workbook/*.html
	"$(PY)" scripts/run_workbook.py $(NOTEBOOKS)

figures: $(STAMP) ## draw the README's and the notebooks' pictures and tables anew from data/
	"$(PY)" scripts/refresh_readme.py
	"$(PY)" scripts/refresh_notebooks.py

browser: $(BROWSER_STAMP) ## run every notebook in a browser and move the labs' controls
	"$(PY)" -m pytest browser_tests $(PYTESTFLAGS)

lint: $(DEV_STAMP) ## check the style of the code with ruff
	"$(PY)" -m ruff check .

sglang: $(SGLANG_STAMP) ## add SGLang (11 GB), so that tests and notebooks ask the real engine

clean: ## remove what was built; the environment stays
	rm -rf build .pytest_cache .ruff_cache
	find mla_kernels tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +

clean-all: clean ## remove the environment too
	@if test -f "$(VENV)/pyvenv.cfg"; then echo 'rm -rf "$(VENV)"'; rm -rf "$(VENV)"; fi
	rm -rf mla_kernels.egg-info

# The stamp is removed before the install begins and made after it ends, so an install that
# was interrupted is taken up again. (The version check stands here and not in the script:
# an old Python could not even parse that.)
$(STAMP): pyproject.toml scripts/install.py $(REDO)
	@rm -f "$@" "$(DEV_STAMP)" "$(SGLANG_STAMP)" "$(BROWSER_STAMP)"
	@command -v "$(PYTHON)" >/dev/null || { \
	  echo "make: $(PYTHON) is not to be found. Name a Python of 3.10 or newer:" \
	       "make $(firstword $(MAKECMDGOALS)) PYTHON=python3.12" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; v = sys.version_info; v >= (3, 10) or sys.exit("make: " \
	  "$(PYTHON) is Python %d.%d, and this project needs 3.10 or newer. Name another: " \
	  "make $(firstword $(MAKECMDGOALS)) PYTHON=python3.12" % v[:2])'
	@"$(PYTHON)" scripts/install.py "$(VENV)" --extras test
	@touch "$@"

$(DEV_STAMP): $(STAMP)
	@"$(PYTHON)" scripts/install.py "$(VENV)" --extras test,dev
	@touch "$@"

$(SGLANG_STAMP): $(STAMP)
	@"$(PYTHON)" scripts/install.py "$(VENV)" --extras test,sglang
	@touch "$@"

# Where the system has no browser, Playwright is asked for one; where that fails too, the tests
# skip and say so.
$(BROWSER_STAMP): $(STAMP)
	@"$(PY)" scripts/install.py "$(VENV)" --extras test,browser
	@command -v chromium chromium-browser google-chrome >/dev/null || \
	  "$(PY)" -m playwright install chromium || \
	  echo "make: no browser could be installed; the tests in it are skipped" >&2
	@touch "$@"
