# Commands that only read run in a sandbox (lib/sandbox.h), with the same results as without.
rc 0 --version; out '^sandbox: (seccomp|none, )'
k=$FIXTURES/hf/llama_tiny_tied
for args in "inspect $k --json" "inspect $FIXTURES/mcore/legacy_tp2 --stats" "verify $k --forward" "diff $k $k"; do
    rc 0 $args; silent; mv $OUT in.txt
    rc 0 $args --no-sandbox; silent; same $OUT in.txt
done
rc 0 convert $k h.h5 --to hdf5; rc 0 verify h.h5 --hash; rc 0 verify h.h5 --hash --no-sandbox
rc 2 convert $k out --no-sandbox; one_line; err '^ckpt: convert: --no-sandbox has no effect: convert runs in none$'; absent out
rc 0 convert $k copy; rm copy/ckpt.manifest.json; rc 0 verify copy --write; present copy/ckpt.manifest.json
# Looked at from outside, while it waits for a reader of what it prints.
names=$(printf '"t%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},' $(seq 3000)); st many.safetensors "{${names%,}}" 0
mkfifo answer
filters() { sed -n 's/^Seccomp_filters:[[:space:]]*//p' "/proc/$1/status"; }
# filters_of ARGS...: how many it runs under
filters_of() {
    "$CKPT" "$@" >answer 2>$ERR & local pid=$!
    exec 3<answer; head -c 1 <&3 >first.txt; filters $pid; cat <&3 >rest.txt; exec 3<&-; wait $pid || fail "$*: $?"
}
if "$CKPT" --version | grep -q '^sandbox: seccomp' && [ -n "$(filters self)" ]; then
    base=$(filters self)
    [ "$(filters_of inspect many.safetensors --json)" = $((base + 1)) ] || fail 'inspect is in no sandbox'
    [ "$(filters_of inspect many.safetensors --json --no-sandbox)" = "$base" ] || fail '--no-sandbox is in one'
fi
