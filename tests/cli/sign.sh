# ckpt sign and verify --signature: what was signed passes, everything else is named.
k=$FIXTURES/hf/llama_tiny_tied
command -v openssl >/dev/null || { fail 'openssl is missing'; return; }
openssl ecparam -name prime256v1 -genkey -noout -out ec.pem; openssl ec -in ec.pem -pubout -out ec.pub 2>/dev/null
openssl ecparam -name prime256v1 -genkey -noout -out other.pem; openssl ec -in other.pem -pubout -out other.pub 2>/dev/null
openssl genpkey -algorithm ed25519 -out ed.pem; openssl pkey -in ed.pem -pubout -out ed.pub
openssl ecparam -name secp384r1 -genkey -noout -out p384.pem; openssl ec -in p384.pem -pubout -out p384.pub 2>/dev/null
rc 0 convert $k m; mkdir m/sub; echo text >m/sub/note.txt; echo own >m/.gitignore
for key in ec ed p384; do
    rc 0 sign m --key $key.pem --force; out "^5 files signed in m/model.sig, key [0-9a-f]{64}$"
    rc 0 verify m --signature $key.pub; out ', good signature, 5 files as signed$'
    rc 1 verify m --signature other.pub; out 'failed: m/model.sig: made with key [0-9a-f]{12}, not with [0-9a-f]{12} of other.pub'
