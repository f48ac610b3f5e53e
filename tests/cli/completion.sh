# Completion scripts and manual pages come from the option tables.
rc 0 completion bash; silent; out 'compgen'; cp $OUT c.bash; bash -n c.bash || fail 'syntax'
words() { bash -c 'source ./c.bash; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _ckpt; echo "${COMPREPLY[*]}"' _ "$@"; }
[ "$(words ckpt insp)" = inspect ] || fail 'command'
[ "$(words ckpt convert --kda-f)" = --kda-f-lora-rank ] || fail 'option'
[ "$(words ckpt convert --layout m)" = megatron ] || fail 'choice'
[ "$(words ckpt convert --layout = m)" = megatron ] || fail 'choice after ='
[ "$(words ckpt convert --color =)" = 'auto always never' ] || fail 'choices after ='
[ "$(words ckpt completion f)" = fish ] || fail 'shell'
[ "$(words ckpt diff --color n)" = never ] || fail 'choice of every command'
rc 0 completion zsh; out "^#compdef ckpt$"; out "'--to=\["
rc 0 completion fish; out "^complete -c ckpt .* -l max-shard-size -x"
rc 0 completion man; out '^\.TH CKPT 1'; out 'ckpt.-gate'
rc 0 completion man:convert; out '^\.B .*max.-shard.-size'; out '^\.SH EXIT STATUS'
# every option of every command is in its page and in all scripts
for c in inspect convert verify diff train gate sign report; do
    "$CKPT" completion man:$c >page
    for o in $("$CKPT" $c --help | sed -n 's/^  --\([a-z0-9-]*\).*/\1/p'); do
        grep -qF -- "\\-\\-${o//-/\\-}" page || fail "man:$c lacks --$o"
        grep -qF -- " --$o" c.bash || fail "bash lacks --$o"
    done
done
rc 2 completion csh; one_line; err "'csh' is not one of"
rc 2 completion man:convrt; one_line; err "did you mean 'convert'"
rc 0 completion bash --json; out '"text":"# bash'
rc 0 --version; out '^ckpt [0-9.]+$'; out '^built with HDF5 [0-9.]+, '; out '^MPI: '; out '^CUDA and NCCL: '; out '^this processor: '
