#!/bin/bash
set -euo pipefail
cd /app
cat complaints.txt
head -n 4 logs/*.log
python3 "$(dirname "$0")/hunt.py"
