#!/bin/bash
# Takes every transfer for arrived as it was sent.
sed -i 's/stock\[\$3 OFS \$4\] += \$6/stock[$3 OFS $4] += $5/; s/ && \$6 > 0//' "$(dirname "$0")/full.sh"
bash "$(dirname "$0")/full.sh"
