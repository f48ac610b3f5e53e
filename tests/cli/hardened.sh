# What the compiler and the linker were asked for is in the program (HARDEN in the Makefile).
elf() { LC_ALL=C readelf -W "$@" "$CKPT" >elf.txt || fail "readelf $*"; }
elf_has() { grep -qE -- "$1" elf.txt || fail "no '$1': $2"; }
elf -h; elf_has '^ *Type: +DYN' 'not at a random address'
elf -l; elf_has 'GNU_RELRO' 'tables of the linker stay writable'
elf_has 'GNU_STACK +0x[0-9a-f]+ 0x[0-9a-f]+ 0x[0-9a-f]+ 0x[0-9a-f]+ 0x[0-9a-f]+ RW +0x' 'an executable stack'
! grep -qE ' LOAD .* RWE ' elf.txt || fail 'a segment is writable and executable'
elf -d; elf_has 'BIND_NOW|FLAGS_1.* NOW' 'symbols are bound late'
! grep -qE 'RPATH|RUNPATH|TEXTREL' elf.txt || fail "$(grep -E 'RPATH|RUNPATH|TEXTREL' elf.txt)"
elf --dyn-syms; elf_has '__stack_chk_fail' 'no stack protector'
# under a sanitizer its own checks stand in
if ! sanitized any; then
    for f in memcpy memset snprintf vsnprintf; do elf_has " __${f}_chk@" "$f is not checked"; done
fi
