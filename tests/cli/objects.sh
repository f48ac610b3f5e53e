# An object of an unknown class is never imported: shown inert, refused by verify and
# convert by name. The fixture's common state is patched, name and CRC-32.
cp -r $FIXTURES/mcore/legacy_tp1 m; chmod -R u+w m
sed -i 's/argparse/xrgparse/; s/\x97\x83\x37\x3e/\x25\xbc\x52\x87/g' m/iter_0000100/__0_0.distcp
rc 0 inspect m --common; out 'common_state/shard_0_1 .*inert: unknown global xrgparse.Namespace'; err 'unknown global xrgparse.Namespace'
rc 0 inspect m --json; out '"unknown_global":"xrgparse.Namespace"'
rc 4 verify m; one_line; err "common_state/shard_0_1.*xrgparse.Namespace"
rc 4 convert m x; one_line; err 'xrgparse.Namespace'; absent x
rc 4 convert m x --to safetensors; absent x
