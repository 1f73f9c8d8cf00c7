#!/usr/bin/env bash
# Runs a command, and fails if it left a file in the checkout that git neither tracks nor ignores.
set -uo pipefail
others() { git -C "$(dirname "$0")/.." ls-files --others --exclude-standard | sort; }
before=$(others)
"$@" || exit
if left=$(comm -13 <(echo "$before") <(others)) && [ -n "$left" ]; then
    echo "the tests left files behind, expected none: write them to tmp_path:" $left >&2
    exit 1
fi
