#!/bin/bash
set -euo pipefail
cd /app
head -n 3 customers.csv orders.jsonl
python3 "$(dirname "$0")/ledger.py"
