"""The GitHub action and the GitLab file of tools/ci: valid by the schemas of both (check-jsonschema
carries them), and the action's last step, run as GitHub would, fails exactly when the gate does.

usage: ci_action.py CKPT WORK
"""
import json
import os
import subprocess
import sys

import yaml

ckpt, work = os.path.abspath(sys.argv[1]), sys.argv[2]
os.makedirs(work, exist_ok=True)
tool = [os.path.join(os.path.dirname(sys.executable), "check-jsonschema"), "--builtin-schema"]
subprocess.run(tool + ["vendor.github-actions", "tools/ci/action.yml"], check=True)
subprocess.run(tool + ["vendor.gitlab-ci", "tools/ci/gitlab.yml"], check=True)

with open("tools/ci/action.yml") as f:
    steps = {s.get("id"): s for s in yaml.safe_load(f)["runs"]["steps"]}
source = os.path.abspath("fixtures/hf/llama3_tiny")
root = "a5f0f6f55ab052506401ab24551bc14254bfa633a6494057f2b5b11aceedaeba"
for name, pinned, want in (("good", root, 0), ("bad", root[::-1], 1)):
    gate = {"gate": 1, "sources": {"a": {"path": source, "root": pinned}},
            "cases": [{"source": "a", "checks": ["structure", "hash"]}]}
    temp = os.path.join(work, name)
    os.makedirs(temp, exist_ok=True)
    with open(os.path.join(temp, "gate.json"), "w") as f:
        json.dump(gate, f)
    env = dict(os.environ, CKPT=ckpt, GATE_FILE="gate.json", GATE_CACHE="cache", GATE_OPTIONS="--jobs 1",
               RUNNER_TEMP=os.path.abspath(temp), GITHUB_OUTPUT="output", GITHUB_STEP_SUMMARY="summary.md")
    r = subprocess.run(["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", steps["gate"]["run"]], cwd=temp,
                       env=env, stdout=subprocess.PIPE, text=True)
    assert r.returncode == want, (name, r)
    assert ("::error file=gate.json,line=1,title=a::" in r.stdout) == (want == 1), r.stdout
    with open(os.path.join(temp, "output")) as f:
        outputs = dict(line.strip().split("=", 1) for line in f)
    with open(outputs["sarif"]) as f:
        assert len(json.load(f)["runs"][0]["results"]) == 2 * want
    assert os.path.exists(outputs["junit"]) and os.path.exists(os.path.join(temp, "summary.md"))
print("action and GitLab file valid; the action's step ends with 0 and 1")
