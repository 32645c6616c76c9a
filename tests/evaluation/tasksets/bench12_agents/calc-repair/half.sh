#!/bin/bash
# Resolves the issues of parsing, not those of computing (short circuit, exceptions).
cd /app && git apply --exclude=calc/evaluate.py "$(dirname "$0")/calc.patch"