done
rc 0 sign m --key ec.pem --force --json; out '"key":"[0-9a-f]{64}"'; out '"root":"[0-9a-f]{64}"'
rc 2 sign m --key ec.pem; one_line; err 'm/model.sig: exists already'
rc 0 sign m --key ec.pem --force --ignore sub --ignore sup; err '^ckpt: sign: warning: --ignore sup: m holds nothing of that name$'; [ "$(wc -l <$ERR)" -eq 1 ] || fail "$(cat $ERR)"; out '^4 files signed'
rc 0 sign m --key ec.pem --force
rc 2 sign m; one_line; err -- '--key FILE is missing'
rc 5 sign m --key no.pem --force; one_line; err 'no.pem: No such file'
rc 3 sign m --key ec.pub --force; one_line; err 'ec.pub: expected a private key in PEM'
rc 3 verify m --signature ec.pem; one_line; err 'ec.pem: expected a public key in PEM'
openssl ec -in ec.pem -aes256 -passout pass:x -out enc.pem 2>/dev/null; rc 3 sign m --key enc.pem --force </dev/null; one_line; err 'not encrypted'
openssl genrsa -out rsa.pem 2>/dev/null; rc 4 sign m --key rsa.pem --force; one_line; err 'expected a key for Ed25519 or ECDSA .*, found RSA'
# tampering, by name; the model is not parsed
cp m/config.json keep; echo ' ' >>m/config.json; rc 1 verify m --signature ec.pub; out '^failed: config.json: differs from the signed digest'; cp keep m/config.json
flip m/model.safetensors 70000; rc 1 verify m --signature ec.pub; out 'failed: model.safetensors: differs'; flip m/model.safetensors 70000
echo x >m/new.py; rc 1 verify m --signature ec.pub; out 'failed: new.py: was not signed'; rm m/new.py
mv m/sub/note.txt .; rc 1 verify m --signature ec.pub; out 'failed: sub/note.txt: was signed and is missing'; mv note.txt m/sub
ln -s ../keep m/link; rc 4 verify m --signature ec.pub; one_line; err 'm/link: a symbolic link cannot be signed'; rm m/link
rc 0 verify m --signature ec.pub --hash; out '5 files as signed, all digests match'
# the statement or the signature altered
cp m/model.sig keep.sig
python=$(command -v python3) || { fail 'python3 is missing'; return; }
alter() { "$python" - "$1" <<'PY'
import base64, json, sys
d = json.load(open("keep.sig"))
e = d["dsseEnvelope"]
p = base64.b64decode(e["payload"])
what = sys.argv[1]
if what == "payload":
    e["payload"] = base64.b64encode(p.replace(b"config.json", b"confog.json")).decode()
elif what == "sig":
    s = bytearray(base64.b64decode(e["signatures"][0]["sig"]))
    s[-1] ^= 1
    e["signatures"][0]["sig"] = base64.b64encode(s).decode()
elif what == "hint":
    d["verificationMaterial"]["publicKey"]["hint"] = ""
    e["signatures"][0]["sig"] = "AAAA"
elif what == "base64":
    e["payload"] = e["payload"][:-1] + "!"
elif what == "none":
    e["signatures"] = []
elif what == "type":
    e["payloadType"] = "text/plain"
json.dump(d, open("m/model.sig", "w"))
PY
}
for what in payload sig hint; do alter $what; rc 1 verify m --signature ec.pub; out 'failed: m/model.sig: the signature is not valid for ec.pub'; done
for what in base64 none; do alter $what; rc 3 verify m --signature ec.pub; one_line; err 'm/model.sig: no DSSE envelope with a signature'; done
alter type; rc 4 verify m --signature ec.pub; one_line; err "found 'text/plain'"
echo '{' >m/model.sig; rc 3 verify m --signature ec.pub; one_line; err 'm/model.sig'
rm m/model.sig; rc 5 verify m --signature ec.pub; one_line; err '^ckpt: verify: no signature: m/model.sig: No such file'
rc 2 verify m --signature-file keep.sig; one_line; err 'needs --signature KEY'
rc 0 verify m --signature ec.pub --signature-file keep.sig
# a single file, parts left out, a key's own check by openssl
rc 0 convert $k one.safetensors; rc 0 sign one.safetensors --key ed.pem; out '1 file signed in one.safetensors.sig'
rc 0 verify one.safetensors --signature ed.pub; flip one.safetensors 70000; rc 1 verify one.safetensors --signature ed.pub; out 'one.safetensors: differs from the signed'
rc 0 sign m --key ec.pem --ignore sub --signature s.sig; out '^4 files'; rc 0 verify m --signature ec.pub --signature-file s.sig
rc 2 sign m --key ec.pem --ignore ../x --force; one_line; err 'no path below'
# what --force must not replace: a key, anything that is no signature; the key stays as it is
cp ec.pem keep.pem; rc 2 sign m --key ec.pem --signature ec.pem --force; one_line; err 'ec.pem: exists and is no signature: --force does not replace it'; cmp -s ec.pem keep.pem || fail 'the key is gone'
echo '{}' >j.json; rc 2 sign m --key ec.pem --signature j.json --force; one_line; rc 2 sign m --key ec.pem --signature m --force; one_line
rc 0 sign m --key ec.pem --signature s.sig --force
ln -s s.sig link.sig; rc 2 sign m --key ec.pem --signature link.sig --force; one_line; err 'link.sig: is a symbolic link: --force does not replace it$'; [ -L link.sig ] || fail 'the link is gone'
# two at a time: whichever is later refuses, though it looked before the other wrote
truncate -s 32M m/pad.bin
for key in ec p384; do { "$CKPT" sign m --key $key.pem --signature two.sig >$key.out 2>$key.err; echo "$? $key" >$key.rc; } & done; wait
[ "$(cut -d' ' -f1 ec.rc p384.rc | sort | tr '\n' ' ')" = '0 2 ' ] || fail "two at a time: $(cat ec.rc p384.rc ec.err p384.err)"
won=$(awk '$1 == 0 { print $2 }' ec.rc p384.rc); [ "$won" = ec ] && lost=p384 || lost=ec
grep -qx 'ckpt: sign: two.sig: exists already (--force replaces it)' $lost.err || fail "$(cat $lost.err)"
rc 0 verify m --signature "$won.pub" --signature-file two.sig; rm m/pad.bin
# what the signature leaves out is told; a file that the checkpoint is read from is a warning
rc 0 convert $k part; mkdir part/tokens; for n in a b c; do echo $n >part/$n.txt; done
rc 0 sign part --key ec.pem --ignore config.json --ignore model.safetensors; flip part/model.safetensors 70000
rc 0 verify part --signature ec.pub; out ', good signature, 5 files as signed; the signature leaves out config.json, model.safetensors$'
out '^warning: the signature does not cover what the checkpoint is read from: config.json, model.safetensors$'
rc 0 verify part/ --signature ec.pub --json; out '"signature":\{"good":true,"file":"part/model.sig","files":5,"ignored":\["config.json","model.safetensors"\]\},"problems":\[\],"warnings":\["the signature does not cover'
rc 1 verify part --signature ec.pub --strict; out '^FAILED: 0 problems, 1 warning$'
echo x >>part/a.txt; rc 1 verify part --signature ec.pub --json; out '"signature":\{"good":false,"file":"part/model.sig","files":5,'
rc 1 verify part --signature other.pub --json; out '"signature":\{"good":false,"file":"part/model.sig","files":0,"ignored":\[\]\}'
rc 0 sign part --key ec.pem --force --ignore tokens --ignore a.txt --ignore b.txt --ignore c.txt
rc 0 verify part --signature ec.pub --strict; out ' as signed; the signature leaves out tokens, a.txt, b.txt and 1 more$'; no_out warning
rc 0 sign part --key ec.pem --force; echo x >part/.gitignore; rc 0 verify part --signature ec.pub --json; out '"good":true,.*"ignored":\[\]\}'
rc 0 verify part --signature ec.pub; no_out 'leaves out'
# names that JSON cannot hold: refused here, not when it is verified
bad=$'caf\xe9.txt'; echo x >"m/$bad"
rc 3 sign m --key ec.pem --signature u.sig; one_line; err 'file .caf.*\.txt. is not UTF-8'; absent u.sig; rm "m/$bad"
echo x >m/café.txt; rc 0 sign m --key ec.pem --signature u.sig; rc 0 verify m --signature ec.pub --signature-file u.sig

