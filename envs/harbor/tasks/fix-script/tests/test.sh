#!/bin/sh
tests=${TESTS_DIR:-/tests} logs=${LOGS_DIR:-/logs/verifier}
[ -n "$BEFORE_DONE" ] || sh "$tests/before.sh"  # where nobody has run it, as in Harbor itself
reward=0
is() { [ "$(cat "$1" 2>/dev/null)" = "$2" ]; }
if is .check/said 2 && is ".check/new/to/a b.txt" one && is .check/new/to/c.txt two; then
  reward=1
fi
rm -rf .check
echo "$reward" > "$logs/reward.txt"
