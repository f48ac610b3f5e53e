# Help comes from the option tables and goes to stdout.
rc 0 --version; silent; out '^ckpt [0-9]+\.[0-9]+\.[0-9]+$'
rc 0 --help; silent; out '^  convert '; out '^  gate '
rc 0 help; silent; out '^  convert '
rc 0 help diff; silent; out '^usage: ckpt diff'; rc 0 help gate; out '^usage: ckpt gate'
rc 2 help dif; one_line; err "did you mean 'diff'"; rc 2 help diff x; one_line
for c in inspect convert verify diff train; do
    rc 0 $c --help; silent
    out "^usage: ckpt $c \[options\]"; out '^  --json '; out '^  --memory SIZE'
done
rc 0 convert -h; silent; out '--kda-f-lora-rank R\|none'
rc 0 convert a b --help; silent

# On a terminal --help fits it: the first options explained, the others named. `ckpt help` tells all.
term() { TERM=xterm script -qec "stty rows $1 cols $2; '$CKPT' $3" /dev/null </dev/null | tr -d '\r'; }
for c in '' inspect convert verify diff train study gate gather sign bench report formats completion; do
    term 24 80 "$c --help" >screen
    [ "$(fold -w 80 screen | wc -l)" -le 23 ] || fail "$c --help does not fit: $(cat screen)"
    [ "$(wc -l <screen)" -ge 10 ] || fail "$c --help is short: $(cat screen)"
done
term 24 80 'convert --help' >screen
grep -q '^  --to keep' screen && grep -q -- '--max-shard-size' screen && grep -q 'ckpt help convert$' screen || fail screen
rc 0 convert --help; cp $OUT all; term 200 80 'convert --help' >screen; same all screen
term 24 80 'help convert' >screen; same all screen

# No line is wider than the terminal, or than 80 columns elsewhere; COLUMNS counts everywhere. What is told
# whole is the same words at every width.
words() { tr -s ' \n\\' '\n'; }
for c in '' inspect convert verify diff train study gate gather sign bench report formats completion; do
    [ "$(term 24 40 "$c --help" | wc -L)" -le 40 ] || fail "$c --help is wider than 40"
    for w in 40 60 80; do
        COLUMNS=$w rc 0 help $c; [ "$(wc -L <$OUT)" -lt $w ] || fail "help $c is wider than $w"
    done
    rc 0 help $c; [ "$(wc -L <$OUT)" -le 79 ] || fail "help $c is wider than 79 in a pipe"; words <$OUT >all
    COLUMNS=400 rc 0 help $c; words <$OUT >some; same some all
done
COLUMNS=400 rc 0 help train; out '^  ckpt train --resume mg4/ .* --save-every 100$'
term 24 80 'train --help' >screen; grep -A1 -e '--save \\$' screen | grep -q '^      run/ --save-every 100$' || fail "$(cat screen)"

# On a terminal tables and the progress line keep to its width; a pipe gets whole names and no bar.
k=$FIXTURES/hf/kimi_linear_tiny
term 24 80 "inspect $k" >screen
[ "$(sed 's/\x1b\[[0-9;]*m//g' screen | grep '^[A-Z].*NAME\|weight ' | wc -L)" -le 80 ] || fail "wider than 80: $(cat screen)"
grep -q '\.\.\.' screen || grep -q 'BYTES$' screen || fail "nothing is left out: $(head -12 screen)"
rc 0 inspect $k; out 'FILE$'; no_out '\.\.\.'
for w in 40 60 80; do
    term 24 $w formats >screen
    [ "$(wc -L <screen)" -le $w ] && grep -q '^  hf:kimi_linear  *kda mla mlp' screen || fail "formats at $w: $(cat screen)"
    term 24 $w "convert $k o --to torch_dist --layout megatron --tp 2 --dry-run" | sed 's/\x1b\[[0-9;]*m//g' >screen
    [ "$(grep -v 'bytes$' screen | wc -L)" -lt $w ] && grep -q 'written$' screen || fail "--dry-run at $w: $(head -5 screen)"
done
rc 0 convert $k o --to torch_dist --layout megatron --tp 2 --dry-run; cp $OUT all
words <all >some; words <screen >all; same some all
rc 0 formats; cp $OUT all; term 24 200 formats >screen; same all screen
st z.safetensors '{"t":{"dtype":"F32","shape":[500,64000],"data_offsets":[0,128000000]}}' 128000000
term 24 70 "convert z.safetensors out.h5 --to hdf5 --compress shuffle-deflate:9 --threads 1" | tr '\033' '\n' >screen
grep -qE '^\[Kconvert \[[#.]+\] +[0-9]+%  [0-9.]+ [kMG]B of [0-9.]+ [kMG]B  [0-9.]+ [kMG]B/s' screen || fail "no bar: $(head -c 400 screen)"
[ "$(grep '^\[Kconvert' screen | wc -L)" -le $((70 + 2)) ] || fail "the bar is too wide"
