"""The ledger must hold the rows that the untouched inputs give."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent))  # at the end: nothing there may stand for Python's own modules
import json  # noqa: E402
import sqlite3  # noqa: E402

from grading import TESTS, Wrong, main, require  # noqa: E402

LEDGER = Path("/app/ledger.db")
QUERIES = {
    "balances": "select customer, name, invoiced, paid, open from balances order by customer",
    "unmatched": "select payment, cents from unmatched order by payment",
}


def check():
    require(LEDGER.is_file() and LEDGER.stat().st_size < 10_000_000, f"{LEDGER} is no small file")
    expected = json.loads((TESTS / "expected.json").read_text("utf-8"))
    for table, query in QUERIES.items():
        try:
            with sqlite3.connect(f"file:{LEDGER}?mode=ro", uri=True) as ledger:
                ledger.set_progress_handler(lambda: 1, 20_000_000)  # a view may never end: stop there
                rows = [list(row) for row in ledger.execute(query).fetchmany(1000)]
        except sqlite3.Error as error:
            raise Wrong(f"{table}: {error}") from None
        for found, row in zip(rows, expected[table], strict=False):
            require(found == row, f"{table}: {found} instead of {row}")
        require(len(rows) == len(expected[table]), f"{table} has {len(rows)} rows instead of {len(expected[table])}")


main(check)
