#!/bin/bash
# Forgets the changes that the later letters make.
sed -i 's/^heirs=.*/heirs=(Edith Bruno Clara Edith Dorian Felix Agnes Bruno Clara Dorian Edith Felix)/' "$(dirname "$0")/full.sh"
bash "$(dirname "$0")/full.sh"
