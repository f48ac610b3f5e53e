# The tables of the README are those of the program.
rc 0 formats; silent; out '`hf:kimi_linear` \| yes'
sed -n '/<!-- ckpt formats -->/,/<!-- end -->/p' "$FIXTURES/../README.md" | sed '1d;$d' >readme.md
same readme.md $OUT
rc 0 formats --json; out '"name": *"torch_dist"'
rc 2 formats x; one_line
