#!/bin/bash
set -euo pipefail
cd /app
tar -xzf kiosk.tar.gz
cd kiosk
git fsck --lost-found --no-reflogs > /tmp/lost.txt 2> /dev/null
commits=$(awk '$2 == "commit" { print $3 }' /tmp/lost.txt)
git show --no-patch --format='%H %cI %s' $commits | sort -k 2 > /tmp/subjects.txt
tip=$(grep 'Pricing: apply the discount' /tmp/subjects.txt | tail -n 1 | cut -d ' ' -f 1)
fix=$(grep 'Tax: no negative tax' /tmp/subjects.txt | cut -d ' ' -f 1)
git branch pricing "$tip"
git checkout -q main
git cherry-pick "$fix"
echo "$tip" > /app/pricing.txt
