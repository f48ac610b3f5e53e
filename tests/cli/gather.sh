# gather: parts of nodes become one checkpoint; what is missing is said by node, before anything is written.
rc 0 convert $FIXTURES/hf/kimi_linear_tiny whole --to torch_dist --layout megatron --tp 2 --ep 2
mkdir -p node0/release node1/release
cp whole/release/* whole/release/.metadata node0/release/; cp whole/latest* node0/
mv node0/release/__2_0.distcp node0/release/__3_0.distcp node1/release/
cp whole/release/common.pt node1/release/ # both have it
rc 0 gather node0 node1 --out out
out '^node1: 3 files$'; out ', 0 missing$'
same_tree whole out
rc 0 verify out --hash
rc 2 gather node0 node1 --out out; one_line; err 'exists'
rc 0 gather node0 node1 --out out --force --json; out '"missing":\[\]'
rc 2 gather node0; one_line; err 'out OUT is required'
rc 2 gather --out x; one_line
rc 5 gather node0 nowhere --out x; one_line; err 'nowhere'; absent x
rc 2 gather node0 node1 --out node1/x; one_line; err 'the destination lies inside the source'; absent node1/x
rc 2 gather node0 node1 --out node0 --force; one_line; err 'source and destination are the same'
# Parts that are no checkpoint together.
mkdir empty loose; cp whole/release/__0_0.distcp loose/
rc 3 gather empty --out x; one_line; err 'the parts together: '; absent x
rc 3 gather loose empty --out x; one_line; err 'the parts together: '; absent x
rm -r empty loose

# A rank's shard is missing: nobody has any of rank 2, node 1 has others of rank 3.
rm node1/release/__2_0.distcp; cp node1/release/__3_0.distcp node1/release/__3_1.distcp
mv node1/release/__3_0.distcp kept
rc 3 gather node0 node1 --out x --quiet; one_line
err 'no part has release/__2_0.distcp'; absent x
rc 3 gather node0 node1 --out x; err '^ckpt: gather: node1: release/__3_0.distcp is missing, named by release/.metadata$'
err '2 files missing'; absent x
rc 0 gather node0 node1 --out x --partial; out ' 2 missing$'
rc 3 inspect x; err 'missing'; rm -r x
mv kept node1/release/__3_0.distcp; cp whole/release/__2_0.distcp node1/release/; rm node1/release/__3_1.distcp
# Copies that differ.
flip node1/release/common.pt 300
rc 1 gather node0 node1 --out x; one_line; err 'node0/release/common.pt and node1/release/common.pt differ'; absent x

# Shards of a Hugging Face directory.
rc 0 convert $FIXTURES/hf/kimi_linear_tiny hf --to safetensors --max-shard-size 400KB
mkdir a b; i=0
for f in hf/*.safetensors; do i=$((i + 1)); [ $((i % 2)) -eq 0 ] && cp $f a/ || cp $f b/; done
cp hf/*.json a/
rc 0 gather a b --out joined; same_tree hf joined
rm b/model-00003-of-*.safetensors
rc 3 gather a b --out x --quiet; one_line; err 'no part has model-00003-of-.*, named by '; absent x
[ -z "$(ls -A | grep ckpt-tmp)" ] || fail "left behind: $(ls -A)"

# A part that contradicts its own manifest is not copied: by size, by digest; nothing is left
rc 0 convert $FIXTURES/hf/llama3_tiny own; cp -r own cut; cp -r own bit
rc 0 gather own --out good; rc 0 verify good --hash --files
echo >>cut/config.json; rc 1 gather cut --out no; one_line; err 'cut/config.json: [0-9]+ bytes, cut/ckpt.manifest.json says [0-9]+'
flip bit/model.safetensors 70000; rc 1 gather bit --out no; one_line; err 'bit/model.safetensors: contradicts its digest in bit/ckpt.manifest.json'
absent no; [ -z "$(ls -A | grep ckpt-tmp)" ] || fail "left: $(ls -A)"
