# The library as others link it, and installing: program, libckpt.so and .a, header, ckpt.pc, manual
# pages, completion. `make dist` and `make deb` pack.

ABI      := $(shell sed -n 's/^\#define CKPT_ABI \([0-9]*\)/\1/p' lib/ckpt.h)
SONAME   := libckpt.so.$(ABI)
LIBDIR   ?= $(PREFIX)/lib
# What is the program's alone: main, and what runs before main.
FULL_OBJ := $(CORE_OBJ) $(ENG_OBJ) \
            $(filter-out $(BUILD)/tools/ckpt.o $(BUILD)/tools/wait.o,$(TOOL_OBJ))
COMMANDS  = $(shell $(BUILD)/ckpt --help | sed -n '/^commands:/,/^$$/s/^  \([a-z]*\) .*/\1/p')

comma := ,
HDF5_VERSION := $(shell pkg-config --modversion hdf5 2>/dev/null)
FEATURES := HDF5 $(HDF5_VERSION), OpenBLAS, $(if $(OPENMP),OpenMP,no OpenMP), \
            $(if $(filter 1,$(ISAL)),ISA-L,no ISA-L)$(if $(SAN),$(comma) sanitizer $(SAN))
$(BUILD)/tools/ckpt.o: CPPFLAGS += -DCKPT_FEATURES='"$(strip $(FEATURES))"'

.PHONY: shared install uninstall dist deb check-clients
# make shared          $(BUILD)/libckpt.so, the library with the functions of lib/ckpt.h
shared: $(BUILD)/$(SONAME)
$(BUILD)/$(SONAME): $(FULL_OBJ) lib/libckpt.map
	$(call say,LD,$@)
	$(Q)$(CC) -shared $(filter-out -pie,$(LDFLAGS)) -Wl,-soname,$(SONAME) -Wl,--version-script=lib/libckpt.map -Wl,-z,defs \
	    -o $@ $(FULL_OBJ) $(LDLIBS)
	$(Q)ln -sf $(SONAME) $(BUILD)/libckpt.so
$(BUILD)/static/libckpt.a: $(FULL_OBJ)
	$(call say,AR,$@)
	$(Q)mkdir -p $(@D) && rm -f $@ && ar rcs $@ $^

# make install         program, library, header, ckpt.pc, manual, completion below $(DESTDIR)$(PREFIX)
D = $(DESTDIR)$(PREFIX)
L = $(DESTDIR)$(LIBDIR)
install: all $(BUILD)/$(SONAME) $(BUILD)/static/libckpt.a
	$(Q)install -d $(D)/bin $(D)/include $(L)/pkgconfig $(D)/share/man/man1 \
	    $(D)/share/bash-completion/completions $(D)/share/zsh/site-functions \
	    $(D)/share/fish/vendor_completions.d
	$(Q)install -m 755 $(BUILD)/ckpt $(D)/bin/ckpt
	$(Q)set -e; for part in libckpt_mpi.so libckpt_cuda.so; do if [ -e $(BUILD)/$$part ]; then \
	    install -d $(D)/lib/ckpt; install -m 755 $(BUILD)/$$part $(D)/lib/ckpt/$$part; fi; done
	$(Q)install -m 644 lib/ckpt.h $(D)/include/ckpt.h
	$(Q)install -m 755 $(BUILD)/$(SONAME) $(L)/libckpt.so.$(ABI).$(VERSION)
	$(Q)ln -sf libckpt.so.$(ABI).$(VERSION) $(L)/$(SONAME)
	$(Q)ln -sf $(SONAME) $(L)/libckpt.so
	$(Q)install -m 644 $(BUILD)/static/libckpt.a $(L)/libckpt.a
	$(Q)sed -e 's|@PREFIX@|$(PREFIX)|' -e 's|@LIBDIR@|$(LIBDIR)|' -e 's|@VERSION@|$(VERSION)|' \
	    -e 's|@PRIVATE@|$(LDLIBS)|' lib/ckpt.pc.in > $(L)/pkgconfig/ckpt.pc
	$(Q)$(BUILD)/ckpt completion man > $(D)/share/man/man1/ckpt.1
	$(Q)set -e; for c in $(COMMANDS); do \
	    $(BUILD)/ckpt completion man:$$c > $(D)/share/man/man1/ckpt-$$c.1; done
	$(Q)$(BUILD)/ckpt completion bash > $(D)/share/bash-completion/completions/ckpt
	$(Q)$(BUILD)/ckpt completion zsh > $(D)/share/zsh/site-functions/_ckpt
	$(Q)$(BUILD)/ckpt completion fish > $(D)/share/fish/vendor_completions.d/ckpt.fish

# make uninstall       remove what install put there
uninstall:
	$(Q)rm -f $(D)/bin/ckpt $(D)/lib/ckpt/libckpt_*.so $(D)/include/ckpt.h $(L)/libckpt.so* \
	    $(L)/libckpt.a $(L)/pkgconfig/ckpt.pc $(D)/share/man/man1/ckpt.1 $(D)/share/man/man1/ckpt-*.1 \
	    $(D)/share/bash-completion/completions/ckpt $(D)/share/zsh/site-functions/_ckpt \
	    $(D)/share/fish/vendor_completions.d/ckpt.fish

# make dist            $(BUILD)/ckpt-$(VERSION).tar.gz of what is committed
dist:
	$(Q)mkdir -p $(BUILD)
	$(Q)git archive --format=tar --prefix=ckpt-$(VERSION)/ -o $(BUILD)/dist.tar HEAD
	$(Q)gzip -n -9 < $(BUILD)/dist.tar > $(BUILD)/ckpt-$(VERSION).tar.gz && rm $(BUILD)/dist.tar
	@echo "$(BUILD)/ckpt-$(VERSION).tar.gz"

# make deb             $(BUILD)/ckpt_$(VERSION)_ARCH.deb, program, library and header in one package
deb: all $(BUILD)/$(SONAME) $(BUILD)/static/libckpt.a
	$(Q)CKPT_VERSION=$(VERSION) BUILD=$(BUILD) MAKE="$(MAKE)" tools/deb.sh

# make check-clients   an installed library from C, from ctypes, and its ABI (tests/clients)
check-clients: all $(BUILD)/$(SONAME) $(BUILD)/static/libckpt.a
	$(Q)CC="$(CC)" BUILD=$(BUILD) SAN=$(SAN) MAKE="$(MAKE)" FIXTURES=$(FIXTURES) tests/clients/run.sh

# make check-browser   the page of ckpt report in headless Chromium, where that is installed
.PHONY: check-browser
check-browser: $(BUILD)/ckpt
	$(Q)CKPT=$(CKPT) SHOTS=$(BUILD)/shots tests/browser.sh
