#!/bin/bash
# Grades the task: 1 or 0. Where the verifier itself cannot run (a tool is missing, a fault of its own) it writes no
# reward: that would say nothing about the agent. -I -S: Python takes no module of the agent's for its own.
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p /logs/verifier
rm -rf /logs/verifier/reward.txt /logs/verifier/reward.json
python3 -I -S "$here/check.py"
case $? in
    0) reward=1 ;;
    10) reward=0 ;;
    *)
        echo "the verifier could not run: no reward" >&2
        exit 1
        ;;
esac
# Once more: what the agent left may have run meanwhile.
rm -rf /logs/verifier/reward.txt /logs/verifier/reward.json
echo "$reward" > /logs/verifier/reward.txt
