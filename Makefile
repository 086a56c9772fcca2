PYTHON ?= python3
BIN := .venv/bin
MINUTES ?= 60

.PHONY: help setup demo test gpu-check fuzz lint golden docs gallery report-shots clean

help:     ## what there is to do
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

setup: .setup-done    ## a virtual environment in .venv, with everything that tests need

.setup-done: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "mixmesh needs Python 3.11 or later, and $(PYTHON) is older: make setup PYTHON=python3.12"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	# without what they need: there may be no torchvision for this build of PyTorch (benchmarks/vision.py)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target .venv/vision torchvision==0.28.0 timm==1.0.31
	# apart, since transformers imports pandas and pyarrow wherever it finds them (tests/trl_folder.py)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target .venv/trl/site-packages \
	  trl==1.16.0 datasets==5.2.0 dill==0.4.1 multiprocess==0.70.19 pandas==3.1.1 pyarrow==26.0.1 python-dateutil==4.0.0
	touch $@

demo: setup    ## plan and train a small GPT on an emulated mixed cluster, beside DDP
	$(BIN)/python -m benchmarks.demo

test: setup    ## all tests
	$(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder

gpu-check: setup    ## what needs a GPU, in eight minutes at most; figures go to out/gpu/check.json
	MIXMESH_TEST_GPU=1 $(BIN)/python -m pytest tests/gpu/test_on_gpu.py -v -s -rs

fuzz: setup    ## random models, programs and files for MINUTES=60; failures go to out/fuzz/
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz --minutes $(MINUTES)

lint: setup    ## ruff: rules and format; mypy: no error in the package
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

golden: setup    ## rewrite the golden files from what the code does now
	$(BIN)/python -m pytest tests/test_golden.py tests/step tests/rules/test_strategies_golden.py tests/docs --update-golden

docs: setup    ## the documentation as a site, into out/site; asks no other host for anything
	$(BIN)/python -m tools.site

gallery: setup    ## the plans of the gallery with their reports, into out/gallery, and the site with them
	$(BIN)/python -m tools.site.gallery
	$(BIN)/python -m tools.site

report-shots: setup    ## pictures of pages in Chromium, at both widths and in both schemes, into out/report
	$(BIN)/python -m tools.browser
	REPORT_SHOTS=out/report $(BIN)/python -m pytest tests/report/test_in_browser.py tests/docs/test_site.py -k browser

clean:    ## remove what can be made again, but for .venv
	rm -rf out build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
