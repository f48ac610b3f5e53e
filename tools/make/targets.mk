# Targets beside the build itself: test programs, checks, sanitizers, lint, install.

SEEDS   ?= 1000
CKPT    := $(abspath $(BUILD)/ckpt)
DESTDIR ?=
C_ALL   := $(sort $(wildcard lib/*.[ch] lib/families/*.[ch] formats/*.[ch] engine/*.[ch] \
             engine/*/*.[ch] tools/*.[ch] tests/*.[ch] tests/*/*.[ch]))

# ---- programs used by tests -------------------------------------------------------------------

GEN_OBJ   := $(patsubst %.c,$(BUILD)/%.o,$(sort $(wildcard tests/gen/*.c)))
GEN_LIB   := $(filter-out %/gen.o,$(GEN_OBJ))
PROP_OBJ  := $(patsubst %.c,$(BUILD)/%.o,$(sort $(wildcard tests/property/*.c)))
STCMP_OBJ := $(BUILD)/tests/tools/stcmp.o
# The fuzz targets: the parsers of the library, and those that belong to the program or the engine.
FUZZ_SRC  := $(sort $(wildcard tests/fuzz/*.c))
FUZZ_OBJ  := $(patsubst tests/fuzz/%.c,$(BUILD)/tests/fuzz/%.replay.o,$(FUZZ_SRC))
FUZZ_LIB  := $(BUILD)/tools/usermap.o $(BUILD)/libckpt_engine.a $(BUILD)/libckpt.a
EXTRA_OBJ := $(BUILD)/tests/peers/verdicts.o $(GEN_OBJ) $(PROP_OBJ) $(STCMP_OBJ) $(FUZZ_OBJ) $(BUILD)/tests/bench/engine.o

# make gen             $(BUILD)/gen, which writes synthetic checkpoints (tests/gen/gen.c)
.PHONY: gen
gen: $(BUILD)/gen
$(BUILD)/gen: $(GEN_OBJ)
	$(call say,LD,$@)
	$(Q)$(CC) $(LDFLAGS) -o $@ $(GEN_OBJ) -lm

# make stcmp           $(BUILD)/stcmp, an independent comparison of safetensors files
.PHONY: stcmp
stcmp: $(BUILD)/stcmp
$(BUILD)/stcmp: $(STCMP_OBJ)
	$(call say,LD,$@)
	$(Q)$(CC) $(LDFLAGS) -o $@ $(STCMP_OBJ)

# make engbench        $(BUILD)/engbench, which times the engine (tests/bench/engine.sh)
.PHONY: engbench
engbench: $(BUILD)/engbench
$(BUILD)/engbench: $(BUILD)/tests/bench/engine.o $(BUILD)/libckpt_engine.a $(BUILD)/libckpt.a
	$(call say,LD,$@)
	$(Q)$(CC) $(LDFLAGS) -o $@ $^ $(LDLIBS)

$(BUILD)/property: $(PROP_OBJ) $(GEN_LIB) $(BUILD)/libckpt.a
	$(call say,LD,$@)
	$(Q)$(CC) $(LDFLAGS) -o $@ $(PROP_OBJ) $(GEN_LIB) $(BUILD)/libckpt.a $(LDLIBS)

# Always without a sanitizer: the shim replaces malloc.
$(BUILD)/faultshim.so: tests/fault/shim.c $(BUILD)/flags
	$(call say,LD,$@)
	$(Q)$(CC) -std=gnu17 -O2 -g -fPIC -shared -fvisibility=hidden -Wall -Wextra -o $@ $< -ldl
$(BUILD)/sweep: tests/fault/sweep.c $(BUILD)/flags
	$(call say,LD,$@)
	$(Q)$(CC) -std=gnu17 -O2 -g -Wall -Wextra -o $@ $<

$(BUILD)/tests/fuzz/%.replay.o: tests/fuzz/%.c $(BUILD)/flags
	$(call say,CC,$<)
	$(Q)mkdir -p $(@D)
	$(Q)$(CC) $(STD) $(CPPFLAGS) $(CFLAGS) $(SANFLAGS) $(WARN) -Wno-conversion -Iengine/train -Itools -DREPLAY \
	    -MMD -MP -c -o $@ $<
$(BUILD)/fuzz-replay: $(FUZZ_OBJ) $(FUZZ_LIB)
	$(call say,LD,$@)
	$(Q)$(CC) $(LDFLAGS) -o $@ $^ $(LDLIBS)
$(BUILD)/fuzzer: $(FUZZ_SRC) tests/fuzz/mutate.h $(FUZZ_LIB)
	$(call say,LD,$@)
	$(Q)$(CC) $(STD) $(CPPFLAGS) $(CFLAGS) -Iengine/train -Itools -fsanitize=fuzzer,address $(LDFLAGS) -o $@ \
	    $(FUZZ_SRC) $(FUZZ_LIB) $(LDLIBS)

$(BUILD)/verdicts: $(BUILD)/tests/peers/verdicts.o $(BUILD)/libckpt.a
	$(call say,LD,$@)
	$(Q)$(CC) $(LDFLAGS) -o $@ $^ $(LDLIBS)

# make all-tests       compile every test program without running one
.PHONY: all-tests
all-tests: $(BUILD)/fuzz-replay $(BUILD)/ckpt $(BUILD)/unit $(BUILD)/property $(BUILD)/gen $(BUILD)/stcmp $(BUILD)/engbench

# ---- checks -----------------------------------------------------------------------------------

.PHONY: check check-cli check-property check-fault check-fuzz fuzz check-peers demo bench
# make check           every test that needs no Python peer; installs missing packages first
check: check-unit check-cli check-property check-fault check-fuzz

# make check-cli       command-line tests (tests/cli)
check-cli: $(BUILD)/ckpt $(BUILD)/gen $(BUILD)/stcmp cuda-emulated load_emulated $(BUILD)/fake_nccl.so
	$(Q)CKPT=$(CKPT) GEN=$(abspath $(BUILD)/gen) STCMP=$(abspath $(BUILD)/stcmp) tests/cli/run.sh

# make check-property  random models: mesh A -> mesh B -> A over all containers (SEEDS=n)
check-property: $(BUILD)/property
	$(Q)$(BUILD)/property --seeds $(SEEDS) --threads $(JOBS)

# make check-netns     conversion by ranks in network namespaces of their own (root)
.PHONY: check-netns
check-netns: $(BUILD)/ckpt $(BUILD)/gen $(BUILD)/libckpt_mpi.so
	$(Q)CKPT=$(BUILD)/ckpt GEN=$(BUILD)/gen tests/cli/run.sh convert_netns

# make check-fault     failing calls, SIGKILL, power loss, no memory (STRIDE=1: at every call)
check-fault: $(BUILD)/ckpt $(BUILD)/faultshim.so $(BUILD)/sweep
	$(Q)CKPT=$(CKPT) SWEEP=$(BUILD)/sweep SHIM=$(BUILD)/faultshim.so tests/fault/run.sh

CHANGES ?= 5000
# make check-fuzz      the corpus of the fuzz targets and CHANGES=n random changes of each file
check-fuzz: $(BUILD)/fuzz-replay
	$(Q)$(BUILD)/fuzz-replay tests/fuzz/corpus $(CHANGES)

# make fuzz            libFuzzer with clang: TARGET=name SECONDS=n (tests/fuzz/fuzz.c lists targets)
fuzz: $(BUILD)/ckpt
	$(Q)CKPT=$(CKPT) tests/fuzz/run.sh "$(TARGET)" "$(SECONDS)" $(BUILD)/fuzz

# make check-valgrind  commands under memcheck; make analyse: cppcheck and clang's analyzer
.PHONY: check-valgrind analyse soak
check-valgrind: $(BUILD)/ckpt
	$(Q)CKPT=$(CKPT) tests/valgrind.sh
analyse:
	$(Q)tools/analyse.sh

# make casts           every vector cast kernel on all 2^32 inputs (minutes; not part of check)
.PHONY: casts
casts: $(BUILD)/casts
	$(Q)$(BUILD)/casts $(JOBS)
# The kernels that it includes are built as the library's are.
$(BUILD)/casts: $(BUILD)/tests/exhaustive/casts.o $(BUILD)/lib/err.o
	$(call say,LD,$@)
	$(Q)$(CC) $(LDFLAGS) -o $@ $^ -lm -pthread

# make soak            conversions in a loop with faults on: SECONDS=n (default 1200)
soak: $(BUILD)/ckpt $(BUILD)/faultshim.so
	$(Q)CKPT=$(CKPT) SHIM=$(BUILD)/faultshim.so tests/soak.sh $(SECONDS)

# make check-peers     what we write, loaded by PyTorch, Megatron-Core, transformers, safetensors
check-peers: $(BUILD)/ckpt $(BUILD)/verdicts
	$(Q)CKPT=$(CKPT) tests/peers/run.sh

# make check-adding    a container, a layout, a command and an operation added to a copy of the tree
.PHONY: check-adding
check-adding: all
	$(Q)CC="$(CC)" BUILD=$(BUILD) MAKE="$(MAKE)" tests/adding/run.sh

# make demo            the main job on the fixtures, printing what it proves
demo:
	$(Q)$(MAKE) --no-print-directory -j$(JOBS) $(BUILD)/ckpt $(BUILD)/stcmp
	$(Q)CKPT=$(CKPT) STCMP=$(abspath $(BUILD)/stcmp) tests/demo.sh

# make bench           the figures beside their aims and baselines, those in Python by PYTHON= or what
#                      make check-peers has set up (SIZE=2GiB); appends to $(BUILD)/bench.jsonl
# make bench-model     conversions between layouts and a million tensors, tests/bench/bench.sh (SIZE=2G)
.PHONY: bench-model
PEERS_PYTHON := $(firstword $(wildcard $(HOME)/.cache/ckpt/peers/bin/python) python3)
bench: $(BUILD)/ckpt $(BUILD)/gen
	$(Q)PYTHON="$${PYTHON:-$(PEERS_PYTHON)}" GEN=$(abspath $(BUILD)/gen) $(BUILD)/ckpt bench --cases tests/bench/cases.json \
	    --history $(BUILD)/bench.jsonl $(if $(SIZE),--size $(SIZE))
bench-model: $(BUILD)/ckpt $(BUILD)/gen
	$(Q)CKPT=$(CKPT) GEN=$(abspath $(BUILD)/gen) tests/bench/bench.sh $(if $(SIZE),--size $(SIZE))

# ---- sanitizers: same sources, own object directory -------------------------------------------

.PHONY: asan ubsan tsan
# make asan            unit and command-line tests under AddressSanitizer
asan:
	$(Q)$(MAKE) --no-print-directory SAN=address BUILD=$(BUILD)/asan check-unit check-cli check-fuzz

# make ubsan           the same under UndefinedBehaviorSanitizer
ubsan:
	$(Q)$(MAKE) --no-print-directory SAN=undefined BUILD=$(BUILD)/ubsan check-unit check-cli check-fuzz

# make tsan            the same under ThreadSanitizer
tsan:
	$(Q)$(MAKE) --no-print-directory SAN=thread BUILD=$(BUILD)/tsan check-unit check-cli

# ---- style ------------------------------------------------------------------------------------

.PHONY: lint format
# make lint            include directions, banned calls, white space, clang-format, shellcheck
lint:
	$(Q)tools/lint.sh

# make format          clang-format every C file in place
format:
	$(Q)clang-format -i $(C_ALL)
