# One page from metrics and documents: self-contained, well-formed, escaped; wrong input is named.
k=$FIXTURES/hf/kimi_linear_tiny
mkdir a b
for i in 1 2 3 4; do echo "{\"step\":$i,\"loss\":$((10 - i)).5,\"grad_norm\":$((100 / i)),\"lr\":0.00$i,\"tokens_per_second\":100}"; done >a/metrics.jsonl
{ echo '{"event":"start","step":2,"from":"a/<b>"}'; sed -n 3,4p a/metrics.jsonl; printf '{"step":5,"lo'; } >b/metrics.jsonl
rc 0 convert $k n.safetensors --dtype bf16
rc 1 diff $k n.safetensors --json; cp $OUT d.json
rc 0 verify $k --forward --json; cp $OUT v.json
rc 0 convert $FIXTURES/mcore/legacy_tp2 x --to torch_dist --tp 4 --dry-run --json; cp $OUT c.json
OMP_NUM_THREADS=1 rc 0 study $FIXTURES/fla/kda_trained --data $FIXTURES/fla/corpus.txt --seq-len 64 --blocks 2 \
    --threads 1 --only fp8_operands --json; cp $OUT s.json
rc 0 report a b/metrics.jsonl d.json v.json c.json s.json --title 'x & <y>'; silent; out '^ckpt-report.html: '
python3 - <<'END' || fail 'page'
import re
from html.parser import HTMLParser
t = open('ckpt-report.html').read()
assert 'http' not in re.sub(r'http-equiv', '', t) and '<script' not in t and ' src=' not in t
class P(HTMLParser):
    void = {'meta', 'link'}
    def __init__(s):
        super().__init__(); s.stack = []; s.n = {}
    def handle_starttag(s, tag, a):
        s.n[tag] = s.n.get(tag, 0) + 1
        if tag not in s.void: s.stack.append(tag)
        if tag == 'svg': assert dict(a).get('role') == 'img' and dict(a).get('aria-label')
        if tag == 'div' and 'scroll' in dict(a).get('class', ''): assert dict(a)['tabindex'] == '0'
    def handle_startendtag(s, tag, a): s.n[tag] = s.n.get(tag, 0) + 1
    def handle_endtag(s, tag): assert s.stack.pop() == tag, tag
p = P(); p.feed(t); assert not p.stack, p.stack
assert p.n['svg'] >= 4 + 2 + 12 + 2 and p.n['circle'] == 4 and 'fp8_operands: 0.00' in t and p.n['path'] == 8 and '<title>x &amp; &lt;y&gt;</title>' in t and 'a/&lt;b&gt;' in t
assert 'blocks.0.kda.q.weight' in t and 'in_proj' in t and 'prefers-color-scheme:dark' in t
END
rc 2 report a; one_line; err 'exists already'
rc 0 report a --force --out o.html --json; out '"page":"o.html"'
rc 5 report nowhere --out p; one_line; err 'nowhere'
echo '{' >bad; rc 3 report bad --out p; one_line; err 'bad: line 1'; absent p
rc 0 inspect $k --json; cp $OUT i.json; rc 3 report i.json --out p; one_line; err "document of 'inspect'"
: >empty; rc 3 report empty --out p; one_line; err 'empty'
rc 2 report; one_line; err 'missing operand'
echo '[]' >array; rc 3 report array --out p; one_line; err 'array: line 1: expected an object'; absent p
