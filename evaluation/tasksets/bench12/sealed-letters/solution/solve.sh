#!/bin/bash
set -euo pipefail
cd /app
keys=(harbour marble hazel-34 dune marble-79 elder hazel-garnet birch-20 indigo poppy-14 marble-kestrel nutmeg-34 amber dune-33)
for i in "${!keys[@]}"; do
    python3 open-letter.py $((i + 1)) "${keys[i]}" | tee -a /tmp/notes.txt
done
grep -c 'My dear child' /tmp/notes.txt
heirs=(Agnes Bruno Bruno Edith Dorian Clara Agnes Bruno Bruno Dorian Edith nobody)
mapfile -t things < items.txt
for i in "${!things[@]}"; do
    echo "${things[i]}: ${heirs[i]}"
done > testament.txt
echo "sum: $((34 + 74 + 14 + 33))" >> testament.txt
