# HDF5, there and back: one root, the same bytes, the manifest inside, the same file every time.
k=$FIXTURES/hf/kimi_linear_tiny
rc 0 convert $k a.h5 --verify; out 'root equals source'; r=$(root_of); silent
present a.h5.ckpt.manifest.json
rc 0 inspect a.h5; out '^container +hdf5$'; out '^layout +hf:kimi_linear$'; out '151 stored, .* in 1 file; 0 objects'
rc 0 verify a.h5 --hash --files --strict; [ "$(root_of)" = "$r" ] || fail 'another root'
rc 0 diff a.h5 $k; out '^151 identical$'
rc 0 convert a.h5 b --to safetensors --verify; out 'root equals source'; [ "$(root_of)" = "$r" ] || fail 'another root'
rc 0 convert $k c --to safetensors; same c/model.safetensors b/model.safetensors
for f in $k/*; do case $f in *.safetensors*) ;; *) same $f b/${f##*/} ;; esac; done
# the manifest travels inside
mkdir moved; cp a.h5 moved/other.hdf5
rc 0 verify moved/other.hdf5 --hash; out 'all digests match the manifest'; [ "$(root_of)" = "$r" ] || fail 'another root'
rc 0 verify moved/other.hdf5 --hash --json; out '"manifest":true'
rc 0 convert moved/other.hdf5 moved/back --to safetensors; rm moved/back/ckpt.manifest.json b/ckpt.manifest.json; same_tree b moved/back
rc 0 verify a.h5 --against $k
# the same bytes at any number of threads and any memory
rc 0 convert $k one.h5 --threads 1 --memory 1MiB; same one.h5 a.h5
rc 0 convert b eight.h5 --threads 8; cmp -s eight.h5 a.h5 || rc 0 diff eight.h5 a.h5
rc 0 convert $k z.h5 --compress shuffle-deflate --verify --threads 1; rc 0 convert $k z8.h5 --compress shuffle-deflate:4 --threads 8
same z.h5 z8.h5; rc 0 verify z.h5 --hash --files; [ "$(root_of)" = "$r" ] || fail 'another root'
[ "$(stat -c %s z.h5)" -lt "$(stat -c %s a.h5)" ] || fail 'not compressed'
# other layouts, and a mesh on either side
rc 0 convert $k m.h5 --layout megatron --verify; out 'root equals source'
rc 0 convert m.h5 m --to torch_dist --tp 2 --ep 2 --verify; out 'root equals source'; [ "$(root_of)" = "$r" ] || fail 'another root'
rc 0 convert m n.h5 --layout keep; [ "$(root_of)" = "$r" ] || fail 'another root'
rc 0 convert n.h5 h --to safetensors --layout hf; rc 0 diff h $k
rc 0 convert $FIXTURES/mcore/legacy_tp2 t.h5; out 'root equals source'; r=$(root_of)
rc 0 convert t.h5 t --to torch_dist --tp 2 --verify; out 'root equals source'; [ "$(root_of)" = "$r" ] || fail 'another root'
rc 0 diff t $FIXTURES/mcore/legacy_tp2; rc 0 inspect t; out '^mesh +tp 2'; out '^iteration +100'
rc 0 convert $FIXTURES/fla/kda_trained fla.h5 --allow-unknown; rc 0 diff fla.h5 $FIXTURES/fla/kda_trained
rm -rf tree.txt a.h5* b c moved one.h5* eight.h5* z.h5* z8.h5* m m.h5* n.h5* h t t.h5* fla.h5*
nothing_but -
# what cannot be written is named by its file, as in every container
# (libhdf5 itself loses memory then)
(ulimit -f 20; ASAN_OPTIONS=detect_leaks=0 exec "$CKPT" convert $k full.h5) >$OUT 2>$ERR; [ $? -eq 5 ] || fail 'exit'; one_line; err "full.h5.*: dataset '.*': File too large"
