# Turns a chapter into a page: awk -f tools/render.awk -v title=TITLE common/header.inc chapters/NAME.txt
FNR == 1 { part++ }
part == 1 { gsub(/@TITLE@/, title); print; next }
/^!error/ { print "render: " FILENAME ":" FNR ": error" > "/dev/stderr"; exit 1 }
/^# / { print "<h1>" substr($0, 3) "</h1>"; next }
/^$/ { print "<p>"; next }
{ print }
