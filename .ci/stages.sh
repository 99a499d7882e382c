# What .ci/run and .ci/nightly are made of: stages, one after another, until one fails. Sourced.
set -uo pipefail
export CI=true
exec </dev/null

logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
summary=()
passed=0
failed=0

# stage NAME COMMAND...: counts the cases of its last line `N passed, N failed`; a stage without such a
# line is one case.
stage() {
  local name=$1 start=$SECONDS status=0 count command
  shift
  command=$(printf ' %q' "$@")
  printf '\n=== %s:%s\n' "$name" "$command"
  "$@" 2>&1 | tee "$logs/$name" || status=$?
  count=$(grep -xE '[0-9]+ passed, [0-9]+ failed' "$logs/$name" | tail -n 1)
  [ -n "$count" ] ||
    { [ "$status" -eq 0 ] && count='1 passed, 0 failed' || count='0 passed, 1 failed'; }
  passed=$((passed + ${count%% *}))
  count=${count#*, }
  failed=$((failed + ${count%% *}))
  if [ "$status" -eq 0 ]; then
    summary+=("$(printf '%-8s passed in %4d s' "$name" $((SECONDS - start)))")
    return
  fi
  [ "$failed" -gt 0 ] || failed=1
  summary+=("$(printf '%-8s FAILED in %4d s; to see it again:%s' "$name" $((SECONDS - start)) "$command")")
  finish
}

finish() {
  printf '\n=== summary (%s s)\n' "$SECONDS"
  printf '%s\n' "${summary[@]}" "$passed passed, $failed failed"
  [ "$failed" -eq 0 ]
  exit
}
