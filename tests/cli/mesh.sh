# Meshes that do not fit are usage errors that name the size; every mesh gives one root.
m=$FIXTURES/mcore/legacy_tp1
rc 2 convert $m x --tp 3; one_line; err 'not divisible by (TP|tp) 3'; absent x
rc 2 convert $m x --ep 3; one_line; absent x
rc 2 convert $m x --pp 3; one_line; absent x
rc 2 convert $m x --to safetensors --tp 2; one_line; err 'not sharded|torch_dist'; absent x
root=''
for mesh in '--tp 1' '--tp 2' '--tp 4' '--pp 2' '--ep 4' '--tp 2 --ep 2' '--tp 4 --pp 2 --ep 2 --etp 1' '--tp 2 --cp 2'; do
    rm -rf y; rc 0 convert $m y $mesh --verify
    [ -z "$root" ] || [ "$(root_of)" = "$root" ] || fail "$mesh: another root"
    root=$(root_of)
    rc 0 diff $m y
done
rc 0 convert $m z --tp 4 --pp 2; rc 0 convert z w --tp 1; rc 0 diff $m w
# the arguments that travel in the common state are stale after resharding: the manifest is not
rc 0 inspect z; out '^mesh +tp 4, pp 2'
rc 0 convert z v --json; out "\"mesh\":\{\"tp\":4,\"pp\":2,\"ep\":1,"
