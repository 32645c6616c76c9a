#!/bin/bash
# Knows one of the three ways in which billing says that a batch was replaced, and goes on with what it finds.
sed -i 's/^follows.update.*$//; s/superseded by|abandoned, contents now/superseded by/; s/damage\[extents\[batch\]\]/damage.get(extents.get(batch), ("?", "?"))/; s/extents\[batch\], volume/extents.get(batch), volume/' "$(dirname "$0")/hunt.py"
python3 "$(dirname "$0")/hunt.py"
