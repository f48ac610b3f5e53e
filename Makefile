# ckpt: out-of-tree build into $(BUILD). `make help` lists the targets.
#
#   V=1           show commands            CUDA=0|1     (default: nvcc found?)
#   SAN=address|undefined|thread           WERROR=1     warnings are errors
#   BUILD=dir     object directory         ONLY="a b"   unit suites to build (test_a.c test_b.c)
#   SEEDS=n       property test models     JOBS=n       suites, threads at a time
#   DESTDIR= PREFIX= LIBDIR=               where `make install` puts things

# demo and check bring what they need: this must happen before pkg-config is asked below.
ifneq ($(filter demo check,$(MAKECMDGOALS)),)
ifneq ($(shell tools/deps.sh --missing),)
$(info $(shell tools/deps.sh 2>&1))
ifneq ($(.SHELLSTATUS),0)
$(error tools/deps.sh failed)
endif
endif
endif

VERSION := $(shell sed -n 's/^\#define CKPT_VERSION "\(.*\)"/\1/p' lib/ckpt.h)
CC      ?= cc
PREFIX  ?= /usr/local
SAN     ?=
WERROR  ?= 0
V       ?= 0
JOBS    ?= $(shell nproc 2>/dev/null || echo 2)
NVCC    ?= $(shell command -v nvcc 2>/dev/null)
CUDA    ?= $(if $(NVCC),1,0)
BUILD   ?= build$(if $(SAN),/$(SAN))

Q := $(if $(filter 1,$(V)),,@)
say = $(if $(filter 1,$(V)),,@echo "  $(1)	$(2)")

PKGS      := libcjson libcrypto zlib hdf5
# ISA-L is optional: without it zip checksums run three times slower.
ISAL      ?= $(shell pkg-config --exists libisal 2>/dev/null && echo 1 || echo 0)
ifeq ($(ISAL),1)
PKGS      += libisal
CPPFLAGS  += -DCKPT_ISAL
endif
PKG_CFLAGS := $(shell pkg-config --cflags $(PKGS) 2>/dev/null)
PKG_LIBS  := $(shell pkg-config --libs $(PKGS) 2>/dev/null)
CPPFLAGS  += -D_POSIX_C_SOURCE=200809L -D_DEFAULT_SOURCE -D_FILE_OFFSET_BITS=64 -Ilib -Iformats -Iengine \
             $(PKG_CFLAGS)
BLAS_CFLAGS := $(shell pkg-config --cflags openblas 2>/dev/null)
BLAS_LIBS := $(shell pkg-config --libs openblas 2>/dev/null || echo -lopenblas)
CFLAGS    ?= -O2 -g
WARN      := -Wall -Wextra -Wshadow -Wconversion -Wstrict-prototypes -Wmissing-prototypes -Wvla \
             -Wswitch-enum -Wpointer-arith -Wcast-qual -Wwrite-strings -Wformat=2 -Werror=format-security
STD       := -std=c17 -ffp-contract=off -fno-strict-aliasing -fvisibility=hidden -fPIC -pthread
# What the compiler and the linker offer against overruns: checked copies where there is optimisation
# to see their sizes (a sanitizer checks them itself), canaries, probed stack pages, a program at a
# random address, tables of the linker read-only before main. tests/cli/hardened.sh looks for them.
OPTIMISED := $(filter-out -O0,$(filter -O%,$(CFLAGS)))
X86       := $(findstring x86_64,$(shell $(CC) -dumpmachine))
HARDEN    := -fstack-protector-strong -fstack-clash-protection \
             $(if $(X86),-fcf-protection) \
             $(if $(SAN),,$(if $(OPTIMISED),-U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=3))
STD       += $(HARDEN)
LDFLAGS   += -pie -Wl,-z,relro,-z,now,-z,noexecstack
LDLIBS    += $(PKG_LIBS) -Wl,--as-needed $(BLAS_LIBS) $(OPENMP) -ldl -lm -pthread
ifeq ($(WERROR),1)
WARN += -Werror
endif
ifneq ($(SAN),)
SANFLAGS := -fsanitize=$(SAN) -fno-omit-frame-pointer -fno-sanitize-recover=all
CFLAGS   := -O1 -g
LDFLAGS  += -fsanitize=$(SAN)
endif

