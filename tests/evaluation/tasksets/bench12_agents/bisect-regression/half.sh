#!/bin/bash
# Repairs, but names the commit that git blame shows: the one that moved the code.
bash "$(dirname "$0")/full.sh"
cd /app/tally && git log --diff-filter=A --format=%H -- tally/output.py > /app/bad-commit.txt
