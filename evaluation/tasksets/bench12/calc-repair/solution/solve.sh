#!/bin/bash
set -euo pipefail
cd /app
git apply "$(cd "$(dirname "$0")" && pwd)/calc.patch"
python3 -B -m calc '10 - 2 - 3'
python3 -B -m calc '2 ** 3 ** 2'
