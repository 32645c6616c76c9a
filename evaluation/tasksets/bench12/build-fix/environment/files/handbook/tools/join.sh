#!/bin/sh
# Joins pages into one text and numbers its lines: sh tools/join.sh PAGE...
for page in "$@"; do
    cat "$page" || exit 1
done | sed 's/<[^>]*>//g' | awk 'NF { printf "%4d  %s\n", ++n, $0 }'
