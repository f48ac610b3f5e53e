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
rc 0 bench --help; silent; out 'not built yet'
rc 4 bench x; one_line; err "^ckpt: bench: not built yet$"
