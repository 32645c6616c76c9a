"""Builds the ledger: what each customer was invoiced, paid and still owes, in euro cents."""

import csv
import json
import re
import sqlite3
from decimal import ROUND_HALF_UP, Decimal

with open("/app/customers.csv", encoding="utf-8-sig", newline="") as file:
    customers = {row["id"]: row for row in csv.DictReader(file, delimiter=";")}
rates = json.load(open("/app/rates.json"))


def account(customer):
    customer = customer.upper()
    while customers[customer]["merged_into"]:
        customer = customers[customer]["merged_into"]
    return customer


def cents(order):
    text = order["amount"]
    if "," in text:
        text = text.replace(".", "").replace(",", ".")
    rate = Decimal(1)
    if order["currency"] != "EUR":
        rate = Decimal(max((r for r in rates[order["currency"]] if r["from"] <= order["date"]), key=lambda r: r["from"])["rate"])
    return int((Decimal(text) * 100 * rate).quantize(Decimal(1), ROUND_HALF_UP))


orders = {}
for line in open("/app/orders.jsonl"):
    order = json.loads(line)
    orders[order["order"]] = order

invoiced = dict.fromkeys(map(account, customers), 0)
for order in orders.values():
    if order["status"] == "done":
        sign = -1 if order["kind"] == "refund" else 1
        invoiced[account(order["customer"])] += sign * cents(order)

paid = dict.fromkeys(invoiced, 0)
unmatched = []
shop = sqlite3.connect("/app/shop.db")
payments = shop.execute("select id, reference, cents, reversed_by from payments").fetchall()
reversals = {reversed_by for *_, reversed_by in payments if reversed_by}
for number, reference, amount, reversed_by in payments:
    if reversed_by or number in reversals:
        continue
    found = re.search(r"a\d{4}", reference, re.IGNORECASE)
    if found and found[0].upper() in orders:
        paid[account(orders[found[0].upper()]["customer"])] += amount
    else:
        unmatched.append((number, amount))

ledger = sqlite3.connect("/app/ledger.db")
ledger.executescript(
    "create table balances (customer text primary key, name text, invoiced integer, paid integer, open integer);"
    "create table unmatched (payment integer primary key, cents integer);"
)
ledger.executemany(
    "insert into balances values (?, ?, ?, ?, ?)",
    [(c, customers[c]["name"], invoiced[c], paid[c], invoiced[c] - paid[c]) for c in invoiced],
)
ledger.executemany("insert into unmatched values (?, ?)", unmatched)
ledger.commit()
