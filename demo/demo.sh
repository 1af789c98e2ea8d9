#!/usr/bin/env bash
# One job end to end, with nothing but curl as the client: what `make demo` runs.
#
# Torchstone starts on a free port in a scratch folder. The chapter's MLP is timed eagerly, scripted and traced, 1,000
# calls each. The TorchScript files are downloaded, checked against the digests that the service declares, and run by a
# process that cannot import Torchstone. Everything is stopped again. Exit code 0 only if all of that was true.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
bin="$here/../.venv/bin"
step() { printf '\n== %s\n' "$*"; }
fail() { printf 'demo: %s\n' "$*" >&2; exit 1; }
get() { curl --silent --show-error --fail-with-body --noproxy '*' --max-time 120 "$@"; }
field() { "$bin/python" -c 'import json, sys; print(json.load(sys.stdin)[sys.argv[1]])' "$1"; }

command -v curl >/dev/null || fail "curl is needed, and is not on PATH: install it (Debian: apt-get install curl)"
[ -x "$bin/torchstone" ] || fail "Torchstone is not installed in .venv: run 'make setup' first"
for name in "${!TORCHSTONE_@}"; do unset "$name"; done # the demo uses its own database, broker and folder

scratch="$(mktemp -d)"
export TORCHSTONE_DEMO="$scratch" # inherited by everything started here: how leftovers are found
up_pid=""
left() {
  "$bin/python" - "$scratch" <<'PY'
import os, sys, psutil
for process in psutil.process_iter():
    try:
        marked = process.environ().get("TORCHSTONE_DEMO") == sys.argv[1]
        if marked and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
            print(process.pid, " ".join(process.cmdline()))
    except psutil.Error:
        pass
PY
}
clean_up() {
  status=$?
  trap - EXIT INT TERM
  if [ -n "$up_pid" ]; then
    kill -TERM "$up_pid" 2>/dev/null || true
    wait "$up_pid" 2>/dev/null || true
  fi
  if [ "$status" != 0 ] && [ -s "$scratch/up.log" ]; then
    printf '\nThe last lines of torchstone up:\n' >&2
    tail -n 30 "$scratch/up.log" >&2
  fi
  rm -rf "$scratch"
  exit "$status"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

step "torchstone up, on a free port, in a scratch folder"
: >"$scratch/up.log"
"$bin/torchstone" up --port 0 --data "$scratch/data" >"$scratch/up.log" 2>&1 &
up_pid=$!
deadline=$((SECONDS + 90))
until url="$(sed -n 's/.*ready in .* s: \(http[^ ]*\).*/\1/p' "$scratch/up.log")" && [ -n "$url" ]; do
  kill -0 "$up_pid" 2>/dev/null || fail "torchstone up ended before it was ready"
  [ "$SECONDS" -lt "$deadline" ] || fail "torchstone up was not ready within 90 s"
  sleep 0.05
done
grep '^torchstone' "$scratch/up.log" | sed 's/^torchstone *| //'

step "POST the chapter's MLP, 512-256-128-2, batch 1, 1,000 calls"
cat >"$scratch/spec.json" <<'JSON'
{
  "kind": "jit",
  "name": "the chapter's MLP",
  "model": {"preset": "mlp"},
  "variants": ["eager", "script", "trace"],
  "batch_sizes": [1],
  "calls": 1000
}
JSON
cat "$scratch/spec.json"
job="$(get -X POST "$url/v1/jobs" -H 'Content-Type: application/json' --data-binary "@$scratch/spec.json")"
id="$(field id <<<"$job")"
echo "-> job $id"

step "Poll it"
deadline=$((SECONDS + 300))
state=queued
shown=""
while [ "$state" = queued ] || [ "$state" = running ]; do
  [ "$SECONDS" -lt "$deadline" ] || fail "the job was not finished within 300 s"
  job="$(get "$url/v1/jobs/$id?wait=0.3")"
  state="$(field state <<<"$job")"
  line="$("$bin/python" -c '
import json, sys
job = json.load(sys.stdin)
progress = (job["progress"] or {}) if job["state"] == "running" else {}
waiting = job["waiting_for"] or {}
done, total, unit = progress.get("done"), progress.get("total"), progress.get("unit")
share = f"{done:g}/{total:g} {unit}" if total else ""
print("  " + " ".join(filter(None, [job["state"], share, progress.get("message") or waiting.get("reason") or ""])))
' <<<"$job")"
  if [ "$line" != "$shown" ]; then echo "$line"; fi
  shown="$line"
done
[ "$state" = succeeded ] || fail "the job is $state: $(field error <<<"$job")"

step "GET result.txt"
get "$url/v1/jobs/$id/result.txt"

step "Download the TorchScript, and check it against Repr-Digest"
mkdir "$scratch/elsewhere"
for name in script.pt trace.pt; do
  get --dump-header "$scratch/headers" --output "$scratch/elsewhere/$name" "$url/v1/jobs/$id/artifacts/$name"
  "$bin/python" - "$scratch/headers" "$scratch/elsewhere/$name" <<'PY'
import base64, hashlib, pathlib, re, sys
headers, file = map(pathlib.Path, sys.argv[1:])
declared = re.search(r"(?im)^repr-digest:\s*sha-256=:([^:]+):", headers.read_text())
assert declared, "the answer carries no Repr-Digest"
sha256 = hashlib.sha256(file.read_bytes()).digest()
assert base64.b64decode(declared[1]) == sha256, f"{file.name}: the bytes do not match Repr-Digest"
print(f"  {file.name}  {file.stat().st_size:,} bytes  sha256 {sha256.hex()}  as declared")
PY
done

step "Run it in a fresh process that has none of Torchstone's code on its path"
site="$("$bin/python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')"
cp "$here/same_outputs.py" "$scratch/elsewhere/"
(cd "$scratch/elsewhere" && "$bin/python" -I -S same_outputs.py "$site" script.pt trace.pt)

step "Stop everything"
kill -TERM "$up_pid"
wait "$up_pid" || fail "torchstone up ended with exit code $?"
up_pid=""
leftovers="$(left)"
[ -z "$leftovers" ] || fail "still running: $leftovers"
echo "  stopped, and no process is left"
