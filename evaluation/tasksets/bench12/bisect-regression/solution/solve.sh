#!/bin/bash
set -euo pipefail
cd /app
git clone -q -b main tally.bundle tally
cd tally
cat > /tmp/judge.sh <<'JUDGE'
printf '59m 30s\n' > /tmp/x
output=$(python3 -B -m tally /tmp/x) || exit 125
[ "$output" = "1h 00m" ]
JUDGE
git bisect start main v1.0
git bisect run bash /tmp/judge.sh
git rev-parse refs/bisect/bad > /app/bad-commit.txt
git bisect reset
python3 - <<'PYTHON'
from pathlib import Path

module = Path("tally/output.py")
text = module.read_text()
start = text.index("    minutes = total")
module.write_text(
    text[:start]
    + """    minutes = -(-total // 60)
    return f"{minutes // 60}h {minutes % 60:02d}m"
"""
)
PYTHON
git commit -qam "Carry a full hour"
