# The compute engine: engine/*.c once for float and once for double, engine/kernels/*.c for each of
# these and each instruction set, engine/common/*.c and engine/train/*.c once.
#
# Results of the engine are compared within tolerances, and BLAS fuses multiply and add anyway, so
# here the compiler may (-ffp-contract=fast); nothing else of IEEE arithmetic is given up. The optimizer
# (engine/train) keeps contraction off: there every instruction set gives the same bits. So do the
# quantisers (engine/quant, for float and for double), every operation of which is rounded once.

ENG_ISA   := base $(if $(X86),v3 v4)
ENG_FLAGS_base :=
ENG_FLAGS_v3 := -mavx2 -mfma
ENG_FLAGS_v4 := -mavx2 -mfma -mavx512f -mavx512dq -mavx512bw -mavx512vl -mprefer-vector-width=512
# clang says so when a loop that is marked simd calls the C library (f64): expected.
ENG_OPT   := -O3 -ffp-contract=fast -fno-math-errno -fno-trapping-math -fopenmp-simd \
             -Wno-pass-failed -Iengine $(BLAS_CFLAGS) $(if $(SAN),-DCKPT_ROLLED)
# The runtime of OpenMP is not instrumented: under ThreadSanitizer the engine runs on one thread.
# Without an OpenMP that links (clang's is a package of its own) it does so too.
OPENMP    := $(if $(filter thread,$(SAN)),,$(shell echo 'int main(void) { return 0; }' | \
               $(CC) -fopenmp -x c - -o /dev/null 2>/dev/null && echo -fopenmp))

ENG_COMMON := $(patsubst %.c,$(BUILD)/%.o,$(sort $(wildcard engine/common/*.c)))
ENG_TRAIN  := $(patsubst %.c,$(BUILD)/%.o,$(sort $(wildcard engine/train/*.c)))
ENG_TYPED  := $(foreach t,32 64,$(patsubst %.c,$(BUILD)/%.f$(t).o,$(sort $(wildcard engine/*.c))))
ENG_QUANT  := $(foreach t,32 64,$(patsubst %.c,$(BUILD)/%.f$(t).o,$(sort $(wildcard engine/quant/*.c))))
ENG_KERNEL := $(foreach t,32 64,$(foreach i,$(ENG_ISA),\
                $(patsubst %.c,$(BUILD)/%.f$(t).$(i).o,$(sort $(wildcard engine/kernels/*.c)))))
# On a device: the sources that are made of operations alone, and those operations there (real.h).
ENG_SHARED := linattn mla gqa mlp moe spread network network_run network_par network_vocab network_table
ENG_DEVICE := $(foreach t,32 16,$(patsubst %.c,$(BUILD)/%.d$(t).o,$(ENG_SHARED:%=engine/%.c) \
                $(sort $(wildcard engine/device/*.c))))
ENG_OBJ    := $(ENG_COMMON) $(ENG_TRAIN) $(ENG_TYPED) $(ENG_QUANT) $(ENG_KERNEL) $(ENG_DEVICE)
ENG_CC      = $(CC) $(STD) $(CPPFLAGS) $(CFLAGS) $(SANFLAGS) $(WARN) $(ENG_OPT)

$(BUILD)/engine/common/%.o: engine/common/%.c $(BUILD)/flags
	$(call say,CC,$<)
	$(Q)mkdir -p $(@D)
	$(Q)$(ENG_CC) $(OPENMP) -MMD -MP -c -o $@ $<

$(BUILD)/engine/train/%.o: engine/train/%.c $(BUILD)/flags
	$(call say,CC,$<)
	$(Q)mkdir -p $(@D)
	$(Q)$(ENG_CC) -ffp-contract=off -MMD -MP -c -o $@ $<

$(BUILD)/engine/quant/%.o: ENG_OPT += -ffp-contract=off
define eng_typed
$$(BUILD)/engine/%.$(1).o: engine/%.c $$(BUILD)/flags
	$$(call say,CC,$$< $(1))
	$$(Q)mkdir -p $$(@D)
	$$(Q)$$(ENG_CC) -DCKPT_REAL=$(2) -MMD -MP -c -o $$@ $$<
endef
define eng_kernel
$$(BUILD)/engine/kernels/%.f$(1).$(2).o: engine/kernels/%.c $$(BUILD)/flags
	$$(call say,CC,$$< f$(1) $(2))
	$$(Q)mkdir -p $$(@D)
	$$(Q)$$(ENG_CC) $$(ENG_FLAGS_$(2)) -DCKPT_REAL=$(1) -DCKPT_ISA=$(2) -MMD -MP -c -o $$@ $$<
endef
$(foreach t,32 64,$(eval $(call eng_typed,f$(t),$(t))))
$(foreach t,32 16,$(eval $(call eng_typed,d$(t),1$(t))))
$(foreach t,32 64,$(foreach i,$(ENG_ISA),$(eval $(call eng_kernel,$(t),$(i)))))

$(BUILD)/libckpt_engine.a: $(ENG_OBJ)
	$(call say,AR,$@)
	$(Q)rm -f $@ && ar rcs $@ $^

-include $(ENG_OBJ:.o=.d)

# make engine_ops      $(BUILD)/engine_ops, times of engine operations (tests/bench/engine_ops.c)
.PHONY: engine_ops
engine_ops: $(BUILD)/engine_ops
$(BUILD)/engine_ops: tests/bench/engine_ops.c $(BUILD)/libckpt_engine.a $(BUILD)/libckpt.a
	$(call say,LD,$@)
	$(Q)$(ENG_CC) -o $@ $^ $(LDFLAGS) $(LDLIBS)

# The MPI part, a shared object beside the program, where mpicc is found (engine/mpi/plugin.c).
MPICC     ?= $(shell command -v mpicc 2>/dev/null)
MPI       ?= $(if $(MPICC),1,0)
ifeq ($(MPI),1)
all: $(BUILD)/libckpt_mpi.so
endif
$(BUILD)/libckpt_mpi.so: engine/mpi/plugin.c engine/comm.h $(BUILD)/flags
	$(call say,MPICC,$@)
	$(Q)$(MPICC) $(STD) -D_POSIX_C_SOURCE=200809L -Ilib -Iengine -O2 -g -fPIC -shared -Wl,-z,relro,-z,now $(WARN) -o $@ $<
