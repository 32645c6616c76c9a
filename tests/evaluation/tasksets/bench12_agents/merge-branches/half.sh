#!/bin/bash
# Solves the conflicts, but not what merges cleanly and is wrong: the labels know no currency.
sed -i '/"shop\/labels.py",/,/^)/{s/^)/)\n/;/("/d}' "$(dirname "$0")/full.sh"
bash "$(dirname "$0")/full.sh"
