#!/bin/bash
set -euo pipefail
cd /app
{ zcat logs/access.log.2.gz; cat logs/access.log.1 logs/access.log; } > /tmp/all.log
grep -cvE ' rid=[0-9a-f]{10}$' /tmp/all.log > /tmp/malformed
grep -E ' rid=[0-9a-f]{10}$' /tmp/all.log > /tmp/complete.log
awk '!seen[$NF]++' /tmp/complete.log > /tmp/once.log
awk -F'"' 'tolower($6) !~ /bot|monitor/' /tmp/once.log > /tmp/people.log
{
    echo "malformed $(cat /tmp/malformed)"
    echo "repeated $(($(wc -l < /tmp/complete.log) - $(wc -l < /tmp/once.log)))"
    echo "machines $(($(wc -l < /tmp/once.log) - $(wc -l < /tmp/people.log)))"
} > summary.txt
python3 - <<'PYTHON'
import re
from urllib.parse import unquote

rows = {}
for line in open("/tmp/people.log"):
    client, rest = line.split(" ", 1)
    target, status, size = re.search(r'"\S+ (\S+) HTTP/1\.1" (\d+) (\S+) ', rest).groups()
    path = unquote(target.split("?")[0]).rstrip("/") or "/"
    row = rows.setdefault(path, [0, 0, set(), 0])
    row[0] += 1
    row[1] += 0 if size == "-" else int(size)
    row[2].add(client)
    row[3] += int(status) >= 500
with open("/app/report.csv", "w") as report:
    print("path,requests,bytes,clients,errors", file=report)
    for path, (requests, size, clients, errors) in sorted(rows.items(), key=lambda item: (-item[1][0], item[0])):
        print(path, requests, size, len(clients), errors, sep=",", file=report)
PYTHON
