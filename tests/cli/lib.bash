# Helpers for a case; called as `bash lib.bash CASE.sh` in an empty directory.
failures=0
OUT=out.txt ERR=err.txt

fail() {
    echo "line ${BASH_LINENO[1]}: $*"
    failures=$((failures + 1))
}

# rc N ARGS...: run the program; its exit code must be N. Output goes to out.txt and err.txt.
rc() {
    local want=$1
    shift
    "$CKPT" "$@" >$OUT 2>$ERR
    local got=$?
    [ $got -eq "$want" ] || fail "ckpt $*: exit $got, expected $want: $(head -c 600 $ERR $OUT)"
}

out() { grep -qE -- "$1" $OUT || fail "no '$1' on stdout: $(head -c 1500 $OUT)"; }
err() { grep -qE -- "$1" $ERR || fail "no '$1' on stderr: $(head -c 1500 $ERR)"; }
no_out() { ! grep -qE -- "$1" $OUT || fail "unexpected '$1' on stdout: $(grep -E -- "$1" $OUT | head -3)"; }
no_err() { ! grep -qE -- "$1" $ERR || fail "unexpected '$1' on stderr"; }
silent() { [ ! -s $ERR ] || fail "stderr is not empty: $(head -c 600 $ERR)"; }
# An error is one line that starts with the program and the command.
one_line() { [ "$(wc -l <$ERR)" -eq 1 ] && grep -q '^ckpt: ' $ERR || fail "not one error line: $(cat $ERR)"; }
absent() { [ ! -e "$1" ] || fail "$1 exists"; }
present() { [ -e "$1" ] || fail "$1 is missing"; }
same() { cmp -s "$1" "$2" || fail "$1 and $2 differ"; }
same_tree() { diff -r "$1" "$2" >tree.txt || fail "$1 and $2 differ: $(head -5 tree.txt)"; }
# Nothing but the named files is left in the directory of the case (temporary output included).
nothing_but() {
    local extra
    extra=$(ls -A | grep -vxF -e $OUT -e $ERR $(printf -- '-e %s ' "$@"))
    [ -z "$extra" ] || fail "left behind: $extra"
}
# Root digest of the last `convert` or `verify --hash` output.
root_of() { grep -oE 'root [0-9a-f]{64}' $OUT | head -1; }

# le BYTES NUMBER: little endian, as escapes for printf.
le() {
    local i
    for ((i = 0; i < $1; i++)); do printf '\\x%02x' $((($2 >> (8 * i)) & 255)); done
}
# st FILE JSON BYTES: a safetensors file with that header and BYTES zero bytes.
st() {
    printf "$(le 8 ${#2})" >"$1"
    printf '%s' "$2" >>"$1"
    head -c "$3" /dev/zero >>"$1"
}
# flip FILE OFFSET: invert the lowest bit of one byte.
flip() {
    local byte
    byte=$(od -An -tu1 -j "$2" -N 1 "$1")
    printf "\\x$(printf %02x $((byte ^ 1)))" | dd of="$1" bs=1 seek="$2" conv=notrunc status=none
}

# Losses of a metrics file. close_to A B LIMIT: those of two, step by step, relative.
losses() { grep '"loss"' "$1" | sed 's/.*"loss":\([^,]*\),.*/\1/'; }
close_to() {
    paste -d' ' <(losses "$1") <(losses "$2") | awk -v limit="$3" 'function abs(x) { return x < 0 ? -x : x }
        { n++; if (NF != 2 || !(abs($1 - $2) <= limit * $2)) { print "step " n ": " $0; bad = 1 } }
        END { exit bad || n < 2 }' >far.txt || fail "$1 against $2: $(head -3 far.txt)"
}
# until_there FILE: wait for it, at most 2 minutes.
until_there() {
    local i
    for ((i = 0; i < 1200; i++)); do
        if [ -e "$1" ]; then return; fi
        sleep 0.1
    done
    fail "no $1"
}

# Is the program built with that sanitizer (asan, tsan, ubsan; any)? A repeat of the same code on another
# model, which no sanitizer can tell from the first, may be left out then; the plain build runs all.
sanitized() {
    case $1 in
    any) grep -qE '__(asan|tsan)_init|__ubsan_handle' "$CKPT" ;;
    ubsan) grep -qF __ubsan_handle "$CKPT" ;;
    *) grep -qF "__$1_init" "$CKPT" ;;
    esac
}

# For cases whose program loads the emulated plug-in: that is not instrumented and runs on fibers, so how it
# orders its threads is not seen, and LeakSanitizer cannot walk the stacks it leaves.
with_plugin() {
    echo called_from_lib:libckpt_cuda.so >plain.txt
    export TSAN_OPTIONS="suppressions=$PWD/plain.txt${TSAN_OPTIONS:+:$TSAN_OPTIONS}"
    export ASAN_OPTIONS="detect_leaks=0${ASAN_OPTIONS:+:$ASAN_OPTIONS}"
}

# Last: its exit code is that of the case.
. "$1"
[ $failures -eq 0 ]
