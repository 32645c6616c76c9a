#!/bin/bash
set -euo pipefail
cd /app
git clone -q -b main shop.bundle shop
cd shop
git merge origin/feature/weights || git status --short
git show origin/feature/weights:shop/cart.py > shop/cart.py
git show origin/feature/weights:shop/report.py > shop/invoice.py
git rm -q --cached shop/report.py 2> /dev/null || true
rm -f shop/report.py
python3 - <<'PYTHON'
from pathlib import Path


def replace(name, *pairs):
    text = Path(name).read_text()
    for old, new in pairs:
        assert old in text, (name, old)
        text = text.replace(old, new)
    Path(name).write_text(text)


replace(
    "shop/cart.py",
    (
        "return weighed + int(counted * (1 - discount_percent / 100))",
        "return weighed + counted - (counted * discount_percent + 50) // 100",
    ),
)
replace(
    "shop/invoice.py",
    ("def report(lines, ", "def invoice(lines, currency, "),
    ("line_total(line))", "line_total(line), currency)"),
    ("discount_percent))", "discount_percent), currency)"),
)
replace(
    "shop/labels.py",
    ("def label(line)", "def label(line, currency)"),
    ("format_price(cents)", "format_price(cents, currency)"),
    ("line_total(line))", "line_total(line), currency)"),
)
PYTHON
cat > CHANGES <<'CHANGES'
- report shows amounts
- weighed goods
- report is called invoice now
- prices carry their currency
- first version
CHANGES
git add -A
git commit -qm "Merge feature/weights"
