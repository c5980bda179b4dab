#!/bin/sh
# The script that was to be repaired runs here, and what it leaves is judged by test.sh when it has ended.
rm -rf .check && mkdir -p .check/from || exit 1
echo one > ".check/from/a b.txt"
echo two > .check/from/c.txt
sh backup.sh .check/from .check/new/to > .check/said 2>&1
