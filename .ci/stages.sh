# What .ci/run and .ci/nightly are made of: stages, one after another. Sourced.
set -uo pipefail
export CI=true
exec </dev/null

logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
summary=()
longest=()
passed=0
failed=0

# stage NAME [VARIABLE=VALUE...] COMMAND...: counts the cases of its last line `N passed, N failed`; a stage
# without such a line is one case. The first stage that fails is the last, unless KEEP_GOING is set.
stage() {
  local name=$1 start=$SECONDS status=0 count command line
  shift
  command=$(printf ' %q' "$@")
  printf '\n=== %s:%s\n' "$name" "$command"
  env "$@" 2>&1 | tee "$logs/$name" || status=$?
  count=$(grep -xE '[0-9]+ passed, [0-9]+ failed' "$logs/$name" | tail -n 1)
  [ -n "$count" ] ||
    { [ "$status" -eq 0 ] && count='1 passed, 0 failed' || count='0 passed, 1 failed'; }
  line=$(grep '^longest: ' "$logs/$name" | tail -n 1)
  [ -z "$line" ] || longest+=("$(printf '%-8s %s' "$name" "$line")")
  passed=$((passed + ${count%% *}))
  count=${count#*, }
  failed=$((failed + ${count%% *}))
  if [ "$status" -eq 0 ]; then
    summary+=("$(printf '%4d s %-8s passed' $((SECONDS - start)) "$name")")
    return
  fi
  [ "$failed" -gt 0 ] || failed=1
  summary+=("$(printf '%4d s %-8s FAILED; to see it again:%s' $((SECONDS - start)) "$name" "$command")")
  if [ -z "${KEEP_GOING:-}" ]; then
    finish
    exit 1
  fi
}

# without NAME REASON: a stage that this machine cannot run.
without() {
  summary+=("$(printf '   - s %-8s left out: %s' "$1" "$2")")
}

# What took longest first. The exit status tells whether all passed.
finish() {
  printf '\n=== summary (%s s)\n' "$SECONDS"
  printf '%s\n' "${summary[@]}" | sort -rn
  printf '%s\n' ${longest[@]+"${longest[@]}"} "$passed passed, $failed failed"
  [ "$failed" -eq 0 ]
}
