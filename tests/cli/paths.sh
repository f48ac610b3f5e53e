# Source and destination: same place however spelled, nested, existing, unwritable.
k=$FIXTURES/hf/kimi_linear_tiny
cp -r $k m; chmod -R u+w m; before=$(cat m/* | cksum)
ln -s m link
for d in m ./m m/ link "$PWD/m" m/../m; do
    rc 2 convert m $d --force; one_line; err 'same'
    rc 2 convert link $d --force; err 'same'
done
rc 2 convert m m/sub; one_line; err 'inside'
rc 2 convert m link/sub; err 'inside'
rc 2 convert m . --force; one_line; err 'inside'
rc 2 convert m/model.safetensors.index.json m --force; one_line
st s.safetensors '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}' 4
ln s.safetensors hard.safetensors; ln -s s.safetensors soft.safetensors
for d in s.safetensors hard.safetensors soft.safetensors; do rc 2 convert s.safetensors $d --force; err 'same'; done
ln m/model-00001-of-00003.safetensors part.safetensors
rc 2 convert m part.safetensors --force; one_line; err 'source'
[ "$(cat m/* | cksum)" = "$before" ] || fail 'the source changed'
rc 0 convert m out; rc 2 convert m out; one_line; err 'exists'; err -- '--force'
echo old >out/stale.txt
rc 0 convert m out --force; absent out/stale.txt; rc 0 verify out --hash
rc 0 convert m one.safetensors; rc 2 convert m one.safetensors; rc 0 convert m one.safetensors --force
rc 0 verify one.safetensors --hash
rc 5 convert m no/such/dir; one_line
nothing_but m link s.safetensors hard.safetensors soft.safetensors part.safetensors out \
    one.safetensors one.safetensors.ckpt.manifest.json

# Links that are named as output: what they lead to is not replaced, nor is a link to a device or a file.
rc 0 diff $k $k --json; cp $OUT diff.json
printf x >real.txt; ln -s real.txt link.txt; mkfifo pipe; ln -s pipe link.pipe
for o in link.txt link.pipe /dev/stdout pipe; do
    rc 2 report diff.json --out $o --force; one_line
done
[ -L link.txt ] && [ -L link.pipe ] && [ -L /dev/stdout ] && [ "$(cat real.txt)" = x ] || fail 'a link was replaced'
