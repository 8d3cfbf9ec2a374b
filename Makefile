# quickstart: set up, then train a small model over two ranks.   test, lint: what CI runs.
# WORKERS=2 spreads the tests over two processes.
#
# The python3 of the shell is used when it has torch >= 2.11 (a GPU machine); what it lacks beside torch is installed,
# and nothing is downloaded when it lacks nothing;
# otherwise .venv is made: with CPU wheels if there is no NVIDIA driver, with the default ones if there is.

PYTHON ?= python3
TESTS ?= tests
WORKERS ?= 0
PYTEST = $(PY) -m pytest $(if $(filter-out 0,$(WORKERS)),--numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder)
NEWEST_TRITON := 3.9.0

HAS_TORCH := $(shell $(PYTHON) -c 'from importlib.metadata import version as v; \
  print(tuple(map(int, v("torch").split(".")[:2])) >= (2, 11))' 2>/dev/null)
HAS_DRIVER := $(shell test -e /proc/driver/nvidia/version || command -v nvidia-smi >/dev/null 2>&1 && echo True)

ifeq ($(HAS_TORCH),True)
PY := $(PYTHON)
SETUP := use-active
else
PY := .venv/bin/python
SETUP := .venv/ready
endif

.PHONY: quickstart test test-newest-triton lint use-active

quickstart: $(SETUP)
	$(PY) -m dist_moe demo

test: $(SETUP)
	$(PYTEST) $(TESTS)

# Once more under the newest Triton that the interpreter's repairs know; it stands before the other on the path: what is
# compiled, for one target a case, what is repaired, and each kernel against its oracle and its example, without drawn
# cases and faults.
test-newest-triton: $(SETUP) .venv/triton-$(NEWEST_TRITON)/ready
	PYTHONPATH=.venv/triton-$(NEWEST_TRITON) TRITON_DEFAULT_FP_FUSION=1 ONE_TARGET=1 \
	  $(PYTEST) tests/kernels_triton tests/dist_moe/test_interpreter.py -k \
	  "compile or interpreter or launch or device or oracle or example or named_routings or traces"

lint: $(SETUP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check --quiet .

use-active:
	@$(PY) -c 'import dist_moe.benchmarks as b, dist_moe.kernels_triton as k, os, sys; \
	  sys.exit(not all(os.path.samefile(os.path.dirname(m.__file__), m.__name__.split(".")[-1]) for m in (b, k)))' \
	  2>/dev/null || \
	  $(PY) -m pip install --no-deps --no-build-isolation -e . || $(PY) -m pip install --no-deps -e .
	@missing=$$($(PY) -c 'from importlib.util import find_spec; \
	  names = ("typer", "rich", "matplotlib", "numpy", "ml_dtypes", "pytest", "pytest-timeout", "hypothesis"); \
	  print(*(name for name in names if find_spec(name.replace("-", "_")) is None))'); \
	  test -z "$$missing" || $(PY) -m pip install $$missing

.venv/ready: pyproject.toml setup.py constraints-cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  "dist_moe needs Python 3.11 or newer, found " + sys.version.split()[0] + "; try make PYTHON=python3.12")'
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
ifeq ($(HAS_DRIVER),True)
	.venv/bin/python -m pip install -e '.[demo,test,dev,cute,transformers]'
else
	.venv/bin/python -m pip install $$(grep '^torch==' constraints-cpu.txt)  # by itself: the pin names a CPU wheel
	.venv/bin/python -m pip install -c constraints-cpu.txt -e '.[demo,test,dev,cute,transformers]'
endif
	touch $@

.venv/triton-$(NEWEST_TRITON)/ready:
	$(PY) -m pip install --quiet --no-deps --upgrade --target $(@D) triton==$(NEWEST_TRITON)
	touch $@