# What nothing could verify is not signed: two checkpoints in one directory, a save root of several formats
rc 0 convert $k two --layout keep; rc 0 convert $k dcp --to torch_dist --layout keep; cp -r dcp/. two
rc 2 sign two --key ed.pem; one_line; err 'two: may be safetensors and torch_dist: keep each in a directory of its own; nothing could verify a signature of it$'
absent two/model.sig
mkdir formats; mv two/__0_0.distcp formats; mkdir -p formats/hdf5 formats/torch_dist-2 formats/zarr; echo 2 >formats/hdf5/latest_checkpointed_iteration.txt; echo 2 >formats/torch_dist-2/latest_checkpointed_iteration.txt
rc 2 sign formats --key ed.pem; one_line; err 'formats: saves of 2 formats, a directory each: choose one of formats/hdf5, formats/torch_dist-2; nothing'
mkdir notes; echo x >notes/README.md; rc 3 sign notes --key ed.pem; one_line; err 'notes: expected a .* found README.md; nothing could verify'

# Loops of links: told, also where they lead nowhere or down many ways; links to one directory are none
rc 0 convert $k links; mkdir links/a; echo x >links/a/x; ln -s ../a links/a/up; ln -s ../a links/a/up2
rc 4 sign links --key ed.pem --allow-symlinks; one_line; err 'links/a/up: a symbolic link back to a directory above it, a loop$'
rm links/a/up links/a/up2; ln -s . links/self; rc 4 sign links --key ed.pem --allow-symlinks; one_line; err 'links/self: a symbolic link back'
rm links/self; ln -s y links/x; ln -s x links/y; rc 5 sign links --key ed.pem --allow-symlinks; one_line; err 'links/x: Too many levels of symbolic links'
rm links/x links/y; ln -s a links/b; ln -s a links/c; rc 0 sign links --key ed.pem --allow-symlinks; out '^7 files signed'
rc 0 verify links --signature ed.pub
for i in $(seq 24); do mkdir many$i; ln -s ../many$((i + 1)) many$i/l; ln -s ../many$((i + 1)) many$i/r; done; mkdir many25; echo x >many25/x
ln -s ../many1 links/many; rc 4 sign links --key ed.pem --allow-symlinks --force; one_line; err 'symbolic links lead to more than 131072 files and directories'
