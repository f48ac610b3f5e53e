# A declared matrix: passes, every kind of failure, reports in four forms, the cache, refusals.
export TMPDIR=$PWD
l=$FIXTURES/mcore/legacy_tp2
lroot=7031e0c8bac60f3a7558d63b24a539874278fe1efd917859afd2126f086ccdf8
scratch() { ! ls -d ckpt-gate.* >/dev/null 2>&1 || fail "left: $(ls -d ckpt-gate.*)"; }
gate() { printf '{"gate": 1,\n "sources": {"a":\n {"path": "%s", "root": "%s"},\n "b": {"path": "copy"}},\n' "$l" "${2:-$lroot}" >g.json
    printf '"targets": {"re": {"to": "torch_dist", "mesh": [{"tp": 1}, {"tp": 4}]}, "hf": {"to": "safetensors", "layout": "hf"}},\n' >>g.json
    printf '"commands": {"say": ["sh", "-c", "test -e \\"$0\\" && echo %s >&2 && exit %s", "{path}/"], "slow": ["sleep", "60"]},\n' "${3:-loaded}" "${4:-0}" >>g.json
    printf '"cases": [%s]}\n' "$1" >>g.json; }

# everything at once, and again from the cache
gate '{"source": "a", "checks": ["structure", "hash"]}, {"source": "a", "target": "re", "load": "say", "checks": ["hash", "roundtrip", "forward", "gradients"]}'
rc 0 gate g.json --cache cache --junit j.xml --sarif s.json; silent; scratch
out '^ok    a -> re, tp 4  convert hash roundtrip forward gradients load say'; out '^3 cases, 14 checks: 14 passed, 0 failed'
rc 0 gate g.json --cache cache; out '14 passed \(10 cached\)'
rc 0 gate g.json --cache cache --only 'a' --json; out '"cached":2'; out '"ok":true\}$'
rc 2 gate g.json --only 'zzz'; one_line; err 'no case matches'
rc 0 gate g.json --list; out '^a -> re, tp 1: convert hash roundtrip forward gradients load$'
rc 2 gate g.json --list --junit x; one_line; err '--list runs nothing'; absent x

# another pinned root; reports name case, check, file and line
gate '{"source": "a", "target": "re", "checks": "hash"}' ${lroot/7/8}
rc 1 gate g.json --cache cache --github --junit j.xml --sarif s.json; silent; scratch
out "root is $lroot, pinned is 8"; out '^::error file=g.json,line=2,title=a -> re%2C tp 1::convert: root is'
GITHUB_STEP_SUMMARY=sum.md; export GITHUB_STEP_SUMMARY; rc 1 gate g.json --github --quiet; unset GITHUB_STEP_SUMMARY
grep -q '^| \*\*FAIL\*\* | a -\\> re, tp 4 | ' sum.md || fail "summary: $(cat sum.md)"
python3 - <<'END' || fail 'reports'
import json, xml.etree.ElementTree as E
s = E.parse('j.xml').getroot().find('testsuite')
c = s.findall('testcase')
assert (s.get('tests'), s.get('failures')) == ('4', '4') and len(c) == 4, s.attrib
assert c[0].get('classname') == 'a -> re, tp 1' and c[0].get('name') == 'convert' and 'pinned' in c[0].find('failure').get('message')
assert c[1].get('name') == 'hash' and c[1].find('failure').get('message') == 'not run: the source failed'
d = json.load(open('s.json'))
r = d['runs'][0]['results']
rules = d['runs'][0]['tool']['driver']['rules']
assert d['version'] == '2.1.0' and len(r) == 4
for x in r:
    assert rules[x['ruleIndex']]['id'] == x['ruleId'] and x['level'] == 'error'
    p = x['locations'][0]['physicalLocation']
    assert p['artifactLocation']['uri'] == 'g.json' and p['region']['startLine'] == 2
END
rc 1 gate g.json --json; out '"failed":4'; out '"ok":false\}$'; out '"message":"root is'

# a source without root and manifest; damage; a target whose conversion is refused
cp -r "$FIXTURES/hf/llama3_tiny" copy
gate '{"source": "b", "checks": "hash"}'; rc 1 gate g.json; out 'neither a pinned root nor a manifest'
rc 0 verify copy --write; rc 0 gate g.json --cache cache; flip copy/model.safetensors 5000
rc 1 gate g.json --cache cache; out 'FAIL  b'; rm -r copy
rc 1 gate g.json; out 'No such file'
gate '{"source": "a", "target": "hf", "checks": ["structure", "forward"]}'; rc 1 gate g.json; scratch
out 'convert: .*mla_gate'; out 'structure: not run: the conversion failed'
rc 1 gate g.json --keep; err 'outputs of what failed'; rm -r ckpt-gate.*
gate '{"source": "a", "target": "hf", "refuse": {"exit": 4, "message": "mla_gate"}}'; rc 0 gate g.json; out 'refuse'
gate '{"source": "a", "target": "re", "refuse": {"exit": 4}}'; rc 1 gate g.json; out 'exit 0, expected 4: it was not refused'
gate '{"source": "a", "target": "hf", "refuse": {"exit": 4, "message": "zebra"}}'; rc 1 gate g.json; out "not with 'zebra'"

