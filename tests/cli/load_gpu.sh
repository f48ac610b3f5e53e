# Checkpoints into a device's memory, on the emulator (make load_emulated): bytes, digests, a damaged file.
build=$(dirname "$CKPT")
present "$build/load_emulated"
bash "${here:?}/../gpu/load.sh" "$build" small >said 2>&1 || fail "$(tail -n 5 said)"
[ "$(grep -c ': equal$' said)" -eq 8 ] || fail "$(cat said)"
