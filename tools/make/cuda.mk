# CUDA: engine/cuda/*.cu becomes the plug-in $(BUILD)/libckpt_cuda.so; nothing else of the build needs
# nvcc or a driver. The same sources, compiled by the C++ compiler on tests/gpu/emulate.h, are what the
# unit suite kda_cuda runs, so a machine without a card tests their logic.

# sm_90a: the card this is tuned for; sm_80 and its PTX serve every later one.
NVCC_ARCH   ?= -gencode arch=compute_90a,code=sm_90a -gencode arch=compute_80,code=[sm_80,compute_80]
NVCC_FLAGS  := -std=c++17 -O3 -lineinfo -Ilib -Iengine -Xcompiler -fPIC,-fvisibility=hidden
CU_SRC      := $(sort $(wildcard engine/cuda/*.cu))
CU_DEP      := $(wildcard engine/cuda/*.cuh engine/cuda/*.h) engine/train/elementwise.h engine/comm.h lib/err.h \
               lib/codec.h lib/policy.h
CU_OBJ      := $(patsubst %.cu,$(BUILD)/%.cu.o,$(CU_SRC))
EMU_OBJ     := $(patsubst %.cu,$(BUILD)/%.emu.o,$(CU_SRC))
CXX         ?= g++

# The optimizer gives the CPU's bits: no contraction, subnormals flushed to zero.
%/ops_optim.cu.o %/ops_optim.sm90.o %/ops_muon.cu.o %/ops_muon.sm90.o: NVCC_FLAGS += -fmad=false -ftz=true

# Every operation of a rounding is rounded once (codec.h).
%/quant_d64.cu.o %/quant_d64.sm90.o %/quant_d128.cu.o %/quant_d128.sm90.o \
    %/quant_codec.cu.o: NVCC_FLAGS += -fmad=false

.PHONY: cuda cuda-compile kda_gpu ops_gpu attn_gpu quant_gpu load_gpu
# make cuda-compile    compile engine/cuda/*.cu for sm_90a with nvcc; no link with NVIDIA's libraries
cuda-compile: $(patsubst %.cu,$(BUILD)/%.sm90.o,$(CU_SRC))
	$(Q)ld -r -o $(BUILD)/sm90.o $^ # a name that two objects define fails here
	@echo "cuda-compile: $(words $(CU_SRC)) files"

$(BUILD)/%.sm90.o: %.cu $(CU_DEP)
	$(call say,NVCC,$<)
	$(Q)mkdir -p $(@D)
	$(Q)test -n "$(NVCC)" || { echo "nvcc not found; cannot compile $<" >&2; exit 1; }
	$(Q)$(NVCC) $(NVCC_FLAGS) -gencode arch=compute_90a,code=sm_90a -c -o $@ $<

$(BUILD)/%.cu.o: %.cu $(CU_DEP)
	$(call say,NVCC,$<)
	$(Q)mkdir -p $(@D)
	$(Q)test -n "$(NVCC)" || { echo "nvcc not found; cannot compile $<" >&2; exit 1; }
	$(Q)$(NVCC) $(NVCC_FLAGS) $(NVCC_ARCH) -c -o $@ $<

# make cuda            $(BUILD)/libckpt_cuda.so, the kernels for a program that loads them
cuda: $(BUILD)/libckpt_cuda.so
$(BUILD)/libckpt_cuda.so: $(CU_OBJ) $(BUILD)/lib/err.pic.o
	$(call say,LD,$@)
	$(Q)$(NVCC) -shared -cudart static -o $@ $^

$(BUILD)/lib/err.pic.o: lib/err.c $(BUILD)/flags
	$(call say,CC,$<)
	$(Q)mkdir -p $(@D)
	$(Q)$(CC) $(STD) $(CPPFLAGS) $(CFLAGS) $(WARN) -fPIC -c -o $@ $<

# make kda_gpu         $(BUILD)/kda_gpu, parity and times of the recurrence on a card (tests/gpu/run.sh)
# make ops_gpu         $(BUILD)/ops_gpu, the same of the pointwise and row operations
# make attn_gpu        $(BUILD)/attn_gpu, the same of products and attention
# make quant_gpu       $(BUILD)/quant_gpu, the same of the quantised recurrence (tests/gpu/quant.sh)
# make two_gpu         $(BUILD)/two_gpu, models over several cards (tests/gpu/two.sh)
# make load_gpu        $(BUILD)/load_gpu, checkpoints into a card's memory (tests/gpu/load.sh)
kda_gpu: $(BUILD)/kda_gpu
ops_gpu: $(BUILD)/ops_gpu
attn_gpu: $(BUILD)/attn_gpu
quant_gpu: $(BUILD)/quant_gpu
two_gpu: $(BUILD)/two_gpu
load_gpu: $(BUILD)/load_gpu
$(BUILD)/quant_gpu: $(BUILD)/tests/gpu/quant_codec.cu.o
$(BUILD)/kda_gpu $(BUILD)/ops_gpu $(BUILD)/attn_gpu $(BUILD)/quant_gpu $(BUILD)/two_gpu $(BUILD)/load_gpu: \
    $(BUILD)/%: $(BUILD)/tests/gpu/%.o $(CU_OBJ) $(BUILD)/libckpt_engine.a $(BUILD)/libckpt.a
	$(call say,LD,$@)
	$(Q)$(NVCC) -cudart static -Xcompiler "$(OPENMP)" -o $@ $^ $(PKG_LIBS) $(BLAS_LIBS) -lm
$(BUILD)/tests/gpu/kda_gpu.o $(BUILD)/tests/gpu/ops_gpu.o $(BUILD)/tests/gpu/attn_gpu.o $(BUILD)/tests/gpu/quant_gpu.o \
    $(BUILD)/tests/gpu/two_gpu.o: \
    CPPFLAGS += -isystem $(dir $(NVCC))../include

-include $(patsubst %,$(BUILD)/tests/gpu/%.d,kda_gpu ops_gpu attn_gpu quant_gpu two_gpu load_gpu)

# Fibers change stacks, which sanitizers do not follow: these objects are compiled without them.
$(BUILD)/%.emu.o: %.cu $(CU_DEP) tests/gpu/emulate.h tests/gpu/emulate_wgmma.h
	$(call say,CXX,$< emulated)
	$(Q)mkdir -p $(@D)
	$(Q)$(CXX) -std=c++17 -O1 -ffp-contract=off -fno-strict-aliasing -fvisibility=hidden -Wall -Wextra \
	    -Wno-unknown-pragmas -DCKPT_CUDA_EMULATE='"emulate.h"' -fPIC -Ilib -Iengine -Itests/gpu -x c++ -c -o $@ $<

# make cuda-emulated   $(BUILD)/emulated/ckpt with a libckpt_cuda.so beside it that runs on the CPU (tests)
.PHONY: cuda-emulated
cuda-emulated: $(BUILD)/emulated/libckpt_cuda.so $(BUILD)/emulated/ckpt
$(BUILD)/emulated/libckpt_cuda.so: $(EMU_OBJ) $(BUILD)/lib/err.pic.o
	$(call say,LD,$@)
	$(Q)mkdir -p $(@D)
	$(Q)$(CXX) -shared -o $@ $^
$(BUILD)/emulated/ckpt: $(BUILD)/ckpt
	$(Q)mkdir -p $(@D)
	$(Q)cp -f $< $@

# What the suite comm_cuda has for NCCL.
$(BUILD)/fake_nccl.so: tests/gpu/fake_nccl.c $(BUILD)/flags
	$(call say,LD,$@)
	$(Q)mkdir -p $(@D)
	$(Q)$(CC) -std=c17 -D_POSIX_C_SOURCE=200809L -D_DEFAULT_SOURCE -O2 -g -fPIC -shared -fvisibility=hidden -Wall -Wextra -o $@ $< -pthread

# make two_emulated    $(BUILD)/two_emulated, the same program on the emulator; load_emulated: load_gpu's
.PHONY: two_emulated load_emulated
two_emulated: $(BUILD)/two_emulated $(BUILD)/fake_nccl.so
load_emulated: $(BUILD)/load_emulated
$(BUILD)/two_emulated $(BUILD)/load_emulated: $(BUILD)/%: $(BUILD)/tests/gpu/%.o $(EMU_OBJ) $(BUILD)/libckpt_engine.a $(BUILD)/libckpt.a
	$(call say,LD,$@)
	$(Q)$(CC) $(LDFLAGS) -o $@ $^ $(LDLIBS) -lstdc++
$(BUILD)/tests/gpu/two_emulated.o $(BUILD)/tests/gpu/load_emulated.o: $(BUILD)/tests/gpu/%_emulated.o: tests/gpu/%_gpu.c $(BUILD)/flags
	$(call say,CC,$< emulated)
	$(Q)mkdir -p $(@D)
	$(Q)$(CC) $(STD) $(CPPFLAGS) $(CFLAGS) $(SANFLAGS) $(WARN) -Wno-conversion -Wno-missing-prototypes -Iengine -Itests \
	    -DCKPT_EMULATED -MMD -MP -c -o $@ $<
-include $(BUILD)/tests/gpu/two_emulated.d $(BUILD)/tests/gpu/load_emulated.d