# commands of peers: they fail, hang, or are not there
gate '{"source": "a", "load": "say"}' $lroot 'no such key' 3; rc 1 gate g.json; out 'load say: sh: no such key'
gate '{"source": "a", "load": "slow", "timeout": 1}'; rc 1 gate g.json; out 'still running after 1 s'; scratch
# training goes on from what was converted
gate '{"source": "a", "target": "re", "resume": {"data": "'"$FIXTURES/fla/corpus.txt"'", "steps": [1, 2], "options": ["--seq-len", "16", "--batch", "1"]}}'
rc 0 gate g.json --only '*tp 1'; out 'convert resume'; scratch

# interrupted: its steps end with it, and nothing is left
gate '{"source": "a", "load": "slow"}'
"$CKPT" gate g.json >int.txt 2>&1 & pid=$!
for _ in $(seq 100); do ls -d ckpt-gate.* >/dev/null 2>&1 && break; sleep 0.02; done
sleep 0.5; kill -INT $pid 2>/dev/null || true; kill -TERM $pid; wait $pid; got=$?; [ $got -eq 130 ] || fail "interrupt: $got"; scratch

# what is wrong with the file
bad() { printf '%s' "$1" >g.json; rc 3 gate g.json; one_line; err "$2"; }
bad '{' 'g.json: '
bad '{"gate": 2, "cases": []}' "'gate' is not 1"
bad '{"gate": 1, "surces": {}, "cases": []}' "unknown member 'surces'; did you mean 'sources'"
bad '{"gate": 1, "cases": []}' 'at least one case'
bad '{"gate": 1, "sources": {"a": {}}, "cases": [{}]}' "source 'a': no 'path'"
bad '{"gate": 1, "sources": {"a": {"path": "x", "root": "12"}}, "cases": [{}]}' "source 'a': 'root' is not 64"
bad '{"gate": 1, "cases": [{"checks": "hash"}]}' "case 1: no 'source'"
bad '{"gate": 1, "sources": {"a": {"path": "x"}}, "cases": [{"source": "b", "checks": "hash"}]}' "no source 'b'"
bad '{"gate": 1, "sources": {"a": {"path": "x"}}, "cases": [{"source": "a", "checks": "hush"}]}' "check 'hush'"
bad '{"gate": 1, "sources": {"a": {"path": "x"}}, "cases": [{"source": "a"}]}' 'nothing is checked'
bad '{"gate": 1, "sources": {"a": {"path": "x"}}, "cases": [{"source": "a", "load": "p"}]}' "no command 'p'"
bad '{"gate": 1, "sources": {"a": {"path": "x"}}, "cases": [{"source": "a", "checks": "roundtrip"}]}' "'roundtrip' needs a 'target'"
bad '{"gate": 1, "sources": {"a": {"path": "x"}}, "cases": [{"source": "a", "resume": {"data": "d", "steps": [3, 3]}}]}' "not \[K, N\]"
bad '{"gate": 1, "sources": {"a": {"path": "x"}}, "targets": {"t": {"mesh": []}}, "cases": [{"source": "a", "checks": "hash"}]}' "target 't': 'mesh' is empty"
bad '{"gate": 1, "sources": {"a": {"path": "x"}}, "cases": [{"source": "a", "checks": "hash", "refuse": {"exit": 3}}]}' 'cannot be checked further'
bad '{"gate": 1, "targets": {"t": {"to": "zip"}}, "cases": [{}]}' "target 't': option '--to': 'zip' is not one of keep.safetensors"
bad '{"gate": 1, "targets": {"t": {"layout": "llama"}}, "cases": [{}]}' "target 't': option '--layout': 'llama' is not one of "
bad '{"gate": 1, "targets": {"t": {"options": ["--dtpe", "f32"]}}, "cases": [{}]}' "target 't': unknown option '--dtpe'; did you mean '--dtype'"
bad '{"gate": 1, "targets": {"t": {"options": ["x"]}}, "cases": [{}]}' "target 't': unexpected operand 'x'"
bad '{"gate": 1, "sources": {"a": {"path": "x"}}, "cases": [{"source": "a", "resume": {"data": "d", "steps": [1, 2], "options": ["--seqlen", "8"]}}]}' "case 1: 'resume': 'options': unknown option '--seqlen'"
bad '{"gate": 1, "sources": {"a": {"path": "x"}}, "cases": [{"source": "a", "target": "t", "checks": "hash"}]}' "case 1: 'target': no target 't'"
bad '{"gate": 1, "commands": {"p": ["cat", "{pth}/x"]}, "cases": [{}]}' "command 'p': '\\{pth}' is none of \\{path}, \\{source}, \\{dir}; \\{\\{ stands for a brace"
# a brace of its own; another one is what it is
printf '{"gate": 1, "sources": {"a": {"path": "%s", "root": "%s"}}, "commands": {"p": ["sh", "-c", "test \\"$*\\" = \\"$0\\"", "{{pth} {1} {} {{", "{{pth} {1} {} {{"]}, "cases": [{"source": "a", "load": "p"}]}' "$l" "$lroot" >g.json
rc 0 gate g.json
rc 5 gate nowhere.json; one_line
# the committed matrix itself is a stage of CI
rc 0 gate "$FIXTURES/gate.json" --list; out '^kda-legacy-tp1: structure hash forward gradients$'
# What could not be written at the end is said before anything runs.
echo '{"gate": 1, "sources": {"a": {"path": "x"}}, "cases": [{"source": "a", "checks": "hash"}]}' >late.json
rc 5 gate late.json --junit nowhere/x.xml; one_line; err 'a report: nowhere: No such file'
rc 2 gate late.json --junit same --sarif same; one_line; err "'--junit' and '--sarif' name one file, same"
