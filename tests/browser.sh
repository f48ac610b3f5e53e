#!/usr/bin/env bash
# The page of `ckpt report` in headless Chromium (Debian: chromium): desktop and phone, light and dark.
# Fails on anything on the console, on a page wider than a phone, and if dark looks like light. The
# pictures stay in $SHOTS (default: the build directory) to be looked at. CKPT names the program.
set -euo pipefail
cd "$(dirname "$0")/.."
ckpt=$(realpath "${CKPT:-build/ckpt}") shots=${SHOTS:-build/shots}
mkdir -p "$shots"
shots=$(realpath "$shots")
work=$(mktemp -d "${TMPDIR:-/tmp}/ckpt-browser.XXXXXX")
trap 'rm -rf "$work"' EXIT

source=fixtures/hf/kimi_linear_tiny
train=(--data fixtures/fla/corpus.txt --quiet)
"$ckpt" train --reset-optimizer --resume $source "${train[@]}" --seq-len 24 --batch 2 --lr 2e-3 \
    --lr-warmup 3 --lr-style cosine --lr-decay 30 --steps 30 --save "$work/original" --save-every 10
"$ckpt" train --resume "$work/original" --iteration 10 "${train[@]}" --steps 30 --save "$work/resumed"
"$ckpt" convert $source "$work/bf16" --dtype bf16 --quiet
"$ckpt" convert "$work/bf16" "$work/back" --dtype f32 --quiet
"$ckpt" diff $source "$work/back" --limit 0 --json >"$work/diff.json" || [ $? -eq 1 ]
"$ckpt" verify $source --forward --json >"$work/verify.json"
"$ckpt" convert fixtures/mcore/legacy_tp2 "$work/x" --to torch_dist --tp 4 --dry-run --json >"$work/map.json"
"$ckpt" study fixtures/fla/kda_trained --data fixtures/fla/corpus.txt --seq-len 64 --blocks 8 --json >"$work/study.json"
"$ckpt" gate fixtures/gate.json --json >"$work/gate.json"
"$ckpt" report "$work/original" "$work/resumed" "$work/diff.json" "$work/verify.json" "$work/study.json" \
    "$work/map.json" "$work/gate.json" \
    --out "$work/page.html" --quiet

shot() { # NAME WIDTH SCHEME
    local dark=()
    if [ "$3" = dark ]; then dark=(--blink-settings=preferredColorScheme=0); fi
    chromium --headless=new --no-sandbox --disable-gpu --hide-scrollbars --window-size="$2,5200" \
        "${dark[@]}" --enable-logging=stderr --screenshot="$shots/$1.png" "file://$work/page.html" \
        2>"$work/log"
    if grep -i 'CONSOLE' "$work/log"; then
        echo "browser: the console is not empty"
        exit 1
    fi
    [ -s "$shots/$1.png" ]
}
for scheme in light dark; do
    shot desktop-$scheme 1280 $scheme
    shot phone-$scheme 390 $scheme
done
if cmp -s "$shots/desktop-light.png" "$shots/desktop-dark.png"; then
    echo "browser: dark is not dark"
    exit 1
fi
echo "browser: 4 pictures in $shots, console empty"