LIB_SRC   := $(sort $(wildcard lib/*.c lib/families/*.c))
FMT_SRC   := $(sort $(wildcard formats/*.c))
TOOL_SRC  := $(sort $(wildcard tools/*.c))
CORE_OBJ  := $(patsubst %.c,$(BUILD)/%.o,$(LIB_SRC) $(FMT_SRC))
TOOL_OBJ  := $(patsubst %.c,$(BUILD)/%.o,$(TOOL_SRC))
# Emulated kernels are compiled without a sanitizer (cuda.mk), so it would see nothing of theirs; and
# ThreadSanitizer has something to see only in suites of what runs on threads. The rest of threaded
# code, the commands, runs under it in tests/cli and the property test.
SUITE_SRC := $(wildcard tests/test_*.c)
ifneq ($(SAN),)
SUITE_SRC := $(filter-out %_cuda.c,$(SUITE_SRC))
endif
ifeq ($(SAN),thread)
SUITE_SRC := $(shell grep -liE 'thread|stream' $(SUITE_SRC))
endif
SUITES    := $(if $(ONLY),$(ONLY),$(sort $(patsubst tests/test_%.c,%,$(SUITE_SRC))))
TEST_OBJ  := $(patsubst %,$(BUILD)/tests/test_%.o,$(SUITES))

# Objects are rebuilt when the compiler or its flags change.
SETTINGS := CC=$(CC) CFLAGS=$(CFLAGS) SAN=$(SAN) WERROR=$(WERROR) CUDA=$(CUDA) NVCC=$(NVCC) \
            PKG_LIBS=$(PKG_LIBS) BUILD=$(BUILD) VERSION=$(VERSION)
ifeq ($(V)$(MAKELEVEL),10)
$(info $(SETTINGS))
endif

.PHONY: all clean help FORCE
.DEFAULT_GOAL := all
all: $(BUILD)/ckpt

$(BUILD)/flags: FORCE
	$(Q)mkdir -p $(@D)
	$(Q)echo '$(CC) $(STD) $(CPPFLAGS) $(CFLAGS) $(SANFLAGS) $(WARN)' | cmp -s - $@ || \
	    echo '$(CC) $(STD) $(CPPFLAGS) $(CFLAGS) $(SANFLAGS) $(WARN)' > $@

help:
	@sed -n 's/^# *\(make [a-z-]*  .*\)/\1/p' Makefile tools/make/*.mk
	@sed -n 's/^#  \( [A-Z]*=.*\)/\1/p' Makefile

# make all             build $(BUILD)/ckpt (the default)
$(BUILD)/ckpt: $(TOOL_OBJ) $(BUILD)/libckpt_engine.a $(BUILD)/libckpt.a
	$(call say,LD,$@)
	$(Q)$(CC) $(LDFLAGS) -o $@ $^ $(LDLIBS)

$(BUILD)/libckpt.a: $(CORE_OBJ)
	$(call say,AR,$@)
	$(Q)rm -f $@ && ar rcs $@ $^

# Hash kernels get their own instruction-set flags; they are chosen at run time.
$(BUILD)/lib/sha256_ni.o $(BUILD)/lib/sha256_avx512.o: ARCHFLAGS := -O3

# Loops over the elements of quantised tensors.
$(BUILD)/lib/qdq.o: ARCHFLAGS := -O3

$(BUILD)/lib/svd.o: ARCHFLAGS := $(BLAS_CFLAGS)

$(BUILD)/%.o: %.c $(BUILD)/flags
	$(call say,CC,$<)
	$(Q)mkdir -p $(@D)
	$(Q)$(CC) $(STD) $(CPPFLAGS) $(CFLAGS) $(SANFLAGS) $(WARN) $(ARCHFLAGS) -MMD -MP -c -o $@ $<

$(BUILD)/tests/%.o: tests/%.c $(BUILD)/flags
	$(call say,CC,$<)
	$(Q)mkdir -p $(@D)
	$(Q)$(CC) $(STD) $(CPPFLAGS) $(CFLAGS) $(SANFLAGS) $(WARN) -Wno-conversion -Wno-missing-prototypes -Iengine -Itests -Itests/gen \
	    -I$(BUILD) \
	    -DCKPT_FIXTURES='"$(FIXTURES)"' -MMD -MP -c -o $@ $<

include tools/make/cuda.mk
FIXTURES ?= fixtures
# The list of unit suites is generated so that adding tests/test_x.c is enough.
$(BUILD)/suites.h: FORCE
	$(Q)mkdir -p $(@D)
	$(Q){ for s in $(SUITES); do echo "X($$s)"; done; } > $@.new; \
	    cmp -s $@.new $@ && rm $@.new || mv $@.new $@
$(BUILD)/tests/main.o: $(BUILD)/suites.h
$(BUILD)/unit: $(BUILD)/tests/main.o $(TEST_OBJ) $(if $(filter %_cuda,$(SUITES)),$(EMU_OBJ)) \
               $(BUILD)/libckpt_engine.a $(BUILD)/libckpt.a | $(if $(filter comm_cuda ranks_cuda,$(SUITES)),$(BUILD)/fake_nccl.so)
	$(call say,LD,$@)
	$(Q)$(CC) $(LDFLAGS) -o $@ $^ $(shell pkg-config --libs check) $(LDLIBS) -lstdc++

# make check-unit      unit tests (Check); ONLY="name" builds and runs some suites
.PHONY: check-unit
check-unit: $(BUILD)/unit
	$(Q)tests/unit.sh $(BUILD)/unit $(JOBS) $(SUITES)

include tools/make/engine.mk tools/make/targets.mk tools/make/install.mk

# make clean           remove build/
clean:
	rm -rf build

-include $(patsubst %.o,%.d,$(CORE_OBJ) $(TOOL_OBJ) $(TEST_OBJ) $(EXTRA_OBJ) $(BUILD)/tests/main.o)
